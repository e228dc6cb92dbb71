"""The way to a primary that sentinels watch over, wherever it is now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.connection import Connection, SSLConnection

from .causes import refused
from .clock import Clock, SystemClock
from .door import ServerDoor
from .errors import StoreNotReady, StoreRefused, StoreUnavailable
from .places import NOT_TAKEN, Address, Place, why
from .voice import logger
from .wire import ErrorReply, Wire
from .wires import Wires

__all__ = ["SentinelDoor"]

#: Seconds that an answer counts; so long an old primary may be written to that came back from a pause.
HOLDS: Final = 1.0
#: Seconds until sentinels are asked again of which none answered, while the last known primary does.
SILENT: Final = 5.0
#: A part of the store's timeout is for one sentinel; from the least to the most seconds.
_PART, _LEAST, _MOST = 0.1, 0.1, 1.0


class SentinelDoor:
    """To the primary that the sentinels name, as long as they name it.

    A primary that was paused goes on taking writes when it wakes, until a sentinel makes a replica of it (10 s). So
    they are asked again every second, also while the connections stand. Only those that the place names are asked, in
    turn, beginning with the one that answered last.

    Args:
        place: The sentinels, and what they call the primary.
        timeout: Seconds that the store waits for an answer; a sentinel has a tenth of them, 0.1 to 1 s.

    Raises:
        ValueError, TypeError: redis-py cannot make connections of the place's options.
    """

    def __init__(self, place: Place, *, timeout: float, clock: Clock | None = None) -> None:
        self._place = place
        self._clock = clock or SystemClock()
        self._patience = min(max(timeout * _PART, _LEAST), _MOST)
        options = _for_connection(place.sentinel_options)
        try:
            ServerDoor(options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"sentinel_kwargs: {why(error)}") from error
        self._sentinels = [
            (address, Wires(ServerDoor(options | {"host": address[0], "port": address[1]}), timeout=self._patience))
            for address in place.addresses
        ]
        # What redis-py cannot make is told now, not by the first task.
        ServerDoor(place.options_at(place.addresses[0]))
        self._primary: Address | None = None
        self._good_until = -math.inf
        #: Which of the failovers that the sentinels count it is by; None where they do not say.
        self._term: int | None = None

    def where(self) -> Address:
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

    def term(self) -> int:
        self.where()
        if self._term is None:
            said = "a right is missing: SENTINEL master, for dlock_failover_quarantine"
            raise StoreRefused(f"the sentinels of {self._place.shown}: {said}")
        return self._term

    def doubt(self) -> None:
        self._good_until = -math.inf

    def connection(self, seconds: float) -> Connection:
        return ServerDoor(self._place.options_at(self.where())).connection(seconds)

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
        name = (self._place.master_name or "").encode()
        verbs = b"get-master-addr-by-name", b"master"
        words = [b"*3\r\n$8\r\nSENTINEL\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(v), v, len(name), name) for v in verbs]
        failures: list[StoreUnavailable] = []
        for sentinel in list(self._sentinels):
            (host, port), wires = sentinel
            try:
                told, facts = wires.call("", _both, words)
                if type(told) is ErrorReply:
                    raise refused(told)
                if not told:
                    raise StoreRefused(self._strange(wires))
            except StoreUnavailable as error:
                # Its words are for a store; what to change about a sentinel stands elsewhere.
                said = str(error).replace("dlock_url", "sentinel_kwargs").replace("the lock store", "it")
                if "unknown command" in said:
                    begin = f"let {self._place.setting} begin with redis:// or rediss://"
                    said = f"it is a server and no sentinel: {begin}, or name a sentinel's port (26379)"
                failures.append(type(error)(f"the sentinel at {host}:{port}: {said}"))
                continue
            self._sentinels = [sentinel, *(other for other in self._sentinels if other is not sentinel)]
            if type(facts) is not ErrorReply:
                self._term = int(dict(zip(facts[::2], facts[1::2], strict=True))[b"config-epoch"])
            return told[0].decode(), int(told[1])
        # One that answers, and what it says, tells more than those that are silent.
        lasting = (error for error in failures if isinstance(error, StoreRefused))
        raise next(lasting, StoreUnavailable(f"no sentinel answers: asked {self._place.shown}"))

    def _strange(self, wires: Wires) -> str:
        told = wires.call("", Wire.ask, b"*2\r\n$8\r\nSENTINEL\r\n$7\r\nmasters\r\n")
        names = [] if type(told) is ErrorReply else [dict(zip(m[::2], m[1::2], strict=True))[b"name"] for m in told]
        known = ", ".join(repr(name.decode("utf-8", "replace")) for name in names) or "nothing"
        return f"it watches {known} and no {self._place.master_name!r}: correct master_name"


def _both(wire: Wire, words: Sequence[bytes]) -> tuple[Any, Any]:
    wire.send(b"".join(words))
    return wire.read(), wire.read()


def _for_connection(options: Mapping[str, Any]) -> dict[str, Any]:
    """``sentinel_kwargs``, which are for redis-py's client, as its connections take them."""
    kept = {key: value for key, value in options.items() if key not in NOT_TAKEN | {"ssl"}}
    return kept | ({"connection_class": SSLConnection} if options.get("ssl") else {})
