"""The lease table of a pool child, in memory shared with the worker's main process.

The main process maps the memory before the fork and can read it at any time, also after the child's death. It
therefore knows the leases of a child without a message.

The processes share no lock, because a child could die while it holds one. Instead, each word has one writer: the child
or the main process. Only the mark of a lost lease is written by both. A sequence number guards the text (a sequence
lock): while the child writes the text, the number is odd.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import Final

from ..errors import DLockError
from ..keys.key_spec import LockName
from ..options.durability import PRIMARY, Durability, as_number, from_number
from .lease_table import LeaseState

__all__ = ["SharedLeaseTable"]

#: The size of a record in bytes, and the number of records per child. Pages that were never written use no memory.
_SIZE: Final = 4096
_COUNT: Final = 64
_WORDS: Final = _SIZE // 8
#: The words before the first record: the child's pid, and the time of the watchdog's last scan (monotonic clock).
_PID, _LOOKED = range(2)
#: The words of a record that the child writes. _UNTIL is the time of the last allowed renewal (``max_hold``). _STOPS
#: is the generation whose body may be stopped.
_SEQUENCE, _GENERATION, _DEADLINE, _TTL, _BUCKET, _LENGTHS, _UNTIL, _DURABILITY, _STATE, _STOPS = range(10)
#: The words from _GENERATION to _STATE, which are written together under the sequence number. The native format ("@")
#: stores each word at once. A reader that ignores the sequence number therefore gets the old or the new word, never a
#: mix: `_free` reads the state in this way.
_HEAD: Final = struct.Struct("@QddQQdQQ")
#: The words of a record that the main process writes; the child writes _LOST, too. _RENEWED, _LOST and _CLEARED contain
#: the generation to which they apply. _RENEWED_UNTIL is the deadline after the renewal.
_RENEWED, _RENEWED_UNTIL, _LOST, _CLEARED = range(12, 16)
#: The offset of the text in a record, in bytes: lock name, acquisition id, release request.
_TEXT: Final = 16 * 8
#: The maximum length of the text in bytes.
_ROOM: Final = _SIZE - _TEXT
#: Plain integers: converting a word to an enum member would take longer than the rest of the work on a record.
_FREE, _HELD, _RELEASING, _RELEASE_DELEGATED = map(
    int, (LeaseState.FREE, LeaseState.HELD, LeaseState.RELEASING, LeaseState.RELEASE_DELEGATED)
)


class SharedLeaseTable:
    """The lease table of one child, created before the fork. The child calls :meth:`adopt` first."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _SIZE * (_COUNT + 1))
        # A view stores a whole word at once. A slice, or a struct of a fixed byte order, may write byte by byte.
        self.words = memoryview(self.memory).cast("Q")
        self.floats = memoryview(self.memory).cast("d")
        self._generations = itertools.count(1)
        self._opened: dict[int, SharedLeaseRecord] = {}
        #: Sends the child the signal that stops its body. Set by the main process.
        self.interrupt: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int:
        """The pid of the child; 0 until it calls :meth:`adopt`."""
        return self.words[_PID]

    @property
    def scanned_at(self) -> float:
        """The time of the watchdog's last scan, on the monotonic clock; 0 before its first scan and after its end."""
        return self.floats[_LOOKED]

    @scanned_at.setter
    def scanned_at(self, now: float) -> None:
        self.floats[_LOOKED] = now

    def adopt(self) -> None:
        """Make this the table of the calling child."""
        # Created after the fork: only the threads of this child take it.
        self._opening = threading.Lock()
        self.words[_PID] = os.getpid()

    def open(self, name: LockName, acquisition: str, ttl: float, durability: Durability = PRIMARY) -> SharedLeaseRecord:
        """Return a record for a new acquisition. Called by the child.

        Raises:
            DLockError: All records are taken, or the lock name and the acquisition id are too long for a record.
        """
        with self._opening:
            for base in _BASES:
                if self._free(base):
                    record = SharedLeaseRecord(self, base, next(self._generations), name, acquisition, ttl, durability)
                    self._opened[base] = record
                    record.write()
                    return record
        raise DLockError(f"cannot take {name.text}: a worker process can hold at most {_COUNT} locks at once")

    def find(self, acquisition: str) -> SharedLeaseRecord | None:
        """Return the child's record of ``acquisition``; None if it is free. Called by the child."""
        for record in list(self._opened.values()):
            if record.acquisition == acquisition and record.state is not LeaseState.FREE:
                return record
        return None

    def records(self, *, dead: bool = False) -> list[WatchdogRecord]:
        """Return all records that are not free. Called by the main process.

        Args:
            dead: Whether the child is dead. If it is, half-written records are returned too. Such a record belongs to
                an acquire that was not sent yet, or its lock name and acquisition id are unchanged. Releasing either is
                harmless.
        """
        records = (self._read(base, dead=dead) for base in _BASES if not self._free(base))
        return [record for record in records if record is not None]

    def _free(self, base: int) -> bool:
        words = self.words
        return words[base + _STATE] == _FREE or words[base + _CLEARED] == words[base + _GENERATION]

    def _read(self, base: int, *, dead: bool) -> WatchdogRecord | None:
        """Return the record at ``base``; None while the child writes it."""
        words = self.words
        sequence = words[base + _SEQUENCE]
        if sequence % 2 and not dead:
            return None
        lengths = words[base + _LENGTHS]
        start = base * 8 + _TEXT
        middle = start + (lengths >> 32)
        end = middle + (lengths >> 16 & 0xFFFF)
        name = LockName(self.memory[start:middle].decode("ascii", "replace"), words[base + _BUCKET])
        acquisition = self.memory[middle:end].decode("ascii", "replace")
        durability, ttl = from_number(words[base + _DURABILITY]), self.floats[base + _TTL]
        record = WatchdogRecord(self, base, words[base + _GENERATION], name, acquisition, ttl, durability)
        record.ending = self.memory[end : end + (lengths & 0xFFFF)].decode("utf-8", "replace")
        return record if words[base + _SEQUENCE] == sequence else None

    def close(self) -> None:
        """Release the memory. Called by the main process after the child is dead and its records are free."""
        self.words.release()
        self.floats.release()
        self.memory.close()


