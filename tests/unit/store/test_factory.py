"""URLs of a store."""

import pytest

from celery_dlock import InvalidLockOptions
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
