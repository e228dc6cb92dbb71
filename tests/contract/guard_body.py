"""A process of tests/contract/test_guard.py: takes the lock, pauses, and writes its token in a transaction."""

import json
import os
import random
import sys
import time
from contextlib import suppress
from typing import Any

import psycopg

from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.lock_name import LockName, shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired
from tests.contract.helpers import request_of
from tests.contract.sql_helpers import a_store, connected_user, server_url

#: Acquisitions of each process, and their ttl in milliseconds.
RUNS, TTL_MS = 40, 200
NAMES = [shared_name(f"guarded-{number}") for number in range(6)]


def main(url: str, guarded: bool, seed: int) -> None:  # an argument of the command line
    chance = random.Random(seed)
    store = a_store(url)
    with connected_user(server_url(url)) as user:
        done = tries = 0
        while done < RUNS:
            tries, name = tries + 1, chance.choice(NAMES)
            acquisition = f"{os.getpid()}.{tries}"
            answer: Any = None
            with suppress(StoreUnavailable):  # a guarded transaction stays open for long
                answer = store.acquire(name, acquisition, TTL_MS, request_of())
            if not isinstance(answer, Acquired):
                time.sleep(0.01)
                continue
            written = user.execute("SELECT token FROM guard_writes WHERE name = %s", (name.text,)).fetchall()
            committed = write(store, user, name, acquisition, answer.token, chance, guarded=guarded)
            with suppress(StoreUnavailable):
                store.release(name, acquisition, ReleaseRequest())
            run = {"name": name.text, "token": answer.token, "seen": [token for (token,) in written]}
            sys.stdout.write(json.dumps(run | {"committed": committed}) + "\n")
            done += 1
    sys.stdout.flush()


def write(
    store: Any, user: Any, name: LockName, acquisition: str, token: int, chance: random.Random, *, guarded: bool
) -> bool:
    """Write the token in a transaction, with pauses. Return whether it was committed."""
    with user.transaction():
        if chance.random() < 0.5:
            user.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        time.sleep(chance.choice((0, 0.02, 0.1)))
        if guarded and not store.guard(name, acquisition, user):
            raise psycopg.Rollback
        time.sleep(chance.choice((0, 0.02, 0.1, 0.3)))
        user.execute("INSERT INTO guard_writes VALUES (%s, %s)", (name.text, token))
        time.sleep(chance.choice((0, 0.02, 0.1)))
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))
