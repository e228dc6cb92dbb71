"""The time that a key stays taken after its holder's death: the store is asked every few milliseconds."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery_dlock.keys.lock_name import LockName
from chaos.history import Event, History, Tail
from chaos.stores import ERRORS, ChaosStore

LOOK = 0.01
#: Faults that do not keep a lock from being freed; all others of its worker or its store make a measure worthless.
HARMLESS = ("SCRIPT FLUSH", "CLIENT KILL", "broker CLIENT KILL", "restart broker", "exit in body")
#: Seconds after which all processes have found a store again that was away.
RECOVERY = 1.5
#: Seconds from the release on in which a process may still say that it was not scheduled before.
SETTLE = 0.3
#: Seconds between two looks after which the time of the release is unknown.
BLIND = 0.1


@dataclass
class _Dead:
    kind: str
    run: str
    token: int
    name: LockName
    at: int
    main: int
    #: When it was last found taken, and first found free.
    taken: int = 0
    free: int = 0


class Freeing:
    """A thread of its own; `seconds` are the measures by kind of death.

    A measure is dropped if its store or its worker met another fault meanwhile. It is dropped, too, if the store was
    not read around the release. `dropped` counts them.
    """

    def __init__(self, history: History, store: ChaosStore, task: Any) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.dropped = 0
        self._tail, self._store, self._task = Tail(history), store, task
        self._inside: dict[str, Event] = {}
        self._watched: list[_Dead] = []
        self._away: dict[int, int | None] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The end: who is still waited for was not freed all the time."""
        self._stopped.set()
        self._thread.join(10)
        for dead in (dead for dead in self._watched if not dead.free):
            self.seconds.setdefault(dead.kind, []).append((time.monotonic_ns() - dead.at) / 1e9)

    def inside(self) -> set[int]:
        """Pids of processes that are in a body now, as far as is known."""
        return {event["pid"] for event in list(self._inside.values())}

    def _run(self) -> None:
        while not self._stopped.wait(LOOK):
            for event in self._tail.new():
                self._read(event)
            with suppress(*ERRORS):
                self._look()

    def _read(self, event: Event) -> None:
        match event["what"]:
            case "in":
                self._inside[event["run"]] = event
            case "out":
                self._inside.pop(event["run"], None)
                # It ended by itself in the last moment, and freed its key itself.
                self._watched = [dead for dead in self._watched if dead.run != event["run"]]
            case "exit":
                of_worker = any(one["main"] == event["pid"] for one in self._inside.values())
                self._watch("exit in body of a worker" if of_worker else "exit in body", [event["pid"]], event)
            case "gap":
                self._drop(event["main"])
            case "fault" if event["kind"] not in HARMLESS:
                self._fault(event)
            case "over" if event["number"] in self._away:
                self._away[event["number"]] = event["at"]

    def _fault(self, event: Event) -> None:
        # A fault of the store concerns all processes; the death of one child concerns no other.
        if event["kind"] != "kill child":
            self._drop(event.get("main"))
        if event["target"] != "worker":
            self._away[event["number"]] = None
        elif event.get("deadly"):
            self._watch(event["kind"], event["pids"], event)

    def _drop(self, main: int | None) -> None:
        kept = [dead for dead in self._watched if main is not None and dead.main != main]
        self.dropped += len(self._watched) - len(kept)
        self._watched = kept

    def _watch(self, kind: str, pids: list[int], event: Event) -> None:
        for inside in [inside for inside in self._inside.values() if inside["pid"] in pids]:
            if "/" in inside["name"]:
                continue  # a seat, whose lock has another name
            name = self._task.lock_spec.name_of((inside["name"], 0, 0.0, ""), {})
            dead = _Dead(kind, inside["run"], inside["token"], name, event["at"], inside["main"])
            if any(end is None or event["at"] - end < RECOVERY * 1e9 for end in self._away.values()):
                self.dropped += 1
            else:
                self._watched.append(dead)
            del self._inside[inside["run"]]

    def _look(self) -> None:
        for dead in list(self._watched):
            if not dead.free:
                looked = time.monotonic_ns()
                if self._store.token(dead.name) == dead.token:
                    dead.taken = looked
                else:
                    dead.free = time.monotonic_ns()
            elif time.monotonic_ns() - dead.free > SETTLE * 1e9:
                self._watched.remove(dead)
                if dead.free - max(dead.taken, dead.at) > BLIND * 1e9:
                    self.dropped += 1
                else:
                    self.seconds.setdefault(dead.kind, []).append((dead.free - dead.at) / 1e9)
