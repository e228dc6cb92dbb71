"""Tasks whose spans, made by opentelemetry-instrumentation-celery, are kept in Redis."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import redis
from celery.signals import worker_process_init
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from celery_dlock import singleton_task
from tests.support.apps.base import History, make_app

app = make_app("traced", dlock_opentelemetry=True, worker_log_color=False)
history = History.of_environ()


class ToRedis(SpanExporter):
    """Keeps finished spans in a list."""

    def __init__(self) -> None:
        self._client = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"])

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            events: Any = {event.name: dict(event.attributes or {}) for event in span.events}
            facts = {"name": span.name, "attributes": dict(span.attributes or {}), "events": events}
            self._client.rpush("spans", json.dumps(facts))
        return SpanExportResult.SUCCESS


@worker_process_init.connect(weak=False)
def trace_tasks(**_: Any) -> None:
    """Do as the documentation of the instrumentation says: set up tracing in each pool child."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToRedis()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


@singleton_task(app=app, name="traced.skip", key="{n}", ttl=3)
def skip(n: str, secret: str = "") -> None:  # noqa: ARG001  # an argument that no span may show
    """Hold the lock until the gate opens."""
    history.note("in", n=n)
    history.pass_gate(n)


@singleton_task(app=app, name="traced.queue", key="{n}", on_conflict="queue")
def queue(n: str, gate: str = "") -> None:
    """Wait behind the calls of the same name."""
    history.note("in", n=n)
    history.pass_gate(gate)
