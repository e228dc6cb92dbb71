"""The choice between the answers of several sentinels."""

import pytest

from celery_dlock.errors import StoreUnavailable
from celery_dlock.store.location import Address, StoreLocation
from celery_dlock.store.redis.sentinel import SentinelEndpoint, _Answer

OLD, NEW, OTHER = ("old", 1), ("new", 1), ("other", 1)


@pytest.fixture
def endpoint() -> SentinelEndpoint:
    return SentinelEndpoint(StoreLocation.of("sentinel://a;sentinel://b;sentinel://c?master_name=m"), timeout=1)


def chosen(endpoint: SentinelEndpoint, *answers: tuple[Address, int, bool]) -> Address:
    told = [_Answer(sentinel, *answer) for sentinel, answer in zip(endpoint._sentinels, answers, strict=False)]
    return endpoint._chosen(told)


def test_the_highest_epoch_is_followed_against_most_sentinels(endpoint: SentinelEndpoint) -> None:
    assert chosen(endpoint, (OLD, 3, False), (OLD, 3, False), (NEW, 4, True)) == NEW


def test_of_one_epoch_a_primary_that_is_down_is_named_last(endpoint: SentinelEndpoint) -> None:
    assert chosen(endpoint, (OLD, 3, True), (OLD, 3, True), (NEW, 3, False)) == NEW


def test_without_epochs_a_primary_that_failed_is_named_last_and_else_most_count(endpoint: SentinelEndpoint) -> None:
    answers = (OLD, -1, False), (NEW, -1, False), (NEW, -1, False)
    assert chosen(endpoint, *answers) == NEW
    endpoint._unchecked = NEW
    assert chosen(endpoint, *answers) == OLD


def test_an_older_epoch_than_known_is_followed_only_if_most_sentinels_tell_it(endpoint: SentinelEndpoint) -> None:
    assert chosen(endpoint, (NEW, 4, False)) == NEW
    with pytest.raises(StoreUnavailable, match="no sentinel that answers knows the last failover"):
        chosen(endpoint, (OLD, 3, False))
    assert chosen(endpoint, (OTHER, 1, False), (OTHER, 1, False)) == OTHER


GOOD = [b"new", b"1"], [b"flags", b"master", b"config-epoch", b"4"]
ODD_REPLIES = {
    "no flags or epoch": ([b"new", b"1"], []),
    "nil state": ([b"new", b"1"], None),
    "port that is no number": ([b"new", b"x"], GOOD[1]),
    "one field of the address": ([b"new"], GOOD[1]),
    "host that is not UTF-8": ([b"\xff", b"1"], GOOD[1]),
    "number for an address": (7, GOOD[1]),
    "odd number of fields": ([b"new", b"1"], [b"flags"]),
    "epoch that is no number": ([b"new", b"1"], [b"config-epoch", b"x"]),
}


class Sentinel:
    def __init__(self, reply: object) -> None:
        self.reply = reply

    def call(self, *_asked: object) -> object:
        return self.reply

    def close(self) -> None: ...


@pytest.mark.parametrize("reply", ODD_REPLIES.values(), ids=list(ODD_REPLIES))
def test_odd_reply_of_a_sentinel_is_a_value_or_store_unavailable(endpoint: SentinelEndpoint, reply: object) -> None:
    """Another exception would bypass ``on_store_error``, also where other sentinels answer well."""
    replies = (reply, GOOD, GOOD)
    endpoint._sentinels = [(known[0], Sentinel(one)) for known, one in zip(endpoint._sentinels, replies, strict=True)]  # type: ignore[misc]  # a fake pool
    assert endpoint._asked() == NEW
    endpoint._sentinels = [(known[0], Sentinel(reply)) for known in endpoint._sentinels]  # type: ignore[misc]  # a fake pool
    try:
        assert endpoint._asked() == NEW
    except StoreUnavailable as error:
        assert "is it a sentinel?" in str(error)  # noqa: PT017  # some of these replies are complete enough
