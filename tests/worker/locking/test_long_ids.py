"""A task id may be any text in UTF-8. Its end survives a store that is away just then."""

import pytest

from celery_dlock import CallSkipped
from tests.support.environments.policies import running_environment, timed
from tests.support.lock_records import held
from tests.support.polling import eventually

IDS = {
    "uuid": "3f1c0a52-7f4e-4c53-a0f6-0b8d4c3b1e55",
    "long": "a" * 1200,
    "very long": "b" * 8000,
    "cyrillic": "я" * 150,
    "long cyrillic": "ж" * 2000,
    "emoji": "\N{SLEEPING FACE}" * 400,
    "quotes": '"\\' * 400,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("long_ids"), concurrency=len(IDS), separate=True) as made:
        yield made


@pytest.fixture
def ended(environment, tasks):
    """One once_per run for each id, whose body returned while the store was away; and then the store is back."""
    made = {text: environment.hold(tasks.once, environment.fresh(), task_id=IDS[text]) for text in IDS}
    environment.lock_server.stop()
    for holding in made.values():
        holding.let_go()
    for holding in made.values():
        environment.wait_for_line(tasks.once.lock_name(holding.n), "could not release", 30)
        assert holding.result.get(timeout=30) == holding.n
    environment.lock_server.start()
    return made


def runs(environment, holding):
    return len(environment.history(what="in", n=holding.n))


@pytest.mark.core
def test_success_under_any_task_id_uses_the_name_if_the_store_was_away_at_its_end(environment, tasks, ended):
    """The mark is written as soon as the store is back; nothing is left to the 15 s of a lingering release."""
    eventually(lambda: not held(environment.lock_server, 2), 5, message="still locked")
    again = {text: tasks.once.delay(holding.n) for text, holding in ended.items()}
    outcomes = {text: timed(lambda r=result: r.get(timeout=10))[1] for text, result in again.items()}
    assert {text: type(outcome) for text, outcome in outcomes.items()} == dict.fromkeys(IDS, CallSkipped)
    assert {text: runs(environment, holding) for text, holding in ended.items()} == dict.fromkeys(IDS, 1)
