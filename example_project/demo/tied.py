"""Runs a command whose life is tied to its parent's: `python tied.py PARENT_PID COMMAND...`.

A program of its own, and not a `preexec_fn`, which may not be used once threads run.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # exec keeps it, a fork does not
    if os.getppid() != parent:  # it died before we could ask
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
