"""ChildWatch: is a child gone? With a pidfd, and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from celery_dlock.worker.pool_children import ChildWatch
from tests.support.polling import eventually


@pytest.fixture(params=["pidfd", "waitid"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "waitid":
        monkeypatch.delattr(os, "pidfd_open", raising=False)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_living_child_is_not_gone_also_when_it_is_stopped(child: subprocess.Popen[bytes]) -> None:
    watch = ChildWatch(child.pid)
    assert not watch.gone()
    os.kill(child.pid, signal.SIGSTOP)
    assert not watch.gone()
    os.kill(child.pid, signal.SIGCONT)
    assert not watch.gone()
    watch.close()


@pytest.mark.invariant("dead-owner-is-released")
@pytest.mark.core
def test_killed_child_is_gone_before_and_after_it_was_reaped(
    child: subprocess.Popen[bytes],
) -> None:
    """Its parent can still reap it."""
    watch = ChildWatch(child.pid)
    child.kill()
    eventually(watch.gone, within=5)
    assert child.wait(5) == -signal.SIGKILL
    assert watch.gone()


def test_a_child_that_was_reaped_by_another_is_gone(child: subprocess.Popen[bytes]) -> None:
    watch = ChildWatch(child.pid)
    child.kill()
    child.wait(5)
    assert watch.gone()


def test_a_child_that_was_gone_before_the_watch_began_is_gone(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(5)
    assert ChildWatch(child.pid).gone()


def test_a_watch_that_has_seen_the_end_keeps_no_file_open(child: subprocess.Popen[bytes]) -> None:
    def of_children() -> list[str]:
        """Only those that could watch a child: threads of earlier tests may open and close others."""
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(descriptor.readlink()))
        return [link for link in links if "pidfd" in link or f"/proc/{child.pid}" in link]

    before = of_children()
    watch = ChildWatch(child.pid)
    child.kill()
    eventually(watch.gone, within=5)
    assert of_children() == before
    watch.close()


def test_a_system_that_forbids_pidfds_is_watched_all_the_same(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden, raising=False)
    watch = ChildWatch(child.pid)
    assert not watch.gone()
    child.kill()
    eventually(watch.gone, within=5)
