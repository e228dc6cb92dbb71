"""The metrics of a worker equal what its tasks counted themselves, in every pool."""

import os
import re
import urllib.request
from collections import Counter

import pytest

from tests.support.polling import eventually

parser = pytest.importorskip("prometheus_client.parser", reason="installed in the main lane only")

APP = "tests.support.apps.counting"
TASKS = ["free", "skipping", "waiting", "threading", "dying"]
FULL = [pytest.mark.slow]
#: Calls of the slow form. Its children are replaced after 100 calls: after 10, as in the short form, it takes too long.
CALLS = int(os.environ.get("DLOCK_TEST_CALLS", "10000"))
ROWS = [
    pytest.param("prefork", ("--max-tasks-per-child", "10"), 200, id="prefork"),
    pytest.param("threads", (), 150, id="threads"),
    pytest.param("gevent", (), 150, id="gevent"),
    pytest.param("prefork", ("--max-tasks-per-child", "100"), CALLS, id="prefork-full", marks=FULL),
    pytest.param("threads", (), CALLS, id="threads-full", marks=FULL),
    pytest.param("gevent", (), CALLS, id="gevent-full", marks=FULL),
]


def scrape(worker) -> dict[str, Counter[tuple[str, ...]]]:
    """Return the samples of the worker's metrics page by name and labels."""
    port = worker.wait_for_log(r"metrics are served at http://127.0.0.1:(\d+)/metrics")[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("celery_dlock_")
            first = sorted(sample.labels.items(), key=lambda label: label[0] != "task")
            found.setdefault(name, Counter())[tuple(value for _, value in first)] += sample.value
    return found


def tallied(module) -> Counter[tuple[str, str]]:
    """Return what the tasks counted, by kind and task."""
    counted = module.tally.hgetall("tally").items()
    return Counter({tuple(key.decode().split()): int(number) for key, number in counted})


@pytest.mark.timeout(900)
@pytest.mark.invariant("counters-are-exact")
@pytest.mark.parametrize(("pool", "arguments", "calls"), ROWS)
def test_metrics_equal_what_the_tasks_counted(start_worker, load_app, pool, arguments, calls):
    module = load_app(APP)
    worker = start_worker(APP, *arguments, pool=pool, concurrency=4)
    dies = pool == "prefork"
    for number in range(calls // 5):
        module.free.delay(number)
        module.skipping.delay(number)
        module.waiting.delay(number % 3)
        module.threaded.delay(number)
        module.dying.delay(number, dies=dies and number % 20 == 7)

    def all_done() -> bool:
        counted = tallied(module)
        started = sum(
            number for (kind, task), number in counted.items() if kind in ("run", "skipped") and task in TASKS
        )
        return started == calls

    eventually(all_done, within=600, every=0.2)

    def all_released() -> bool:
        ran = sum(number for (kind, _), number in tallied(module).items() if kind == "run")
        return sum(scrape(worker)["released_total"].values()) == ran

    eventually(all_released, within=30, every=0.2, message=f"{tallied(module)} {scrape(worker)}")
    found, counted = scrape(worker), tallied(module)
    deaths = counted["died", "dying"]
    runs = {(task,): counted["run", task] for task in [*TASKS, "other"]}
    held = {(task,): counted["released", task] for task in [*TASKS, "other"]}
    assert found["acquired_total"] == runs
    assert {labels: number for labels, number in found["released_total"].items() if number} == {
        **{(task, "holder"): number for (task,), number in held.items()},
        **({("dying", "watchdog"): deaths} if deaths else {}),
    }
    assert found["held_seconds_count"] == held
    assert found["wait_seconds_count"] == runs
    assert found["conflicts_total"]["skipping", "skipped"] == counted["skipped", "skipping"]
    assert counted["skipped", "skipping"] == counted["refused", "skipping"]
    assert sum(found["lost_total"].values()) == 0
    assert deaths == (calls // 5 // 20 if dies else 0)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", next(iter(found["build_info"]))[0])
