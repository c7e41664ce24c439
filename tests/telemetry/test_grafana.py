"""The dashboard and the alert rules ask for metrics that exist, by labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.telemetry.test_metrics_docs import families

FOLDER = Path(__file__).resolve().parent.parent.parent / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "anvil-mux.json").read_text())
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS: dict[str, list[str]] = {
    panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]
}
ALERTS: dict[str, str] = {rule["alert"]: rule["expr"] for rule in RULES}
ASKED = [query for queries in PANELS.values() for query in queries] + list(ALERTS.values())
OF_PROMETHEUS = {"instance", "job"}
"""Labels that it puts on every series itself."""


@pytest.mark.parametrize("query", ASKED)
def test_a_query_names_metrics_and_labels_that_exist(query):
    known = {name: set(labels) for _, series, labels in families() for name in series}
    asked = re.findall(r"\b(anvil_\w+)(?:\{(.*?)\})?", query)
    labels: set[str] = set()
    for name, matchers in asked:
        assert set(re.findall(r"(\w+)(?:=~|!=|=)\"", matchers)) <= known[name] | OF_PROMETHEUS
        labels |= known[name]
    grouped = {label.strip() for group in re.findall(r"by \((.*?)\)", query) for label in group.split(",")}
    assert grouped <= labels | OF_PROMETHEUS | {"le"}


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_legend_names_labels_that_its_query_keeps(panel):
    known = {name: set(labels) for _, series, labels in families() for name in series}
    for target in panel["targets"]:
        query, named = target["expr"], set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = re.findall(r"by \((.*?)\)", query)
        [name] = set(re.findall(r"\b(anvil_\w+)", query)) - {"anvil_gpu_residents"}
        assert named <= (set(grouped[0].split(", ")) if grouped else known[name])


def test_a_dashboard_can_be_imported_beside_others():
    assert (DASHBOARD["id"], DASHBOARD["uid"]) == (None, "anvil-mux")
    assert [each["name"] for each in DASHBOARD["__inputs"]] == ["DS_PROMETHEUS"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_no_panel_lies_on_another():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
