"""Lock files: one holder of a lock name per machine, also while the lock store is away (``on_store_error="local"``).

A call holds a name on its machine as long as it has an exclusive ``flock`` on the file of that name. The kernel ends a
``flock`` when its process ends, also by SIGKILL. These rules keep two calls from holding a name at once:

- Each acquisition opens the file anew, so two threads or greenlets of one process exclude each other.
- Only the holder deletes the file, and it deletes the file before it closes it.
- A call that has locked a file checks that the path still leads to it. Otherwise the file was deleted meanwhile, and
  another call may hold a new file.
- A forked child closes the files that it inherited. Otherwise it would keep the locks of its parent after a crash.

``flock`` is called with ``LOCK_NB``, so no greenlet blocks its hub. A waiting caller polls the path. It tries
again when the path has changed, or after ``RECHECK`` seconds.

The core depends on Celery and redis-py alone, so this does not use the package filelock. The policies also need a
record of the holder in the file, and the run directory has to be checked (:mod:`.run_directory`).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from io import FileIO
from typing import Final

from ..errors import LockFilesUnusable
from ..keys.lock_name import LockName
from ..store.holder_model import Holder
from ..store.location import StoreLocation
from ..store.model import Requester
from ..utils.clock import Clock
from ..utils.fork_guard import no_fork
from .run_directory import RunDirectory

__all__ = ["LockFiles"]

#: POLL: seconds between two looks of a waiting call at the path. RECHECK: seconds after which it tries the lock even if
#: the path has not changed, because a killed holder leaves its file in place.
POLL, RECHECK = 0.02, 0.5
#: Attempts to lock a file that is deleted or replaced each time.
ATTEMPTS = 100
#: Longest record of a holder, in bytes.
_RECORD: Final = 8192
#: The files that are open in this process. They belong to the process, so all apps share this set.
_open_files: Final[weakref.WeakSet[FileIO]] = weakref.WeakSet()


def _close_inherited() -> None:
    for file in list(_open_files):
        file.close()
    _open_files.clear()


os.register_at_fork(after_in_child=_close_inherited)


class LockFiles:
    """The lock files of one machine, as one process uses them.

    Args:
        directory: The path of the :class:`~.run_directory.RunDirectory`; None for the default.
        prefix: The prefix of the keys in the lock store.
        stores: The lock store. Equal names of different stores or prefixes have different files.
        clock: The clock of waiting calls and of records.
    """

    def __init__(self, directory: str | None, prefix: str, stores: Iterable[StoreLocation], clock: Clock) -> None:
        self.directory = RunDirectory(directory)
        # The memory store belongs to one process. Other processes have other locks of the same names.
        shown = (f"{store.shown} {os.getpid()}" if store.kind == "memory" else store.shown for store in stores)
        self._namespace = "\n".join((prefix, *shown))
        self._clock = clock
        #: By owner and lock name.
        self._held: dict[tuple[str, LockName], _HeldFile] = {}

    def acquire(
        self, name: LockName, owner: str, entrant: object, requester: Requester, identity: str = ""
    ) -> Holder | None:
        """Take the name on this machine. An owner that holds it enters it once more.

        Args:
            name: The lock name.
            owner: The owner.
            entrant: The run of that owner. A nested run is another entrant of the same owner.
            requester: The caller, as the record shows it to other callers.
            identity: The digest of the identity of the caller's message.

        Returns:
            The holder if another owner holds the name, else None.

        Raises:
            LockFilesUnusable: The file cannot be created or locked.
        """
        held = self._held.get((owner, name))
        if held is not None and held.pid == os.getpid():
            held.entrants.add(entrant)
            return None
        facts = (*requester, self._clock.wall(), owner, identity)
        for _ in range(ATTEMPTS):
            found = self._try(name, owner, facts, entrant)
            if found is not None:
                return found
            if (owner, name) in self._held:
                return None
        raise LockFilesUnusable(f"the lock file of {name} was replaced {ATTEMPTS} times in a row")

    def release(self, name: LockName, owner: str, entrant: object) -> None:
        """Leave the name. The last entrant of the owner frees it. Does nothing if the entrant is not in it.

        Safe to call again after an interruption at any step.
        """
        held = self._held.get((owner, name))
        if held is None:
            return
        held.entrants.discard(entrant)
        if held.entrants:
            return
        if held.pid == os.getpid():  # a child that the body forked has closed the file
            self._free(name, held.file)
        self._held.pop((owner, name), None)

    def announce_release(self, name: LockName, owner: str) -> None:
        """Record that the body of this owner has ended. Other calls then wait for its release."""
        held = self._held.get((owner, name))
        if held is not None and len(held.entrants) == 1 and held.pid == os.getpid():
            held.write(releasing=True)

    def wait(self, name: LockName, seconds: float) -> None:
        """Wait until the name may be free, for at most ``seconds``. The caller then tries to acquire it."""
        end = self._clock.monotonic() + min(seconds, RECHECK)
        before = self._inode(name)
        while before is not None and (left := end - self._clock.monotonic()) > 0:
            time.sleep(min(POLL, left))
            if self._inode(name) != before:
                return

    def _inode(self, name: LockName) -> tuple[int, int] | None:
        try:
            return _inode(os.stat(f"{self.directory.path}/{self._file_name(name)}", follow_symlinks=False))  # noqa: PTH116  # no Path: it is called often
        except OSError:
            return None

    def _file_name(self, name: LockName) -> str:
        # The file name is a digest, because a lock name may show arguments.
        digest = blake2b(f"{self._namespace}\n{name.text}".encode(), digest_size=16)
        return f"{digest.hexdigest()}.lock"

    def _try(self, name: LockName, owner: str, facts: tuple[object, ...], entrant: object) -> Holder | None:
        """Try once to lock the file. Return its holder; None if this call has locked it, or if it was deleted."""
        file_name = self._file_name(name)
        with self.directory.opened() as directory:
            file: FileIO | None = None
            try:
                with no_fork():  # a child that is forked before the file is in the set would not close it
                    file = _opened(file_name, directory)
                    _open_files.add(file)
                locked = _lock(file)
                if not _leads_to(file, file_name, directory):
                    file.close()
                    return None
                if not locked:
                    holder = _holder(file)
                    file.close()
                    return holder
                held = _HeldFile(file, facts, entrant)
                held.write()
                self._held[owner, name] = held
            except BaseException:
                if file is not None:
                    file.close()
                raise
        return None

    def _free(self, name: LockName, file: FileIO) -> None:
        if file.closed:
            return
        file_name = self._file_name(name)
        with suppress(OSError, LockFilesUnusable), self.directory.opened() as directory:
            # After an interruption, this file may be deleted already, and another one in its place.
            if _leads_to(file, file_name, directory):
                os.unlink(file_name, dir_fd=directory)
        file.close()


class _HeldFile:
    """A file that an owner has locked.

    Args:
        file: The file.
        facts: The facts about the holder that the file shows to other calls.
        entrant: The run that has locked it.
    """

    __slots__ = ("_facts", "entrants", "file", "pid")

    def __init__(self, file: FileIO, facts: tuple[object, ...], entrant: object) -> None:
        self.file = file
        self._facts = facts
        self.entrants = {entrant}
        self.pid = os.getpid()

    def write(self, *, releasing: bool = False) -> None:
        """Write the record. If that fails, for example on a full disk, the owner holds the lock without a record."""
        # The line end hides the rest of a longer record, which a killed holder has left.
        with suppress(OSError):
            os.pwrite(self.file.fileno(), json.dumps([*self._facts, releasing]).encode() + b"\n", 0)


def _opened(file_name: str, directory: int) -> FileIO:
    """Open the file, or create it. If an exception interrupts the caller, Python closes the returned object."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(file_name, "r+", opener=lambda path, _flags: os.open(path, flags, 0o600, dir_fd=directory))


def _lock(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_to(file: FileIO, file_name: str, directory: int) -> bool:
    """Return whether the path still leads to this file."""
    try:
        found = os.stat(file_name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return _inode(found) == _inode(os.fstat(file.fileno()))


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _holder(file: FileIO) -> Holder:
    """Return the holder that the file shows. Its record may not be written yet."""
    try:
        line = os.pread(file.fileno(), _RECORD, 0).partition(b"\n")[0]
        task, task_id, node, pid, since, owner, identity, releasing = json.loads(line)
        return Holder(
            task or None,
            task_id or None,
            node,
            int(pid),
            since,
            owner,
            identity,
            releasing=releasing,
            expires_in=math.inf,
            kind="file",
        )
    except (ValueError, TypeError):
        since = os.fstat(file.fileno()).st_mtime
        return Holder(None, None, "", None, since, expires_in=math.inf, kind="file")