_BASES: Final = tuple(range(_WORDS, _WORDS * (_COUNT + 1), _WORDS))


class SharedLeaseRecord:
    """The record of an acquisition, as used by the child that holds the lock."""

    __slots__ = ("_base", "_generation", "_table", "acquisition", "durability", "ending", "name", "ttl")

    def __init__(
        self,
        records: SharedLeaseTable,
        base: int,
        generation: int,
        name: LockName,
        acquisition: str,
        ttl: float,
        durability: Durability = PRIMARY,
    ) -> None:
        self._table = records
        self._base = base
        self._generation = generation
        self.name = name
        self.acquisition = acquisition
        self.ttl = ttl
        self.durability = durability
        self.ending = ""

    @property
    def state(self) -> LeaseState:
        return LeaseState(self._table.words[self._base + _STATE]) if self._ours() else LeaseState.FREE

    def _ours(self) -> bool:
        words, base = self._table.words, self._base
        if words[base + _GENERATION] != self._generation or words[base + _CLEARED] == self._generation:
            return False
        return words[base + _STATE] != _FREE

    @property
    def pid(self) -> int:
        return self._table.pid

    @property
    def deadline(self) -> float:
        words, floats, base = self._table.words, self._table.floats, self._base
        deadline = floats[base + _DEADLINE]
        if words[base + _RENEWED] == self._generation:
            renewed = floats[base + _RENEWED_UNTIL]
            # Read the generation again: the main process may have begun another renewal between the two reads.
            if words[base + _RENEWED] == self._generation:
                return max(deadline, renewed)
        return deadline

    @property
    def lost(self) -> bool:
        return self._table.words[self._base + _LOST] == self._generation

    @property
    def max_hold_until(self) -> float:
        return self._table.floats[self._base + _UNTIL]

    def lose(self) -> None:
        self._table.words[self._base + _LOST] = self._generation

    def on_loss(self, stop: Callable[[], None] | None) -> None:
        # Record only that the body may be stopped: the main process does it with a signal, and cannot call `stop`.
        # A process that the body forked must not change the record.
        if self._table.pid != os.getpid():
            return
        self._table.words[self._base + _STOPS] = 0 if stop is None else self._generation

    def stop(self) -> None:
        if self._table.words[self._base + _STOPS] == self._generation:
            self._table.interrupt()

    def held(self, deadline: float) -> None:
        self._table.floats[self._base + _DEADLINE] = deadline
        self._table.words[self._base + _STATE] = _HELD

    def set_max_hold(self, until: float) -> None:
        self._table.floats[self._base + _UNTIL] = until

    def renewed(self, deadline: float) -> None:
        self._table.floats[self._base + _DEADLINE] = max(self._table.floats[self._base + _DEADLINE], deadline)

    # The following methods check the generation. If the watchdog has released this acquisition, the record may belong
    # to the next one, which a late write must not change.

    def begin_release(self) -> bool:
        if not self._ours() or self._table.words[self._base + _STATE] == _RELEASE_DELEGATED:
            return False
        self._table.words[self._base + _STATE] = _RELEASING
        return True

    def delegate_release(self, ending: str) -> None:
        if self._ours():
            # Task names and ids are cut, so the text normally fits. If it does not, the watchdog releases the lock
            # without the marks of the request.
            self.ending = ending if self._fits(ending) else ""
            self.write(LeaseState.RELEASE_DELEGATED)

    def clear(self) -> None:
        if self._ours():
            self._table.words[self._base + _STATE] = _FREE

    def _fits(self, ending: str) -> bool:
        return len(self.name.text) + len(self.acquisition) + len(ending.encode()) <= _ROOM

    def write(self, state: LeaseState = LeaseState.ACQUIRING) -> None:
        """Write the whole record under the sequence number."""
        words, memory, base = self._table.words, self._table.memory, self._base
        text, owner = self.name.text, self.acquisition
        data = f"{text}{owner}{self.ending}".encode()
        if len(data) > _ROOM:
            raise DLockError(f"{len(data)} bytes do not fit a lease record of {_ROOM}")
        # Lock names and acquisition ids are ASCII, so each character is one byte.
        lengths = len(text) << 32 | len(owner) << 16 | len(data) - len(text) - len(owner)
        deadline = until = 0.0
        if state is not LeaseState.ACQUIRING:
            deadline, until = self._table.floats[base + _DEADLINE], self._table.floats[base + _UNTIL]
        durability = 0 if self.durability is PRIMARY else as_number(self.durability)
        sequence = words[base + _SEQUENCE] | 1
        words[base + _SEQUENCE] = sequence
        start = base * 8
        memory[start + _TEXT : start + _TEXT + len(data)] = data
        _HEAD.pack_into(
            memory, start + 8, self._generation, deadline, self.ttl, self.name.bucket, lengths, until, durability, state
        )
        words[base + _SEQUENCE] = sequence + 1


class WatchdogRecord(SharedLeaseRecord):
    """The record of an acquisition, as used by the watchdog in the main process."""

    __slots__ = ()

    def renewed(self, deadline: float) -> None:
        words, base = self._table.words, self._base
        deadline = max(deadline, self.deadline)
        words[base + _RENEWED] = 0
        self._table.floats[base + _RENEWED_UNTIL] = deadline
        words[base + _RENEWED] = self._generation

    def clear(self) -> None:
        self._table.words[self._base + _CLEARED] = self._generation
