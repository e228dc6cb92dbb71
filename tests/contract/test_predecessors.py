"""Workers that are surely gone: crash records about real processes, as the store may have them, and what is freed."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from celery import Celery

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.runtime import Runtime
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.keys import LockKeys, node_key
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.worker.crash_record import HeldLease, ProcessIdentity, WorkerRecord, identify_process
from celery_dlock.worker.crash_recovery import CrashRecovery
from tests.contract.helpers import commands_seen, request_of
from tests.support.polling import eventually

NODE = "celery@host"
KEY = node_key("dlock", NODE)
LOCK = shared_name("x")
TTL = 60.0
DEAD = ProcessIdentity(2**22 - 1, 1)  # above every pid_max

_me = WorkerRecord.of_this_process()
assert _me is not None
ME = _me
HOST = ME.host

Started = Callable[[], "tuple[ProcessIdentity, subprocess.Popen[bytes]]"]


@pytest.fixture
def started() -> Iterator[Started]:
    """A factory of processes that live until the end of the test."""
    with contextlib.ExitStack() as stack:

        def start() -> tuple[ProcessIdentity, "subprocess.Popen[bytes]"]:
            popen = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(popen.kill)
            found = identify_process(popen.pid)
            assert found is not None
            return found, popen

        yield start


@pytest.fixture
def looker(app: Celery) -> CrashRecovery:
    """The worker that starts now, without its thread."""
    return CrashRecovery(Runtime.of(app), NODE, lambda: True, ME)


def hold(store: RedisStore, *holders: ProcessIdentity, host=HOST, main=DEAD, text: str | None = None) -> WorkerRecord:
    """Take the lock, and one more for each further holder, as a worker does that notes it."""
    kept = []
    for number, holder in enumerate(holders or (main,)):
        name = shared_name("x" if number == 0 else f"x{number}")
        acquired = store.acquire(name, f"o{number}.1", round(TTL * 1000), request_of("id"))
        assert acquired
        kept.append(HeldLease(name, f"o{number}.1", TTL, holder))
    note = WorkerRecord(host, main, tuple(kept))
    store.save_worker_record(NODE, note.worker_id, note.text if text is None else text, 60_000)
    return note


def free(store: RedisStore) -> bool:
    return store.inspect(LOCK) is None


@pytest.mark.core
def test_leases_of_a_dead_worker_are_free_and_its_crash_record_is_deleted(store, client, looker) -> None:
    hold(store, DEAD, DEAD)
    looker.release_dead_leases()
    assert client.keys("dlock:*:lock:*") == []
    assert client.exists(KEY) == 0


def test_overwritten_lock_key_keeps_no_other_lock_of_the_dead_worker_held(store, client, looker, caplog) -> None:
    hold(store, DEAD, DEAD, DEAD)
    key = LockKeys.of("dlock", LOCK).lock
    client.delete(key)
    client.set(key, "overwritten")
    looker.release_dead_leases()
    assert client.keys("dlock:*:lock:*") == [key]
    assert client.exists(KEY) == 0
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{LOCK}: ")


def test_a_living_main_process_is_not_robbed_until_it_dies(store, looker, started) -> None:
    main, popen = started()
    hold(store, DEAD, main=main)
    looker.release_dead_leases()
    assert not free(store)
    popen.kill()
    popen.wait()
    looker.release_dead_leases()
    assert free(store)


def test_a_stopped_main_process_is_not_robbed(store, looker, started) -> None:
    main, popen = started()
    popen.send_signal(signal.SIGSTOP)
    hold(store, DEAD, main=main)
    looker.release_dead_leases()
    assert not free(store)


def test_nothing_is_freed_while_one_noted_child_lives(store, client, looker, started) -> None:
    child, popen = started()
    hold(store, DEAD, child)
    looker.release_dead_leases()
    assert len(client.keys("dlock:*:lock:*")) == 2
    popen.kill()
    popen.wait()
    looker.release_dead_leases()
    assert client.keys("dlock:*:lock:*") == []


def test_a_process_that_has_a_dead_ones_pid_is_another(store, looker, started) -> None:
    later, _ = started()
    hold(store, main=later._replace(started=later.started - 1))
    looker.release_dead_leases()
    assert free(store)


def test_dead_process_that_was_not_reaped_is_gone(store, looker, started) -> None:
    main, popen = started()
    hold(store, main=main)
    popen.kill()
    eventually(lambda: identify_process(popen.pid) is None)
    looker.release_dead_leases()
    assert free(store)


ELSEWHERE = {
    "another machine": HOST._replace(machine="0" * 32),
    "this machine before a reboot": HOST._replace(boot="other"),
    "another machine and boot": HOST._replace(machine="0" * 32, boot="other"),
    "another namespace of pids": HOST._replace(pids="pid:[1]"),
    "another namespace of clocks": HOST._replace(times="time:[1]"),
    "a container of another boot": HOST._replace(boot="other", pids="pid:[1]"),
    "an unknown machine of another boot": HOST._replace(machine="", boot="other"),
}


@pytest.mark.invariant("dead-owner-is-released")
@pytest.mark.core
@pytest.mark.parametrize("host", ELSEWHERE.values(), ids=ELSEWHERE)
def test_worker_of_another_machine_is_left_to_the_ttl(store, client, looker, host) -> None:
    hold(store, host=host)
    looker.release_dead_leases()
    assert not free(store)
    assert client.exists(KEY) == 1


@pytest.mark.parametrize("text", ["", "x", "[]", "[1,2,3]", '[["a"],[1,2],[]]', "{}", "null"])
def test_a_note_that_cannot_be_read_is_left_to_the_ttl(store, looker, client, text) -> None:
    worker = hold(store).worker_id
    client.hset(KEY, worker, text)
    looker.release_dead_leases()
    assert not free(store)


@pytest.mark.parametrize("pid", [0, -1, 2**40])
def test_a_note_of_no_possible_process_is_left_to_the_ttl(store, looker, pid) -> None:
    hold(store, main=ProcessIdentity(pid, 1))
    looker.release_dead_leases()
    assert not free(store)


def test_a_lock_that_has_changed_hands_since_the_note_is_untouched(store, looker) -> None:
    hold(store)
    store.release(LOCK, "o0.1", ReleaseRequest())
    store.acquire(LOCK, "successor.1", 60_000, request_of("id2"))
    looker.release_dead_leases()
    holder = store.inspect(LOCK)
    assert holder is not None
    assert holder.owner == "successor"


def test_a_worker_does_not_take_its_own_note_for_anothers(store, looker) -> None:
    hold(store, main=ME.main)
    looker.release_dead_leases()
    assert not free(store)


def test_its_message_is_not_marked_as_ended_also_where_a_copy_of_it_is_known(store, client, looker) -> None:
    hold(store)
    client.hset(LockKeys.of("dlock", LOCK).lock, "dup", "1")
    looker.release_dead_leases()
    assert client.keys("dlock:*:done:*") == []


def test_last_recorded_lease_of_a_dying_worker_is_released_too(store, client, looker, started) -> None:
    main, popen = started()
    hold(store, main=main)
    looker.release_dead_leases()
    hold(store, DEAD, DEAD, main=main)
    popen.kill()
    popen.wait()
    looker.release_dead_leases()
    assert client.keys("dlock:*:lock:*") == []


# What is noted, in the store


@pytest.mark.core
def test_two_workers_of_one_name_keep_separate_crash_records(store, client) -> None:
    """Neither shortens the life of the other one's record."""
    store.save_worker_record(NODE, "one", "long", 60_000)
    store.save_worker_record(NODE, "two", "brief", 1_000)
    assert store.worker_records(NODE) == {"one": "long", "two": "brief"}
    assert client.pttl(KEY) > 50_000
    store.save_worker_record(NODE, "one", "", 0)
    assert store.worker_records(NODE) == {"two": "brief"}
    store.save_worker_record(NODE, "two", "", 0)
    assert client.exists(KEY) == 0


def test_a_note_is_one_command_that_touches_the_nodes_key_alone(store, client) -> None:
    store.save_worker_record(NODE, "one", "text", 1_000)
    with commands_seen(client) as seen:
        store.save_worker_record(NODE, "one", "text", 60_000)
        store.worker_records(NODE)
        store.save_worker_record(NODE, "one", "", 0)
    assert [words[0] for kind, words in seen if kind != "lua"] == ["EVALSHA", "HGETALL", "EVALSHA"]
    assert {words[1] for kind, words in seen if kind == "lua"} == {KEY}


def test_a_store_that_is_away_ends_no_look(app, own_server, caplog) -> None:
    """The thread goes on, and what it says is for who debugs."""
    server = own_server()
    app.conf.dlock_url = server.url()
    rounds = iter([True, True, False])
    looker = CrashRecovery(Runtime.of(app), NODE, lambda: next(rounds), ME)
    server.kill()
    with caplog.at_level("DEBUG", "celery_dlock"):
        looker.loop.run()
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert len(caplog.records) == 2
