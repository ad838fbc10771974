"""The operations that a model is made of: one protocol, several implementations.

Nothing here imports Triton or a compiler at import time.
"""
