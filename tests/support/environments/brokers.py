"""A worker of `tests.support.apps.policies` behind a proxy, and its broker: a Redis that persists, or RabbitMQ."""

import json
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from tests.support.environments.policies import APP, PolicyEnvironment, _stop_listening
from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker


@contextmanager
def redis_broker(folder):
    with Server(folder / "broker", persistent=True) as server:
        yield server, "redis://{}:{}/0"


@contextmanager
def rabbitmq_broker(_folder):
    with RabbitMQ() as broker:
        yield broker, "amqp://guest:guest@{}:{}//"


@contextmanager
def impatient_rabbitmq(_folder):
    """It takes a message back that is not acknowledged within 3 s, and looks each second; by default 30 and 1 min."""
    with RabbitMQ({"consumer_timeout": "3000", "channel_tick_interval": "1000"}) as broker:
        yield broker, "amqp://guest:guest@{}:{}//"


BROKERS = {"redis": redis_broker, "rabbitmq": rabbitmq_broker, "impatient rabbitmq": impatient_rabbitmq}


class BrokerEnvironment(PolicyEnvironment):
    """An environment that can cut the worker off its broker, and kill the broker."""

    def start(self):
        """A ready worker of two slots, which reads ahead."""
        self.workers.append(
            self.stack.enter_context(
                running_worker(APP, folder=self.folder, urls=self.through, concurrency=2, environ=self.environ)
            )
        )

    def cut(self):
        """Every connection of the workers to the broker breaks; they may connect again at once."""
        if not isinstance(self.broker_process, Server):
            self.proxy.set_mode("refuse")
            self.proxy.set_mode("pass")
            return
        # If a command is refused for a moment, the way in which kombu returns messages ends the worker.
        with self.broker_process.client() as client:
            for kind in ("normal", "pubsub"):
                client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def restart(self):
        """Kill the broker, and restart it with what is on its disk."""
        self.broker_process.kill()
        self.broker_process.start()

    def queued(self):
        """Messages that wait; over Redis also those that a worker has and has not acknowledged."""
        if isinstance(self.broker_process, Server):
            with self.broker_process.client() as self.broker:
                return super().queued()
        with self.app.connection_for_write() as connection:
            return connection.default_channel.queue_declare("celery", passive=True).message_count

    def word_is_left(self, holding):
        """Wait until its watchdog has noticed that the broker may deliver the holder's message once more."""
        (lock,) = self.lock_keys(self.tasks.skips_late, holding.n)
        eventually(lambda: self.locks.hget(lock, "dup"), 20, message="the watchdog left no word")

    def ran_once(self, *results):
        """Each of them ran, its end is stored, and it was not run again."""
        for result in results:
            assert self.state(result.id) == "SUCCESS"
            history = self.history(id=result.id)
            assert [fact["what"] for fact in history] == ["in", "out"], (history, self.lines(result.id))

    def wait_until_drained(self, within=30.0):
        """Wait until no message is left. A worker that stops returns the messages that it has not acknowledged."""
        super().wait_until_drained(within)
        for worker in self.workers:
            if worker.running:
                worker.stop()
        assert self.queued() == 0
        self.workers.clear()


@contextmanager
def running_environment(folder, kind, conf):
    """An environment without a worker as yet; `conf` is of the workers and of this process."""
    with ExitStack() as stack:
        broker, url = stack.enter_context(BROKERS[kind](folder))
        server = stack.enter_context(Server(folder / "server"))
        proxy = stack.enter_context(Proxy(broker.port))
        urls = Urls(url.format(HOST, broker.port), server.url(1), server.lock_url(2))
        tasks = stack.enter_context(loaded_app(APP, urls))
        tasks.app.conf.update(conf)
        stack.callback(_stop_listening, tasks.app)
        environment = BrokerEnvironment(server, urls, tasks, folder)
        environment.stack, environment.proxy, environment.broker_process = stack, proxy, broker
        environment.through = replace(urls, broker=url.format(HOST, proxy.port))
        environment.environ = {"DLOCK_TEST_CONF": json.dumps(conf)}
        yield environment
