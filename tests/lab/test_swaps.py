"""The benchmark of swaps: who is measured with whom, and the command on demo engines."""

import csv
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from anvil_mux import plugins
from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import BackendError
from anvil_mux.host import check, gpus
from anvil_mux.host.gpus import Gpus, Reading
from anvil_mux.host.processes import ProcessRuntime
from anvil_mux.host.seam import HostGpu
from anvil_mux.lab import swaps
from tests.cli.demo import engine_of
from tests.running import serving

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 1 << 30
GUARD = 60.0

# Who is measured with whom


def ring_names(*backends: Backend, gpus: tuple[Gpu, ...] = ()) -> list[tuple[str, list[str]]]:
    found = swaps.rings(Config(backends, gpus=gpus))
    return [(way, [member.name for member in members]) for way, members in found]


def test_backends_that_put_each_other_out_take_turns():
    a, b, c = (Backend(name, name, (gpu,)) for name, gpu in (("a", "0"), ("b", "1"), ("c", "0")))
    assert ring_names(a, b, c) == [("stop", ["a", "c"]), ("stop", ["b"])]


def test_backends_that_fit_side_by_side_do_not_meet():
    a, b, c = (Backend(name, name, ("0",), vram=size) for name, size in (("a", 4), ("b", 5), ("c", 6)))
    assert ring_names(a, b, c, gpus=(Gpu("0", 9),)) == [("stop", ["a", "c"]), ("stop", ["b"])]


def test_every_way_that_a_backend_allows_is_measured_and_a_cold_start_always():
    a = Backend("a", "a", ("0",), evict_to=("sleep", "stop"))
    b = Backend("b", "b", ("0",), evict_to=("sleep-2", "sleep"))
    assert ring_names(a, b) == [("sleep", ["a", "b"]), ("stop", ["a", "b"]), ("sleep-2", ["b"])]


def test_replicas_and_pinned_models_are_measured_too():
    a, b = Backend("a", "m", ("0",), pin=True), Backend("b", "m", ("0",))
    assert ring_names(a, b) == [("stop", ["a", "b"])]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llamacpp", [("freeze", ["one", "two"]), ("stop", ["one", "two"])]),
        ("vllm", [("sleep", ["vllm"]), ("freeze", ["vllm"]), ("stop", ["vllm"])]),
    ],
)
def test_real_engines_are_measured_in_these_ways(name, expected):
    file = ROOT / "tests" / "real" / f"{name}.yaml"
    found = plugins.load([file], environ={"ANVIL_VLLM_PYTHON": "python3"}, compose=None)
    assert ring_names(*found.backends, gpus=found.gpus) == expected


