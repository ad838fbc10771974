"""A CUDA kernel of one's own as an operation of torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.custom.compilers import find_compiler, find_cpp
from kernels.custom.emulator import MOST_THREADS, Emulator
from kernels.custom.errors import ArgumentError, CompileFailed, CustomOpError, NoCompiler, SignatureError
from kernels.custom.launch import DeviceKernel, choose_image
from kernels.custom.resources import Image, Resources, check_resources, make_image
from kernels.custom.signature import Number, Sizes, parse_signature, signature_of
from kernels.custom.source import read_source

log = logging.getLogger(__name__)

NAMESPACE = "headrace_custom"
"""Of the operations in `torch.ops`."""
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""Compiled for on a machine without a GPU, so that what they would refuse is seen."""
MOST_BLOCKS = 2**31 - 1
MOST_LISTED_SHARED_BYTES = 227 * 1024
"""Of a block, on the GPU that has the most."""

_numbers = itertools.count()


class CustomOp:
    """A kernel from a `.cu` file: compiled and checked here, called with tensors.

    On a GPU the compiled kernel is launched; on a CPU the same source runs under an emulator, which is slow and catches
    accesses outside of the tensors. Call it as a function: what the kernel reads, then the numbers that the signature
    can't tell from shapes. `torch_op` is the operation of `torch.library` behind it.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        kernel: str | None = None,
        signature: str | None = None,
        threads: int = 256,
        blocks: str | None = None,
        shared_bytes: int = 0,
        architectures: Sequence[str] | None = None,
        options: Sequence[str] = (),
        most_spill_bytes: int = 0,
        reference: Callable[..., Any] | None = None,
    ) -> None:
        """Raises a `CustomOpError` that says what to change.

        `kernel` names one of several. `signature` (`kernels.custom.signature`) may be left out of a kernel
        `(const T* x, T* y, int n)` that goes over elements. `threads` of a block; there is one block for each `blocks`,
        a dimension of the signature, or without it one thread for each element of the first result. `shared_bytes` is
        dynamic shared memory. `architectures` (sm_90) are by default those of this machine's GPUs. `options` go to the
        CUDA compiler. `reference` is the same in torch: it serves where nothing can be compiled.
        """
        self._source = read_source(Path(source), kernel)
        self._place = f"{self._source.path.name}: {self.name}"
        with _told_of(self._source.path.name):
            self.signature = signature_of(self._source.kernel) if signature is None else parse_signature(signature)
            self.signature.check_declared(self._source.kernel)
        if blocks is not None and blocks not in self.signature.dimensions:
            dimensions = ", ".join(sorted(self.signature.dimensions))
            raise SignatureError(f"{self._place}: blocks={blocks!r} is no dimension: choose one of {dimensions}")
        if not 1 <= threads <= MOST_THREADS:
            raise CustomOpError(f"{self._place}: a block has 1 to {MOST_THREADS} threads, not {threads}")
        if not 0 <= shared_bytes <= MOST_LISTED_SHARED_BYTES:
            raise CustomOpError(
                f"{self._place}: a block has 0 to {MOST_LISTED_SHARED_BYTES} bytes of shared memory, not {shared_bytes}"
            )
        self._threads, self._blocks, self._shared_bytes = threads, blocks, shared_bytes
        self._reference = reference
        self._images = self._compile(architectures or _machine_architectures(), options, most_spill_bytes)
        self._emulator = self._emulate()
        if not self._images and self._emulator is None and reference is None:
            raise NoCompiler(
                f"{self._place}: there is no compiler, for GPUs or for the CPU. Install the CUDA toolkit (nvcc) or "
                "'pip install nvidia-cuda-nvrtc', and g++ to run it on the CPU, or give CustomOp(..., reference=...), "
                "the same in torch"
            )
        self._device_kernels: dict[str, DeviceKernel] = {}
        self.torch_op = self._register()

    @property
    def name(self) -> str:
        """The kernel's."""
        return self._source.kernel.name

    @property
    def resources(self) -> dict[str, Resources]:
        """What it takes, by architecture; empty if there was no CUDA compiler."""
        return {image.architecture: image.resources for image in self._images}

    def __call__(self, *arguments: Tensor | Number) -> Any:
        """The tensor that the kernel fills, or a tuple of them. Raises ArgumentError for what doesn't fit."""
        with _told_of(self._place):
            self._check_call(arguments)
        return self.torch_op(*arguments)

    def obstacle(self, device: torch.device) -> str | None:
        """Why neither the kernel nor its reference can run on `device`; None if one can."""
        if self._reference is not None or device.type == "meta":
            return None
        if device.type == "cpu":
            return (
                None if self._emulator is not None else "it can't run on a CPU: there is no C++ compiler that takes it"
            )
        if device.type != "cuda" or torch.version.hip is not None:
            return f"it runs on NVIDIA's GPUs and on CPUs, not on {device}"
        if not self._images:
            return "it wasn't compiled: install the CUDA toolkit (nvcc) or 'pip install nvidia-cuda-nvrtc'"
        if choose_image(self._images, torch.cuda.get_device_capability(device)) is None:
            return f"it was compiled for {', '.join(self.resources)} and not for {device}"
        return None

    def _compile(
        self, architectures: Sequence[str], options: Sequence[str], most_spill_bytes: int
    ) -> tuple[Image, ...]:
        """For each architecture; nothing without a compiler."""
        compiler = find_compiler()
        if compiler is None:
            log.warning(
                "%s isn't compiled for GPUs, and its registers and layout there are unchecked: there is neither nvcc "
                "nor NVRTC. Install the CUDA toolkit, or 'pip install nvidia-cuda-nvrtc'", self._place
            )  # fmt: skip
            return ()
        images: list[Image] = []
        for architecture in architectures:
            with _told_of(self._place):
                built = compiler.compile(self._source.path.absolute(), architecture, options)
                image = make_image(architecture, built, self.name, self._shared_bytes)
                self.signature.check_layout(self.name, image.kernel.parameters)
                check_resources(image, self.name, self._threads, most_spill_bytes)
            images.append(image)
        return tuple(images)

    def _emulate(self) -> Emulator | None:
        """For the CPU; None without a compiler, or if it doesn't take what the CUDA compiler took."""
        cpp = find_cpp()
        if cpp is None:
            log.warning("%s can't run on the CPU: there is no C++ compiler. Install g++", self._place)
            return None
        try:
            return Emulator(self._source, self.signature, cpp)
        except CompileFailed as error:
            if not self._images:
                raise
            log.warning("%s can't run on the CPU, whose emulator doesn't have all of CUDA: %s", self._place, error)
            return None

    def _register(self) -> Any:
        name = f"{self.name}_{next(_numbers)}"
        definition = torch.library.custom_op(
            f"{NAMESPACE}::{name}", self._run, mutates_args=(), schema=self.signature.schema
        )
        definition.register_fake(self._fake)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def _fake(self, *arguments: Any) -> Any:
        return _one_or_all(self.signature.empty_outputs(arguments[: len(self.signature.inputs)]))

    def _run(self, *arguments: Any) -> Any:
        inputs = [tensor.contiguous() for tensor in arguments[: len(self.signature.inputs)]]
        given = arguments[len(inputs) :]
        device = inputs[0].device
        with _told_of(self._place):
            sizes = self.signature.bind(inputs)
            numbers = self.signature.numbers(sizes, given)
        runs = self._runner(device)
        if runs is None:
            if self._reference is None:
                raise NoCompiler(f"{self._place}: {self.obstacle(device)}")
            return self._reference(*inputs, *given)
        outputs = self.signature.empty_outputs(inputs)
        blocks = self._block_count(sizes, outputs[0])
        if blocks > 0:
            runs(self._in_order(inputs, outputs), numbers, blocks)
        return _one_or_all(outputs)

    def _runner(self, device: torch.device) -> Callable[[list[Tensor], dict[str, Number], int], None] | None:
        if device.type == "cpu" and self._emulator is not None:
            emulator = self._emulator
            return lambda tensors, numbers, blocks: emulator.run(
                tensors, numbers, blocks, self._threads, self._shared_bytes
            )
        if device.type == "cuda" and torch.version.hip is None:
            image = choose_image(self._images, torch.cuda.get_device_capability(device))
            if image is not None:
                return lambda tensors, numbers, blocks: self._launch(image, tensors, numbers, blocks)
        return None

    def _launch(self, image: Image, tensors: list[Tensor], numbers: dict[str, Number], blocks: int) -> None:
        if image.architecture not in self._device_kernels:
            self._device_kernels[image.architecture] = DeviceKernel(image, self._shared_bytes)
        arguments = self.signature.arguments([tensor.data_ptr() for tensor in tensors], numbers)
        self._device_kernels[image.architecture].launch(tensors[0].device, blocks, self._threads, arguments)

    def _in_order(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """As the kernel takes them."""
        read, filled = iter(inputs), iter(outputs)
        return [next(read if one.const else filled) for one in self.signature.parameters if one.shape is not None]

    def _block_count(self, sizes: Sizes, first: Tensor) -> int:
        if self._blocks is None:
            blocks = -(-first.numel() // self._threads)
        else:
            blocks = 1
            for size in sizes[self._blocks]:
                blocks *= size
        if blocks > MOST_BLOCKS:
            raise ArgumentError(f"{self._place}: it would take {blocks} blocks, and a GPU starts at most {MOST_BLOCKS}")
        return blocks

    def _check_call(self, arguments: Sequence[Any]) -> None:
        count = len(self.signature.inputs)
        if not all(isinstance(one, Tensor) for one in arguments[:count]):
            raise ArgumentError(f"it takes {count} tensors, then its numbers: {self.signature}")
        sizes = self.signature.bind(arguments[:count])
        self.signature.numbers(sizes, arguments[count:])


@contextmanager
def _told_of(place: str) -> Iterator[None]:
    """Puts the place in front of what is raised inside, unless its file is named there already."""
    try:
        yield
    except CustomOpError as error:
        if str(error).startswith(place.split(":", maxsplit=1)[0]):
            raise
        raise type(error)(f"{place}: {error}") from error.__cause__


def _one_or_all(outputs: list[Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _machine_architectures() -> tuple[str, ...]:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ARCHITECTURES
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities))
