"""Known faults of other plugins, as tests that this library passes. Each names the peer that was seen to fail.

The flaws that are the law of a policy stand with it and are not repeated here:

    lock leaks on retry, ignore, reject, kill, hard limit   test_endings*.py; in short: test_the_lock_is_free_after
    a retry of its own is lost, or meets its own lock       test_followers.py (its own retry)
    a redelivered copy runs in parallel, or is lost         test_copies.py, test_redelivery.py
    the chord of a duplicate hangs, the chain's tail is lost    test_canvas.py; here in short
    a key differs between publisher and worker              here, and tests/contract/test_keys_over_serializers.py
    a skipped copy frees the holder's lock                  test_policies.py (leaves the holder's lock alone)
    apply() or a direct call frees or leaks another's lock  test_eager.py
    a conflict counts as the task's failure                 test_policies.py (no failure), test_signals.py
    a publisher blocks, or drops the task, where the store is away     here
"""

import signal
import time
import uuid
from datetime import datetime, timezone
from decimal import Decimal

import pytest
from celery import Celery, chord
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_dlock import Lock, LockHeld, singleton_task
from tests.support.environments.policies import APP, running_environment, timed
from tests.support.polling import eventually
from tests.support.processes import HOST, free_port


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("peers"), concurrency=4) as made:
        yield made


class TestKeys:
    @pytest.mark.parametrize(
        "value",
        [
            (1, 2),
            {1: "a", 2: "b"},
            {"b": 1, "a": 2},
            datetime(2026, 11, 21, 3, 4, 5, 678, tzinfo=timezone.utc),
            uuid.UUID(int=7),
            Decimal("1.10"),
            [None, True, 1.5, "ä"],
        ],
        ids=lambda value: type(value).__name__,
    )
    @pytest.mark.parametrize("serializer", ["json", "pickle"])
    def test_the_workers_lock_is_the_publishers(self, tasks, value, serializer):
        """celery-once, celery-once-task: the key differs and leaks; celery-singleton: TypeError at delay()."""
        ran = tasks.defaults.apply_async((value,), serializer=serializer).get(timeout=10)
        assert ran == tasks.defaults.lock_name(value)

    def test_every_spelling_of_one_call_is_one_lock(self, tasks):
        """celery-singleton: three keys; celery-once: an omitted default is another key."""
        calls = [((1,), {}), ((), {"value": 1}), ((1, 7), {}), ((), {"more": 7, "value": 1})]
        for args, kwargs in calls:
            assert tasks.defaults.delay(*args, **kwargs).get(timeout=10) == tasks.defaults.lock_name(1)
            # Its result is there a moment before the lock is free.
            eventually(lambda: not tasks.defaults.lock_for(1).locked())

    def test_joined_parts_never_collide(self, tasks):
        """celery-once: `1_b-2` collides with `1` and `2`."""
        assert tasks.defaults.lock_name("1_b-2", "") != tasks.defaults.lock_name("1", "2")
        assert tasks.defaults.lock_name(1) != tasks.defaults.lock_name("1")


class TestEveryProducer:
    def test_send_task_is_locked_too(self, environment, tasks):
        """celery-once, celery-singleton: `send_task` three times ran three at once."""
        n = environment.fresh()
        gates = [f"{n}-{number}" for number in range(3)]
        sent = [environment.app.send_task("policies.retries", (n, gate)) for gate in gates]
        environment.entered(n=n)
        for result in sent:
            eventually(
                lambda result=result: (
                    environment.lines(result.id, "is republished") or environment.history(id=result.id)
                )
            )
        assert len(environment.history(what="in", n=n)) == 1
        for gate in gates:
            environment.open(gate)
        assert [result.get(timeout=15) for result in sent] == [n] * 3
        assert environment.overlaps(n) == 1

    def test_delay_neither_blocks_nor_drops_the_task_where_the_store_is_away(self, environment, load_app):
        """celery-once-task: `delay()` gives None and drops it; others raise; heimdall blocks for a second."""
        urls = environment.urls
        away = load_app(APP, broker=urls.broker, result=urls.result, lock=f"redis://{HOST}:{free_port()}/0")
        n = environment.fresh()
        away.skips.delay(n)  # connects
        seconds, result = timed(lambda: away.skips.apply_async((f"{n}x",)))
        assert seconds < 0.5
        assert result.get(timeout=10) == f"{n}x"

    def test_a_publish_that_fails_leaves_no_lock(self, environment, load_app):
        """celery-once and heimdall: the lock is held for an hour, without a holder."""
        urls = environment.urls
        away = load_app(APP, broker=f"amqp://{HOST}:{free_port()}//", result=urls.result, lock=urls.lock)
        away.app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
        n = environment.fresh()
        with pytest.raises(OperationalError):
            away.skips.apply_async((n,), retry=False)
        assert not away.skips.lock_for(n).locked()

    @pytest.mark.parametrize("options", [{"expires": -1}, {"countdown": 60}], ids=["expired", "revoked"])
    def test_a_message_that_never_starts_holds_no_lock(self, environment, tasks, options):
        """celery-once, celery-singleton, heimdall: the lock of a revoked or expired task stays."""
        n = environment.fresh()
        waiting = tasks.skips.apply_async((n,), **options)
        if "countdown" in options:
            environment.wait_for_line(waiting.id, "received")
            environment.app.control.revoke(waiting.id)
        assert tasks.skips.delay(n).get(timeout=10) == n


