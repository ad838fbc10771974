"""Which device a model is meant for, without torch: importing it takes seconds, and the CPU library needs none."""

from __future__ import annotations

import ctypes
import functools


def is_cpu(device: str) -> bool:
    """Whether a configured device means the CPU here. `auto` is the GPU if there is one that torch can use."""
    if device != "auto":
        return device.partition(":")[0] == "cpu"
    if not _driver_lists_gpus():
        return True
    import torch

    return not torch.cuda.is_available()


@functools.cache
def _driver_lists_gpus() -> bool:
    """Whether NVIDIA's driver is here and has a GPU for this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
