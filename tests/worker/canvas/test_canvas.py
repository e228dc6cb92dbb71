"""No hanging result: the end of every member of a canvas when one of them, `held`, meets a held lock."""

import gc
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from celery.exceptions import ChordError, TaskRevokedError
from celery.states import FAILURE, PENDING, READY_STATES, REVOKED, SUCCESS

from celery_dlock import LockHeld
from tests.conftest import WORKERS
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

# One module, one worker: its tests stay in one process of xdist.
pytestmark = [pytest.mark.core, pytest.mark.celerys]

STATES: dict[str, set[str]] = {
    "REVOKED": {REVOKED},
    "SUCCESS": {SUCCESS},  # ran once, unless it is `held`
    "FAILURE": {FAILURE},
    # REVOKED at once; some versions of Celery make it FAILURE when the chord's header is through.
    "ENDED": {REVOKED, FAILURE},
    # A link that does not run, or a result that is ignored.
    "NOTHING": {PENDING},
}

# A shape in Python, where every unknown name is a member of that name; and the end of each.
SKIPPED = {
    "held": "REVOKED held",
    "ignored(held)": "NOTHING held",
    "quiet(held)": "NOTHING held",
    "linked(held, cb, eb)": "REVOKED held, NOTHING cb eb",
    # a skipped member of a chain
    "chain(held, b)": "REVOKED held b",
    "chain(a, held)": "SUCCESS a, REVOKED held",
    "chain(held, b, c)": "REVOKED held b c",
    "chain(quiet(held), b)": "NOTHING held, REVOKED b",
    "chain(ignored(held), b)": "NOTHING held, REVOKED b",
    "chain(held, quiet(b), c)": "REVOKED held c, NOTHING b",
    "chain(held, linked(b, cb, eb))": "REVOKED held b, NOTHING cb eb",
    "stamped(chain(held, b))": "REVOKED held b",
    "chain(held, group(x, y))": "REVOKED held x y",
    "chain(held, group(group(w, x), y))": "REVOKED held w x y",
    "chain(held, group(chain(w, x), y))": "REVOKED held w x y",
    "chain(held, group(chord([w, x], b), y))": "REVOKED held b y w x",
    "chain(held, group(chain(group(w, x), b), y))": "REVOKED held b y w x",
    "chain(held, group(x, y), c)": "REVOKED held c x y",
    "chain(held, group(w, x), group(y, z), c)": "REVOKED held c w x y z",
    "chain(held, chord([x, y], body))": "REVOKED held body x y",
    "chain(held, chord([x, y], body), c)": "REVOKED held body c x y",
    "chain(held, chord([x, y], chain(b, c)))": "REVOKED held b c x y",
    "chain(held, chord([x, y], group(b, c)))": "REVOKED held b c x y",
    # of a group
    "group(held, b)": "REVOKED held, SUCCESS b",
    "group(group(held, x), y)": "REVOKED held, SUCCESS x y",
    "group(chain(held, b), x)": "REVOKED held b, SUCCESS x",
    # of a chord's header
    "chord([held, x], body)": "REVOKED held, SUCCESS x, FAILURE body",
    "chord([x, held], body)": "REVOKED held, SUCCESS x, FAILURE body",
    "chord([quiet(held), x], body)": "REVOKED held, SUCCESS x, FAILURE body",
    "chord([chain(held, quiet(b)), x], body)": "REVOKED held b, SUCCESS x, FAILURE body",
    "stamped(chord([held, x], body))": "REVOKED held, SUCCESS x, FAILURE body",
    "chord([group(held, x), y], body)": "REVOKED held, SUCCESS x y, FAILURE body",
    "chord([chain(held, b), x], body)": "REVOKED held b, SUCCESS x, FAILURE body",
    "chord([chain(a, held, b, c), x], body)": "SUCCESS a x, REVOKED held b c, FAILURE body",
    "chord([chain(held, group(y, z)), x], body)": "REVOKED held y z, SUCCESS x, FAILURE body",
    "chord([x, chain(held, group(y, z))], body)": "SUCCESS x, REVOKED held y z, FAILURE body",
    "chord([chain(held, group(y, z), b), x], body)": "REVOKED held b y z, SUCCESS x, FAILURE body",
    "chord([chain(held, chord([y, z], b)), x], body)": "REVOKED held b y z, SUCCESS x, FAILURE body",
    "chord([held, x], chain(b, c))": "REVOKED held b, SUCCESS x, ENDED c",
    "chord([x, held], chain(b, c))": "REVOKED held b, SUCCESS x, ENDED c",
    "chord([held, x], group(b, c))": "REVOKED held, SUCCESS x, ENDED b c",
    "chord([held, x], chain(b, group(y, z)))": "REVOKED held b, SUCCESS x, ENDED y z",
    "chord([chain(held, b), x], chain(c, d))": "REVOKED held b c, SUCCESS x, ENDED d",
    "chord([held, x], chord([y, z], body))": "REVOKED held body y z, SUCCESS x",
    "chord([chord([held, x], b), y], body)": "REVOKED held, SUCCESS x y, ENDED b, FAILURE body",
    "chord([chord([held, x], b), y], chain(c, d))": "REVOKED held c, SUCCESS x y, ENDED b d",
    "chain(a, group(held, x), c)": "SUCCESS a x, REVOKED held, FAILURE c",
    "chain(a, group(held, x), c, d)": "SUCCESS a x, REVOKED held, ENDED c d",
    "chain(a, chord([held, x], body), c)": "SUCCESS a x, REVOKED held, ENDED body c",
    "chain(group(held, x), group(y, z), c)": "REVOKED held y z, SUCCESS x, ENDED c",
    "chain(group(held, x), c, group(y, z))": "REVOKED held, SUCCESS x, FAILURE c, ENDED y z",
    "chord([chain(group(held, y), b), x], body)": "REVOKED held, SUCCESS x y, ENDED b, FAILURE body",
    "chord([chain(group(held, y), b, c), x], body)": "REVOKED held, SUCCESS x y, ENDED b c, FAILURE body",
    # of a chord's body
    "chord([x, y], held)": "SUCCESS x y, REVOKED held",
    "chord([x, y], chain(held, c))": "SUCCESS x y, REVOKED held c",
    "chord([x, y], group(held, c))": "SUCCESS x y c, REVOKED held",
    "chain(a, chord([x, y], held), c)": "SUCCESS a x y, REVOKED held c",
    "chord([chord([x, y], held), z], body)": "SUCCESS x y z, REVOKED held, FAILURE body",
    # the task that replaced another
    "chain(a, into_step(held), b)": "SUCCESS a, REVOKED held b",
    "chain(a, into_chain(held), b)": "SUCCESS a before, REVOKED held b",
    "chain(a, into_group(b), c)": "SUCCESS a beside, REVOKED held, ENDED b c",
    "chord([a, into_step(held)], body)": "SUCCESS a, REVOKED held, FAILURE body",
    "chord([a, into_chain(held)], body)": "SUCCESS a before, REVOKED held, FAILURE body",
    "chord([a, into_group(b)], body)": "SUCCESS a beside, REVOKED held, ENDED b, FAILURE body",
}

