"""The gauges of the store, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import InvalidLockOptions
from ..metrics import StoreCollector
from ..metrics.worker import import_prometheus
from .state import DashboardState, Visit

__all__ = ["metrics"]


def metrics(dashboard: DashboardState) -> Callable[[Visit], Response]:
    """Return the page of the metrics. Without ``prometheus_client`` it is not found."""

    @cache
    def registry() -> Any:
        made = import_prometheus().CollectorRegistry(auto_describe=False)
        made.register(StoreCollector(dashboard.app))
        return made

    def page(visit: Visit) -> Response:
        try:
            found = registry()
        except InvalidLockOptions as error:
            raise HTTPException(404, str(error)) from error
        encode, content_type = import_prometheus().exposition.choose_encoder(visit.request.headers.get("accept", ""))
        return Response(encode(found), media_type=content_type)

    return page
