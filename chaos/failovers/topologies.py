"""The stores that fail over, each with its way to lose a server and to have it back."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from redis.crc import key_slot

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.redis.keys import LockKeys
from tests.support.server_sets import FailoverSet, ServerSet
from tests.support.servers import Server
from tests.support.topologies import MASTER_NAME, ClusterSet, How, RedlockSet, SentinelSet

#: Seconds for which a server that is not replaced stays away.
AWAY = 3.0


class Stand(AbstractContextManager["Stand"], ABC):
    """Servers that keep locks. `strike`, then `replaced`, then `heal`; before that perhaps `cut_off`."""

    #: Whether tasks may wait in it, and whether one server copies what another takes.
    queues = True
    copies = False
    #: In turn.
    hows: tuple[How, ...] = ("kill", "stop")

    @property
    @abstractmethod
    def conf(self) -> dict[str, Any]:
        """The settings of an app that keeps its locks here."""

    @abstractmethod
    def lock_servers(self) -> Sequence[Server]:
        """The servers that keep the locks now."""

    @abstractmethod
    def aim(self, number: int, names: Sequence[LockName]) -> set[LockName]:
        """Choose what to strike the next time; gives those locks that are kept there."""

    @abstractmethod
    def strike(self, how: How) -> float:
        """Returns when (monotonic, s) the victim was gone."""

    def cut_off(self, seconds: float) -> None:
        """For so long nothing that the victim takes is copied; what it says yes to is lost if it then fails."""

    def replaced(self) -> None:
        """Wait until another server is in its place, where that is so."""

    @abstractmethod
    def heal(self, *, wait: bool) -> None:
        """Bring the victim back, and perhaps wait until all is as it should be."""

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class Standalone(Stand):
    """One server that dies or hangs, and returns: with all its data if `persistent`, else empty."""

    def __init__(self, folder: Path, *, persistent: bool) -> None:
        self._server = Server(folder / "store", persistent=persistent).start()

    @property
    def conf(self) -> dict[str, Any]:
        return {"dlock_url": self._server.url()}

    def lock_servers(self) -> Sequence[Server]:
        return [self._server]

    def aim(self, number: int, names: Sequence[LockName]) -> set[LockName]:
        return set(names)

    def strike(self, how: How) -> float:
        self._server.kill() if how == "kill" else self._server.pause()
        gone = time.monotonic()
        if how == "kill":
            self._server.start()
        else:
            time.sleep(AWAY)
            self._server.resume()
        return gone

    def heal(self, *, wait: bool) -> None: ...

    def close(self) -> None:
        self._server.kill()


class _SetStand(Stand):
    """Several servers that start and end together."""

    _set: ServerSet

    def close(self) -> None:
        self._set.__exit__()


class _FailoverStand(_SetStand):
    """Primaries with replicas; the victim is a primary."""

    copies = True
    _set: FailoverSet
    _victim: Server

    def cut_off(self, seconds: float) -> None:
        _cut_off(self._victim, seconds)

    def heal(self, *, wait: bool) -> None:
        self._set.bring_back(wait=False)
        _copied_again(self._victim)
        if wait:
            self._set.wait_until_whole(within=90)


class Sentinels(_FailoverStand):
    _set: SentinelSet

    def __init__(self, folder: Path) -> None:
        self._set = SentinelSet(folder / "store").__enter__()
        self._victim = self._set.primary()

    @property
    def conf(self) -> dict[str, Any]:
        return {"dlock_url": self._set.url(), "dlock_transport_options": {"master_name": MASTER_NAME}}

    def lock_servers(self) -> Sequence[Server]:
        return [self._set.primary()]

    def aim(self, number: int, names: Sequence[LockName]) -> set[LockName]:
        self._victim = self._set.primary()
        return set(names)

    def strike(self, how: How) -> float:
        self._set.fail_over(how, wait=False)
        return time.monotonic()

    def replaced(self) -> None:
        self._set.wait_for_promotion(self._victim, within=60)


class Cluster(_FailoverStand):
    _set: ClusterSet

    def __init__(self, folder: Path) -> None:
        self._set = ClusterSet(folder / "store").__enter__()
        self._slot, self._victim = 0, self._set.nodes[0]

    @property
    def conf(self) -> dict[str, Any]:
        return {"dlock_url": self._set.url()}

    def lock_servers(self) -> Sequence[Server]:
        return self._set.primaries()

    def aim(self, number: int, names: Sequence[LockName]) -> set[LockName]:
        slots = {name: key_slot(LockKeys.of("dlock", name).lock.encode()) for name in names}
        self._slot = list(slots.values())[number % len(slots)]
        self._victim = self._set.node_of(self._slot)
        return {name for name, slot in slots.items() if self._set.node_of(slot) is self._victim}

    def strike(self, how: How) -> float:
        self._set.fail_over(self._slot, how, wait=False)
        return time.monotonic()

    def replaced(self) -> None:
        self._set.wait_for_promotion(self._slot, self._victim, within=60)


class Redlock(_SetStand):
    """Of three nodes one fails at a time, of five one and two in turn; a killed one returns empty."""

    _set: RedlockSet
    queues = False
    # Two in a row return empty: of a lock that the first one missed, a majority then knows nothing.
    hows = ("kill", "kill", "stop", "stop")

    def __init__(self, folder: Path, *, nodes: int) -> None:
        self._set = RedlockSet(folder / "store", nodes=nodes).__enter__()
        self._victims: list[Server] = []

    @property
    def conf(self) -> dict[str, Any]:
        return {"dlock_url": self._set.urls()}

    def lock_servers(self) -> Sequence[Server]:
        return self._set.nodes

    def aim(self, number: int, names: Sequence[LockName]) -> set[LockName]:
        # In turn: a minority is struck so that it changes each time.
        count = 1 + number % (len(self._set.nodes) // 2)
        self._victims = [self._set.nodes[(number + n) % len(self._set.nodes)] for n in range(count)]
        return set(names)

    def strike(self, how: How) -> float:
        for victim in self._victims:
            victim.kill() if how == "kill" else victim.pause()
        return time.monotonic()

    def replaced(self) -> None:
        time.sleep(AWAY)

    def heal(self, *, wait: bool) -> None:
        for victim in self._victims:
            victim.resume() if victim.running else victim.start()


#: By the name that `make chaos STORE=` takes.
STANDS: dict[str, Callable[..., Stand]] = {
    "standalone": Standalone,
    "sentinel": Sentinels,
    "cluster": Cluster,
    "redlock3": Redlock,
    "redlock5": Redlock,
}


def stand(store: str, folder: Path, *, persistent: bool = False) -> Stand:
    """The servers of one name, running."""
    if store == "standalone":
        return Standalone(folder, persistent=persistent)
    return Redlock(folder, nodes=int(store[-1])) if store.startswith("redlock") else STANDS[store](folder)


def _cut_off(victim: Server, seconds: float) -> None:
    """Cut the replicas off. A replica reconnects at once and asks for what it missed, so that is refused as well."""
    with victim.client() as client:
        client.execute_command("ACL SETUSER", "default", "-psync", "-sync")
        client.execute_command("CLIENT KILL", "TYPE", "replica")
    time.sleep(seconds)


def _copied_again(victim: Server) -> None:
    with victim.client() as client:
        client.execute_command("ACL SETUSER", "default", "+psync", "+sync")
