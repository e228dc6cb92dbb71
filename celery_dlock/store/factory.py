"""Open the store at a location. A store's modules are imported only when a location needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidLockOptions
from .location import StoreLocation, safe_error_text

if TYPE_CHECKING:
    from .base import QueueStore
    from .model import Quarantine
    from .redis.topology import Topology

__all__ = ["open_store"]


def open_store(
    places: Sequence[StoreLocation], *, timeout: float, prefix: str, probation: Quarantine | None = None
) -> QueueStore:
    """Return the store at these locations. Opens no connection.

    Args:
        places: The location of the store, or the locations of several independent servers (Redlock).
        timeout: Seconds after which a command counts as unanswered.
        prefix: The start of every key of this app.
        probation: The quarantine of a server that may have lost leases; None: no quarantine.

    Raises:
        InvalidLockOptions: No connection can be configured from the options of a location.
    """
    from .redis.store import RedisStore  # noqa: PLC0415  # importing celery_dlock must not load redis-py

    if len(places) > 1:
        from .redlock.store import RedlockStore  # noqa: PLC0415  # not at import time

        names: dict[str, str] = {}
        members = [RedisStore(_topology(place, timeout, names), prefix, probation) for place in places]
        return RedlockStore(members, [place.shown for place in places], timeout=timeout)
    return RedisStore(_topology(places[0], timeout), prefix, probation)


def _topology(place: StoreLocation, timeout: float, names: dict[str, str] | None = None) -> Topology:
    from .redis.endpoint import ServerEndpoint  # noqa: PLC0415  # not at import time
    from .redis.pool import ConnectionPool  # noqa: PLC0415  # not at import time

    try:
        if place.kind == "cluster":
            from .redis.cluster.topology import Cluster  # noqa: PLC0415  # not at import time

            ServerEndpoint(place.options_at(place.addresses[0]))  # raises now if the options are invalid
            return Cluster(
                place.addresses,
                lambda address: ServerEndpoint(place.options_at(address)),
                timeout=timeout,
                shared=place.shared,
            )
        if place.kind == "sentinel":
            from .redis.sentinel import SentinelEndpoint  # noqa: PLC0415  # not at import time

            return ConnectionPool(SentinelEndpoint(place, timeout=timeout), timeout=timeout)
        door = ServerEndpoint(place.options_at(place.addresses[0] if place.addresses else None))
        if names is None:
            return ConnectionPool(door, timeout=timeout)

        from .redlock.endpoint import MemberEndpoint  # noqa: PLC0415  # not at import time

        return ConnectionPool(MemberEndpoint(door, place.shown, names), timeout=timeout)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidLockOptions):
            raise
        raise InvalidLockOptions(
            f"{place.setting}: cannot keep locks at {place.shown!r}; {safe_error_text(error)}"
        ) from None
