"""The command line: what each verb prints, and its exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner, Result

from celery_dlock.control import LockControl
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.model import AcquireRequest, Identity, Requester
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers as queue
from tests.contract.helpers import NAME, request_of, take
from tests.contract.test_control_reads import bury, claim, die, every_state, grant, name, use
from tests.support.processes import ROOT
from tests.support.servers import LOCK_USER, OPERATOR_USER, Server

MODULE = """
from celery import Celery
from celery_dlock import singleton_task

app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.dlock_url = {url!r}


@singleton_task(app=app, name="shop.sell", key="{{customer}}", once_per=3600)
def sell(customer, secret): ...
"""
SCHEMA = json.loads((ROOT / "docs/reference/cli-output.schema.json").read_text())

Run = Callable[..., Result]


@pytest.fixture
def module(tmp_path: Path, lock_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    made = f"shop_{tmp_path.name}".replace("-", "_").replace("[", "_").replace("]", "_")
    url = lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:")
    (tmp_path / f"{made}.py").write_text(MODULE.format(url=url))
    monkeypatch.syspath_prepend(tmp_path)
    return made


@pytest.fixture
def run(module: str) -> Run:
    def call(*words: str, app: str = module) -> Result:
        return CliRunner().invoke(celery_command, ["-A", app, "dlock", *words], auto_envvar_prefix="CELERY")

    return call


def lines(result: Result) -> list[list[str]]:
    return [line.split("\t") for line in result.stdout.splitlines()]


def rows(result: Result) -> list[list[str]]:
    """Return the rows of a list, without its column names."""
    return lines(result)[1:]


KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def misfit(value: Any, schema: dict[str, Any]) -> str:
    """Return the first misfit of a value, by the parts of JSON Schema that ours uses; "" if it fits."""
    if "$ref" in schema:
        return misfit(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        found = [misfit(value, one) for one in schema["anyOf"]]
        return "" if "" in found else " / ".join(found)
    types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", list(KINDS))
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    if value not in allowed or not any(isinstance(value, KINDS[kind]) for kind in types):
        return f"{value!r} is not {schema}"
    inner = [(one, schema.get("items", {})) for one in value] if isinstance(value, list) else []
    if isinstance(value, dict):
        known = schema.get("properties") or dict.fromkeys(value, schema.get("additionalProperties"))
        if not set(schema.get("required", ())) <= set(value) <= set(known):
            return f"{sorted(value)} are not {sorted(known)}"
        inner = [(its, known[key]) for key, its in value.items()]
    return next(filter(None, (misfit(*one) for one in inner)), "")


@pytest.mark.core
def test_list_prints_plain_lines_of_each_state_in_a_pipe(store: RedisStore, run: Run) -> None:
    expected = every_state(store)
    result = run("list")
    assert result.exit_code == 0, result.output
    assert {row[0]: row[1] for row in rows(result)} == expected
    held = next(row for row in rows(result) if row[1] == "held")
    assert held[2:5] == ["app.post", "h", "node1"]
    assert held[5].endswith("+00:00")


@pytest.mark.parametrize(
    "words",
    [
        ("list",), ("claims",), ("unknown",), ("dead",), ("queue",), ("check",), ("audit",),
        ("show", str(NAME)), ("explain", "h"),
    ],
)  # fmt: skip
def test_json_documents_fit_the_schema(store: RedisStore, run: Run, words: tuple[str, ...]) -> None:
    every_state(store)
    bury(store, "b")
    take(store, "x.1", request_of("x"))
    run("hold", name("hh").text, "--for", "1m", "--reason", "why")
    document = json.loads(run(*words, "--json").stdout)
    assert misfit(document, SCHEMA) == ""
    assert document["items"]
    lines = run(*words, "--jsonl").stdout.splitlines()
    assert len(lines) == len(document["items"])


def test_list_filters_and_pages(store: RedisStore, run: Run) -> None:
    every_state(store)
    assert [row[1] for row in rows(run("list", "--state", "used"))] == ["used"]
    assert [row[0] for row in rows(run("list", "--name", "h:*"))] == [name("h").text]
    assert run("list", "--older", "1h").exit_code == 1
    assert run("list", "--state", "open").exit_code == 2
    for number in range(60):
        take(store, f"{number}.1", request_of(), name=name(f"n{number}"))
    page = json.loads(run("list", "--limit", "5", "--json").stdout)
    assert page["cursor"]
    assert len(page["items"]) < 66
    assert len(rows(run("list", "--limit", "5", "--all"))) == 66


@pytest.mark.core
def test_show_prints_the_holder_and_what_the_next_call_meets(store: RedisStore, run: Run) -> None:
    take(store, "x.1", request_of("x"))
    text = run("show", NAME.text).stdout
    assert "state: held\n" in text
    assert "holder: app.post[x] on node1 (process 77)\n" in text
    assert "next call: meets a held lock" in text
    assert run("show", name("free").text).exit_code == 1
    assert run("show", "--id", "x").stdout.splitlines()[:3] == text.splitlines()[:3]
    assert run("show").exit_code == 2


def test_name_prints_the_lock_name_without_a_store(run: Run) -> None:
    result = run("name", "shop.sell", "--args", '["ada", "s3cret"]')
    assert (result.exit_code, "s3cret" in result.output) == (0, False)
    assert result.stdout.startswith("shop.sell:ada:")
    assert run("name", "shop.buy").exit_code == 2
    assert run("name", "shop.sell", "--args", "{}").exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("name", "shop.sell", "--args", "[" * 100_000), "it is no JSON"),
        (("show", ""), "invalid lock name ''"),
        (("queue", "--limit", "9" * 30), "1000000"),
    ],
    ids=["nested too deeply", "empty name", "huge limit"],
)
def test_unusable_value_is_wrong_usage(run: Run, words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.core
def test_release_is_refused_with_exit_code_3_while_the_lease_is_fresh(store: RedisStore, run: Run) -> None:
    take(store, "x.1", request_of("x"))
    refused = run("release", NAME.text)
    assert (refused.exit_code, "its holder is alive" in refused.output) == (3, True)
    assert "To release it by force, give --force." in refused.output
    assert run("release", NAME.text, "--force", "--acquisition", "y.1").exit_code == 3
    assert run("release", NAME.text, "--force", "--reason", "ticket 7").exit_code == 0
    assert run("release", NAME.text).exit_code == 1
    assert "ticket 7" in run("audit").stdout


@pytest.mark.core
def test_hold_and_unhold(run: Run) -> None:
    assert run("hold", NAME.text, "--for", "2h", "--reason", "gateway is down").exit_code == 0
    assert "gateway is down" in run("show", NAME.text).stdout
    assert (run("unhold", NAME.text).exit_code, run("unhold", NAME.text).exit_code) == (0, 1)
    assert run("hold", NAME.text, "--for", "soon", "--reason", "why").exit_code == 2


@pytest.mark.core
def test_unknown_outcomes_are_listed_and_settled(store: RedisStore, run: Run) -> None:
    die(store, "x")
    die(store, "y")
    assert {row[0] for row in rows(run("unknown"))} == {NAME.text, name("y").text}
    assert run("resolve", NAME.text).exit_code == 2
    assert run("resolve", NAME.text, "--sent").exit_code == 0
    assert run("resolve", name("y").text, "--not-sent").exit_code == 0
    assert run("unknown").exit_code == 1
    assert (run("forget", NAME.text).exit_code, run("forget", NAME.text).exit_code) == (0, 1)


@pytest.mark.core
def test_bulk_actions_need_yes_and_print_their_number(store: RedisStore, run: Run) -> None:
    bury(store, "x")
    bury(store, "y")
    assert {row[1] for row in rows(run("dead"))} == {"x", "y"}
    asked = run("dead", "requeue", "--all")
    assert (asked.exit_code, "2 found" in asked.output, "--yes" in asked.output) == (2, True, True)
    assert len(lines(run("dead", "requeue", "--all", "--dry-run"))) == 2
    assert run("dead", "requeue", f"{NAME}/x").exit_code == 0
    assert [row[1] for row in rows(run("dead"))] == ["y"]
    assert run("dead", "requeue", "--all", "--yes").exit_code == 0
    assert run("dead").exit_code == 1
    assert {row[4] for row in rows(run("queue"))} == {"x", "y"}
    assert run("dead", "requeue").exit_code == 2


def test_drop_whose_end_cannot_be_stored_is_not_done(store: RedisStore, run: Run) -> None:
    """Its task is not registered in this app: it is left among the dead letters."""
    grant(store, "g", "w")
    assert run("queue", "drop", f"{name('g')}/w").exit_code == 1
    assert [row[1] for row in rows(run("dead"))] == ["w"]


def test_claims_are_listed_and_dropped(store: RedisStore, run: Run) -> None:
    claim(store, "c")
    assert rows(run("claims"))[0][:3] == [name("c").text, "app.post", "c"]
    assert (run("claims", "drop", name("c").text).exit_code, run("claims").exit_code) == (0, 1)


@pytest.mark.invariant("operators-free-no-successor")
def test_claim_of_a_later_call_is_not_dropped(store: RedisStore, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(store, "c")
    drop = LockControl.drop_claim

    def drop_late(control: LockControl, text: str, **named: Any) -> bool:
        assert store.release_claim(name("c"), "c", 0)
        by = Requester("app.post", "later", "web1", "7")
        assert store.claim([(name("c"), ClaimRequest("later", 0, 60_000, False, by, "attempt2"))]) == [None]
        return drop(control, text, **named)

    monkeypatch.setattr(LockControl, "drop_claim", drop_late)
    assert run("claims", "drop", name("c").text).exit_code == 1
    assert rows(run("claims"))[0][2] == "later"


def test_check_reports_each_problem_by_exit_code_1(store: RedisStore, run: Run) -> None:
    assert run("check").exit_code == 0
    use(store, "u")
    die(store, "x")
    found = run("check")
    assert (found.exit_code, "unknown outcomes\tPROBLEM\t1" in found.stdout) == (1, True)
    assert run("check", "--max-unknown", "1").exit_code == 0


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
def test_check_reports_keys_that_lack_their_expiry(store: RedisStore, run: Run, client: redis.Redis) -> None:
    every_state(store)
    assert "expiries\tok\teach key has one" in run("check", "--max-unknown", "9", "--max-dead", "9").stdout
    keys = [key for kind in ("lock", "claim") for key in client.keys(f"dlock:*:{kind}:*") if client.persist(key)]
    found = run("check", "--max-unknown", "9", "--max-dead", "9")
    assert (found.exit_code, f"expiries\tPROBLEM\t{len(keys)} keys lack theirs" in found.stdout) == (1, True)


def test_explain_of_an_unknown_id_has_exit_code_1(run: Run) -> None:
    result = run("explain", "no-such-id")
    assert (result.exit_code, "nothing is known" in result.stdout) == (1, True)


def test_resolve_without_a_verdict_names_both_options(store: RedisStore, run: Run) -> None:
    die(store, "x")
    result = run("resolve", name("x").text)
    assert (result.exit_code, "give --sent if the run did its work" in result.output) == (2, True), result.output
    assert len(rows(run("unknown"))) == 1


def test_show_of_a_free_lock_prints_its_facts_and_no_remark(run: Run) -> None:
    result = run("show", NAME.text)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "state: free\n" in result.stdout


def test_resolve_settles_only_the_run_whose_mark_was_seen(store: RedisStore, run: Run) -> None:
    die(store, "x")
    (row,) = rows(run("unknown"))
    dry = run("resolve", row[0], "--sent", "--mark", row[-1], "--dry-run")
    assert (dry.exit_code, "would settle app.post[x]" in dry.output) == (0, True)
    assert run("resolve", row[0], "--sent", "--mark", "stale", "--dry-run").exit_code == 1
    assert run("resolve", row[0], "--sent", "--mark", "stale").exit_code == 1
    assert len(rows(run("unknown"))) == 1
    assert run("resolve", row[0], "--sent", "--mark", row[-1]).exit_code == 0
    assert run("unknown").exit_code == 1


def test_name_that_begins_with_a_dash_is_explained(run: Run) -> None:
    result = run("show", "-name:0")
    assert (result.exit_code, "put -- before it" in result.output) == (2, True)


def test_interrupted_bulk_action_says_what_was_done(
    store: RedisStore, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task_id in "xyz":
        bury(store, task_id)
    requeue, calls = LockControl.requeue, []

    def interrupted(self: LockControl, *given: Any, **named: Any) -> bool:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return requeue(self, *given, **named)

    monkeypatch.setattr(LockControl, "requeue", interrupted)
    result = run("dead", "requeue", "--all", "--yes")
    assert (result.exit_code, "interrupted, 2 of 3 done" in result.output) == (4, True)
    assert len(rows(run("dead"))) == 1


def test_two_operators_who_release_one_lock_release_it_once(store: RedisStore, run: Run) -> None:
    take(store, "x.1", request_of("x"))
    words = ("release", NAME.text, "--force", "--acquisition", "x.1")
    assert [run(*words).exit_code for _ in range(2)] == [0, 3]
    take(store, "y.1", request_of("y"))
    assert run(*words).exit_code == 3  # the next holder is not touched
    assert "held" in run("show", NAME.text).stdout


def test_store_that_hangs_ends_the_command_with_69(run: Run, clean_server: Server) -> None:
    clean_server.pause()
    try:
        result = run("list")
    finally:
        clean_server.resume()
    assert result.exit_code == 69, result.output


def test_pipe_that_is_closed_early_prints_no_traceback(store: RedisStore, module: str, tmp_path: Path) -> None:
    every_state(store)
    command = f"{sys.executable} -m celery -A {module} dlock list | true"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert "BrokenPipe" not in done.stderr, done.stderr


HOSTILE = "\x1b[31mred\x07\u202e\x9b"
ESCAPED = r"\x1b[31mred\x07\u202e\x9b"


def test_no_command_prints_control_characters_of_the_store(store: RedisStore, run: Run) -> None:
    """Task ids, node names and reasons are not ours: they could colour, move or hide what the terminal shows."""
    by = Requester(HOSTILE, HOSTILE, HOSTILE, "7")
    store.acquire(NAME, "x.1", 60_000, AcquireRequest(by, Identity(HOSTILE)))
    queue.park(store, "w.1", f"w{HOSTILE}", NAME, entry=queue.entry_of(f"w{HOSTILE}"))
    run("hold", NAME.text, "--for", "1m", "--reason", f"why {HOSTILE}")
    for words in (
        ("list",),
        ("show", NAME.text),
        ("queue",),
        ("queue", "drop", NAME.text, "--dry-run"),
        ("explain", HOSTILE),
        ("audit",),
        ("release", NAME.text),
    ):
        output = run(*words).output
        assert output
        assert [one for one in output if not one.isprintable() and one not in "\n\t"] == [], words
    assert ESCAPED in run("list").output
    assert ESCAPED in run("show", NAME.text).output


def test_reason_is_stored_without_control_characters(run: Run) -> None:
    """The log and the results of skipped calls show it, which no command prints."""
    run("hold", NAME.text, "--for", "1m", "--reason", f"a\n{HOSTILE}")
    view = json.loads(run("show", NAME.text, "--json").stdout)["items"][0]
    assert view["holder"]["reason"] == f"a {ESCAPED}"
    assert json.loads(run("audit", "--json").stdout)["items"][0]["reason"] == f"a {ESCAPED}"


@pytest.mark.core
def test_without_an_app_the_exit_code_is_2_and_the_error_says_so() -> None:
    result = CliRunner().invoke(celery_command, ["dlock", "list"], auto_envvar_prefix="CELERY")
    assert (result.exit_code, "-A" in result.output) == (2, True)


def test_no_option_is_read_from_the_environment(store: RedisStore, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    take(store, "x.1", request_of("x"))
    monkeypatch.setenv("CELERY_DLOCK_LIST_STATE", "used")
    assert len(rows(run("list"))) == 1


@pytest.mark.parametrize(("url", "code"), [("redis://127.0.0.1:1/0", 69), ("redis://h/0?nonsense=1", 78)])
def test_store_that_is_away_and_settings_that_are_wrong_have_codes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, url: str, code: int
) -> None:
    made = f"away_{code}"
    (tmp_path / f"{made}.py").write_text(MODULE.format(url=url))
    monkeypatch.syspath_prepend(tmp_path)
    result = run("list", app=made)
    assert result.exit_code == code, result.output


@pytest.mark.core
def test_real_command_lists_a_lock(store: RedisStore, module: str, tmp_path: Path) -> None:
    take(store, "x.1", request_of("x"))
    command = [sys.executable, "-m", "celery", "-A", module, "dlock", "list"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split("\t")[:4] == [NAME.text, "held", "app.post", "x"]


@pytest.mark.core
def test_import_of_the_command_line_imports_only_click_beside_celery() -> None:
    """Every ``celery`` command imports it."""
    program = "import sys, celery_dlock.cli; print('redis' in sys.modules, 'celery_dlock.control' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]


def test_no_command_prints_arguments_of_a_waiter(store: RedisStore, run: Run) -> None:
    queue.take(store, "h.1", "h", NAME)
    queue.park(store, "w.1", "w", NAME, entry=queue.entry_of("w", body='{"body": "s3cret"}'))
    texts = [run(*words).output for words in (("queue",), ("show", NAME.text), ("explain", "w"), ("list",))]
    assert not any("s3cret" in text for text in texts)
