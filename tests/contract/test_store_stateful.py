"""The scripts against a model written from the laws, in every order that Hypothesis can think of.

Owners are well behaved: whoever does not know the answer of an acquire (here: ``unsure``) releases with a tombstone.
Everything else is not: commands come twice, late, after the lock has changed hands, after it has expired.
"""

import itertools
import uuid
from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from celery_dlock.keys import LockKeys, shared_name
from celery_dlock.records import Acquired, By, Claim, Duplicate, Held, Identity, Released, Renewal, Tombstoned, Used
from celery_dlock.store import Ending
from celery_dlock.stores.redis import RedisStore
from tests.servers import Server

TTL = 60_000
IDENTITIES = st.sampled_from([None, Identity("a"), Identity("b"), Identity("a", 1)])


@dataclass(frozen=True)
class Ask:
    """One acquisition as its owner sent it. ``rank``: the model's name of a rank that it carries."""

    acquisition: str
    claim: Claim
    unsure: bool
    rank: int | None = None


@dataclass
class Lock:
    ask: Ask
    token: int
    rank: int
    word: bool
    count: str = "1"
    left: bool = False


@dataclass
class Model:
    """Time is the number of the step: ranks and ends are compared, never computed."""

    lock: Lock | None = None
    now: int = 0
    last: int = 0
    gone: set[str] = field(default_factory=set)
    done: dict[Identity, int] = field(default_factory=dict)
    used: Identity | None = None
    is_used: bool = False

    def acquire(self, ask: Ask) -> str:
        self.now += 1
        claim, rank = ask.claim, ask.rank if ask.rank is not None else self.now
        if self.lock and self.lock.ask.acquisition == ask.acquisition:
            return "again"
        if ask.acquisition in self.gone:
            return "gone"
        # The broker's flag counts only where no rank tells which publication this is a copy of.
        flagged = claim.redelivered and ask.rank is None
        if claim.identity in self.done and (flagged or rank <= self.done[claim.identity]):
            return "done"
        if claim.once and claim.identity and self.is_used:
            return "used"
        if self.lock:
            if self.is_twin(claim):
                self.lock.word = True
            return "held"
        # An id used before: its old mark would end this message's own copies, so it goes, and they have to be told.
        reused = claim.identity is not None and self.done.pop(claim.identity, None) is not None
        self.lock = Lock(ask, 0, rank, word=claim.redelivered or claim.copied or reused)
        return "acquired"

    def is_twin(self, claim: Claim) -> bool:
        assert self.lock
        return claim.identity is not None and self.lock.ask.claim.identity == claim.identity

    def renew(self, acquisition: str, notes: dict[str, str]) -> bool:
        if self.lock is None or self.lock.ask.acquisition != acquisition:
            return False
        self.lock.count = notes.get("count", self.lock.count)
        self.lock.left = self.lock.left or "left" in notes
        self.lock.word = self.lock.word or "word" in notes
        return True

    def release(self, ask: Ask, *, final: bool, uses: bool) -> Released:
        self.now += 1
        ours = self.lock is not None and self.lock.ask.acquisition == ask.acquisition
        word = ours and self.lock is not None and self.lock.word
        if ours:
            self.lock = None
        if ask.unsure:
            self.gone.add(ask.acquisition)
        identity = ask.claim.identity
        if identity and final and (word or not ours):
            self.done[identity] = self.now
        if identity and uses:
            self.used, self.is_used = identity, True
        return Released(ours, word)


