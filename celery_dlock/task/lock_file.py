"""The lock file of one run (``on_store_error="local"``): the lock of its machine, beside or in place of the lease.

A run that has a lease holds the file too. Otherwise a call on this machine that cannot reach the store would not find
that run. The file is freed before the lease, because the release may grant the lock to a call on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import LockFilesUnusable
from ..store.model import Held, Refusal
from ..utils.log import log_fields, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..keys.key_spec import LockName
    from ..locking.lease import Lease
    from .execution import Execution

__all__ = ["announce_end", "free", "held_in_file", "retry_within", "take", "take_beside"]


def take(run: Execution, name: LockName) -> Held | None:
    """Take the lock file of this name. Return the refusal if another owner of this machine has it.

    Raises:
        LockFilesUnusable: The file cannot be created or locked.
    """
    run.file_of = name  # first: if an exception interrupts this, `free` has to find the file
    digest = run.identity.digest
    context = run.context
    holder = run.runtime.lock_files.acquire(name, context.owner, run, context.requester, digest)
    if holder is None:
        return None
    return Held(holder, same_message=holder.identity == digest, rank_us=run.known_rank_us)


def take_beside(run: Execution, name: LockName, lease: Lease) -> Held | None:
    """Take the lock file for a run that has just got this lease. If another owner has the file, release the lease.

    Such an owner took the file while the store was away, or its lease was lost.
    """
    try:
        refusal = take(run, name)
    except LockFilesUnusable as error:
        if run.runtime.first_of("lock files"):
            logger.warning(
                "Task %s[%s] holds its lock %s without a lock file, so on_store_error='local' calls of this machine do "
                "not see it: %s",
                run.task.name, run.request.id, name, error, extra=log_fields(run.task.name, run.request.id, name.text),
            )  # fmt: skip
        return None
    if refusal is not None:
        run.runtime.lock_client.release(lease, run.context, run.context.rollback)
    return refusal


def held_in_file(answer: Refusal | None) -> Held | None:
    """Return the refusal if it comes from a lock file, else None."""
    return answer if isinstance(answer, Held) and answer.holder.kind == "file" else None


def retry_within(
    run: Execution,
    name: LockName,
    answer: Refusal | None,
    until: float,
    attempt: Callable[[float], Refusal | None],
    *,
    while_releasing: bool,
) -> Refusal | None:
    """Ask again each time the lock file may be free, as long as the refusal comes from that file.

    Args:
        run: The run.
        name: The run's lock name.
        answer: The last refusal.
        until: The end of the wait, on the monotonic clock.
        attempt: Asks for the lock. If it is held in the store, waits for its release for at most the given seconds.
        while_releasing: Wait only for a holder whose body has ended.
    """
    clock = run.runtime.clock
    while (held := held_in_file(answer)) is not None and (left := until - clock.monotonic()) > 0:
        if while_releasing and not held.holder.releasing:
            break
        run.runtime.lock_files.wait(name, left)
        answer = attempt(max(0.0, until - clock.monotonic()))
    return answer


def announce_end(run: Execution) -> None:
    """Record in the lock file that the body has ended."""
    if run.file_of is not None:
        run.runtime.lock_files.announce_release(run.file_of, run.context.owner)


def free(run: Execution) -> None:
    """Free the lock file, unless a run around this one has it. Does nothing without a file. Idempotent."""
    if run.file_of is not None:
        run.runtime.lock_files.release(run.file_of, run.context.owner, run)
