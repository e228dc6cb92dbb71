"""Settings: what an app says of locks, checked."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_dlock.config.settings import Settings
from celery_dlock.errors import InvalidLockOptions
from celery_dlock.messaging.broker_identity import broker_of
from celery_dlock.options.lock_options import DEFAULT_TTL
from celery_dlock.runtime import BREAKER_RESET
from celery_dlock.store.location import shown
from tests.support.stores import store_at
from tests.unit.settings import settings_of

REDIS = "redis://broker/3"


def settings(broker: str = REDIS, backend: str | None = None, **conf: Any) -> Settings:
    return settings_of(broker, backend, **conf)


def refusal(**given: Any) -> str:
    with pytest.raises(InvalidLockOptions) as raised:
        settings(**given)
    return str(raised.value)


# Where locks live


@pytest.mark.core
@pytest.mark.parametrize(
    ("broker", "backend", "own", "expected"),
    [
        (REDIS, None, None, REDIS),
        (REDIS, "redis://backend/1", None, REDIS),
        ("amqp://b//", "redis://backend/1", None, "redis://backend/1"),
        ("memory://", "rediss://backend/1?ssl_cert_reqs=none", None, "rediss://backend/1"),
        (REDIS, "redis://backend/1", "redis://own/2", "redis://own/2"),
        ("amqp://b//", None, "unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
        ("redis+socket:///run/redis.sock?virtual_host=1", None, None, "redis+socket:///run/redis.sock"),
        ("redis://:p%40ss@broker/0", None, None, "redis://broker/0"),
        ("rediss://b/0?ssl_cert_reqs=required", None, None, "rediss://b/0"),
        ("sentinel://:p@b", "redis://backend/1", "redis://own/2", "redis://own/2"),
        ("redis://first/0;redis://second/0", None, None, "redis://first/0"),
    ],
)
def test_locks_live_at_their_own_url_else_at_the_brokers_else_at_the_backends(
    broker: str, backend: str | None, own: str | None, expected: str
) -> None:
    assert settings(broker, backend, **({"dlock_url": own} if own else {})).locations[0].shown == expected


@pytest.mark.parametrize(
    ("broker", "backend", "seen"),
    [
        ("amqp://guest:s3cret@rabbit:5672//", None, "'amqp://rabbit:5672//'"),
        ("memory://", "db+postgresql://u:s3cret@db/x", "'memory://' and 'db+postgresql://db/x'"),
        ("amqp://:s3cret@one;amqp://:s3cret@two", "rpc://", "'amqp://one' and 'rpc://'"),
    ],
)
def test_without_any_redis_the_error_says_what_was_found_and_what_to_set(
    broker: str, backend: str | None, seen: str
) -> None:
    message = refusal(broker=broker, backend=backend)
    assert message == (
        f"dlock_url is not set, and neither the broker nor the result backend is a Redis ({seen}): set dlock_url, "
        "or dlock_enabled=False for tests that need no locks"
    )


@pytest.mark.parametrize(
    "url", ["http://u:s3cret@host/", "host:6379", "", "valkey://:s3cret@s1", "s3cret@h", "u:s3cret@h", 5, {"redis": 1}]
)
def test_an_url_of_an_unknown_kind_is_refused_with_those_that_are_known(url: Any) -> None:
    message = refusal(dlock_url=url)
    assert message.startswith("invalid dlock_url=")
    known = "redis://, rediss://, unix://, redis+socket://, sentinel://, redis+cluster://, rediss+cluster://, memory://"
    assert f"expected a URL that starts with one of {known}" in message
    assert "s3cret" not in message


# No password is ever shown


@pytest.mark.invariant("arguments-stay-secret")
@pytest.mark.parametrize(
    "url",
    [
        "x://user:s3cret@host:1/db",
        "x://:s3cret@host:1/db",
        "x://user:s3cret@host:1/db?password=s3cret",
        "x://user:s3cret@host:1/db#s3cret",
        "x://user:a@s3cret@host:1/db",
        "x://user:/s3cret@host:1/db",
        "x://user:#s3cret@host:1/db",
        "x://user:?s3cret@host:1/db",
        "x://user:s3cret/?#@host:1/db",
    ],
)
def test_an_url_is_shown_without_user_and_password(url: str) -> None:
    assert shown(url) == "x://host:1/db"


@pytest.mark.parametrize("url", ["redis://:s3cret@host:port/0", "redis://u:s3cret@host:99999999/0"])
def test_an_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        store_at(url, timeout=1)
    assert str(raised.value).startswith("dlock_url: cannot keep locks at 'redis://host:")
    assert "s3cret" not in str(raised.value)
    assert raised.value.__suppress_context__


# The other settings


def test_the_defaults_are_those_of_the_documentation() -> None:
    found = settings()
    assert (found.prefix, found.ttl) == ("dlock", 30.0)
    assert found.ttl is DEFAULT_TTL
    assert (found.grant_timeout, found.grant_attempts) == (60.0, 5)
    assert found.timeout == 3.0


@pytest.mark.parametrize("ttl", [45, 45.0, timedelta(seconds=45)])
def test_a_ttl_is_seconds_or_a_timedelta(ttl: Any) -> None:
    assert settings(dlock_ttl=ttl).ttl == 45.0


@pytest.mark.parametrize("seconds", [45, 45.0, timedelta(seconds=45)])
def test_a_grant_timeout_is_seconds_or_a_timedelta(seconds: Any) -> None:
    assert settings(dlock_grant_timeout=seconds).grant_timeout == 45.0


def test_grant_attempts_are_any_whole_number_from_one() -> None:
    assert [settings(dlock_grant_attempts=count).grant_attempts for count in (1, 10**9)] == [1, 10**9]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("dlock_ttl", 0.5, "seconds from 1"),
        ("dlock_ttl", "30", "seconds (int, float or timedelta) of at least 1"),
        ("dlock_ttl", True, "seconds (int, float or timedelta) of at least 1"),
        ("dlock_grant_timeout", 0.5, "seconds from 1"),
        ("dlock_grant_timeout", 0, "seconds from 1"),
        ("dlock_grant_timeout", float("inf"), "seconds from 1"),
        ("dlock_grant_timeout", float("nan"), "seconds from 1"),
        ("dlock_grant_timeout", "60", "seconds (int, float or timedelta) of at least 1"),
        ("dlock_grant_timeout", None, "seconds (int, float or timedelta) of at least 1"),
        ("dlock_grant_timeout", True, "seconds (int, float or timedelta) of at least 1"),
        ("dlock_timeout", 0.04, "seconds from 0.05"),
        ("dlock_timeout", 61, "seconds from 0.05 to 60"),
        ("dlock_timeout", None, "seconds (int, float or timedelta) of at least 0.05"),
        ("dlock_grant_attempts", 0, "a whole number of at least 1"),
        ("dlock_grant_attempts", -1, "a whole number of at least 1"),
        ("dlock_grant_attempts", 5.0, "a whole number of at least 1"),
        ("dlock_grant_attempts", "5", "a whole number of at least 1"),
        ("dlock_grant_attempts", None, "a whole number of at least 1"),
        ("dlock_grant_attempts", True, "a whole number of at least 1"),
        ("dlock_broker", "", "a non-empty text"),
        ("dlock_broker", ["amqp://h"], "a non-empty text"),
        ("dlock_prefix", "", "text without braces or spaces"),
        ("dlock_prefix", None, "text without braces or spaces"),
        ("dlock_prefix", b"dlock", "text without braces or spaces"),
        ("dlock_prefix", "a{b", "text without braces or spaces"),
        ("dlock_prefix", "a}b", "text without braces or spaces"),
        ("dlock_prefix", "a b", "text without braces or spaces"),
        ("dlock_prefix", "a\tb", "text without braces or spaces"),
        ("dlock_prefix", "a\n", "text without braces or spaces"),
    ],
)
def test_a_wrong_value_is_refused_with_setting_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"invalid {name}={value!r}: expected ")
    assert allowed in message


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dlock_tll", "dlock_ttl"),
        ("dlock_URL2", "dlock_url"),
        ("dlock_", ""),
        ("DLOCK_TTL", "dlock_ttl"),
        # What all settings begin with makes none of them alike.
        ("dlock_on_conflict", ""),
    ],
)
def test_an_unknown_setting_is_refused_by_name_with_the_one_that_was_meant(name: str, meant: str) -> None:
    alike = f" (did you mean {meant!r}?)" if meant else ""
    assert refusal(**{name: 1}) == f"unknown setting {name!r}{alike}; all settings: docs/reference/settings.md"


@pytest.mark.core
def test_settings_come_from_a_namespace_too_and_unknown_ones_there_are_refused() -> None:
    """As Django's ``config_from_object("django.conf:settings", namespace="CELERY")`` has them."""

    def of(**names: Any) -> Settings:
        app = Celery("a", set_as_current=False)
        source = SimpleNamespace(CELERY_BROKER_URL=REDIS, **names)
        app.config_from_object(source, namespace="CELERY")
        return Settings.of(app)

    found = of(CELERY_DLOCK_TTL=45, CELERY_DLOCK_PREFIX="mine", CELERY_DLOCK_URL="redis://own/2", DLOCK_OF_ANOTHER=1)
    assert (found.locations[0].shown, found.prefix, found.ttl) == ("redis://own/2", "mine", 45.0)
    with pytest.raises(InvalidLockOptions, match="unknown setting 'dlock_tll'"):
        of(CELERY_DLOCK_TLL=45)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dlock_failover_quarantine", "use dlock_quarantine"),
        ("dlock_restart_delay", "use dlock_quarantine"),
        ("dlock_breaker_reset", f"a store that timed out is always skipped for {BREAKER_RESET:g} s"),
    ],
)
def test_removed_setting_is_refused_with_what_replaces_it(name: str, instead: str) -> None:
    assert refusal(dlock_url=REDIS, **{name: 5}).startswith(f"unknown setting {name!r} (removed: {instead})")


