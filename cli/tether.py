"""Run a command that dies with its parent: `python tether.py PARENT_PID COMMAND...`.

The kernel kills the command when the parent ends, however the parent ends. This stands in a process
of its own because nothing may run between fork and exec in a program that has threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(f"{command[0]}: the parent has ended")
    os.execvp(command[0], command)  # noqa: S606


main()
