import signal

import pytest

from tests.conftest import LoadApp, StartWorker
from tests.support.polling import eventually
from tests.support.processes import session_of

APP = "tests.infrastructure.echo_app"


@pytest.mark.core
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent", "eventlet"])
def test_a_worker_of_every_pool_answers(start_worker: StartWorker, load_app: LoadApp, pool: str) -> None:
    worker = start_worker(APP, pool=pool)
    pid = load_app(APP).worker_pid.delay().get(timeout=20)
    expected = worker.children() if pool == "prefork" else [worker.pid]
    assert pid in expected


def test_a_warm_shutdown_ends_with_zero(start_worker: StartWorker) -> None:
    worker = start_worker(APP)
    assert len(worker.children()) == 2
    assert worker.stop() == 0
    assert not session_of(worker.pid)


def test_a_forked_worker_is_as_one_that_was_executed(
    start_worker: StartWorker, load_app: LoadApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line, variables, streams, session and death with its starter; only its memory is another's."""
    seen = []
    for way in ("fork", "exec"):
        if way == "exec":
            monkeypatch.setenv("DLOCK_TEST_EXEC", "1")
        worker = start_worker(APP, pool="solo", environ={"ONLY": "here"})
        facts = load_app(APP).facts.delay().get(timeout=20)
        assert facts.pop("session") == worker.pid
        argv = ["-" if word == worker.node else word for word in facts.pop("argv")]
        environ = facts.pop("environ")
        environ.pop("DLOCK_TEST_EXEC", None)
        streams = facts.pop("streams")
        assert streams == ["/dev/null", *[str(worker.log_file)] * 2]
        seen.append((argv, environ, facts))
        worker.kill()
    forked, executed = seen
    assert forked == executed
    assert executed[2]["death_signal"] == signal.SIGKILL


def test_a_killed_worker_leaves_nothing(start_worker: StartWorker) -> None:
    worker = start_worker(APP)
    worker.kill()
    assert worker.process.returncode == -signal.SIGKILL
    eventually(lambda: not session_of(worker.pid), message="children outlive their worker")


def test_a_worker_that_cannot_start_shows_its_log(start_worker: StartWorker) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with \d+:.*no_such_module"):
        start_worker("tests.no_such_module")


@pytest.mark.slow
def test_a_failed_test_shows_the_log_of_its_workers(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        f"""
        def test_it(start_worker):
            start_worker({APP!r}, pool="solo")
            assert False
        """
    )
    outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:valkey")
    outcome.stdout.fnmatch_lines(["*log of w*", "* ready.*"])
