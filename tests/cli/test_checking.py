"""`check` and `config`: what compose files come to."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli.checking import steered_by_all
from anvil_mux.cli.main import main
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS, Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.host import cuda_checkpoint
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.serve.files import Known, LearnedFile
from anvil_mux.state import state_folder
from tests.cli.demo import PROJECT, ROOT, cli, compose, mux, url

__all__ = ["cli", "mux", "url"]


def test_check_lists_what_will_be_served(tmp_path, cli):
    seen = cli("check", compose(tmp_path))
    assert [line.split() for line in seen.out.splitlines()] == [
        ["MODEL", "BACKEND", "ENGINE", "GPUS", "VRAM", "PORT"],
        ["a", "a", "openai", "0", "all", "free"],
        ["b", "b", "openai", "0", "all", "free"],
    ]
    assert "2 backends, 0 warnings; will listen on 127.0.0.1:9292" in seen.err


def test_check_names_hosts_where_there_are_several(tmp_path, cli):
    file = tmp_path / "compose.yaml"
    file.write_text("""
        x-anvil: {runtime: process, gpus: ["0"], machines: {h: {gpus: ["0", "1"]}}}
        services: {a: {command: [x], x-anvil: {hosts: [local, h], gpu_count: 1}}}
    """)
    assert [line.split() for line in cli("check", file).out.splitlines()] == [
        ["MODEL", "BACKEND", "ENGINE", "GPUS", "VRAM", "PORT", "HOST"],
        ["a", "a", "openai", "0", "all", "free", "local"],
        ["a", "a.h.0", "openai", "0", "all", "free", "h"],
        ["a", "a.h.1", "openai", "1", "all", "free", "h"],
    ]
    models = cli.json("check", file)["models"]
    assert [(model["gpus"], model["host"]) for model in models] == [
        (["0"], "local"),
        (["0"], "h"),
        (["1"], "h"),
    ]
    seen = cli.json("config", file)
    assert (seen["gpus"], seen["machines"]) == ({"0": {}}, {"h": {"gpus": {"0": {}, "1": {}}}})


def test_check_names_presets_where_there_are_some(tmp_path, cli):
    file = tmp_path / "compose.yaml"
    file.write_text("""
        x-anvil: {runtime: process}
        services:
          a: {command: [x], x-anvil: {presets: {fast: {system: Be quick.}}, loras: [law]}}
          b: {command: [x], x-anvil: {}}
    """)
    head, first, _ = [line.split() for line in cli("check", file).out.splitlines()]
    assert (head[-1], first[-1]) == ("PRESETS", "fast,law")
    seen = cli.json("check", file)
    assert [model["presets"] for model in seen["models"]] == [["fast", "law"], []]


def test_check_names_the_disk_space_for_prompts_where_there_is_some(tmp_path, cli):
    file = tmp_path / "compose.yaml"
    command = "[llama-server, -m, /m/a.gguf, -np, '2', --slot-save-path, /prompts]"
    file.write_text(f"""
        x-anvil: {{runtime: process}}
        services:
          a: {{command: {command}, x-anvil: {{prompt_cache: 4GiB}}}}
          b: {{command: [x], x-anvil: {{}}}}
    """)
    head, first, _ = [line.split() for line in cli("check", file).out.splitlines()]
    assert (head[-1], first[-2:]) == ("PROMPT_CACHE", ["4.0", "GiB"])


def test_check_names_the_lengths_of_queues_where_one_has_its_own(tmp_path, cli):
    file = tmp_path / "compose.yaml"
    services = "{a: {command: [x], x-anvil: {max_queue: 7}}, b: {command: [x], x-anvil: {}}}"
    file.write_text(f"x-anvil: {{runtime: process}}\nservices: {services}")
    told = cli.json("check", file)["models"]
    assert [each["max_queue"] for each in told] == ["7", ""]


def test_check_in_json_has_the_same(tmp_path, cli):
    seen = cli.json("check", compose(tmp_path))
    assert [(model["model"], model["gpus"]) for model in seen["models"]] == [("a", ["0"]), ("b", ["0"])]
    assert seen["problems"] == []


def test_check_names_every_problem_and_exits_with_78(tmp_path, cli):
    file = compose(tmp_path, polici="eager", drain_timeout="soon")
    seen = cli("check", file, code=78)
    assert seen.out == ""
    assert "polici" in seen.err
    assert "drain_timeout" in seen.err
    assert len(json.loads(cli("check", "--json", file, code=78).out)["problems"]) == 2


@pytest.mark.parametrize("command", ["check", "serve"])
def test_keys_and_certificates_that_cannot_be_used_are_problems(tmp_path, cli, command):
    (tmp_path / "keys.txt").write_text("short\n")
    file = compose(tmp_path, key_file="keys.txt", tls_cert="none.pem", tls_key="none.pem")
    said = cli(command, str(file), code=78).err
    assert "keys.txt:1: a key has at least 8 characters" in said
    assert "none.pem cannot be used: No such file" in said


def test_check_warns_of_an_address_that_serve_would_refuse(tmp_path, cli):
    file = compose(tmp_path, listen="0.0.0.0:9292")
    (warning,) = cli.json("check", file)["warnings"]
    assert warning.startswith("listen: 0.0.0.0 can be reached by others")


def test_check_warns_of_a_load_that_has_taken_longer_than_requests_may_wait(tmp_path, monkeypatch, cli):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = compose(tmp_path, "a", "b", project="waits", queue_timeout=650)
    folder = state_folder("waits", os.environ)
    folder.mkdir(parents=True)
    slow, quick = Cost("b", "a", "stop", 1.0, 651.0, 1), Cost("a", "b", "stop", 1.0, 649.0, 1)
    LearnedFile(folder, print).save(Known([slow, quick]))
    (warning,) = cli.json("check", file)["warnings"]
    assert warning.startswith("the load of a has taken 651 s, and queue_timeout is 650 s")


def test_check_names_the_memory_to_declare_for_a_model_that_shares_its_gpu(tmp_path, monkeypatch, cli):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = compose(tmp_path, "a", "b", project="hints")
    held = {name: {"0": amount} for name, amount in (("a", (18 << 30) + 1), ("b", 1 << 30))}
    prints = [Footprint(name, "stop", each, {"0": 0}) for name, each in held.items()]
    folder = state_folder("hints", os.environ)
    folder.mkdir(parents=True)
    LearnedFile(folder, print).save(Known(footprints=[prints[0], replace(prints[1], described="otherwise")]))
    (hint,) = cli.json("check", file)["hints"]
    assert hint.startswith("a held 18.1GiB of each GPU when it last ran: declare x-anvil: {vram: 18.1GiB}")
    compose(tmp_path, "a", project="hints")
    assert "hint" not in cli("check", file).err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_checkpoint_that_this_machine_cannot_do_is_refused(tmp_path, monkeypatch, cli, command):
    monkeypatch.setattr(cuda_checkpoint.Checkpointer, "why_not", lambda *_, **__: "needs NVIDIA driver 570")
    file = tmp_path / "compose.yaml"
    service = {"command": "x", "x-anvil": {"gpus": ["0"], "evict_to": ["checkpoint", "stop"]}}
    file.write_text(yaml.safe_dump({"x-anvil": {"runtime": "process"}, "services": {"a": service}}))
    assert (
        "a.x-anvil.evict_to: checkpoint cannot work: needs NVIDIA driver 570"
        in cli(command, str(file), code=78).err
    )
    assert main(["config", str(file)]) == 0


AS_NOBODY = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
from anvil_mux.host import cuda_checkpoint
cuda_checkpoint.Checkpointer.why_not = lambda *_, **__: None  # the driver and the GPU are there
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
def test_check_names_the_rights_that_a_checkpoint_lacks(public):
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


def test_check_does_not_ask_docker_for_models_that_are_served_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    file = tmp_path / "compose.yaml"
    there = {"image": "scratch", "profiles": ["elsewhere"], "x-anvil": {"url": "http://127.0.0.1:1"}}
    file.write_text(yaml.safe_dump({"x-anvil": {"project": PROJECT}, "services": {"there": there}}))
    main(["check", str(file)])
    told = capsys.readouterr().err
    assert "1 backend" in told
    assert "images" not in told


def test_a_compose_file_is_found_upward(tmp_path, monkeypatch, cli):
    compose(tmp_path, "only")
    inner = tmp_path / "some" / "where"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert "only" in cli("check").out


def test_config_says_where_each_value_comes_from(tmp_path, monkeypatch, cli):
    file = compose(tmp_path, max_wait=7)
    monkeypatch.setenv("ANVIL_QUEUE_TIMEOUT", "90")
    seen: dict[str, dict[str, Any]] = cli.json("config", "--show-origin", file)
    assert seen["max_wait"]["value"] == 7
    assert seen["max_wait"]["origin"].startswith(str(file))
    assert seen["queue_timeout"] == {"value": 90, "origin": "ANVIL_QUEUE_TIMEOUT"}
    assert seen["listen"] == {"value": "127.0.0.1:9292", "origin": "default"}
    assert ["max_wait", "7.0"] in [line.split() for line in cli("config", file).out.splitlines()]


def test_config_shows_no_password_of_a_store(tmp_path, cli):
    file = compose(tmp_path, routing={"store": "redis://:secret@10.0.0.1/3"})
    shown = cli("config", file).out
    assert "redis://***@10.0.0.1/3" in shown
    assert "secret" not in shown


def test_config_documents_every_setting(cli):
    rows = [line for line in cli("config", "--docs").out.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*SETTINGS, *SERVICE_SETTINGS]
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_cluster_needs_ray(command, monkeypatch, cli):
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert cli(command, "compose.yaml", "--cluster", "head:6379", code=1).err == (
        "anvil-mux: error: --cluster needs Ray: pip install 'anvil-mux[ray]' (bin/anvil-mux brings it)\n"
    )


def test_engines_that_whoever_reaches_them_may_steer_are_named_with_where_that_is():
    dev = Service(environment=(("VLLM_SERVER_DEV_MODE", "1"),))
    steered = [Backend(f"m.{host}", "m", host=host, engine="vllm", service=dev) for host in ("b", "c")]
    others = (Backend("n.b", "n", host="b", engine="vllm"), Backend("o.b", "o", host="b", service=dev))
    seen = [
        {"host": "b", "address": "10.0.0.2"},
        {"host": "c", "address": "127.0.0.2"},
        {"host": "d", "address": "10.0.0.3"},
    ]
    [warning] = steered_by_all(Config((*steered, *others)), seen)
    assert warning == (
        "host b: m.b: VLLM_SERVER_DEV_MODE lets whoever reaches 10.0.0.2 put the engine to sleep and run"
        " /collective_rpc, with or without its API key; let a firewall admit anvil-mux's machine alone"
    )


def test_check_warns_of_a_key_that_may_do_more_than_its_line_seems_to_say(tmp_path, cli):
    keys = tmp_path / "keys.txt"
    file = compose(tmp_path, key_file="keys.txt")
    keys.write_text("the-first-key name=me\n")
    assert "may do everything" not in cli("check", file).err
    keys.write_text("the-first-key name=me admin\nthe-key-of-alice name=alice\n")
    told = cli("check", file).err
    assert f"warning: {keys}:2: the key of alice may do everything" in told
    assert "write: KEY name=alice models=*\n    see docs/security.md#keys\n" in told
    assert "the-key-of-alice" not in told


def test_config_shows_hooks_as_the_file_has_them(tmp_path, cli):
    file = compose(tmp_path, hooks=[{"on": "failed", "url": "http://x/y"}])
    shown = cli.json("config", file)
    assert shown["hooks"] == [{"on": ["failed"], "url": "http://x/y", "timeout": 10.0}]


def test_check_shows_who_stays_and_who_comes_back(tmp_path, cli):
    file = tmp_path / "compose.yaml"
    file.write_text("""
        x-anvil: {runtime: process, gpus: ["0"], any_of: {any: [b, a], warm: {models: [a], swap: never}}}
        services:
          a: {command: [x], x-anvil: {gpus: ["0"], drain_timeout: none, home: true}}
          b: {command: [x], x-anvil: {gpus: ["0"], drain_timeout: 5m}}
          c: {command: [x], x-anvil: {gpus: ["0"]}}
    """)
    assert [line.split()[5:] for line in cli("check", file).out.splitlines()[:4]] == [
        ["PORT", "DRAIN", "HOME"],
        ["free", "none", "after", "300", "s"],
        ["free", "300", "s"],
        ["free"],
    ]
    assert cli("check", file).out.splitlines()[4:] == ["any: any of b, a", "warm: any of a, swap: never"]
    told = cli.json("check", file)
    assert [(each["drain"], each["home"]) for each in told["models"]] == [
        ("none", "after 300 s"),
        ("300 s", ""),
        ("", ""),
    ]
    assert told["any_of"]["warm"] == {"models": ["a"], "swap": "never"}
    assert cli.json("config", file)["any_of"]["any"] == {"models": ["b", "a"], "swap": "allowed"}
