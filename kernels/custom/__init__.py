"""Operations of one's own, from CUDA sources: `from kernels.custom import CustomOp`."""

from kernels.custom.errors import (
    ArgumentError,
    CompileFailed,
    CustomOpError,
    EmulationError,
    NoCompiler,
    ResourceError,
    SignatureError,
    SourceError,
)
from kernels.custom.op import CustomOp
from kernels.custom.resources import Resources

__all__ = [
    "ArgumentError",
    "CompileFailed",
    "CustomOp",
    "CustomOpError",
    "EmulationError",
    "NoCompiler",
    "ResourceError",
    "Resources",
    "SignatureError",
    "SourceError",
]
