"""Claims that are no longer renewed because their messages were revoked."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery.utils.collections import LimitedSet

from celery_dlock.keys.key_spec import LockName
from celery_dlock.store.model import Identity
from celery_dlock.worker.claim_renewal import ClaimRenewer


class Store:
    def __init__(self) -> None:
        self.unclaimed: list[str] = []

    def close(self) -> None:
        pass

    def release_claim(self, _keys: Any, task_id: str, _generation: int) -> None:
        self.unclaimed.append(task_id)


class Claims:
    """A delivery whose message claims its name and waits for its ETA."""

    dlock_in_process = False
    dlock_lock = LockName("n:x", 7)

    def __init__(self, task_id: str) -> None:
        self.id = task_id
        self.dlock_identity = Identity(task_id)


def test_a_claim_is_given_up_once_when_celerys_bounded_set_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full set keeps its length (50,000 ids by default)."""
    revoked = LimitedSet(maxlen=2)
    revoked.update(["others 1", "others 2"])
    monkeypatch.setattr("celery_dlock.worker.claim_renewal.revoked", revoked)
    store, known = Store(), [Claims("a"), Claims("b")]
    runtime: Any = SimpleNamespace(
        settings=SimpleNamespace(timeout=1.0, prefix="dlock"), open_store=lambda _timeout: store
    )
    deliveries: Any = SimpleNamespace(runtime=runtime, with_claims=lambda: known)
    watchdog = ClaimRenewer(deliveries, lambda: True)
    watchdog._renew_and_release()
    assert store.unclaimed == []
    revoked.add("b")
    assert len(revoked) == 2
    watchdog._renew_and_release()
    watchdog._renew_and_release()
    assert store.unclaimed == ["b"]
