"""Confirmation of a write: values, refused values, the command to the server and its answer."""

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, Lock, singleton_task
from celery_dlock.config.settings import Settings
from celery_dlock.options.durability import (
    PRIMARY,
    Durability,
    durability_of,
    shortfall,
    wait_command,
)
from celery_dlock.task.app_check import check_task

SERVER = "redis://host:6379/0"
SERVERS = ["redis://a:1/0", "redis://b:1/0", "redis://c:1/0"]


def settings(**conf: Any) -> Settings:
    app = Celery("a", broker="memory://", set_as_current=False)
    app.conf.update({"dlock_url": SERVER, **conf})
    return Settings.of(app)


@pytest.mark.core
@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("primary", Durability(0, fsync=False, timeout_ms=0)),
        ({"replicas": 1}, Durability(1, fsync=False, timeout_ms=500)),
        ({"replicas": 2, "timeout": 0.2}, Durability(2, fsync=False, timeout_ms=200)),
        ({"replicas": 2, "timeout": timedelta(seconds=1)}, Durability(2, fsync=False, timeout_ms=1000)),
        ({"fsync": "local"}, Durability(0, fsync=True, timeout_ms=1500)),
        ({"fsync": 2, "timeout": 1}, Durability(2, fsync=True, timeout_ms=1000)),
    ],
)
def test_each_form_means_so_many_confirmations(value: Any, meant: Durability) -> None:
    assert settings(dlock_durability=value).durability == meant


@pytest.mark.parametrize(
    "value",
    [
        "replicas", "", None, 1, True, {}, {"replicas": 0}, {"replicas": True}, {"replicas": "1"}, {"replicas": 1001},
        {"replicas": 1.0}, {"replicas": "local"}, {"fsync": 0}, {"fsync": True}, {"fsync": "disk"}, {"timeout": 1},
        {"replicas": 1, "fsync": 1}, {"replica": 1}, {"replicas": 1, "timeouts": 1}, ["replicas", 1],
    ],
)  # fmt: skip
def test_any_other_form_is_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        settings(dlock_durability=value)
    assert str(raised.value).startswith(f"invalid dlock_durability={value!r}: expected 'primary', {{'replicas':")


@pytest.mark.parametrize("timeout", [0, -1, 31, "1", None, True])
def test_a_timeout_is_0001_to_30_seconds(timeout: Any) -> None:
    with pytest.raises(InvalidLockOptions, match=r"^invalid dlock_durability\['timeout'\]=.*: expected seconds"):
        settings(dlock_durability={"replicas": 1, "timeout": timeout})


def test_a_timeout_leaves_half_of_dlock_timeout_for_the_answer() -> None:
    assert settings(dlock_timeout=1, dlock_durability={"replicas": 1, "timeout": 0.5}).durability.timeout_ms == 500
    with pytest.raises(InvalidLockOptions) as raised:
        settings(dlock_timeout=1, dlock_durability={"replicas": 1, "timeout": 0.6})
    assert str(raised.value) == (
        "invalid dlock_durability['timeout']=0.6: expected seconds up to half of dlock_timeout (1); "
        "lower it, or raise dlock_timeout"
    )


def test_independent_servers_have_no_replicas_to_ask() -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        settings(dlock_url=SERVERS, dlock_durability={"replicas": 1})
    assert str(raised.value) == (
        "invalid dlock_durability={'replicas': 1}: several servers (Redlock) in dlock_url have no replicas; "
        "expected 'primary', or one server, sentinels, a Cluster in dlock_url"
    )
    assert settings(dlock_url=SERVERS, dlock_durability="primary").durability == PRIMARY


def test_disks_of_replicas_need_a_ttl_in_which_the_watchdog_can_wait_for_them() -> None:
    def checked(durability: Any, ttl: float) -> None:
        app = Celery("a", broker="memory://", set_as_current=False)
        app.conf.update(dlock_url=SERVER, dlock_durability=durability)
        made: Any = singleton_task(app=app, name="a.post", ttl=ttl)

        def body() -> None: ...

        check_task(made(body))

    checked({"fsync": 1}, 15)
    checked({"fsync": "local"}, 1)
    with pytest.raises(InvalidLockOptions) as raised:
        checked({"fsync": 1}, 14)
    assert str(raised.value) == (
        "task 'a.post': invalid ttl=14.0: expected seconds from 15 with dlock_durability={'fsync': 1}, because a "
        "replica reports once a second what it wrote to disk"
    )
    app = Celery("a", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=SERVER, dlock_durability={"fsync": 1})
    with pytest.raises(InvalidLockOptions, match=r"^Lock\(.*\): invalid ttl=14.0: expected seconds from 15 with"):
        Lock("x", app=app, ttl=14).acquire(blocking=False)


def test_the_server_waits_no_longer_than_half_of_what_the_connection_does() -> None:
    assert (
        wait_command(Durability(2, fsync=False, timeout_ms=200), 3.0) == b"*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$3\r\n200\r\n"
    )
    assert (
        wait_command(Durability(2, fsync=False, timeout_ms=200), 0.1) == b"*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$2\r\n50\r\n"
    )
    # 0 would mean: without end.
    assert wait_command(Durability(2, fsync=False, timeout_ms=200), 0.001).endswith(b"$1\r\n1\r\n")
    assert (
        wait_command(Durability(1, fsync=True, timeout_ms=9), 3.0)
        == b"*4\r\n$7\r\nWAITAOF\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n9\r\n"
    )


@pytest.mark.parametrize(
    ("asked", "local", "replicas", "said"),
    [
        ({"replicas": 2}, 1, 2, None),
        ({"replicas": 2}, 1, 3, None),
        ({"replicas": 2}, 1, 1, "only 1 of 2 replicas confirmed within 0.5 s (dlock_durability={'replicas': 2})"),
        ({"fsync": "local"}, 1, 0, None),
        (
            {"fsync": "local"},
            0,
            2,
            "the primary did not write to disk within 1.5 s (dlock_durability={'fsync': 'local'})",
        ),
        ({"fsync": 2}, 1, 1, "only 1 of 2 replicas wrote to disk within 1.5 s (dlock_durability={'fsync': 2})"),
        ({"fsync": 2}, 0, 2, "the primary did not write to disk within 1.5 s (dlock_durability={'fsync': 2})"),
    ],
)
def test_every_confirmation_counts_and_what_is_missing_is_said(
    asked: Any, local: int, replicas: int, said: str | None
) -> None:
    short = shortfall(durability_of("durability", asked), local, replicas, 3.0)
    assert (str(short) if short else None) == said
