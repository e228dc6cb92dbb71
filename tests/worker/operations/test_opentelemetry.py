"""Locks on the current OpenTelemetry span (``dlock_opentelemetry``)."""

import json
import sys
import threading

import pytest
from celery import Celery

from benchmarks.steps import Child
from celery_dlock import Lock, LockLost, singleton_task
from tests.support.polling import eventually

pytest.importorskip("opentelemetry.sdk", reason="installed in the main lane only")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

APP = "tests.support.apps.traced"


class Traced:
    """An app whose eager calls run in a span each."""

    def __init__(self, url, **conf):
        self.app = Celery("spans", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(dlock_url=url, dlock_opentelemetry=True, **conf)
        self._kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self._tracer = provider.get_tracer("test")

    def span_of(self, work):
        """Return our attributes and the events of the span in which this work ran."""
        self._kept.clear()
        with self._tracer.start_as_current_span("work"):
            work()
        (span,) = self._kept.get_finished_spans()
        ours = {key: value for key, value in span.attributes.items() if key.startswith("celery.dlock.")}
        return ours, [(event.name, dict(event.attributes)) for event in span.events]


@pytest.fixture
def traced(redis_url):
    return Traced(redis_url)


def test_span_shows_the_outcome_and_the_token_of_a_taken_lock(traced):
    tokens = []

    @singleton_task(app=traced.app, name="plain", bind=True)
    def plain(self, secret):  # noqa: ARG001  # no span may show it
        tokens.append(self.lease.token)
        with Lock("inner", app=traced.app) as inner:
            tokens.append(inner.lease.token)

    attributes, events = traced.span_of(lambda: plain.apply(("s3cret",)))
    expected = {"celery.dlock.outcome": "acquired", "celery.dlock.token": tokens[0], "celery.dlock.wait_ms": 0}
    assert (attributes, events) == (expected, [])
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("options", "outcome"), [({"on_conflict": "skip"}, "skipped"), ({"on_conflict": "raise"}, "raised")]
)
def test_span_shows_what_became_of_a_refused_call(traced, options, outcome):
    @singleton_task(app=traced.app, name="refused", key="one", scope="shared", **options)
    def refused(): ...

    taken, over = threading.Event(), threading.Event()

    def take():
        with refused.lock_for():
            taken.set()
            over.wait(20)

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(10)
    attributes, events = traced.span_of(refused.apply)
    over.set()
    thread.join()
    assert attributes == {"celery.dlock.outcome": outcome}
    (event,) = events
    assert event[0] == "refused"
    assert event[1]["celery.dlock.name"] == refused.lock_name()
    assert "held by" in event[1]["celery.dlock.reason"]


def test_span_shows_a_lost_lease_once(traced, clean_server):
    @singleton_task(app=traced.app, name="losing", bind=True)
    def losing(self):
        clean_server.flush()
        with pytest.raises(LockLost):
            self.lease.ensure()

    attributes, events = traced.span_of(losing.apply)
    assert attributes["celery.dlock.outcome"] == "acquired"
    assert [name for name, _ in events] == ["lost"]


def test_span_shows_a_body_without_its_lock():
    traced = Traced("redis://127.0.0.1:1/0", dlock_timeout=0.1)

    @singleton_task(app=traced.app, name="bypassing", on_store_error="run")
    def bypassing(): ...

    assert traced.span_of(bypassing.apply) == ({"celery.dlock.outcome": "bypassed"}, [])


def test_without_a_span_nothing_is_written_and_the_call_runs(traced):
    @singleton_task(app=traced.app, name="untraced", on_conflict="raise")
    def untraced():
        return 1

    assert untraced.apply().get() == 1


def test_without_the_package_a_warning_says_what_to_install(redis_url, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    traced = Traced(redis_url)

    @singleton_task(app=traced.app, name="bare")
    def bare():
        return 1

    assert bare.apply().get() == 1
    assert "celery-dlock[opentelemetry]" in caplog.text


def test_setting_that_is_off_costs_no_step(own_server):
    steps = Child(own_server()).steps("singleton")
    assert steps.total() > 0
    assert [place for place in steps if place.startswith("tracing.py")] == []


@pytest.fixture
def spans(client):
    """A function that returns the spans of a task's runs, in the order of their ends."""

    def of(name):
        found = [json.loads(text) for text in client.lrange("spans", 0, -1)]
        return [span for span in found if span["name"] == f"run/{name}"]

    return of


def test_span_in_a_pool_child_shows_a_loss_that_the_main_process_found(start_worker, load_app, client, spans):
    """The span shows it at the end of the work: the main process has no span."""
    pytest.importorskip("opentelemetry.instrumentation.celery")
    module = load_app(APP)
    worker = start_worker(APP)
    holding = module.skip.delay("a", secret="s3cret")
    eventually(lambda: client.llen("history") == 1, within=20)
    skipped = module.skip.delay("a")
    (span,) = eventually(lambda: spans("traced.skip"), within=20)
    assert span["attributes"]["messaging.message.id"] == skipped.id
    assert span["attributes"]["celery.dlock.outcome"] == "skipped"
    assert list(span["events"]) == ["refused"]
    client.delete(*client.keys("dlock:*lock*"))
    worker.wait_for_log("the lease of traced.skip:a:.* is lost")
    client.rpush("gate:a", "open")
    holding.get(timeout=20)
    lost = eventually(lambda: spans("traced.skip")[1:], within=20)[0]
    assert lost["attributes"]["celery.dlock.outcome"] == "acquired"
    assert lost["attributes"]["celery.dlock.token"] > 0
    assert list(lost["events"]) == ["lost"]
    assert "s3cret" not in str(spans("traced.skip"))


def test_spans_of_a_queued_call_show_its_wait(start_worker, load_app, client, spans):
    """It has two: one of the delivery that was parked, and one of the message that was published for its grant."""
    pytest.importorskip("opentelemetry.instrumentation.celery")
    module = load_app(APP)
    start_worker(APP)
    first, second = module.queue.delay("q", "gate-q"), module.queue.delay("q")
    eventually(lambda: module.queue.waiting("q").count == 1, within=20)
    client.rpush("gate:gate-q", "open")
    first.get(timeout=20)
    second.get(timeout=20)

    def ours():
        found = [span for span in spans("traced.queue") if span["attributes"]["messaging.message.id"] == second.id]
        # The delivery that was parked may end after the other one.
        return sorted(found, key=lambda span: span["attributes"]["celery.dlock.outcome"] != "queued")

    parked, waited = eventually(lambda: len(found := ours()) == 2 and found, within=20)
    assert parked["attributes"]["celery.dlock.outcome"] == "queued"
    assert "celery.dlock.token" not in parked["attributes"]
    assert waited["attributes"]["celery.dlock.outcome"] == "acquired"
    assert 0 < waited["attributes"]["celery.dlock.wait_ms"] < 60_000
