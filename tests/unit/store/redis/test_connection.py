"""A connection reads what the server sent, in whatever pieces it arrives."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreUnavailable
from celery_dlock.store.redis.connection import ErrorReply, RespConnection, unanswered

#: As they are sent, and what they mean.
REPLIES: dict[bytes, Any] = {
    b":1\r\n": 1,
    b":-12\r\n": -12,
    b"$-1\r\n": None,
    b"$0\r\n\r\n": b"",
    b"$5\r\n1 2 3\r\n": b"1 2 3",
    b"$4\r\n\r\n\r\n\r\n": b"\r\n\r\n",
    b"*2\r\n:1\r\n$2\r\nab\r\n": [1, b"ab"],
    b"*0\r\n": [],
    b"+OK\r\n": "OK",
    b"-ERR no\r\n": ErrorReply("ERR no"),
}


def wire(pieces: list[bytes]) -> RespConnection:
    left = iter(pieces)
    sock = SimpleNamespace(sendall=lambda said: None, recv=lambda most: next(left))
    connection: Any = SimpleNamespace(_sock=sock)
    return RespConnection(connection)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(REPLIES, repeat=2)))
def test_two_replies_cut_anywhere_are_read_as_they_were_sent(first: bytes, second: bytes) -> None:
    sent = first + second
    for cut in range(1, len(sent) + 1):
        read = wire([piece for piece in (sent[:cut], sent[cut:]) if piece])
        assert (read.ask(b""), read.read()) == (REPLIES[first], REPLIES[second]), f"cut at {cut}"


@pytest.mark.parametrize("reply", list(REPLIES))
def test_one_that_comes_byte_by_byte_leaves_nothing_for_the_next(reply: bytes) -> None:
    read = wire([bytes([byte]) for byte in reply] + [b":7\r\n"])
    assert (read.ask(b""), read.ask(b"")) == (REPLIES[reply], 7)


def test_a_connection_that_ends_in_a_reply_is_an_error_and_no_answer() -> None:
    with pytest.raises(ConnectionError, match="closed"):
        wire([b"$5\r\n1 2", b""]).ask(b"")
    with pytest.raises(ConnectionError, match="closed"):
        wire([b"", b""]).ask(b"")


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(StoreUnavailable, " (check dlock_url)"), (ReplyTimeout, " (see dlock_timeout)"), (ReplyLost, "")],
)
def test_error_of_a_silent_store_names_the_setting_to_look_at(kind: type[StoreUnavailable], setting: str) -> None:
    error = unanswered(OSError("why"), kind)
    assert (type(error), str(error)) == (kind, f"the lock store did not answer: why{setting}")
