from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dlock.locking.shared_lease_table import SharedLeaseTable


@pytest.fixture
def shared() -> Iterator[SharedLeaseTable]:
    """A table that this process has adopted: it is pool child and main process at once."""
    lease_table = SharedLeaseTable()
    lease_table.adopt()
    yield lease_table
    lease_table.close()
