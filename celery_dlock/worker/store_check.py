"""What a worker says at its start of the store: where the locks are, and what about it can cost one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ..errors import InvalidLockOptions, StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..options.durability import shown
from ..utils.background import Loop, begin_thread
from ..utils.log import logger

if TYPE_CHECKING:
    from ..options.durability import Durability
    from ..runtime import Runtime
    from ..store.base import StoreInfo

__all__ = ["StoreCheck", "refuse_without_disk"]


#: Seconds until a store that did not answer is asked once more.
AGAIN: Final = 2.0
#: Seconds between two looks at the servers of a Redlock.
WATCH: Final = 10.0


def refuse_without_disk(runtime: Runtime, durabilities: Mapping[str, Durability]) -> None:
    """Check that the store can confirm that a write is on disk, where somebody asks for it.

    Args:
        runtime: Whose store to ask.
        durabilities: What is asked for, by the names of tasks.

    Raises:
        InvalidLockOptions: It cannot. One that does not answer is left to the first task.
    """
    asks = [name for name, durability in durabilities.items() if durability.fsync]
    if not asks:
        return
    store = runtime.store(runtime.settings.timeout)
    try:
        fsyncs = store.facts().fsyncs
    except StoreUnavailable as error:
        logger.warning("cannot tell whether the lock store confirms what is on disk: %s", error)
        return
    finally:
        store.close()
    if not fsyncs:
        raise InvalidLockOptions(
            f"task {asks[0]!r}: durability={shown(durabilities[asks[0]])} is not allowed: the lock store cannot "
            "confirm that a write is on disk; allowed: with Redis 7.2 or Valkey, and appendonly yes on every server"
        )


class StoreCheck:
    """Asks the store how it is set up, in a thread of its own: no start waits for a store.

    The servers of a Redlock it goes on to ask: that one of them is away costs nobody anything, so nobody else tells.

    Args:
        runtime: Whose store to ask.
        parks: Are there tasks that wait in the store?
        replicas: How many replicas have to confirm a write, at the most.
        goes_on: Asked before each try; false ends the thread.
    """

    def __init__(self, runtime: Runtime, goes_on: Callable[[], bool], *, parks: bool, replicas: int = 0) -> None:
        settings = runtime.settings
        self._place = ", ".join(place.shown for place in settings.places)
        self._places = settings.places
        self._prefix = settings.prefix
        self._parks = parks
        self._replicas = replicas
        self._goes_on = goes_on
        # Made here: a thread that imports while this process forks would leave its import unfinished in the child.
        self._store = runtime.store(settings.timeout)
        self._loop = Loop("inspection", self._turn, close=self._store.close, begin=begin_thread("inspection"))

    def start(self) -> None:
        logger.info("locks: %s, prefix %s", self._place, self._prefix)
        self._loop.start()

    def _turn(self) -> float | None:
        try:
            facts = self._facts()
            if facts is not None:
                self._judge(facts)
                if len(self._places) > 1:
                    self._watch(self._away(facts.silent))
        except StoreRefused as error:
            if self._refuses_locks():
                logger.error("no lock can be had of the lock store at %s: %s", self._place, error)  # noqa: TRY400  # it says all
            else:
                logger.warning("cannot tell how the lock store at %s is set up: %s", self._place, error)
        return None

    def _refuses_locks(self) -> bool:
        """Or only the commands that tell how it is set up?"""
        try:
            self._store.inspect(LockName("", 0))
        except StoreRefused:
            return True
        except StoreUnavailable:
            return False
        return False

    def _facts(self) -> StoreInfo | None:
        told = False
        while self._goes_on():
            try:
                facts = self._store.facts()
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                if not told:
                    logger.warning("the lock store at %s is not there yet: %s", self._place, error)
                told = True
                time.sleep(AGAIN)
                continue
            if told:
                logger.info("the lock store at %s answers", self._place)
            return facts
        return None

    def _watch(self, away: Mapping[str, str]) -> None:
        told = False
        while self._goes_on():
            time.sleep(WATCH)
            try:
                facts = self._store.facts()
            except StoreUnavailable as error:
                if not told:
                    logger.warning("the lock store at %s is away: %s", self._place, error)
                told = True
                continue
            if told:
                logger.info("the lock store at %s answers", self._place)
            told, before, away = False, away, self._away(facts.silent)
            for name in away.keys() - before.keys():
                logger.warning("a server of the lock store is away: %s", away[name])
            for name in before.keys() - away.keys():
                logger.info("a server of the lock store answers again: %s", name)

    def _away(self, silent: Sequence[str]) -> Mapping[str, str]:
        """What is said of those that did not answer, by their names."""
        return {place.shown: said for place in self._places for said in silent if said.startswith(f"{place.shown}: ")}

    def _judge(self, facts: StoreInfo) -> None:
        if facts.twins:
            logger.error("dlock_url is not allowed for Redlock: %s", facts.twins)
        if facts.silent:
            logger.warning("not all servers of the lock store answer: %s", "; ".join(facts.silent))
        if facts.eviction not in ("noeviction", ""):
            logger.warning(
                "the lock store at %s may drop locks when its memory is full: its maxmemory-policy is %s, "
                "and should be noeviction",
                self._place, facts.eviction,
            )  # fmt: skip
        if facts.replicas is not None and facts.replicas < self._replicas:
            logger.warning(
                "durability wants %d replicas, and a server of the lock store has %d: no lock counts there until as "
                "many are connected",
                self._replicas, facts.replicas,
            )  # fmt: skip
        if self._parks and not facts.durable:
            logger.warning(
                "tasks with on_conflict='queue' are parked in a store without an append-only file: "
                "a restart of it loses what waits (set appendonly yes)"
            )
