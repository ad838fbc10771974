"""Launches a cubin on a GPU through the driver, on torch's current stream. Needs libcuda, no compiler."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from kernels.custom.errors import CustomOpError
from kernels.custom.resources import Image

_PLAIN_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that needs no leave."""
_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""


class DriverError(CustomOpError):
    """The CUDA driver refused to load or launch a kernel."""


class DeviceKernel:
    """A kernel that a device's context has loaded once it is launched there."""

    def __init__(self, image: Image, dynamic_shared_bytes: int, driver: str = "libcuda.so.1") -> None:
        """`driver` is the library with CUDA's driver API."""
        self._image = image
        self._dynamic_shared_bytes = dynamic_shared_bytes
        self._driver = _open_driver(driver)
        self._lock = threading.Lock()
        self._functions: dict[int, ctypes.c_void_p] = {}

    def launch(
        self, device: torch.device, blocks: int, threads: int, arguments: Sequence[ctypes._SimpleCData[Any]]
    ) -> None:
        """Queue it: `blocks` of `threads`, with the arguments in the kernel's own types and order."""
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            self.launch_on(torch.cuda.current_device(), stream, blocks, threads, arguments)

    def launch_on(
        self, index: int, stream: int, blocks: int, threads: int, arguments: Sequence[ctypes._SimpleCData[Any]]
    ) -> None:
        """Queue it on a stream of the device `index`, whose context is current."""
        function = self._function(index)
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(one) for one in arguments])
        shared_bytes = self._dynamic_shared_bytes
        code = self._driver.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), pointers, None
        )
        self._check(code)

    def _function(self, index: int) -> ctypes.c_void_p:
        """In the context that is current; it stays loaded as long as the process lives."""
        with self._lock:
            if index not in self._functions:
                module, function = ctypes.c_void_p(), ctypes.c_void_p()
                self._check(self._driver.cuModuleLoadData(ctypes.byref(module), self._image.cubin))
                symbol = self._image.kernel.symbol.encode()
                self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, symbol))
                if self._dynamic_shared_bytes > _PLAIN_SHARED_BYTES:
                    self._check(
                        self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, self._dynamic_shared_bytes)
                    )
                self._functions[index] = function
            return self._functions[index]

    def _check(self, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            told = text.value.decode() if text.value else f"error {code}"
            raise DriverError(f"{self._image.kernel.symbol} ({self._image.architecture}): {told}")


def choose_image(images: Sequence[Image], capability: tuple[int, int]) -> Image | None:
    """The newest image that a device of this capability runs: the same major version, and no newer minor one."""
    fitting: list[tuple[int, Image]] = []
    for image in images:
        number = image.architecture.removeprefix("sm_")
        major, minor = int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])
        exact = number[-1] in "af"
        if major == capability[0] and (minor == capability[1] if exact else minor <= capability[1]):
            fitting.append((minor, image))
    return max(fitting, key=lambda one: one[0])[1] if fitting else None


def _open_driver(library: str) -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
    pointer = ctypes.c_void_p
    unsigned = ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    return driver
