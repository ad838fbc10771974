"""The command as the user started it, for the hints that name it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys


def command(name: str = "headrace") -> str:
    """What to type for `name`: itself if the shell finds this program by it, else the way this process was started."""
    started = sys.argv[0]
    if os.path.basename(started) != name:
        return f"{shlex.quote(sys.executable)} -m cli" if os.path.basename(started) == "__main__.py" else name
    found = shutil.which(name)
    if not os.path.exists(started) or (found is not None and os.path.samefile(found, started)):
        return name
    return shlex.quote(started)
