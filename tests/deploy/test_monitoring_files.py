"""The dashboard and the alerting rules: every metric, label and value that they name is there."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastable.monitoring.metrics import METRICS, STATES, MetricKind
from tests.untyped import Parsed

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: Parsed = json.loads((DEPLOY / "grafana" / "elastable.json").read_text())
RULES = DEPLOY / "prometheus" / "elastable.rules.yml"
#: Of Prometheus itself, and of prometheus_client.
FOREIGN = {"instance", "le"}
PROCESS = {"process_resident_memory_bytes"}

_SELECTED = re.compile(r"\b((?:elastable|process)_\w+)(\{[^}]*\})?")
_GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def rules() -> list[Parsed]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, object]] = group["rules"]
    return found


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query")
    yield from (rule["expr"] for rule in rules())


def labels_of(name: str) -> set[str]:
    """Labels of a metric as it is queried; fails where there is none of that name."""
    if name in PROCESS:
        return set()
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if base != name and base in METRICS:
        assert METRICS[base].kind is MetricKind.HISTOGRAM, name
        return set(METRICS[base].labels)
    assert name in METRICS, f"there is no metric {name}"
    assert METRICS[name].kind is not MetricKind.HISTOGRAM, f"{name} needs _bucket, _sum or _count"
    return set(METRICS[name].labels)


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_metric_and_label_is_there(expression: str) -> None:
    selected = _SELECTED.findall(expression)
    assert selected
    known: set[str] = set(FOREIGN)
    for name, selector in selected:
        labels = labels_of(name)
        known |= labels
        asked = dict(re.findall(r"(\w+)[!=]=?~?\"([^\"]*)\"", selector))
        assert set(asked) <= labels | FOREIGN, (name, selector)
        assert asked.get("state") in {None, *STATES, "working", "idle", "gone"}
        assert asked.get("result") in {None, "written", "failed"}
    for group in _GROUPED.findall(expression):
        assert {label.strip() for label in group.split(",")} <= known, group


def test_a_name_that_is_not_there_would_be_found() -> None:
    with pytest.raises(AssertionError, match="no metric elastable_typos_total"):
        test_every_metric_and_label_is_there("rate(elastable_typos_total[1m])")
    with pytest.raises(AssertionError):
        test_every_metric_and_label_is_there('elastable_job_version{table="x"}')
    with pytest.raises(AssertionError, match="needs _bucket"):
        test_every_metric_and_label_is_there("rate(elastable_version_seconds[1m])")


def test_counters_are_asked_for_their_rate() -> None:
    whole = {"elastable_job_records_total"}  # progress is its value
    for expression in expressions():
        for name in re.findall(r"(?<![(\w])(elastable_\w+_total)\b", expression):
            assert name in whole, expression


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        it = panel["gridPos"]
        cells = {(x, y) for x in range(it["x"], it["x"] + it["w"]) for y in range(it["y"], it["y"] + it["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "$labels.instance" in rule["annotations"]["summary"]


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    """By `promtool` where it is installed; its syntax is read elsewhere by the tests above."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert yaml.safe_load(RULES.read_text())["groups"]
        return
    ran = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
