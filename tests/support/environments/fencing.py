"""One schedule: a holder takes its time, its lease is given away, the next one writes, and then the late one does."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from tests.support.apps.fencing_resources import SQL, open_account, stored
from tests.support.environments.worker import running_environment
from tests.support.processes import session_of
from tests.support.proxy import Proxy
from tests.support.workers import running_worker

APP = "tests.support.apps.fencing"


# What keeps a holder from renewing its lease


@contextmanager
def paused(fencing):
    """All of its worker is stopped."""
    for process in session_of(fencing.late_worker.pid):
        process.suspend()
    yield
    for process in session_of(fencing.late_worker.pid):
        process.resume()


@contextmanager
def cut_off(fencing):
    """Its worker hears nothing of the lock store."""
    fencing.proxy.set_mode("blackhole")
    yield
    fencing.proxy.set_mode("pass")


@contextmanager
def emptied(fencing):
    """The lock store has lost all that it knew."""
    fencing.environment.store_client.flushdb()
    yield


CAUSES = {"paused": paused, "cut off": cut_off, "emptied": emptied}


# The schedule


@dataclass
class Outcome:
    """The outcome of one resource."""

    late_words: list[str]
    next_words: list[str]
    late_token: int
    next_token: int
    value: object
    fence: int


class FencingEnvironment:
    """A worker that comes late, one that does not, and the places of the resources by kind."""

    def __init__(self, environment, proxy, late_worker, places):
        self.environment = environment
        self.proxy = proxy
        self.late_worker = late_worker
        self.places = places

    def play(self, cause):
        """Every resource, with tokens and without, in one run of the schedule; outcomes by kind and fenced."""
        return _Play(self, cause).outcomes()


class _Play:
    def __init__(self, fencing, cause):
        self.fencing, self.environment, self.cause = fencing, fencing.environment, cause
        self.pairs = [(kind, fenced) for kind in fencing.places for fenced in (True, False)]

    def outcomes(self):
        for kind, fenced in self.pairs:
            if kind in SQL and kind != "a row that may be missing":
                open_account(self.fencing.places[kind], self._name(kind, fenced))
        late = self._send("late", [-1])
        for pair in self.pairs:
            self.environment.mark(self._row("late", pair), "sure")
        with CAUSES[self.cause](self.fencing):
            self._let_go("next")
            later = self._send("next", [1, 2])
            next_tokens = {pair: result.get(timeout=60) for pair, result in later.items()}
            self._let_go("late")  # when it wakes it writes, and nothing else before
        late_tokens = {pair: result.get(timeout=60) for pair, result in late.items()}
        return {pair: self._outcome(pair, late_tokens[pair], next_tokens[pair]) for pair in self.pairs}

    def _name(self, kind, fenced):
        return f"{self.cause}-{kind}-{fenced}".replace(" ", "-")

    def _row(self, who, pair):
        return f"{who}-{self._name(*pair)}"

    def _send(self, who, values):
        return {pair: self._write(who, pair, values) for pair in self.pairs}

    def _write(self, who, pair, values):
        kind, fenced = pair
        args = (self._name(kind, fenced), self._row(who, pair), kind, self.fencing.places[kind], values, fenced)
        return self.environment.app.writes.apply_async(args, queue=who)

    def _let_go(self, who):
        for pair in self.pairs:
            self.environment.marks_client.rpush(f"go:{self._row(who, pair)}", 1)

    def _outcome(self, pair, late_token, next_token):
        kind, fenced = pair
        value, fence = stored(kind, self.fencing.places[kind], self._name(kind, fenced))
        late_words, next_words = (self.environment.words(self._row(who, pair)) for who in ("late", "next"))
        return Outcome(late_words, next_words, late_token, next_token, value, fence)


@contextmanager
def running_fencing_environment(folder, places):
    """Workers for as many bodies at once as there are resources, twice."""
    with ExitStack() as stack:
        environment = stack.enter_context(running_environment(folder, APP))
        places = {kind: place or environment.broker.url(5) for kind, place in places.items()}
        proxy = stack.enter_context(Proxy(environment.store.port))
        many = 2 * len(places)
        environment.start("-Q", "next", pool="threads", concurrency=many)
        through = replace(environment.urls, lock=proxy.url())
        late = running_worker(APP, "-Q", "late", folder=folder, urls=through, concurrency=many)
        yield FencingEnvironment(environment, proxy, stack.enter_context(late), places)
