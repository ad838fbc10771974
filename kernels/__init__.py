"""The operations that a model is made of: one protocol, several implementations.

Nothing here imports torch, Triton or a compiler at import time.
"""

from __future__ import annotations

from importlib import metadata


class NameClash(RuntimeError):
    """Another distribution installs a package named `kernels` into this environment."""


def ensure_ours() -> None:
    """Raise NameClash if Hugging Face's unrelated `kernels` is installed: each would shadow the other."""
    other = next(iter(metadata.distributions(name="kernels")), None)
    if other is not None:
        raise NameClash(
            f"The package 'kernels' {other.version} of Hugging Face is installed in this environment, and its import "
            "name is the same as that of Headrace's own package. Run 'pip uninstall kernels', reinstall "
            "headrace-server, or give Headrace an environment of its own."
        )
