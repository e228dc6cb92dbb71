"""The store check at a worker's start: it logs where the locks live, and what in the store's setup can lose a lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ..errors import InvalidLockOptions, StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..options.durability import shown
from ..store.server_model import StoreInfo, may_evict
from ..utils.background import Loop, begin_thread
from ..utils.log import logger

if TYPE_CHECKING:
    from ..runtime import Runtime
__all__ = ["StoreCheck", "refuse_memory_in_several_processes", "refuse_without_disk"]


#: Seconds until a store that did not answer is asked again.
AGAIN: Final = 2.0
#: Seconds between two checks of the servers of a Redlock.
WATCH: Final = 10.0
_NO_ANSWER: Final = "the lock store did not answer: "
_REFUSED: Final = "the lock store refused: "


def refuse_without_disk(runtime: Runtime) -> None:
    """Check that the store can confirm that a write is on disk, if ``dlock_durability`` requires that.

    Raises:
        InvalidLockOptions: The store cannot confirm it. If the store does not answer, the first task finds out.
    """
    durability = runtime.settings.durability
    if not durability.fsync:
        return
    store = runtime.open_store(runtime.settings.timeout)
    try:
        fsyncs = store.info().can_confirm_fsync
    except StoreUnavailable as error:
        logger.warning("cannot tell whether the lock store confirms what is on disk: %s", error)
        return
    finally:
        store.close()
    if not fsyncs:
        raise InvalidLockOptions(
            f"invalid dlock_durability={shown(durability)}: the lock store cannot confirm that a write is on disk; "
            "expected Redis 7.2 or Valkey, with appendonly yes on every server"
        )


#: The pools of Celery that run every task in the worker's own process.
_ONE_PROCESS: Final = {f"celery.concurrency.{pool}" for pool in ("solo", "thread", "gevent", "eventlet")}


def refuse_memory_in_several_processes(runtime: Runtime, pool: type) -> None:
    """Check that the store is not in the memory of this process, if the pool has other ones.

    Raises:
        InvalidLockOptions: It is: each process of the pool would have locks of its own.
    """
    if runtime.settings.features.processes and not any(base.__module__ in _ONE_PROCESS for base in pool.__mro__):
        raise InvalidLockOptions(
            f"dlock_url='memory://' with the pool {pool.__module__}: its processes would not share the locks; expected "
            "a pool of one process (--pool=solo, threads, gevent or eventlet), or a server in dlock_url"
        )


class StoreCheck:
    """Asks the store how it is set up, in its own thread: a slow store does not delay the worker's start.

    It goes on to watch the servers of a Redlock. As long as a majority answers, no call fails, so only this thread
    reports a server that does not.

    Args:
        runtime: The runtime whose store to ask.
        parks: Whether there are tasks that wait in the store.
        goes_on: Called before each question; false ends the thread.
    """

    def __init__(self, runtime: Runtime, goes_on: Callable[[], bool], *, parks: bool) -> None:
        settings = runtime.settings
        self._urls = ", ".join(location.shown for location in settings.locations)
        self._locations = settings.locations
        self._prefix = settings.prefix
        self._parks = parks
        self._replicas = runtime.settings.durability.replicas
        # Opened here: if this process forks while a thread imports, the import is never finished in the child.
        self._store = runtime.open_store(settings.timeout)
        #: The servers that did not answer the last question, with the reasons; None before the first answer.
        self._away: Mapping[str, str] | None = None
        self._unreachable = False
        self.loop = Loop(
            "store check",
            self._run_round,
            goes_on=goes_on,
            close=self._store.close,
            begin=begin_thread("store-check"),
        )

    def start(self) -> None:
        logger.info("locks: %s, prefix %s", self._urls, self._prefix)
        self.loop.start()

    def _run_round(self) -> float | None:
        pause = AGAIN if self._away is None else WATCH
        try:
            info = self._store.info()
        except StoreUnavailable as error:
            if isinstance(error, StoreRefused) and self._away is None:
                self._report_refusal(error)
                return None
            self._report_unreachable(error, pause)
            return pause
        if self._unreachable:
            self._unreachable = False
            logger.info("lock store %s is reachable", self._urls)
        if self._away is None:
            self._judge(info)
        else:
            self._report_changes(self._away, self._away_servers(info.unreachable))
        self._away = self._away_servers(info.unreachable)
        return WATCH if len(self._locations) > 1 else None

    def _report_unreachable(self, error: StoreUnavailable, pause: float) -> None:
        if not self._unreachable:
            self._unreachable = True
            state = "is unreachable" if str(error).startswith(_NO_ANSWER) else "is not ready"
            reason = str(error).removeprefix(_NO_ANSWER).removeprefix(_REFUSED)
            logger.warning("lock store %s %s, retrying every %g s: %s", self._urls, state, pause, reason)

    def _report_refusal(self, error: StoreRefused) -> None:
        reason = str(error).removeprefix(_REFUSED)
        if self._refuses_locks():
            logger.error("lock store %s refuses every lock; action required: %s", self._urls, reason)
        else:
            logger.warning("cannot read the setup of lock store %s, so it is not checked: %s", self._urls, reason)

    def _refuses_locks(self) -> bool:
        """Return whether the store refuses locks too, and not only the commands that read its setup."""
        try:
            self._store.inspect(LockName("", 0))
        except StoreRefused:
            return True
        except StoreUnavailable:
            return False
        return False

    def _report_changes(self, before: Mapping[str, str], away: Mapping[str, str]) -> None:
        for name in away.keys() - before.keys():
            logger.warning("lock server is unreachable, locks need a majority of the others: %s", away[name])
        for name in before.keys() - away.keys():
            logger.info("lock server is reachable again: %s", name)

    def _away_servers(self, silent: Sequence[str]) -> Mapping[str, str]:
        """Return the texts about servers that did not answer, by the servers' names."""
        return {one.shown: text for one in self._locations for text in silent if text.startswith(f"{one.shown}: ")}

    def _judge(self, info: StoreInfo) -> None:
        if info.duplicate_servers:
            logger.error(
                "invalid dlock_url for Redlock: %s; action required: name independent servers", info.duplicate_servers
            )
        if info.unreachable:
            logger.warning(
                "lock servers are unreachable, locks need a majority of the others: %s", "; ".join(info.unreachable)
            )
        if may_evict(info.eviction):
            logger.warning(
                "lock store %s may drop locks when its memory is full: its maxmemory-policy is %s; "
                "action required: set it to noeviction",
                self._urls, info.eviction,
            )  # fmt: skip
        if info.replicas is not None and info.replicas < self._replicas:
            logger.warning(
                "dlock_durability requires %d replicas but a lock server has %d connected; locks on it fail until more "
                "replicas connect",
                self._replicas, info.replicas,
            )  # fmt: skip
        if self._parks and not info.durable:
            logger.warning(
                "tasks with on_conflict='queue' are parked in a store that is not durable: its restart loses waiting "
                "calls; action required: %s",
                info.durability_cure,
            )