class TestHolding:
    @pytest.mark.parametrize("end", ["", "fail", "retry", "ignore", "reject", "replace", "die"])
    def test_the_lock_is_free_within_a_second_after(self, environment, tasks, end):
        """Every peer leaks on ignore, reject and a killed child; three of four lose the retry."""
        n = environment.fresh()
        tasks.skips.delay(n, end=end)
        (first,) = environment.entered(n=n)[:1]
        if end != "die":
            eventually(lambda: len(environment.history(what="out", n=n)) == (2 if end in ("retry", "replace") else 1))
        eventually(lambda: not environment.locked(tasks.skips, n), 2.0 if end == "die" else 1.0)
        assert time.monotonic() - first["at"] < 5

    def test_a_run_starts_at_once_and_not_after_its_own_lock(self, environment, tasks):
        """heimdall: every task waits 1 s for itself."""
        n = environment.fresh()
        start = time.monotonic()
        tasks.skips.delay(n).get(timeout=10)
        (body,) = environment.history(what="in", n=n)
        assert body["at"] - start < 0.5

    def test_a_holder_whose_lease_is_over_does_not_free_its_successors_lock(self, environment, tasks):
        """celery-once, celery-singleton, heimdall: a plain DEL frees the next holder's lock."""
        n = environment.fresh()
        holding = environment.hold(tasks.skips, n)
        environment.locks.delete(*environment.lock_keys(tasks.skips, n))
        successor = environment.hold(tasks.skips, n)
        token = tasks.skips.lock_for(n).holder().token
        assert holding.end() == n
        assert tasks.skips.lock_for(n).holder().token == token
        with pytest.raises(TaskRevokedError):
            tasks.skips.delay(n).get(timeout=10)
        successor.end()

    def test_a_conflict_changes_nothing_of_the_task_object(self, environment, tasks):
        """heimdall sets `max_retries = None` on the task for all later runs of the process."""
        n = environment.fresh()
        with environment.hold(tasks.retries, n):
            later = tasks.retries.delay(n)
            environment.wait_for_line(later.id, "is republished")
        later.get(timeout=10)
        endless = [tasks.fails_for_ever.delay(f"{n}{number}") for number in range(4)]
        for result in endless:
            assert isinstance(timed(lambda result=result: result.get(timeout=10))[1], ValueError)

    def test_a_warm_shutdown_keeps_the_lock_until_the_body_has_ended(self, environment, tmp_path):
        """celery-once-task drops it at SIGTERM, and the task ran on for 6 s."""
        with running_environment(tmp_path, workers=1) as other:
            n = other.fresh()
            holding = other.hold(other.tasks.short_lived, n)
            other.worker.signal(signal.SIGTERM)
            other.worker.wait_for_log("Warm shutdown")
            lock, over = other.tasks.short_lived.lock_for(n), time.monotonic() + 4.5  # its ttl is 4 s
            tokens = set()
            eventually(lambda: tokens.add(lock.holder().token) or time.monotonic() > over, every=0.1)
            assert len(tokens) == 1
            holding.let_go()
            assert other.worker.process.wait(15) == 0
            assert not lock.locked()
            assert other.state(holding.id) == "SUCCESS"
            assert lock.acquire(blocking=False)
            lock.release()


class TestCanvas:
    def test_a_chord_with_a_duplicate_ends(self, environment, tasks):
        """celery-once, celery-singleton, heimdall: the chord hangs."""
        n = environment.fresh()
        with environment.hold(tasks.skips, n):
            result = chord([tasks.skips.si(n), tasks.plain.si(1)], tasks.plain.s()).apply_async()
            seconds, error = timed(lambda: result.get(timeout=10))
        assert isinstance(error, Exception)
        assert seconds < 5

    def test_a_chord_with_a_duplicate_that_has_a_value_completes(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips_as_none, n):
            result = chord([tasks.skips_as_none.si(n), tasks.plain.si(1)], tasks.plain.s()).apply_async()
            assert result.get(timeout=10) == [None, 1]


class TestConnections:
    def test_two_apps_in_one_process_have_a_store_each(self, environment, own_server):
        """celery-singleton, celery-once: the second app gets the first one's Redis."""
        other = own_server()
        first = Celery("first", broker=environment.urls.broker, set_as_current=False)
        second = Celery("second", broker=other.url(), set_as_current=False)
        with Lock("both", app=first), Lock("both", app=second):
            assert environment.broker.keys("dlock*")
            with other.client() as client:
                assert client.keys("dlock*")
        assert not Lock("both", app=first).locked()

    def test_user_and_password_of_the_url_are_used_and_decoded(self, own_server):
        """celery-once drops the user and does not decode the password."""
        server = own_server()
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", ">p@ss/wörd", "~dlock*", "&dlock*", "+@all")
        url = f"redis://shop:p%40ss%2Fw%C3%B6rd@{HOST}:{server.port}/0"
        app = Celery("here", broker=server.url(), set_as_current=False)
        app.conf.dlock_url = url
        with Lock("mine", app=app) as lock:
            assert lock.locked()

    def test_no_key_and_no_value_in_the_store_shows_an_argument(self, environment, tasks):
        """celery-once keeps arguments as plain text in Redis."""
        holding = tasks.defaults.delay("s3cret", {"card": "4111"})
        assert "s3cret" not in holding.get(timeout=10)
        assert singleton_task(app=environment.app, name="shop.pay")(_pay).lock_name("s3cret").startswith("shop.pay:")


def _pay(card): ...


def test_an_exception_of_ours_kills_no_worker(environment, tasks):
    """celery-singleton: one that cannot be unpickled kills the worker."""
    n = environment.fresh()
    # Where a child was killed before, Celery may take 5 s to replace it.
    children = eventually(lambda: len(found := set(environment.worker.children())) == 4 and found, 10)
    with environment.hold(tasks.retries_twice, n):
        assert isinstance(timed(lambda: tasks.retries_twice.delay(n).get(timeout=15))[1], LockHeld)
    assert environment.worker.running
    assert set(environment.worker.children()) == children
    assert "Unrecoverable error" not in environment.worker.log()
