"""Carries a fault out, and writes it down before it begins and after it is over."""

import functools
import heapq
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.history import History
from chaos.schedule import KINDS, OF_A_CHILD, Fault
from chaos.stores import ChaosStore, run_command
from chaos.workers import Fleet, Member
from tests.support.proxy import Mode, Proxy
from tests.support.servers import Server

#: A fault that finds its worker not ready waits so long for it, in seconds.
PATIENCE = 4.0


@dataclass
class Targets:
    fleet: Fleet
    store: ChaosStore
    broker: Server
    proxy: Proxy
    #: Publishes a task whose body kills its process.
    exits: Callable[[], None]
    #: Pids of processes that are in a body now.
    inside: Callable[[], set[int]]


class Strikes:
    """A schedule that is being carried out; `look` does what is due."""

    def __init__(self, faults: Sequence[Fault], targets: Targets, history: History, say: Callable[[str], None]) -> None:
        self._targets, self._history, self._say = targets, history, say
        self._numbers = itertools.count()
        self._began = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.done: Counter[str] = Counter()
        self.missed = 0
        for fault in faults:
            due = self._began + fault.at
            self._at(due, functools.partial(self._strike, fault, due + PATIENCE))

    def look(self) -> bool:
        """False once all is over."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return bool(self._due)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), action))

    def _strike(self, fault: Fault, patient_until: float) -> None:
        struck = self._on_worker(fault) if fault.worker is not None else self._on_server(fault)
        if struck:
            self.done[fault.kind] += 1
            self._say(f"{time.monotonic() - self._began:7.2f} s  did {fault}")
        elif time.monotonic() < patient_until:
            self._at(time.monotonic() + 0.2, lambda: self._strike(fault, patient_until))
        else:
            self.missed += 1

    # -- workers

    def _on_worker(self, fault: Fault) -> bool:
        assert fault.worker is not None
        if fault.kind == "exit in body":
            self._targets.exits()
            self._note(fault)
            return True
        member = self._targets.fleet.members[fault.worker]
        if not member.ready or member.ending_since is not None:
            return False
        children = sorted(member.living()) if member.pool == "prefork" else []
        if fault.kind in OF_A_CHILD:
            if not children:
                return False
            # One that is inside, if there is one: the death of an idle child shows nothing.
            children = [child for child in children if child in self._targets.inside()] or children
            struck = [children[int(fault.choice * len(children))]]
        else:
            struck = [member.pid] if fault.kind in ("kill main", "SIGTERM", "SIGQUIT") else member.everybody()
        if fault.lasts:
            self._pause(fault, member, struck)
            return True
        number = {"SIGTERM": signal.SIGTERM, "SIGQUIT": signal.SIGQUIT}.get(fault.kind, signal.SIGKILL)
        if number is not signal.SIGKILL:
            member.ending_since = time.monotonic()
        # The children of a killed main process die with it.
        dying = member.everybody() if fault.kind == "kill main" else struck if number is signal.SIGKILL else []
        self._note(fault, pids=dying, main=member.pid, log=member.log, deadly=bool(dying))
        member.send(struck, number)
        return True

    def _pause(self, fault: Fault, member: Member, pids: list[int]) -> None:
        number = self._note(fault, pids=pids, main=member.pid, log=member.log)
        member.send(pids, signal.SIGSTOP)

        def resume() -> None:
            member.send(pids, signal.SIGCONT)
            self._history.note("over", number=number)

        self._at(time.monotonic() + fault.lasts, resume)

    # -- servers

    def _on_server(self, fault: Fault) -> bool:
        store, broker = self._targets.store, self._targets.broker
        # On a busy machine a pause begins late, and may last into the next fault.
        if not store.server.answering:
            return False
        number = self._note(fault)
        over = {
            "pause store, short": store.server.resume,
            "pause store, long": store.server.resume,
            "cut": self._network("pass"),
            "black hole": self._network("pass"),
            "cut replies": self._network("pass"),
        }.get(fault.kind, _nothing)
        {
            **store.faults(),
            "cut": self._network("refuse"),
            "black hole": self._network("blackhole"),
            "cut replies": self._network("cut_reply"),
            "broker CLIENT KILL": lambda: run_command(broker, "CLIENT", "KILL", "TYPE", "normal"),
            "restart broker": broker.restart,
        }[fault.kind]()

        def end() -> None:
            over()
            self._history.note("over", number=number)

        self._at(time.monotonic() + fault.lasts, end)
        return True

    def _network(self, mode: Mode) -> Callable[[], None]:
        return lambda: self._targets.proxy.set_mode(mode)

    def _note(self, fault: Fault, **facts: Any) -> int:
        number = next(self._numbers)
        target = KINDS[fault.kind].target
        self._history.note("fault", kind=fault.kind, target=target, number=number, lasts=fault.lasts, **facts)
        return number


def _nothing() -> None:
    return None
