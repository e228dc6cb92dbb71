"""From a place to the store there. A driver is imported only when its place is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidLockOptions
from ..places import Place, why

if TYPE_CHECKING:
    from ..probation import Probation
    from ..store import QueueStore
    from ..topology import Topology

__all__ = ["from_url", "open_store"]


def open_store(places: Sequence[Place], *, timeout: float, probation: Probation | None = None) -> QueueStore:
    """The store that is kept at some places.

    Args:
        places: One; or several independent servers, of which a majority makes one store (Redlock).
        timeout: Seconds after which a command counts as unanswered.
        probation: For how long a server that may have lost leases grants nothing new; None: it grants at once.

    Raises:
        InvalidLockOptions: No connection can be made of what was said of a place.
    """
    from .redis import RedisStore  # noqa: PLC0415  # importing celery_dlock loads no driver

    if len(places) > 1:
        from .redlock import RedlockStore  # noqa: PLC0415  # as above

        members = [RedisStore(_topology(place, timeout), probation) for place in places]
        return RedlockStore(members, [place.shown for place in places], timeout=timeout)
    return RedisStore(_topology(places[0], timeout), probation)


def from_url(url: str, *, timeout: float) -> QueueStore:
    """The store at one place.

    Raises:
        InvalidLockOptions: The URL cannot be used; the message shows no password.
    """
    return open_store((Place.of(url),), timeout=timeout)


def _topology(place: Place, timeout: float) -> Topology:
    from ..door import ServerDoor  # noqa: PLC0415  # as above
    from ..wires import Wires  # noqa: PLC0415  # as above

    try:
        if place.kind == "cluster":
            from ..cluster import Cluster  # noqa: PLC0415  # as above

            ServerDoor(place.options_at(place.addresses[0]))  # what it cannot make is told now
            return Cluster(
                place.addresses,
                lambda address: ServerDoor(place.options_at(address)),
                timeout=timeout,
                heard=place.heard,
            )
        if place.kind == "sentinel":
            from ..sentinel import SentinelDoor  # noqa: PLC0415  # as above

            return Wires(SentinelDoor(place, timeout=timeout), timeout=timeout)
        return Wires(ServerDoor(place.options_at(place.addresses[0] if place.addresses else None)), timeout=timeout)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidLockOptions):
            raise
        raise InvalidLockOptions(f"{place.setting}: cannot keep locks at {place.shown!r}; {why(error)}") from None
