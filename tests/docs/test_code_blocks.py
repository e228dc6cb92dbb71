"""The code blocks of the documentation run, in their order, against the shared server."""

from pathlib import Path

import pytest
from celery import _state
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests.processes import ROOT

DOCUMENTS = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if path.exists()]


# One test for a document, not one for a block: a block uses the names of those before it.
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_blocks(path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Celery lets these win over what the block itself names.
    monkeypatch.setenv("CELERY_BROKER_URL", redis_url)
    monkeypatch.setenv("CELERY_RESULT_BACKEND", redis_url)
    # An app made in a block becomes the current one; after the test it is not any more.
    monkeypatch.setattr(_state._tls, "current_app", None)  # type: ignore[attr-defined]  # not in the stubs
    document = Sybil(parsers=[SkipParser(), PythonCodeBlockParser()]).parse(path)
    for example in document.examples():
        example.evaluate()
