"""The Redis keys of lock names, worker nodes and brokers. Every key is built here."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from ...keys.canonical import text_form
from ...keys.lock_name import BUCKETS, LockName, escape, name_builder

__all__ = ["LockKeys", "node_key", "presence_key", "queue_indexes", "sweeper_key"]

#: Start of "last" in its key. Every key of the bucket has the same text before this position.
_ROOT: Final = -len("last")


class LockKeys(NamedTuple):
    """The Redis keys of a lock name. The bucket is the hash tag of each key, so that scripts run on a Cluster.

    Args:
        lock: Key of the lock's hash.
        last: Key of the bucket's highest fencing token.
        channel: Channel on which a release is published.
    """

    lock: str
    last: str
    channel: str

    @classmethod
    def of(cls, prefix: str, name: LockName) -> LockKeys:
        """Return the keys under a prefix without braces: Redis reads the first pair of braces as the hash tag."""
        root = f"{prefix}:{{{name.bucket:03x}}}:"
        return cls(f"{root}lock:{name.text}", f"{root}last", f"{root}wake:{name.text}")

    def done(self, identity_digest: str) -> str:
        """Return the key of the done mark of the message with this identity."""
        return self._sibling("done", identity_digest)

    def run(self, tick: str = "") -> str:
        """Return the key of the run mark (``once_per``), or of the mark of one tick if ``tick`` is given."""
        return self._sibling("run", f"{self.name}:{tick}" if tick else self.name)

    def claim(self) -> str:
        """Return the key of the claim of a published message (``unique="queued"``)."""
        return self._sibling("claim", self.name)

    def marks(self, acquisition: str, identity_digest: str) -> list[str]:
        """Return the keys of an acquisition's tombstone and, if there is an identity, of its done mark."""
        root = self.last[:_ROOT]
        tombstone = f"{root}tombstone:{acquisition}"
        return [tombstone, f"{root}done:{identity_digest}"] if identity_digest else [tombstone]

    def tombstone(self, acquisition: str) -> str:
        """Return the key of the tombstone: the owner abandoned this acquisition without knowing the reply."""
        return self._sibling("tombstone", acquisition)

    @property
    def name(self) -> str:
        """Text of the lock name."""
        return self.lock[len(self.last) + 1 :]  # "lock" and "last" have the same length

    def queue(self) -> tuple[str, str, str, str]:
        """Return the keys of the queue: waiters by rank, messages, delayed waiters, the bucket's index of queues."""
        name = self.name
        return (
            self._sibling("waiting", name),
            self._sibling("messages", name),
            self._sibling("delayed", name),
            f"{self.last[:_ROOT]}queues",
        )

    def quarantine(self) -> str:
        """Return the key of the bucket's quarantine record (``dlock_failover_quarantine``)."""
        return f"{self.last[:_ROOT]}quarantine"

    def quarantines(self) -> list[str]:
        """Return the keys of the quarantine records of all buckets."""
        prefix = self.last.partition("{")[0]
        return [f"{prefix}{{{bucket:03x}}}:quarantine" for bucket in range(BUCKETS)]

    def dead(self) -> str:
        """Return the key of the dead letters: parked messages that no worker took or could read."""
        return self._sibling("dead", self.name)

    def _sibling(self, kind: str, text: str) -> str:
        return f"{self.last[:_ROOT]}{kind}:{text}"


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


@functools.lru_cache(maxsize=8)  # called twice a second, with the prefix of the app
def queue_indexes(prefix: str) -> tuple[str, ...]:
    """Return the key of each bucket's index of queues."""
    return tuple(LockKeys.of(prefix, LockName("", bucket)).queue()[3] for bucket in range(BUCKETS))
