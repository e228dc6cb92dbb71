"""The settings of an app, with their defaults and meanings.

``tools/reference.py`` writes ``docs/reference/settings.md`` from them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["SETTINGS", "Setting"]


class Setting(NamedTuple):
    """One setting, as the documentation shows it.

    Args:
        default: The default, as text.
        meaning: One paragraph. Its first sentence describes the value of the setting.
    """

    default: str
    meaning: str


SETTINGS: Final = {
    "dlock_url": Setting(
        "the broker's URL if that is Redis, else the result backend's",
        "The lock store: the URL of one server, of sentinels or of a Cluster, or a list of servers for Redlock.",
    ),
    "dlock_transport_options": Setting(
        "none",
        "Options that a URL cannot carry: ``master_name``, ``sentinel_kwargs``, ``credential_provider``, ``ssl``.",
    ),
    "dlock_prefix": Setting("``dlock``", "The start of every key, without braces and spaces."),
    "dlock_ttl": Setting("30", "The ttl in seconds of tasks and locks that set none; at least 1."),
    "dlock_durability": Setting(
        "``primary``", "The ``durability`` of tasks and locks that set none: what must confirm each write of a lock."
    ),
    "dlock_enabled": Setting("``True``", "For tests: if it is ``False``, no call takes a lock and no store is needed."),
    "dlock_call_options": Setting(
        "``bounded``",
        "The options that a message may choose: ``bounded`` (any, within bounds set by the task), ``all`` (any, "
        "with any value), or a list of options.",
    ),
    "dlock_timeout": Setting(
        "3",
        "Seconds that connecting to the store may take, and then each command; 0.05 to 60 (less for renewals).",
    ),
    "dlock_rest": Setting(
        "2",
        "Seconds for which a worker skips a store that timed out (circuit breaker), 0 to 60; with 0 every task tries.",
    ),
    "dlock_failover_quarantine": Setting(
        "0: off",
        "Seconds for which a server grants nothing new after it was started, emptied or promoted; the longest ttl, "
        "the same in all workers.",
    ),
    "dlock_restart_delay": Setting(
        "the longest ttl of the app's tasks, at least ``dlock_ttl``",
        "The same quarantine for each server of a Redlock. 0: off.",
    ),
    "dlock_turn": Setting(
        "60",
        "Grant timeout under ``queue``: seconds that a published message has to start, doubled with each failed "
        "grant; at least 1.",
    ),
    "dlock_turn_tries": Setting(
        "5", "Failed grants under ``queue`` after which a parked message becomes a dead letter; at least 1."
    ),
    "dlock_broker": Setting(
        "the broker's URL without user, password and options",
        "The broker's name in parked messages under ``queue``: any text, the same in all apps of one broker.",
    ),
}
"""The settings by name."""