class Scripts(RuleBasedStateMachine):
    server: Server
    asks = Bundle("asks")
    unsures = Bundle("unsures")

    @initialize()
    def begin(self) -> None:
        self.store = RedisStore(self.server.url(), timeout=5)
        self.client: redis.Redis = self.server.client()
        self.prefix = uuid.uuid4().hex
        self.keys = LockKeys.of(self.prefix, shared_name("x"))
        self.model = Model()
        self.numbers = itertools.count(1)
        #: What the server called the ranks that the model counts.
        self.ranks: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.client.close()

    @rule(
        target=asks,
        identity=IDENTITIES,
        redelivered=st.booleans(),
        copied=st.booleans(),
        once=st.booleans(),
        unsure=st.booleans(),
        carries=st.booleans(),
        pick=st.integers(0, 50),
    )
    def acquire(
        self,
        *,
        identity: Identity | None,
        redelivered: bool,
        copied: bool,
        once: bool,
        unsure: bool,
        carries: bool,
        pick: int,
    ) -> object:
        rank = sorted(self.ranks)[pick % len(self.ranks)] if carries and self.ranks else None
        by = By.of("t", identity and identity.task_id, "n", 1)
        claim = Claim(by, identity, redelivered, copied, 0, self.ranks.get(rank or -1), once)
        ask = Ask(f"owner.{next(self.numbers)}", claim, unsure, rank)
        self.send(ask)
        return ask

    @rule(target=unsures, ask=asks)
    def doubt(self, ask: Ask) -> object:
        return ask if ask.unsure else multiple()

    @rule(ask=unsures)
    def a_copy_of_an_acquire_arrives(self, ask: Ask) -> None:
        self.send(ask)

    @rule(ask=asks, notes=st.sampled_from([{}, {"count": "2"}, {"left": "1"}, {"word": "1"}]), twice=st.booleans())
    def renew(self, *, ask: Ask, notes: dict[str, str], twice: bool) -> None:
        renewal = Renewal(self.keys.lock, ask.acquisition, TTL, tuple(notes.items()))
        expected = self.model.renew(ask.acquisition, notes)
        assert self.store.renew([renewal] * (1 + twice)) == [expected] * (1 + twice)

    @rule(ask=asks, final=st.booleans(), uses=st.booleans())
    def release(self, *, ask: Ask, final: bool, uses: bool) -> None:
        used_ms = TTL if uses else 0
        ending = Ending(
            final, ask.claim.identity.digest if ask.claim.identity else "", used_ms, ask.claim.by.text, ask.unsure
        )
        assert self.store.release(self.keys, ask.acquisition, ending) == self.model.release(ask, final=final, uses=uses)

    @rule()
    def the_lease_expires(self) -> None:
        self.client.pexpire(self.keys.lock, -1)
        self.model.lock = None

    @rule()
    def the_scripts_are_forgotten(self) -> None:
        self.client.script_flush()

    def send(self, ask: Ask) -> None:
        answer = self.store.acquire(self.keys, ask.acquisition, TTL, ask.claim)
        expected = self.model.acquire(ask)
        assert self.kind_of(answer) == expected
        if isinstance(answer, Acquired):
            self.check_acquired(answer, new=expected == "acquired")
        elif isinstance(answer, Held):
            self.check_held(answer, ask)
        elif isinstance(answer, Used):
            assert self.model.used
            assert answer.by.task_id == self.model.used.task_id
            assert answer.same == (self.model.used == ask.claim.identity)

    def kind_of(self, answer: object) -> str:
        if isinstance(answer, Acquired):
            return "again" if answer.token == self.model.last else "acquired"
        return {Held: "held", Used: "used", Tombstoned: "gone", Duplicate: "done"}[type(answer)]

    def check_acquired(self, answer: Acquired, *, new: bool) -> None:
        lock = self.model.lock
        assert lock
        if not new:
            assert answer.token == lock.token
            return
        assert answer.token > self.model.last
        lock.token = self.model.last = answer.token
        assert self.ranks.setdefault(lock.rank, answer.rank_us) == answer.rank_us

    def check_held(self, answer: Held, ask: Ask) -> None:
        lock = self.model.lock
        assert lock
        holder = answer.holder
        assert (holder.token, holder.left, str(holder.hold_count)) == (lock.token, lock.left, lock.count)
        assert answer.twin == self.model.is_twin(ask.claim)
        rank = ask.rank if ask.rank is not None else self.model.now
        assert self.ranks.setdefault(rank, answer.rank_us) == answer.rank_us

    @invariant()
    def the_server_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "model"):
            return
        fields = self.client.hgetall(self.keys.lock)
        lock = self.model.lock
        expected: dict[str, str] = {}
        if lock:
            expected = {"acq": lock.ask.acquisition, "count": lock.count, "token": str(lock.token)}
            expected |= {"left": "1"} if lock.left else {}
            expected |= {"word": "1"} if lock.word else {}
        assert {
            name: fields[name] for name in fields.keys() - {"identity", "since", "wake", "task", "id", "node", "pid"}
        } == expected

    @invariant()
    def no_mark_is_missing_and_none_stays_for_ever(self) -> None:
        if not hasattr(self, "model"):
            return
        names = {self.keys.tombstone(acquisition) for acquisition in self.model.gone}
        names |= {self.keys.done(identity.digest) for identity in self.model.done}
        names |= {self.keys.used()} if self.model.is_used else set()
        names |= {self.keys.lock} if self.model.lock else set()
        names |= {self.keys.last} if self.model.last else set()
        assert set(self.client.scan_iter(f"{self.prefix}:*", count=10_000)) == names
        assert all(self.client.pttl(name) > 0 for name in names - {self.keys.last})


@pytest.mark.core
def test_the_scripts_do_what_the_laws_say_in_every_order(clean_server: Server) -> None:
    class Bound(Scripts):
        server = clean_server

    run_state_machine_as_test(Bound, settings=settings(max_examples=60, stateful_step_count=30))
