"""The endpoint of a primary behind Redis Sentinel.

redis-py's ``Sentinel`` is not used, because a lock store needs more than the first answer:

- a short timeout for each sentinel, so that a silent one delays a call only a little;
- the configuration epoch, which tells an outdated sentinel, or an old primary, from the current one;
- the same primary for all connections of the process: a pool for each primary would keep writing to an old primary.

redis-py's connections are used, but not its client: :mod:`.connection` says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from redis.connection import Connection, SSLConnection

from ...errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from ...utils.clock import Clock, SystemClock
from ...utils.log import logger
from ..location import IGNORED_OPTIONS, Address, StoreLocation, safe_error_text
from .connection import ErrorReply, RespConnection
from .endpoint import ServerEndpoint
from .pool import ConnectionPool
from .server_errors import error_from_reply

__all__ = ["SentinelEndpoint"]

#: Seconds that an answer is valid. For this time an old primary that resumes may still get writes.
VALID_FOR: Final = 1.0
#: Seconds until a sentinel that did not answer is asked again. Meanwhile the last known primary is used.
RETRY_SILENT: Final = 5.0
#: The timeout of one sentinel: a share of the store's timeout, with a minimum and a maximum in seconds.
_SHARE, _MIN_TIMEOUT, _MAX_TIMEOUT = 0.1, 0.1, 1.0

#: Flags of a primary that this sentinel, or most sentinels, consider dead.
_DOWN: Final = frozenset({b"s_down", b"o_down"})

_Sentinel: TypeAlias = tuple[Address, ConnectionPool]


class _Answer(NamedTuple):
    """The answer of a sentinel.

    Args:
        sentinel: The sentinel.
        primary: The address of the primary.
        epoch: The configuration epoch of the last failover; -1 if the sentinel does not report it.
        down: Whether the sentinel considers the primary dead.
    """

    sentinel: _Sentinel
    primary: Address
    epoch: int = -1
    down: bool = False


class SentinelEndpoint:
    """The endpoint of the primary that the sentinels name.

    A primary that was paused accepts writes when it resumes, until a sentinel makes it a replica (about 10 s). So the
    sentinels are asked again every second, even if the connections work. Only the configured sentinels are asked, one
    after the other. The one that gave the last accepted answer comes first.

    Args:
        location: The addresses of the sentinels, and their name for the primary.
        timeout: Seconds that the store waits for a reply. A sentinel gets a tenth of them, 0.1 to 1 s.
        clock: The clock for these waits.

    Raises:
        ValueError: redis-py cannot create connections from the options.
        TypeError: redis-py does not know an option.
    """

    def __init__(self, location: StoreLocation, *, timeout: float, clock: Clock | None = None) -> None:
        self._location = location
        self._clock = clock or SystemClock()
        self._timeout = min(max(timeout * _SHARE, _MIN_TIMEOUT), _MAX_TIMEOUT)
        options = _for_connection(location.sentinel_options)
        try:
            ServerEndpoint(options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"sentinel_kwargs: {safe_error_text(error)}") from error
        self._sentinels = [
            (
                address,
                ConnectionPool(
                    ServerEndpoint(options | {"host": address[0], "port": address[1]}), timeout=self._timeout
                ),
            )
            for address in location.addresses
        ]
        # Check the options now. Otherwise an option that redis-py does not accept would fail the first task.
        ServerEndpoint(location.options_at(location.addresses[0]))
        self._primary: Address | None = None
        self._valid_until = -math.inf
        #: The configuration epoch of the primary; None if the sentinels do not report it.
        self._epoch: int | None = None
        #: The primary that new connections lead to, until one of them has passed :meth:`check`; then None.
        self._unchecked: Address | None = None
        #: The time at which each sentinel failed to answer.
        self._failed: dict[Address, float] = {}

    def address(self) -> Address:
        """Return the address of the primary. Ask the sentinels if the last answer is a second old or was invalidated.

        Raises:
            StoreUnavailable: No sentinel answers, and none has answered before.
        """
        if self._clock.monotonic() < self._valid_until and self._primary:
            return self._primary
        try:
            primary = self._asked()
        except StoreUnavailable as error:
            if self._primary is None:
                raise
            primary = self._primary
            self._valid_until = self._clock.monotonic() + RETRY_SILENT
            if "silent" not in self._location.logged:
                self._location.logged.add("silent")
                logger.warning("lock store: keeping the primary %s:%d: %s", *primary, error)
        else:
            self._use(primary)
            self._valid_until = self._clock.monotonic() + VALID_FOR
            if "silent" in self._location.logged:
                self._location.logged.discard("silent")
                logger.info("a sentinel of %s answers again", self._location.shown)
        return primary

    def failover_epoch(self) -> int:
        self.address()
        if self._epoch is None:
            missing = "a permission is missing: SENTINEL master, which dlock_quarantine needs"
            raise StoreRefused(f"the sentinels of {self._location.shown} refused: {missing}")
        return self._epoch

    def invalidate(self) -> None:
        self._valid_until = -math.inf

    def connection(self, seconds: float) -> Connection:
        primary = self.address()
        # check() sets this to None. If the call fails before that, the sentinels may have named a dead server, so the
        # next answer counts as uncertain.
        self._unchecked = primary
        return ServerEndpoint(self._location.options_at(primary)).connection(seconds)

    def check(self, connection: Connection) -> None:
        # Not ROLE: the lock user has the permission for INFO already.
        connection.send_command("INFO", "replication")
        info: Any = connection.read_response()
        if b"role:master" not in (info.encode() if isinstance(info, str) else info):
            host, port = self._primary or ("", 0)
            raise StoreNotReady(
                f"the sentinels name {host}:{port} as the primary of {self._location.master_name!r}, but it is a "
                "replica: a failover is in progress"
            )
        self._unchecked = None

    def _use(self, primary: Address) -> None:
        if primary != self._primary:
            if self._primary is not None:
                self._log_change(primary, self._primary)
            self._primary = primary

    def _log_change(self, primary: Address, before: Address) -> None:
        # A process has several such endpoints. Only the first one that notices the change logs it.
        logged = f"at {primary}"
        if logged not in self._location.logged:
            self._location.logged.discard(f"at {before}")
            self._location.logged.add(logged)
            logger.info("lock store: the sentinels name %s:%d now (was %s:%d)", *primary, *before)

    def _asked(self) -> Address:
        """Return the primary that the sentinel with the latest epoch names.

        One answer is enough, unless it is uncertain. Then all sentinels are asked. An answer is uncertain in four
        cases:

        - it is the first answer;
        - the sentinel considers the primary dead;
        - its epoch is older than the known one;
        - no connection to the primary could be made.

        Raises:
            StoreUnavailable: No sentinel answers, or those that answer are no majority and have an outdated epoch.
        """
        answers: list[_Answer] = []
        failures: list[StoreUnavailable] = []
        for sentinel in list(self._sentinels):
            host, port = sentinel[0]
            if answers and self._clock.monotonic() - self._failed.get((host, port), -math.inf) < RETRY_SILENT:
                continue
            try:
                answer = self._answer(sentinel)
            except StoreUnavailable as error:
                self._failed[host, port] = self._clock.monotonic()
                failures.append(self._explained(sentinel, error))
                continue
            self._failed.pop((host, port), None)
            answers.append(answer)
            if not self._uncertain(answer):
                break
        if not answers:
            # A sentinel that answers with an error says more than one that does not answer.
            refusals = (error for error in failures if isinstance(error, StoreRefused))
            raise next(refusals, StoreUnavailable(f"no sentinel answers: asked {self._location.shown}"))
        return self._chosen(answers)

    def _uncertain(self, answer: _Answer) -> bool:
        return self._primary is None or self._unchecked is not None or answer.down or self._outdated(answer)

    def _outdated(self, answer: _Answer) -> bool:
        return self._epoch is not None and 0 <= answer.epoch < self._epoch

    def _chosen(self, answers: Sequence[_Answer]) -> Address:
        named = Counter(answer.primary for answer in answers)
        best = max(
            answers,
            key=lambda one: (one.epoch, not one.down, one.primary != self._unchecked, named[one.primary]),
        )
        if self._outdated(best) and 2 * len(answers) <= len(self._sentinels):
            # Only a majority may name an older epoch: then all sentinels were set up anew.
            raise StoreUnavailable("no sentinel that answers knows the last failover")
        for answer in answers:
            if answer.epoch < best.epoch and answer.primary != best.primary:
                self._log_outdated(answer, best)
        others = [sentinel for sentinel in self._sentinels if sentinel is not best.sentinel]
        self._sentinels = [best.sentinel, *others]
        for _, pool in others:
            pool.close()  # one connection is enough while the answers are certain
        if best.epoch >= 0:
            self._epoch = best.epoch
        return best.primary

    def _log_outdated(self, answer: _Answer, best: _Answer) -> None:
        host, port = answer.sentinel[0]
        logged = f"stale {host}:{port}"
        if logged not in self._location.logged:
            self._location.logged.add(logged)
            logger.warning(
                "the sentinel at %s:%d does not know the last failover, ignoring it: it names %s:%d with configuration "
                "epoch %d, another one names %s:%d with epoch %d",
                host, port, *answer.primary, answer.epoch, *best.primary, best.epoch,
            )  # fmt: skip

    def _answer(self, sentinel: _Sentinel) -> _Answer:
        name = (self._location.master_name or "").encode()
        verbs = b"get-master-addr-by-name", b"master"
        words = [b"*3\r\n$8\r\nSENTINEL\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(v), v, len(name), name) for v in verbs]
        try:
            address, state = sentinel[1].call("", _both, words)
        except ReplyTimeout:
            raise
        except ReplyLost:
            # The idle connection was closed. Without a second try the sentinel would count as silent for 5 s.
            address, state = sentinel[1].call("", _both, words)
        if type(address) is ErrorReply:
            raise error_from_reply(address)
        if not address:
            raise StoreRefused(self._unknown_primary(sentinel[1]))
        try:
            return _parsed(sentinel, address, state)
        except (LookupError, TypeError, ValueError) as error:
            # The service is probably no sentinel. An exception that is no StoreUnavailable would bypass on_store_error.
            raise StoreRefused(f"unexpected reply {str(address)[:40]!r}: is it a sentinel?") from error

    def _explained(self, sentinel: _Sentinel, error: StoreUnavailable) -> StoreUnavailable:
        host, port = sentinel[0]
        # The text names the lock store and its setting. Name the sentinel's setting instead.
        text = str(error).replace("dlock_url", "sentinel_kwargs").replace("the lock store", "it")
        if "unknown command" in text:
            begin = f"let {self._location.setting} begin with redis:// or rediss://"
            text = f"it is a server and no sentinel: {begin}, or name a sentinel's port (26379)"
        return type(error)(f"the sentinel at {host}:{port}: {text}")

    def _unknown_primary(self, pool: ConnectionPool) -> str:
        reply = pool.call("", RespConnection.ask, b"*2\r\n$8\r\nSENTINEL\r\n$7\r\nmasters\r\n")
        names = [] if type(reply) is ErrorReply else [dict(zip(m[::2], m[1::2], strict=True))[b"name"] for m in reply]
        known = ", ".join(repr(name.decode("utf-8", "replace")) for name in names) or "nothing"
        return f"it watches {known} and no {self._location.master_name!r}: correct master_name"


def _parsed(sentinel: _Sentinel, address: Any, state: Any) -> _Answer:
    """Return the answer in the replies to ``get-master-addr-by-name`` and ``master``."""
    primary = address[0].decode(), int(address[1])
    if not isinstance(state, list):
        return _Answer(sentinel, primary)  # the permission for `master` may be missing
    fields = dict(zip(state[::2], state[1::2], strict=True))
    down = not _DOWN.isdisjoint(fields.get(b"flags", b"").split(b","))
    return _Answer(sentinel, primary, int(fields.get(b"config-epoch", -1)), down)


def _both(connection: RespConnection, commands: Sequence[bytes]) -> tuple[Any, Any]:
    connection.send(b"".join(commands))
    return connection.read(), connection.read()


def _for_connection(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``sentinel_kwargs``, which are options of redis-py's client, as options of its connections."""
    accepted = {key: value for key, value in options.items() if key not in IGNORED_OPTIONS | {"ssl"}}
    return accepted | ({"connection_class": SSLConnection} if options.get("ssl") else {})
