"""docs/metrics.md says what there is, and its questions are asked of metrics that exist."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from anvil_mux.host import levels
from anvil_mux.scheduler.events import SENTENCES
from anvil_mux.telemetry.metrics import Metrics
from tests.telemetry.test_metrics import CONFIG, nothing

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md").read_text()
QUERIES = [query.strip() for query in re.findall(r"^```promql\n(.*?)^```$", TEXT, re.M | re.S)]
SUFFIXES = {
    "counter": ["_total"],
    "info": ["_info"],
    "gauge": [""],
    "histogram": ["", "_sum", "_count", "_bucket"],
}


def rows(title: str) -> dict[str, list[str]]:
    """First cell of each row of a section's table, without its quotes -> the others."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {first.strip("`"): rest for first, *rest in cells}


def families() -> Iterator[tuple[str, set[str], list[str]]]:
    """Name, names of its series and labels of each metric."""
    for family in Metrics(CONFIG, nothing).collect():
        series = [family.name + suffix for suffix in SUFFIXES[family.type]]
        labels = list(family._labelnames)
        yield series[0], set(series), labels


def test_every_metric_is_there_with_its_labels():
    documented = {name: labels.split(", ") for name, (labels, _) in rows("Metrics").items()}
    documented["anvil_build_info"] = []  # its labels are its value
    documented["anvil_paused"] = []
    assert documented == {name: labels for name, _, labels in families()}


def test_whatever_is_named_exists():
    known = {name for _, series, _ in families() for name in series}
    assert set(re.findall(r"\banvil_\w+", TEXT)) <= known


@pytest.mark.parametrize("name", ["anvil_deferrals_total", "anvil_evictions_total"])
def test_every_cause_that_is_named_is_one(name):
    named = set(re.findall(r"`(\w+)`", rows("Metrics")[name][1]))
    assert named
    assert named <= {*SENTENCES, "swap", "cancelled"}


def test_there_are_five_questions():
    assert len(QUERIES) == 5


@pytest.mark.parametrize("query", QUERIES)
def test_a_question_asks_by_labels_that_its_metric_has(query):
    asked = set(re.findall(r"by \((\w+)\)|(\w+)!?=", query))
    [name] = re.findall(r"\b(anvil_\w+)[\[{]", query)
    [labels] = [labels for _, series, labels in families() if name in series]
    assert {label for pair in asked for label in pair if label} - {"le"} <= set(labels)


def test_every_phase_is_there():
    told = re.findall(r'phase\(backend, "(\w+)"\)', inspect.getsource(levels))
    assert rows("Phases of a swap").keys() == {"cooldown", "drain", *told}
