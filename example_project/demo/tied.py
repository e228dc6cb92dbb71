"""Run a command that dies with its parent: `python tied.py PARENT_PID COMMAND...`.

A program and not a `preexec_fn`, which is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # kept by exec, not by fork
    if os.getppid() != parent:  # the parent died before this call
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
