"""The records of one lock name, and the interface by which the rules read and write them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Literal, Protocol

from ..acquisition import HolderKind, kind_of

__all__ = [
    "DONE_MS",
    "TOMBSTONE_MS",
    "Claim",
    "LockRecord",
    "MarkKind",
    "NewestCall",
    "Place",
    "Records",
    "ReplacedCalls",
    "RunMark",
    "SeatsRecord",
]

#: Life of a done mark in milliseconds: longer than the time in which a broker redelivers a message.
DONE_MS: Final = 24 * 3600 * 1000
#: Life of a tombstone in milliseconds: longer than a command can be delayed.
TOMBSTONE_MS: Final = 10 * 60 * 1000

#: ``"waiting"``: by rank. ``"delayed"``: lost a grant or is debounced, by the time (us) from which the message waits.
Place = Literal["waiting", "delayed"]
MarkKind = Literal["done", "tombstone", "run"]


@dataclass
class LockRecord:
    """A lock that is held, granted to a waiter, or kept. Times are microseconds since the epoch.

    Args:
        acquisition: The acquisition that holds it, or the text that names another holder: see ``store/acquisition``.
        identity: The digest of the holder's message, or "".
        token: The fencing token; 0 for a grant or an operator's hold.
        since: The time of the acquisition.
        task: The name of the holder's task.
        task_id: The id of the holder's task.
        node: Its node name; for an operator's hold, the reason.
        pid: Its process id.
        ttl_ms: The longest ttl asked for; None for a grant.
        count: The hold count.
        min_hold_ms: Milliseconds from ``since`` that the lock stays held at least; None for none.
        releasing: The holder's body has ended, and its release follows.
        dup: A duplicate of the holder's message may exist: its release sets the done mark.
        reserved_for: The identity of the holder's retry, for which the lock will be reserved.
        notify: Callers may wait in their thread or pool slot: the release wakes one of them.
        has_waiters: The lock may have waiters: its release grants the lock to the next one.
        operator: The operator whose hold begins with the holder's release; None for none.
        reason: The reason of that operator.
        asked: The time when that operator asked for the hold.
        replaceable: A newer call may ask the holder to stop (``on_conflict="replace"``).
        stop: The task id of the newer call that has asked; None for none.
        rank: Of a grant: the waiter's rank. The following fields are of a grant, too.
        due: The time from which a sweep ends the grant; None: this is no grant.
        granter: The acquisition or the call that made the grant.
        published: Its message was published.
        dead_letter: The message that became a dead letter in the same step.
        foreign: The time since which no worker of the message's broker was found; None: not declined.
    """

    acquisition: str
    identity: str
    token: int
    since: int
    task: str = ""
    task_id: str = ""
    node: str = ""
    pid: str = "0"
    ttl_ms: int | None = None
    count: int = 1
    min_hold_ms: int | None = None
    releasing: bool = False
    dup: bool = False
    reserved_for: str = ""
    notify: bool = False
    has_waiters: bool = False
    operator: str | None = None
    reason: str = ""
    asked: int | None = None
    replaceable: bool = False
    stop: str | None = None
    rank: int = 0
    due: int | None = None
    granter: str | None = None
    published: bool = False
    dead_letter: str = ""
    foreign: int | None = None

    @property
    def kind(self) -> HolderKind:
        return kind_of(self.acquisition)


@dataclass(frozen=True)
class RunMark:
    """The mark of a name's last run (``once_per``). Its fields are described in ``scripts/lib/run_mark.lua``."""

    state: str = ""
    at: str = ""
    identity: str = ""
    acquisition: str = ""
    seed: str = ""
    by: str = ""
    crashed_at: str = ""
    crashed_of: str = ""
    crashed_by: str = ""

    @property
    def text(self) -> str:
        return "\n".join(getattr(self, each.name) for each in fields(self))

    @property
    def shown(self) -> str:
        """The text by which an operator tells this mark from a later one."""
        return self.acquisition or f"at:{self.at}"

    @classmethod
    def of(cls, text: str | None) -> RunMark:
        """Parse a mark. A text that another program wrote counts as no mark."""
        lines = (text or "").split("\n")
        return cls(*lines) if len(lines) == len(fields(cls)) else cls()


@dataclass
class Claim:
    """The claim of a published message (``unique``)."""

    task_id: str
    task: str
    node: str
    generation: int
    attempt: str
    since: int = field(default=0)


@dataclass
class NewestCall:
    """The newest debounced call of a name, and the rank of the last one that started.

    Args:
        identity: The digest of the newest call's identity; None if no call is known.
        rank: Its rank.
        task_id: Its task id.
        due_at_last: The time (us) at which it is due in any case.
        started: The rank of the last call that started; None for none.
    """

    identity: str | None = None
    rank: int = 0
    task_id: str = ""
    due_at_last: int = 0
    started: int | None = None


@dataclass
class ReplacedCalls:
    """The calls of a name under ``on_conflict="replace"``. ``scripts/lib/replace.lua`` explains the record.

    Args:
        newest: The digest of the identity of the newest call that waits or has waited; None for none.
        newest_rank: Its rank.
        newest_id: Its task id.
        started_rank: The rank of the last call that started; None for none.
        started_id: Its task id.
        busy_since: The time (us) since which no body has ended by itself; None if one has.
        stops: The task ids of the calls that asked a holder to stop, by the holder's identity.
    """

    newest: str | None = None
    newest_rank: int = 0
    newest_id: str = ""
    started_rank: int | None = None
    started_id: str = ""
    busy_since: int | None = None
    stops: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SeatsRecord:
    """The seats of a name (``limit``). ``scripts/seats/common.lua`` explains it.

    Args:
        limit: The limit in force.
        seen_s: The time (s) when a command with this limit last ran.
        places: How many seats may be taken now. It is more than the limit while a call holds a higher seat.
    """

    limit: int = 1
    seen_s: int = 0
    places: int = 1


