"""The workload files that come with the program are small, say where they come from, and can be run."""

import json
import lzma
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.lab.checker import check
from anvil_mux.lab.simulate import simulate
from anvil_mux.lab.workload import SHIPPED, SHIPPED_AS, find, read

FILES = sorted(SHIPPED.glob(SHIPPED_AS))
README = (SHIPPED / "README.md").read_text()
HOUR = 3600.0


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]


def each_file() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])


def test_there_are_two_kinds_of_workloads():
    names = [file.name for file in FILES]
    assert sum(name.startswith("servegen-") for name in names) >= 2
    assert sum(name.startswith("claude-code-") for name in names) >= 2


@each_file()
def test_a_file_is_small_and_says_what_it_is_where_it_comes_from_and_under_which_licence(file):
    header, *requests = lines(file)
    name = header["workload"]
    assert file == find(name)
    assert header["licence"] == "Apache-2.0"
    assert re.search(r"https://github\.com/\S+, commit [0-9a-f]{7}", header["source"])
    assert "load_seconds are ours" in header["about"]
    assert re.search(r"seed \d", header["about"])
    assert file.stat().st_size < 100_000
    [row] = [line for line in README.splitlines() if line.startswith(f"| `{name}` ")]
    assert row.split("|")[4].strip() == f"{len(requests):,}"


@each_file()
def test_moments_are_sorted_and_within_a_day(file):
    _, *requests = lines(file)
    moments = [request["at"] for request in requests if "at" in request]
    assert moments == sorted(moments)
    assert 0 <= moments[0] < HOUR
    assert moments[-1] < 12 * HOUR
    assert all(0 < request["seconds"] < 600 for request in requests)


@each_file()
def test_a_session_comes_in_one_piece_and_only_its_first_request_has_a_moment(file):
    _, *requests = lines(file)
    before: object = None
    done: set[object] = set()
    for request in requests:
        session = request.get("session")
        if session is None or session != before:
            assert "at" in request
            assert session is None or session not in done
        else:
            assert "at" not in request
            assert 0 <= request["think"] <= 300
        before = session
        done.add(session)


@each_file()
def test_every_model_is_asked_for_and_takes_between_three_and_forty_seconds_to_load(file):
    header, *requests = lines(file)
    loads = {model: about["load_seconds"] for model, about in header["models"].items()}
    assert {request["model"] for request in requests} == loads.keys()
    assert len(loads) >= 2
    assert all(3 <= seconds <= 40 for seconds in loads.values())
    assert set(header["resident"]) < loads.keys()


@each_file()
@pytest.mark.parametrize("policy", ["eager", "debounce"])
def test_a_file_runs_to_its_last_request_without_a_broken_invariant(file, policy):
    workload = read(file)
    config = replace(workload.config(), policy=policy)
    follow = workload.follow and workload.follow()
    log = simulate(
        config, workload.requests, workload.engines(config), resident=workload.resident, follow=follow
    )
    assert check(log, config) == []
    assert sum(event.kind in ("leased", "failed") for event in log) == len(lines(file)) - 1
    assert log[-1].at < 12 * HOUR
