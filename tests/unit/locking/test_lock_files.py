"""Lock files: one holder of a name per machine, whatever happens to processes, files and the run directory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_dlock.errors import LockFilesUnusable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking import lock_files
from celery_dlock.locking.lock_files import LockFiles
from celery_dlock.locking.run_directory import RunDirectory
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Requester
from celery_dlock.utils.clock import SystemClock
from tests.support.polling import eventually

NAME, OTHER = shared_name("one"), shared_name("two")
BY = Requester("app.pay", "id1", "w1@host", "7")
STORE = StoreLocation("server", "redis://host/0", "dlock_url")
#: What a test has made. What nothing refers to would free its names.
KEPT: list[LockFiles] = []


def files_in(directory: Path, prefix: str = "dlock", store: StoreLocation = STORE) -> LockFiles:
    made = LockFiles(str(directory), prefix, [store], SystemClock())
    KEPT.append(made)
    return made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def left_files_are_closed() -> Iterator[None]:
    yield
    lock_files._close_inherited()
    KEPT.clear()


@pytest.fixture
def files(directory: Path) -> LockFiles:
    return files_in(directory)


def take(files: LockFiles, owner: str, name: Any = NAME, **facts: Any) -> Any:
    """Take a name for an owner that has one run, which is its own entrant."""
    return files.acquire(name, owner, owner, facts.pop("requester", BY), **facts)


def content(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@contextlib.contextmanager
def forked(body: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs `body` and then sleeps; it is killed at the end. The body has ended at the start."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            body()
            os.write(write, b"!")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 1) == b"!"
        yield pid
    finally:
        os.close(read)
        kill(pid)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


# Who holds a name


@pytest.mark.core
def test_second_owner_is_refused_and_reads_the_record_of_the_first(files: LockFiles, directory: Path) -> None:
    before = time.time()
    assert take(files, "a", identity="digest") is None
    holder = take(files_in(directory), "b")
    assert (holder.task, holder.task_id, holder.node, holder.pid) == ("app.pay", "id1", "w1@host", 7)
    assert (holder.owner, holder.identity, holder.releasing, holder.kind) == ("a", "digest", False, "file")
    assert before <= holder.since <= time.time()
    assert str(holder) == "app.pay[id1] on w1@host (by the lock file of this machine)"


def test_name_is_free_after_its_release(files: LockFiles) -> None:
    take(files, "a")
    files.release(NAME, "a", "a")
    assert take(files, "b") is None


def test_names_prefixes_and_stores_exclude_only_themselves(files: LockFiles, directory: Path) -> None:
    elsewhere = StoreLocation("server", "redis://host/1", "dlock_url")
    assert take(files, "a") is None
    assert take(files, "b", OTHER) is None
    assert take(files_in(directory, prefix="other"), "c") is None
    assert take(files_in(directory, store=elsewhere), "d") is None
    assert take(files_in(directory), "e") is not None


def test_owner_enters_again_and_its_last_run_frees_the_name(files: LockFiles) -> None:
    assert files.acquire(NAME, "a", "outer", BY) is None
    assert files.acquire(NAME, "a", "inner", BY) is None
    files.release(NAME, "a", "inner")
    files.release(NAME, "a", "inner")
    assert take(files, "b") is not None
    files.release(NAME, "a", "outer")
    assert take(files, "b") is None


def test_release_by_a_refused_call_frees_nothing(files: LockFiles) -> None:
    take(files, "a")
    assert take(files, "b") is not None
    files.release(NAME, "b", "b")
    assert take(files, "c") is not None


def test_threads_of_one_process_exclude_each_other(files: LockFiles) -> None:
    take(files, "a")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(take(files, "b")))
    thread.start()
    thread.join()
    assert found[0].owner == "a"


def test_announced_release_is_shown(files: LockFiles) -> None:
    take(files, "a")
    files.announce_release(NAME, "a")
    assert take(files, "b").releasing


def test_announcement_of_a_nested_run_is_not_shown(files: LockFiles) -> None:
    files.acquire(NAME, "a", "outer", BY)
    files.acquire(NAME, "a", "inner", BY)
    files.announce_release(NAME, "a")
    assert not take(files, "b").releasing


@pytest.mark.parametrize("text", ["", "{", "[]\n", '["a","b","c",{},1,2,3,4]\n', "null\n"])
def test_file_without_a_readable_record_excludes_all_the_same(files: LockFiles, directory: Path, text: str) -> None:
    take(files, "a")
    (directory / content(directory)[0]).write_text(text)
    assert str(take(files, "b")) == "another process (by the lock file of this machine)"


def test_shorter_record_replaces_the_longer_one_of_a_killed_holder(files: LockFiles) -> None:
    long = BY._replace(task="t" * 150, task_id="i" * 150)
    with forked(lambda: take(files, "a", requester=long)) as pid:
        kill(pid)
        assert take(files, "b") is None
    assert take(files, "c").task_id == "id1"


# What is on the disk


def test_directory_holds_only_files_of_held_names(files: LockFiles, directory: Path) -> None:
    take(files, "a")
    take(files, "a", OTHER)
    assert len(content(directory)) == 2
    files.release(NAME, "a", "a")
    files.release(OTHER, "a", "a")
    assert content(directory) == []


def test_file_shows_neither_lock_name_nor_arguments(files: LockFiles, directory: Path) -> None:
    take(files, "a", shared_name("sms:+4912345"))
    (file,) = directory.iterdir()
    assert "12345" not in file.name
    assert "12345" not in file.read_text()
    assert len(file.name) == len("0" * 32 + ".lock")
    assert json.loads(file.read_text())[:2] == ["app.pay", "id1"]


def test_directory_and_files_are_for_their_user_only(files: LockFiles, directory: Path) -> None:
    before = os.umask(0)
    try:
        take(files, "a")
    finally:
        os.umask(before)
    (file,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_default_directory_is_one_of_the_user_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = LockFiles(None, "dlock", [STORE], SystemClock())
    assert made.directory.path == f"{tmp_path}/celery-dlock-{os.geteuid()}"
    made.directory.check()
    assert content(tmp_path) == [f"celery-dlock-{os.geteuid()}"]


# A directory that is not safe


def refusal(directory: Path) -> str:
    for use in (files_in(directory).directory.check, lambda: take(files_in(directory), "a")):
        with pytest.raises(LockFilesUnusable) as raised:
            use()
    return str(raised.value)


@pytest.mark.invariant("run-directory-is-private")
def test_symbolic_link_as_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "real")
    assert refusal(directory) == (
        f"the run directory {directory} cannot be used: it is a symbolic link, or no directory"
    )
    assert content(tmp_path / "real") == []


@pytest.mark.invariant("run-directory-is-private")
@pytest.mark.parametrize("end", ["/", "//", "/.", "/./"])
def test_symbolic_link_with_a_slash_behind_it_is_refused(directory: Path, tmp_path: Path, end: str) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "real")
    with pytest.raises(LockFilesUnusable, match="it is a symbolic link, or no directory"):
        RunDirectory(f"{directory}{end}").check()


@pytest.mark.invariant("run-directory-is-private")
def test_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert refusal(directory) == (
        f"the run directory {directory} belongs to user {me}, but this process runs as user {me + 1}; "
        "set dlock_run_dir to a directory of this user"
    )


@pytest.mark.invariant("run-directory-is-private")
@pytest.mark.parametrize("mode", [0o770, 0o701, 0o750, 0o777])
def test_directory_that_is_open_to_others_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    assert refusal(directory) == (
        f"the run directory {directory} is open to other users (mode {mode:04o}); make it mode 0700"
    )


def test_file_as_directory_and_missing_parent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "or no directory" in refusal(tmp_path / "file")
    assert refusal(tmp_path / "a/b").endswith("cannot be used: No such file or directory")


@pytest.mark.invariant("run-directory-is-private")
def test_symbolic_link_as_lock_file_is_not_followed(files: LockFiles, directory: Path, tmp_path: Path) -> None:
    take(files, "a")
    (name,) = content(directory)
    files.release(NAME, "a", "a")
    (directory / name).symlink_to(tmp_path / "victim")
    with pytest.raises(LockFilesUnusable, match="no lock file in"):
        take(files, "a")
    assert not (tmp_path / "victim").exists()


# Deletion


@pytest.mark.invariant("one-holder-per-lock-file")
def test_file_that_is_deleted_before_it_is_locked_is_opened_anew(
    files: LockFiles, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has opened the file of a holder, who deletes it. Another call then holds a new file of that path."""
    take(files, "first")
    original, calls = lock_files._lock, []

    def lock(file: Any) -> bool:
        calls.append(file)
        if len(calls) == 1:
            files.release(NAME, "first", "first")
            assert take(files_in(directory), "second") is None
            return original(file)
        return original(file)

    monkeypatch.setattr(lock_files, "_lock", lock)
    holder = take(files, "third")
    assert holder is not None
    assert holder.owner == "second"


