"""The watchdog: one thread per process renews every lease, and frees what the dead held."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from . import native
from .clock import Clock
from .errors import StoreRefused, StoreUnavailable
from .keys import LockKeys
from .lease import margin
from .records import Released, Renewal
from .slots import Slot, SlotState
from .store import Ending, LockStore
from .voice import logger

__all__ = ["Keeper", "Source"]


#: Seconds between two looks at the slots, unless a child dies.
TICK = 0.2
#: Seconds in which another server answers while one is silent.
QUICK = 0.1
#: A keeper with nothing to keep ends after so many ticks.
IDLE_TICKS = 50
#: A release under way for so many seconds has failed without saying so; longer where the store may take longer.
LINGER = 15.0


class Source(Protocol):
    """A process whose slots are kept: this one, or a child."""

    def taken(self) -> Sequence[Slot]: ...
    def gone(self) -> bool:
        """The process is dead; all that it held is to be freed."""
        ...

    def pidfd(self) -> int | None:
        """A descriptor that can be read as soon as the process is dead, where there is one."""
        ...

    def closed(self) -> bool:
        """Asked when the source holds nothing: forget it?"""
        ...

    def freed(self, slot: Slot, released: Released) -> None:
        """The keeper released what the dead process held in ``slot``."""
        ...


@dataclass(slots=True)
class _Look:
    """What one look at the slots found."""

    due: list[Slot] = field(default_factory=list)
    ends: list[tuple[Source, Slot]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    held: list[Slot] = field(default_factory=list)
    ends_at: float = math.inf
    busy: bool = False


class Keeper:
    """Renews at a third of each ttl, or a long round earlier; tells of leases that are over before their holders do.

    Only runs scripts, so that no broker can hold renewals up; takes no lock that other code takes. It is told what
    to keep by slots alone, and reads time and sleeps through its arguments, so that a test can be its scheduler.

    Args:
        store: A store of its own, shared with no other thread.
        clock: Where deadlines are read.
        prefix: Of all keys.
        timeout: Seconds that one call to ``store`` may take.
        patient: More stores, by the seconds that a call to them may take: for while nothing ends soon, so that a slow
            store does not cost leases that can wait for it.
        lost: Called once for each lost lease, with its slot and the reason; must not block.
        doubtful: Is there perhaps another live copy of this acquisition's message? Then word is left in the lock.
        linger: Seconds after which a release that is under way has failed without saying so.
    """

    def __init__(
        self,
        store: LockStore,
        clock: Clock,
        prefix: str,
        timeout: float,
        lost: Callable[[Slot, str], None],
        doubtful: Callable[[str], bool] = lambda acquisition: False,
        patient: Mapping[float, LockStore] | None = None,
        linger: float = LINGER,
    ) -> None:
        self._stores = {timeout: store, **(patient or {})}
        self._hasty = timeout
        self._store = store
        self._clock = clock
        self._prefix = prefix
        # A lease that ends before the next call could have failed too is told now, while its holder can still act.
        self._grace = TICK + timeout + QUICK + 0.1
        self._lost = lost
        self._doubtful = doubtful
        self._linger = linger
        self._sources: list[Source] = []
        self._refused: set[str] = set()
        self._worded: set[str] = set()
        self._lingering: dict[str, float] = {}
        self._unended: dict[str, float] = {}
        #: Seconds that the last round took: while a server is silent, the next one will take as long.
        self._lasted = 0.0
        self._running = native.Flag()
        #: What was held at the last look, and not lost.
        self.held: Sequence[Slot] = ()

    def watch(self, source: Source) -> None:
        """Keep this source's slots from now on."""
        if source not in self._sources:
            self._sources.append(source)
        self.wake()

    def wake(self) -> None:
        """Make sure that the thread runs; called after a slot was taken, never blocks."""
        if self._running.take():
            native.start_daemon(self._run)

    def _run(self) -> None:
        idle = 0
        while idle < IDLE_TICKS:
            try:
                busy = self.tick()
            except Exception:
                # One bad lease must not end the renewal of all others.
                logger.exception("the keeper failed in one round and goes on")
                busy = True
            idle = 0 if busy else idle + 1
            native.wait([fd for source in self._sources if (fd := source.pidfd()) is not None], TICK)
        for store in self._stores.values():
            store.close()
        self._running.drop()
        # Whatever was taken after the last look found the flag still up, so look once more.
        if self._busy():
            self.wake()

    def _busy(self) -> bool:
        return any(source.taken() or not source.closed() for source in list(self._sources))

    def tick(self) -> bool:
        """One look at everything; true if there was anything to keep."""
        began = self._clock.monotonic()
        try:
            return self._round()
        finally:
            self._lasted = self._clock.monotonic() - began

    def _round(self) -> bool:
        look = _Look()
        for source in list(self._sources):
            self._look_at(source, look)
        self._forget_all_but(look.seen)
        self.held = look.held
        # Three calls must fit before the first lease ends: this one, and two more if it fails.
        budget = (look.ends_at - self._clock.monotonic() - TICK) / 3
        self._store = self._stores[max((t for t in self._stores if t <= budget), default=self._hasty)]
        # The living first: the dead can wait for one round trip, a lease may not.
        if look.due and not self._renew(look.due, look.held):
            return look.busy  # the store is away, and no lease can wait for a second timeout
        began = self._clock.monotonic()
        # Those that failed before come last: of several servers, another one may answer.
        for source, slot in sorted(look.ends, key=lambda end: end[1].acquisition in self._unended):
            if not self._end(source, slot):
                # The store is away; the others would wait for its timeout one by one.
                self._unanswered((), (), look.held, "the store did not answer")
                break
            if self._clock.monotonic() - began > TICK:
                break  # many ends, or a slow store: the living are looked at between them
        return look.busy

    def _lose_what_ends(self, slots: Sequence[Slot], reason: str) -> None:
        for slot in slots:
            if self._ends(slot):
                self._lose(slot, f"its deadline came unanswered: {reason}")

    def _ends(self, slot: Slot) -> bool:
        """Is it over before another call could have failed?"""
        grace = min(self._grace, slot.ttl * 2 / 3)  # no lease is given up before it was even due
        return slot.state is SlotState.HELD and not slot.lost and slot.deadline - grace <= self._clock.monotonic()

    def _look_at(self, source: Source, look: _Look) -> None:
        now = self._clock.monotonic()
        gone, slots = source.gone(), source.taken()
        for slot in slots:
            look.seen.add(slot.acquisition)
            if slot.state is SlotState.HELD and not slot.lost and _spent(slot, now):
                self._lose(slot, "it was held for as long as max_hold allows")
            if slot.state is SlotState.HELD and not slot.lost:
                look.held.append(slot)
                look.ends_at = min(look.ends_at, slot.deadline)
            if gone or self._left(slot, now):
                look.ends.append((source, slot))
            elif slot.state is SlotState.HELD and self._due(slot, now):
                look.due.append(slot)
        look.busy = look.busy or bool(slots) or not source.closed()
        if gone and not slots:
            self._sources.remove(source)

    def _due(self, slot: Slot, now: float) -> bool:
        if slot.acquisition in self._refused or _spent(slot, now):
            return False
        # What comes due in a long round is renewed before it, not behind it.
        return slot.deadline - slot.ttl * 2 / 3 <= now + self._lasted or (
            slot.acquisition not in self._worded and self._doubtful(slot.acquisition)
        )

    def _left(self, slot: Slot, now: float) -> bool:
        if slot.state is SlotState.LEFT:
            return True
        if slot.state is not SlotState.LEAVING:
            return False
        return now - self._lingering.setdefault(slot.acquisition, now) >= self._linger

    def _renew(self, due: Sequence[Slot], held: Sequence[Slot], within: float | None = None) -> bool:
        """False if the store did not answer.

        Args:
            due: What to renew.
            held: Everything that is held.
            within: Seconds after which the answer is of no use.
        """
        sent = self._clock.monotonic()
        worded = {slot.acquisition for slot in due if self._doubtful(slot.acquisition)}
        renewals = [
            Renewal(
                LockKeys.of(self._prefix, slot.name).lock,
                slot.acquisition,
                round(slot.ttl * 1000),
                (("word", "1"),) if slot.acquisition in worded else (),
                slot.durability,
            )
            for slot in due
        ]
        try:
            answers = self._store.renew(renewals, within)
        except StoreUnavailable as error:
            self._unanswered(due, due, held, str(error))
            return isinstance(error, StoreRefused)
        for slot, renewed in zip(due, answers, strict=True):
            if renewed:
                slot.moved(sent + slot.ttl - margin(slot.ttl))
                self._worded |= worded & {slot.acquisition}
            elif renewed is False and slot.state is SlotState.HELD:
                # Read again: a release between our look and the store's answer is no loss.
                self._refused.add(slot.acquisition)
                self._lose(slot, "the store no longer knows it")
        unknown = [slot for slot, renewed in zip(due, answers, strict=True) if renewed is None]
        if unknown:
            self._unanswered(unknown, due, held, "not all that keep it have confirmed it")
        return True

    def _unanswered(self, slots: Sequence[Slot], asked: Sequence[Slot], held: Sequence[Slot], reason: str) -> None:
        """Only whoever was asked for is judged: of several servers, another one may answer."""
        self._lose_what_ends(slots, reason)
        # What was not due, and yet ends before another call could have failed, is asked for now.
        others = [slot for slot in held if slot not in asked and self._ends(slot)]
        if others:
            left = min(slot.deadline for slot in others) - self._clock.monotonic()
            self._renew(others, (), min(QUICK, max(0.02, left - 0.05)))

    def _lose(self, slot: Slot, reason: str) -> None:
        if not slot.lost:
            slot.lose()
            slot.stop()
            self._lost(slot, reason)

    def _end(self, source: Source, slot: Slot) -> bool:
        ending = Ending.from_text(slot.ending) if slot.ending else Ending(unsure=True)
        keys = LockKeys.of(self._prefix, slot.name)
        try:
            released = self._store.release(keys, slot.acquisition, ending, slot.durability)
        except StoreUnavailable as error:
            refused = isinstance(error, StoreRefused)
            self._not_ended(slot, error, refused=refused)
            return refused
        slot.clear()
        source.freed(slot, released)
        return True

    def _not_ended(self, slot: Slot, error: StoreUnavailable, *, refused: bool) -> None:
        now = self._clock.monotonic()
        if slot.acquisition not in self._unended:
            self._unended[slot.acquisition] = now
            logger.warning("cannot free %s yet: %s", slot.name, error)
        elif refused and now - self._unended[slot.acquisition] > slot.ttl:
            logger.error("%s was not freed and is left to its ttl: %s", slot.name, error)
            slot.clear()

    def _forget_all_but(self, seen: set[str]) -> None:
        self._refused &= seen
        self._worded &= seen
        for since in (self._lingering, self._unended):
            for acquisition in since.keys() - seen:
                del since[acquisition]


def _spent(slot: Slot, now: float) -> bool:
    """May it be renewed no more?"""
    return 0 < slot.until <= now
