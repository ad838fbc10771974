"""These run in a process of their own, which `../test_interpreted.py` starts with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
