"""The code blocks of the documentation run, in their order, against the shared server."""

import gc
import inspect
from pathlib import Path

import pytest
from celery import _state
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from celery_dlock.testing import DLockKit
from tests.support.processes import ROOT

#: Its blocks need neither a broker nor a lock store.
WITHOUT_SERVER = "test-your-tasks.md"
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


# One test for a document, not one for a block: a block uses the names of those before it.
# Celery's own call, with which a worker of a block stores results.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks(path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Celery lets these win over what the block itself names.
    if path.name != WITHOUT_SERVER:
        monkeypatch.setenv("CELERY_BROKER_URL", redis_url)
        monkeypatch.setenv("CELERY_RESULT_BACKEND", redis_url)
    # An app made in a block becomes the current one; after the test it is not any more.
    monkeypatch.setattr(_state._tls, "current_app", None)  # type: ignore[attr-defined]  # not in the stubs
    document = Sybil(parsers=[SkipParser(), PythonCodeBlockParser()]).parse(path)
    for example in document.examples():
        example.evaluate()
    for name, test in list(document.namespace.items()):
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["dlock"]:
            with DLockKit(document.namespace["app"]) as kit:
                test(kit)
    # Results take leave of their server when they are collected: while it is there.
    document.namespace.clear()
    gc.collect()
