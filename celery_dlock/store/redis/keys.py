"""The Redis keys of lock names, worker nodes and brokers. Every key is built here."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from ...keys.canonical import text_form
from ...keys.lock_name import BUCKETS, ONE_LOCK, LockName, escape, index_member, name_builder, split_seat

__all__ = ["LockKeys", "audit_key", "bucket_keys", "node_key", "presence_key", "sweeper_key"]


#: Kinds of keys of one lock name. The headers of the scripts call a key by its kind, and say what it holds.
_OF_NAME: Final = frozenset((
    "claim", "dead", "debounced", "delayed", "messages", "replaced", "seats", "waiting", "wake",
))  # fmt: skip
#: Kinds of keys that all lock names of a bucket share. ``absent`` never exists. With it, a Cluster runs a script only
#: where no key of its slot is migrating. Otherwise the script would stop half done at the first missing key.
_OF_BUCKET: Final = frozenset(("absent", "dead_letters", "quarantine", "queues", "unsettled"))


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

    def named(self, kind: str) -> str:
        """Return the key of a kind that needs nothing but the lock name."""
        if kind in _OF_BUCKET:
            return f"{self.root}{kind}"
        if kind in _OF_NAME:
            return f"{self.root}{kind}:{self._text}"
        raise KeyError(kind)

    def queue(self) -> tuple[str, str, str, str]:
        """Return the keys of the queue: waiters by rank, messages, delayed waiters, the bucket's index of queues."""
        root, name = self.root, self._text
        return f"{root}waiting:{name}", f"{root}messages:{name}", f"{root}delayed:{name}", f"{root}queues"


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
def bucket_keys(prefix: str, kind: str) -> tuple[str, ...]:
    """Return the keys of a kind of all buckets."""
    return tuple(LockKeys.of(prefix, LockName("", bucket)).named(kind) for bucket in range(BUCKETS))
