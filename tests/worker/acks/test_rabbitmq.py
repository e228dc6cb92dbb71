"""The policies on RabbitMQ, which delivers again when a channel is gone."""

import os
import signal
from dataclasses import replace

import pytest
from celery.exceptions import TaskRevokedError

from tests.support.environments.policies import APP, PolicyEnvironment, timed
from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.proxy import Proxy
from tests.support.workers import Urls, loaded_app, running_worker

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def environment(rabbitmq_url, server, tmp_path_factory):
    server.flush()
    urls, folder = Urls(rabbitmq_url, server.url(1), server.lock_url(2)), tmp_path_factory.mktemp("rabbitmq")
    port = int(rabbitmq_url.rstrip("/").rpartition(":")[2])
    with loaded_app(APP, urls) as tasks, Proxy(port) as proxy:
        made = PolicyEnvironment(server, urls, tasks, folder)
        made.proxy = proxy  # only the worker's connections go through it
        through = replace(urls, broker=f"amqp://guest:guest@{HOST}:{proxy.port}//")
        with running_worker(APP, folder=folder, urls=through, concurrency=4) as worker:
            made.workers.append(worker)
            yield made


def messages_left(environment):
    with environment.app.connection_for_write() as connection:
        return connection.default_channel.queue_declare("celery", passive=True).message_count


def test_skip(environment, tasks):
    n = environment.fresh()
    with environment.hold(tasks.skips, n) as holding:
        skipped = tasks.skips.delay(n)
        seconds, error = timed(lambda: skipped.get(timeout=10))
        assert isinstance(error, TaskRevokedError)
        assert holding.id in str(error)
        assert seconds < 1


def test_retry_publishes_the_raw_message_again_and_all_run(environment, tasks):
    n = environment.fresh()
    with environment.hold(tasks.retries_without_own, n):
        later = [
            tasks.retries_without_own.apply_async((n,), serializer=serializer, compression=compression, expires=60)
            for serializer, compression in (("json", None), ("pickle", "zlib"), ("yaml", "bzip2"))
        ]
        for result in later:
            environment.wait_for_line(result.id, "is republished")
    assert [result.get(timeout=20) for result in later] == [n] * 3
    assert {fact["retries"] for fact in environment.history(n=n)} == {0}
    assert environment.overlaps(n) == 1


@pytest.mark.invariant("killed-worker-runs-again")
def test_a_message_whose_child_was_killed_is_redelivered_and_runs(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.comes_back_late, n)
    (body,) = environment.history(what="in", id=holding.id)
    os.kill(body["pid"], signal.SIGKILL)
    second = environment.entered(20, id=holding.id, count=2)[1]
    assert second["token"] > body["token"]
    environment.open(holding.gate)
    assert holding.result.get(timeout=15) == n
    assert len(environment.history(what="out", id=holding.id)) == 1


@pytest.mark.invariant("lost-connection-runs-nothing-twice")
def test_a_message_delivered_again_after_a_lost_channel_runs_once(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.skips_late, n)
    environment.proxy.set_mode("refuse")
    environment.proxy.set_mode("pass")
    environment.wait_for_line(holding.id, "is republished", 30)
    assert environment.state(holding.id) == "PENDING"
    assert holding.end() == n
    environment.wait_for_line(holding.id, "is a duplicate", 15)
    eventually(lambda: messages_left(environment) == 0, 15)
    assert environment.state(holding.id) == "SUCCESS"
    assert [fact["what"] for fact in environment.history(id=holding.id)] == ["in", "out"]
