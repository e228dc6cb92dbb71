"""The queueing environment with RabbitMQ as its broker. Locks are in a Redis of their own, with an append-only file."""

import json
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

from tests.support.environments.queueing import APP, QueueEnvironment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker


class RabbitMQEnvironment(QueueEnvironment):
    """The environment of a RabbitMQ broker. Tests ask the broker by AMQP."""

    def start(self):
        """A further ready worker; it is killed at the end."""
        worker = self.stack.enter_context(
            running_worker(self.module, folder=self.folder, urls=self.urls, concurrency=4, environ=self.environ)
        )
        self.workers.insert(0, worker)
        self.listens()
        return worker

    # A connection of the app's pool may be one that the broker's restart has cut.

    def listens(self):
        with self.app.connection_for_write() as connection:
            eventually(lambda: self.app.control.ping(timeout=1, limit=1, connection=connection), 15)

    def consume(self, queue):
        with self.app.connection_for_write() as connection:
            self.app.control.add_consumer(queue, reply=True, timeout=5, limit=1, connection=connection)

    def ignore(self, queue):
        with self.app.connection_for_write() as connection:
            self.app.control.cancel_consumer(queue, reply=True, timeout=5, limit=1, connection=connection)

    def queued(self, queue="celery"):
        """Messages that wait in the queue; those that a worker has are not among them."""
        with self.app.connection_for_write() as connection:
            return connection.default_channel.queue_declare(queue, passive=True).message_count

    def wait_until_drained(self, within=15.0):
        """Wait until the queue is empty, also of what the worker had: it is stopped for that, and another started."""
        eventually(lambda: not self.queued(), within, message="messages are left")
        self.worker.stop()
        assert self.queued() == 0
        self.start()

    def take(self, queue, *, back=False):
        """The next message of a queue as it lies there, off it or put back into its place."""
        with self.app.connection_for_write() as connection:
            channel = connection.default_channel
            message = eventually(lambda: channel.basic_get(queue), message=f"nothing lies in {queue}")
            if back:
                channel.basic_reject(message.delivery_tag, requeue=True)
            else:
                channel.basic_ack(message.delivery_tag)
            return SimpleNamespace(body=message.body, properties=message.properties)


@contextmanager
def running_environment(folder, broker, conf=None, app=APP):
    """An environment with one ready worker.

    Args:
        broker: a `RabbitMQ`.
        app: the module of another app that notes as this one does.
        conf: more app settings, for the worker and for this process.
    """
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        lock = stack.enter_context(Server(folder / "locks", persistent=True))
        urls = Urls(broker.url, server.url(1), lock.lock_url(2))
        tasks = stack.enter_context(loaded_app(app, urls))
        tasks.app.conf.update(conf or {})
        environment = RabbitMQEnvironment(server, urls, tasks, folder)
        environment.holdings, environment.stack, environment.module = [], stack, app
        environment.environ = {"DLOCK_TEST_CONF": json.dumps(conf or {})}
        environment.lock_server, environment.locks = lock, lock.client(2)
        environment.start()
        yield environment
