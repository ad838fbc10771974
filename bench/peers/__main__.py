"""Make the peers' environments; what is there already stays: `make bench-peers`."""

from __future__ import annotations

import sys

from bench.peers import llama, vllm
from bench.peers.place import HOME, PeerFailed, say
from engine.config import EngineConfig
from engine.model import open_files
from engine.model.gguf_file import GGUFFile
from settings import get_settings


def main() -> None:
    """Make each peer, then say what is missing; exit status 1 if one can't run."""
    HOME.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, make in (("vLLM", vllm.install), ("llama.cpp", _install_llama)):
        try:
            make()
        except PeerFailed as failure:
            failed.append(f"{name}: {failure}")
    for gap in [*failed, *vllm.missing(), *llama.missing()]:
        say(f"missing: {gap}")
    if failed:
        sys.exit(1)
    say(f"the peers are in {HOME}; measure with `python bench/engine.py`")


def _install_llama() -> None:
    settings = get_settings()
    files = open_files(EngineConfig(model=settings.model.model_path, cache=settings.cache))
    if not isinstance(files, GGUFFile):
        raise PeerFailed(f"its models are made from a GGUF file, and {settings.model.model_path} is a directory")
    llama.install(files.files[0])


if __name__ == "__main__":
    main()