@pytest.mark.invariant("one-holder-per-lock-file")
def test_file_that_its_holder_deletes_while_another_call_is_refused_is_no_conflict(
    files: LockFiles, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(files, "first")
    original, calls = lock_files._lock, []

    def lock(file: Any) -> bool:
        locked = original(file)
        calls.append(locked)
        if len(calls) == 1:
            files.release(NAME, "first", "first")
        return locked

    monkeypatch.setattr(lock_files, "_lock", lock)
    assert take(files_in(directory), "second") is None
    assert calls == [False, True]


@pytest.mark.invariant("one-holder-per-lock-file")
@pytest.mark.parametrize("at", ["unlink", "close"])
def test_release_that_was_interrupted_deletes_no_file_of_the_next_holder(
    files: LockFiles, directory: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    take(files, "a")
    held = files._held["a", NAME]
    unlink = os.unlink

    def interrupted(*args: Any, **options: Any) -> None:
        if at == "close":
            unlink(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.release(NAME, "a", "a")
    monkeypatch.undo()
    if at == "close":
        assert take(files_in(directory), "b") is None
    files.release(NAME, "a", "a")
    assert held.file.closed
    assert files._held == {}
    refused = take(files_in(directory), "c")
    assert (refused.owner if refused else None) == ("b" if at == "close" else None)


def test_directory_that_is_deleted_while_a_name_is_held_is_made_anew(files: LockFiles, directory: Path) -> None:
    take(files, "a")
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    files.release(NAME, "a", "a")
    assert take(files, "b") is None


#: How often each competitor holds the name.
TURNS = 200


class Contest:
    """Competitors in several processes and threads. Each writes its number while it holds the name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        shared = mmap.mmap(-1, mmap.PAGESIZE)
        self._inside, self.overlaps, self.turns = (
            memoryview(shared)[:1],
            memoryview(shared)[1:2],
            memoryview(shared)[2:],
        )

    def compete(self, number: int) -> None:
        files = files_in(self._directory)
        end = time.monotonic() + 20
        while self.turns[number] < TURNS and time.monotonic() < end:
            owner = f"{number}.{self.turns[number]}"
            if take(files, owner) is not None:
                continue
            before, self._inside[0] = self._inside[0], number
            os.sched_yield()
            if before or self._inside[0] != number:
                self.overlaps[0] = 1
            self._inside[0] = 0
            self.turns[number] += 1
            files.release(NAME, owner, owner)

    def compete_in_threads(self, *numbers: int) -> None:
        threads = [threading.Thread(target=self.compete, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.invariant("one-holder-per-lock-file")
def test_processes_and_threads_that_compete_never_hold_one_name_together(directory: Path) -> None:
    """The files are deleted all the time."""
    contest = Contest(directory)
    pids = []
    for numbers in ((1,), (2, 3)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                contest.compete_in_threads(*numbers)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert contest.overlaps[0] == 0
    assert [contest.turns[number] for number in (1, 2, 3)] == [TURNS] * 3
    assert content(directory) == []


# Processes that end


@pytest.mark.core
@pytest.mark.invariant("killed-holder-frees-lock-file")
def test_killed_holder_frees_its_name(files: LockFiles) -> None:
    with forked(lambda: take(files, "a")) as pid:
        assert take(files, "b") is not None
        kill(pid)
        assert take(files, "b") is None


@pytest.mark.invariant("killed-holder-frees-lock-file")
def test_child_that_the_holder_forked_does_not_keep_the_name_after_its_death(files: LockFiles) -> None:
    """The child has a copy of the descriptor, and a flock lasts until the last copy is closed."""
    read, write = os.pipe()

    def hold_and_fork() -> None:
        take(files, "a")
        if os.fork() == 0:
            os.setsid()  # so that it outlives the holder's process group
            os.write(write, os.getpid().to_bytes(4, "big"))
            time.sleep(60)
            os._exit(0)

    with forked(hold_and_fork) as pid:
        survivor = int.from_bytes(os.read(read, 4), "big")
        try:
            assert take(files, "b") is not None
            kill(pid)
            os.kill(survivor, 0)  # it lives
            assert take(files, "b") is None
        finally:
            os.kill(survivor, signal.SIGKILL)
            os.close(read)
            os.close(write)


@pytest.mark.invariant("killed-holder-frees-lock-file")
def test_program_that_the_holder_started_does_not_keep_the_name_after_its_death(
    files: LockFiles, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"

    def hold_and_start() -> None:
        take(files, "a")
        started = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False, start_new_session=True
        )
        pid_file.write_text(str(started.pid))

    with forked(hold_and_start) as pid:
        started = int(pid_file.read_text())
        try:
            kill(pid)
            os.kill(started, 0)  # it lives
            # Between fork and exec, the child still has the descriptor.
            eventually(lambda: take(files, "b") is None, message="the name is still held")
        finally:
            os.kill(started, signal.SIGKILL)


def test_forked_child_neither_owns_nor_frees_the_name_of_its_parent(files: LockFiles) -> None:
    take(files, "a")
    pid = os.fork()
    if pid == 0:
        refused = take(files, "b") is not None and take(files, "a") is not None
        files.release(NAME, "a", "a")
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert take(files, "b").owner == "a"


# Waiting


def test_wait_ends_soon_after_the_release(files: LockFiles, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_files, "RECHECK", 30.0)
    take(files, "a")
    timer = threading.Timer(0.1, lambda: files.release(NAME, "a", "a"))
    timer.start()
    began = time.monotonic()
    files_in(directory).wait(NAME, 30)
    assert 0.05 < time.monotonic() - began < 5
    timer.join()


def test_wait_for_a_killed_holder_ends_at_the_recheck(files: LockFiles) -> None:
    with forked(lambda: take(files, "a")) as pid:
        kill(pid)
        began = time.monotonic()
        files.wait(NAME, 30)
        assert lock_files.RECHECK <= time.monotonic() - began < 5
    assert take(files, "b") is None


def test_wait_lasts_no_longer_than_asked(files: LockFiles) -> None:
    take(files, "a")
    began = time.monotonic()
    files.wait(NAME, 0.1)
    assert 0.1 <= time.monotonic() - began < 0.5
