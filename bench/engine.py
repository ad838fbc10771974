"""Headrace's engine beside vLLM, llama.cpp and `transformers` on this machine: `python bench/engine.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    sys.path[0] = str(ROOT)  # as a script this folder comes first, and `engine` would be this very file
    sys.path.insert(1, str(ROOT / "client"))

    from bench.command import main

    main()
