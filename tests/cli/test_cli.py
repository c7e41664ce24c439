"""The commands as a user runs them: in this process where they print, as their own where they serve."""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import anvil_mux.serve.state_files
from anvil_mux import __version__
from anvil_mux.cli import asking, output
from anvil_mux.cli.main import COMMANDS, EXIT_CODES, VARIABLES, _steered_by_all, main
from anvil_mux.config.config import Backend, Config, Service
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.config.table import SERVICE_SETTINGS, SETTINGS
from anvil_mux.host import checkpoint
from anvil_mux.lab import plot, study
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.costs import Cost
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.footprint import Footprint
from anvil_mux.scheduler.policies import POLICIES
from anvil_mux.serve import remote
from anvil_mux.serve.configuration import open_address
from anvil_mux.serve.invocation import CannotServe, short
from anvil_mux.serve.state_files import Known, LearnedFile, locked
from anvil_mux.state import state_folder
from anvil_mux.telemetry import eventlog
from tests.running import Running, begin, seen, serve, serving

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 120.0
PROJECT = "cli-test"


def compose(
    folder: Path,
    *names: str,
    tokens_per_second: float = 2000,
    load_seconds: float = 0.1,
    **top: object,
) -> Path:
    """A compose file of demo engines that share one GPU."""
    flags = ["--load-seconds", str(load_seconds), "--tokens-per-second", str(tokens_per_second)]
    services = {
        name: {
            "command": ["bin/demo-engine", "--model", name, *flags],
            "working_dir": str(ROOT),
            "x-anvil": {"gpus": ["0"]},
        }
        for name in names or ("a", "b")
    }
    file = folder / "compose.yaml"
    settings = {"runtime": "process", "project": PROJECT, **top}
    file.write_text(yaml.safe_dump({"x-anvil": settings, "services": services}))
    return file


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder; whatever a test left running is killed."""
    yield tmp_path
    for lock in tmp_path.glob(f"anvil-mux/{PROJECT}/lock"):
        with suppress(OSError):
            pid = int(lock.read_text())
            if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
    for file in tmp_path.glob(f"anvil-mux/{PROJECT}/*.json"):
        with suppress(ProcessLookupError):
            os.killpg(json.loads(file.read_text())["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cli")
    with serving(compose(folder), state=folder) as running:
        yield running


@pytest.fixture
def url(mux: Running) -> str:
    return f"http://127.0.0.1:{mux.port}"


def eventually(so: Callable[[], bool]) -> None:
    """What the program tells after an answer may come a moment later."""
    assert seen(so, bool)


def affinities(process: int) -> list[set[int]]:
    """The CPUs of each of its threads; threads of connections may end at any moment."""
    found = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(thread.name)))
    return found


def engine_pid(state: Path, name: str) -> int:
    return int(json.loads((state / "anvil-mux" / PROJECT / f"{name}.json").read_text())["pid"])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run(file: Path, *flags: str, state: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`anvil-mux serve` that is expected not to serve."""
    command = [sys.executable, "-m", "anvil_mux", "serve", str(file), *flags]
    env = {**os.environ, "XDG_STATE_HOME": str(state), **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)


@contextmanager
def stream(running: Running, model: str, tokens: int) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first event has come."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    words = " ".join(["word"] * tokens)
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": words}],
    }
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200
        response.readline()
        yield response
    finally:
        connection.close()


# Commands that print


@pytest.mark.parametrize(
    ("known", "shown", "told"),
    [("a1b2c3d", " (a1b2c3d)", "a1b2c3d"), ("", "", None)],
    ids=["known", "unknown"],
)
def test_version_says_the_version_and_the_commit(
    known: str,
    shown: str,
    told: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anvil_mux.commit.commit", lambda: known)
    for word in ("version", "--version"):
        assert main([word]) == 0
        assert capsys.readouterr().out == f"anvil-mux {__version__}{shown}\n"
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["commit"]) == (__version__, told)


def test_an_unknown_option_is_answered_with_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--key-file", "keys.txt"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: anvil-mux serve ")
    assert said.endswith("anvil-mux serve: error: unrecognized arguments: --key-file\n")


def test_the_demo_has_a_file_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--demo", "compose.yaml"])
    assert ended.value.code == 2
    assert "leave out either --demo or FILE" in capsys.readouterr().err


def test_check_lists_what_will_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(compose(tmp_path))]) == 0
    seen = capsys.readouterr()
    assert [line.split() for line in seen.out.splitlines()] == [
        ["MODEL", "BACKEND", "ENGINE", "GPUS", "VRAM", "PORT"],
        ["a", "a", "openai", "0", "all", "free"],
        ["b", "b", "openai", "0", "all", "free"],
    ]
    assert "2 backends, 0 warnings; will listen on 127.0.0.1:9292" in seen.err


