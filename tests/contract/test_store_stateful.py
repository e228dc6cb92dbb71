"""A store against a model written from the laws, in every order that Hypothesis can think of.

Owners are well behaved: if the answer of an acquire is unknown (here: ``unsure``), they release with a tombstone.
Everything else is not: commands come twice, late, after the lock has another holder, after it has expired.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest
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

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.keys.lock_name import idempotency_key
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import (
    Acquired,
    AcquireRequest,
    Duplicate,
    Held,
    Identity,
    Released,
    Renewal,
    Requester,
    Tombstoned,
    Unknown,
    Used,
)
from celery_dlock.store.redis.keys import LockKeys
from tests.contract.stateful_targets import TARGETS, Target
from tests.support.servers import Server
from tests.support.stores import name_in

T = TypeVar("T")

TTL = 60_000
IDENTITIES = st.sampled_from([None, Identity("a"), Identity("b"), Identity("a", 1)])


@dataclass(frozen=True)
class Ask:
    """One acquisition as its owner sent it. ``rank``: the model's name of a rank that it carries."""

    acquisition: str
    request: AcquireRequest
    unsure: bool
    rank: int | None = None


@dataclass
class Lock:
    ask: Ask
    token: int
    rank: int
    word: bool
    count: str = ""
    left: bool = False


@dataclass
class Mark:
    """The state of the name's last run: used, begun, unknown, free; "" if there is none."""

    state: str
    acquisition: str = ""
    identity: Identity | None = None
    seed: str = ""
    #: Whose earlier run died.
    crashed: Identity | None = None


@dataclass
class Model:
    """Time is the number of the step: ranks and ends are compared, never computed."""

    lock: Lock | None = None
    now: int = 0
    last: int = 0
    gone: set[str] = field(default_factory=set)
    done: dict[Identity, int] = field(default_factory=dict)
    mark: Mark = field(default_factory=lambda: Mark(""))

    def acquire(self, ask: Ask) -> str:  # noqa: PLR0911  # a table of answers
        self.now += 1
        request, rank = ask.request, ask.rank if ask.rank is not None else self.now
        if self.lock and self.lock.ask.acquisition == ask.acquisition:
            return "again"
        if ask.acquisition in self.gone:
            return "tombstoned"
        if request.identity in self.done and (request.redelivered or rank <= self.done[request.identity]):
            return "done"
        once = request.once and request.identity is not None
        if once and self.mark.state == "used":
            return "used"
        if self.lock:
            if self.same_message(request):
                self.lock.word = True
            return "held"
        if once and not self.begin(ask):
            return "unknown"
        # An id used before: its old mark would end this message's own copies. So the mark goes, and they are marked.
        reused = request.identity is not None and self.done.pop(request.identity, None) is not None
        self.lock = Lock(ask, 0, rank, word=request.redelivered or request.republished or reused)
        return "acquired"

    def begin(self, ask: Ask) -> bool:
        """Note that a body begins; false if it is held back."""
        mark, crashed = self.mark, self.mark.crashed
        if mark.state == "unknown" or (mark.state == "started" and mark.acquisition != ask.acquisition):
            if ask.request.hold_if_unknown:
                return False
            crashed = mark.identity
        self.mark = Mark("started", ask.acquisition, ask.request.identity, mark.seed, crashed)
        return True

    def same_message(self, request: AcquireRequest) -> bool:
        assert self.lock
        return request.identity is not None and self.lock.ask.request.identity == request.identity

    def renew(self, acquisition: str, notes: dict[str, str]) -> bool:
        if self.lock is None or self.lock.ask.acquisition != acquisition:
            return False
        self.lock.count = notes.get("count", self.lock.count)
        self.lock.left = self.lock.left or "releasing" in notes
        self.lock.word = self.lock.word or "dup" in notes
        return True

    def release(self, ask: Ask, *, final: bool, uses: bool, once: bool) -> Released:
        self.now += 1
        ours = self.lock is not None and self.lock.ask.acquisition == ask.acquisition
        word = ours and self.lock is not None and self.lock.word
        if ours:
            self.lock = None
        if ask.unsure:
            self.gone.add(ask.acquisition)
        identity = ask.request.identity
        if identity and final and (word or not ours):
            self.done[identity] = self.now
        if identity and uses:
            self.mark = Mark("used", ask.acquisition, identity, "bodys")
        elif identity and once and self.mark.state == "started" and self.mark.acquisition == ask.acquisition:
            crashed = self.mark.crashed
            self.mark = Mark("unknown" if crashed else "cleared", "", crashed or identity, self.mark.seed)
        return Released(ours, word)

    def is_running(self) -> bool:
        return bool(self.lock and self.lock.ask.acquisition == self.mark.acquisition)

    def resolve(self, *, sent: bool) -> bool:
        if self.mark.state == "unknown" or (self.mark.state == "started" and not self.is_running()):
            self.mark = Mark("used" if sent else "cleared", "", self.mark.identity, self.mark.seed)
            return True
        return False

    def use(self) -> tuple[str, Identity] | None:
        if self.mark.state in ("", "cleared", "forgotten") or not self.mark.identity:
            return None
        state = "running" if self.is_running() else "unknown"
        return "used" if self.mark.state == "used" else state, self.mark.identity


