"""The files for Prometheus and Grafana name only metrics and labels that exist, and alerts fire as their tests say."""

import json
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_dlock.counters.catalog import METRICS
from tests.support.processes import ROOT

promql = pytest.importorskip("promql_parser", reason="installed in the main lane only")

ALERTS = ROOT / "celery_dlock/monitoring/alerts.yml"
DASHBOARD = ROOT / "celery_dlock/monitoring/grafana/celery-dlock.json"
#: Labels that Prometheus itself adds.
ADDED = {"job", "instance"}
#: What Grafana puts in place of its variables.
GRAFANA = {"$__rate_interval": "5m", "$job": ".*", "$task": ".*"}


def exported() -> dict[str, set[str]]:
    """Return the labels of each series that a scrape shows, by its name."""
    found: dict[str, set[str]] = {}
    for one in METRICS:
        labels = {*one.labels, *ADDED}
        if one.kind == "histogram":
            found |= {f"{one.exported}_{end}": labels for end in ("sum", "count")}
            found[f"{one.exported}_bucket"] = {*labels, "le"}
        else:
            found[one.exported] = labels
    return found


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the labels of each selector of an expression; "" and the labels of each grouping."""
    if isinstance(node, promql.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
        return
    modifier = getattr(node, "modifier", None)
    if modifier is not None:
        yield "", set(getattr(modifier, "labels", None) or [])
        matching = getattr(modifier, "matching", None)
        yield "", {*(matching.labels if matching else ()), *(getattr(modifier, "group_labels", None) or ())}
    for part in ("expr", "lhs", "rhs", "param"):
        if (inner := getattr(node, part, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def unknown_names(expression: str) -> list[str]:
    """Return what an expression names and no scrape shows: metrics, labels of a selector, and labels of a grouping."""
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    series, found = exported(), list(selectors(promql.parse(expression)))
    names = [name for name, _ in found if name]
    unknown = [name for name in names if name not in series]
    known: set[str] = set().union(*(series.get(name, set()) for name in names))
    for name, labels in found:
        unknown += sorted(labels - (series.get(name, set()) if name else known))
    return unknown


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("sum by (task) (rate(celery_dlock_acquired_total[5m]))", []),
        ("sum by (nobody) (celery_dlock_locks)", ["nobody"]),
        ('celery_dlock_locks{server="a"}', ["server"]),
        ("celery_dlock_acquired", ["celery_dlock_acquired"]),
        ("histogram_quantile(0.9, sum by (le) (celery_dlock_held_seconds_bucket))", []),
        ("celery_dlock_locks / on (cause) celery_dlock_waiting", ["cause"]),
    ],
)
def test_comparison_finds_unknown_metrics_and_labels(expression: str, unknown: list[str]) -> None:
    assert unknown_names(expression) == unknown


RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_alert_rules_name_exported_metrics_and_labels() -> None:
    assert len(RULES) == 13
    assert {rule["alert"]: unknown_names(rule["expr"]) for rule in RULES} == {rule["alert"]: [] for rule in RULES}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_alert_rule_says_what_to_do_and_links_a_section_of_the_guide(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    urls = dict(url.split(", ") for url in metadata("celery-dlock").get_all("Project-URL") or [])
    path, _, anchor = rule["annotations"]["runbook_url"].removeprefix(f"{urls['Source']}/blob/main/").partition("#")
    assert anchor in anchors(ROOT / path)


def test_each_alert_rule_has_a_test() -> None:
    groups = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text())["tests"]
    fired = {test["alertname"] for group in groups for test in group["alert_rule_test"] if test["exp_alerts"]}
    assert fired == {rule["alert"] for rule in RULES}


@pytest.mark.servers
def test_alert_rules_fire_as_their_tests_say() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yml"]
    told = subprocess.run(command, cwd=ALERTS.parent, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


def test_dashboard_names_exported_metrics_and_labels() -> None:
    assert [(expression, unknown) for expression in expressions() if (unknown := unknown_names(expression))] == []


def test_dashboard_shows_every_metric() -> None:
    shown = {name for text in expressions() for name in re.findall(r"celery_dlock_\w+", text)}
    shown = {name.removesuffix("_bucket") for name in shown}
    assert {one.exported for one in METRICS} - shown == set()


def test_dashboard_legends_name_labels_that_the_expression_keeps() -> None:
    for target in (target for panel in panels() for target in panel["targets"]):
        kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, target["expr"]


def test_dashboard_has_a_data_source_variable_that_each_panel_uses() -> None:
    board = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    source = {"type": "prometheus", "uid": "${datasource}"}
    used = [part["datasource"] for panel in panels() for part in (panel, *panel["targets"])]
    used += [variable["datasource"] for variable in variables.values() if variable["type"] == "query"]
    assert all(one == source for one in used)
    named = set(re.findall(r"\$(?!__)(\w+)", " ".join(expressions())))
    assert named == set(variables) - {"datasource"}


def test_dashboard_is_of_a_valid_schema_and_its_panels_do_not_overlap() -> None:
    """Grafana migrates older versions of the schema; 39 is that of Grafana 10.4, 41 that of Grafana 12."""
    board = json.loads(DASHBOARD.read_text())
    assert 36 <= board["schemaVersion"] <= 41
    assert board["id"] is None
    every = board["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    cells = [
        (x, y)
        for panel in every
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


@pytest.mark.servers
def test_prometheus_accepts_each_expression_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, so that Prometheus itself parses and type-checks them."""
    texts = expressions()
    for variable, value in GRAFANA.items():
        texts = [text.replace(variable, value) for text in texts]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = ["promtool", "check", "rules", "rules.yml"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{len(rules)} rules found" in told.stdout
