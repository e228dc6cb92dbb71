"""The fate of the messages of `tests.support.apps.lost_acks`."""

import redis

from celery_dlock.store.model import Identity
from celery_dlock.store.redis.keys import LockKeys
from tests.support.chosen_store import tables_at

APP = "tests.support.apps.lost_acks"


def deliver_again(tasks, broker):
    """Deliver a message again, as kombu does after the visibility timeout."""
    with tasks.app.connection_for_read() as connection:
        for tag in broker.hkeys("unacked"):
            connection.default_channel.qos.restore_by_tag(tag.decode())


def all_heard(broker):
    return not broker.llen("celery") and not broker.hlen("unacked")


def is_marked(tasks, urls, result, n, nesting=0, name="late"):
    lock, identity = getattr(tasks, name).lock_spec.name_of((n,), {}), Identity(result.id, 0, nesting).digest
    if tables := tables_at(urls.lock):
        return tables.is_done(tables.row(lock), identity)
    done = LockKeys.of("dlock", lock).done(identity)
    with redis.Redis.from_url(urls.lock) as locks:
        return locks.exists(done) == 1


def has_word(tasks, urls, n):
    """Has the watchdog left word in the lock that a copy may be about?"""
    lock = tasks.late.lock_spec.name_of((n,), {})
    if tables := tables_at(urls.lock):
        return tables.duplicate_seen(tables.row(lock))
    with redis.Redis.from_url(urls.lock) as locks:
        return locks.hget(LockKeys.of("dlock", lock).lock, "dup") == b"1"


def ran_once(tasks, result, n, end=""):
    assert tasks.notes.lrange("ran", 0, -1).count(n) == 1
    assert result.state == ("FAILURE" if end else "SUCCESS")


def ran(tasks, n):
    """Return the number of runs."""
    return tasks.notes.lrange("ran", 0, -1).count(n)


def stored(result):
    """Its state, as the backend has it now."""
    return result.backend.get_task_meta(result.id, cache=False)["status"]