# The command


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def compose(folder: Path, services: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """compose/demo.yaml with engines that load fast, and other services."""
    content = yaml.safe_load((ROOT / "compose" / "demo.yaml").read_text())
    for about in content["services"].values():
        about["working_dir"] = str(ROOT)
        about["command"][0] = sys.executable
        about["command"][5] = "0.1"
    content["x-anvil"]["gpus"] = ["0", "1"]
    content["services"].update(services or {})
    file = folder / "compose.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    return file


@contextmanager
def changed(file: Path) -> Iterator[dict[str, Any]]:
    """The content of a compose file, to be changed."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


def running(file: Path) -> dict[str, str]:
    runtime = ProcessRuntime(plugins.load([file], compose=None))
    try:
        return runtime.running()
    finally:
        runtime.close()


def measured(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[dict[str, Any]]:
    assert main(["bench", "swap", "--json", *map(str, words)]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_the_demo_is_measured_with_a_burst_beside_one_sent_directly_and_nothing_is_left_running(
    tmp_path, capsys
):
    file = compose(tmp_path)
    every = measured(capsys, file, "--repeat", 1, "--burst", 8)
    rows, bursts = every[:2], every[2:]
    found = [(row["backend"], row["replaces"], row["way"], row["swaps"]) for row in rows]
    assert found == [("small", "large", "stop", 1), ("large", "small", "stop", 1)]
    for row in rows:
        assert list(row["phases"])[:2] == ["drain", "evict"]
        assert list(row["phases"])[-1] == "first_token"
        assert min(row["phases"].values()) >= 0
        assert sum(row["phases"].values()) == pytest.approx(row["total_seconds"])
        assert row["total_seconds"] > 0.1 < row["by_hand_seconds"], "the engine itself takes this long"
        share = row["total_seconds"] - row["by_hand_seconds"]
        assert row["overhead_seconds"] == pytest.approx(share)
    together = [(row["backend"], row["replaces"], row["requests"], row["bursts"]) for row in bursts]
    assert together == [("small", "large", 8, 1), ("large", "small", 8, 1)]
    for row in bursts:
        assert row["seconds"] > 0 < row["direct_seconds"]
        assert row["ratio"] == pytest.approx(row["seconds"] / row["direct_seconds"])
    assert running(file) == {}


def test_people_see_how_far_it_is_and_then_a_table(tmp_path, capsys):
    file = tmp_path / "swaps.csv"
    picture = tmp_path / "swaps.svg"
    words = ["--repeat", "2", "--csv", str(file), "--plot", str(picture)]
    services = compose(tmp_path)
    loaded = plugins.load([services], compose=None)
    runtime = ProcessRuntime(loaded)
    runtime.start(loaded.backends[1])
    runtime.close()
    assert main(["bench", "swap", str(services), *words]) == 0
    out, err = capsys.readouterr()
    assert "stopping large, which runs already" in err
    head, small, large, *untried = out.splitlines()
    assert head.split()[:3] == ["BACKEND", "REPLACES", "WAY"]
    assert (small.split()[:3], large.split()[:3]) == (["small", "large", "stop"], ["large", "small", "stop"])
    assert untried[0].split(maxsplit=3) == ["ENGINE", "BACKENDS", "WAY", "NOT MEASURED"]
    assert [line.split()[:3] for line in untried[1:]] == [
        ["openai", "small,large", way] for way in ("sleep", "checkpoint", "freeze")
    ]
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
        assert float(each["overhead_seconds"]) == pytest.approx(difference, abs=1e-5)
    assert "by hand" in picture.read_text(), "what takes too short to be seen is not in it"


def test_a_frozen_model_is_measured_beside_its_cold_start_also_where_it_is_prepared_or_demoted(
    tmp_path, capsys
):
    file = compose(tmp_path)
    with changed(file) as content:
        for about in content["services"].values():
            about["x-anvil"] |= {"evict_to": ["freeze", "stop"], "preload": True, "demote_after": 0.01}
    rows = measured(capsys, file, "--repeat", 1)
    assert [row["way"] for row in rows] == ["freeze", "freeze", "stop", "stop"]
    for row in rows:
        parts = ["freeze", "load", "probe"] if row["way"] == "freeze" else ["verify", "load", "ready"]
        assert list(row["phases"]) == ["drain", "evict", *parts, "first_token"]
        assert sum(row["phases"].values()) == pytest.approx(row["total_seconds"])
        assert row["overhead_seconds"] == pytest.approx(row["total_seconds"] - row["by_hand_seconds"])
    assert running(file) == {}


def test_memory_that_comes_back_is_weighed_against_the_bus(tmp_path, capsys, monkeypatch):
    """Engines hold 3 GiB, and 1 GiB asleep; their GPU tells so and has a link of 16 GB/s."""

    def held(engine: dict[str, Any]) -> int:
        answer = requests.get(f"{engine['url']}/is_sleeping", timeout=GUARD)
        return GIB if b"true" in answer.content else 3 * GIB

    def probe(pids: object = None, *, sensors: bool = False) -> Gpus:
        engines = [json.loads(each.read_text()) for each in tmp_path.glob("anvil-mux/*/*.json")]
        here = tuple((engine_of(each["pid"]), held(each)) for each in engines)
        used = sum(amount for _, amount in here)
        return Gpus((Reading(HostGpu("0", "GPU-0", "fake", 24 * GIB), used, here, bus=16e9),))

    monkeypatch.setattr(gpus, "probe", probe)
    file = compose(tmp_path)
    with changed(file) as content:
        for about in content["services"].values():
            about["command"] += ["--enable-sleep-mode", "--wake-seconds", "0.01"]
            about["environment"] = {"VLLM_SERVER_DEV_MODE": "1"}
            about["x-anvil"] |= {"engine": "vllm", "evict_to": ["sleep"]}
    for row in measured(capsys, file, "--repeat", 1):
        seconds = row["phases"]["load"] + row["phases"].get("ready", 0.0)
        assert row["bytes"] == (2 if row["way"] == "sleep" else 3) * GIB
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / seconds)
        assert row["bus_bytes_per_second"] == 16e9


ENDS = """
echo >> {file}
case $(wc -l < {file}) in {starts}) echo "{says}"; exit 1;; esac
exec "$0" "$@"
"""
"""The command of a service that ends at once on some of its starts."""


def ending(folder: Path, starts: str, says: str) -> Path:
    """A compose file in which large does so."""
    file = compose(folder)
    script = ENDS.format(file=folder / "starts", starts=starts, says=says).replace("$", "$$")
    with changed(file) as content:
        about = content["services"]["large"]
        about["command"] = ["sh", "-c", script, *about["command"]]
    return file


def test_who_loses_its_port_to_somebody_is_started_with_another(tmp_path, capsys):
    """The second start of large is by the multiplexer, the fourth by hand."""
    file = ending(tmp_path, "2|4", "OSError: [Errno 98] Address already in use")
    rows = measured(capsys, file, "--repeat", 1)
    assert [(row["backend"], row["swaps"]) for row in rows] == [("small", 1), ("large", 1)]
    assert (tmp_path / "starts").read_text().count("\n") == 7
    assert running(file) == {}


def test_who_ends_before_it_answers_by_hand_is_not_waited_for(tmp_path, capsys):
    file = ending(tmp_path, "3", "no such weights")
    assert main(["bench", "swap", str(file), "--repeat", "1"]) == 1
    assert "by stop: large exited with code 1 before it answered" in capsys.readouterr().err
    assert running(file) == {}


def test_who_does_not_wake_is_told(tmp_path, capsys, monkeypatch):
    def resume(runtime: ProcessRuntime, backend: Backend) -> None:
        raise BackendError("it is frozen solid")

    monkeypatch.setattr(ProcessRuntime, "resume", resume)
    file = compose(tmp_path)
    with changed(file) as content:
        for about in content["services"].values():
            about["x-anvil"]["evict_to"] = ["freeze"]
    assert main(["bench", "swap", "--json", str(file), "--repeat", "1"]) == 1
    out, err = capsys.readouterr()
    assert {row["way"] for row in json.loads(out)} == {"stop"}
    assert "not measured: small, large by freeze: " in err
    assert running(file) == {}


def test_a_project_that_is_served_is_not_measured(tmp_path, capsys):
    file = compose(tmp_path)
    with serving(file, state=tmp_path) as mux:
        assert main(["bench", "swap", str(file)]) == 1
        assert "serves the project anvil-demo already" in capsys.readouterr().err
        assert mux.chat("small", max_tokens=1)[0] == 200


def test_a_model_that_meets_no_other_is_put_out_and_loaded_again(tmp_path, capsys):
    file = compose(tmp_path, {"large": {}})
    [row] = measured(capsys, file, "--repeat", 1)
    assert (row["backend"], row["replaces"]) == ("small", "small")
    assert sum(row["phases"].values()) == pytest.approx(row["total_seconds"])


def test_several_projects_are_measured_one_after_the_other_and_what_cannot_be_loaded_is_told(
    tmp_path, capsys
):
    first, other = compose(tmp_path), tmp_path / "other"
    other.mkdir()
    second, broken = compose(other), tmp_path / "broken.yaml"
    second.write_text(second.read_text().replace("small", "little").replace("large", "big"))
    broken.write_text(
        "name: x\nx-anvil: {runtime: process}\nservices: {dead: {command: 'false', x-anvil: {}}}"
    )
    words = ("--also", broken, "--also", second, "--repeat", "1")
    assert main(["bench", "swap", "--json", *map(str, (first, *words))]) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert "not measured: dead by stop: " in err
    assert "exited with code 1" in err
    assert [row["backend"] for row in rows] == ["small", "large", "little", "big"]
    assert {row["engine"] for row in rows} == {"openai"}
    assert (running(first), running(second)) == ({}, {})


def test_backends_of_one_name_in_several_files_are_refused(tmp_path, capsys):
    file = str(compose(tmp_path))
    assert main(["bench", "swap", file, "--also", file]) == 78
    assert "large, small: in more than one file" in capsys.readouterr().err


def test_a_level_that_this_machine_cannot_take_is_no_failure_and_where_no_gpu_tells_declared_memory_counts(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(check, "why_not_checkpoint", lambda gpus, insist: "there is no driver")
    file = compose(tmp_path)
    with changed(file) as content:
        content["services"]["small"]["x-anvil"] |= {"evict_to": ["checkpoint", "stop"], "vram": "2GiB"}
        content["services"]["large"]["x-anvil"]["vram"] = "3GiB"
        content["x-anvil"]["gpus"] = {"0": {"vram": "4GiB"}}
    *rows, last = measured(capsys, file, "--repeat", "1")
    assert [(row["backend"], row["way"]) for row in rows] == [("small", "stop"), ("large", "stop")]
    assert (last["backends"], last["way"]) == (["small"], "checkpoint")
    assert "there is no driver" in last["not_possible"]
    # No GPU tells what it holds, so declared memory counts.
    assert [row["bytes"] for row in rows] == [2 * GIB, 3 * GIB]
    assert rows[1]["bytes_per_second"] > 0
    assert rows[1]["bus_bytes_per_second"] is None


def test_a_signal_in_the_middle_of_a_load_leaves_nothing_running(tmp_path, monkeypatch):
    file = compose(tmp_path)
    file.write_text(file.read_text().replace('"0.1"', '"1000"'))
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


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_the_figures_of_the_rounds_so_far(tmp_path, capsys, monkeypatch):
    file, table = compose(tmp_path), tmp_path / "swaps.csv"
    begin = swaps._Ring._round

    def round_and_signal(ring: Any, number: int, *more: Any) -> Any:
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return begin(ring, number, *more)

    monkeypatch.setattr(swaps._Ring, "_round", round_and_signal)
    rows = measured(capsys, file, "--repeat", 5, "--csv", table, code=130)
    found = [(row["backend"], row["way"], row["swaps"]) for row in rows]
    assert found == [("small", "stop", 1), ("large", "stop", 1)]
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 2
    assert running(file) == {}


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    target = tmp_path / "nowhere" / "swaps.csv"
    assert main(["bench", "swap", str(compose(tmp_path)), "--csv", str(target)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{target} cannot be written: No such file or directory" in err
