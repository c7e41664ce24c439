"""`serve` as a user runs it, in a process of its own."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import anvil_mux.serve.files
from anvil_mux import __version__
from anvil_mux.cli.main import main
from anvil_mux.config.config import Config
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.serve.files import locked, open_address
from anvil_mux.serve.invocation import CannotServe, short
from anvil_mux.state import is_served, state_folder
from tests.cli.demo import (
    PROJECT,
    ROOT,
    TIMEOUT,
    affinities,
    compose,
    engine_pid,
    eventually,
    is_alive,
    mux,
    run,
    state,
    stream,
    url,
)
from tests.running import Running, begin, seen, serve, serving

__all__ = ["mux", "state", "url"]


def test_serve_tells_where_it_is_and_how_to_try_it(mux):
    curl = mux.tells("^  (curl .*)")[1]
    assert mux.output[0].startswith(f"anvil-mux {__version__} serves http://127.0.0.1:{mux.port}")
    assert any(line.split() == ["a", "openai", "on", "GPU", "0"] for line in mux.output)
    done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode == 127:
        pytest.skip("curl is not installed")
    assert json.loads(done.stdout)["model"] == "a"


def test_an_address_that_others_can_reach_must_be_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["serve", str(compose(tmp_path)), "--host", "0.0.0.0"]) == 78
    assert "--insecure" in capsys.readouterr().err


def test_keys_make_an_address_fit_for_others():
    config = Config((), host="0.0.0.0")
    assert open_address(config, load_keys(None, {"ANVIL_API_KEYS": "some-long-key"})) == ""
    assert "key_file" in open_address(config, Keyring())


def test_from_the_root_a_path_is_told_whole(tmp_path, monkeypatch):
    file = str(compose(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert short(file) == "compose.yaml"
    monkeypatch.chdir("/")
    assert short(file) == file


def test_with_keys_the_commands_show_theirs(tmp_path, capsys, monkeypatch):
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


def test_keys_that_cannot_be_read_are_told_before_anything_is_touched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["serve", str(compose(tmp_path, key_file="none.txt"))]) == 78
    assert "none.txt cannot be read" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_plainly(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(compose(tmp_path), "--port", port, state=tmp_path)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_project_is_served_once(mux):
    file = Path(mux.command[4])
    done = run(file, "--port", "0", state=file.parent)
    assert done.returncode == 1
    assert (
        f"another anvil-mux (process {mux.process.pid}) serves the project {PROJECT} already" in done.stderr
    )


LEAVES_A_COMMAND = """
import os, signal, subprocess, sys
from anvil_mux.config.config import Config
from anvil_mux.serve.files import locked
with locked(Config(backends=(), project=sys.argv[1])) as lock:
    subprocess.Popen(["sh", "-c", 'cat "$0"; touch "$0".read', sys.argv[2]], pass_fds=[lock])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_waits_for_what_one_that_was_killed_has_docker_do(state, monkeypatch):
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


def test_a_start_does_not_wait_for_such_a_command_for_ever(state, monkeypatch):
    gate = state / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setattr(anvil_mux.serve.files, "COMMANDS_SECONDS", 0.0)
    killed = [sys.executable, "-c", LEAVES_A_COMMAND, PROJECT, str(gate)]
    assert subprocess.run(killed, cwd=ROOT, timeout=TIMEOUT).returncode == -signal.SIGKILL
    refused = pytest.raises(CannotServe, match="commands of an anvil-mux that was killed")
    with refused, locked(Config(backends=(), project=PROJECT)):
        pass
    gate.write_text("go")


