"""Leases over a failover by sentinels: the data survive, or they do not and the holder learns of it."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock import Lock, LockLost, signals
from celery_dlock.errors import StoreNotReady, StoreRefused, StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.sentinel import SentinelEndpoint
from tests.support.polling import eventually
from tests.support.processes import free_port
from tests.support.sentinels import SentinelProcess
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.stores import store_at
from tests.support.topologies import MASTER_NAME, How, SentinelSet

#: Longer than a failover takes whose first election had no winner.
TTL = 20.0
#: The store's timeout here, and so a tenth of it for a sentinel.
TIMEOUT = 1.0
NAME = LockName("looked-at", 7)
KEYS = LockKeys.of("dlock", NAME)


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSet]:
    with SentinelSet(tmp_path_factory.mktemp("failover"), down_after_ms=1500, password="of-the-nodes") as made:
        yield made


@pytest.fixture
def whole(sentinels: SentinelSet) -> SentinelSet:
    sentinels.bring_back()
    return sentinels


def url_of(sentinels: SentinelSet) -> str:
    return f"{sentinels.lock_url()}?master_name={MASTER_NAME}"


def lock_at(url: str, name: str = "any", **conf: Any) -> Lock:
    """Of an app of its own, as in a process of its own."""
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=url, dlock_timeout=TIMEOUT, **conf)
    return Lock(name, app=app, ttl=TTL)


def copied(sentinels: SentinelSet) -> None:
    """Wait until a replica has all that was written so far."""

    def confirmed() -> bool:
        # A sentinel that makes a replica of a server ends the connections to it, late ones too.
        with contextlib.suppress(redis.RedisError), sentinels.client() as client:
            client.set("written", "1")
            return int(client.wait(1, 500)) >= 1
        return False

    eventually(confirmed, within=20, message="no replica follows")


def is_replica(node: Server) -> bool:
    with node.client() as client:
        return bool(client.info("replication")["role"] == "slave")


def held_at(node: Server, name: str) -> tuple[int, str] | None:
    holder = lock_at(node.lock_url(), name).holder()
    return (holder.token, holder.owner) if holder else None


def term_at(sentinels: SentinelSet) -> int:
    return SentinelEndpoint(StoreLocation.of(url_of(sentinels)), timeout=TIMEOUT).failover_epoch()


@pytest.mark.invariant("sentinel-failover-keeps-leases")
@pytest.mark.parametrize("how", ["manual", "kill"])
def test_a_lease_survives_a_failover_where_the_data_does(sentinels: SentinelSet, how: How) -> None:
    lock = lock_at(url_of(sentinels), how)
    assert lock.acquire(blocking=False)
    assert lock.lease is not None
    mine = lock.lease.token, lock.lease.owner
    copied(sentinels)
    assert held_at(sentinels.primary(), how) == mine
    term = term_at(sentinels)
    old = sentinels.fail_over(how)
    new = sentinels.primary()
    assert new is not old
    assert held_at(new, how) == mine
    # By it a quarantine knows a primary again that was away, and never made a replica.
    eventually(lambda: term_at(sentinels) > term, within=20)
    if how == "kill":
        left = lock.lease.remaining()
        eventually(lambda: lock.lease is not None and lock.lease.remaining() > left, within=TTL, message="not renewed")
    lock.lease.extend(2 * TTL)
    assert lock.lease.remaining() > TTL
    assert (lock.lease.held, held_at(new, how)) == (True, mine)
    lock.release()
    assert held_at(new, how) is None


@pytest.mark.invariant("sentinel-primary-is-verified", "old-primary-takes-no-lock")
def test_nothing_is_locked_at_an_old_primary_that_wakes_and_still_takes_writes(sentinels: SentinelSet) -> None:
    lock, idle = lock_at(url_of(sentinels), "x"), lock_at(url_of(sentinels), "y")
    assert idle.acquire(blocking=False)
    idle.release()  # its connection is open, and rests
    assert lock.acquire(blocking=False)
    assert lock.lease is not None
    mine = lock.lease.token, lock.lease.owner
    copied(sentinels)
    old = sentinels.fail_over("stop")
    new = sentinels.primary()
    old.resume()
    assert idle.acquire(blocking=False)
    assert held_at(new, "y")
    # Unless a sentinel was so quick that it is a replica by now, and has what the new one has.
    with old.client() as there, contextlib.suppress(redis.ConnectionError):
        keys = there.keys("dlock:*:lock:*")
        if there.info("replication")["role"] == "master":
            assert not any(key.endswith(idle.name) for key in keys)
    assert (lock.lease.held, held_at(new, "x")) == (True, mine)
    idle.release()
    lock.release()


# The sentinels themselves


def test_a_name_that_no_sentinel_watches_is_refused_with_those_that_they_do(sentinels: SentinelSet) -> None:
    with pytest.raises(StoreRefused) as raised:
        lock_at(f"{sentinels.lock_url()}?master_name=other").locked()
    first = sentinels.sentinels[0].port
    assert str(raised.value) == (
        f"the sentinel at 127.0.0.1:{first}: it watches 'mymaster' and no 'other': correct master_name"
    )


def test_sentinels_are_asked_as_the_user_of_sentinel_kwargs(sentinels: SentinelSet) -> None:
    first = sentinels.sentinels[0]
    with first.client() as there:
        rights = "+sentinel|get-master-addr-by-name", "+sentinel|masters"
        there.execute_command("ACL", "SETUSER", "asks", "on", ">of-the-sentinels", *rights)
    url = f"sentinel://{LOCK_USER}:{LOCK_PASSWORD}@127.0.0.1:{first.port}"

    def options(password: str) -> dict[str, Any]:
        return {"master_name": MASTER_NAME, "sentinel_kwargs": {"username": "asks", "password": password}}

    assert not lock_at(url, dlock_transport_options=options("of-the-sentinels")).locked()
    quarantined = lock_at(url, dlock_transport_options=options("of-the-sentinels"), dlock_quarantine=5)
    with pytest.raises(StoreRefused, match="SENTINEL master, which dlock_quarantine needs"):
        quarantined.acquire(blocking=False)
    with pytest.raises(StoreRefused) as raised:
        lock_at(url, dlock_transport_options=options("s3cret")).locked()
    assert str(raised.value).startswith(
        f"the sentinel at 127.0.0.1:{first.port}: it refused: user or password is wrong: correct sentinel_kwargs; "
    )
    assert "s3cret" not in str(raised.value)


def test_error_without_a_sentinel_answer_names_the_sentinels() -> None:
    asked = f"sentinel://127.0.0.1:{free_port()};sentinel://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable) as raised:
        lock_at(f"{asked}?master_name=m").locked()
    assert str(raised.value) == f"no sentinel answers: asked {asked}"


def test_server_that_is_no_sentinel_is_named_by_its_address(clean_server: Server) -> None:
    with pytest.raises(StoreRefused) as raised:
        lock_at(f"sentinel://127.0.0.1:{clean_server.port}?master_name=m").locked()
    assert str(raised.value).startswith(f"the sentinel at 127.0.0.1:{clean_server.port}: ")
    assert "it is a server and no sentinel: let dlock_url begin with redis://" in str(raised.value)


@pytest.mark.invariant("hanging-servers-cost-one-timeout")
def test_a_sentinel_that_hangs_costs_its_part_once_and_none_at_all_cost_no_lock(
    sentinels: SentinelSet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_dlock")
    store: Any = store_at(url_of(sentinels), timeout=TIMEOUT)
    for sentinel in sentinels.sentinels:
        sentinel.pause()
    try:
        sentinels.sentinels[2].resume()
        assert seconds_of(lambda: store.inspect(NAME)) < TIMEOUT
        store.close()
        assert seconds_of(lambda: store.inspect(NAME)) < 2 * 0.1, "the one that answered is asked first"
        sentinels.sentinels[2].pause()
        for _ in range(2):
            store.close()
            store.inspect(NAME)
    finally:
        for sentinel in sentinels.sentinels:
            sentinel.resume()
    port = sentinels.primary().port
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        f"lock store: keeping the primary 127.0.0.1:{port}: no sentinel answers: asked {shown(sentinels)}"
    ]
    store.close()
    store.inspect(NAME)
    assert f"a sentinel of {shown(sentinels)} answers again" in caplog.text
    store.close()


def test_sentinel_that_cut_an_idle_connection_is_asked_once_more(
    sentinels: SentinelSet, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the only one that the URL names, and for 5 s no failover would be noticed."""
    sentinel = sentinels.sentinels[0]
    door = SentinelEndpoint(
        StoreLocation.of(f"sentinel://127.0.0.1:{sentinel.port}?master_name={MASTER_NAME}"), timeout=20
    )
    for _ in range(3):
        assert door.address() == ("127.0.0.1", sentinels.primary().port)
        with sentinel.client() as there:
            there.client_kill_filter(_type="normal", skipme=True)
        door.invalidate()
    assert door.address() == ("127.0.0.1", sentinels.primary().port)
    assert caplog.records == []


