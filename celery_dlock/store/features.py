"""The features of each kind of store, and the error for an option or a setting that needs more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..errors import InvalidLockOptions

__all__ = ["Features", "features_of"]


class Features(NamedTuple):
    """The features of a kind of store. One that it lacks has a text that says why; the others are empty.

    Args:
        store: The kind of store, as errors name it.
        queues: Calls wait in it (``on_conflict="queue"`` and ``"replace"``).
        seats: Several calls hold a name at once (``limit``).
        claims: Calls claim their names when they are published (``unique``).
        durability: Other servers or a disk confirm its writes (``dlock_durability``).
        listing: It returns the locks of all names, for operators.
        processes: Several processes share it.
        quarantine: A server that may have lost leases grants nothing for a while (``dlock_quarantine``).
    """

    store: str
    queues: str = ""
    seats: str = ""
    claims: str = ""
    durability: str = ""
    listing: str = ""
    processes: str = ""
    quarantine: str = ""

    def require(self, feature: str, subject: str, expected: str) -> None:
        """Check that the store has a feature.

        Args:
            feature: The feature.
            subject: The beginning of the error: the option or setting that needs it, with its value.
            expected: The values that do not need it.

        Raises:
            InvalidLockOptions: It lacks it. The message says why, and names the stores that have it.
        """
        if reason := getattr(self, feature):
            others = " or ".join(one.store for one in (REDIS, POSTGRESQL, MYSQL, MEMORY) if not getattr(one, feature))
            raise InvalidLockOptions(
                f"{subject}: {self.store} in dlock_url {reason}; expected {expected}, or {others} in dlock_url"
            )


REDIS: Final = Features("one server, sentinels, a Cluster")
REDLOCK: Final = Features(
    "several servers (Redlock)",
    queues="keep no order of waiters",
    seats="have no seats",
    claims="keep no claims of queued calls",
    durability="have no replicas",
    listing="may differ, and only a majority of them holds a lock",
)
MEMORY: Final = Features(
    "memory://", durability="has neither replicas nor a disk", processes="is in the memory of one process"
)
POSTGRESQL: Final = Features(
    "PostgreSQL",
    durability="takes it from the option synchronous_commit of the URL",
    quarantine="needs none if it loses no commit, see synchronous_commit",
)
MYSQL: Final = Features(
    "MySQL",
    durability="takes it from the server's innodb_flush_log_at_trx_commit",
    quarantine="needs none if it loses no commit, see innodb_flush_log_at_trx_commit",
)


def features_of(kinds: Sequence[str]) -> Features:
    """Return the features of the store at locations of these kinds."""
    if len(kinds) > 1:
        return REDLOCK
    return {"memory": MEMORY, "postgresql": POSTGRESQL, "mysql": MYSQL}.get(kinds[0], REDIS)