# With skip_result all goes on, with that value; here what get() returns stands beside the ends.
KEPT = {
    "keeping(held)": ("SUCCESS held", "kept"),
    "linked(keeping(held), cb, eb)": ("SUCCESS held cb, NOTHING eb", "kept"),
    "chain(keeping(held), b)": ("SUCCESS held b", ["b", "kept"]),
    "chain(a, keeping(held))": ("SUCCESS a held", "kept"),
    "chain(keeping(held), group(x, y))": ("SUCCESS held x y", [["x", "kept"], ["y", "kept"]]),
    "group(keeping(held), x)": ("SUCCESS held x", ["kept", ["x"]]),
    "chord([keeping(held), x], body)": ("SUCCESS held x body", ["body", ["kept", ["x"]]]),
    "chord([x], keeping(held))": ("SUCCESS x held", "kept"),
}

# The policy "raise" is a failure like any other: errbacks run.
RAISED = {
    "loud(held)": "FAILURE held",
    "linked(loud(held), cb, eb)": "FAILURE held, NOTHING cb, SUCCESS eb",
    "chain(loud(held), b)": "FAILURE held b",
    "chain(a, loud(held))": "SUCCESS a, FAILURE held",
    "group(loud(held), x)": "FAILURE held, SUCCESS x",
    "chord([loud(held), x], body)": "FAILURE held body, SUCCESS x",
    "chord([x], loud(held))": "SUCCESS x, FAILURE held",
}


