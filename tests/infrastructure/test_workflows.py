"""The workflows run what a developer runs: targets of the Makefile, and every lane."""

from __future__ import annotations

import re

import yaml

from tests.support.processes import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
(LANES,) = (found.split() for found in re.findall(r"^LANES \?= (.*)$", MAKEFILE, re.MULTILINE))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_every_lane_of_make_test_is_a_job() -> None:
    assert WORKFLOWS["ci"]["jobs"]["lanes"]["strategy"]["matrix"]["lane"] == LANES


def test_each_make_target_of_the_workflows_exists() -> None:
    steps = [step for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [command for step in steps for command in re.findall(r"\bmake ([^\n&|]+)", step.get("run", ""))]
    targets = {word.strip('"') for command in commands for word in command.split() if "=" not in word}
    known = {target for rule in re.findall(r"^([\w-][\w -]*):(?!=)", MAKEFILE, re.MULTILINE) for target in rule.split()}
    known |= {"lane-$LANE", "venv-$LANE"}
    assert targets - known == {"python3", "python3-venv"}  # packages that are installed beside make
    assert {"lint", "types", "docs", "dist", "test-servers", "lane-$LANE"} <= targets


def test_each_action_is_pinned_by_commit_with_its_version() -> None:
    text = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []
