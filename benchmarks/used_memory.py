"""Memory that a million run marks take in the store, and a tenth as many claims.

python -m benchmarks.used_memory [names]
"""

import sys
import tempfile
import uuid
from pathlib import Path

import redis

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, Requester
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.support.servers import Server
from tests.support.stores import name_in, store_at

BATCH = 10_000
#: With the digest 39 characters, as the name of a task with a short key.
NAME = "sms:n:"
YEAR_MS = 366 * 24 * 3600 * 1000
HOUR_MS = 3600 * 1000


def name_of(number: int) -> LockName:
    digest = f"{number * 2654435761 % 2**32:08x}{number:024x}"
    return LockName(f"{NAME}{digest}", int(digest[:3], 16) >> 2)


def real_mark(store: RedisStore, client: redis.Redis) -> str:
    """Return the run mark of a success, as the scripts write it."""
    task_id = str(uuid.uuid4())
    by, identity = Requester.of("shop.sms", task_id, "worker1@host", 12345), Identity(task_id)
    keys = LockKeys.of("dlock", name_of(0))
    taken = store.acquire(name_in(keys), f"{uuid.uuid4().hex}.1", 30_000, AcquireRequest(by, identity, once=True))
    assert isinstance(taken, Acquired), taken
    acquisition = str(client.hget(keys.lock, "acq"))
    ending = ReleaseRequest(
        identity=identity.digest, used_ms=YEAR_MS, requester=by.text, once=True, seed=taken.seed, window_ms=YEAR_MS
    )
    store.release(name_in(keys), acquisition, ending)
    return str(client.get(keys.run()))


def claims_memory(server: Server, count: int) -> float:
    """Return the bytes of one claim, from names claimed as publishers of a task with ``unique`` do."""
    client, store = server.client(), store_at(server.url(), timeout=5)
    before = client.info("memory")["used_memory"]
    for number in range(1, count + 1):
        task_id = str(uuid.uuid4())
        by = Requester.of("shop.sms", task_id, "web1", 12345)
        request = ClaimRequest(task_id, 0, HOUR_MS, refuse_while_running=False, requester=by, attempt=uuid.uuid4().hex)
        if store.claim([(name_of(number), request)]) != [None]:
            raise AssertionError(f"claim {number} was refused")
    store.close()
    return float(client.info("memory")["used_memory"] - before) / count


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        client, store = server.client(), store_at(server.url(), timeout=5)
        assert isinstance(store, RedisStore)
        mark = real_mark(store, client)
        before = client.info("memory")["used_memory"]
        for start in range(1, count + 1, BATCH):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, min(start + BATCH, count + 1)):
                pipeline.set(LockKeys.of("dlock", name_of(number)).run(), mark, px=YEAR_MS)
            pipeline.execute()
        used = client.info("memory")["used_memory"] - before
        info = client.info("server")
        version = info.get("valkey_version") or info["redis_version"]
        print(f"{count} used names: {used / 1e6:.0f} MB, {used / count:.0f} bytes each (mark {len(mark)}), {version}")
        store.close()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        claims = max(1, count // 10)
        print(f"{claims} claims: {claims_memory(server, claims):.0f} bytes each")


if __name__ == "__main__":
    main()
