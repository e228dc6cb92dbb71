"""The answers of several servers, merged into one."""

from typing import Any

import pytest

from celery_dlock.store.holder_model import Holder
from celery_dlock.store.model import Acquired, Duplicate, Held, Tombstoned, Unknown, Used
from celery_dlock.store.operator_model import RunView
from celery_dlock.store.redlock.voting import (
    NoMajority,
    agreed_seed,
    best_known,
    majority_holder,
    majority_of,
    outcome,
    renewed,
)


def won(token: int, seed: str = "", *, crash: bool = False) -> Acquired:
    return Acquired(token, 1.0, token, seed, crash)


def holder(owner: str, **facts: Any) -> Holder:
    return Holder("app.post", "id1", "node1", 77, 1.0, owner=owner, **facts)


def held(owner: str, rank_us: int = 1, **facts: Any) -> Held:
    return Held(holder(owner, **facts), same_message=False, rank_us=rank_us)


USED, UNKNOWN, ENDED = Used(holder("u"), same_message=False), Unknown(holder("u")), Duplicate()


@pytest.mark.parametrize(("servers", "most"), [(3, 2), (5, 3), (7, 4)])
def test_a_majority_is_more_than_half(servers: int, most: int) -> None:
    assert majority_of(servers) == most


@pytest.mark.parametrize(
    ("answers", "pending", "expected"),
    [
        ([won(1), won(2)], 3, None),
        ([won(1), won(3), won(2)], 2, won(3)),
        ([held("a"), held("a"), held("a")], 2, held("a")),
        ([held("a"), held("a"), held("b")], 2, None),
        ([held("a"), held("a"), held("b"), held("b")], 1, None),
        ([held("a"), held("a"), held("b"), held("b"), won(1)], 0, NoMajority()),
        ([held("a"), won(1), won(2), held("b")], 1, None),
        ([held("a"), won(1), held("c"), held("b")], 1, NoMajority()),
        ([held("a")], 0, NoMajority()),  # of those that answered; whether they are enough is another's question
        ([Tombstoned(), won(1), won(2)], 0, NoMajority()),
        ([Tombstoned(), Tombstoned(), won(1), won(2)], 0, NoMajority()),
        ([Tombstoned(), Tombstoned(), won(1), held("a")], 1, None),
        ([Tombstoned(), Tombstoned(), Tombstoned()], 2, Tombstoned()),
        ([Tombstoned(), Tombstoned(), won(1), won(2), Tombstoned()], 0, Tombstoned()),
        ([Tombstoned(), Tombstoned(), ENDED, Tombstoned()], 1, Tombstoned()),
        ([Tombstoned(), Tombstoned(), ENDED], 2, ENDED),
        ([Tombstoned(), won(1), won(2), won(3), Tombstoned()], 0, won(3)),
        ([USED, won(1)], 3, None),
        ([USED, won(1), won(2)], 2, USED),
        ([UNKNOWN, USED, won(2)], 2, USED),
        ([UNKNOWN, USED, ENDED], 2, ENDED),
        ([UNKNOWN, held("a"), held("a")], 2, UNKNOWN),
        ([won(1), won(2), won(3), USED], 1, won(3)),
    ],
)
def test_the_outcome_of_a_vote_among_five(answers: list[Any], pending: int, expected: object) -> None:
    answer = outcome(answers, pending, 5)
    assert (type(answer), answer) == (type(expected), expected)  # answers without fields are equal tuples


@pytest.mark.parametrize(
    ("answers", "pending", "expected"),
    [
        ([won(1), won(1)], 1, None),
        ([won(1), won(1), held("a")], 0, NoMajority()),
        ([won(1), won(1), won(2)], 0, won(2)),
        ([won(1), won(1)._replace(since=2.0), held("a")], 0, won(1)._replace(since=2.0)),
    ],
)
def test_equal_tokens_and_times_of_three_servers_are_one_vote(
    answers: list[Any], pending: int, expected: object
) -> None:
    answer = outcome(answers, pending, 3)
    assert (type(answer), answer) == (type(expected), expected)


def test_a_death_that_one_of_the_majority_knows_of_is_known() -> None:
    answer = outcome([won(1), won(2, crash=True), won(3)], 0, 5)
    assert isinstance(answer, Acquired)
    assert answer.after_crash


def test_last_agreed_seed_is_kept_and_a_seed_without_agreement_is_ignored() -> None:
    answer = outcome([won(50, "10/7"), won(60, "20/8"), won(70, "70")], 0, 5)
    assert isinstance(answer, Acquired)
    assert agreed_seed(answer.seed, answer.token) == ("8", "70/8")
    assert agreed_seed("70", 75) == ("75", "75/75")


def test_majority_holder_merges_token_expiry_and_releasing_flag() -> None:
    names = [holder("a", token=9, expires_in=1.0), *[holder("a", token=5, releasing=True)] * 2, holder("b", token=99)]
    elected, alike = majority_holder(names)
    assert elected is not None
    assert (elected.owner, elected.token, elected.expires_in, elected.releasing, alike) == ("a", 5, 1.0, True, 3)
    assert majority_holder([]) == (None, 0)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([True, True, True], True),
        ([True, True, False, False, True], True),
        ([False, False, False], False),
        ([True, True], None),
        ([True, True, False, False], None),
        ([None, None, None, True, True], None),
    ],
)
def test_a_lease_is_renewed_or_lost_by_a_majority_of_five(answers: list[bool | None], expected: bool | None) -> None:
    assert renewed(answers, 5) is expected


def test_of_what_is_known_of_a_name_the_surest_counts() -> None:
    def use(state: Any) -> RunView:
        return RunView("n", "", state, "", "", "", 1.0, 1.0, "")

    assert best_known([None, use("unknown"), use("running"), use("used")]) == use("used")
    assert best_known([None, use("unknown"), use("running")]) == use("running")
    assert best_known([None, None]) is None
