"""The Redis keys of lock names, worker nodes and brokers. Every key is built here."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from ...keys.canonical import text_form
from ...keys.lock_name import BUCKETS, ONE_LOCK, LockName, escape, index_member, name_builder, split_seat

__all__ = ["LockKeys", "audit_key", "node_key", "presence_key", "queue_indexes", "sweeper_key"]


class LockKeys(NamedTuple):
    """The Redis keys of a lock name. The bucket is the hash tag of each key, so that scripts run on a Cluster.

    Args:
        lock: Key of the lock's hash. Of a name with seats: that of seat 0, unless the name is that of one seat.
        last: Key of the bucket's highest fencing token.
        wake: Key of the list on which callers wait for a release.
        root: Start of every key of the bucket.
    """

    lock: str
    last: str
    wake: str
    root: str

    @classmethod
    def of(cls, prefix: str, name: LockName) -> LockKeys:
        """Return the keys under a prefix without braces: Redis reads the first pair of braces as the hash tag."""
        root = f"{prefix}:{{{name.bucket:03x}}}:"
        text = name.text
        if name.seats != ONE_LOCK:
            return SeatKeys(f"{root}lock:{text}", f"{root}last", f"{root}wake:{split_seat(name)[0]}", root)
        return cls(f"{root}lock:{text}", f"{root}last", f"{root}wake:{text}", root)

    @classmethod
    def lock_of(cls, prefix: str, name: LockName) -> str:
        """Return only the key of the lock, faster than :meth:`of`."""
        text, bucket, _ = name
        return f"{prefix}:{{{bucket:03x}}}:lock:{text}"

    def done(self, identity_digest: str) -> str:
        """Return the key of the done mark of the message with this identity."""
        return f"{self.root}done:{identity_digest}"

    def run(self, tick: str = "") -> str:
        """Return the key of the run mark (``once_per``), or of the mark of one tick if ``tick`` is given."""
        return f"{self.root}run:{self._text}:{tick}" if tick else f"{self.root}run:{self._text}"

    def claim(self) -> str:
        """Return the key of the claim of a published message (``unique="queued"``)."""
        return f"{self.root}claim:{self._text}"

    def tombstone(self, acquisition: str) -> str:
        """Return the key of the tombstone: the owner abandoned this acquisition without knowing the reply."""
        return f"{self.root}tombstone:{acquisition}"

    @property
    def _text(self) -> str:
        """Text of the lock name, which all its seats share."""
        return self.wake[len(self.root) + len("wake:") :]

    @property
    def name(self) -> str:
        """Text of the lock name, as the indexes of the bucket have it."""
        return self._text

    def seats_record(self) -> str:
        """Return the key of the record of a name's seats (``limit``)."""
        return f"{self.root}seats:{self._text}"

    def queue(self) -> tuple[str, str, str, str]:
        """Return the keys of the queue: waiters by rank, messages, delayed waiters, the bucket's index of queues."""
        root, name = self.root, self._text
        return f"{root}waiting:{name}", f"{root}messages:{name}", f"{root}delayed:{name}", f"{root}queues"

    def absent(self) -> str:
        """Return a key that never exists.

        With it, a Cluster runs a script only where no key of its slot is migrating. Otherwise the script would stop
        half done at the first missing key.
        """
        return f"{self.root}absent"

    def quarantine(self) -> str:
        """Return the key of the bucket's quarantine record (``dlock_quarantine``)."""
        return f"{self.root}quarantine"

    def quarantines(self) -> list[str]:
        """Return the keys of the quarantine records of all buckets."""
        prefix = self.root.partition("{")[0]
        return [f"{prefix}{{{bucket:03x}}}:quarantine" for bucket in range(BUCKETS)]

    def dead(self) -> str:
        """Return the key of the dead letters: parked messages that no worker took or could read."""
        return f"{self.root}dead:{self._text}"

    def debounced(self) -> str:
        """Return the key of what the store keeps about the newest call of the name (``debounce``)."""
        return f"{self.root}debounced:{self._text}"

    def replaced(self) -> str:
        """Return the key of what the store keeps about the calls of the name (``on_conflict="replace"``)."""
        return f"{self.root}replaced:{self.name}"

    def dead_letters(self) -> str:
        """Return the key of the bucket's index of dead letters."""
        return f"{self.root}dead_letters"

    def unsettled(self) -> str:
        """Return the key of the bucket's index of runs whose success is not recorded (``once_per``)."""
        return f"{self.root}unsettled"


class SeatKeys(LockKeys):
    """The Redis keys of a name with seats (``limit``), or of one of its seats."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return index_member(self._text, 0)


_node: Final = name_builder("node")


def node_key(prefix: str, node: str) -> str:
    """Return the key of the crash records of the workers with this node name."""
    name = _node(escape(node), text_form(node))
    return f"{prefix}:{{{name.bucket:03x}}}:worker:{name.text}"


_sweeper: Final = name_builder("sweeper")


def sweeper_key(prefix: str, broker: str, duty: str) -> str:
    """Return the key of the lease that one worker of a broker holds while it does this duty for all of them."""
    name = _sweeper(duty, text_form(broker))
    return f"{prefix}:{{{name.bucket:03x}}}:sweeper:{name.text}"


def presence_key(prefix: str, broker: str) -> str:
    """Return the key of the record that a broker has running workers."""
    return sweeper_key(prefix, broker, "present")


def audit_key(prefix: str) -> str:
    """Return the key of the newest actions of operators."""
    return f"{prefix}:{{000}}:audit"


@functools.lru_cache(maxsize=8)  # called twice a second, with the prefix of the app
def queue_indexes(prefix: str) -> tuple[str, ...]:
    """Return the key of each bucket's index of queues."""
    return tuple(LockKeys.of(prefix, LockName("", bucket)).queue()[3] for bucket in range(BUCKETS))