def test_check_names_hosts_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("""
        x-anvil: {runtime: process, gpus: ["0"], machines: {h: {gpus: ["0", "1"]}}}
        services: {a: {command: [x], x-anvil: {hosts: [local, h], gpu_count: 1}}}
    """)
    assert main(["check", str(file)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["MODEL", "BACKEND", "ENGINE", "GPUS", "VRAM", "PORT", "HOST"],
        ["a", "a", "openai", "0", "all", "free", "local"],
        ["a", "a.h.0", "openai", "0", "all", "free", "h"],
        ["a", "a.h.1", "openai", "1", "all", "free", "h"],
    ]
    assert main(["check", "--json", str(file)]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [(model["gpus"], model["host"]) for model in models] == [
        (["0"], "local"),
        (["0"], "h"),
        (["1"], "h"),
    ]
    assert main(["config", "--json", str(file)]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["gpus"], seen["machines"]) == ({"0": {}}, {"h": {"gpus": {"0": {}, "1": {}}}})


def test_check_names_presets_where_there_are_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("""
        x-anvil: {runtime: process}
        services:
          a: {command: [x], x-anvil: {presets: {fast: {system: Be quick.}}, loras: [law]}}
          b: {command: [x], x-anvil: {}}
    """)
    assert main(["check", str(file)]) == 0
    head, first, _ = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (head[-1], first[-1]) == ("PRESETS", "fast,law")
    assert main(["check", "--json", str(file)]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [model["presets"] for model in seen["models"]] == [["fast", "law"], []]


def test_check_names_the_disk_space_for_prompts_where_there_is_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compose.yaml"
    command = "[llama-server, -m, /m/a.gguf, -np, '2', --slot-save-path, /prompts]"
    file.write_text(f"""
        x-anvil: {{runtime: process}}
        services:
          a: {{command: {command}, x-anvil: {{prompt_cache: 4GiB}}}}
          b: {{command: [x], x-anvil: {{}}}}
    """)
    assert main(["check", str(file)]) == 0
    head, first, _ = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (head[-1], first[-2:]) == ("PROMPT_CACHE", ["4.0", "GiB"])


def test_check_names_the_lengths_of_queues_where_one_has_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compose.yaml"
    services = "{a: {command: [x], x-anvil: {max_queue: 7}}, b: {command: [x], x-anvil: {}}}"
    file.write_text(f"x-anvil: {{runtime: process}}\nservices: {services}")
    assert main(["check", "--json", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)["models"]
    assert [each["max_queue"] for each in told] == ["7", ""]


def test_check_in_json_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", str(compose(tmp_path))]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [(model["model"], model["gpus"]) for model in seen["models"]] == [("a", ["0"]), ("b", ["0"])]
    assert seen["problems"] == []


def test_check_names_every_problem_and_exits_with_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path, polici="eager", drain_timeout="soon")
    assert main(["check", str(file)]) == 78
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "polici" in seen.err
    assert "drain_timeout" in seen.err
    assert main(["check", "--json", str(file)]) == 78
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2


@pytest.mark.parametrize("command", ["check", "serve"])
def test_keys_and_certificates_that_cannot_be_used_are_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "keys.txt").write_text("short\n")
    file = compose(tmp_path, key_file="keys.txt", tls_cert="none.pem", tls_key="none.pem")
    assert main([command, str(file)]) == 78
    said = capsys.readouterr().err
    assert "keys.txt:1: a key has at least 8 characters" in said
    assert "none.pem cannot be used: No such file" in said


def test_check_warns_of_an_address_that_serve_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path, listen="0.0.0.0:9292")
    assert main(["check", "--json", str(file)]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("listen: 0.0.0.0 can be reached by others")


def test_check_warns_of_a_load_that_has_taken_longer_than_requests_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = compose(tmp_path, "a", "b", project="waits", queue_timeout=650)
    folder = state_folder("waits", os.environ)
    folder.mkdir(parents=True)
    slow, quick = Cost("b", "a", "stop", 1.0, 651.0, 1), Cost("a", "b", "stop", 1.0, 649.0, 1)
    LearnedFile(folder, print).save(Known([slow, quick]))
    assert main(["check", "--json", str(file)]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("the load of a has taken 651 s, and queue_timeout is 650 s")


def test_check_names_the_memory_to_declare_for_a_model_that_shares_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = compose(tmp_path, "a", "b", project="hints")
    held = {name: {"0": amount} for name, amount in (("a", (18 << 30) + 1), ("b", 1 << 30))}
    prints = [Footprint(name, "stop", each, {"0": 0}) for name, each in held.items()]
    folder = state_folder("hints", os.environ)
    folder.mkdir(parents=True)
    LearnedFile(folder, print).save(Known(footprints=[prints[0], replace(prints[1], described="otherwise")]))
    assert main(["check", "--json", str(file)]) == 0
    (hint,) = json.loads(capsys.readouterr().out)["hints"]
    assert hint.startswith("a held 18.1GiB of each GPU when it last ran: declare x-anvil: {vram: 18.1GiB}")
    compose(tmp_path, "a", project="hints")
    assert main(["check", str(file)]) == 0
    assert "hint" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_checkpoint_that_this_machine_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(checkpoint.Checkpointer, "why_not", lambda *_, **__: "needs NVIDIA driver 570")
    file = tmp_path / "compose.yaml"
    service = {"command": "x", "x-anvil": {"gpus": ["0"], "evict_to": ["checkpoint", "stop"]}}
    file.write_text(yaml.safe_dump({"x-anvil": {"runtime": "process"}, "services": {"a": service}}))
    assert main([command, str(file)]) == 78
    assert "a.x-anvil.evict_to: checkpoint cannot work: needs NVIDIA driver 570" in capsys.readouterr().err
    assert main(["config", str(file)]) == 0


AS_NOBODY = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
from anvil_mux.host import checkpoint
checkpoint.Checkpointer.why_not = lambda *_, **__: None  # the driver and the GPU are there
from anvil_mux.cli.main import main
sys.exit(main(["check", "--json", sys.argv[1]]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_check_names_the_rights_that_a_checkpoint_lacks(public: Path) -> None:
    rest = {"gpus": ["0"], "evict_to": ["checkpoint", "stop"]}
    service = {"image": "x", "ports": ["127.0.0.1::80"], "x-anvil": rest}
    services = {"theirs": service, "ours": {**service, "user": "65534:65534"}}
    file = public / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": {"project": PROJECT}, "services": services}))
    command = [sys.executable, "-c", AS_NOBODY, str(file)]
    env = {"PATH": os.environ["PATH"], "DOCKER_HOST": f"unix://{public}/none"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if "ModuleNotFoundError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("not everybody may read this repository")
    (said,) = [each for each in json.loads(done.stdout)["warnings"] if "user and group" in each]
    assert said == (
        "theirs: checkpoint may fail: the engine's processes are of user and group 0:0, and anvil-mux runs "
        "as 65534:65534: "
        "run it as root with its capabilities (docs/standby.md has the systemd unit and the container), or "
        'give the service `user: "65534:65534"`'
    )
    [away] = [each for each in json.loads(done.stdout)["warnings"] if "images were not looked for" in each]
    assert away.startswith("no container can be started, and images were not looked for: ")


def test_check_does_not_ask_docker_for_models_that_are_served_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    file = tmp_path / "compose.yaml"
    there = {"image": "scratch", "profiles": ["elsewhere"], "x-anvil": {"url": "http://127.0.0.1:1"}}
    file.write_text(yaml.safe_dump({"x-anvil": {"project": PROJECT}, "services": {"there": there}}))
    main(["check", str(file)])
    told = capsys.readouterr().err
    assert "1 backend" in told
    assert "images" not in told


def test_a_compose_file_is_found_upward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compose(tmp_path, "only")
    inner = tmp_path / "some" / "where"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert main(["check"]) == 0
    assert "only" in capsys.readouterr().out


def test_config_says_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path, max_wait=7)
    monkeypatch.setenv("ANVIL_QUEUE_TIMEOUT", "90")
    assert main(["config", "--json", "--show-origin", str(file)]) == 0
    seen: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert seen["max_wait"]["value"] == 7
    assert seen["max_wait"]["origin"].startswith(str(file))
    assert seen["queue_timeout"] == {"value": 90, "origin": "ANVIL_QUEUE_TIMEOUT"}
    assert seen["listen"] == {"value": "127.0.0.1:9292", "origin": "default"}
    assert main(["config", str(file)]) == 0
    assert ["max_wait", "7.0"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_config_shows_no_password_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = compose(tmp_path, routing={"store": "redis://:secret@10.0.0.1/3"})
    assert main(["config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "redis://***@10.0.0.1/3" in shown
    assert "secret" not in shown


def test_config_documents_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--docs"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*SETTINGS, *SERVICE_SETTINGS]
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


@pytest.mark.parametrize(
    "words", [["ps"], ["load", "a"], ["unload", "a"], ["why", "a"], ["events"], ["top"]], ids=" ".join
)
def test_without_an_anvil_mux_the_exit_code_is_3(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert main([*words, "--url", url]) == 3
    seen = capsys.readouterr()
    assert seen.out == ""
    assert f"no anvil-mux answers at {url}" in seen.err


def interrupted(given: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("code", EXIT_CODES)
def test_a_command_ends_as_the_table_of_exit_codes_says(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.yaml").write_text("services: {a: {image: x, x-anvil: {polcy: eager}}}")
    monkeypatch.setitem(COMMANDS, "version", ("", interrupted, COMMANDS["version"][2]))
    words = {
        0: ["config", "--docs"],
        1: ["simulate", "--log", str(tmp_path / "nowhere.jsonl")],
        2: ["ps", "--no-such-flag"],
        3: ["ps", "--url", "http://:80"],
        78: ["check", str(tmp_path / "broken.yaml")],
        130: ["version"],
    }
    try:
        ended = main(words[code])
    except SystemExit as left:  # argparse does
        ended = left.code
    assert ended == code


def test_help_tells_of_exit_codes_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    for name in (*COMMANDS, *VARIABLES, *map(str, EXIT_CODES)):
        assert re.search(rf"^ +{re.escape(name)}\b", told, re.M), name


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://127.0.0.1:99999", "http://[::1", "http://:80"])
def test_what_is_no_address_is_told_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url]) == 3
    assert f"{url} is no address of an anvil-mux" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "anvil_mux", "config", "--docs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT) == 1


# simulate


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


def test_simulate_compares_policies_on_profiles(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_simulate_in_json_has_an_object_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_simulate_takes_the_settings_of_a_compose_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(tmp_path, policy={"name": "debounce", "quiet": 4})
    words = ("--profile", "bursty", "--policy", "debounce,eager", "--batching", UNLIMITED)
    patient, eager = simulated(capsys, str(file), *words)
    assert (patient["makespan_seconds"], eager["makespan_seconds"]) == (23.0 + 3 * 4.0, 23.0)


def test_simulate_runs_a_profile_on_the_models_of_a_compose_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_simulate_runs_a_trace_on_the_backends_of_a_compose_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_simulate_makes_answers_as_engines_do_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_simulate_tells_where_policies_knew_what_swaps_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--profile", "balanced", "--policy", "cost_aware"]
    [learning] = simulated(capsys, *words)
    [knowing] = simulated(capsys, *words, "--known-costs")
    assert ("known_costs" in learning, knowing["known_costs"]) == (False, True)
    assert main(["simulate", *words, "--known-costs"]) == 0
    assert "cost_aware, known costs" in capsys.readouterr().out


def test_simulate_compares_evictions_where_several_models_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_simulate_routing_runs_prompts_on_replicas(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--routing", "--trace", "claude_code_le64k", "--sessions", "10,20", "--replicas", "2"]
    words += ["--policy", "round_robin,least_delay", "--seeds", "2", "--engine", "kv_tokens=200000"]
    rows = simulated(capsys, *words, "--csv", str(tmp_path / "runs.csv"))
    named = [(row["sessions"], row["seed"], row["policy"], row["default"]) for row in rows]
    assert named == [
        (sessions, seed, policy, policy == "least_delay")
        for sessions in (10, 20)
        for seed in (0, 1)
        for policy in ("round_robin", "least_delay")
    ]
    assert {row["replicas"] for row in rows} == {2}
    assert (tmp_path / "runs.csv").read_text().count("\n") == 1 + len(rows)
    assert main(["simulate", *words]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4
    assert "longer in 2 of 2" in table[1]


def test_simulate_routing_takes_the_policies_of_a_compose_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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


def test_simulate_routing_tells_who_keeps_objectives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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


def test_simulate_routing_draws_the_means(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "routing.svg"
    words = [
        "simulate",
        "--routing",
        "--trace",
        "claude_code_le64k",
        "--sessions",
        "5,10",
        "--plot",
        str(file),
    ]
    assert main([*words, "--policy", "least_delay,sticky"]) == 0
    assert file.stat().st_size > 1000


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
def test_simulate_says_what_does_not_go_together(
    capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *words])
    assert exit_.value.code == 2
    assert problem in capsys.readouterr().err


def test_simulate_tells_what_another_policy_would_have_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = event_log(tmp_path / "events", WORLD, EVENTS)
    was, eager, late = simulated(capsys, "--log", log, "--policy", "eager,time_slice")
    assert (was["policy"], was["violations"]) == ("(as logged)", None)
    figures = {key for key in was if key not in ("policy", "violations")}
    assert {key: was[key] for key in figures} == {key: eager[key] for key in figures}
    assert late["wait_mean_seconds"] > was["wait_mean_seconds"]


def test_simulate_checks_a_log_and_fails_if_it_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = event_log(tmp_path / "sound", WORLD, EVENTS)
    [was] = simulated(capsys, "--log", sound, "--check")
    assert was["violations"] == 0
    broken = event_log(tmp_path / "broken", WORLD, [e for e in EVENTS if e.kind != "draining"])
    assert main(["simulate", "--log", broken, "--check"]) == 1
    seen = capsys.readouterr()
    assert seen.out.splitlines()[1].split()[-1] == "1"
    assert "broken invariant: 8.000000 evicting a: it was ready" in seen.err


def test_simulate_draws_one_picture_of_all_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_picture_that_cannot_be_drawn_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "study", lambda *_, **__: pytest.fail("it runs"))
    assert main(["simulate", "--profile", "single", "--plot", "picture.bmp"]) == 1
    assert "must end in .png, .svg or .pdf" in capsys.readouterr().err


def test_whoever_sees_that_a_simulation_takes_long_is_told_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "PROGRESS_SECONDS", -1.0)
    words = ["simulate", "--profile", "single,bursty", "--policy", "eager"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().err == "anvil-mux: 1 of 2 runs\nanvil-mux: 2 of 2 runs\n"


def test_only_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        ([], "say what to run: --profile NAME, --trace FILE or --log EVENTS"),
        (["--profile", "nope"], "unknown profile 'nope'; known: single,"),
        (["--profile", "single", "--policy", "nope"], "unknown policy 'nope'; known: eager,"),
        (["--profile", "single", "--seeds", "0"], "must be a whole number of at least 1, not 0"),
        (["--profile", "single", "--clients", "4+4"], "are for --profile clients"),
        (["--profile", "clients", "--clients", "4+"], "must be how many clients each model has, as 4+4"),
        (["--profile", "clients", "--think", "-1"], "must be seconds, a number of at least 0, not -1"),
        (["--profile", "clients", "--load", "nan"], "must be seconds, a number of at least 0, not nan"),
        (["--profile", "single", "--check"], "--check is for what --log names"),
    ],
)
def test_wrong_usage_of_simulate_is_told(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *words])
    assert left.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("source", ["--trace", "--log"])
def test_simulate_says_plainly_that_a_file_is_missing(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", source, "nowhere.jsonl"]) == 1
    seen = capsys.readouterr()
    assert (seen.out, "nowhere.jsonl: " in seen.err, seen.err.count("\n")) == ("", True, 1)


# Commands that ask a running anvil-mux


def test_load_waits_until_the_model_is_ready_and_ps_shows_it(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "a", "--url", url]) == 0
    assert "a is loaded" in capsys.readouterr().err
    assert main(["ps", "--url", url]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    columns = "MODEL STATE SIZE GPUS LEASES WAITING LOADED-IN UNTIL LAST ERROR"
    assert head == columns.split()
    assert rows[0][:5] == ["a", "ready", "0", "0", "0"]
    assert rows[0][-2:] == ["next", "swap"]
    assert rows[1] == ["b", "stopped", "0", "0", "0"]


def test_ps_in_json_is_what_healthz_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--json", "--url", url]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["status"] == "ok"
    assert set(seen["models"]) == {"a", "b"}


def test_colours_are_only_for_those_who_can_see_them(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "a", "--url", url]) == 0
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["ps", "--url", url]) == 0
    painted = capsys.readouterr().out
    monkeypatch.delenv("FORCE_COLOR")
    assert main(["ps", "--url", url]) == 0
    plain = capsys.readouterr().out
    assert "\x1b[32mready\x1b[0m" in painted
    assert "\x1b" not in plain
    assert painted.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


def test_commands_find_the_one_that_serves_the_file_at_hand(
    mux: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(mux.command[4]).parent
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.delenv("ANVIL_URL", raising=False)
    monkeypatch.chdir(folder)
    assert main(["ps", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["models"]) == {"a", "b"}


def test_logs_are_found_without_a_compose_file_at_hand(
    mux: Running,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(mux.command[4]).parent))
    monkeypatch.setenv("ANVIL_URL", url)
    monkeypatch.chdir(tmp_path)
    assert main(["load", "a"]) == 0
    assert main(["logs", "a"]) == 0
    assert "a: listens on" in capsys.readouterr().out
    monkeypatch.delenv("ANVIL_URL")
    assert main(["logs", "a", "--url", url]) == 0
    assert "a: listens on" in capsys.readouterr().out
    monkeypatch.setenv("ANVIL_URL", "http://127.0.0.1:1")
    assert main(["logs", "a"]) == 3
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["logs", "a", "--url", "127.0.0.1:1"]) == 3
    monkeypatch.delenv("ANVIL_URL")
    assert main(["logs", "a"]) == 78


def test_logs_of_one_that_runs_elsewhere_are_asked_for(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # it has told nobody here that it runs
    assert main(["load", "a", "--url", url]) == 0
    assert main(["logs", "a", "--url", url]) == 0
    assert "a: listens on" in capsys.readouterr().out
    assert main(["logs", "a", "--json", "-n", "1", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out)["service"] == "a"
    assert main(["logs", "nope", "--url", url]) == 1
    assert "The model `nope` does not exist. Known models: a, b." in capsys.readouterr().err
    assert main(["logs", "a", "-f", "--url", url]) == 1
    assert "-f follows a log only where both the engine and anvil-mux run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_cluster_needs_ray(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert main([command, "compose.yaml", "--cluster", "head:6379"]) == 1
    assert capsys.readouterr().err == (
        "anvil-mux: error: --cluster needs Ray: pip install 'anvil-mux[ray]' (bin/anvil-mux brings it)\n"
    )


def test_engines_that_whoever_reaches_them_may_steer_are_named_with_where_that_is() -> None:
    dev = Service(environment=(("VLLM_SERVER_DEV_MODE", "1"),))
    steered = [Backend(f"m.{host}", "m", host=host, engine="vllm", service=dev) for host in ("b", "c")]
    others = (Backend("n.b", "n", host="b", engine="vllm"), Backend("o.b", "o", host="b", service=dev))
    seen = [
        {"host": "b", "address": "10.0.0.2"},
        {"host": "c", "address": "127.0.0.2"},
        {"host": "d", "address": "10.0.0.3"},
    ]
    [warning] = _steered_by_all(Config((*steered, *others)), seen)
    assert warning == (
        "host b: m.b: VLLM_SERVER_DEV_MODE lets whoever reaches 10.0.0.2 put the engine to sleep and run"
        " /collective_rpc, with or without its API key; let a firewall admit anvil-mux's machine alone"
    )


def test_why_says_what_a_request_would_wait_for(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "a", "--url", url]) == 0
    assert main(["why", "a", "--url", url]) == 0
    assert (
        capsys.readouterr().out == "A request for a is served at once: it is resident on GPU 0, and idle.\n"
    )
    assert main(["why", "b", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "waits"
    assert main(["why", "nope", "--url", url]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_events_tell_what_happened_and_why(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "a", "--url", url]) == 0
    assert main(["load", "b", "--url", url]) == 0
    capsys.readouterr()

    def told(*words: str) -> str:
        assert main(["events", *words, "--url", url]) == 0
        return capsys.readouterr().out

    eventually(lambda: "b: ready after" in told())
    lines = [line.partition(" ")[2] for line in told().splitlines()]
    assert any(line.startswith("a: draining for b (") for line in lines)
    assert any(line.startswith("b: loading (") for line in lines)
    assert {line.split()[1] for line in told("a").splitlines()} == {"a:"}
    assert {json.loads(line)["model"] for line in told("b", "--json").splitlines()} == {"b"}


heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
"""A shell's background jobs ignore the signal, and their children inherit that."""


def test_events_can_be_followed(mux: Running, url: str) -> None:
    assert main(["load", "a", "--url", url]) == 0
    command = [sys.executable, "-m", "anvil_mux", "events", "-f", "b", "--json", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert process.stdout
        assert main(["load", "b", "--url", url]) == 0
        for line in process.stdout:
            event = json.loads(line)
            if event["kind"] == "ready" and event["at"] > time.time() - TIMEOUT:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130


def test_top_draws_one_picture_where_it_is_no_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "a", "--url", url]) == 0
    assert main(["top", "--url", url]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"anvil-mux {__version__}: ok, 0 in flight, 0 waiting")
    assert ["0", "ready", "a"] in [line.split() for line in shown]


def test_top_draws_anew_on_a_terminal_until_it_is_interrupted(mux: Running, url: str) -> None:
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "anvil_mux", "top", "--url", url]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=its_end, env=environment, preexec_fn=heed) as process:
        os.close(its_end)
        shown = b""
        while b"in flight" not in shown:
            shown += os.read(terminal, 65536)
        assert mux.chat("a")[0] == mux.chat("b")[0] == 200
        while shown.count(b"\x1b[H") < 2:
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    os.close(terminal)
    assert shown.startswith(b"\x1b[H")


@pytest.mark.parametrize(("word", "hint"), [("unlaod", "; did you mean unload?\n"), ("x", "file: x\n")])
def test_a_word_that_is_no_command_and_no_file_is_wrong_usage(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word])
    assert capsys.readouterr().err.endswith(hint)


def test_unload_puts_a_model_out(mux: Running, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "a", "--url", url]) == 0
    assert main(["unload", "a", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": "a", "success": True}
    assert main(["load", "b", "--url", url]) == 0
    assert mux.get("/healthz")["models"]["a"]["state"] == "stopped"
    capsys.readouterr()
    assert main(["unload", "a", "--url", url]) == 0
    assert capsys.readouterr().err == "anvil-mux: a is not resident, or is already being evicted\n"


def test_unload_says_that_the_drain_timeout_aborts_requests(
    mux: Running, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "a", "--url", url]) == 0
    capsys.readouterr()
    assert main(["unload", "a", "--url", url]) == 0
    assert "drain_timeout" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["unload", "--help"])
    assert "drain_timeout" in capsys.readouterr().out


def test_unload_of_a_model_that_is_loading_ends_its_process(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compose(state, "a", "b", load_seconds=600)
    with ThreadPoolExecutor(1) as pool, serving(file, state=state) as mux:
        url = f"http://127.0.0.1:{mux.port}"
        waiting = pool.submit(mux.chat, "a")
        mux.tells("a: loading")
        assert main(["unload", "a", "--url", url]) == 0
        assert capsys.readouterr().err.startswith("anvil-mux: a is evicted once its requests have ended")
        status, _, text = waiting.result(TIMEOUT)
        assert (status, json.loads(text)["error"]["code"]) == (503, "cancelled")
        mux.tells("a: stopped")
        assert list(state.glob("**/a.json")) == []  # the record of its process


def test_a_pinned_model_stays_until_it_is_unpinned(
    mux: Running, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "a", "--url", url]) == 0
    assert main(["pin", "a", "--url", url]) == 0
    assert "a is pinned until it is unpinned" in capsys.readouterr().err
    status, headers, text = mux.chat("b")
    assert (status, headers["x-should-retry"]) == (422, "false")
    assert "beside the pinned a (see `anvil-mux unpin`)" in json.loads(text)["error"]["message"]
    assert main(["ps", "--url", url]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("a "))
    assert (row[1:3], row[-1]) == (["ready", "pinned"], "unpinned")
    assert main(["load", "b", "--url", url]) == 1
    assert main(["unpin", "a", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": "a", "success": True}
    assert mux.chat("b")[0] == 200


def test_what_the_server_refuses_is_told_in_its_own_words(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "nope", "--url", url]) == 1
    assert "The model `nope` does not exist. Known models: a, b." in capsys.readouterr().err


def test_logs_show_what_the_engine_printed(
    mux: Running, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = mux.command[4]
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(file).parent))
    assert main(["load", "a", "--url", url]) == 0
    capsys.readouterr()
    assert main(["logs", "a", "--file", file]) == 0
    assert "a: listens on http://127.0.0.1:" in capsys.readouterr().out
    assert main(["logs", "a", "--json", "-n", "1", "--file", file]) == 0
    assert json.loads(capsys.readouterr().out)["service"] == "a"
    assert main(["logs", "nope", "--file", file]) == 1
    assert "The model `nope` does not exist. Known models: a, b." in capsys.readouterr().err


def test_logs_are_those_of_the_anvil_mux_that_is_asked_whatever_compose_file_is_at_hand(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    compose(tmp_path, "a", project="other")
    (tmp_path / "anvil-mux" / "other").mkdir(parents=True)
    (tmp_path / "anvil-mux" / "other" / "a.log").write_text("printed by another project's engine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANVIL_URL", url)
    assert main(["load", "a"]) == 0
    assert main(["logs", "a"]) == 0
    assert "a: listens on" in capsys.readouterr().out
    monkeypatch.delenv("ANVIL_URL")
    assert main(["logs", "a", "--file", "compose.yaml"]) == 0  # none runs for this one
    assert capsys.readouterr().out == "printed by another project's engine\n"


def test_what_an_engine_prints_steers_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m \x9b2Jbell\x07 tab\tkept"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    compose(tmp_path, "a", project="other")
    (tmp_path / "anvil-mux" / "other").mkdir(parents=True)
    (tmp_path / "anvil-mux" / "other" / "a.log").write_text(evil + "\n")
    assert main(["logs", "a", "--file", "compose.yaml"]) == 0
    assert capsys.readouterr().out == "red \ufffd2Jbell\ufffd tab\tkept\n"


def test_what_an_engine_says_steers_no_terminal_of_a_command_that_asks() -> None:
    answer = json.dumps({"models": {"a\x1b[2J": ["\x1b[31mred", {"said": "\x1b]0;owned\x07"}]}}).encode()
    assert remote._answer("", 200, answer, (200,)) == {"models": {"a": ["red", {"said": ""}]}}


def test_logs_can_be_followed_until_the_engine_ends(mux: Running, url: str) -> None:
    file = mux.command[4]
    assert main(["load", "a", "--url", url]) == 0
    command = [sys.executable, "-m", "anvil_mux", "logs", "-f", "a", "--file", file]
    env = {**os.environ, "XDG_STATE_HOME": str(Path(file).parent)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("a: listens on ")
        assert mux.chat("a")[0] == 200
        assert main(["unload", "a", "--url", url]) == 0
        assert "a: POST /v1/chat/completions" in process.stdout.read()
        assert process.wait(TIMEOUT) == 0


# serve


def test_serve_tells_where_it_is_and_how_to_try_it(mux: Running) -> None:
    curl = mux.tells("^  (curl .*)")[1]
    assert mux.output[0].startswith(f"anvil-mux {__version__} serves http://127.0.0.1:{mux.port}")
    assert any(line.split() == ["a", "openai", "on", "GPU", "0"] for line in mux.output)
    done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode == 127:
        pytest.skip("curl is not installed")
    assert json.loads(done.stdout)["model"] == "a"


def test_an_address_that_others_can_reach_must_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["serve", str(compose(tmp_path)), "--host", "0.0.0.0"]) == 78
    assert "--insecure" in capsys.readouterr().err


def test_keys_make_an_address_fit_for_others() -> None:
    config = Config((), host="0.0.0.0")
    assert open_address(config, load_keys(None, {"ANVIL_API_KEYS": "some-long-key"})) == ""
    assert "key_file" in open_address(config, Keyring())


def test_from_the_root_a_path_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(compose(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert short(file) == "compose.yaml"
    monkeypatch.chdir("/")
    assert short(file) == file


def test_with_keys_the_commands_show_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.txt").write_text("the-first-key name=me\n")
    file = compose(tmp_path, key_file="keys.txt")
    with serving(file, state=tmp_path, environ={"ANVIL_API_KEYS": "the-other-key models=b"}) as running:
        assert '-H "Authorization: Bearer $ANVIL_API_KEY"' in running.tells("^  (curl .*)")[1]
        url = f"http://127.0.0.1:{running.port}"
        statuses = []
        for key in ("", "the-first-key", "the-other-key"):
            monkeypatch.setenv("ANVIL_API_KEY", key)
            statuses.append(main(["ps", "--url", url]))
        assert statuses == [1, 0, 1]
        assert "API key is missing" in capsys.readouterr().err
        assert "the-first-key" not in "".join(running.output)


def test_check_warns_of_a_key_that_may_do_more_than_its_line_seems_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.txt"
    file = compose(tmp_path, key_file="keys.txt")
    keys.write_text("the-first-key name=me\n")
    assert main(["check", str(file)]) == 0
    assert "may do everything" not in capsys.readouterr().err
    keys.write_text("the-first-key name=me admin\nthe-key-of-alice name=alice\n")
    assert main(["check", str(file)]) == 0
    told = capsys.readouterr().err
    assert f"warning: {keys}:2: the key of alice may do everything" in told
    assert "write: KEY name=alice models=*\n    see docs/security.md#keys\n" in told
    assert "the-key-of-alice" not in told


def test_keys_that_cannot_be_read_are_told_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["serve", str(compose(tmp_path, key_file="none.txt"))]) == 78
    assert "none.txt cannot be read" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_plainly(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(compose(tmp_path), "--port", port, state=tmp_path)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_folder_that_cannot_be_is_told_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "anvil_mux", "serve", str(compose(tmp_path))]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "file")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "anvil-mux/cli-test cannot be written (Not a directory)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_project_is_served_once(mux: Running) -> None:
    file = Path(mux.command[4])
    done = run(file, "--port", "0", state=file.parent)
    assert done.returncode == 1
    assert (
        f"another anvil-mux (process {mux.process.pid}) serves the project {PROJECT} already" in done.stderr
    )


def test_a_crash_loses_no_engine(state: Path) -> None:
    file = compose(state)
    first = serve(file, state=state)
    assert first.chat("a")[0] == 200
    pid = engine_pid(state, "a")
    first.stop(signal.SIGKILL)
    assert is_alive(pid)
    with serving(file, state=state) as second:
        assert second.get("/healthz")["models"]["a"]["state"] == "ready"
        assert second.chat("a")[0] == 200
        assert engine_pid(state, "a") == pid
        # Not started by this one, but evict by it all the same.
        assert second.chat("b")[0] == 200
        assert not is_alive(pid)


def test_engines_that_cannot_stay_side_by_side_are_not_both_taken_over(state: Path) -> None:
    file = compose(state)
    side_by_side = yaml.safe_load(file.read_text())
    side_by_side["services"]["b"]["x-anvil"]["gpus"] = ["1"]
    file.write_text(yaml.safe_dump(side_by_side))
    first = serve(file, state=state)
    assert [first.chat(name)[0] for name in ("a", "b")] == [200, 200]
    pids = {name: engine_pid(state, name) for name in ("a", "b")}
    first.stop(signal.SIGKILL)
    with serving(compose(state), state=state) as second:
        models = second.get("/healthz")["models"]
        assert sorted(model["state"] for model in models.values()) == ["ready", "stopped"]
        assert {name: is_alive(pid) for name, pid in pids.items()} == {
            name: models[name]["state"] == "ready" for name in ("a", "b")
        }


LEAVES_A_COMMAND = """
import os, signal, subprocess, sys
from anvil_mux.config.config import Config
from anvil_mux.serve.state_files import locked
with locked(Config(backends=(), project=sys.argv[1])) as lock:
    subprocess.Popen(["sh", "-c", 'cat "$0"; touch "$0".read', sys.argv[2]], pass_fds=[lock])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_waits_for_what_one_that_was_killed_has_docker_do(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = state / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    killed = [sys.executable, "-c", LEAVES_A_COMMAND, PROJECT, str(gate)]
    assert subprocess.run(killed, cwd=ROOT, timeout=TIMEOUT).returncode == -signal.SIGKILL
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(gate.write_text, "go")
        with locked(Config(backends=(), project=PROJECT)):
            assert (state / "gate.read").exists()
        opened.result(TIMEOUT)


def test_a_start_does_not_wait_for_such_a_command_for_ever(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = state / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setattr(anvil_mux.serve.state_files, "COMMANDS_SECONDS", 0.0)
    killed = [sys.executable, "-c", LEAVES_A_COMMAND, PROJECT, str(gate)]
    assert subprocess.run(killed, cwd=ROOT, timeout=TIMEOUT).returncode == -signal.SIGKILL
    refused = pytest.raises(CannotServe, match="commands of an anvil-mux that was killed")
    with refused, locked(Config(backends=(), project=PROJECT)):
        pass
    gate.write_text("go")


def test_a_signal_lets_requests_finish_and_engines_run_on(state: Path) -> None:
    running = serve(compose(state, tokens_per_second=25), state=state)
    with stream(running, "a", 50) as answer:
        os.kill(engine_pid(state, "a"), signal.SIGSTOP)  # or it may be through before the other signal comes
        running.process.send_signal(signal.SIGTERM)
        running.tells("waiting up to 30 s for 1 request")
        os.kill(engine_pid(state, "a"), signal.SIGCONT)
        rest = answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert running.process.wait(TIMEOUT) == 0
    running.stop()
    assert is_alive(engine_pid(state, "a"))
    assert any("kept running for the next start (on_exit: keep): a" in line for line in running.output)


def test_a_second_signal_ends_at_once(state: Path) -> None:
    running = serve(compose(state, tokens_per_second=1), state=state)
    with stream(running, "a", 1000):
        running.process.send_signal(signal.SIGTERM)
        running.tells("waiting up to 30 s for 1 request")
        assert running.cut_short(signal.SIGINT) == 130
    assert is_alive(engine_pid(state, "a"))


def test_while_it_drains_it_is_not_ready_and_says_when_to_come_again(state: Path) -> None:
    running = serve(compose(state, tokens_per_second=25), "--on-exit", "stop", state=state)
    with stream(running, "a", 50) as answer:
        os.kill(engine_pid(state, "a"), signal.SIGSTOP)
        running.process.send_signal(signal.SIGTERM)
        running.tells("waiting up to 30 s for 1 request")
        assert running.request("GET", "/readyz")[0] == 503
        assert running.request("GET", "/livez")[0] == 200
        for model in ("a", "b"):
            status, headers, text = running.chat(model)
            assert (status, headers["retry-after"]) == (503, "10")
            assert json.loads(text)["error"]["code"] == "shutting_down"
        os.kill(engine_pid(state, "a"), signal.SIGCONT)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert running.process.wait(TIMEOUT) == 0
    with pytest.raises(ConnectionRefusedError):
        running.request("GET", "/readyz")


def test_a_container_is_healthy_while_its_anvil_mux_is_ready(state: Path) -> None:
    check = [sys.executable, str(ROOT / "contrib" / "healthy.py")]
    environ = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}

    def health() -> subprocess.CompletedProcess[str]:
        return subprocess.run(check, env=environ, capture_output=True, text=True, timeout=TIMEOUT)

    assert health().returncode == 1
    running = serve(compose(state), state=state)
    assert (health().returncode, "[+]accepting ok" in health().stdout) == (0, True)
    running.stop()
    assert health().returncode == 1


def test_who_hangs_and_is_aborted_tells_what_its_threads_were_at(state: Path) -> None:
    running = begin(compose(state), state=state)
    running.tells("^  curl")  # no request: a thread that ends just then ends the telling
    assert running.stop(signal.SIGABRT) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in running.output
    assert any("in _run" in line for line in running.output)


def test_requests_that_outlast_the_drain_are_cut_and_counted(state: Path) -> None:
    running = serve(compose(state, tokens_per_second=1), "--drain-timeout", "0", state=state)
    with stream(running, "a", 1000):
        assert running.stop() == 0
    assert any("severed after 0 s: 1 request" in line for line in running.output)


def test_on_exit_stop_stops_the_engines(state: Path) -> None:
    running = serve(compose(state), "--on-exit", "stop", state=state)
    assert running.chat("a")[0] == 200
    pid = engine_pid(state, "a")
    assert running.stop() == 0
    assert not is_alive(pid)


def test_what_is_still_loading_at_the_end_is_not_left_half_loaded(state: Path) -> None:
    running = serve(compose(state, load_seconds=600), "--on-exit", "keep", state=state)
    hurried = {"x-stainless-read-timeout": "0.1"}
    while not (state / "anvil-mux" / PROJECT / "a.json").exists():
        body = {"model": "a", "messages": []}
        assert running.request("POST", "/v1/chat/completions", body, headers=hurried)[0] == 503
    pid = engine_pid(state, "a")
    assert running.stop() == 0
    assert not is_alive(pid)
    assert running.output[-2:] == ["anvil-mux: stopping a: it was still loading", "anvil-mux: stopped"]


def test_a_half_loaded_engine_does_not_hold_up_the_next_start(state: Path) -> None:
    """It is looked at while we listen; systemd and requests for the same GPU wait until it is gone."""
    file = compose(state)
    said = yaml.safe_load(file.read_text())
    said["services"]["a"]["command"] = ["bin/demo-engine", "--model", "a", "--load-seconds", "600"]
    file.write_text(yaml.safe_dump(said))
    first = serve(file, state=state)
    body = {"model": "a", "messages": []}
    while not (state / "anvil-mux" / PROJECT / "a.json").exists():
        hurried = {"x-stainless-read-timeout": "0.1"}
        assert first.request("POST", "/v1/chat/completions", body, headers=hurried)[0] == 503
    pid = engine_pid(state, "a")
    first.stop(signal.SIGKILL)
    with notified(state / "notify") as hears, ThreadPoolExecutor() as pool:
        second = begin(file, state=state, environ={"NOTIFY_SOCKET": str(state / "notify")})
        try:
            second.wait_until_listening()
            asked = pool.submit(second.chat, "b")
            assert hears() == b"READY=1\n"
            assert not is_alive(pid)
            assert second.request("GET", "/readyz")[0] == 200
            assert asked.result()[0] == 200
            stopping = (
                "anvil-mux: stopping a: it did not answer for a within 5 s (perhaps it was still loading)"
            )
            told = second.output
            assert [line.startswith("Try it") for line in told].index(True) < [
                line.startswith(stopping) for line in told
            ].index(True)
        finally:
            second.stop()


@contextmanager
def notified(address: Path) -> Iterator[Callable[[], bytes]]:
    """What systemd would hear there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hearer:
        hearer.settimeout(60.0)
        hearer.bind(str(address))
        yield lambda: hearer.recv(65536)


def test_engines_that_the_file_has_no_longer_are_stopped(state: Path) -> None:
    first = serve(compose(state, "a", "b"), state=state)
    assert first.chat("b")[0] == 200
    pid = engine_pid(state, "b")
    first.stop(signal.SIGKILL)
    with serving(compose(state, "a"), state=state) as second:
        assert not is_alive(pid)
        second.tells("stopping b: removed from the configuration")


def scaled(folder: Path, scale: int) -> Path:
    """A compose file of one demo engine on no GPU, so many times."""
    file = compose(folder, "a")
    written = yaml.safe_load(file.read_text())
    written["services"]["a"] |= {"scale": scale, "x-anvil": {"gpus": [], "preload": True}}
    file.write_text(yaml.safe_dump(written))
    return file


def test_a_scaled_process_is_several_replicas_and_those_beyond_a_smaller_scale_are_stopped(
    state: Path,
) -> None:
    first = serve(scaled(state, 3), state=state)
    backends = ["a-1", "a-2", "a-3"]
    eventually(lambda: len(first.get("/healthz")["models"]["a"]["backends"]) == 3)
    eventually(
        lambda: all(
            each["state"] == "ready" for each in first.get("/healthz")["models"]["a"]["backends"].values()
        )
    )
    pids = [engine_pid(state, name) for name in backends]
    first.stop(signal.SIGKILL)
    with serving(scaled(state, 2), state=state) as second:
        assert [is_alive(pid) for pid in pids] == [True, True, False]
        second.tells("stopping a-3: removed from the configuration")
        assert second.chat("a")[0] == 200


def test_a_hook_is_told_what_happens(state: Path) -> None:
    told = state / "told"
    hook = {"on": ["loaded"], "run": ["sh", "-c", 'cat >> "$0"; echo >> "$0"', str(told)]}
    file = compose(state, hooks=[hook])
    with serving(file, state=state) as running:
        assert running.chat("a")[0] == 200
        assert running.chat("b")[0] == 200
        eventually(lambda: told.exists() and told.read_text().count("\n") == 2)
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(event["event"], event["model"]) for event in events] == [("loaded", "a"), ("loaded", "b")]


def test_config_shows_hooks_as_the_file_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = compose(tmp_path, hooks=[{"on": "failed", "url": "http://x/y"}])
    assert main(["config", "--json", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["hooks"] == [{"on": ["failed"], "url": "http://x/y", "timeout": 10.0}]


def test_the_access_log_has_a_line_for_each_request(state: Path) -> None:
    log = state / "access.log"
    flags = ("--access-log", str(log), "--log-format", "json")
    with serving(compose(state), *flags, state=state) as running:
        assert running.chat("a")[0] == 200
        assert running.chat("nope")[0] == 404
        running.get("/healthz")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Requests of different connections stand in the order in which they were done with.
    assert sorted((line["model"], line["status"], line["code"]) for line in lines) == [
        ("", 404, "model_not_found"),
        ("a", 200, ""),
    ]
    events = [json.loads(line) for line in running.output if line.startswith("{")]
    assert ("ready", "a") in [(event["event"], event.get("model")) for event in events]
    assert not any(event["event"] == "request" for event in events)
    assert events[-1]["text"].startswith("stopped")


def test_the_metrics_have_every_request_that_was_answered_also_for_a_scraper_that_asks_for_openmetrics(
    state: Path,
) -> None:
    with serving(compose(state), state=state) as running:
        for model in ("a", "b", "a"):
            assert running.chat(model)[0] == 200
        assert running.answered(3) == 3
        text = running.request("GET", "/metrics")[2]
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        _, headers, open_metrics = running.request("GET", "/metrics", headers=accept)
    for told in text, open_metrics:
        assert 'anvil_swaps_total{from="a",result="ok",to="b",way="stop"} 1.0' in told
        assert 'anvil_model_state{model="a",state="ready"} 1.0' in told
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.endswith("# EOF\n")


def test_quiet_tells_where_it_is_and_only_what_is_wrong(state: Path) -> None:
    with serving(compose(state), "--quiet", state=state) as running:
        assert running.chat("a")[0] == 200
        os.kill(engine_pid(state, "a"), signal.SIGKILL)
        running.tells("a: died")
        assert running.chat("a")[0] == 200
    ours = [line for line in running.output if not line.startswith(("anvil-mux", "  "))]
    assert len(ours) == 1
    assert ours[0].endswith("a: died: was killed by SIGKILL")


def test_what_an_engine_printed_before_it_died_is_told(state: Path) -> None:
    with serving(compose(state), state=state) as running:
        assert running.chat("a")[0] == 200
        os.kill(engine_pid(state, "a"), signal.SIGKILL)
        log = seen(lambda: running.get("/healthz")["models"]["a"]["backends"]["a"]["log"], bool)
    assert any("a: listens on" in line for line in log)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_requests_are_served_on_one_cpu_and_engines_still_have_all(state: Path) -> None:
    with serving(compose(state), state=state) as running:
        assert running.chat("a")[0] == 200
        assert os.sched_getaffinity(engine_pid(state, "a")) == os.sched_getaffinity(0)
        found = affinities(running.process.pid)
        pinned = [cpus for cpus in found if len(cpus) == 1]
        assert len(pinned) >= 3  # who accepts, the pump, a request
        assert all(cpus == pinned[0] for cpus in pinned)
        assert os.sched_getaffinity(0) in found


def test_no_thread_is_pinned_where_that_is_not_wanted(state: Path) -> None:
    with serving(compose(state), "--no-pin", state=state) as running:
        assert running.chat("a")[0] == 200
        everywhere = os.sched_getaffinity(0)
        assert all(cpus == everywhere for cpus in affinities(running.process.pid))


def test_check_shows_who_stays_and_who_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("""
        x-anvil: {runtime: process, gpus: ["0"], any_of: {any: [b, a], warm: {models: [a], swap: never}}}
        services:
          a: {command: [x], x-anvil: {gpus: ["0"], drain_timeout: none, home: true}}
          b: {command: [x], x-anvil: {gpus: ["0"], drain_timeout: 5m}}
          c: {command: [x], x-anvil: {gpus: ["0"]}}
    """)
    assert main(["check", str(file)]) == 0
    assert [line.split()[5:] for line in capsys.readouterr().out.splitlines()[:4]] == [
        ["PORT", "DRAIN", "HOME"],
        ["free", "none", "after", "300", "s"],
        ["free", "300", "s"],
        ["free"],
    ]
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[4:] == ["any: any of b, a", "warm: any of a, swap: never"]
    assert main(["check", "--json", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["drain"], each["home"]) for each in told["models"]] == [
        ("none", "after 300 s"),
        ("300 s", ""),
        ("", ""),
    ]
    assert told["any_of"]["warm"] == {"models": ["a"], "swap": "never"}
    assert main(["config", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["any_of"]["any"] == {"models": ["b", "a"], "swap": "allowed"}


def test_the_address_is_that_of_the_last_file_that_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for variable in ("ANVIL_URL", "ANVIL_LISTEN", "COMPOSE_FILE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "compose.yaml").write_text("x-anvil: {listen: '127.0.0.1:${AT:-81}'}\nservices: {}")
    (tmp_path / "compose.override.yaml").write_text("x-anvil: {max_queue: 5}")
    given = argparse.Namespace(url=None)
    assert asking.address(given) == "http://127.0.0.1:81"
    (tmp_path / "compose.override.yaml").write_text("x-anvil: {listen: '127.0.0.1:82'}")
    assert asking.address(given) == "http://127.0.0.1:82"