def test_a_state_folder_that_cannot_be_is_told_plainly(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    refused = pytest.raises(CannotServe, match=rf"anvil-mux/{PROJECT} cannot be written \(Not a directory\)")
    with refused, locked(Config(backends=(), project=PROJECT)):
        pass


def test_who_holds_the_lock_need_not_be_written_down(tmp_path, monkeypatch):
    """A disk that is full prevents no start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # no file may grow
    try:
        with locked(Config(backends=(), project=PROJECT)):
            assert is_served(state_folder(PROJECT, os.environ))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


# What ran before


def rewritten(file: Path, **services: dict[str, object]) -> Path:
    """The compose file with more keys in its services; ``gpus`` goes into their x-anvil."""
    said = yaml.safe_load(file.read_text())
    for name, keys in services.items():
        gpus = {"gpus": keys.pop("gpus")} if "gpus" in keys else {}
        said["services"][name] |= keys
        said["services"][name]["x-anvil"] |= gpus
    file.write_text(yaml.safe_dump(said))
    return file


def test_a_crash_loses_no_engine_that_can_stay(state):
    apart = rewritten(
        compose(state, "a", "b", "gone", "many", preload=True),
        b={"gpus": ["1"]},
        gone={"gpus": ["2"]},
        many={"gpus": [], "scale": 3},
    )
    first = serve(apart, state=state)
    names = ("a", "b", "gone", "many-1", "many-2", "many-3")

    def states() -> set[str]:
        models = first.get("/healthz")["models"].values()
        return {each["state"] for model in models for each in model["backends"].values()}

    eventually(lambda: states() == {"ready"})
    pids = {name: engine_pid(state, name) for name in names}
    first.stop(signal.SIGKILL)
    assert all(map(is_alive, pids.values()))
    together = rewritten(compose(state, "a", "b", "many"), many={"gpus": [], "scale": 2})
    with serving(together, state=state) as second:
        models = second.get("/healthz")["models"]
        kept, other = sorted(("a", "b"), key=lambda name: str(models[name]["state"]))
        assert [models[name]["state"] for name in (kept, other)] == ["ready", "stopped"]
        assert [name for name in names if is_alive(pids[name])] == [kept, "many-1", "many-2"]
        for removed in ("gone", "many-3"):
            second.tells(f"stopping {removed}: removed from the configuration")
        assert second.chat("many")[0] == second.chat(kept)[0] == 200
        assert engine_pid(state, kept) == pids[kept]
        # Not started by this one, but evicted by it all the same.
        assert second.chat(other)[0] == 200
        assert not is_alive(pids[kept])


def test_an_engine_that_is_half_loaded_is_neither_left_so_nor_does_it_hold_up_the_next_start(state):
    """It is looked at while we listen; systemd and requests for the same GPU wait until it is gone."""
    file = compose(state)
    said = yaml.safe_load(file.read_text())
    said["services"]["a"]["command"] = ["bin/demo-engine", "--model", "a", "--load-seconds", "600"]
    file.write_text(yaml.safe_dump(said))
    record = state / "anvil-mux" / PROJECT / "a.json"

    def ask_until_it_loads(running: Running) -> int:
        hurried = {"x-stainless-read-timeout": "0.1"}
        while not record.exists():
            body = {"model": "a", "messages": []}
            assert running.request("POST", "/v1/chat/completions", body, headers=hurried)[0] == 503
        return engine_pid(state, "a")

    first = serve(file, state=state)
    pid = ask_until_it_loads(first)
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
                stopping in line for line in told
            ].index(True)
            pid = ask_until_it_loads(second)
        finally:
            assert second.stop() == 0
    assert not is_alive(pid)
    texts = [line.partition(" ")[2] for line in second.output[-2:]]
    assert texts == ["anvil-mux: stopping a: it was still loading", "anvil-mux: stopped"]


@contextmanager
def notified(address: Path) -> Iterator[Callable[[], bytes]]:
    """What systemd would hear there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hearer:
        hearer.settimeout(60.0)
        hearer.bind(str(address))
        yield lambda: hearer.recv(65536)


# The end


def test_a_signal_lets_requests_finish_and_nobody_else_in_and_engines_run_on(state):
    running = serve(compose(state, tokens_per_second=25), state=state)
    with stream(running, "a", 50) as answer:
        os.kill(engine_pid(state, "a"), signal.SIGSTOP)  # or it may be through before all is asked
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
    running.stop()
    with pytest.raises(ConnectionRefusedError):
        running.request("GET", "/readyz")
    assert is_alive(engine_pid(state, "a"))
    assert any("kept running for the next start (on_exit: keep): a" in line for line in running.output)


def test_a_second_signal_ends_at_once(state):
    running = serve(compose(state, tokens_per_second=1), "--no-pin", state=state)
    with stream(running, "a", 1000):
        everywhere = os.sched_getaffinity(0)
        assert all(cpus == everywhere for cpus in affinities(running.process.pid)), "--no-pin"
        running.process.send_signal(signal.SIGTERM)
        running.tells("waiting up to 30 s for 1 request")
        assert running.cut_short(signal.SIGINT) == 130
    assert is_alive(engine_pid(state, "a"))


def test_requests_that_outlast_the_drain_are_cut_and_engines_that_shall_not_run_on_are_stopped(state):
    flags = ("--drain-timeout", "0", "--on-exit", "stop")
    running = serve(compose(state, tokens_per_second=1), *flags, state=state)
    with stream(running, "a", 1000):
        pid = engine_pid(state, "a")
        assert running.stop() == 0
    assert any("severed after 0 s: 1 request" in line for line in running.output)
    assert not is_alive(pid)


def test_a_container_is_healthy_until_its_anvil_mux_hangs_and_is_aborted_and_tells_at_what(state):
    check = [sys.executable, str(ROOT / "contrib" / "healthy.py")]
    environ = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}

    def health() -> subprocess.CompletedProcess[str]:
        return subprocess.run(check, env=environ, capture_output=True, text=True, timeout=TIMEOUT)

    running = serve(compose(state), state=state)
    found = health()
    assert (found.returncode, "[+]accepting ok" in found.stdout) == (0, True)
    assert running.stop(signal.SIGABRT) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in running.output
    assert any("in _run" in line for line in running.output)
    assert health().returncode == 1