@dataclass
class Run:
    """One canvas, sent while the lock of `held` was held."""

    tasks: ModuleType
    prefix: str
    ends: dict[str, str]
    result: Any

    def state(self, name: str) -> str:
        # Not by AsyncResult: one that is dropped ends, in Celery 5.5, what another of the same id waits for.
        return str(self.tasks.app.backend.get_state(self.prefix + name))

    def check_ends(self) -> None:
        """Every member has the end it should have, and the bodies of those that succeeded ran, once."""
        due = [name for name, end in self.ends.items() if PENDING not in STATES[end]]
        with suppress(AssertionError):  # the comparison below tells more
            eventually(lambda: all(self.state(name) in READY_STATES for name in due), within=8)
        self.tasks.mark.delay().get(timeout=10)
        states = {name: self.state(name) for name in self.ends}
        assert {name: state for name, state in states.items() if state not in STATES[self.ends[name]]} == {}
        names = [name.decode() for name in self.tasks.app.backend.client.lrange(self.tasks.RAN, 0, -1)]
        bodies = sorted(name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix))
        assert bodies == sorted(name for name, end in self.ends.items() if end == "SUCCESS" and name != "held")

    def value(self) -> Any:
        value = self.result.get(timeout=5, interval=0.02)
        return json.loads(json.dumps(value).replace(self.prefix, ""))

    def error_of(self, name: str) -> Any:
        return self.tasks.app.backend.get_result(self.prefix + name)


@pytest.fixture(scope="module")
def running(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, Worker]]:
    server.flush()
    urls = Urls(broker=server.url(), result=server.url(1), lock=server.lock_url(2))
    folder = tmp_path_factory.mktemp("canvas")
    with (
        loaded_app("tests.support.apps.canvas", urls) as tasks,
        running_worker("tests.support.apps.canvas", folder=folder, urls=urls, concurrency=1) as worker,
    ):
        yield tasks, worker
        gc.collect()  # results unsubscribe when they go, and the server will be gone by then


@pytest.fixture
def send(running: tuple[ModuleType, Worker], request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], Run]]:
    """Send a shape. The lock is released after the test."""
    tasks, worker = running
    request.node.stash.setdefault(WORKERS, []).append(worker)
    with ExitStack() as stack:

        def send_shape(shape: str, ends: str) -> Run:
            prefix = f"{uuid.uuid4().hex[:8]}-"
            for task in (tasks.step, tasks.quiet, tasks.keeping, tasks.loud):
                stack.enter_context(task.lock_for(prefix + "held"))
            named = {name: state for state, *names in map(str.split, ends.split(",")) for name in names}
            return Run(tasks, prefix, named, eval(shape, {}, tasks.Names(prefix)).apply_async())

        yield send_shape


@pytest.mark.invariant("no-result-hangs")
@pytest.mark.parametrize(("shape", "ends"), SKIPPED.items(), ids=SKIPPED)
def test_every_member_ends_when_one_is_skipped(send: Callable[..., Run], shape: str, ends: str) -> None:
    run = send(shape, ends)
    run.check_ends()
    if run.ends["held"] == "NOTHING" and len(run.ends) == 1:
        assert run.value() is None  # as of any task whose result is ignored
        return
    with pytest.raises((TaskRevokedError, ChordError)):
        run.value()
    if run.ends["held"] == "REVOKED":
        assert "held by a Lock" in str(run.error_of("held"))


@pytest.mark.invariant("no-result-hangs")
@pytest.mark.parametrize(("shape", "ends", "value"), [(k, *v) for k, v in KEPT.items()], ids=KEPT)
def test_a_skip_result_is_passed_on(send: Callable[..., Run], shape: str, ends: str, value: Any) -> None:
    run = send(shape, ends)
    assert run.value() == value
    run.check_ends()


@pytest.mark.parametrize(("shape", "ends"), RAISED.items(), ids=RAISED)
def test_every_member_ends_when_one_raises(send: Callable[..., Run], shape: str, ends: str) -> None:
    run = send(shape, ends)
    run.check_ends()
    with pytest.raises((LockHeld, ChordError)):
        run.value()
    assert isinstance(run.error_of("held"), LockHeld)
