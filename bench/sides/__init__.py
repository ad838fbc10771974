"""One small process for each side of a comparison, all with the same commands.

These modules run in the peer's own interpreter: apart from the peer they import the standard library and `bench.sides`.
"""