class Scripts(RuleBasedStateMachine):
    make_target: Callable[[], Target]
    asks = Bundle("asks")
    unsures = Bundle("unsures")

    @initialize()
    def begin(self) -> None:
        self.target = type(self).make_target()
        self.store = self.target.store
        self.keys = LockKeys.of(self.target.prefix, shared_name("x"))
        self.model = Model()
        self.numbers = itertools.count(1)
        #: What the server called the ranks that the model counts.
        self.ranks: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "target"):
            self.target.close()

    def lost(self, command: Callable[[], T]) -> tuple[T, bool]:
        """Carry out a command. Return its answer, and whether it was sent twice, because a reply was lost."""
        before = self.target.losses()
        return command(), self.target.losses() > before

    @rule(
        target=asks,
        identity=IDENTITIES,
        redelivered=st.booleans(),
        republished=st.booleans(),
        once=st.booleans(),
        hold=st.booleans(),
        unsure=st.booleans(),
        carries=st.booleans(),
        pick=st.integers(0, 50),
    )
    def acquire(
        self,
        *,
        identity: Identity | None,
        redelivered: bool,
        republished: bool,
        once: bool,
        hold: bool,
        unsure: bool,
        carries: bool,
        pick: int,
    ) -> object:
        rank = sorted(self.ranks)[pick % len(self.ranks)] if carries and self.ranks else None
        by = Requester.of("t", identity and identity.task_id, "n", 1)
        request = AcquireRequest(
            by, identity, redelivered, republished, 0, self.ranks.get(rank or -1), once, hold_if_unknown=hold
        )
        ask = Ask(f"owner.{next(self.numbers)}", request, unsure, rank)
        self.send(ask)
        return ask

    @rule(target=unsures, ask=asks)
    def doubt(self, ask: Ask) -> object:
        return ask if ask.unsure else multiple()

    @rule(ask=unsures)
    def a_copy_of_an_acquire_arrives(self, ask: Ask) -> None:
        self.send(ask)

    @rule(ask=asks, notes=st.sampled_from([{}, {"count": "2"}, {"releasing": "1"}, {"dup": "1"}]), twice=st.booleans())
    def renew(self, *, ask: Ask, notes: dict[str, str], twice: bool) -> None:
        renewal = Renewal(name_in(self.keys), ask.acquisition, TTL, tuple(notes.items()))
        expected = self.model.renew(ask.acquisition, notes)
        assert self.store.renew([renewal] * (1 + twice)) == [expected] * (1 + twice)

    @rule(ask=asks, final=st.booleans(), uses=st.booleans(), once=st.booleans())
    def release(self, *, ask: Ask, final: bool, uses: bool, once: bool) -> None:
        """``once``: its body has ended and said so; a dead one's release does not."""
        used_ms = TTL if uses else 0
        identity = ask.request.identity.digest if ask.request.identity else ""
        by, seed = ask.request.requester.text, "bodys"
        ending = ReleaseRequest(final, identity, used_ms, by, ask.unsure, once=once, seed=seed, window_ms=TTL)
        answer, lost = self.lost(lambda: self.store.release(name_in(self.keys), ask.acquisition, ending))
        expected = self.model.release(ask, final=final, uses=uses, once=once)
        if lost:
            expected = self.model.release(ask, final=final, uses=uses, once=once)._replace(ours=True)
        assert answer == expected

    @rule()
    def it_is_forgotten(self) -> None:
        assert self.store.forget_run(name_in(self.keys)) == (self.model.mark.state not in ("", "forgotten"))
        if self.model.mark.state:
            self.model.mark = Mark("forgotten")

    @rule(sent=st.booleans())
    def it_is_resolved(self, *, sent: bool) -> None:
        assert self.store.resolve_run(name_in(self.keys), sent=sent, window_ms=TTL) == self.model.resolve(sent=sent)

    @rule()
    def the_lease_expires(self) -> None:
        self.target.expire_lock(name_in(self.keys))
        self.model.lock = None

    @rule()
    def the_scripts_are_forgotten(self) -> None:
        self.target.forget_scripts()

    def send(self, ask: Ask) -> None:
        answer, lost = self.lost(lambda: self.store.acquire(name_in(self.keys), ask.acquisition, TTL, ask.request))
        expected = self.model.acquire(ask)
        if lost:
            # The rank of a second copy is not that of the first one. Neither is the time of a refusal.
            again = self.model.acquire(ask)
            expected = again if expected != "acquired" else expected
        assert self.kind_of(answer) == expected
        if isinstance(answer, Acquired):
            self.check_acquired(answer, new=expected == "acquired", lost=lost)
        elif isinstance(answer, Held):
            self.check_held(answer, ask)
        elif isinstance(answer, Used):
            assert self.model.mark.identity
            assert answer.by.task_id == self.model.mark.identity.task_id
            assert answer.same_message == (self.model.mark.identity == ask.request.identity)
        elif isinstance(answer, Unknown):
            assert self.model.mark.identity
            assert answer.by.task_id == self.model.mark.identity.task_id

    def kind_of(self, answer: object) -> str:
        if isinstance(answer, Acquired):
            return "again" if answer.token == self.model.last else "acquired"
        return {Held: "held", Used: "used", Unknown: "unknown", Tombstoned: "tombstoned", Duplicate: "done"}[
            type(answer)
        ]

    def check_acquired(self, answer: Acquired, *, new: bool, lost: bool) -> None:
        lock = self.model.lock
        assert lock
        if not new:
            assert answer.token == lock.token
            return
        assert answer.token > self.model.last
        lock.token = self.model.last = answer.token
        if self.model.mark.acquisition == lock.ask.acquisition and lock.ask.request.once and lock.ask.request.identity:
            self.model.mark.seed = self.model.mark.seed or str(answer.token)
            assert (answer.seed, answer.after_crash) == (self.model.mark.seed, bool(self.model.mark.crashed))
        else:
            assert (answer.seed, answer.after_crash) == ("", False)
        assert lost or self.ranks.setdefault(lock.rank, answer.rank_us) == answer.rank_us

    def check_held(self, answer: Held, ask: Ask) -> None:
        lock = self.model.lock
        assert lock
        holder = answer.holder
        assert (holder.token, holder.releasing, str(holder.hold_count)) == (lock.token, lock.left, lock.count or "1")
        assert answer.same_message == self.model.same_message(ask.request)
        rank = ask.rank if ask.rank is not None else self.model.now
        assert self.ranks.setdefault(rank, answer.rank_us) == answer.rank_us

    @invariant()
    def the_server_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "model"):
            return
        fields = self.target.look().held.get(self.keys.lock, {})
        lock = self.model.lock
        expected: dict[str, str] = {}
        if lock:
            expected = {"acq": lock.ask.acquisition, "token": str(lock.token), "ttl": str(TTL)}
            expected |= {"count": lock.count} if lock.count else {}
            expected |= {"releasing": "1"} if lock.left else {}
            expected |= {"dup": "1"} if lock.word else {}
        assert {
            name: fields[name] for name in fields.keys() - {"identity", "since", "notify", "task", "id", "process"}
        } == expected

    @invariant()
    def operators_see_what_became_of_the_last_run(self) -> None:
        if not hasattr(self, "model"):
            return
        seen, expected = self.store.last_run(name_in(self.keys)), self.model.use()
        assert (seen and (seen.state, seen.task_id)) == (expected and (expected[0], expected[1].task_id))
        if seen:
            assert seen.idempotency_key == idempotency_key(self.keys.name, self.model.mark.seed)
            assert 0 < seen.expires_in <= 25 * 3600

    @invariant()
    def no_mark_is_missing_and_none_stays_for_ever(self) -> None:
        if not hasattr(self, "model"):
            return
        names = {self.keys.tombstone(acquisition) for acquisition in self.model.gone}
        names |= {self.keys.done(identity.digest) for identity in self.model.done}
        names |= {self.keys.run()} if self.model.mark.state else set()
        unsettled = self.target.indexes_runs and self.model.mark.state in ("started", "unknown")
        names |= {self.keys.named("unsettled")} if unsettled else set()
        names |= {self.keys.lock} if self.model.lock else set()
        names |= {self.keys.last} if self.model.last else set()
        seen = self.target.look()
        assert seen.held.keys() == names
        assert all(seen.lives[name] > 0 for name in names - {self.keys.last})


@pytest.mark.invariant("state-change-is-atomic")
@pytest.mark.core
@pytest.mark.parametrize("target", TARGETS)
def test_the_scripts_do_what_the_laws_say_in_every_order(clean_server: Server, target: str) -> None:
    class Bound(Scripts):
        make_target = partial(TARGETS[target], clean_server)

    run_state_machine_as_test(Bound, settings=settings(stateful_step_count=30))
