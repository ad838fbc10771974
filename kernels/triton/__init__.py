"""Kernels for GPUs, written in Triton: one source for NVIDIA and AMD.

Importing this package loads neither torch nor Triton. `device` holds what runs on the GPU, the modules beside it
what runs on the host.
"""
