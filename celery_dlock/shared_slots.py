"""The slots of a pool child, in memory shared with the worker's main process.

The main process maps the memory before the fork and reads it whenever it likes, also after the child's death: so it
knows what a child holds with no message and no guess. Nothing here takes a lock (one held at a fork stays held for
ever in the child): each word has one writer, the child or the main process, and the text is guarded by a sequence
number, which is odd while the child writes (a sequence lock).
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from typing import Final

from .errors import DLockError
from .keys import LockName
from .slots import SlotState

__all__ = ["SharedSlots"]

#: Bytes of one slot; slots of one child. Only pages that were written cost memory.
_SIZE: Final = 4096
_COUNT: Final = 64
_WORDS: Final = _SIZE // 8
#: Words within a slot that the child writes ...
_SEQUENCE, _GENERATION, _STATE, _DEADLINE, _TTL, _BUCKET, _LENGTHS = range(7)
#: ... and those that the main process writes, each naming the generation it speaks of.
_RENEWED, _RENEWED_UNTIL, _LOST, _CLEARED = range(8, 12)
_TEXT: Final = 16 * 8
#: As plain numbers: to make an enum's member of a word takes longer than all else that is done to it.
_FREE, _HELD, _LEAVING = (int(state) for state in (SlotState.FREE, SlotState.HELD, SlotState.LEAVING))


class SharedSlots:
    """Made in the main process before the fork; the child calls :meth:`adopt` first."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _SIZE * (_COUNT + 1))
        # Views store a whole word at once; struct and slices may write byte by byte.
        self.words = memoryview(self.memory).cast("Q")
        self.floats = memoryview(self.memory).cast("d")
        self._generations = itertools.count(1)
        self._opened: dict[int, SharedSlot] = {}

    @property
    def pid(self) -> int:
        """The child's pid; 0 until it adopted the slots."""
        return self.words[0]

    def adopt(self) -> None:
        """Say, in the child, whose slots these are."""
        # Made after the fork and taken by this child's own threads only.
        self._opening = threading.Lock()
        self.words[0] = os.getpid()

    def open(self, name: LockName, acquisition: str, ttl: float) -> SharedSlot:
        """A slot for a new acquisition. Called by the child."""
        with self._opening:
            for base in _BASES:
                if self._free(base):
                    slot = SharedSlot(self, base, next(self._generations), name, acquisition, ttl)
                    self._opened[base] = slot
                    slot.write()
                    return slot
        raise DLockError(f"a worker process can hold at most {_COUNT} locks at once")

    def find(self, acquisition: str) -> SharedSlot | None:
        """The slot that this child opened for ``acquisition``, if it is not free. Called by the child."""
        for slot in list(self._opened.values()):
            if slot.acquisition == acquisition and slot.state is not SlotState.FREE:
                return slot
        return None

    def taken(self, *, dead: bool = False) -> list[KeptSlot]:
        """Every slot that is not free. Called by the main process.

        Args:
            dead: The child is gone, so a half-written slot will never be whole: take it as it is. Its acquire was
                not sent yet, or its name and acquisition are what they were; releasing either is harmless.
        """
        slots = (self._read(base, dead=dead) for base in _BASES if not self._free(base))
        return [slot for slot in slots if slot is not None]

    def _free(self, base: int) -> bool:
        words = self.words
        return words[base + _STATE] == _FREE or words[base + _CLEARED] == words[base + _GENERATION]

    def _read(self, base: int, *, dead: bool) -> KeptSlot | None:
        """What the child wrote; None if it is writing just now."""
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
        slot = KeptSlot(self, base, words[base + _GENERATION], name, acquisition, self.floats[base + _TTL])
        slot.ending = self.memory[end : end + (lengths & 0xFFFF)].decode("utf-8", "replace")
        return slot if words[base + _SEQUENCE] == sequence else None

    def close(self) -> None:
        """Give the memory back. Called by the main process once the child is gone and its slots are free."""
        self.words.release()
        self.floats.release()
        self.memory.close()


_BASES: Final = tuple(range(_WORDS, _WORDS * (_COUNT + 1), _WORDS))


