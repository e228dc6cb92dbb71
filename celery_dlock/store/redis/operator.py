"""The operators' store on Redis or Valkey: pages of all lock names, indexes, and the state of one name."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ...errors import StoreUnavailable
from ...keys.lock_name import BUCKETS, ONE_LOCK, ONE_SEAT, LockName, name_from_member
from ..acquisition import shown_acquisition
from ..model import Grant
from ..operator import ListCursor
from ..operator_model import DeadLetter, LockView, Page, RunView, State
from . import replies
from .commands import Command, command
from .connection import ErrorReply, RespConnection
from .execution import ScriptPipeline
from .keys import audit_key, bucket_keys
from .server_errors import error_from_reply
from .store import RedisStore

__all__ = ["RedisOperatorStore"]

#: Keys that one SCAN visits, by the limit of the page: 500 take about 0.3 ms on the server.
MIN_STEP, MAX_STEP = 20, 500
#: Actions of operators that are kept.
AUDIT_RECORDS: Final = 1000
#: Names that are described in one write.
BATCH: Final = 100
#: Buckets that one script reads, and members of each.
BUCKETS_AT_ONCE, MEMBERS = 64, 100
#: Scripts in one write that read an index. On a Cluster, each reads one bucket.
READS, CLUSTER_READS = 4, 128
#: The kinds of keys, in the order in which a name is reported, and the states that each can show.
_KINDS: Final[dict[str, frozenset[State]]] = {
    "lock": frozenset({"held", "granted", "kept"}),
    "run": frozenset({"used", "unknown"}),
    "claim": frozenset({"claimed"}),
}
#: A cursor of SCAN. The server refuses one that has more than 64 bits.
_CURSOR: Final = re.compile(r"[0-9]{1,20}")
_DIGEST: Final = r"[0-9a-f]{32}"
#: A lock name, or the name of one of its seats.
_NAME: Final = re.compile(rf"(.*:({_DIGEST}))(:[1-9][0-9]?)?")
#: A lock name, and the tick behind it in the key of a run mark.
_NAME_AND_TICK: Final = re.compile(rf"(.*:({_DIGEST})):({_DIGEST})")


class _Found(NamedTuple):
    """A lock name that a key names."""

    kind: str
    name: LockName
    tick: str


class _Member(NamedTuple):
    """A member of an index, with its score."""

    name: LockName
    detail: str
    score: float


class _ScanCursor(NamedTuple):
    """The start of the next page: a server, and the cursor of its SCAN."""

    server: str
    cursor: str


class RedisOperatorStore(RedisStore):
    """A Redis store with the commands that only operators need. Needs the rights ``+scan`` and ``+dbsize``."""

    def scan(
        self,
        kinds: Iterable[State],
        cursor: str,
        limit: int,
        wanted: Callable[[str], bool],
        accepted: Callable[[LockView], bool],
    ) -> Page[LockView]:
        states = frozenset(kinds)
        shown = [kind for kind, its_states in _KINDS.items() if its_states & states]
        pattern = self._pattern(shown)
        servers = list(self._topology.servers())
        position = _read_cursor(cursor, servers) if cursor else _ScanCursor(servers[0], "0")
        step = max(MIN_STEP, min(limit, MAX_STEP))
        items: list[LockView] = []
        scanned, keys = 0, self._number_of_keys()
        while True:
            following, found = self._topology.on(position.server, _scan, position.cursor, pattern, step)
            scanned += step
            items += [view for view in self._described(found, shown, wanted) if _in(view, states) and accepted(view)]
            end = _after(position, following, servers)
            if end is None:
                return Page(items, "", min(scanned, keys), keys)
            if len(items) >= limit:
                # Only whole steps: the keys of a step are others when the server has resized its table.
                return Page(items, _cursor(end), scanned, keys)
            position = end

    def _pattern(self, kinds: Sequence[str]) -> str:
        prefix = re.sub(r"([*?\[\]\\^])", r"\\\1", self._prefix)
        return f"{prefix}:{{???}}:{kinds[0]}:*" if len(kinds) == 1 else f"{prefix}:{{???}}:*"

    def _number_of_keys(self) -> int:
        return sum(self._topology.everywhere(_count_keys))

    def _described(
        self, names: Sequence[str], kinds: Sequence[str], wanted: Callable[[str], bool]
    ) -> Iterator[LockView]:
        """Yield the views of the names that these keys name, each for the first of its keys of these kinds."""
        found = [one for key in names if (one := self._parsed(key)) and one.kind in kinds and wanted(one.name.text)]
        for start in range(0, len(found), BATCH):
            batch = found[start : start + BATCH]
            for one, view in zip(batch, self._views(batch), strict=True):
                if view is not None and one.kind == _first_kind(view, kinds, one.tick):
                    yield view

    def _views(self, found: Sequence[_Found]) -> list[LockView | None]:
        calls = [self._description(one.name, one.tick) for one in found]
        views: list[LockView | None] = []
        for one, reply in zip(found, self._each_safe(ScriptPipeline(), calls), strict=True):
            if isinstance(reply, StoreUnavailable):
                raise reply
            # Another program overwrote a key of this name: the other names are shown.
            views.append(None if type(reply) is ErrorReply else replies.lock_view(one.name, one.tick, reply))
        return views

    def _parsed(self, key: str) -> _Found | None:
        root, _, rest = key.removeprefix(f"{self._prefix}:{{").partition("}:")
        kind, _, text = rest.partition(":")
        if kind not in _KINDS:
            return None
        bucket = int(root, 16)
        # The name of a lock may itself end like a digest. The bucket tells them apart, but for one in 1024.
        if kind == "run" and (match := _NAME_AND_TICK.fullmatch(text)) and _bucket(match[2]) == bucket:
            return _Found(kind, LockName(match[1], bucket), match[3])
        name = _NAME.fullmatch(text)
        return _Found(kind, LockName(text, bucket, ONE_SEAT if name[3] else ONE_LOCK), "") if name else None

    def describe(self, name: LockName, tick: str = "") -> LockView:
        return replies.lock_view(name, tick, self._run_safe(self._description(name, tick)))

    def _description(self, name: LockName, tick: str) -> Command:
        keys = self._keys(name)
        return command("describe", keys, run=keys.run(tick))

    def unsettled_runs(self, after: ListCursor | None = None) -> Iterator[RunView]:
        for batch in _batches(self._indexed("unsettled", _run_of, after)):
            found = [(name, tick, self._keys(name)) for name, tick, _ in batch]
            calls = [command("check_run", keys, run=keys.run(tick)) for _, tick, keys in found]
            for (name, tick, _), reply in zip(found, self._run_batches(ScriptPipeline(), calls), strict=True):
                if reply and (run := replies.run_view(name, tick, reply)):
                    yield run

    def dead_letters(self, after: ListCursor | None = None) -> Iterator[DeadLetter]:
        for batch in _batches(self._indexed("dead_letters", _letter_of, after)):
            calls = [command("check_dead_letter", self._keys(name), identity=identity) for name, identity, _ in batch]
            answers = self._run_batches(ScriptPipeline(), calls)
            for (name, identity, since), names in zip(batch, answers, strict=True):
                if names != 0:
                    yield DeadLetter(name.text, identity, *replies.names_in(names), since / 1e6)

    def queues(self, after: ListCursor | None = None) -> Iterator[LockName]:
        for name, _, _ in self._indexed("queues", lambda member: (member, ""), after):
            yield name

    def seats(self, name: LockName) -> int:
        if name.seats == ONE_SEAT:
            return 1
        record = self._keys(name).named("seats")
        (text,) = self._topology.call(record, _ask, "MGET", record)
        return int(text.split()[0]) if text else 1

    def now(self) -> float:
        return time.time() + self._topology.on(self._topology.servers()[0], _clock_offset)

    def clock_offsets(self) -> dict[str, float]:
        return {server or "": self._topology.on(server, _clock_offset) for server in self._topology.servers()}

    def free(self, name: LockName, acquisition: str, *, force: bool) -> tuple[str, Grant | None]:
        shown, token = shown_acquisition(acquisition)
        result, *granted = self._ask("free_lock", name, acquisition=shown, token=token, force=force)
        return result.decode(), replies.grant(*granted) if granted else None

    def hold(self, name: LockName, operator: str, hold_ms: int, reason: str) -> bool:
        return bool(self._ask("hold_lock", name, operator=operator, hold_ms=hold_ms, reason=reason) == b"held")

    def cancel_hold(self, name: LockName, acquisition: str, hold: str) -> bool:
        _, asked = shown_acquisition(hold)
        return bool(self._ask("cancel_hold", name, acquisition=acquisition, asked=asked))

    def requeue(self, name: LockName, identity: str) -> bool:
        return bool(self._ask("requeue", name, identity=identity))

    def save_audit(self, at: float, record: str) -> None:
        audit, at_us = audit_key(self._prefix), round(at * 1e6)
        self._run_safe(command("save_audit", None, audit=audit, at_us=at_us, record=record, limit=AUDIT_RECORDS))

    def audit(self, limit: int) -> list[str]:
        reply = self._run_safe(command("list_index", None, indexes=[audit_key(self._prefix)], first=-limit, last=-1))
        return [member.decode("utf-8", "replace") for _, members in replies.pairs(reply) for member in members[::2]]

    def _indexed(
        self, index: str, split: Callable[[str], tuple[str, str]], after: ListCursor | None
    ) -> Iterator[_Member]:
        """Yield the members of an index of all buckets behind a cursor, in the order of :class:`ListCursor`.

        Args:
            index: The kind of the index's key.
            split: Returns the lock name and the detail of a member.
            after: The cursor.
        """
        indexes = bucket_keys(self._prefix, index)
        refusals: list[ErrorReply] = []
        every = list(range(after.bucket if after else 0, BUCKETS))
        if self.clustered:
            parts = self._existing(indexes, every, refusals)
        else:
            parts = [every[start : start + BUCKETS_AT_ONCE] for start in range(0, len(every), BUCKETS_AT_ONCE)]
        if refusals:
            raise self._exception_for(refusals[0])
        reads = CLUSTER_READS if self.clustered else READS
        for start in range(0, len(parts), reads):
            found = [
                _Member(name_from_member(text, bucket), detail, score)
                for bucket, member, score in self._members(indexes, parts[start : start + reads])
                for text, detail in [split(member)]
            ]
            # By name and not by score, which changes while the pages are read.
            for one in sorted(found, key=_cursor_of):
                if after is None or _cursor_of(one) > after:
                    yield one

    def _members(self, indexes: Sequence[str], parts: list[list[int]]) -> Iterator[tuple[int, str, float]]:
        """Yield the members of the indexes of these buckets: bucket, member and score."""
        first = 0
        while parts:
            last = first + MEMBERS - 1
            built = [
                command("list_index", None, indexes=[indexes[at] for at in part], first=first, last=last)
                for part in parts
            ]
            answers = self._run_batches(ScriptPipeline(), built)
            full: list[list[int]] = []
            for part, answer in zip(parts, answers, strict=True):
                for number, members in zip(answer[::2], answer[1::2], strict=True):
                    bucket = part[number - 1]
                    for member, score in zip(members[::2], members[1::2], strict=True):
                        yield bucket, member.decode("utf-8", "replace"), float(score)
                    if len(members) == 2 * MEMBERS:
                        full.append([bucket])
            parts, first = full, first + MEMBERS


def _first_kind(view: LockView, kinds: Sequence[str], tick: str) -> str:
    """Return the kind of key for which a name is reported. The mark of a tick has no other key."""
    if tick:
        return "run"
    present = {"lock": view.holder, "run": view.run, "claim": view.claim}
    return next((kind for kind in kinds if present[kind]), "")


def _batches(members: Iterable[_Member]) -> Iterator[list[_Member]]:
    batch: list[_Member] = []
    for member in members:
        batch.append(member)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _run_of(member: str) -> tuple[str, str]:
    """Return the lock name and the tick of a member of the index of unsettled runs."""
    key, _, tick = member.rpartition(" ")
    return key.split(":run:", 1)[1], tick


def _cursor_of(member: _Member) -> ListCursor:
    return ListCursor.of(member.name, member.detail)


def _letter_of(member: str) -> tuple[str, str]:
    """Return the lock name and the identity of a member of the index of dead letters."""
    identity, _, name = member.partition(" ")
    return name, identity


def _bucket(digest: str) -> int:
    return int(digest[:3], 16) >> 2


def _in(view: LockView, states: frozenset[State]) -> bool:
    return not states.isdisjoint(view.states)


def _scan(connection: RespConnection, cursor: str, pattern: str, step: int) -> tuple[str, list[str]]:
    reply = _ask(connection, "SCAN", cursor, "MATCH", pattern, "COUNT", str(step))
    return reply[0].decode(), [key.decode("utf-8", "replace") for key in reply[1]]


def _count_keys(connection: RespConnection) -> int:
    return int(_ask(connection, "DBSIZE"))


def _clock_offset(connection: RespConnection) -> float:
    before = time.time()
    seconds, micros = _ask(connection, "TIME")
    return int(seconds) + int(micros) / 1e6 - (before + time.time()) / 2


def _ask(connection: RespConnection, *words: str) -> Any:
    parts = b"".join(b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words)
    reply = connection.ask(b"*%d\r\n%b" % (len(words), parts))
    if type(reply) is ErrorReply:
        raise error_from_reply(reply)
    return reply


def _cursor(position: _ScanCursor) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


def _read_cursor(text: str, servers: Sequence[str]) -> _ScanCursor:
    try:
        position = _ScanCursor(*map(str, json.loads(base64.urlsafe_b64decode(text.encode()))))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"invalid cursor {text!r}: expected the cursor of a page before") from None
    if not _CURSOR.fullmatch(position.cursor) or int(position.cursor) >= 2**64:
        raise ValueError(f"invalid cursor {text!r}: expected the cursor of a page before")
    if position.server not in servers:
        raise ValueError(f"invalid cursor {text!r}: the servers of the store have changed; start with the first page")
    return position


def _after(position: _ScanCursor, cursor: str, servers: Sequence[str]) -> _ScanCursor | None:
    """Return the position behind one step of SCAN; None at the end of the last server."""
    if cursor != "0":
        return _ScanCursor(position.server, cursor)
    index = servers.index(position.server) + 1
    return _ScanCursor(servers[index], "0") if index < len(servers) else None
