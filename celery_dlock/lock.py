"""The public lock class, for any name, inside tasks and outside."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final

from celery import Celery
from celery.app import app_or_default

from .errors import LockHeld, LockLost, NotHeld
from .keys.key_spec import LockName, shared_name
from .locking.lease import Lease, NullLease
from .options.durability import check_ttl
from .options.durations import Seconds, seconds_within, ttl_seconds
from .options.error_texts import invalid_value
from .runtime import Runtime
from .store.holder_model import Holder, held_by
from .store.model import AcquireRequest, Held

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Lock"]

_NULL_LEASE: Final = NullLease()


class Lock:
    """A distributed, reentrant lock.

    It excludes every other holder of the same name: other ``Lock`` objects, and tasks with ``scope="shared"`` whose key
    gives this text.

    Each thread and each execution of a task is an owner. An owner that holds the lock can enter it again. The tasks of
    one asyncio loop run in one thread, so they are one owner and do not exclude each other.

    The watchdog renews the lease while the lock is held. The lease can still end before the work does: if the process
    is paused, the network is cut or the store loses data. Then another owner can take the lock. Call
    ``lock.lease.ensure()`` before a step that must not overlap, or pass ``lock.lease.token`` to the resource.

    As a context manager, it waits for the lock without a limit. The end of the block raises :class:`LockLost` if the
    lease ended before, unless the block itself raised.

    With the setting ``dlock_enabled=False``, it takes no lock and needs no store: each entry succeeds at once.

    Args:
        name: The lock name: a non-empty text, or the ``LockName`` of a call. The text is visible in the store and in
            logs, so it must not contain secrets.
        app: The app whose lock store and settings are used. Default: the current app.
        ttl: Seconds (or a ``timedelta``) from a renewal to the end of the lease, from 1 s to 366 days. If the process
            dies, its lease ends by itself after this time. Default: the setting ``dlock_ttl``.

    Raises:
        InvalidLockOptions: An argument is invalid.
    """

    def __init__(self, name: str | LockName, *, app: Celery | None = None, ttl: object = None) -> None:
        given: object = name  # the annotation does not stop a caller from passing another type
        if isinstance(given, LockName):
            self._name = given
        elif isinstance(given, str) and given:
            self._name = shared_name(given)
        else:
            raise invalid_value("Lock: name", name, "a non-empty str")
        if app is not None and not isinstance(app, Celery):
            raise invalid_value(f"Lock({name}): app", app, "a Celery app, or none for the current app")
        self._runtime = Runtime.of(app if app is not None else app_or_default())
        self._ttl = None if ttl is None else ttl_seconds(f"Lock({name}): ttl", ttl)

    def __repr__(self) -> str:
        return f"<Lock {self.name}>"

    @property
    def name(self) -> str:
        """The lock name, as it appears in the store and in logs."""
        return self._name.text

    @property
    def lease(self) -> Lease | NullLease | None:
        """The lease of this owner, or None if this owner does not hold the lock.

        With ``dlock_enabled=False``, it is a lease without a token, which is never lost.
        """
        if not self._runtime.enabled:
            return _NULL_LEASE
        return self._runtime.lock_client.held(self._name, self._runtime.owner_context())

    def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> bool:  # noqa: FBT001, FBT002  # as threading.Lock has it
        """Acquire the lock, or enter it again if this owner holds it.

        Leave each entry with :meth:`release`.

        Args:
            blocking: Whether to wait while another owner holds the lock. Default: True.
            timeout: Seconds (or a ``timedelta``) to wait at most, from 0 to 366 days. None, the default, means no
                limit. It needs ``blocking=True``. It does not limit the wait for a store that does not answer.

        Returns:
            True if this owner holds the lock now; False if another owner still holds it.

        Raises:
            InvalidLockOptions: An argument or a ``dlock_`` setting is invalid.
            LockLost: This owner has entered the lock before, and that lease is over. Leave the earlier entries first.
            StoreUnavailable: The store did not answer, or cannot grant the lock now. The lock was not entered. If the
                store grants it too late, the watchdog releases it.
        """
        given: object = blocking  # perhaps a timeout, which is the first argument of other lock classes
        if not isinstance(given, bool):
            expected = "True or False; give a time to wait as timeout="
            raise invalid_value(f"Lock({self.name}).acquire: blocking", blocking, expected)
        if timeout is not None:
            timeout = seconds_within(f"Lock({self.name}).acquire: timeout", timeout, 0.0)
            if not blocking:
                raise invalid_value(f"Lock({self.name}).acquire: timeout", timeout, "None with blocking=False")
        return isinstance(self._acquire(timeout if blocking else 0.0), Lease | NullLease)

    def release(self) -> None:
        """Leave the lock once. Leaving the outermost entry releases it.

        If the store does not answer, this method returns, and the watchdog retries the release.

        Raises:
            NotHeld: This owner does not hold the lock, or the running task itself holds it and releases it at its end.
            LockLost: The lease ended before. The entry is left, but another owner may have held the lock meanwhile:
                check the work, or undo it.
        """
        lease, context = self.lease, self._runtime.owner_context()
        if isinstance(lease, NullLease):
            return
        if lease is None:
            raise NotHeld(f"{self.name} is not held by this owner")
        if lease is context.own and context.entered.count(lease) == 1:
            raise NotHeld(f"{self.name} is held by the running task itself, which releases it at its end")
        lost = lease.lost
        ours = self._runtime.lock_client.release(lease, context)
        if lost or not ours:
            raise LockLost(f"the lease of {self.name} was over before its release")

    def locked(self) -> bool:
        """Return whether the lock is held now, by this owner or another one.

        A lock that is kept after its body (``min_hold``, ``keep_on_retry``) or granted to a waiter counts as held. The
        answer can be outdated at once: to take the lock only if it is free, call ``acquire(blocking=False)``.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        return self.holder() is not None

    def holder(self) -> Holder | None:
        """Return the current holder, or None if the lock is free or ``dlock_enabled`` is false.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        return self._runtime.lock_client.holder(self._name) if self._runtime.enabled else None

    def __enter__(self) -> Self:
        # This should never raise. `_acquire` waits while the lock is held, and the other refusals are for messages.
        if not isinstance(answer := self._acquire(None), Lease | NullLease):
            raise LockHeld(f"{self.name}: {answer}", self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except (LockLost, NotHeld):
            if error is None:
                raise

    def _acquire(self, timeout: float | None) -> object:
        runtime = self._runtime
        if not runtime.enabled:
            return _NULL_LEASE
        context, settings = runtime.owner_context(), runtime.settings
        ttl = self._ttl or settings.ttl
        check_ttl(f"Lock({self.name}): ttl", settings.durability, ttl)
        request = AcquireRequest(context.requester, notify=timeout != 0)
        answer = runtime.lock_client.acquire_within(self._name, context, ttl, request, timeout)
        if isinstance(answer, Held):
            runtime.listeners.emit("refused", name=self.name, owner=context.owner, reason=held_by(answer.holder))
        return answer
