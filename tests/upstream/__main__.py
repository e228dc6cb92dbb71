"""Run the reproductions that are named, or all. The exit status is 1 if one of the faults is mended."""

from __future__ import annotations

import importlib
import sys

from tests.upstream.environment import reproductions


def main(names: list[str]) -> int:
    mended = 0
    for name in names or reproductions():
        seen = importlib.import_module(f"tests.upstream.{name}").fault()
        print(f"{name}: {seen or 'MENDED'}", flush=True)  # noqa: T201  # a program
        mended += not seen
    return 1 if mended else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
