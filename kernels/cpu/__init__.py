"""The CPU library: C++ without torch, built at install time, loaded by ctypes.

Importing this package loads neither torch nor the library.
"""
