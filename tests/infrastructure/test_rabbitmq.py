import pytest

from tests.conftest import LoadApp, StartWorker

APP = "tests.infrastructure.echo_app"


@pytest.mark.servers
def test_a_worker_runs_on_rabbitmq(start_worker: StartWorker, load_app: LoadApp, rabbitmq_url: str) -> None:
    worker = start_worker(APP, broker=rabbitmq_url)
    pid = load_app(APP, broker=rabbitmq_url).worker_pid.delay().get(timeout=20)
    assert pid in worker.children()
