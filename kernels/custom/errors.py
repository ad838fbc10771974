"""What can be wrong with a custom operation. Each message says what to change."""

from __future__ import annotations


class CustomOpError(ValueError):
    """A custom operation that can't be made, or can't be called so."""


class SourceError(CustomOpError):
    """The source holds no kernel that could be meant, or several."""


class CompileFailed(CustomOpError):
    """A compiler refused the source."""


class NoCompiler(CustomOpError):
    """Nothing on this machine compiles the source for the device that is asked for."""


class SignatureError(CustomOpError):
    """The signature can't be read, or isn't that of the kernel."""


class ResourceError(CustomOpError):
    """The kernel takes more registers, stack or shared memory than it may."""


class ArgumentError(CustomOpError):
    """A call with a shape, type, device or number of arguments that the signature doesn't have."""


class EmulationError(CustomOpError):
    """The kernel did on the CPU what it must not do: an access outside its tensors, barriers that never meet."""
