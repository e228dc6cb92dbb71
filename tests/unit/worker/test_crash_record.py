"""Process: who is it, and is it surely gone? Asked of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_dlock.keys.lock_name import shared_name
from celery_dlock.messaging.wire import NewerWireVersion
from celery_dlock.worker import crash_record
from celery_dlock.worker.crash_record import (
    HeldLease,
    HostIdentity,
    ProcessIdentity,
    WorkerRecord,
    current_host,
    identify_process,
)
from tests.support.polling import eventually


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        yield popen
        popen.kill()


def known(popen: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = identify_process(popen.pid)
    assert found is not None
    return found


@pytest.mark.core
def test_a_living_process_is_not_gone_also_when_it_is_stopped(child: subprocess.Popen[bytes]) -> None:
    found = known(child)
    assert not found.is_dead()
    child.send_signal(signal.SIGSTOP)
    assert not found.is_dead()


@pytest.mark.core
def test_a_killed_process_is_gone_before_and_after_it_was_reaped(child: subprocess.Popen[bytes]) -> None:
    found = known(child)
    child.kill()
    eventually(found.is_dead)
    assert identify_process(child.pid) is None
    child.wait()
    assert found.is_dead()
    assert identify_process(child.pid) is None


def test_another_process_of_that_pid_is_another(child: subprocess.Popen[bytes]) -> None:
    found = known(child)
    assert found._replace(started=found.started - 1).is_dead()
    assert known(child) == found


def test_a_process_whose_first_thread_has_ended_lives_on() -> None:
    """Its state is that of a dead one."""
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as popen:
        found = known(popen)
        stat = Path(f"/proc/{popen.pid}/stat")
        eventually(lambda: b") Z " in stat.read_bytes(), message="its first thread lives")
        assert not found.is_dead()
        popen.kill()
        eventually(found.is_dead)


def test_a_process_of_another_user_that_proc_hides_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    monkeypatch.setattr(crash_record, "_stat", lambda pid: None)
    assert not ProcessIdentity(1, 1).is_dead()


def test_a_name_with_spaces_and_parentheses_does_not_confuse() -> None:
    program = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        found = known(popen)
        assert popen.stdout is not None
        popen.stdout.readline()
        assert ") Z 1 (x" in Path(f"/proc/{popen.pid}/comm").read_text()
        assert not found.is_dead()
        assert known(popen) == found
        popen.kill()


def test_all_processes_of_a_machine_have_one_home() -> None:
    program = "from celery_dlock.worker.crash_record import current_host; print(list(current_host()))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = current_host()
    assert here is not None
    assert told.stdout.strip() == str(list(here))


@pytest.mark.parametrize("seats", [1, 3])
def test_record_keeps_the_number_of_seats_of_a_name(seats: int) -> None:
    name, here = shared_name("gpu")._replace(seats=seats), ProcessIdentity(77, 1)
    record = WorkerRecord(HostIdentity("m", "b", "p", "t"), here, (HeldLease(name, "o.1", 30.0, here),))
    assert WorkerRecord.from_text(record.text) == record


@pytest.mark.invariant("newer-wire-is-left-alone")
def test_record_of_a_newer_wire_version_is_refused_and_one_without_a_version_is_read() -> None:
    record = WorkerRecord(HostIdentity("m", "b", "p", "t"), ProcessIdentity(7, 1))
    host, main, leases, version = json.loads(record.text)
    assert WorkerRecord.from_text(json.dumps([host, main, leases])) == record
    with pytest.raises(NewerWireVersion, match="wire version 2"):
        WorkerRecord.from_text(json.dumps([host, {"main": main}, leases, version + 1]))
