"""Late holders, and resources that refuse their writes: the patterns of docs/how-to/use-fencing-tokens.md."""

import inspect
import sqlite3
from contextlib import closing
from urllib.error import HTTPError

import pytest
import redis

from celery_dlock import LockLost
from tests.support.apps import fencing_patterns
from tests.support.apps.fencing_patterns import claim
from tests.support.apps.fencing_resources import (
    SAME,
    SQL,
    WRITES,
    create,
    open_account,
    open_database,
    served_fenced,
    stored,
)
from tests.support.environments.fencing import CAUSES, running_fencing_environment
from tests.support.processes import ROOT

#: The last of two writes by the holder after the late one; one of the patterns posts for each.
ITS_VALUE = {"several rows": (2, 2)}
BOTH_VALUES = {"several rows": (-1, 3)}


@pytest.fixture(scope="module")
def fencing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fencing")
    create(str(folder / "sqlite"))
    with served_fenced() as http:
        places = dict.fromkeys(SQL, str(folder / "sqlite")) | {"a Redis value": None, "an HTTP API": http}
        with running_fencing_environment(folder, places) as made:
            yield made


@pytest.fixture(scope="module", params=CAUSES)
def outcomes(fencing, request):
    return fencing.play(request.param)


@pytest.mark.invariant("stopped-process-keeps-or-reports")
@pytest.mark.parametrize("kind", WRITES)
def test_the_write_of_a_holder_that_comes_late_is_refused(outcomes, kind):
    outcome = outcomes[kind, True]
    assert outcome.late_words == ["sure", "refused"]
    assert outcome.next_words == ["sure", "wrote 1", "wrote 2"]
    assert outcome.value == ITS_VALUE.get(kind, 2)
    assert outcome.fence == outcome.next_token > outcome.late_token


@pytest.mark.parametrize("kind", WRITES)
def test_without_tokens_it_overwrites(outcomes, kind):
    """The control: in the same schedule, with one number for every writer."""
    outcome = outcomes[kind, False]
    assert outcome.late_words == ["sure", "wrote -1"]
    assert outcome.value == BOTH_VALUES.get(kind, -1)
    assert outcome.fence == SAME


@pytest.mark.parametrize("kind", WRITES)
def test_without_a_token_nothing_is_written(fencing, kind):
    """Neither by a direct call, nor by a body that runs without its lock: their token is None."""
    name = f"no-token-{kind}".replace(" ", "-")
    if kind in SQL:
        open_account(fencing.places[kind], name)
    WRITES[kind](fencing.places[kind], name, 5, 7)
    with pytest.raises((LockLost, sqlite3.IntegrityError, redis.DataError, HTTPError)):
        WRITES[kind](fencing.places[kind], name, 6, None)
    assert stored(kind, fencing.places[kind], name) == ((5, 1) if kind == "several rows" else 5, 7)


def test_a_claim_keeps_other_holders_out_until_its_transaction_ends(fencing):
    place = fencing.places["several rows"]
    with open_database(place) as first, closing(sqlite3.connect(place, timeout=0.1)) as second:
        claim(first, "claimed", 1)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            claim(second, "claimed", 2)
        first.commit()
        claim(second, "claimed", 2)
        second.commit()
        with pytest.raises(LockLost):
            claim(first, "claimed", 1)


def test_the_guide_shows_what_is_tried_here():
    guide = (ROOT / "docs/how-to/use-fencing-tokens.md").read_text()
    described = {"OPEN_OR_SET", "put_fenced", "Fenced"}  # in words, without code
    code = {name: value for name, value in vars(fencing_patterns).items() if not name.startswith("_")}
    shown = [
        value if isinstance(value, str) else inspect.getsource(value)
        for name, value in code.items()
        if name not in described
        if isinstance(value, str) or getattr(value, "__module__", "") == fencing_patterns.__name__
    ]
    assert len(shown) == 6
    assert [text for text in shown if text not in guide] == []
