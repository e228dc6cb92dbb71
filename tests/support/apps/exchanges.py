"""Singleton tasks whose messages come through exchanges of their own."""
# ruff: noqa: ARG001 - arguments of tasks are there for their locks, not for their bodies

from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from celery_dlock import singleton_task
from tests.support.apps.base import History, make_app

topic = Exchange("jobs", type="topic")
pairs = Exchange("pairs", type="topic")
direct = Exchange("orders", type="direct")

app = make_app(
    "exchanges",
    worker_log_color=False,
    task_queues=[
        Queue("celery"),
        Queue("q.topic", topic, routing_key="job.#"),
        Queue("q.direct", direct, routing_key="order.new"),
        Queue("q.left", pairs, routing_key="pair.*"),
        Queue("q.right", pairs, routing_key="pair.#"),
        Queue("q.bound", bindings=[binding(direct, routing_key="order.old"), binding(topic, routing_key="old.#")]),
        Broadcast("everybody"),
    ],
)
TOPIC = {"queue": "q.topic", "routing_key": "job.a.b"}
DIRECT = {"queue": "q.direct", "routing_key": "order.new"}
BOUND = {"queue": "q.bound", "exchange": "jobs", "routing_key": "old.a"}
PAIR = {"queue": "q.left", "routing_key": "pair.a"}
# Celery declares no Broadcast where it publishes, and takes its own routing key for one that has none.
FANOUT = {"queue": "everybody", "routing_key": "celery", "declare": [Exchange("everybody", type="fanout")]}

history = History.of_environ()


def work(self, n, gate="", end=""):
    """The body: `n` is its lock, `gate` what it waits for."""
    facts = {"id": self.request.id, "n": n}
    with history.recorded_body(facts):
        history.pass_gate(gate)
        return n


def define(name, **options):
    return singleton_task(app=app, name=f"exchanges.{name}", bind=True, key=["n"], **options)(work)


retries = define("retries", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.2)
retries_late = define("retries_late", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.2, acks_late=True)
skips_late = define("skips_late", acks_late=True)
gives_up = define("gives_up", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.2, retry_limit=4)
