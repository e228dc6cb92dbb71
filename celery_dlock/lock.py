"""The lock itself, for any name and outside any task."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final

from celery.app import app_or_default

from .errors import LockHeld, LockLost, NotHeld
from .keys.key_spec import LockName, shared_name
from .locking.lease import Lease, NullLease
from .options.durability import durability_of
from .options.validation import Seconds, invalid_value, seconds_within, ttl_seconds
from .runtime import Runtime
from .store.model import AcquireRequest, Held, Holder, held_by

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Self

__all__ = ["Lock"]

_NULL_LEASE: Final = NullLease()


class Lock:
    """A distributed, reentrant lock.

    It excludes every other holder of the same name: other ``Lock`` objects, and tasks with ``scope="shared"`` whose key
    gives this text. Each thread and each execution of a task is an owner. An owner that holds the lock re-enters it.
    While the lock is held, the watchdog of this process renews the lease.

    The tasks of one asyncio loop are one thread and so one owner: they do not exclude each other.

    With the setting ``dlock_enabled=False`` it takes no lock and needs no store: each entry succeeds at once.

    As a context manager it waits for the lock, and raises :class:`LockLost` on leaving if the lease ended before.

    Args:
        name: What to lock: a non-empty text, shown in the store, so keep secrets out of it; or a call's ``LockName``.
        app: The app whose store to use; default: the current app.
        ttl: Seconds (or a ``timedelta``), at least 1, that the lock outlives its last renewal; default ``dlock_ttl``.
        durability: As a task's; default ``dlock_durability``.
    """

    def __init__(
        self, name: str | LockName, *, app: Celery | None = None, ttl: object = None, durability: object = None
    ) -> None:
        given: object = name  # the annotation does not stop a caller from passing another type
        if isinstance(given, LockName):
            self._name = given
        elif isinstance(given, str) and given:
            self._name = shared_name(given)
        else:
            raise invalid_value("Lock: name", name, "a non-empty str")
        self._runtime = Runtime.of(app if app is not None else app_or_default())
        self._ttl = None if ttl is None else ttl_seconds(f"Lock({name}): ttl", ttl)
        self._durability = None if durability is None else durability_of(f"Lock({name}): durability", durability)

    def __repr__(self) -> str:
        return f"<Lock {self.name}>"

    @property
    def name(self) -> str:
        """The lock name, as the store knows it."""
        return self._name.text

    @property
    def lease(self) -> Lease | NullLease | None:
        """The lease of this owner while it holds the lock; a null lease with ``dlock_enabled=False``."""
        if not self._runtime.enabled:
            return _NULL_LEASE
        return self._runtime.lock_client.held(self._name, self._runtime.owner_context())

    def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> bool:  # noqa: FBT001, FBT002  # as threading.Lock has it
        """Acquire the lock. Return true if this owner holds it now.

        Args:
            blocking: Wait for a release.
            timeout: Seconds (or a ``timedelta``) to wait at most; None: for ever.

        Raises:
            InvalidLockOptions: An argument is invalid.
            LockLost: This owner held the lock, and its lease is over. An inner entry never acquires anew.
            StoreUnavailable: The store did not answer.
        """
        given: object = blocking  # perhaps a timeout, which is the first argument of some other locks
        if not isinstance(given, bool):
            expected = "True or False; give a time to wait as timeout="
            raise invalid_value(f"Lock({self.name}).acquire: blocking", blocking, expected)
        if timeout is not None:
            timeout = seconds_within(f"Lock({self.name}).acquire: timeout", timeout, 0.0)
            if not blocking:
                raise invalid_value(f"Lock({self.name}).acquire: timeout", timeout, "None with blocking=False")
        return isinstance(self._acquire(timeout if blocking else 0.0), Lease | NullLease)

    def release(self) -> None:
        """Leave the lock once. The outermost exit releases it.

        Raises:
            NotHeld: This owner does not hold it.
            LockLost: The lease had ended before. Another owner may have held the lock meanwhile.
        """
        lease, scope = self.lease, self._runtime.owner_context()
        if isinstance(lease, NullLease):
            return
        if lease is None:
            raise NotHeld(f"{self.name} is not held by this owner")
        if lease is scope.own and scope.entered.count(lease) == 1:
            raise NotHeld(f"{self.name} is held by the running task itself, which releases it at its end")
        lost = lease.lost
        ours = self._runtime.lock_client.release(lease, scope)
        if lost or not ours:
            raise LockLost(f"the lease of {self.name} was over before its release")

    def locked(self) -> bool:
        """Return whether an owner holds the lock now."""
        return self.holder() is not None

    def holder(self) -> Holder | None:
        """Return the current holder, or None."""
        return self._runtime.lock_client.holder(self._name) if self._runtime.enabled else None

    def __enter__(self) -> Self:
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
        scope, ttl = runtime.owner_context(), self._ttl or runtime.settings.ttl
        claim = AcquireRequest(scope.requester, durability=runtime.settings.confirmed_by(self._durability))
        answer = runtime.lock_client.acquire_within(self._name, scope, ttl, claim, timeout)
        if isinstance(answer, Held):
            runtime.listeners.emit("refused", name=self.name, owner=scope.owner, reason=held_by(answer.holder))
        return answer