def test_valkey_is_spoken_to_as_redis() -> None:
    assert refusal(dlock_url="valkey://h").endswith("; use redis:// for Valkey too")


def test_other_settings_of_other_people_are_no_concern() -> None:
    assert settings(other_setting=1, my_dlock_thing=2).prefix == "dlock"


# From when on a delivery is doubtful


@pytest.mark.core
@pytest.mark.parametrize(
    ("broker", "options", "expected"),
    [
        (REDIS, {}, 3240.0),
        ("rediss://b/0?ssl_cert_reqs=none", {}, 3240.0),
        (REDIS, {"visibility_timeout": 100}, 90.0),
        (REDIS, {"visibility_timeout": 5}, 3.0),
        (REDIS, {"visibility_timeout": 1}, 0.0),
        ("amqp://b//", {"visibility_timeout": 100}, None),
        ("memory://", {}, None),
    ],
)
def test_a_delivery_is_doubtful_before_a_redis_broker_delivers_it_again(
    broker: str, options: dict[str, Any], expected: float | None
) -> None:
    found = settings(broker, dlock_url=REDIS, broker_transport_options=options)
    assert found.doubtful_after == expected


@pytest.mark.invariant("foreign-messages-block-no-name")
@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("amqp://guest@Rabbit//", "amqp://app:s3cret@rabbit:5672//"),
        ("pyamqp://rabbit//", "amqp://rabbit//"),
        ("redis://h", "redis://user:s3cret@h:6379/0"),
        ("redis://h:7/1", "rediss://:s3cret@h:7/1"),
        ("redis+socket:///run/a.sock", "redis+socket://:s3cret@/run/a.sock"),
        ("amqp://a//;amqp://b//", "amqp://user:s3cret@a//"),
    ],
)
def test_broker_is_identified_without_user_and_password(url: str, same: str) -> None:
    first, second = (broker_of(Celery("one", broker=broker, set_as_current=False)) for broker in (url, same))
    assert first == second
    assert "s3cret" not in second


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("amqp://h//", "amqp://h/v"),
        ("redis://h/0", "redis://h/1"),
        ("amqp://h//", "amqp://h2//"),
        ("redis://h:7", "redis://h:8"),
    ],
)
def test_brokers_of_another_place_have_another_identity(url: str, other: str) -> None:
    first, second = (broker_of(Celery("one", broker=broker, set_as_current=False)) for broker in (url, other))
    assert first != second


