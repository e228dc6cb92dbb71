"""The data of one lock name: its head, its waiters and its marks. Times are microseconds since the epoch.

A backend stores these values and does not interpret them (:mod:`celery_dlock.store.engine.backend`). The rules read and
write them through :class:`~celery_dlock.store.rules.records.Records`. :mod:`.texts` has their text forms.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Generic, Literal, NamedTuple, TypeVar

from ..acquisition import HolderKind, kind_of

__all__ = [
    "Claim",
    "Guard",
    "Head",
    "LockRecord",
    "Mark",
    "MarkKind",
    "NewestCall",
    "QueuePart",
    "ReplacedCalls",
    "RunMark",
    "SeatsRecord",
    "Timed",
    "Waiter",
]

T = TypeVar("T")

#: ``"waiting"``: by rank. ``"delayed"``: lost a grant or is debounced, by the time (us) from which the message waits.
QueuePart = Literal["waiting", "delayed"]
#: ``"done"``, ``"tombstone"``, ``"run"``: of a lock name. ``"worker"``: a record that workers share, of another name.
MarkKind = Literal["done", "tombstone", "run", "worker"]


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
    """The mark of a name's last run (``once_per``). Its fields are described in ``scripts/lib/run_mark.lua``.

    In a database it has one more state. ``"settled"``: the transaction of the user has committed the success, and the
    run has not released the lock yet. So its result may not be stored.
    """

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
    def is_used(self) -> bool:
        return self.state in ("used", "settled")

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
        seat_count: How many seats may be taken now. It is more than the limit while a call holds a higher seat.
    """

    limit: int = 1
    seen_s: int = 0
    seat_count: int = 1


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A record and the time from which it does not exist; None: it does not expire."""

    record: T
    until: int | None


@dataclass
class Head:
    """The head of a lock name: everything but its waiters and its marks. It is one small document.

    An empty head equals ``Head()``, and need not be stored. A record that has expired may still be here.

    Args:
        locks: The lock of each seat that is held, granted or kept. A name without seats has seat 0 only.
        seats: The seats (``limit``).
        claim: The claim of a published message (``unique``).
        newest_call: The newest debounced call.
        replaced: The calls under ``on_conflict="replace"``.
        sweeps: The time from which a sweep visits this name, by ``LockName.seats`` of the name that the sweep gets:
            ``ONE_LOCK`` or ``UNKNOWN_SEATS``. Workers with and without a ``limit`` may use one name.
        parked: The number of waiters that have an entry.
        waiting: The number of waiters in this part of the queue.
        delayed: The number of waiters in this part of the queue.
        dead: The number of dead letters.
        guards: The token of the last holder of each seat that has guarded a transaction. Before another call takes the
            seat, that transaction must have ended.
    """

    locks: dict[int, Timed[LockRecord]] = field(default_factory=dict)
    seats: Timed[SeatsRecord] | None = None
    claim: Timed[Claim] | None = None
    newest_call: Timed[NewestCall] | None = None
    replaced: Timed[ReplacedCalls] | None = None
    sweeps: dict[int, int] = field(default_factory=dict)
    parked: int = 0
    waiting: int = 0
    delayed: int = 0
    dead: int = 0
    guards: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Waiter:
    """A parked message, or a dead letter, with the facts about it. A waiter without any fact is not stored.

    Args:
        waiting: Its score in the part ``"waiting"``; None if it is not there.
        delayed: Its score in the part ``"delayed"``; None if it is not there.
        entry: The parked message; None if there is none.
        dead: The dead letter; None if there is none. A message can be parked again while its dead letter is stored.
        shown: Since when operators see the dead letter, by ``LockName.seats`` as in ``Head.sweeps``; empty: they do
            not see it.
        lost_rank: The rank of a waiter that lost a grant, or that is debounced or replaced; None for another one.
        lost: The number of grants that it lost.
        evicted: The identity of the waiter that this one evicted; "" for none.
        replaced_by: The task id of the newer call that replaced this one; None if none did.
    """

    waiting: int | None = None
    delayed: int | None = None
    entry: str | None = None
    dead: str | None = None
    shown: tuple[tuple[int, int], ...] = ()
    lost_rank: int | None = None
    lost: int = 0
    evicted: str = ""
    replaced_by: str | None = None


@dataclass(frozen=True)
class Mark:
    """A mark of a lock name: a text that exists until a time."""

    text: str
    until: int


class Settlement(NamedTuple):
    """The run mark of a transaction of the user (``lease.settle``).

    Args:
        tick: The digest of the tick; "" for the name itself.
        mark: The mark that the transaction itself writes.
        before: The text of the mark of the run that is settled.
        after: The text that stands there until the transaction commits.
    """

    tick: str
    mark: Mark
    before: str
    after: str


class Guard(NamedTuple):
    """The guard of a transaction of the user.

    Args:
        token: The fencing token of the holder.
        settled: The run mark of the transaction; None: it writes none.
    """

    token: int
    settled: Settlement | None = None
