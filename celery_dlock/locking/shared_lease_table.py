"""The lease table of a pool child, in memory shared with the worker's main process.

The main process maps the memory before the fork. It can read the leases at any time, also after the child's death, and
needs no message from the child.

The processes share no lock, because a child could die while it holds one. Instead, each word but two has one writer:
the child or the main process. Both write _LOST and _REPLACED, and both write the same value there. A
sequence number guards the text (a sequence lock): while the child writes the text, the number is odd.

A slot of the table is used again after a release. So each acquisition of a child has a generation, a number that grows.
Each word that marks something contains the generation to which it applies. A late mark of an earlier acquisition then
means nothing for the present one.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from ..errors import DLockError
from ..keys.key_spec import LockName
from ..options.derived import StopReason
from .lease_table import LeaseState

__all__ = ["SharedLeaseTable"]

#: The size of a record in bytes, and the number of records per child. Pages that were never written use no memory.
_SIZE: Final = 4096
_COUNT: Final = 64
_WORDS: Final = _SIZE // 8
#: The words before the first record: the child's pid, the time of the watchdog's last scan (monotonic clock), and the
#: length of a text. The text follows and describes the store. It is empty for the store of the worker's own app.
_PID, _LOOKED, _STORE_LENGTH = range(3)
#: The offset of that text in bytes.
_STORE: Final = 3 * 8
#: The words of a record that the child writes. _UNTIL is the time of the last allowed renewal (``max_hold``). _STOPS is
#: the generation while the body runs and the main process may interrupt it by a signal.
_SEQUENCE, _GENERATION, _DEADLINE, _TTL, _BUCKET, _LENGTHS, _UNTIL, _STATE, _STOPS = range(9)
#: The words from _GENERATION to _STATE, which are written together under the sequence number. The native format ("@")
#: stores each number in one step. `_is_free` reads the state without the sequence number, so it gets the old or the new
#: one, never a mix. The word _BUCKET has the bucket and the number of seats. The word _LENGTHS has the lengths of the
#: release request, the acquisition id and the lock name. The release request says which marks a release has to set. The
#: child writes it if the watchdog is to release the lock.
_HEAD: Final = struct.Struct("@QddIIHHIdQ")
_HEAD_START: Final = _GENERATION * 8
#: The child sets _STOPPABLE to the generation if the policy is ``replace``: newer calls may ask the holder to stop. If
#: one has asked, the process that learns it first sets _REPLACED to the generation.
_STOPPABLE, _REPLACED = 9, 10
#: The words of a record that the main process writes; the child writes _LOST, too. _RENEWED_UNTIL is the deadline after
#: the renewal that _RENEWED marks.
_RENEWED, _RENEWED_UNTIL, _LOST, _CLEARED = range(11, 15)
#: The child sets _KILLABLE to the generation while its body may be killed: _KILL_AFTER seconds after a stop request.
_KILLABLE, _KILL_AFTER = range(15, 17)
#: The number of words before the text of a record.
_NUMBERS: Final = 17
#: The offset of the text in a record, in bytes: lock name, acquisition id, release request.
_TEXT: Final = _NUMBERS * 8
#: The maximum length of the text in bytes.
_ROOM: Final = _SIZE - _TEXT
#: Plain integers: converting a word to an enum member would take longer than the rest of the work on a record.
_FREE, _ACQUIRING, _HELD, _RELEASING, _RELEASE_DELEGATED = map(int, LeaseState)
#: The states in which the child must not begin a release: the watchdog releases the lease, or has released it.
_ENDED: Final = (_FREE, _RELEASE_DELEGATED)


#: Where a record is: its first word in the memory, its bytes, and its words as whole numbers and as floats.
_Slot: TypeAlias = "tuple[int, memoryview[int], memoryview[int], memoryview[float]]"


class SharedLeaseTable:
    """The lease table of one child, created before the fork. The child calls :meth:`adopt` first."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _SIZE * (_COUNT + 1))
        # A view stores a whole word in one step. A slice, or a struct of a fixed byte order, may write byte by byte.
        self.words = memoryview(self.memory).cast("Q")
        self.floats = memoryview(self.memory).cast("d")
        #: Made once, because each task opens a record, and each scan reads all of them.
        memory = memoryview(self.memory)
        self._slots: Final = [
            (
                base,
                memory[base * 8 : base * 8 + _SIZE],
                self.words[base : base + _NUMBERS],
                self.floats[base : base + _NUMBERS],
            )
            for base in range(_WORDS, _WORDS * (_COUNT + 1), _WORDS)
        ]
        memory.release()
        self._generations = itertools.count(1)
        self._opened: dict[int, SharedLeaseRecord] = {}
        #: In the main process, by slot: the last stop request. That is the generation of the record whose body was
        #: asked to stop, and the task id of the call that asked.
        self.stop_requests: dict[int, tuple[int, str]] = {}
        #: Sends the child the signal that stops its body. Set by the main process.
        self.interrupt: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int:
        """The pid of the child; 0 until it calls :meth:`adopt`."""
        return self.words[_PID]

    def wake(self) -> bool:
        """Return true: the watchdog of the main process reads this table."""
        return True

    @property
    def scanned_at(self) -> float:
        """The time of the watchdog's last scan, on the monotonic clock; 0 before its first scan."""
        return self.floats[_LOOKED]

    @scanned_at.setter
    def scanned_at(self, now: float) -> None:
        self.floats[_LOOKED] = now

    @property
    def store(self) -> bytes:
        """The description of the store of these leases (:class:`OtherTables`); empty if the child has set none."""
        return self.memory[_STORE : _STORE + self.words[_STORE_LENGTH]]

    def describe_store(self, text: bytes) -> bool:
        """Set the description of the store, once. Return false if it is too long. Called by the child."""
        if len(text) > _SIZE - _STORE:
            return False
        self.memory[_STORE : _STORE + len(text)] = text
        self.words[_STORE_LENGTH] = len(text)  # last: the main process reads the text once this is set
        return True

    def adopt(self) -> None:
        """Make this the table of the calling child."""
        # Create the lock after the fork, so that only threads of this child can hold it.
        self._opening = threading.Lock()
        self.words[_PID] = os.getpid()

    def open(self, name: LockName, acquisition: str, ttl: float) -> SharedLeaseRecord:
        """Return a record for a new acquisition. Called by the child.

        Raises:
            DLockError: All records are taken, or the lock name and the acquisition id are too long for a record.
        """
        with self._opening:
            for slot in self._slots:
                if _is_free(slot[2]):
                    record = SharedLeaseRecord(self, slot, next(self._generations), name, acquisition, ttl)
                    self._opened[slot[0]] = record
                    record.write(_ACQUIRING)
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
            dead: Whether the child is dead. If it is, records that it was writing when it died are returned too.
                Releasing such a record is harmless. If it was the record's first write, the acquire was not sent yet.
                A later write repeats the same lock name and acquisition id.
        """
        records = (self._read(slot, dead=dead) for slot in self._slots if not _is_free(slot[2]))
        return [record for record in records if record is not None]

    def _read(self, slot: _Slot, *, dead: bool) -> WatchdogRecord | None:
        """Return the record in a slot; None while the child writes it."""
        _, memory, words, _ = slot
        sequence = words[_SEQUENCE]
        if sequence % 2 and not dead:
            return None
        head = _HEAD.unpack_from(memory, _HEAD_START)
        generation, _, ttl, bucket, seats, of_ending, of_acquisition, of_name, _, _ = head
        middle = _TEXT + of_name
        end = middle + of_acquisition
        name = LockName(str(memory[_TEXT:middle], "ascii", "replace"), bucket, seats)
        acquisition = str(memory[middle:end], "ascii", "replace")
        record = WatchdogRecord(self, slot, generation, name, acquisition, ttl)
        record.ending = str(memory[end : end + of_ending], "utf-8", "replace")
        return record if words[_SEQUENCE] == sequence else None

    def close(self) -> None:
        """Release the memory. Called by the main process after the child is dead and its records are free."""
        for _, memory, words, floats in self._slots:
            memory.release()
            words.release()
            floats.release()
        self.words.release()
        self.floats.release()
        self.memory.close()


def _is_free(words: memoryview[int]) -> bool:
    return words[_STATE] == _FREE or words[_CLEARED] == words[_GENERATION]


class SharedLeaseRecord:
    """The record of an acquisition, as used by the child that holds the lock."""

    __slots__ = (
        "_base", "_floats", "_generation", "_memory", "_table", "_words",
        "acquisition", "ending", "name", "ttl",
    )  # fmt: skip

    def __init__(
        self,
        records: SharedLeaseTable,
        slot: _Slot,
        generation: int,
        name: LockName,
        acquisition: str,
        ttl: float,
    ) -> None:
        self._table = records
        self._base, self._memory, self._words, self._floats = slot
        self._generation = generation
        self.name = name
        self.acquisition = acquisition
        self.ttl = ttl
        self.ending = ""

    @property
    def state(self) -> LeaseState:
        return LeaseState(self._words[_STATE]) if self._ours() else LeaseState.FREE

    def _ours(self) -> bool:
        words = self._words
        return words[_GENERATION] == self._generation != words[_CLEARED] and words[_STATE] != _FREE

    @property
    def pid(self) -> int:
        return self._table.pid

    @property
    def deadline(self) -> float:
        words, floats = self._words, self._floats
        deadline = floats[_DEADLINE]
        if words[_RENEWED] == self._generation:
            renewed = floats[_RENEWED_UNTIL]
            # Read the generation again: the main process may have begun another renewal between the two reads.
            if words[_RENEWED] == self._generation:
                return max(deadline, renewed)
        return deadline

    @property
    def lost(self) -> bool:
        return self._words[_LOST] == self._generation

    @property
    def max_hold_until(self) -> float:
        return self._floats[_UNTIL]

    def lose(self) -> None:
        self._words[_LOST] = self._generation

    def set_aside(self) -> None:
        """Do nothing: a child has few records, so the watchdog reads all of them in each round."""

    @property
    def stoppable(self) -> bool:
        return self._words[_STOPPABLE] == self._generation

    def set_stoppable(self) -> None:
        if self._table.pid == os.getpid():
            self._words[_STOPPABLE] = self._generation

    @property
    def replaced(self) -> bool:
        return self._words[_REPLACED] == self._generation

    def request_stop(self, by: str) -> None:
        del by  # the lease knows it
        self._words[_REPLACED] = self._generation

    def set_kill_after(self, seconds: float | None) -> None:
        if self._table.pid != os.getpid():
            return  # as in `on_stop`
        self._floats[_KILL_AFTER] = seconds or 0.0
        self._words[_KILLABLE] = 0 if seconds is None else self._generation

    def on_stop(self, stop: Callable[[StopReason], None] | None) -> None:
        # Record only that the body may be stopped. The main process cannot call `stop`, so it sends a signal instead.
        # A process that the body forked must not change the record.
        if self._table.pid != os.getpid():
            return
        self._words[_STOPS] = 0 if stop is None else self._generation

    def stop(self, reason: StopReason) -> None:
        # The child reads from the record why it was interrupted.
        del reason
        if self._words[_STOPS] == self._generation:
            self._table.interrupt()

    def held(self, deadline: float) -> None:
        self._floats[_DEADLINE] = deadline
        self._words[_STATE] = _HELD

    def set_max_hold(self, until: float) -> None:
        self._floats[_UNTIL] = until

    def renewed(self, deadline: float) -> None:
        self._floats[_DEADLINE] = max(self._floats[_DEADLINE], deadline)

    # The following methods check the generation. If the watchdog has released this acquisition, the slot may contain
    # the record of a later one. A late write must not change that record.

    def begin_release(self) -> bool:
        words, generation = self._words, self._generation
        if words[_GENERATION] != generation or words[_CLEARED] == generation or words[_STATE] in _ENDED:
            return False
        words[_STATE] = _RELEASING
        return True

    def delegate_release(self, ending: str) -> None:
        if self._ours():
            # Task names and ids are cut, so the text normally fits. If it does not, the watchdog releases the lock
            # without setting the marks.
            self.ending = ending if self._fits(ending) else ""
            self.write(_RELEASE_DELEGATED, self._floats[_DEADLINE], self._floats[_UNTIL], self.ending.encode())

    def clear(self) -> None:
        words = self._words
        if words[_GENERATION] == self._generation != words[_CLEARED]:
            words[_STATE] = _FREE

    def _fits(self, ending: str) -> bool:
        return len(self.name.text) + len(self.acquisition) + len(ending.encode()) <= _ROOM

    def write(self, state: int, deadline: float = 0.0, until: float = 0.0, ending: bytes = b"") -> None:
        """Write the whole record under the sequence number."""
        words, memory = self._words, self._memory
        # Lock names and acquisition ids are ASCII, so each character is one byte.
        text, bucket, seats = self.name
        acquisition = self.acquisition
        data = f"{text}{acquisition}".encode() + ending
        size = len(data)
        if size > _ROOM:
            raise DLockError(f"{size} bytes do not fit a lease record of {_ROOM}")
        sequence = words[_SEQUENCE] | 1
        words[_SEQUENCE] = sequence
        memory[_TEXT : _TEXT + size] = data
        _HEAD.pack_into(
            memory, _HEAD_START, self._generation, deadline, self.ttl, bucket, seats, len(ending), len(acquisition),
            len(text), until, state,
        )  # fmt: skip
        words[_SEQUENCE] = sequence + 1


class WatchdogRecord(SharedLeaseRecord):
    """The record of an acquisition, as used by the watchdog in the main process."""

    __slots__ = ()

    def request_stop(self, by: str) -> None:
        super().request_stop(by)
        self._table.stop_requests[self._base] = self._generation, by

    @property
    def replaced_by(self) -> str | None:
        """The task id of the newer call that asked the holder to stop; None if no renewal has returned such an id."""
        generation, by = self._table.stop_requests.get(self._base, (0, None))
        return by if generation == self._generation else None

    @property
    def kill_after(self) -> float:
        """Seconds from a stop request to the kill of the body, if :attr:`must_end`."""
        return self._floats[_KILL_AFTER]

    @property
    def must_end(self) -> bool:
        """Whether this lease's body is running, was asked to stop, and may be killed.

        Unless the child is paused, its body may end at any time, and the answer is out of date.
        """
        words, generation = self._words, self._generation
        if words[_KILLABLE] != generation or words[_REPLACED] != generation:
            return False
        return words[_STATE] == _HELD and words[_GENERATION] == generation != words[_CLEARED]

    def renewed(self, deadline: float) -> None:
        words = self._words
        deadline = max(deadline, self.deadline)
        words[_RENEWED] = 0
        self._floats[_RENEWED_UNTIL] = deadline
        words[_RENEWED] = self._generation

    def clear(self) -> None:
        self._words[_CLEARED] = self._generation
