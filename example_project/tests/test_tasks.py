"""Every branch of the shop's tasks that a lock decides, without a server."""

import json
import smtplib
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from celery_dlock import LockLost, StoreUnavailable, UnknownOutcome
from celery_dlock.testing import DLockKit, assert_excludes, assert_locked, assert_runs_once, assert_separate, run_beats
from example_project.shop import tasks
from example_project.shop.app import app


class Outbox:
    """A mail server and an SMS gateway that only remember."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.keys: list[str] = []
        self.error: Exception | None = None

    def __call__(self, *_address: Any, **_options: Any) -> Any:  # as smtplib.SMTP is called
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def send_message(self, mail: Any) -> None:
        assert_locked()  # no mail without the lock of its number
        self.mails.append(mail["To"])

    def open(self, request: urllib.request.Request, **_options: Any) -> Any:
        self.keys.append(request.headers["Idempotency-key"])
        if self.error:
            raise self.error
        return nullcontext()


class Ledgers:
    """Redis lists, in a dict."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def lindex(self, name: str, place: int) -> str | None:
        return self.lines[name][place] if name in self.lines else None

    def rpush(self, name: str, line: str) -> None:
        self.lines.setdefault(name, []).append(line)

    def balances(self, account: str) -> list[int]:
        return [json.loads(line)["balance"] for line in self.lines.get(f"ledger:{account}", [])]


@pytest.fixture(autouse=True)
def outbox(monkeypatch: pytest.MonkeyPatch) -> Outbox:
    made = Outbox()
    monkeypatch.setattr(smtplib, "SMTP", made)
    monkeypatch.setattr(urllib.request, "urlopen", made.open)
    return made


@pytest.fixture(autouse=True)
def ledgers(monkeypatch: pytest.MonkeyPatch) -> Ledgers:
    made = Ledgers()
    monkeypatch.setattr(tasks, "ledgers", made)
    return made