@pytest.mark.invariant("foreign-messages-block-no-name")
@pytest.mark.parametrize(
    "options",
    [{"global_keyprefix": "shop:"}, {"master_name": "m2"}, {"queue_name_prefix": "shop-"}],
)
@pytest.mark.parametrize("url", ["redis://h/0", "sentinel://h:26379", "redis+socket:///run/a.sock"])
def test_brokers_whose_transport_options_lead_to_other_queues_differ(url: str, options: dict[str, str]) -> None:
    """A worker of one of them would publish to queues that no worker of the other consumes."""
    first, second = (Celery("one", broker=url, set_as_current=False) for _ in range(2))
    second.conf.broker_transport_options = options
    assert broker_of(first) != broker_of(second)


@pytest.mark.parametrize(
    "url",
    ["amqp://[::1]/v", "amqp://h/a=b", "amqp://h/a%40b", "amqp://h/a%3Fb=c", "amqp://h/my v", "memory://", "redis://h"],
)
def test_dlock_broker_as_the_warning_shows_it_names_the_same_broker(url: str) -> None:
    app = Celery("one", broker=url, set_as_current=False)
    assert settings(dlock_broker=broker_of(app)).broker == broker_of(app)


def test_dlock_broker_names_the_broker_without_its_password() -> None:
    assert settings().broker is None
    assert settings(dlock_broker="main").broker == "main"
    assert settings(dlock_broker="amqp://app:s3cret@rabbit//?ssl=1").broker == "amqp://rabbit//"
