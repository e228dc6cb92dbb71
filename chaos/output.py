"""The output of the chaos programs."""

import sys


def say(line: str) -> None:
    """Write a line at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
