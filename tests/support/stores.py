"""A store at a URL, for tests and benchmarks."""

from celery_dlock.keys.lock_name import LockName
from celery_dlock.options.durability import PRIMARY, Durability
from celery_dlock.store.base import LockStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.redis.keys import LockKeys


def store_at(url: str, *, timeout: float, prefix: str = "dlock", durability: Durability = PRIMARY) -> LockStore:
    """Return a store at one place.

    Raises:
        InvalidLockOptions: The URL cannot be used.
    """
    return open_store((StoreLocation.of(url),), timeout=timeout, prefix=prefix, durability=durability)


def name_in(keys: LockKeys) -> LockName:
    """Return the lock name that these keys were made of."""
    return LockName(keys.name, int(keys.last.rpartition("{")[2].partition("}")[0], 16))
