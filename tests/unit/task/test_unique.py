"""Claims of published messages: what is taken back if the store fails."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from celery_dlock.errors import ReplyLost, ScriptStopped, StoreRefused
from celery_dlock.task import unique


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize(
    ("error", "taken_back"),
    [(ScriptStopped("NOPERM pexpire"), True), (ReplyLost("cut"), True), (StoreRefused("NOAUTH"), False)],
    ids=["script stopped", "reply lost", "refused"],
)
def test_claim_that_may_have_been_stored_is_taken_back(error: Exception, taken_back: bool) -> None:
    asked: list[tuple[str, str]] = []

    def claim(_: object) -> NoReturn:
        raise error

    rollback = SimpleNamespace(take_back=lambda name, request: asked.append((name, request)))
    runtime: Any = SimpleNamespace(lock_store=SimpleNamespace(claim=claim), claim_rollback=rollback)
    call: Any = SimpleNamespace(name="n", request="r")
    with pytest.raises(type(error)):
        unique._claim(runtime, [call])
    assert asked == [("n", "r")] * taken_back