@pytest.fixture(autouse=True)
def no_hour_of_sql(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_summarise", lambda part, seconds=0: None)


@pytest.fixture
def by_hand(dlock_app: Any) -> Iterator[DLockKit]:
    """Publish calls instead of running them: the test runs each message."""
    with DLockKit(dlock_app, eager=False) as kit:
        yield kit


# Keys: which calls exclude each other


def test_reports_of_one_year_exclude_each_other_and_two_years_do_not() -> None:
    assert_excludes(tasks.yearly_report.s(2026), tasks.yearly_report.s(year=2026))
    assert_separate(tasks.yearly_report.s(2026), tasks.yearly_report.s(2025))


# Skip


def test_yearly_report_is_skipped_while_another_worker_makes_it(dlock: DLockKit) -> None:
    with dlock.held(tasks.yearly_report, 2026):
        assert tasks.yearly_report.delay(2026).state == "REVOKED"
        assert tasks.yearly_report.delay(2025).state == "SUCCESS"
    assert [event.kind for event in dlock.events] == ["refused", "skipped", "acquired", "released"]


# Once


@pytest.mark.usefixtures("dlock")
def test_receipt_is_sent_once(outbox: Outbox) -> None:
    assert_runs_once(tasks.send_receipt, ("R-1", "ann@example.com"))
    assert outbox.mails == ["ann@example.com"]


def test_receipt_that_another_worker_has_sent_is_skipped(dlock: DLockKit, outbox: Outbox) -> None:
    dlock.used(tasks.send_receipt, "R-1", "ann@example.com")
    assert tasks.send_receipt.delay("R-1", "ann@example.com").state == "REVOKED"
    assert outbox.mails == []


def test_receipt_may_be_sent_again_after_an_hour(dlock: DLockKit) -> None:
    dlock.used(tasks.send_receipt, "R-1", "ann@example.com")
    dlock.travel(3600)
    assert tasks.send_receipt.delay("R-1", "ann@example.com").state == "SUCCESS"


# A crash


def test_receipt_whose_process_died_waits_for_an_operator(dlock: DLockKit, outbox: Outbox) -> None:
    dlock.crashed(tasks.send_receipt, "R-1", "ann@example.com")
    assert isinstance(tasks.send_receipt.delay("R-1", "ann@example.com").result, UnknownOutcome)
    tasks.send_receipt.resolve("R-1", "ann@example.com", sent=False)
    assert tasks.send_receipt.delay("R-1", "ann@example.com").state == "SUCCESS"
    assert outbox.mails == ["ann@example.com"]


@pytest.mark.usefixtures("dlock")
def test_sms_after_a_failure_has_the_idempotency_key_of_the_first(
    outbox: Outbox,
) -> None:
    outbox.error = OSError("the line went dead")
    assert tasks.send_sms.delay("S-1", "+441", "hello").state == "FAILURE"
    outbox.error = None
    assert tasks.send_sms.delay("S-1", "+441", "hello").state == "SUCCESS"
    assert outbox.keys[0] == outbox.keys[1] != ""


# A lost lease, and a store that is away


def test_report_stops_when_its_lease_is_lost(dlock: DLockKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_summarise", lambda part: dlock.lose(tasks.yearly_report, 2026))
    assert isinstance(tasks.yearly_report.delay(2026).result, LockLost)


def test_receipt_is_not_sent_while_the_lock_store_is_away(dlock: DLockKit, outbox: Outbox) -> None:
    with dlock.store_down():
        assert isinstance(tasks.send_receipt.delay("R-1", "ann@example.com").result, StoreUnavailable)
    assert outbox.mails == []


# Retry and queue: message by message


def test_rebuild_is_retried_until_it_gets_the_lock(by_hand: DLockKit) -> None:
    result = tasks.rebuild_index.delay("books", "B-1")
    with by_hand.held(tasks.rebuild_index, "books", "B-1"):
        assert by_hand.run_all() == 1
        assert result.state == "PENDING"
    by_hand.travel(5)
    by_hand.run_all()
    assert result.get(timeout=1) == "books: B-1"


def test_entries_of_an_account_are_posted_in_order(by_hand: DLockKit, ledgers: Ledgers) -> None:
    with by_hand.held(tasks.post_entry, "ann", 10):
        results = [tasks.post_entry.delay("ann", amount) for amount in (10, 20, 5)]
        by_hand.run_all()
        assert [waiter.task_id for waiter in by_hand.waiting(tasks.post_entry)] == [result.id for result in results]
        assert ledgers.balances("ann") == []
    by_hand.run_all()
    assert ledgers.balances("ann") == [10, 30, 35]


# At most two at a time


def test_label_is_printed_with_the_key_that_is_free(dlock: DLockKit) -> None:
    with dlock.held_seats(1, tasks.print_label, "O-1"):
        assert tasks.print_label.delay("O-1").get() == "O-1 by key B"


def test_labels_wait_while_both_connections_are_used(by_hand: DLockKit) -> None:
    with by_hand.held(tasks.print_label, "O-1"):
        results = [tasks.print_label.delay(order) for order in ("O-1", "O-2", "O-3")]
        by_hand.run_all()
        assert [waiter.task_id for waiter in by_hand.waiting(tasks.print_label)] == [result.id for result in results]
    by_hand.run_all()
    assert [result.get(timeout=1)[:3] for result in results] == ["O-1", "O-2", "O-3"]


# The newest one wins


def test_older_prices_stop_when_newer_ones_come(by_hand: DLockKit, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []

    def publish(part: str) -> None:
        published.append(part)
        by_hand.replace(tasks.publish_prices, "fr", {})

    monkeypatch.setattr(tasks, "_summarise", publish)
    older = tasks.publish_prices.delay("fr", {"book": 12, "pen": 2})
    by_hand.run_all()
    assert (older.state, published) == ("REVOKED", ["book in fr"])


def test_only_the_newest_of_the_waiting_prices_is_published(by_hand: DLockKit) -> None:
    with by_hand.held(tasks.publish_prices, "fr", {}):
        results = [tasks.publish_prices.delay("fr", {"book": price}) for price in (12, 13, 14)]
        by_hand.run_all()
    by_hand.run_all()
    assert [result.state for result in results] == ["REVOKED", "REVOKED", "SUCCESS"]


# The schedule


@pytest.mark.usefixtures("dlock")
def test_nightly_report_is_made_once_a_night_with_two_beats() -> None:
    nights = run_beats(app, n=2, hours=72)
    assert [sorted(night.states) for night in nights] == [["REVOKED", "SUCCESS"]] * 3
