"""The way to a primary that sentinels watch over, wherever it is now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from redis.connection import Connection, SSLConnection

from ...errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from ...utils.clock import Clock, SystemClock
from ...utils.log import logger
from ..location import NOT_TAKEN, Address, StoreLocation, safe_error_text
from .connection import ErrorReply, RespConnection
from .endpoint import ServerEndpoint
from .pool import ConnectionPool
from .server_errors import error_from_reply

__all__ = ["SentinelDoor"]

#: Seconds that an answer counts; so long an old primary may be written to that came back from a pause.
HOLDS: Final = 1.0
#: Seconds until sentinels are asked again of which none answered, while the last known primary does.
SILENT: Final = 5.0
#: A part of the store's timeout is for one sentinel; from the least to the most seconds.
_PART, _LEAST, _MOST = 0.1, 0.1, 1.0

#: What a sentinel calls a primary that it alone, or that most of them, take for dead.
_DOWN: Final = frozenset({b"s_down", b"o_down"})

_Sentinel: TypeAlias = tuple[Address, ConnectionPool]


class _Answer(NamedTuple):
    """Whom a sentinel names, by which failover (-1: it does not say), and whether it takes it for dead."""

    sentinel: _Sentinel
    primary: Address
    epoch: int = -1
    down: bool = False


class SentinelDoor:
    """To the primary that the sentinels name, as long as they name it.

    A primary that was paused goes on taking writes when it wakes, until a sentinel makes a replica of it (10 s). So
    they are asked again every second, also while the connections stand. Only those that the place names are asked, in
    turn, beginning with the one that was believed last.

    Args:
        place: The sentinels, and what they call the primary.
        timeout: Seconds that the store waits for an answer; a sentinel has a tenth of them, 0.1 to 1 s.

    Raises:
        ValueError, TypeError: redis-py cannot make connections of the place's options.
    """

    def __init__(self, place: StoreLocation, *, timeout: float, clock: Clock | None = None) -> None:
        self._place = place
        self._clock = clock or SystemClock()
        self._patience = min(max(timeout * _PART, _LEAST), _MOST)
        options = _for_connection(place.sentinel_options)
        try:
            ServerEndpoint(options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"sentinel_kwargs: {safe_error_text(error)}") from error
        self._sentinels = [
            (
                address,
                ConnectionPool(
                    ServerEndpoint(options | {"host": address[0], "port": address[1]}), timeout=self._patience
                ),
            )
            for address in place.addresses
        ]
        # What redis-py cannot make is told now, not by the first task.
        ServerEndpoint(place.options_at(place.addresses[0]))
        self._primary: Address | None = None
        self._good_until = -math.inf
        #: Which of the failovers that the sentinels count it is by; None where they do not say.
        self._term: int | None = None
        #: The primary that was named, while no connection to it has been made.
        self._unproven: Address | None = None
        #: When each sentinel failed to answer.
        self._failed: dict[Address, float] = {}

    def address(self) -> Address:
        """The primary's address, asked for if the last answer is a second old or in doubt.

        Raises:
            StoreUnavailable: No sentinel tells, and none has told yet.
        """
        if self._clock.monotonic() < self._good_until and self._primary:
            return self._primary
        try:
            primary = self._asked()
        except StoreUnavailable as error:
            if self._primary is None:
                raise
            primary = self._primary
            self._good_until = self._clock.monotonic() + SILENT
            if "silent" not in self._place.said:
                self._place.said.add("silent")
                logger.warning("locks stay at %s:%d: %s", *primary, error)
        else:
            self._name(primary)
            self._good_until = self._clock.monotonic() + HOLDS
            if "silent" in self._place.said:
                self._place.said.discard("silent")
                logger.info("a sentinel of %s answers again", self._place.shown)
        return primary

    def failover_epoch(self) -> int:
        self.address()
        if self._term is None:
            said = "a right is missing: SENTINEL master, for dlock_failover_quarantine"
            raise StoreRefused(f"the sentinels of {self._place.shown}: {said}")
        return self._term

    def invalidate(self) -> None:
        self._good_until = -math.inf

    def connection(self, seconds: float) -> Connection:
        primary = self.address()
        # Until check() has passed: what fails in between is the primary that was named.
        self._unproven = primary
        return ServerEndpoint(self._place.options_at(primary)).connection(seconds)

    def check(self, connection: Connection) -> None:
        # Not ROLE: INFO is among the rights of the lock user already.
        connection.send_command("INFO", "replication")
        told: Any = connection.read_response()
        if b"role:master" not in (told.encode() if isinstance(told, str) else told):
            host, port = self._primary or ("", 0)
            raise StoreNotReady(
                f"the sentinels name {host}:{port} as the primary of {self._place.master_name!r}, and it is a replica: "
                "a failover goes on"
            )
        self._unproven = None

    def _name(self, primary: Address) -> None:
        if primary != self._primary:
            if self._primary is not None:
                self._tell(primary, self._primary)
            self._primary = primary

    def _tell(self, primary: Address, before: Address) -> None:
        # Each part of a process has a door of its own, and hears of it in its own time.
        word = f"at {primary}"
        if word not in self._place.said:
            self._place.said.discard(f"at {before}")
            self._place.said.add(word)
            logger.info("locks: the sentinels name %s:%d now (was %s:%d)", *primary, *before)

    def _asked(self) -> Address:
        """Return the primary by the sentinel that has heard of the latest failover.

        One answer is enough, unless there is a doubt about it. Then all sentinels are asked. It is in doubt if it is
        the first one, if the sentinel takes that primary for dead, if the sentinel has not heard of a failover that is
        known, or if no connection to that primary could be made.

        Raises:
            StoreUnavailable: None answers, or too few of them and none knows the last failover.
        """
        answers: list[_Answer] = []
        failures: list[StoreUnavailable] = []
        for sentinel in list(self._sentinels):
            host, port = sentinel[0]
            if answers and self._clock.monotonic() - self._failed.get((host, port), -math.inf) < SILENT:
                continue
            try:
                answer = self._answer(sentinel)
            except StoreUnavailable as error:
                self._failed[host, port] = self._clock.monotonic()
                failures.append(self._explained(sentinel, error))
                continue
            self._failed.pop((host, port), None)
            answers.append(answer)
            if not self._doubtful(answer):
                break
        if not answers:
            # One that answers, and what it says, tells more than those that are silent.
            lasting = (error for error in failures if isinstance(error, StoreRefused))
            raise next(lasting, StoreUnavailable(f"no sentinel answers: asked {self._place.shown}"))
        return self._chosen(answers)

    def _doubtful(self, answer: _Answer) -> bool:
        return self._primary is None or self._unproven is not None or answer.down or self._outdated(answer)

    def _outdated(self, answer: _Answer) -> bool:
        return self._term is not None and 0 <= answer.epoch < self._term

    def _chosen(self, answers: Sequence[_Answer]) -> Address:
        named = Counter(answer.primary for answer in answers)
        best = max(
            answers,
            key=lambda one: (one.epoch, not one.down, one.primary != self._unproven, named[one.primary]),
        )
        if self._outdated(best) and 2 * len(answers) <= len(self._sentinels):
            # More of them would know it, unless all were set up anew, which a majority tells.
            raise StoreUnavailable("no sentinel that answers has heard of the last failover")
        for answer in answers:
            if answer.epoch < best.epoch and answer.primary != best.primary:
                self._tell_of_stale(answer, best)
        others = [sentinel for sentinel in self._sentinels if sentinel is not best.sentinel]
        self._sentinels = [best.sentinel, *others]
        for _, wires in others:
            wires.close()  # one connection is enough while there is no doubt
        if best.epoch >= 0:
            self._term = best.epoch
        return best.primary

    def _tell_of_stale(self, answer: _Answer, best: _Answer) -> None:
        host, port = answer.sentinel[0]
        word = f"stale {host}:{port}"
        if word not in self._place.said:
            self._place.said.add(word)
            logger.warning(
                "the sentinel at %s:%d has not heard of the last failover and is not followed: it names %s:%d, by "
                "configuration epoch %d, and another one names %s:%d, by %d",
                host, port, *answer.primary, answer.epoch, *best.primary, best.epoch,
            )  # fmt: skip

    def _answer(self, sentinel: _Sentinel) -> _Answer:
        name = (self._place.master_name or "").encode()
        verbs = b"get-master-addr-by-name", b"master"
        words = [b"*3\r\n$8\r\nSENTINEL\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(v), v, len(name), name) for v in verbs]
        try:
            told, facts = sentinel[1].call("", _both, words)
        except ReplyTimeout:
            raise
        except ReplyLost:
            # The connection was cut while it was idle. Without a second try the sentinel counts as silent for 5 s.
            told, facts = sentinel[1].call("", _both, words)
        if type(told) is ErrorReply:
            raise error_from_reply(told)
        if not told:
            raise StoreRefused(self._strange(sentinel[1]))
        primary = told[0].decode(), int(told[1])
        if type(facts) is ErrorReply:
            return _Answer(sentinel, primary)  # the right for it may be missing
        known = dict(zip(facts[::2], facts[1::2], strict=True))
        down = not _DOWN.isdisjoint(known[b"flags"].split(b","))
        return _Answer(sentinel, primary, int(known[b"config-epoch"]), down)

    def _explained(self, sentinel: _Sentinel, error: StoreUnavailable) -> StoreUnavailable:
        host, port = sentinel[0]
        # Its words are for a store; what to change about a sentinel stands elsewhere.
        said = str(error).replace("dlock_url", "sentinel_kwargs").replace("the lock store", "it")
        if "unknown command" in said:
            begin = f"let {self._place.setting} begin with redis:// or rediss://"
            said = f"it is a server and no sentinel: {begin}, or name a sentinel's port (26379)"
        return type(error)(f"the sentinel at {host}:{port}: {said}")

    def _strange(self, wires: ConnectionPool) -> str:
        told = wires.call("", RespConnection.ask, b"*2\r\n$8\r\nSENTINEL\r\n$7\r\nmasters\r\n")
        names = [] if type(told) is ErrorReply else [dict(zip(m[::2], m[1::2], strict=True))[b"name"] for m in told]
        known = ", ".join(repr(name.decode("utf-8", "replace")) for name in names) or "nothing"
        return f"it watches {known} and no {self._place.master_name!r}: correct master_name"


def _both(wire: RespConnection, words: Sequence[bytes]) -> tuple[Any, Any]:
    wire.send(b"".join(words))
    return wire.read(), wire.read()


def _for_connection(options: Mapping[str, Any]) -> dict[str, Any]:
    """``sentinel_kwargs``, which are for redis-py's client, as its connections take them."""
    kept = {key: value for key, value in options.items() if key not in NOT_TAKEN | {"ssl"}}
    return kept | ({"connection_class": SSLConnection} if options.get("ssl") else {})