class SharedSlot:
    """One acquisition, as the child that holds it sees it."""

    __slots__ = ("_base", "_generation", "_slots", "acquisition", "ending", "name", "ttl")

    def __init__(
        self, slots: SharedSlots, base: int, generation: int, name: LockName, acquisition: str, ttl: float
    ) -> None:
        self._slots = slots
        self._base = base
        self._generation = generation
        self.name = name
        self.acquisition = acquisition
        self.ttl = ttl
        self.ending = ""

    @property
    def state(self) -> SlotState:
        return SlotState(self._slots.words[self._base + _STATE]) if self._ours() else SlotState.FREE

    def _ours(self) -> bool:
        words, base = self._slots.words, self._base
        if words[base + _GENERATION] != self._generation or words[base + _CLEARED] == self._generation:
            return False
        return words[base + _STATE] != _FREE

    @property
    def deadline(self) -> float:
        words, floats, base = self._slots.words, self._slots.floats, self._base
        deadline = floats[base + _DEADLINE]
        if words[base + _RENEWED] == self._generation:
            renewed = floats[base + _RENEWED_UNTIL]
            # Read again: the main process may have begun to speak of another generation meanwhile.
            if words[base + _RENEWED] == self._generation:
                return max(deadline, renewed)
        return deadline

    @property
    def lost(self) -> bool:
        return self._slots.words[self._base + _LOST] == self._generation

    def lose(self) -> None:
        self._slots.words[self._base + _LOST] = self._generation

    # A late word about an acquisition that the keeper has ended must not touch the slot's next one.

    def held(self, deadline: float) -> None:
        self._slots.floats[self._base + _DEADLINE] = deadline
        self._slots.words[self._base + _STATE] = _HELD

    def moved(self, deadline: float) -> None:
        self._slots.floats[self._base + _DEADLINE] = max(self._slots.floats[self._base + _DEADLINE], deadline)

    def leaving(self) -> None:
        if self._ours():
            self._slots.words[self._base + _STATE] = _LEAVING

    def leave_to_keeper(self, ending: str) -> None:
        if self._ours():
            # It always fits (names and ids are cut); should it not, the lock is freed without its marks.
            self.ending = ending if self._fits(ending) else ""
            self.write(SlotState.LEFT)

    def clear(self) -> None:
        if self._ours():
            self._slots.words[self._base + _STATE] = _FREE

    def _fits(self, ending: str) -> bool:
        return len(self.name.text) + len(self.acquisition) + len(ending.encode()) <= _SIZE - _TEXT

    def write(self, state: SlotState = SlotState.ACQUIRING) -> None:
        """Write the whole slot under the sequence number."""
        words, floats, base = self._slots.words, self._slots.floats, self._base
        text, owner, ending = self.name.text.encode(), self.acquisition.encode(), self.ending.encode()
        data = text + owner + ending
        if len(data) > _SIZE - _TEXT:
            raise DLockError(f"{len(data)} bytes do not fit a slot of {_SIZE - _TEXT}")
        sequence = words[base + _SEQUENCE] | 1
        words[base + _SEQUENCE] = sequence
        words[base + _GENERATION] = self._generation
        words[base + _BUCKET] = self.name.bucket
        floats[base + _TTL] = self.ttl
        if state is SlotState.ACQUIRING:
            floats[base + _DEADLINE] = 0.0
        words[base + _LENGTHS] = len(text) << 32 | len(owner) << 16 | len(ending)
        start = base * 8 + _TEXT
        self._slots.memory[start : start + len(data)] = data
        words[base + _STATE] = state
        words[base + _SEQUENCE] = sequence + 1


class KeptSlot(SharedSlot):
    """The same acquisition, as the keeper in the main process sees it."""

    __slots__ = ()

    def moved(self, deadline: float) -> None:
        words, base = self._slots.words, self._base
        deadline = max(deadline, self.deadline)
        words[base + _RENEWED] = 0
        self._slots.floats[base + _RENEWED_UNTIL] = deadline
        words[base + _RENEWED] = self._generation

    def clear(self) -> None:
        self._slots.words[self._base + _CLEARED] = self._generation
