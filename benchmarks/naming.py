"""The time to compute a lock name from large arguments: `python benchmarks/naming.py`, about 10 seconds.

The name of all arguments and the name by `key="{report_id}"` are compared with `json.loads` of the same arguments,
which Celery does for each message. The three alternate, and the shortest time of each counts.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.tables import table
from celery_dlock.keys.key_spec import KeySpec

REPORT = 7


def rows(count: int) -> list[dict[str, Any]]:
    """Return a table as tasks get it from a database."""
    return [
        {"id": n, "email": f"user{n}@example.com", "total": n / 7, "tags": ["new", "eu"], "active": True, "note": None}
        for n in range(count)
    ]


CASES = {
    "1,000 characters": "x" * 1_000,
    "1,000,000 characters": "x" * 1_000_000,
    "1,000 numbers": list(range(1_000)),
    "1,000 rows": rows(1_000),
    "10,000 rows": rows(10_000),
}


def task(report_id: int, data: Any) -> None: ...


def shortest(kinds: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, float]:
    """Return the shortest time of each kind in microseconds; the kinds alternate for this long."""
    best = dict.fromkeys(kinds, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for kind, call in kinds.items():
            started = time.perf_counter()
            call()
            best[kind] = min(best[kind], (time.perf_counter() - started) * 1e6)
    return best


def main() -> int:
    """Print the table."""
    signature = inspect.signature(task)
    whole = KeySpec("benchmarks.naming", signature, None, "task")
    keyed = KeySpec("benchmarks.naming", signature, "{report_id}", "task")
    found = []
    for case, data in CASES.items():
        args = (REPORT, data)
        text = json.dumps(args)
        best = shortest(
            {
                "all": lambda args=args: whole.name_of(args, {}),  # type: ignore[misc]  # mypy infers no default's type
                "key": lambda args=args: keyed.name_of(args, {}),  # type: ignore[misc]  # mypy infers no default
                "json": lambda text=text: json.loads(text),  # type: ignore[misc]  # mypy infers no default
            }
        )
        ratio = f"{best['all'] / best['json']:.1f}"
        found.append([case, f"{best['all']:,.0f}", f"{best['key']:,.0f}", f"{best['json']:,.0f}", ratio])
    print(table(["second argument", "all arguments, us", "key=, us", "json.loads, us", "all / loads"], found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
