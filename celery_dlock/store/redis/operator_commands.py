"""Commands that only operators send, built as those of :mod:`.commands`."""
# ruff: noqa: D103 - the header of its script describes what a command does

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from . import scripts
from .commands import Command
from .keys import LockKeys

__all__ = [
    "cancel_hold",
    "check_dead_letter",
    "check_run",
    "describe",
    "free_lock",
    "hold_lock",
    "list_index",
    "requeue",
    "save_audit",
]

_CANCEL_HOLD: Final = scripts.CANCEL_HOLD.variant()
_CHECK_DEAD_LETTER: Final = scripts.CHECK_DEAD_LETTER.variant()
_CHECK_RUN: Final = scripts.CHECK_RUN.variant()
_DESCRIBE: Final = scripts.DESCRIBE.variant()
_FREE_LOCK: Final = scripts.FREE_LOCK.variant()
_HOLD_LOCK: Final = scripts.HOLD_LOCK.variant()
_LIST_INDEX: Final = scripts.LIST_INDEX.variant()
_REQUEUE: Final = scripts.REQUEUE.variant()
_SAVE_AUDIT: Final = scripts.SAVE_AUDIT.variant()


def describe(keys: LockKeys, tick: str) -> Command:
    waiting, _, delayed, _ = keys.queue()
    return _DESCRIBE, (keys.lock, keys.run(tick), keys.claim(), waiting, delayed, keys.dead())


def list_index(indexes: Sequence[str], first: int, last: int) -> Command:
    return _LIST_INDEX, (*indexes, str(first), str(last))


def check_run(keys: LockKeys, tick: str) -> Command:
    return _CHECK_RUN, (keys.lock, keys.run(tick), keys.unsettled())


def check_dead_letter(keys: LockKeys, identity: str) -> Command:
    return _CHECK_DEAD_LETTER, (keys.dead(), keys.dead_letters(), keys.name, identity)


def free_lock(keys: LockKeys, acquisition: str, token: str, *, force: bool) -> Command:
    names = (keys.lock, keys.wake, *keys.queue())
    return _FREE_LOCK, (*names, acquisition, token, "1" if force else "0", keys.name)


def hold_lock(keys: LockKeys, operator: str, hold_ms: int, reason: str) -> Command:
    waiting, _, delayed, queues = keys.queue()
    names = (keys.lock, waiting, delayed, queues, keys.absent())
    return _HOLD_LOCK, (*names, operator, str(hold_ms), reason, keys.name)


def cancel_hold(keys: LockKeys, acquisition: str, asked: str) -> Command:
    return _CANCEL_HOLD, (keys.lock, acquisition, asked)


def requeue(keys: LockKeys, identity: str) -> Command:
    waiting, messages, _, queues = keys.queue()
    names = (keys.dead(), keys.dead_letters(), waiting, messages, queues, keys.absent())
    return _REQUEUE, (*names, keys.name, identity)


def save_audit(audit: str, at_us: int, record: str, limit: int) -> Command:
    return _SAVE_AUDIT, (audit, str(at_us), record, str(limit))