@pytest.mark.invariant("old-sentinel-is-ignored")
def test_a_sentinel_with_an_old_configuration_is_not_followed(
    own_sentinels: Callable[..., SentinelSet], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the first of the URL and names the dead primary. Neither does it know the others, nor they it."""
    servers = own_sentinels(replicas=1)
    old = servers.primary()
    watching = [f"sentinel monitor {MASTER_NAME} 127.0.0.1 {old.port} 2"]
    watching += [line for line in servers.sentinels[0].watching if " monitor " not in line]
    stale = SentinelProcess(servers.folder / "stale", binary=None, watching=watching)
    stale.port = free_port()
    url = f"sentinel://{LOCK_USER}:{LOCK_PASSWORD}@127.0.0.1:{stale.port}/0;{url_of(servers)}"
    known = SentinelEndpoint(StoreLocation.of(url), timeout=TIMEOUT)
    assert known.address() == ("127.0.0.1", old.port)
    servers.fail_over("kill")
    new = servers.primary().port
    with stale:
        _not_followed(url, stale, new, known, caplog)
        more = {"master_name": MASTER_NAME, "sentinel_kwargs": {"username": "poor", "password": "p"}}
        for sentinel in (stale, *servers.sentinels):
            with sentinel.client() as there:
                there.execute_command("ACL", "SETUSER", "poor", "on", ">p", "+sentinel|get-master-addr-by-name")
        # Without the right to SENTINEL master, the epoch is unknown. It shows if the primary refuses connections.
        store = open_store((StoreLocation.of(url.partition("?")[0], more=more),), timeout=TIMEOUT, prefix="dlock")
        with contextlib.suppress(StoreUnavailable):
            store.inspect(NAME)
        for _ in range(3):
            store.inspect(NAME)
            store.close()


def _not_followed(
    url: str, stale: SentinelProcess, new: int | None, known: SentinelEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(url, timeout=TIMEOUT)
    for _ in range(3):  # also the first time
        store.inspect(NAME)
        store.close()
    told = [record.message for record in caplog.records if "does not know the last failover" in record.message]
    assert len(told) == 1
    assert told[0].startswith(
        f"the sentinel at 127.0.0.1:{stale.port} does not know the last failover, ignoring it: it "
    )

    def takes_it_for_dead() -> bool:
        with stale.client() as there:
            return bool(there.sentinel_master(MASTER_NAME)["is_sdown"])

    # Here no failover is known, and no connection was tried: the sentinel itself says that its primary is dead.
    eventually(takes_it_for_dead, within=20)
    known._sentinels.sort(key=lambda one: one[0] != ("127.0.0.1", stale.port))
    known.invalidate()
    assert known.address() == ("127.0.0.1", new)


def test_older_answer_is_followed_only_if_most_sentinels_give_it(sentinels: SentinelSet) -> None:
    door = SentinelEndpoint(StoreLocation.of(url_of(sentinels)), timeout=TIMEOUT)
    primary = door.address()
    assert door._epoch is not None
    door._epoch += 5
    door._use(("127.0.0.1", 1))
    for sentinel in sentinels.sentinels[1:]:
        sentinel.pause()
    try:
        door.invalidate()
        assert door.address() == ("127.0.0.1", 1), "one of three may be the one that is cut off"
    finally:
        for sentinel in sentinels.sentinels[1:]:
            sentinel.resume()
    door._failed.clear()
    door.invalidate()
    assert door.address() == primary, "they were set up anew"


# A failover that forgets


@pytest.mark.invariant("sentinel-failover-loss-is-reported")
def test_holder_of_a_lock_lost_in_a_failover_learns_it_before_the_ttl_is_over(whole: SentinelSet) -> None:
    told: list[float] = []

    def listen(**_: Any) -> None:
        told.append(time.monotonic())

    old = whole.primary()
    replicas = whole.replicas()
    for replica in replicas:
        with replica.client() as there:
            there.config_set("masterauth", "wrong")
    with old.client() as there:
        there.client_kill_filter(_type="replica")
        eventually(lambda: there.info("replication")["connected_slaves"] == 0)
    lock = lock_at(url_of(whole), "forgotten")
    signals.lock_lost.connect(listen)
    try:
        assert lock.acquire(blocking=False)
        last = time.monotonic()
        whole.fail_over("kill", wait=False)
        for replica in replicas:
            with replica.client() as there:
                there.config_set("masterauth", whole.password)
        whole.wait_for_promotion(old)
        eventually(lambda: told, within=TTL)
    finally:
        signals.lock_lost.disconnect(listen)
    assert told[0] < last + TTL
    assert lock.lease is not None
    with pytest.raises(LockLost):
        lock.lease.ensure()


@pytest.mark.invariant("sentinel-primary-is-verified")
def test_a_node_that_is_a_replica_is_never_talked_to(sentinels: SentinelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As named by a sentinel that does not know of the failover."""
    store: Any = store_at(url_of(sentinels), timeout=TIMEOUT)
    replica = eventually(lambda: next(filter(is_replica, sentinels.replicas()), None), within=20)
    assert replica is not None
    monkeypatch.setattr(store._topology._endpoint, "_asked", lambda: ("127.0.0.1", replica.port))
    with pytest.raises(StoreNotReady, match=f"name 127.0.0.1:{replica.port} as the primary of 'mymaster', but it is a"):
        store.inspect(NAME)


@pytest.mark.invariant("sentinel-primary-is-verified")
def test_waiter_that_blocks_during_a_failover_is_woken_at_the_new_primary(sentinels: SentinelSet) -> None:
    store = store_at(url_of(sentinels), timeout=TIMEOUT)
    listener = store.release_listener(NAME)
    assert not listener.wait(0.05)  # connected to the old primary
    old = sentinels.fail_over("stop")
    try:
        with sentinels.primary().client() as there:

            def pushed_and_woken() -> bool:
                try:
                    waited = listener.wait(0.1)
                except StoreUnavailable:
                    return False
                if not waited:
                    there.rpush(KEYS.wake, "1")
                return waited and not there.exists(KEYS.wake)

            eventually(pushed_and_woken, within=10)
    finally:
        old.resume()
        store.close()


def seconds_of(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def shown(sentinels: SentinelSet) -> str:
    return ";".join(f"sentinel://127.0.0.1:{sentinel.port}/0" for sentinel in sentinels.sentinels)
