"""Named steps at which a test can have the very process that reaches them killed.

Redis' key `kill:<step>`, in the result backend's database, names the process to kill when the step is reached next.
"child" is the process that reaches it, "worker" the whole worker.
"""

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.support.apps.marks import marks_client

#: Called before a whole worker dies at the step of this name, with the arguments of the method that has the step.
BEFORE_WORKER_DIES: dict[str, Callable[..., None]] = {}


def step(name: str, *args: Any) -> None:
    """Die here, if the test says so; once."""
    with marks_client() as client:
        whom = client.getdel(f"kill:{name}")
        if whom is None:
            return
        client.set(f"killed:{name}", os.getpid())
    if whom == b"worker":
        BEFORE_WORKER_DIES.get(name, lambda *_: None)(*args)
        os.kill(os.getsid(0), signal.SIGKILL)  # the main process leads the session that the test made for it
    os.kill(os.getpid(), signal.SIGKILL)


def stepped(
    owner: Any,
    method: str,
    name: str,
    asked: Callable[..., bool] = lambda *_: True,
    answered: Callable[[Any], bool] = lambda _: True,
) -> None:
    """Make steps `<name>:before` and `<name>:after` of a method.

    Args:
        asked: says by its arguments which calls have these steps.
        answered: ... and by its answer, which calls have the second.
    """
    original = getattr(owner, method)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not asked(*args):
            return original(*args, **kwargs)
        step(f"{name}:before", *args)
        answer = original(*args, **kwargs)
        if answered(answer):
            step(f"{name}:after", *args)
        return answer

    setattr(owner, method, run)


def parks(_store: Any, _keys: Any, _acquisition: str, _ttl_ms: int, request: Any) -> bool:
    """Return whether this call of `acquire` parks its message."""
    return request.queue is not None and bool(request.queue.entry)


def takes_grant(_store: Any, _keys: Any, _acquisition: str, _ttl_ms: int, request: Any) -> bool:
    """Return whether this call of `acquire` takes the lock by a grant."""
    return request.queue is not None and not request.queue.entry and bool(request.queue.grant_id)


def recorded_post(account: str, number: int) -> int:
    """Record the start and the end of a body in the result backend's database, with the step `body` between them.

    The body waits for up to 30 s while its gate is closed.
    """
    with marks_client() as client:
        client.rpush(f"runs:{account}", json.dumps(["in", number, os.getpid()]))
        end = time.monotonic() + 30
        while client.exists(f"gate:{account}:{number}") and time.monotonic() < end:
            time.sleep(0.01)
        step("body")
        client.rpush(f"runs:{account}", json.dumps(["out", number, os.getpid()]))
    return number
