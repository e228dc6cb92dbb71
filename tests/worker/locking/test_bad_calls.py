"""Calls without a lock name fail clearly and alone; wrong options and settings are refused where they stand."""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
from celery import Celery
from celery.utils import uuid

from celery_dlock import InvalidLockOptions, LockOptions, SingletonTask, singleton_task
from celery_dlock.errors import LockKeyError
from celery_dlock.task.call_options import OPTIONS_HEADER
from celery_dlock.worker import SingletonStep
from tests.contract.hostile import Publisher
from tests.support.environments.policies import APP, running_environment, timed
from tests.support.polling import eventually
from tests.support.processes import ROOT

#: A set that kombu keeps in the broker's database.
SET = "_kombu.binding.celery"


def bill(*orders):
    """A body that is not run."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("bad_calls")) as made:
        yield made


class TestCalls:
    @pytest.mark.core
    @pytest.mark.parametrize(
        ("name", "args", "kwargs", "said"),
        [
            pytest.param("policies.skips", (), {}, "missing a required argument: 'n'", id="too few"),
            pytest.param("policies.skips", (1, 2, 3, 4, 5, 6), {}, "too many positional arguments", id="too many"),
            pytest.param("policies.skips", (1,), {"who": 1}, "got an unexpected keyword argument 'who'", id="unknown"),
            pytest.param("policies.key_raises", (1,), {}, "KeyError", id="key raises"),
            pytest.param("policies.key_is_none", (1,), {}, "NoneType", id="key gives None"),
            pytest.param("policies.key_is_int", (1,), {}, "int", id="key gives an int"),
            pytest.param("policies.key_is_empty", (1,), {}, "empty", id="key gives nothing"),
            pytest.param("policies.defaults", ({"o": "p"},), {}, "no stable form", id="no stable form"),
        ],
    )
    def test_a_call_without_a_lock_name_fails_with_a_clear_error_and_harms_nothing(
        self, environment, tasks, name, args, kwargs, said
    ):
        children = set(environment.worker.children())
        options = {}
        if name == "policies.defaults":
            args, options = (timedelta.max.__class__,), {"serializer": "pickle"}  # a class has no stable form
        failed = environment.app.send_task(name, args, kwargs, **options)
        _, error = timed(lambda: failed.get(timeout=10))
        assert type(error) is LockKeyError
        assert name in str(error)
        assert said in str(error)
        assert failed.state == "FAILURE"
        environment.wait_until_drained()
        assert not [key for key in environment.records() if name in key]
        assert set(environment.worker.children()) == children
        n = environment.fresh()
        assert tasks.skips.delay(n).get(timeout=10) == n

    @pytest.mark.parametrize(
        "options", [{"key": "payroll", "scope": "shared"}, {"min_hold": 31_000_000}, {"ttl": 86_400}]
    )
    def test_a_forged_option_beyond_the_bounds_of_its_task_fails_alone(self, environment, tasks, options):
        header = {"task": "policies.skips", "options": json.dumps(options)}
        n = environment.fresh()
        failed = environment.app.send_task("policies.skips", (n,), headers={OPTIONS_HEADER: header})
        _, error = timed(lambda: failed.get(timeout=10))
        assert type(error) is InvalidLockOptions
        assert f"dlock: invalid {'scope' if 'scope' in options else next(iter(options))}=" in str(error)
        assert "dlock_call_options" in str(error)
        assert not environment.locked(tasks.skips, n)
        assert tasks.skips.delay(n).get(timeout=10) == n

    @pytest.mark.core
    @pytest.mark.parametrize("name", ["retries", "retries_late", "queues", "comes_back_late"])
    def test_forged_queue_header_blocks_no_name_and_no_worker(self, environment, tasks, name):
        """Over Redis a publisher may name the key of a set. No message can be published or requeued there."""
        n, task_id, dies = environment.fresh(), uuid(), name == "comes_back_late"
        message = Publisher(0).valid()
        message["headers"] |= {"task": f"policies.{name}", "id": task_id}
        message["properties"] |= {"delivery_tag": task_id, "delivery_info": {"exchange": "", "routing_key": SET}}
        message["body"] = json.dumps([[n, "", "die" if dies else ""], {}, {}])
        task = getattr(tasks, name)
        holding = None if dies else environment.hold(task, n)
        environment.broker.lpush("celery", json.dumps(message))
        if dies:
            environment.wait_for_line(task_id, "is lost: the broker cannot requeue it")
        else:
            environment.wait_for_line(task_id, "is republished|is parked")
            assert holding.end() == n
            eventually(lambda: environment.state(task_id) == "SUCCESS")
        assert task.delay(n).get(timeout=10) == n
        assert environment.worker.running
        environment.wait_until_drained()

    def test_no_error_shows_an_argument(self, environment, tasks):
        failed = environment.app.send_task("policies.key_raises", ("s3cret",))
        failed.get(timeout=10, propagate=False)
        assert "s3cret" not in str(failed.result)

    def test_hooks_of_a_failure_run(self, environment, tasks):
        failed = environment.app.send_task("policies.skips", ())
        failed.get(timeout=10, propagate=False)
        eventually(lambda: len(environment.history(id=failed.id)) == 3)
        assert {fact["what"] for fact in environment.history(id=failed.id)} == {
            "on_failure",
            "after_return",
            "task_failure",
        }


OPTIONS = [
    ("ttl", 0.5, "1 to"),
    ("ttl", "30", "seconds"),
    ("ttl", True, "seconds"),
    ("ttl", float("nan"), "1 to"),
    ("ttl", timedelta(0), "1 to"),
    ("on_conflict", "drop", "'skip', 'retry', 'queue', 'raise' or 'replace'"),
    ("on_conflict", None, "'skip'"),
    ("scope", "global", "'task' or 'shared'"),
    ("scope", "shared", "key"),
    ("key", "", "template"),
    ("key", 7, "template"),
    ("key", [], "sequence of argument names"),
    ("key", [1], "sequence of argument names"),
    ("key", ["nobody"], "nobody"),
    ("key", "{nobody}", "nobody"),
    ("retry_delay", -1, "0.01"),
    ("retry_delay", 90, "retry_delay"),
    ("retry_delay_max", 0, "0.01"),
    ("retry_limit", -1, "at least 0"),
    ("retry_limit", 1.5, "whole number"),
    ("wait", -1, "0 to"),
    ("once_per", 0, "0.001"),
    ("once_per", "1d", "seconds"),
]


class TestOptions:
    @pytest.mark.parametrize(("option", "value", "allowed"), OPTIONS)
    def test_invalid_value_is_refused_at_definition_with_task_option_and_expected_values(self, option, value, allowed):
        app = Celery("here", set_as_current=False)
        with pytest.raises(InvalidLockOptions) as raised:
            singleton_task(app=app, name="shop.bill", **{option: value})(bill)

        message = str(raised.value)
        assert "shop.bill" in message
        assert option in message
        if option != "key" or not value or value == 7:
            assert repr(value) in message or str(value) in message
        assert allowed in message

    def test_an_unknown_keyword_is_refused_by_name(self):
        app = Celery("here", set_as_current=False)
        with pytest.raises(InvalidLockOptions, match=r"shop\.bill.*'on_conflct'.*on_conflict"):
            singleton_task(app=app, name="shop.bill", on_conflct="skip")(bill)

    @pytest.mark.parametrize(
        ("given", "meant"), [("tll", "ttl"), ("ignore_results", "ignore_result"), ("max_retris", "max_retries")]
    )
    def test_unknown_keyword_gets_a_suggestion_from_ours_or_celerys(self, given, meant):
        app = Celery("here", set_as_current=False)
        with pytest.raises(InvalidLockOptions, match=rf"shop\.bill.*'{given}' \(did you mean '{meant}'\?\)"):
            singleton_task(app=app, name="shop.bill", **{given: 1})(bill)

    def test_a_shared_task_is_checked_at_its_definition_too(self):
        with pytest.raises(InvalidLockOptions, match=r"shop\.bill.*nobody"):
            singleton_task(name="shop.bill", key=["nobody"])(bill)

    def test_an_option_beside_lock_options_is_refused_with_the_way_to_give_it(self):
        """Celery would make a class attribute of it, which says nothing to us: a lock over other arguments."""
        app = Celery("here", set_as_current=False)
        with pytest.raises(InvalidLockOptions, match=r"shop\.bill': misplaced ttl=9.* lock_options=LockOptions\(ttl="):
            app.task(base=SingletonTask, name="shop.bill", ttl=9, lazy=False)(bill)

    def test_an_option_as_class_attribute_is_refused_too(self):
        class Keyed(SingletonTask):
            name = "shop.keyed"
            key = "{index}"

        with pytest.raises(InvalidLockOptions, match=r"shop\.keyed': misplaced key='\{index\}'"):
            Keyed()

    def test_invalid_lock_options_are_refused_with_the_tasks_name(self):
        app = Celery("here", set_as_current=False)
        with pytest.raises(InvalidLockOptions, match=r"shop\.bill.*lock_options"):
            app.task(base=SingletonTask, name="shop.bill", lock_options={"ttl": 5}, lazy=False)(bill)

    @pytest.mark.parametrize("keyword", ["rate_limit", "acks_late", "max_retries", "autoretry_for", "bind"])
    def test_celerys_own_keywords_go_to_celery(self, keyword):
        app = Celery("here", set_as_current=False)
        value = {"rate_limit": "1/m", "max_retries": 1, "autoretry_for": (ValueError,)}.get(keyword, True)
        made = singleton_task(app=app, name="shop.bill", **{keyword: value})(bill)
        assert made.name == "shop.bill"

    def test_timedelta_is_accepted_for_seconds(self):
        options = LockOptions(ttl=timedelta(seconds=5), once_per=timedelta(days=1))
        assert (options.ttl, options.once_per) == (5.0, 86400.0)


class TestSettings:
    @pytest.mark.parametrize(
        ("conf", "said"),
        [
            pytest.param({"dlock_tll": 5}, r"unknown setting 'dlock_tll'.*dlock_ttl", marks=pytest.mark.core),
            ({"dlock_url": "mongodb://u:s3cret@h/0"}, r"invalid dlock_url=.*: expected .*redis://"),
        ],
        ids=["unknown", "url"],
    )
    def test_invalid_setting_stops_the_worker_at_its_start(self, redis_url, conf, said):
        environ = {
            "DLOCK_TEST_BROKER_URL": redis_url,
            "DLOCK_TEST_RESULT_URL": redis_url,
            "DLOCK_TEST_LOCK_URL": redis_url,
            "DLOCK_TEST_CONF": json.dumps(conf),
            "C_FORCE_ROOT": "1",
        }
        command = [sys.executable, "-m", "celery", "-A", APP, "worker", "-P", "solo"]
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
        )
        output = ended.stdout + ended.stderr
        assert ended.returncode != 0, output
        assert re.search(said, output), output
        assert "s3cret" not in output
        assert " ready." not in output

    @pytest.mark.parametrize(
        ("conf", "said"),
        [
            ({"dlock_ttl": 0}, r"invalid dlock_ttl=0: expected"),
            ({"dlock_prefix": "a{b}"}, r"invalid dlock_prefix='a\{b\}': expected"),
            ({"dlock_url": 7}, r"invalid dlock_url=<int>: expected"),
        ],
        ids=["ttl", "prefix", "no url"],
    )
    def test_invalid_setting_stops_an_embedded_worker(self, redis_url, conf, said):
        app = Celery("here", broker=redis_url, set_as_current=False)
        app.conf.update(conf)
        singleton_task(app=app, name="shop.bill")(bill)
        worker = type("Embedded", (), {"app": app})()
        with pytest.raises(InvalidLockOptions, match=said):
            SingletonStep(worker).include_if(worker)

    def test_worker_without_any_redis_says_to_set_dlock_url(self, tmp_path):
        app = Celery("here", broker="amqp://guest:s3cret@nowhere//", backend="rpc://", set_as_current=False)
        task = singleton_task(app=app, name="shop.bill")(bill)
        with pytest.raises(InvalidLockOptions, match="set dlock_url") as raised:
            task.lock_for().locked()
        assert "s3cret" not in str(raised.value)
