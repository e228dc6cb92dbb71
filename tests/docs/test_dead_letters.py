"""The recipe of the documentation for dead letters, applied to one."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from celery_dlock.store.model import Identity
from tests.conftest import WORKERS
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.stores import name_in, store_at

PAGE = ROOT / "docs/how-to/handle-dead-letters-and-unknown-outcomes.md"


def recipe(app: object) -> dict[str, Any]:
    """The functions of that page, for this app."""
    document = Sybil(parsers=[PythonCodeBlockParser()]).parse(PAGE)
    blocks = [str(example.parsed) for example in document.examples()]
    (block,) = [block for block in blocks if "def publish_again" in block]
    found: dict[str, Any] = {"app": app}
    exec(block.partition("\nstore = redis")[0], found)
    return found


@pytest.mark.invariant("dead-letter-can-be-replayed")
@pytest.mark.parametrize(("serializer", "compression"), [("json", None), ("pickle", "zlib")], ids=["plain", "binary"])
def test_a_dead_letter_that_is_published_by_hand_runs(
    tmp_path: Path, request: pytest.FixtureRequest, serializer: str, compression: str | None
) -> None:
    with running_environment(tmp_path) as environment:
        request.node.stash[WORKERS] = environment.workers
        task, n = environment.tasks.parcel, environment.fresh()
        with environment.hold(environment.tasks.parcel, n):
            (result,) = environment.park(task, n, serializer=serializer, compression=compression)
            store = store_at(environment.app.conf.dlock_url, timeout=3)
            store.remove_waiter(
                name_in(environment.keys(task, n)), Identity(result.id).digest, uuid4().hex, dead_letter=True
            )
            store.close()
        told = recipe(environment.app)
        with environment.lock_server.client(2, decode_responses=False) as client:
            ((key, field, whose, message),) = told["dead_letters"](client)
            assert whose == f'["{task.name}", "{result.id}"]'
            assert key.decode() == environment.keys(task, n).named("dead")
            eventually(lambda: result.state == "QUEUED")
            told["publish_again"](message)
            client.hdel(key, field)
            assert result.get(timeout=20) == n
            assert list(told["dead_letters"](client)) == []
