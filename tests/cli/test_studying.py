"""`simulate`: traffic in virtual time."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli import output
from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend, Config
from anvil_mux.lab import plot, study
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import POLICIES
from anvil_mux.telemetry import eventlog
from tests.cli.demo import compose, mux

__all__ = ["mux"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["simulate", "--json", *words]) == 0
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return told


def event_log(file: Path, config: Config, log: Sequence[Event]) -> str:
    with file.open("wb") as opened:
        writer = eventlog.EventLog(opened.fileno(), eventlog.header(config, 0.0))
        for event in log:
            writer.append(event)
        writer.close()
    return str(file)


UNLIMITED = "slower_each=0,at_once=inf"
"""Engines whose answers all take as long as alone."""


WORLD = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))), policy="eager")
EVENTS = simulate(WORLD, [Arrival(1.0, "a", 4.0), Arrival(2.0, "b", 1.0)], Engines({"a": 3.0, "b": 6.0}))


def test_simulate_compares_policies_on_profiles(capsys):
    words = ["simulate", "--profile", "bursty,mixed", "--policy", "eager,debounce", "--seeds", "2"]
    assert main([*words, "--batching", UNLIMITED]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [tuple(row[:3]) for row in rows] == [
        ("bursty", "eager", "1"),
        ("bursty", "debounce", "1"),
        ("mixed", "eager", "2"),
        ("mixed", "debounce", "2"),
    ]
    bursty = dict(zip(head, rows[0], strict=True))
    assert (bursty["SWAPS"], bursty["WAIT"], bursty["MAKESPAN"]) == ("3", "5.25", "23.0")


def test_simulate_alone_runs_all_profiles(monkeypatch, capsys):
    monkeypatch.setattr(study, "PROFILES", {name: study.PROFILES[name] for name in ("single", "dominant")})
    assert main(["simulate", "--policy", "eager"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["single", "dominant"]


def test_simulate_in_json_has_an_object_for_each_run(capsys):
    rows = simulated(capsys, "--profile", "single,mixed", "--policy", "all", "--seeds", "2")
    assert [(row["profile"], row["seed"], row["policy"]) for row in rows] == [
        (profile, seed, policy)
        for profile, seed in (("single", 0), ("mixed", 0), ("mixed", 1))
        for policy in POLICIES
    ]
    assert rows[0].keys() >= {
        *("profile", "policy", "seed", "requests", "swaps", "makespan_seconds", "swap_seconds"),
        *("wait_mean_seconds", "wait_p50_seconds", "wait_p95_seconds", "wait_max_seconds"),
        *("busy_fraction", "violations"),
    }
    assert {row["violations"] for row in rows} == {0}


def test_simulate_takes_the_settings_of_a_compose_file(tmp_path, capsys):
    file = compose(tmp_path, policy={"name": "debounce", "quiet": 4})
    words = ("--profile", "bursty", "--policy", "debounce,eager", "--batching", UNLIMITED)
    patient, eager = simulated(capsys, str(file), *words)
    assert (patient["makespan_seconds"], eager["makespan_seconds"]) == (23.0 + 3 * 4.0, 23.0)


def test_simulate_runs_a_profile_on_the_models_of_a_compose_file(tmp_path, capsys):
    file = str(compose(tmp_path, "small", "large"))
    words = (file, "--profile", "bursty", "--policy", "eager", "--batching", UNLIMITED)
    [row] = simulated(capsys, *words, "--model", "a=small", "--model", "b=large")
    assert (row["swaps"], row["makespan_seconds"]) == (3, 23.0)
    [row] = simulated(capsys, *words, "--model", "small")
    assert (row["swaps"], row["makespan_seconds"]) == (0, 4 * 0.5)
    assert main(["simulate", *words]) == 1
    assert capsys.readouterr().err == (
        "anvil-mux: error: bursty asks for a, b; the backends serve large, small only: "
        "say with --model a=NAME --model b=NAME which to take\n"
    )
    assert main(["simulate", *words, "--model", "a=small", "--model", "b=big"]) == 1
    assert "bursty asks for big; " in capsys.readouterr().err


def test_simulate_runs_a_trace_on_the_backends_of_a_compose_file(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    header = {"workload": "t", "models": {"a": {"load_seconds": 3}, "b": {"load_seconds": 9}}}
    lines = [header, *({"at": n, "model": model, "seconds": 1} for n, model in enumerate("ab"))]
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ("--trace", str(trace), "--policy", "eager")
    assert simulated(capsys, *words)[0]["makespan_seconds"] == 3.0 + 1.0 + 9.0 + 1.0
    file = compose(tmp_path, "a", "b")
    apart = yaml.safe_load(file.read_text())
    apart["services"]["b"]["x-anvil"]["gpus"] = ["1"]
    file.write_text(yaml.safe_dump(apart))
    assert simulated(capsys, str(file), *words)[0]["makespan_seconds"] == 1.0 + 9.0 + 1.0
    assert main(["simulate", str(compose(tmp_path, "x")), *words]) == 1
    assert "t.jsonl asks for a, b; the backends serve x only" in capsys.readouterr().err


def test_simulate_makes_answers_as_engines_do_at_once(tmp_path, capsys):
    words = ("--profile", "single", "--policy", "eager")
    usual, four, none = (
        simulated(capsys, *words, *more)[0]["makespan_seconds"]
        for more in ((), ("--batching", "at_once=4"), ("--batching", UNLIMITED))
    )
    assert none == 0.5
    assert none < usual < four < 0.5 * 40
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILED))
    [measured] = simulated(capsys, *words, "--engine-profile", str(file))
    # By the profile a step takes 7.5 ms, and 0.5 ms for each request.
    assert measured["makespan_seconds"] == pytest.approx(0.5 * (1 + 39 / 16), rel=0.02)
    llamacpp = yaml.safe_load(compose(tmp_path, "a").read_text())
    llamacpp["services"]["a"]["x-anvil"]["engine"] = "llamacpp"
    (tmp_path / "llamacpp.yaml").write_text(yaml.safe_dump(llamacpp))
    [slots] = simulated(capsys, str(tmp_path / "llamacpp.yaml"), *words, "--model", "a")
    assert slots["makespan_seconds"] == pytest.approx(four)


def test_simulate_tells_where_policies_knew_what_swaps_cost(capsys):
    words = ["--profile", "balanced", "--policy", "cost_aware"]
    [learning] = simulated(capsys, *words)
    [knowing] = simulated(capsys, *words, "--known-costs")
    assert ("known_costs" in learning, knowing["known_costs"]) == (False, True)
    assert main(["simulate", *words, "--known-costs"]) == 0
    assert "cost_aware, known costs" in capsys.readouterr().out


def test_simulate_compares_evictions_where_several_models_fit(tmp_path, capsys):
    often = [("often", 10.0 + n) for n in range(20)]
    asked = [*often, ("seldom", 31.0), ("other", 35.0), ("often", 40.0), ("often", 41.0)]
    models = {name: {"load_seconds": 2} for name in ("often", "seldom", "other")}
    lines = [{"workload": "t", "models": models}]
    lines += [{"at": at, "model": model, "seconds": 0.5} for model, at in asked]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    services = {name: {"command": "x", "x-anvil": {"gpus": ["0"], "vram": "4GiB"}} for name in models}
    top = {"runtime": "process", "gpus": {"0": {"vram": "10GiB"}}, "eviction": "lru"}
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": top, "services": services}))
    words = (str(file), "--trace", str(tmp_path / "t.jsonl"), "--policy", "eager")
    rows = simulated(capsys, *words, "--eviction", "lru,cost")
    assert [(row["policy"], row["eviction"], row["violations"]) for row in rows] == [
        ("eager", "lru", 0),
        ("eager", "cost", 0),
    ]
    by_lru, by_cost = rows
    assert by_cost["swaps"] < by_lru["swaps"], "often was used longest ago, and is asked for again"
    assert "eviction" not in simulated(capsys, *words)[0]
    assert main(["simulate", *words, "--eviction", "lru,cost"]) == 0
    _, one, other = capsys.readouterr().out.splitlines()
    assert ("eager, lru" in one, "eager, cost" in other) == (True, True)


def test_simulate_routing_runs_prompts_on_replicas(capsys, tmp_path):
    words = ["--routing", "--trace", "claude_code_le64k", "--sessions", "5,10", "--replicas", "2"]
    words += ["--policy", "round_robin,least_delay", "--seeds", "2", "--engine", "kv_tokens=200000"]
    rows = simulated(capsys, *words, "--csv", str(tmp_path / "runs.csv"))
    named = [(row["sessions"], row["seed"], row["policy"], row["default"]) for row in rows]
    assert named == [
        (sessions, seed, policy, policy == "least_delay")
        for sessions in (5, 10)
        for seed in (0, 1)
        for policy in ("round_robin", "least_delay")
    ]
    assert {row["replicas"] for row in rows} == {2}
    assert (tmp_path / "runs.csv").read_text().count("\n") == 1 + len(rows)
    assert main(["simulate", *words]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4
    assert "longer in 2 of 2" in table[1]


def test_simulate_routing_takes_the_policies_of_a_compose_file(capsys, tmp_path):
    file = compose(tmp_path, routing={"policies": {"mine": {"selector": "round_robin"}}})
    words = ["--routing", "--trace", "claude_code_le64k", "--sessions", "5", "--policy", "mine,round_robin"]
    mine, shipped = simulated(capsys, str(file), *words)
    assert mine["policy"] == "mine"
    assert mine["ttft_mean_ms"] == shipped["ttft_mean_ms"]


PROFILED = {
    "metadata": {"max_num_batched_tokens": 8192},
    "ttft": {"results": [{"tokens_num": 8192, "p50": 600}, {"tokens_num": 65_536, "p50": 15_000}]},
    "tpot": {
        "results": [
            {"batch_size": 1, "tokens_per_request": 8192, "p50": 8},
            {"batch_size": 64, "tokens_per_request": 8192, "p50": 40},
        ]
    },
}


def test_simulate_routing_draws_the_means(tmp_path):
    pytest.importorskip("matplotlib")
    file = str(tmp_path / "routing.svg")
    words = ["--routing", "--trace", "claude_code_le64k", "--sessions", "5", "--policy", "least_delay,sticky"]
    assert main(["simulate", *words, "--plot", file]) == 0
    assert Path(file).stat().st_size > 1000


def test_simulate_routing_tells_who_keeps_objectives(capsys, tmp_path):
    words = ["--routing", "--trace", "claude_code_le64k", "--sessions", "20", "--policy", "sticky"]
    [plain] = simulated(capsys, *words)
    assert "slo" not in plain
    [strict] = simulated(capsys, *words, "--slo", "ttft=1,tpot=0.05")
    assert strict["ttft_p50_ms"] == plain["ttft_p50_ms"] < 1000
    assert 0.5 < strict["slo"] <= strict["slo_ttft"] < 1
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILED))
    words[-1] = "sticky,slo"
    measured, predicting = simulated(capsys, *words, "--engine-profile", str(file))
    assert measured["ttft_p50_ms"] != plain["ttft_p50_ms"]
    assert (measured["refused"], predicting["refused"] > 0) == (0, True)  # longer ones were not measured
    file.write_text("{}")
    with pytest.raises(SystemExit):
        main(["simulate", *words, "--engine-profile", str(file)])
    assert f"argument --engine-profile: {file} must hold ttft.results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--routing"], "it takes --trace"),
        (["--routing", "--trace", "x", "--profile", "single"], "no --profile"),
        (["--routing", "--trace", "x", "--eviction", "lru"], "no --profile, --log or --eviction"),
        (
            ["--profile", "single", "--eviction", "dice"],
            "unknown eviction 'dice'; known: cost, lru, ",
        ),
        (["--routing", "--trace", "x", "--policy", "lru"], "argument --policy: unknown routing policy lru"),
        (["--routing", "--trace", "x", "--engine", "gpu=1"], "unknown setting 'gpu' of an engine"),
        (["--profile", "single", "--replicas", "2"], "--replicas is for --routing"),
        (["--profile", "single", "--slo", "ttft=6"], "--slo is for --routing"),
        (["--profile", "single", "--batching", "slots=4"], "argument --batching: unknown part 'slots'"),
        (["--routing", "--trace", "x", "--batching", "at_once=4"], "are not for --routing"),
        (["--routing", "--trace", "x", "--known-costs"], "are not for --routing"),
        (["--profile", "single", "--model", "small"], "--model is for a compose file"),
        (["--routing", "--trace", "x", "--model", "small"], "--routing has one model"),
        (["--routing", "--trace", "x", "--slo", "e2e=6"], "argument --slo: unknown objective 'e2e'"),
        (["--profile", "single", "--policy", "nothing"], "argument --policy: "),
    ],
)
def test_simulate_says_what_does_not_go_together(capsys, words, problem):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *words])
    assert exit_.value.code == 2
    assert problem in capsys.readouterr().err


def test_simulate_tells_what_another_policy_would_have_done(tmp_path, capsys):
    log = event_log(tmp_path / "events", WORLD, EVENTS)
    was, eager, late = simulated(capsys, "--log", log, "--policy", "eager,time_slice")
    assert (was["policy"], was["violations"]) == ("(as logged)", None)
    figures = {key for key in was if key not in ("policy", "violations")}
    assert {key: was[key] for key in figures} == {key: eager[key] for key in figures}
    assert late["wait_mean_seconds"] > was["wait_mean_seconds"]


def test_simulate_checks_a_log_and_fails_if_it_is_broken(tmp_path, capsys):
    sound = event_log(tmp_path / "sound", WORLD, EVENTS)
    [was] = simulated(capsys, "--log", sound, "--check")
    assert was["violations"] == 0
    broken = event_log(tmp_path / "broken", WORLD, [e for e in EVENTS if e.kind != "draining"])
    assert main(["simulate", "--log", broken, "--check"]) == 1
    seen = capsys.readouterr()
    assert seen.out.splitlines()[1].split()[-1] == "1"
    assert "broken invariant: 8.000000 evicting a: it was ready" in seen.err


def test_simulate_draws_one_picture_of_all_policies(monkeypatch, capsys):
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "draw", lambda runs, path: drawn.append((path, runs)))
    words = ("--profile", "mixed", "--seeds", "2", "--policy", "eager,debounce", "--plot", "mixed.svg")
    rows = simulated(capsys, *words)
    [(path, runs)] = drawn
    assert (path, [title for title, _, _, _ in runs]) == (
        "mixed.svg",
        ["mixed, eager, seed 0", "mixed, debounce, seed 0"],
    )
    assert sum(event.kind == "loading" for event in runs[0][1]) == rows[0]["swaps"]
    assert runs[0][2].policy == "eager"


def test_a_picture_that_cannot_be_drawn_is_said_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr(study, "study", lambda *_, **__: pytest.fail("it runs"))
    assert main(["simulate", "--profile", "single", "--plot", "picture.bmp"]) == 1
    assert "must end in .png, .svg or .pdf" in capsys.readouterr().err


def test_whoever_sees_that_a_simulation_takes_long_is_told_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(output, "PROGRESS_SECONDS", -1.0)
    words = ["simulate", "--profile", "single,bursty", "--policy", "eager"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().err == "anvil-mux: 1 of 2 runs\nanvil-mux: 2 of 2 runs\n"


def test_only_a_picture_needs_matplotlib(monkeypatch, tmp_path, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "--profile", "single"]) == 0
    capsys.readouterr()
    assert main(["simulate", "--profile", "single", "--plot", str(tmp_path / "p.svg")]) == 1
    assert "pip install 'anvil-mux[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--profile", "nope"], "unknown profile 'nope'; known: single,"),
        (["--profile", "single", "--policy", "nope"], "unknown policy 'nope'; known: eager,"),
        (["--profile", "single", "--seeds", "0"], "must be a whole number of at least 1, not 0"),
        (["--profile", "single", "--clients", "4+4"], "are for --profile clients"),
        (["--profile", "clients", "--clients", "4+"], "must be how many clients each model has, as 4+4"),
        (["--profile", "clients", "--think", "-1"], "must be seconds, or a time such as 30s or 2m, not '-1'"),
        (
            ["--profile", "clients", "--load", "nan"],
            "must be seconds, or a time such as 30s or 2m, not 'nan'",
        ),
        (["--profile", "single", "--check"], "--check is for what --log names"),
    ],
)
def test_wrong_usage_of_simulate_is_told(words, problem, capsys):
    with pytest.raises(SystemExit) as left:
        main(["simulate", *words])
    assert left.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("source", ["--trace", "--log"])
def test_simulate_says_plainly_that_a_file_is_missing(source, capsys):
    assert main(["simulate", source, "nowhere.jsonl"]) == 1
    seen = capsys.readouterr()
    assert (seen.out, "nowhere.jsonl: " in seen.err, seen.err.count("\n")) == ("", True, 1)
