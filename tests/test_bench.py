"""The benchmark of swaps: its figures from literal logs, and the command on demo engines."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux import bench, config
from anvil_mux.bench import Swap, Told
from anvil_mux.cli import main
from anvil_mux.config import Backend, Config, Gpu
from anvil_mux.errors import BackendError
from anvil_mux.process import ProcessRuntime
from anvil_mux.residency import Event
from tests.running import serving

ROOT = Path(__file__).resolve().parent.parent

# Figures

LOG = [
    Event(7.0, "leased", "a", "a", 1, 1),
    Event(8.0, "draining", "a", "a", target="b"),
    Event(8.5, "queued", "b", ticket=2, size=1),
    Event(10.0, "released", "a", "a", 1),
    Event(10.5, "stopping", "a", "a"),
    Event(12.0, "empty", "a", "a"),
    Event(12.0, "starting", "b", "b"),
    Event(20.0, "ready", "b", "b", seconds=8.0),
    Event(20.0, "leased", "b", "b", 2, 1),
    Event(23.0, "released", "b", "b", 2),
]


def test_phases_follow_each_other_from_the_last_leases_end_to_the_first_byte() -> None:
    assert bench.phases(LOG, 21.0) == {"drain": 0.5, "evict": 1.5, "load": 8.0, "first_token": 1.0}


def test_what_the_mechanism_tells_is_taken_out_of_the_phase_in_which_it_happened() -> None:
    told = [
        Told(11.0, "evict", 0.5),
        Told(12.0, "verify", 1.0),
        Told(13.0, "load", 1.0),
        Told(17.0, "ready", 4.0),
        Told(20.0, "probe", 3.0),
    ]
    found = bench.phases(LOG, 21.0, told)
    assert found == {
        "drain": 0.5,
        "evict": 0.5,
        "verify": 1.0,
        "load": 1.0,
        "ready": 4.0,
        "probe": 3.0,
        "first_token": 1.0,
    }
    assert sum(found.values()) == 11.0


def test_who_had_to_be_stopped_did_not_rest_in_the_way_that_is_measured() -> None:
    parked = [event._replace(kind="parked") if event.kind == "empty" else event for event in LOG]
    assert bench.phases(parked, 21.0, way="sleep") == bench.phases(LOG, 21.0)
    with pytest.raises(BackendError, match="a had to be stopped: it did not rest by sleep"):
        bench.phases(LOG, 21.0, way="sleep")


def test_half_a_swap_is_none() -> None:
    with pytest.raises(BackendError, match="no event ready"):
        bench.phases(LOG[:-3], 21.0)


def swap(number: int, way: str, load: float, by_hand: float, **told: float) -> Swap:
    return Swap("b", "a", way, number, {"evict": 1.0, "load": load, **told}, by_hand)


def test_figures_are_medians_and_the_own_share_that_of_the_differences() -> None:
    swaps = [swap(1, "stop", 9.0, 9.5), swap(2, "stop", 19.0, 19.0), swap(3, "stop", 4.0, 4.9)]
    [row] = bench.figures(swaps)
    assert (row.backend, row.replaces, row.way, row.swaps) == ("b", "a", "stop", 3)
    assert row.phases == {"evict": 1.0, "load": 9.0}
    assert (row.total_seconds, row.by_hand_seconds) == (10.0, 9.5)
    assert row.own_share_seconds == 0.5
    assert row.cold_start_ratio == 1.0


def test_a_way_back_is_compared_with_a_cold_start() -> None:
    asleep, cold = bench.figures([swap(1, "sleep", 1.5, 3.0, probe=0.5), swap(1, "stop", 8.0, 9.0)])
    assert (asleep.way, asleep.cold_start_ratio) == ("sleep", 4.0)
    assert cold.cold_start_ratio == 1.0
    [alone] = bench.figures([swap(1, "sleep", 1.5, 3.0)])
    assert alone.cold_start_ratio is None


def test_the_table_has_a_column_for_each_phase_that_occurs() -> None:
    rows = bench.figures([swap(1, "stop", 8.0, 8.75), swap(1, "sleep", 1.5, 3.0, probe=0.5, thaw=0.25)])
    assert bench.table(rows) == [
        (
            *("BACKEND", "REPLACES", "WAY", "EVICT", "LOAD", "PROBE", "THAW"),
            *("TOTAL", "BY-HAND", "OWN-SHARE", "COLD/BACK"),
        ),
        ("b", "a", "stop", "1.000", "8.000", "", "", "9.000", "8.750", "250 ms", "1.0"),
        ("b", "a", "sleep", "1.000", "1.500", "0.500", "0.250", "3.250", "3.000", "250 ms", "3.6"),
    ]


# Who is measured with whom


def ring_names(*backends: Backend, gpus: tuple[Gpu, ...] = ()) -> list[tuple[str, list[str]]]:
    found = bench.rings(Config(backends, gpus=gpus))
    return [(way, [member.name for member in members]) for way, members in found]


def test_backends_that_put_each_other_out_take_turns() -> None:
    a, b, c = (Backend(name, name, (gpu,)) for name, gpu in (("a", "0"), ("b", "1"), ("c", "0")))
    assert ring_names(a, b, c) == [("stop", ["a", "c"]), ("stop", ["b"])]


def test_backends_that_fit_side_by_side_do_not_meet() -> None:
    a, b, c = (Backend(name, name, ("0",), vram=size) for name, size in (("a", 4), ("b", 5), ("c", 6)))
    assert ring_names(a, b, c, gpus=(Gpu("0", 9),)) == [("stop", ["a", "c"]), ("stop", ["b"])]


def test_every_way_that_a_backend_allows_is_measured_and_a_cold_start_always() -> None:
    a = Backend("a", "a", ("0",), rest=("sleep", "stop"))
    b = Backend("b", "b", ("0",), rest=("sleep-2", "sleep"))
    assert ring_names(a, b) == [("sleep", ["a", "b"]), ("stop", ["a", "b"]), ("sleep-2", ["b"])]


def test_replicas_and_pinned_models_are_measured_too() -> None:
    a, b = Backend("a", "m", ("0",), pin=True), Backend("b", "m", ("0",))
    assert ring_names(a, b) == [("stop", ["a", "b"])]


# The command


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def compose(folder: Path, services: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """compose/demo.yaml with engines that load fast, and other services."""
    content = yaml.safe_load((ROOT / "compose" / "demo.yaml").read_text())
    for about in content["services"].values():
        about["working_dir"] = str(ROOT)
        about["command"][4] = "0.1"
    content["x-anvil"]["gpus"] = ["0", "1"]
    content["services"].update(services or {})
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def running(file: Path) -> dict[str, str]:
    runtime = ProcessRuntime(config.load([file], compose=None))
    try:
        return runtime.running()
    finally:
        runtime.close()


def measured(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[dict[str, Any]]:
    assert main(["bench", "swap", "--json", *map(str, words)]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_the_demo_is_measured_and_nothing_is_left_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path)
    rows = measured(capsys, file, "--repeat", 1)
    found = [(row["backend"], row["replaces"], row["way"], row["swaps"]) for row in rows]
    assert found == [("small", "large", "stop", 1), ("large", "small", "stop", 1)]
    for row in rows:
        assert list(row["phases"])[:2] == ["drain", "evict"]
        assert list(row["phases"])[-1] == "first_token"
        assert min(row["phases"].values()) >= 0
        assert sum(row["phases"].values()) == pytest.approx(row["total_seconds"])
        assert row["total_seconds"] > 0.1 < row["by_hand_seconds"], "the engine itself takes this long"
        share = row["total_seconds"] - row["by_hand_seconds"]
        assert row["own_share_seconds"] == pytest.approx(share)
    assert running(file) == {}


def test_people_see_how_far_it_is_and_then_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "swaps.csv"
    picture = tmp_path / "swaps.svg"
    words = ["--repeat", "2", "--csv", str(file), "--plot", str(picture)]
    assert main(["bench", "swap", str(compose(tmp_path)), *words]) == 0
    out, err = capsys.readouterr()
    head, small, large = out.splitlines()
    assert head.split()[:3] == ["BACKEND", "REPLACES", "WAY"]
    assert (small.split()[:3], large.split()[:3]) == (["small", "large", "stop"], ["large", "small", "stop"])
    assert "stop, to warm up: small " in err
    assert "stop, round 2 of 2: small " in err
    lines = list(csv.DictReader(file.read_text().splitlines()))
    assert [(each["backend"], each["round"]) for each in lines] == [
        ("small", "1"),
        ("large", "1"),
        ("small", "2"),
        ("large", "2"),
    ]
    for each in lines:
        difference = float(each["total_seconds"]) - float(each["by_hand_seconds"])
        assert float(each["own_share_seconds"]) == pytest.approx(difference, abs=1e-5)
    assert "first token" in picture.read_text()


def test_a_frozen_model_is_measured_beside_its_cold_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path)
    content = yaml.safe_load(file.read_text())
    for about in content["services"].values():
        about["x-anvil"]["rest"] = ["pause"]
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    rows = measured(capsys, file, "--repeat", 1)
    assert [row["way"] for row in rows] == ["pause", "pause", "stop", "stop"]
    for row in rows:
        parts = ["freeze", "load", "probe"] if row["way"] == "pause" else ["verify", "load", "ready"]
        assert list(row["phases"]) == ["drain", "evict", *parts, "first_token"]
        assert sum(row["phases"].values()) == pytest.approx(row["total_seconds"])
        assert row["own_share_seconds"] == pytest.approx(row["total_seconds"] - row["by_hand_seconds"])
    assert running(file) == {}


def test_who_does_not_wake_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resume(runtime: ProcessRuntime, backend: Backend) -> None:
        raise BackendError("it is frozen solid")

    monkeypatch.setattr(ProcessRuntime, "resume", resume)
    file = compose(tmp_path)
    file.write_text(
        file.read_text().replace("x-anvil:\n      gpus", "x-anvil:\n      rest: [pause]\n      gpus")
    )
    assert main(["bench", "swap", "--json", str(file), "--repeat", "1"]) == 1
    out, err = capsys.readouterr()
    assert {row["way"] for row in json.loads(out)} == {"stop"}
    assert "not measured: small, large by pause: " in err
    assert running(file) == {}


def test_a_project_that_is_served_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = compose(tmp_path)
    with serving(file, state=tmp_path) as mux:
        assert main(["bench", "swap", str(file)]) == 1
        assert "serves the project anvil-demo already" in capsys.readouterr().err
        assert mux.chat("small", max_tokens=1)[0] == 200


def test_what_runs_already_makes_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = compose(tmp_path)
    loaded = config.load([file], compose=None)
    runtime = ProcessRuntime(loaded)
    runtime.start(loaded.backends[1])
    runtime.close()
    assert main(["bench", "swap", str(file), "--repeat", "1"]) == 0
    assert "stopping large, which runs already" in capsys.readouterr().err
    assert running(file) == {}


def test_a_model_that_meets_no_other_is_put_out_and_loaded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path, {"large": {}})
    [row] = measured(capsys, file, "--repeat", 1)
    assert (row["backend"], row["replaces"]) == ("small", "small")
    assert sum(row["phases"].values()) == pytest.approx(row["total_seconds"])


def test_what_cannot_be_loaded_is_told_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"command": ["false"], "x-anvil": {"gpus": ["1"]}}
    file = compose(tmp_path, {"broken": broken})
    assert main(["bench", "swap", "--json", str(file), "--repeat", "1"]) == 1
    out, err = capsys.readouterr()
    assert [row["backend"] for row in json.loads(out)] == ["small", "large"]
    assert "not measured: broken by stop: " in err
    assert "exited with code 1" in err


def test_a_signal_in_the_middle_of_a_load_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = compose(tmp_path)
    file.write_text(file.read_text().replace("'0.1'", "'1000'"))
    start = ProcessRuntime.start

    def start_and_signal(runtime: ProcessRuntime, backend: Backend) -> str:
        url = start(runtime, backend)
        os.kill(os.getpid(), signal.SIGTERM)
        return url

    monkeypatch.setattr(ProcessRuntime, "start", start_and_signal)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["bench", "swap", str(file), "--repeat", "1"]) == 130
    assert running(file) == {}
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "nowhere" / "swaps.csv"
    assert main(["bench", "swap", str(compose(tmp_path)), "--csv", str(target)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{target} cannot be written: No such file or directory" in err
