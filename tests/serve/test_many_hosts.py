"""A whole anvil-mux over three simulated hosts: served, drained, killed and found again."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from anvil_mux.cli.main import main
from tests.cli.demo import engine_of
from tests.host.test_processes import gone, running
from tests.running import Running, seen, serve, serving

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = ["--host", "$$HOST", "--load-seconds", "0.1", "--tokens-per-second", "400"]


def service(model, **settings):
    return {
        "command": ["bin/demo-engine", *FLAGS, "--model", model],
        "working_dir": str(ROOT),
        "x-anvil": settings,
    }


SERVICES = {
    "here": service("here"),
    "far": service("far", hosts=["beta"], gpu_count=1),
    "roam": service("roam", hosts="any", gpu_count=1),
}


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "compose.yaml"
    write(made, SERVICES)
    return made


def write(file, services):
    top = {"runtime": "process", "project": "many-hosts", "policy": "eager"}
    file.write_text(yaml.safe_dump({"x-anvil": top, "services": services}))


def backends(mux: Running):
    models = mux.get("/healthz")["models"]
    return {name: each for model in models.values() for name, each in model["backends"].items()}


def ready(mux: Running):
    return sorted(name for name, each in backends(mux).items() if each["state"] == "ready")


def code_of(text):
    return json.loads(text)["error"]["code"]


def test_models_on_several_hosts_have_one_address_and_a_host_is_drained(file, tmp_path):
    with serving(file, "--cluster", "local", state=tmp_path / "state") as mux:
        for model in SERVICES:
            assert mux.chat(model)[0] == 200, mux.output
        assert ready(mux) == ["far.beta.0", "here", "roam.alpha.0"]
        hosts = {each["host"]: each for each in mux.get("/hosts")["hosts"]}
        assert {name: each["state"] for name, each in hosts.items()} == dict.fromkeys(
            ("local", "alpha", "beta", "gamma"), "here"
        )
        assert backends(mux)["far.beta.0"]["host"] == "beta"

        assert mux.request("POST", "/hosts/drain", {"host": "beta"})[0] == 200
        assert seen(lambda: ready(mux), lambda names: "far.beta.0" not in names) == ["here", "roam.alpha.0"]
        status, headers, text = mux.chat("far")
        assert (status, code_of(text)) == (503, "host_unavailable")
        assert float(headers["retry-after"]) > 0.0
        assert mux.request("POST", "/hosts/drain", {"host": "alpha"})[0] == 200
        assert mux.chat("roam")[0] == 200
        assert seen(lambda: ready(mux), lambda names: "roam.alpha.0" not in names) == ["here", "roam.gamma.0"]
        assert mux.request("POST", "/hosts/undrain", {"host": "beta"})[0] == 200
        assert mux.chat("far")[0] == 200

        status, _, text = mux.request("POST", "/hosts/gone", {"host": "gamma"})
        assert (status, "is not lost" in text) == (400, True)
        status, _, text = mux.request("POST", "/hosts/drain", {"host": "delta"})
        assert (status, "Known hosts: local, alpha, beta, gamma" in text) == (404, True)


def test_a_killed_anvil_mux_finds_its_engines_on_all_hosts_and_reads_their_logs_and_reloads_them(
    file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def logs(*words):
        main(["logs", *words])
        said = capsys.readouterr()
        return said.out + said.err

    first = serve(file, "--cluster", "local", state=tmp_path / "state")
    for model in SERVICES:
        assert first.chat(model)[0] == 200, first.output
    before = ready(first)
    first.stop(signal.SIGKILL)
    with serving(file, "--cluster", "local", state=tmp_path / "state") as mux:
        assert ready(mux) == before
        for model in SERVICES:
            assert mux.chat(model)[0] == 200
        assert not [line for line in mux.output if "loading" in line]
        for words in (["--url", f"127.0.0.1:{mux.port}"], ["--file", str(file)]):
            for name in ("here", "far", "far.beta.0"):
                assert "listens on" in logs(name, *words)
            assert "only where both the engine and anvil-mux run" in logs("far", "-f", *words)
            assert "nobody" in logs("nobody", *words)
        write(file, {"here": SERVICES["here"], "more": service("more", hosts=["gamma"], gpu_count=1)})
        assert mux.request("POST", "/reload", {})[0] == 200
        assert mux.chat("more")[0] == 200
        assert code_of(mux.chat("far")[2]) == "model_not_found"
        assert seen(lambda: ready(mux), lambda names: len(names) == 2) == ["here", "more.gamma.0"]


def engines_of(state, host):
    """The processes of engines that a simulated host has records of, by backend."""
    folder = state / "anvil-mux" / "simulated-hosts" / host / "anvil-mux"
    records = folder.glob("many-hosts-*/*.json")
    pids = {record.stem: engine_of(json.loads(record.read_text())["pid"]) for record in records}
    return {name: pid for name, pid in pids.items() if running(pid)}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("words", [["--all"], ["--file"]], ids=" ".join)
def test_engines_left_on_simulated_hosts_are_listed_and_ended(
    file, tmp_path, monkeypatch, capsys, how, words
):
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    mux = serve(file, "--cluster", "local", "--on-exit", "keep", state=state)
    assert mux.chat("far")[0] == 200, mux.output
    engine = engines_of(state, "beta")["far.beta.0"]
    assert main(["stop", "--all"]) == 0
    assert "no engine was left running" in capsys.readouterr().err
    mux.stop(how)
    left = "left by many-hosts on the simulated host beta: far.beta.0 still runs"
    assert main(["ps", "--url", "127.0.0.1:1"]) == 3
    assert left in capsys.readouterr().err
    assert main(["check", str(file)]) == 0
    assert left in capsys.readouterr().err
    assert main(["stop", *words, *([str(file)] if words == ["--file"] else [])]) == 0
    assert "many-hosts on the simulated host beta: stopped far.beta.0" in capsys.readouterr().err
    gone(engine)


OTHER = {"here": SERVICES["here"], "other": service("other", hosts=["beta"], gpu_count=1)}


def test_an_engine_elsewhere_that_the_file_no_longer_has_is_ended_by_the_next_start(file, tmp_path):
    state = tmp_path / "state"
    with serving(file, "--cluster", "local", state=state, on_exit="keep") as mux:
        assert mux.chat("far")[0] == 200, mux.output
    engine = engines_of(state, "beta")["far.beta.0"]
    write(file, OTHER)
    with serving(file, "--cluster", "local", state=state) as mux:
        mux.tells("stopping far.beta.0: removed from the configuration")
        gone(engine)
        assert mux.chat("other")[0] == 200, mux.output
        assert set(engines_of(state, "beta")) == {"other.beta.0"}


def test_an_engine_that_a_reload_removed_from_a_lost_host_ends_before_another_has_its_gpu(file, tmp_path):
    state = tmp_path / "state"
    with serving(file, "--cluster", "local", state=state) as mux:
        host = int(mux.tells(r"host beta is process (\d+)")[1])
        assert mux.chat("far")[0] == 200, mux.output
        engine = engines_of(state, "beta")["far.beta.0"]
        for pid in (host, engine):
            os.kill(pid, signal.SIGSTOP)
        mux.tells("host beta is lost")
        write(file, OTHER)
        assert mux.request("POST", "/reload", {})[0] == 200
        for pid in (engine, host):
            os.kill(pid, signal.SIGCONT)
        status, _, text = seen(lambda: mux.chat("other"), lambda answer: answer[0] == 200)
        assert status == 200, text
        gone(engine)
        assert set(engines_of(state, "beta")) == {"other.beta.0"}
        assert not [line for line in mux.output if "not found when" in line], mux.output


def says_who_is_away(mux: Running) -> None:
    """A host that is not there is a warning, and its models say so."""
    mux.tells("warning: .*away|warning: .*delta")
    assert mux.chat("here")[0] == 200
    status, _, text = mux.chat("away")
    assert (status, code_of(text)) == (503, "host_unavailable")
    assert "delta" in text
    assert not mux.get("/healthz")["problems"]


AWAY = {"away": service("away", hosts=["delta"], gpu_count=1)}


def test_a_host_of_no_cluster_is_not_there(file, tmp_path):
    write(file, {"here": SERVICES["here"], **AWAY})
    with serving(file, state=tmp_path / "state") as mux:
        says_who_is_away(mux)


def test_a_host_whose_power_is_cut_is_lost_and_its_models_are_served_elsewhere(file, tmp_path):
    write(file, SERVICES | AWAY)
    with serving(file, "--cluster", "local", state=tmp_path / "state") as mux:
        says_who_is_away(mux)
        assert mux.chat("far")[0] == mux.chat("roam")[0] == 200
        assert ready(mux) == ["far.beta.0", "here", "roam.alpha.0"]
        os.kill(int(mux.tells(r"host alpha is process (\d+)")[1]), signal.SIGTERM)
        assert mux.chat("roam")[0] == 200, mux.output
        assert "roam.alpha.0" in ready(mux) or ready(mux) == ["far.beta.0", "here", "roam.gamma.0"]
        assert mux.chat("far")[0] == 200
        state = seen(lambda: mux.get("/hosts")["hosts"][1]["state"], lambda state: state != "here")
        assert state == "lost"
        assert mux.chat("roam")[0] == 200
        assert mux.get("/healthz")["hosts"]["alpha"]["lost"]
