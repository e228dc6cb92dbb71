"""URLs of a store."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import redis

from celery_dlock import InvalidLockOptions
from celery_dlock.store.factory import StoreDescription
from celery_dlock.store.location import StoreLocation
from tests.support.stores import store_at


@pytest.mark.parametrize("url", ["redis:/host", "redis:host", "rediss:/u:s3cret@host", "redis://u:s3cret@host/abc"])
def test_url_that_redis_py_would_misread_is_refused_without_its_password(url: str) -> None:
    """One slash is missing: that is localhost to it. A database that is no number: that is number 0."""
    with pytest.raises(InvalidLockOptions, match=r"expected rediss?://host:port/number") as raised:
        store_at(url, timeout=1)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("url", ["redis://host", "redis://host/", "redis://host:1/3"])
def test_an_url_with_a_host_and_a_number_is_taken(url: str) -> None:
    store_at(url, timeout=1).close()


class ProviderWithLock(redis.CredentialProvider):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def described(*urls: str, more: Mapping[str, Any] | None = None) -> StoreDescription:
    locations = tuple(StoreLocation.of(url, more=more) for url in urls)
    for location in locations:
        location.shared["nodes"] = threading.Lock()  # as a process may keep there
    return StoreDescription(locations, "mine", 2.5)


@pytest.mark.parametrize(
    "urls",
    [
        ["redis://u:s3cret@host:1/3"],
        ["rediss://u:s3cret@host:1/3?ssl_cert_reqs=none"],
        ["unix:///run/redis.sock"],
        ["sentinel://u:s3cret@host:1/0;sentinel://host:2"],
        ["redis+cluster://u:s3cret@host:1,host:2"],
        ["redis://a", "redis://b", "redis://c"],
    ],
)
def test_described_store_is_the_same_in_another_process(urls: list[str]) -> None:
    more = {"master_name": "primary"} if urls[0].startswith("sentinel") else None
    first, second = described(*urls, more=more), described(*urls, more=more)
    text = first.text()
    assert text
    assert text == second.text()
    found = StoreDescription.from_text(text)
    assert found == first
    assert found.locations[0].shared == {}
    assert "s3cret" not in repr(found)
    found.open(0.4).close()


def test_store_with_an_option_of_this_process_alone_has_no_description() -> None:
    assert described("redis://host", more={"credential_provider": ProviderWithLock()}).text() is None