# What it tells


def test_hooks_and_the_access_log_are_told_what_happens(state):
    told, log = state / "told", state / "access.log"
    hook = {"on": ["loaded"], "run": ["sh", "-c", 'cat >> "$0"; echo >> "$0"', str(told)]}
    flags = ("--access-log", str(log), "--log-format", "json")
    with serving(compose(state, hooks=[hook]), *flags, state=state) as running:
        assert [running.chat(name)[0] for name in ("a", "b", "nope")] == [200, 200, 404]
        running.get("/healthz")
        eventually(lambda: told.exists() and told.read_text().count("\n") == 2)
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(event["event"], event["model"]) for event in events] == [("loaded", "a"), ("loaded", "b")]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Requests of different connections stand in the order in which they were done with.
    assert sorted((line["model"], line["status"], line["code"]) for line in lines) == [
        *[("", 404, "model_not_found"), ("a", 200, ""), ("b", 200, "")]
    ]
    events = [json.loads(line) for line in running.output if line.startswith("{")]
    assert ("ready", "a") in [(event["event"], event.get("model")) for event in events]
    assert not any(event["event"] == "request" for event in events)
    assert events[-1]["text"].startswith("stopped")


def test_the_metrics_have_every_request_that_was_answered_also_for_a_scraper_that_asks_for_openmetrics(mux):
    before = mux.answered()
    for model in ("a", "b", "a"):
        assert mux.chat(model)[0] == 200
    assert mux.answered(before + 3) == before + 3
    text = mux.request("GET", "/metrics")[2]
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    _, headers, open_metrics = mux.request("GET", "/metrics", headers=accept)
    for told in text, open_metrics:
        assert 'anvil_swaps_total{from="a",result="ok",to="b",way="stop"} 1.0' in told
        assert 'anvil_model_state{model="a",state="ready"} 1.0' in told
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.endswith("# EOF\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_requests_are_served_on_one_cpu_and_engines_still_have_all(mux):
    assert mux.chat("a")[0] == 200
    assert os.sched_getaffinity(engine_pid(Path(mux.command[4]).parent, "a")) == os.sched_getaffinity(0)
    found = affinities(mux.process.pid)
    pinned = [cpus for cpus in found if len(cpus) == 1]
    assert len(pinned) >= 3  # who accepts, the pump, a request
    assert all(cpus == pinned[0] for cpus in pinned)
    assert os.sched_getaffinity(0) in found


def test_quiet_tells_only_what_is_wrong_and_what_an_engine_printed_before_it_died_can_be_asked(state):
    with serving(compose(state), "--quiet", state=state) as running:
        assert running.chat("a")[0] == 200
        os.kill(engine_pid(state, "a"), signal.SIGKILL)
        running.tells("a: died")
        log = seen(lambda: running.get("/healthz")["models"]["a"]["backends"]["a"]["log"], bool)
        assert any("a: listens on" in line for line in log)
        assert running.chat("a")[0] == 200
    notices = ("anvil-mux", "  ")
    ours = [each for each in running.output if " anvil-mux: " not in each and not each.startswith(notices)]
    assert len(ours) == 1
    assert ours[0].endswith("a: died: was killed by SIGKILL")
