"""The page of the metrics, the alert rules and the board name metrics, labels and pages that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from schedtrace.record.metrics.families import ENGINE_LABELS, FAMILIES
from schedtrace.record.metrics.tally import NEXT_STEP

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
EXAMPLES = ROOT / "examples" / "observability"
RULES = yaml.safe_load((EXAMPLES / "rules.yml").read_text())["groups"][0]["rules"]
BOARD = json.loads((EXAMPLES / "dashboard.json").read_text())
BY_NAME = {family.full_name: family for family in FAMILIES}


def queries():
    yield from re.findall(r"\| `((?:sum|max) .+?)` \|$", PAGE, re.MULTILINE)
    yield from (rule["expr"] for rule in RULES if not rule["expr"].startswith("up{"))
    yield from (target["expr"] for panel in BOARD["panels"] for target in panel["targets"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_metric_is_on_the_page_with_its_type_label_and_values(family):
    label = f"`{family.label}`" if family.label else ""
    [row] = re.findall(rf"^\| `{family.full_name}` \| (.*) \|$", PAGE, re.MULTILINE)
    kind, named, meaning = re.split(r" ?\| ?", row, maxsplit=2)
    assert (kind, named) == (family.kind, label)
    if family.name != "stalled":
        assert [value for value in family.values or () if f"`{value}`" not in meaning] == []


@pytest.mark.parametrize("query", sorted({*queries()}))
def test_a_query_names_metrics_and_labels_that_exist(query):
    names = re.findall(r"schedtrace_\w+", query)
    assert names
    assert [name for name in names if name not in BY_NAME] == []
    labels = {BY_NAME[name].label for name in names} | {*ENGINE_LABELS}
    for grouped in re.findall(r"by \(([\w, ]+)\)", query):
        assert {*grouped.split(", ")} <= labels
    assert {*re.findall(r"[{,](\w+)!?=", query)} <= labels


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_runbook_is_a_page(rule):
    assert (ROOT / rule["annotations"]["runbook"]).is_file()


def test_each_alert_fires_on_its_own_load_and_is_asked_about_on_all_others():
    tests = yaml.safe_load((EXAMPLES / "rules_test.yml").read_text())["tests"]
    alerts = [rule["alert"] for rule in RULES]
    assert sorted(test["name"] for test in tests) == sorted(["healthy", *alerts])
    for test in tests:
        asked = {each["alertname"]: bool(each.get("exp_alerts")) for each in test["alert_rule_test"]}
        assert asked == {alert: alert == test["name"] for alert in alerts}


def test_the_files_that_compose_mounts_exist():
    services = yaml.safe_load((EXAMPLES / "compose.yml").read_text())["services"].values()
    mounted = [volume.split(":")[0] for service in services for volume in service.get("volumes", [])]
    assert [path for path in mounted if path.startswith("./") and not (EXAMPLES / path).is_file()] == []


def test_the_cause_before_the_first_step_is_on_the_page():
    assert f"`{NEXT_STEP}`" in PAGE


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool")
@pytest.mark.parametrize(
    "command", ["check rules rules.yml", "check config prometheus.yml", "test rules rules_test.yml"]
)
def test_promtool_accepts_the_rules(command):
    subprocess.run(["promtool", *command.split()], cwd=EXAMPLES, check=True, capture_output=True)  # noqa: S607  # from PATH
