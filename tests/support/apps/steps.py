"""Named steps at which a test can have the very process that reaches them killed.

Redis' key `kill:<step>`, in the result backend's database, names whom to kill the next time that the step is reached:
"child", the process that reaches it, or "worker", the whole worker.
"""

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from tests.support.apps.marks import marks_client


def step(name: str) -> None:
    """Die here, if the test says so; once."""
    with marks_client() as client:
        whom = client.getdel(f"kill:{name}")
        if whom is None:
            return
        client.set(f"killed:{name}", os.getpid())
    if whom == b"worker":
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
        step(f"{name}:before")
        answer = original(*args, **kwargs)
        if answered(answer):
            step(f"{name}:after")
        return answer

    setattr(owner, method, run)
