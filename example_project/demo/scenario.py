"""The scenario of the demo: the published calls and the kills, in order."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from example_project.demo.history import Fact
from example_project.demo.ledgers import TASK
from example_project.demo.shop_floor import DemoError, OutOfTime, ShopFloor
from example_project.demo.sinks import DOOMED
from example_project.demo.verdict import inside, tick_past_ttl

BEATS = ("beat-a", "beat-b")
WORKERS = ("worker-a", "worker-b")
LEDGERS = "ledgers"  # the queue
# The second worker starts later: messages are ordered by their receipt, and two workers receive side by side.
LEDGER_WORKERS = {"ledger-a": LEDGERS, "ledger-b": "none-yet"}
YEAR = 2026


@dataclass(frozen=True, slots=True)
class Size:
    sends: int  # of each kind; each is published two or three times
    reports: int  # nightly reports, each 5 s long with a ttl of 2 s
    gap: float  # seconds between two waves
    entries: int  # of each account


FULL = Size(sends=12, reports=2, gap=2.0, entries=15)
SHORT = Size(sends=3, reports=1, gap=1.0, entries=15)

ACCOUNTS = ("ann", "bob", "eve", "joe")

# Copies in each wave: all together, two together and one later, one by one, two together.
WAVES = ((3, 0, 0), (2, 1, 0), (1, 1, 1), (2, 0, 0))


class Scenario:
    def __init__(self, floor: ShopFloor, size: Size) -> None:
        self._floor = floor
        self._size = size

    def failure(self) -> str:
        """Play the scenario. Return why it could not be played to its end; "" if it was."""
        try:
            self.play()
        except DemoError as error:
            return str(error)
        return ""

    def play(self) -> None:
        floor = self._floor
        floor.say("starting two workers, two more for the ledgers, and two beats")
        started = len(BEATS) + len(WORKERS) + len(LEDGER_WORKERS)
        floor.wait_for("workers and beats", lambda: len(floor.facts("ready")) == started)
        floor.say("publishing every send two or three times, and three rebuilds of one index at once")
        for product in ("tea", "coffee", "cocoa"):
            floor.publish("rebuild_index", "products", product)
        floor.publish("rebuild_index", "customers", "everyone")
        self._publish_wave(0)
        published = time.monotonic()
        self._kill_a_ledger_worker()  # first: its messages take longest to be delivered again
        self._kill_a_report()
        self._kill_senders()
        for wave in (1, 2):
            floor.wait_for("the next wave", _passed(published + wave * self._size.gap))
            self._publish_wave(wave)
        reports = self._size.reports
        floor.say(f"waiting for {reports} nightly report(s): 5 s each, with a ttl of 2 s, published by both beats")
        floor.wait_for("nightly reports", self._reports_ended)
        floor.processes.stop(*BEATS)
        floor.say("beats stopped, waiting for the end of all published tasks")
        try:
            floor.wait_for("the end of every task", floor.all_ended)
        except OutOfTime:
            floor.say("not every task has ended")  # the promise nothing_lost names them

    def _reports_ended(self) -> bool:
        """Return whether enough reports have ended, and a tick came while one of them was past its ttl.

        On a busy machine, a tick may be delivered too late for that. Then the next report shows it.
        """
        enough = len(self._ended("shop.nightly_report")) >= self._size.reports
        return enough and (tick_past_ttl(self._floor.all_facts()) or not self._floor.locking)

    def _publish_wave(self, wave: int) -> None:
        for number in range(self._size.sends):
            for _ in range(WAVES[number % len(WAVES)][wave]):
                self._floor.publish("send_receipt", f"R-{number}", f"customer{number}@shop.example")
                self._floor.publish("send_sms", f"S-{number}", f"+000{number}", "Your order is on its way")

    def _kill_a_report(self) -> None:
        """Kill a pool child in the middle of its body, as the kernel does when memory runs out."""
        floor = self._floor
        for _ in range(2):
            floor.publish("yearly_report", YEAR)
        floor.wait_for("a yearly report", lambda: self._entries("shop.yearly_report"))
        victim = self._entries("shop.yearly_report")[0]
        lock: Any = floor.task("yearly_report").lock_for(YEAR)
        holder = lock.holder()
        if floor.locking and not (holder and holder.task_id == victim.task_id):
            raise DemoError(f"the yearly report is in its body, and holder() says {holder}")
        killed = floor.strike(victim.pid)
        floor.say(f"killed pool child {victim.pid} in the body of the yearly report (its ttl is 20 s)")
        if floor.locking:
            # Not locked(): the second copy may take the lock at once.
            floor.wait_for("the killed report's lock", lambda: _token(lock.holder()) != holder.token, every=0.005)
            floor.free_after["shop.yearly_report"] = time.monotonic() - killed
        # Prove that the lock is free by acquiring it.
        floor.publish("yearly_report", YEAR)
        floor.wait_for("the next yearly report", lambda: len(self._entries("shop.yearly_report")) > 1)

    def _kill_senders(self) -> None:
        """Kill two pool children after their sends have arrived and before they get the answer."""
        floor = self._floor
        sms = ("send_sms", f"S-{DOOMED}", "+0007", "Your order is on its way")
        receipt = ("send_receipt", f"R-{DOOMED}", "customer7@shop.example")
        for name, subject, *rest in (sms, receipt):
            floor.publish(name, subject, *rest)
            floor.wait_for(f"{subject} to arrive", functools.partial(floor.arrived, name, subject), every=0.01)
            victim = next(fact for fact in self._entries(f"shop.{name}") if fact.subject == subject)
            floor.strike(victim.pid)
            floor.say(f"killed pool child {victim.pid}: {subject} has arrived without an answer; publishing it again")
            if floor.locking:
                lock: Any = floor.task(name).lock_for(subject, *rest)
                floor.wait_for(f"the lock of {subject}", lambda lock=lock: lock.holder() is None, every=0.01)
            floor.publish(name, subject, *rest)
        if floor.locking:
            second = [fact.task_id for fact in floor.facts("publish") if fact.subject == receipt[1]][1]
            floor.wait_for("the receipt to be held", lambda: floor.state(second) == "FAILURE")
            floor.say(f"{receipt[1]}: UnknownOutcome; an operator finds it sent and resolves it")
            floor.task("send_receipt").resolve(*receipt[1:], sent=bool(floor.arrived(*receipt[:2])))
            floor.publish(*receipt)

    def _kill_a_ledger_worker(self) -> None:
        """Kill a worker in the middle of the ledgers, with all its bodies and memory."""
        floor = self._floor
        doomed, other = LEDGER_WORKERS
        count = self._size.entries * len(ACCOUNTS)
        floor.say(f"publishing {self._size.entries} entries for each of {len(ACCOUNTS)} ledgers")
        for account in ACCOUNTS:
            for amount in range(1, self._size.entries + 1):
                floor.publish("post_entry", account, amount, queue=LEDGERS)
        if floor.locking:
            floor.wait_for("every entry parked or posted", lambda: len(self._ids("deliver")) == count, every=0.02)
            waiting = sum(floor.task("post_entry").waiting(account, 0).count for account in ACCOUNTS)
            floor.say(f"{waiting} entries are parked; a second worker starts posting")
        floor.consume_too(other, LEDGERS)
        if not floor.locking:
            return  # without the locks, no entry is parked
        floor.wait_for(f"an entry posted by {other}", functools.partial(self._bodies_of, other), every=0.01)
        floor.wait_for(f"an entry posted by {doomed}", functools.partial(self._paused_inside, doomed), every=0.01)
        bodies = self._bodies_of(doomed)
        floor.kill(doomed)
        floor.say(f"killed the worker {doomed} and all its children, in {len(bodies)} bodies")

    def _paused_inside(self, worker: str) -> bool:
        """Suspend a worker while it is in a body. If its bodies have ended by then, resume it."""
        if not self._bodies_of(worker):
            return False
        self._floor.processes.pause(worker)
        inside_now = bool(self._bodies_of(worker))
        if not inside_now:
            self._floor.processes.resume(worker)
        return inside_now

    def _ids(self, what: str) -> set[str]:
        return {fact.task_id for fact in self._floor.facts(what) if fact.task == TASK}

    def _bodies_of(self, worker: str) -> list[Fact]:
        children = {child.pid for child in psutil.Process(self._floor.processes.pid(worker)).children()}
        facts = [fact for fact in self._floor.all_facts() if fact.pid in children and fact.task == TASK]
        return inside(facts, {})

    def _entries(self, task: str) -> list[Fact]:
        return [fact for fact in self._floor.facts("enter") if fact.task == task]

    def _ended(self, task: str) -> list[Fact]:
        return [fact for fact in self._floor.facts("leave") if fact.task == task]


def _token(holder: Any) -> int | None:
    return None if holder is None else holder.token


def _passed(moment: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= moment
