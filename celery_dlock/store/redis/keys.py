"""Lock names, worker nodes and brokers -> Redis keys. The text of every key is made here."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from ...keys.canonical import text_form
from ...keys.lock_name import BUCKETS, LockName, escape, name_builder

__all__ = ["LockKeys", "node_key", "presence_key", "queue_indexes", "sweeper_key"]

#: Where a bucket's "last" begins in its key, and with it the own part of all others.
_ROOT: Final = -len("last")


class LockKeys(NamedTuple):
    """The Redis keys of a lock name. Each carries the bucket as its hash tag, so that scripts run on a Cluster.

    Args:
        lock: The hash of the lock itself.
        last: The bucket's counter of fencing tokens.
        channel: Where a release is told to those who wait.
    """

    lock: str
    last: str
    channel: str

    @classmethod
    def of(cls, prefix: str, name: LockName) -> LockKeys:
        """The keys under a prefix, which must hold no brace: Redis takes the first pair for the hash tag."""
        root = f"{prefix}:{{{name.bucket:03x}}}:"
        return cls(f"{root}lock:{name.text}", f"{root}last", f"{root}wake:{name.text}")

    def done(self, identity_digest: str) -> str:
        """The mark that the message of this identity has ended."""
        return self._sibling("done", identity_digest)

    def run(self, tick: str = "") -> str:
        """The mark of what became of the name's last run (``once_per``); ``tick``: of the run of that tick alone."""
        return self._sibling("run", f"{self.name}:{tick}" if tick else self.name)

    def claim(self) -> str:
        """The claim of a call whose message is on its way (``unique="queued"``)."""
        return self._sibling("claim", self.name)

    def marks(self, acquisition: str, identity_digest: str) -> list[str]:
        """The tombstone of an acquisition and, where there is an identity, its done mark."""
        root = self.last[:_ROOT]
        tombstone = f"{root}tombstone:{acquisition}"
        return [tombstone, f"{root}done:{identity_digest}"] if identity_digest else [tombstone]

    def tombstone(self, acquisition: str) -> str:
        """The mark that this acquisition was given up before its answer was known."""
        return self._sibling("tombstone", acquisition)

    @property
    def name(self) -> str:
        """The lock name's text."""
        return self.lock[len(self.last) + 1 :]  # "lock" and "last" are of one length

    def queue(self) -> tuple[str, str, str, str]:
        """Of its waiters: by rank, their entries, those who lost a turn; and the bucket's index of queues."""
        name = self.name
        return (
            self._sibling("waiting", name),
            self._sibling("messages", name),
            self._sibling("delayed", name),
            f"{self.last[:_ROOT]}queues",
        )

    def quarantine(self) -> str:
        """Of the bucket: which run of a server grants there, and since when (``dlock_failover_quarantine``)."""
        return f"{self.last[:_ROOT]}quarantine"

    def quarantines(self) -> list[str]:
        """Those of all buckets."""
        prefix = self.last.partition("{")[0]
        return [f"{prefix}{{{bucket:03x}}}:quarantine" for bucket in range(BUCKETS)]

    def dead(self) -> str:
        """The dead letters: parked messages that nobody took or could read."""
        return self._sibling("dead", self.name)

    def _sibling(self, kind: str, what: str) -> str:
        return f"{self.last[:_ROOT]}{kind}:{what}"


_node: Final = name_builder("node")


def node_key(prefix: str, node: str) -> str:
    """The key of what workers of this name noted, in a bucket as all keys are."""
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


@functools.lru_cache(maxsize=8)  # asked twice a second, for the one prefix of an app
def queue_indexes(prefix: str) -> tuple[str, ...]:
    """The keys of all buckets' indexes of queues, by bucket."""
    return tuple(LockKeys.of(prefix, LockName("", bucket)).queue()[3] for bucket in range(BUCKETS))
