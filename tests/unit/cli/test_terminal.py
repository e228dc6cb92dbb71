"""The tables of the command line on a terminal: their width and their colours."""

import pytest

from celery_dlock.cli.terminal import fitted, lines
from celery_dlock.reports.tables import LOCKS

NAMES = [fact.title.upper() for fact in LOCKS.columns]
LONG = [
    "shop.import_orders:customer-of-berlin:051f1ad011e9843e01d2818ac1dbddf2", "unknown, claimed", "shop.import_orders",
    "c5204506-506a-56fb-9bfd-ca0e0311b905", "celery@worker-7.shop.example.com", "2026-11-26T15:24:05.123+00:00", "3600",
    "1795708206839675", "120",
]  # fmt: skip
SHORT = ["a", "held", "t", "id", "w", "-", "1", "2", "3"]


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_long_table_fits_the_terminal_and_keeps_the_ends_of_texts(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    columns, rows = fitted(LOCKS.columns, [NAMES, LONG])
    head, line = lines(columns, rows)
    assert max(len(head), len(line)) <= width
    assert head.split() == ["NAME", "STATE", "TASK", "ID", "WORKER", "SINCE", "TIME", "LEFT", "WAITERS"]
    name, state, task_id, worker, since, left, waiters = rows[1]
    assert (state, since, left, waiters) == ("unknown, claimed", "11-26 15:24:05", "3600", "120")
    for shown, whole in ((name, LONG[0]), (task_id, LONG[3]), (worker, LONG[4])):
        begin, _, end = shown.partition("…")
        assert whole.startswith(begin)
        assert whole.endswith(end)
        assert abs(len(begin) - len(end)) <= 1


def test_table_that_fits_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    rows = [NAMES, SHORT]
    assert fitted(LOCKS.columns, rows) == (LOCKS.columns, rows)


def test_very_narrow_terminal_still_shows_seven_characters_of_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert [len(text) for text in fitted(LOCKS.columns, [LONG])[1][0]] == [7, 16, 7, 7, 14, 4, 3]


@pytest.mark.parametrize(("states", "code"), [("held", 32), ("kept", 33), ("unknown, claimed", 31), ("used", None)])
def test_states_have_colours_that_change_no_width(states: str, code: int | None) -> None:
    head, line = lines(LOCKS.columns, [NAMES, ["held", states, *SHORT[2:]]])
    assert "\x1b" not in head
    coloured = f"held  \x1b[{code}m{states}" if code else f"held  {states}"
    assert line.startswith(coloured)
    assert line.count("\x1b") == (2 if code else 0)  # the name "held" has no colour
    assert line.replace(f"\x1b[{code}m", "").replace("\x1b[0m", "").index(" t ") + 1 == head.index("TASK")


def test_no_color_removes_the_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b" in line for line in lines(LOCKS.columns, [NAMES, SHORT]))
