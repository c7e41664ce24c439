"""`serve` as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
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

import anvil_mux.serve.state_files
from anvil_mux import __version__
from anvil_mux.cli.main import main
from anvil_mux.config.config import Config
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.serve.configuration import open_address
from anvil_mux.serve.invocation import CannotServe, short
from anvil_mux.serve.state_files import locked
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