class Records(Protocol):
    """The records of one lock name, within one transaction. Expired records do not exist.

    Lives are milliseconds from now. A life of None means that the record does not expire.

    Of a name with seats (``limit``), the lock is that of one seat. All other records are those of the name.
    """

    @property
    def now(self) -> int:
        """The time of the store, in microseconds since the epoch. It is the same for the whole transaction."""
        ...

    # -- the lock

    def lock(self) -> LockRecord | None: ...
    def put_lock(self, lock: LockRecord) -> None:
        """Write the lock. A lock that exists keeps its expiry; a new one does not expire."""
        ...

    def drop_lock(self) -> None: ...
    def lock_left_ms(self) -> int:
        """Return the milliseconds until the lock expires; -1 if it does not expire."""
        ...

    def expire_lock(self, life_ms: int | None) -> None: ...
    def seat(self, number: int) -> Records:
        """Return these records with the lock of another seat."""
        ...

    def seats(self) -> SeatsRecord | None: ...
    def put_seats(self, seats: SeatsRecord, life_ms: int) -> None: ...
    def last_token(self) -> int:
        """Return the highest fencing token that may have been issued for this name; 0 for none."""
        ...

    def put_last_token(self, token: int) -> None: ...
    def wake_waiting_call(self) -> None:
        """Wake the call that has waited for the lock for the longest time, in its thread or pool slot."""
        ...

    # -- marks; the key is an identity, an acquisition, or a tick

    def mark(self, kind: MarkKind, key: str) -> str | None: ...
    def mark_left_ms(self, kind: MarkKind, key: str) -> int: ...
    def put_mark(self, kind: MarkKind, key: str, text: str, life_ms: int) -> None: ...
    def drop_mark(self, kind: MarkKind, key: str) -> None: ...

    # -- the claim

    def claim(self) -> Claim | None: ...
    def claim_left_ms(self) -> int: ...
    def put_claim(self, claim: Claim) -> None:
        """Write the claim. A claim that exists keeps its expiry."""
        ...

    def expire_claim(self, life_ms: int) -> None: ...
    def drop_claim(self) -> None: ...

    # -- waiters: a parked message has an entry; it is in one place, or it is granted and in none

    def has_entries(self) -> bool:
        """Return whether a message is parked: it waits, or it is granted."""
        ...

    def entry(self, identity: str) -> str | None: ...
    def entries(self) -> list[tuple[str, str]]:
        """Return the identities and texts of all stored messages."""
        ...

    def put_entry(self, identity: str, entry: str) -> None: ...
    def drop_waiter(self, identity: str) -> None:
        """Remove the message from its place, with its entry and all facts about it."""
        ...

    def score(self, place: Place, identity: str) -> int | None: ...
    def put_in(self, place: Place, identity: str, score: int) -> None: ...
    def take_from(self, place: Place, identity: str) -> None: ...
    def first_in(self, place: Place, most: int, until: int | None = None) -> list[tuple[str, int]]:
        """Return identities and scores, by score and then by identity; with ``until``, only scores up to it."""
        ...

    def count_in(self, place: Place) -> int: ...
    def position_in(self, place: Place, identity: str) -> int | None:
        """Return the position in a place, from 0."""
        ...

    def lost_grants(self, identity: str) -> tuple[int | None, int]:
        """Return the rank of a waiter that lost a grant, and the number of grants that it lost."""
        ...

    def put_lost_grants(self, identity: str, rank: int | None, tries: int) -> None: ...
    def evicted_by(self, identity: str) -> str:
        """Return the identity of the waiter that this one evicted; "" for none."""
        ...

    def put_evicted_by(self, identity: str, evicted: str) -> None: ...
    def replaced_by(self, identity: str) -> str | None:
        """Return the task id of the debounced call that replaced this waiter; None if none did."""
        ...

    def put_replaced_by(self, identity: str, by: str) -> None: ...
    def newest_call(self) -> NewestCall | None: ...
    def put_newest_call(self, newest: NewestCall, life_ms: int) -> None: ...
    def replaced(self) -> ReplacedCalls | None: ...
    def put_replaced(self, calls: ReplacedCalls, life_ms: int | None) -> None:
        """Write the record. With a life of None, it keeps its expiry."""
        ...

    def next_sweep(self) -> int | None:
        """Return the time (us) from which a sweep visits this name; None: no sweep does."""
        ...

    def sweep_at(self, when: int | None, *, earlier: bool = False) -> None:
        """Set the time (us) from which a sweep visits this name; None: no sweep. ``earlier``: never move it back."""
        ...

    # -- dead letters, and removed waiters until their result is stored

    def dead(self, identity: str) -> str | None: ...
    def put_dead(self, identity: str, entry: str) -> None: ...
    def drop_dead(self, identity: str) -> None: ...
    def dead_since(self, identity: str) -> int | None:
        """Return the time since which operators see this dead letter; None if they do not."""
        ...

    def show_dead(self, identity: str, since: int | None) -> None:
        """Show a dead letter to operators, or stop (None). Only the newest 1000 need to be kept."""
        ...
