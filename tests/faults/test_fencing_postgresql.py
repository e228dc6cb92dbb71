"""Real late holders, and PostgreSQL under the statements of docs/how-to/use-fencing-tokens.md."""

import threading

import pytest

from celery_dlock import LockLost
from tests.support.apps.fencing_patterns import SET_BALANCE, claim, write_fenced
from tests.support.apps.fencing_resources import SAME, SQL, create, open_account, open_database, stored
from tests.support.environments.fencing import running_fencing_environment
from tests.support.polling import eventually
from tests.support.postgresql import running_postgresql

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def place():
    with running_postgresql() as url:
        create(url)
        yield url


@pytest.fixture(scope="module")
def outcomes(place, tmp_path_factory):
    with running_fencing_environment(tmp_path_factory.mktemp("fencing"), dict.fromkeys(SQL, place)) as fencing:
        return fencing.play("paused")


@pytest.mark.parametrize("kind", SQL)
def test_the_write_of_a_holder_that_comes_late_is_refused(outcomes, kind):
    outcome = outcomes[kind, True]
    assert outcome.late_words == ["sure", "refused"]
    assert outcome.next_words == ["sure", "wrote 1", "wrote 2"]
    assert outcome.value == ((2, 2) if kind == "several rows" else 2)
    assert outcome.fence == outcome.next_token > outcome.late_token


@pytest.mark.parametrize("kind", SQL)
def test_without_tokens_it_overwrites(outcomes, kind):
    """The control: in the same schedule, with one number for every writer."""
    outcome = outcomes[kind, False]
    assert outcome.late_words == ["sure", "wrote -1"]
    assert outcome.value == ((-1, 3) if kind == "several rows" else -1)
    assert outcome.fence == SAME


def waits_for_a_lock(db):
    return db.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (1,)


class Beside(threading.Thread):
    """Runs `work` on a connection of its own, and keeps what it raised."""

    def __init__(self, place, work):
        super().__init__()
        self.place, self.work, self.error = place, work, None
        self.start()

    def run(self):
        with open_database(self.place) as db:
            try:
                self.work(db)
            except LockLost as error:
                self.error = error


def test_a_late_write_that_waits_for_the_row_compares_again_when_it_gets_it(place):
    """READ COMMITTED: it looked when the fence was still 0."""
    open_account(place, "row")
    late = {"id": "row", "balance": -1, "token": 1}
    with open_database(place) as holder, open_database(place) as watch:
        holder.execute(SET_BALANCE, {"id": "row", "balance": 2, "token": 2})
        beside = Beside(place, lambda db: write_fenced(db, SET_BALANCE, **late))
        eventually(lambda: waits_for_a_lock(watch))
        holder.commit()
        beside.join(10)
    assert isinstance(beside.error, LockLost)
    assert stored("a row", place, "row") == (2, 2)


def test_a_claim_keeps_other_holders_out_until_its_transaction_ends(place):
    with open_database(place) as late, open_database(place) as watch:
        claim(late, "claimed", 1)
        beside = Beside(place, lambda db: (claim(db, "claimed", 2), db.commit()))
        eventually(lambda: waits_for_a_lock(watch))
        late.commit()
        beside.join(10)
        assert beside.error is None
        with pytest.raises(LockLost):
            claim(late, "claimed", 1)
