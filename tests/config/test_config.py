"""Compose files in, one frozen Config out; each bad file beside what is said of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from anvil_mux.cluster.simulated import HOSTS
from anvil_mux.command import Done
from anvil_mux.config import config, service
from anvil_mux.config.compose import OVERRIDE_NAMES, compose_config, find_files, run_compose
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.interpolate import Scope
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.settings import Setting, describe
from anvil_mux.errors import ConfigError
from anvil_mux.host import engines, levels
from anvil_mux.plugins import load

SHIPPED = sorted((Path(__file__).resolve().parent.parent.parent / "compose").glob("*.yaml"))
GIB = 1 << 30


def write(folder: Path, text: str, name: str = "compose.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def plain(folder: Path, text: str, **given: Any) -> Config:
    """Read without the Compose program."""
    given.setdefault("environ", {})
    return load([write(folder, text)], compose=None, **given)


def problems(folder: Path, text: str, **given: Any) -> list[str]:
    """What is wrong with the file, without the file's folder."""
    with pytest.raises(ConfigError) as caught:
        plain(folder, text, **given)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def one(folder: Path, service: str, top: str = "") -> Backend:
    """The backend of a file with one service, described in YAML flow."""
    (backend,) = plain(folder, f"{top}\nservices: {{a: {{image: x, x-anvil: {{}}, {service}}}}}").backends
    return backend


# What stands in the file


def test_a_service_with_an_empty_x_anvil_is_a_model_named_after_it(tmp_path: Path) -> None:
    found = plain(
        tmp_path, "services: {a: {image: x, x-anvil: {}}, webui: {image: y}, b: {image: z, x-anvil: }}"
    )
    assert [(each.name, each.model) for each in found.backends] == [("a", "a"), ("b", "b")]


def test_settings_of_a_service(tmp_path: Path) -> None:
    text = """
        x-anvil: {gpus: {"0": {vram: 24GiB, reserve: 1GiB}, "1": }}
        services:
          a:
            image: x
            x-anvil:
              {model: org/m-7b, aliases: [m, n], gpus: ["0"], vram: 20GB, engine: vllm, port: 9000, pin: true,
               served_model: other, load_timeout: 2m30s, stop_timeout: 5, evict_to: [stop]}
    """
    found = plain(tmp_path, text)
    (a,) = found.backends
    assert (a.model, a.aliases, a.gpus, a.vram) == ("org/m-7b", ("m", "n"), ("0",), 20_000_000_000)
    assert (a.engine, a.port, a.pin, a.served_model) == ("vllm", 9000, True, "other")
    assert (a.load_timeout, a.stop_timeout, a.evict_to) == (150.0, 5.0, ("stop",))
    assert found.gpus == (Gpu("0", 24 * GIB, GIB), Gpu("1"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", (0, None, 0.0, "auto")),
        ("priority: -5, ttl: 5m, min_residency: 1m30s, max_wait: '20'", (-5, 300.0, 90.0, 20.0)),
        ("priority: '-5', ttl: 0, min_residency: 0, max_wait: 0", (-5, None, 0.0, 0.0)),
        ("priority: 100, ttl: 0s, max_wait: 1500ms", (100, None, 0.0, 1.5)),
        ("max_wait: auto", (0, None, 0.0, "auto")),
    ],
)
def test_when_a_model_comes_and_goes_is_set_per_service(
    tmp_path: Path, said: str, expected: tuple[float | None, ...]
) -> None:
    (a,) = plain(tmp_path, f"services: {{a: {{image: x, x-anvil: {{{said}}}}}}}").backends
    assert (a.priority, a.ttl, a.min_residency, a.max_wait) == expected


def test_a_service_has_what_the_top_level_says_unless_it_says_otherwise(tmp_path: Path) -> None:
    text = """
        x-anvil: {drain_timeout: 7, home_after: 8, max_wait: 9, preload: true, read_ahead: no}
        services:
          a: {image: x, x-anvil: }
          b: {image: x, x-anvil: {drain_timeout: none, home: true, home_after: 1, max_wait: auto,
                                  preload: false, read_ahead: yes}}
    """
    a, b = plain(tmp_path, text).backends
    settings = attrgetter("drain_timeout", "home_after", "max_wait", "preload", "read_ahead")
    assert settings(a) == (7.0, 8.0, 9.0, True, False)
    assert settings(b) == (inf, 1.0, "auto", False, True)
    assert [a.has_own("drain_timeout"), b.has_own("drain_timeout")] == [False, True]


def test_what_a_backend_has_from_its_configuration_follows_that() -> None:
    first = Config((Backend("a", "a"), Backend("b", "b", max_wait=3.0)), max_wait=5.0)
    assert [each.max_wait for each in first.backends] == [5.0, 3.0]
    assert [each.max_wait for each in replace(first, max_wait=6.0).backends] == [6.0, 3.0]
    mine = replace(first, backends=(replace(first.backends[0], max_wait=1.0),))
    assert [(each.max_wait, each.has_own("max_wait")) for each in mine.backends] == [(1.0, True)]


def test_labels_say_so_too(tmp_path: Path) -> None:
    labels = "{anvil.priority: '-3', anvil.ttl: 30s, anvil.min_residency: '5', anvil.max_wait: 2m}"
    a = one(tmp_path, f"labels: {labels}")
    assert (a.priority, a.ttl, a.min_residency, a.max_wait) == (-3, 30.0, 5.0, 120.0)


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("{name: cost_aware, serving_window: off}", {"serving_window": False}),
        ("{name: cost_aware, serving_window: 'False', cap: 2m}", {"serving_window": False, "cap": 120.0}),
        (
            "{name: cost_aware, serving_window: true, amortization: 0}",
            {"serving_window": True, "amortization": 0},
        ),
        ("{name: time_slice, period: 1m}", {"period": 60.0}),
        ("{name: adaptive, pause: '0.5'}", {"pause": 0.5}),
        ("adaptive", {}),
    ],
)
def test_settings_of_a_policy(tmp_path: Path, said: str, settings: dict[str, object]) -> None:
    text = "services: {a: {image: x, x-anvil: {}}}"
    for found in (
        plain(tmp_path, f"x-anvil: {{policy: {said}}}\n{text}"),
        plain(tmp_path, text, environ={"ANVIL_POLICY": said}),
    ):
        assert found.policy_settings == settings


def test_every_field_of_config_can_be_set_in_the_file(tmp_path: Path) -> None:
    text = """
        x-anvil:
          {listen: "0.0.0.0:80", runtime: process, project: p, gpus: ["0"], eviction: lru,
           machines: {b: {host_memory: 8GiB}},
           policy: {name: debounce, quiet: "2"}, drain_timeout: 0, queue_timeout: 1m, max_wait: 2,
           max_queue: 3, max_connections: 4, upstream_timeout: 5, loading_grace: 6, max_body: 1MiB,
           client_timeout: 7, max_upload: 2MB, max_bodies: 3GB, default_model: a, on_exit: stop,
           routing: lmetric,
           host_memory: 64GiB, preload: yes, hooks: {url: "http://x"},
           allowed_hosts: [mux], cors: ["HTTPS://app.example"], key_file: /keys, tls_cert: /cert,
           tls_key: /key, when_paused: wait, capture: 50, home_after: 8,
           yield: {when_others_hold: 4GiB}, any_of: {any: [a]}, read_ahead: no}
        services: {a: {command: [a], x-anvil: {}}}
    """
    found = plain(tmp_path, text)
    assert (found.host, found.port, found.runtime, found.project) == ("0.0.0.0", 80, "process", "p")
    assert (found.policy, found.policy_settings, found.eviction) == ("debounce", {"quiet": 2.0}, "lru")
    assert (found.drain_timeout, found.queue_timeout, found.max_wait, found.max_queue) == (0, 60, 2, 3)
    assert (found.max_connections, found.upstream_timeout, found.loading_grace) == (4, 5, 6)
    assert found.client_timeout == 7
    assert (found.max_body, found.max_upload, found.max_bodies) == (1 << 20, 2_000_000, 3_000_000_000)
    assert (found.default_model, found.on_exit, found.routing) == ("a", "stop", "lmetric")
    assert (found.host_memory, found.preload, found.backends[0].preload) == (64 << 30, True, True)
    assert found.memory_of_hosts == {"b": 8 << 30}
    assert [hook.url for hook in found.hooks] == ["http://x"]
    assert (found.allowed_hosts, found.cors) == (("mux",), ("https://app.example",))
    assert found.key_file == "/keys"
    assert (found.tls_cert, found.tls_key) == ("/cert", "/key")
    assert (found.when_paused, found.capture) == ("wait", 50)
    assert found.yield_above == 4 << 30
    assert (found.read_ahead, found.backends[0].read_ahead) == (False, False)
    assert (found.home_after, found.any_of["any"].models) == (8, ("a",))
    assert not {key for key, origin in found.origins.items() if origin == "default"}


def test_the_tables_cover_the_dataclasses() -> None:
    for owner, table_of in ((Config, config.SETTINGS), (Backend, config.SERVICE_SETTINGS)):
        filled = [name for key, setting in table_of.items() for name in setting.fields_of(key)]
        beside = set(owner.__dataclass_fields__) - set(filled)
        assert len(filled) == len(set(filled)), "each field is filled by one setting"
        assert set(filled) <= set(owner.__dataclass_fields__)
        assert beside in (
            {"backends", "files", "warnings", "origins", "said", "generated_compose"},
            {"name", "service", "inherits"},
        )


def test_the_documentation_names_key_type_default_and_meaning() -> None:
    rows = {key: rest for key, *rest in describe(config.SETTINGS)}
    assert rows["listen"][:2] == ["ADDRESS:PORT", "127.0.0.1:9292"]
    assert rows["drain_timeout"][:2] == ["seconds", "30"]
    assert rows["max_body"][:2] == ["size", "64MiB"]
    rows = {key: rest for key, *rest in describe(config.SERVICE_SETTINGS)}
    assert rows["evict_to"][1] == ""
    assert rows["priority"][:2] == ["whole number", "0"]
    assert [rows[key][:2] for key in ("ttl", "max_wait")] == [["seconds", ""], ["seconds, or auto", ""]]
    assert rows["min_residency"][:2] == ["seconds", "0"]
    assert all(
        doc.endswith(".") for table in (config.SETTINGS, config.SERVICE_SETTINGS) for doc in _docs(table)
    )


def _docs(table: Mapping[str, Setting]) -> list[str]:
    return [setting.doc for setting in table.values()]


def test_the_engines_and_ways_are_those_of_the_rooms_that_have_them() -> None:
    assert set(config.ENGINES) == set(engines.ENGINES)
    assert set(config.WAYS) == set(levels.LEVELS)


def test_labels_say_the_same_more_weakly(tmp_path: Path) -> None:
    labels = "{anvil.model: m, anvil.aliases: 'p,q', anvil.gpus: '0,1', other: 1}"
    text = f"services: {{a: {{image: x, labels: {labels}, %s}}}}"
    (a,) = plain(tmp_path, text % "").backends
    assert (a.model, a.aliases, a.gpus) == ("m", ("p", "q"), ("0", "1"))
    (a,) = plain(tmp_path, text % "x-anvil: {model: n}").backends
    assert (a.model, a.aliases) == ("n", ("p", "q"))


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text = "x-anvil: {drain_timeout: 1, max_wait: 1, max_queue: 1}\nservices: {a: {image: x, x-anvil: {}}}"
    environ = {"ANVIL_MAX_WAIT": "2s", "ANVIL_MAX_QUEUE": "2", "ANVIL_POLICY": "{name: debounce, quiet: 3}"}
    found = plain(tmp_path, text, environ=environ, overrides={"max_queue": 3, "listen": None})
    assert (found.drain_timeout, found.max_wait, found.max_queue) == (1, 2, 3)
    assert (found.policy, found.policy_settings) == ("debounce", {"quiet": 3})
    assert found.origins["drain_timeout"] == f"{tmp_path}/compose.yaml:1"
    assert found.origins["max_wait"] == "ANVIL_MAX_WAIT"
    assert (found.origins["max_queue"], found.origins["listen"]) == ("flag", "default")


def test_a_bad_setting_is_blamed_on_what_gave_it(tmp_path: Path) -> None:
    environ = {"ANVIL_POLICY": "egaer", "ANVIL_MAX_WAIT": "x", "ANVIL_DEFAULT_MODEL": "b"}
    overrides = {"drain_timeout": "y", "eviction": "fifo"}
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, "services: {a: {x-anvil: {}}}", environ=environ, overrides=overrides)
    blamed = sorted(problem.partition(":")[0] for problem in caught.value.problems)
    given = ["--drain-timeout", "--eviction", "ANVIL_DEFAULT_MODEL", "ANVIL_MAX_WAIT", "ANVIL_POLICY"]
    assert blamed == given


def test_a_setting_that_was_renamed_is_told_by_its_new_name(tmp_path: Path) -> None:
    (told,) = problems(tmp_path, TOP % "hosts: [mux.example]")
    assert told.endswith(": x-anvil.hosts: is now called allowed_hosts: write x-anvil: {allowed_hosts: ...}")
    (told,) = problems(tmp_path, TOP % "", environ={"ANVIL_HOSTS": "mux.example"})
    assert told == "ANVIL_HOSTS: is now ANVIL_ALLOWED_HOSTS"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ANVIL_DRAIN_TIMOUT", "ANVIL_DRAIN_TIMEOUT"),
        ("ANVIL_APIKEYS", "ANVIL_API_KEYS"),
        ("ANVIL_SOAK_SECONDS", ""),
        ("ANVIL_API_KEY", ""),
        ("DRAIN_TIMEOUT", ""),
    ],
)
def test_a_variable_that_is_meant_to_be_ours_is_not_ignored(
    tmp_path: Path, variable: str, meant: str
) -> None:
    if meant:
        (told,) = problems(tmp_path, TOP % "", environ={variable: "1"})
        assert told == f"{variable}: nobody reads it; did you mean {meant}?"
    else:
        assert plain(tmp_path, TOP % "", environ={variable: "1"}).backends


def test_a_variable_that_a_file_names_is_of_its_author(tmp_path: Path) -> None:
    found = plain(tmp_path, TOP % "listen: '${ANVIL_HOOK}'", environ={"ANVIL_HOOK": "127.0.0.1:80"})
    assert found.port == 80


SILENT = (
    "x-anvil: {%s}\nservices: {a: {command: [x], x-anvil: {%s}, %s}, b: {command: [x], x-anvil: {gpus: []}}}"
)
HAS_TWO = {"0": Gpu("0"), "1": Gpu("1")}


@pytest.mark.parametrize(
    ("top", "own", "rest", "present", "gpus"),
    [
        ("runtime: process", "", "", HAS_TWO, ("0", "1")),
        ('runtime: process, gpus: ["0"]', "", "", HAS_TWO, ("0",)),
        ('runtime: process, gpus: ["0"]', "", "", {}, ("0",)),
        ("runtime: process", "", "", {}, ()),
        ("runtime: process", "gpus: []", "", HAS_TWO, ()),
        ("runtime: process", 'gpus: ["1"]', "", HAS_TWO, ("1",)),
        ("runtime: process", "", 'environment: {CUDA_VISIBLE_DEVICES: "1"}', HAS_TWO, ("1",)),
        ("runtime: process", "", 'environment: {CUDA_VISIBLE_DEVICES: ""}', HAS_TWO, ()),
        ("runtime: process", "", 'environment: {HIP_VISIBLE_DEVICES: "-1"}', HAS_TWO, ()),
        ('gpus: ["0"]', "", "image: x", HAS_TWO, ()),
    ],
)
def test_a_process_that_says_nothing_of_gpus_needs_all_that_its_machine_has(
    tmp_path: Path, top: str, own: str, rest: str, present: dict[str, Gpu], gpus: tuple[str, ...]
) -> None:
    text = SILENT % (top, own, rest)
    if "image" in rest:
        text = text.replace("b: {", "b: {image: x, ")
    found = plain(tmp_path, text, present=present)
    assert [each.gpus for each in found.backends] == [gpus, ()]
    told = [warning for warning in found.warnings if "nothing of GPUs" in warning]
    silent = "process" in top and not own and not rest and gpus
    assert len(told) == bool(silent)


def test_all_that_say_nothing_of_gpus_are_told_of_once(tmp_path: Path) -> None:
    services = "a: {command: [x], x-anvil: {}}, b: {command: [x], scale: 2, x-anvil: {}}"
    found = plain(tmp_path, f"x-anvil: {{runtime: process}}\nservices: {{{services}}}", present=HAS_TWO)
    assert [each.gpus for each in found.backends] == [("0", "1")] * 3
    (told,) = [warning for warning in found.warnings if "nothing of GPUs" in warning]
    assert (
        "a, b say nothing of GPUs: each needs all of its machine; name those that it needs, or none ([])"
        in told
    )


def test_a_process_that_says_nothing_of_gpus_needs_all_of_each_host_and_none_where_there_is_none(
    tmp_path: Path,
) -> None:
    hosts = {"h": Machine((Gpu("0"), Gpu("1")), address="10.0.0.1"), "bare": Machine((), address="10.0.0.2")}
    text = "x-anvil: {runtime: process}\nservices: {a: {command: [x], x-anvil: {hosts: any}}}"
    found = plain(tmp_path, text, hosts=hosts)
    assert {each.host: each.gpus for each in found.backends} == {"": (), "h": ("0", "1"), "bare": ()}


def test_an_alias_that_is_the_model_itself_is_dropped(tmp_path: Path) -> None:
    assert one(tmp_path, "labels: {anvil.aliases: 'a,b'}").aliases == ("b",)


def test_replicas_share_a_model_and_its_aliases(tmp_path: Path) -> None:
    text = "services: {a: {x-anvil: {model: m, aliases: [n]}}, b: {x-anvil: {model: m, aliases: [n]}}}"
    assert [each.model for each in plain(tmp_path, text).backends] == ["m", "m"]


# What is read off the service


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("image: vllm/vllm-openai:v0.11", "vllm"),
        ("image: 'lmsysorg/sglang@sha256:00'", "sglang"),
        ("image: ghcr.io/ggml-org/llama.cpp:server-cuda", "llamacpp"),
        ("image: ghcr.io/abetlen/llama-cpp-python:latest", "openai"),
        ("image: ollama/ollama", "ollama"),
        ("image: ghcr.io/theroyallab/tabbyapi:latest", "tabbyapi"),
        ("image: nvcr.io/nvidia/tensorrt-llm/release:1.0", "trtllm"),
        ("image: ghcr.io/huggingface/text-generation-inference:3", "openai"),
        ("image: 'registry:5000/own:vllm'", "openai"),
        ("image: own, command: /opt/llama-server -m x", "llamacpp"),
        ("image: own, command: python3 -m sglang.launch_server --model-path x", "sglang"),
        ("image: own, entrypoint: [vllm, serve], command: [m]", "vllm"),
        ("image: own, command: [bin/demo-engine, --model, vllm]", "openai"),
    ],
)
def test_the_engine_is_what_the_image_says_or_the_program(tmp_path: Path, said: str, expected: str) -> None:
    text = f"services: {{a: {{{said}, x-anvil: {{}}}}}}"
    assert plain(tmp_path, text).backends[0].engine == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("deploy: {resources: {reservations: {devices: [{count: 2, capabilities: [gpu]}]}}}", ("0", "1")),
        (
            "deploy: {resources: {reservations: {devices: [{count: all, capabilities: [gpu]}]}}}",
            ("0", "1", "2"),
        ),
        (
            "deploy: {resources: {reservations: {devices: [{count: -1, capabilities: [gpu]}]}}}",
            ("0", "1", "2"),
        ),
        (
            "deploy: {resources: {reservations: {devices: [{device_ids: ['2', '0'], capabilities: [gpu]}]}}}",
            ("2", "0"),
        ),
        ("deploy: {resources: {reservations: {devices: [{count: 1, capabilities: [tpu]}]}}}", ()),
        ("gpus: all", ("0", "1", "2")),
        ("gpus: [{driver: nvidia, count: 3}]", ("0", "1", "2")),
        ("gpus: [{device_ids: ['1']}]", ("1",)),
        ("devices: ['nvidia.com/gpu=1', /dev/fuse]", ("1",)),
        ("devices: [{source: nvidia.com/gpu=2, target: nvidia.com/gpu=2}]", ("2",)),
        ("runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: '1,2'}", ("1", "2")),
        ("runtime: nvidia, environment: [NVIDIA_VISIBLE_DEVICES=none]", ()),
        ("environment: {CUDA_VISIBLE_DEVICES: 1}", ("1",)),
        ("gpus: all, environment: {CUDA_VISIBLE_DEVICES: '2'}", ("2",)),
        ("gpus: [{device_ids: ['1', '2']}], environment: {CUDA_VISIBLE_DEVICES: '1'}", ("1", "2")),
        ("gpus: all, labels: {anvil.gpus: '1'}", ("1",)),
        ("", ()),
    ],
)
def test_the_gpus_are_those_the_service_reserves(
    tmp_path: Path, said: str, expected: tuple[str, ...]
) -> None:
    assert one(tmp_path, said, 'x-anvil: {gpus: ["0", "1", "2"]}').gpus == expected


def test_gpus_of_x_anvil_win_over_reservations(tmp_path: Path) -> None:
    text = 'services: {a: {gpus: all, x-anvil: {gpus: ["7"]}}, b: {gpus: all, x-anvil: {gpus: []}}}'
    found = plain(tmp_path, text)
    assert [each.gpus for each in found.backends] == [("7",), ()]
    assert found.gpus == (Gpu("7"),)


def test_all_gpus_are_those_of_the_machine_where_none_are_declared(tmp_path: Path) -> None:
    first, second = Gpu("0", 8 * GIB), Gpu("1", 16 * GIB)
    present = {"0": first, "GPU-a": first, "1": second, "GPU-b": second}
    text = "services: {a: {gpus: all, x-anvil: {}}, b: {gpus: [{device_ids: [GPU-b]}], x-anvil: {}}}"
    found = plain(tmp_path, text, present=present)
    assert [each.gpus for each in found.backends] == [("0", "1"), ("1",)]
    assert found.gpus == (first, second)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("x-anvil: {port: 1}, ports: ['2:3']", 1),
        ("ports: ['127.0.0.1::8000']", 8000),
        ("ports: [{target: 7, published: '9', host_ip: 127.0.0.1}]", 7),
        ("ports: ['[::1]:77:78/tcp', '9:9/udp']", 78),
        ("expose: ['1234']", 1234),
        ("ports: ['1:1', '2:2'], command: x --port 2", 2),
        ("command: [x, '--port=5']", 5),
        ("command: [x, --port, $$PORT]", None),
        ("", None),
    ],
)
def test_the_port_is_the_one_that_the_service_names(tmp_path: Path, said: str, expected: int | None) -> None:
    own = "" if "x-anvil" in said else "x-anvil: {}, "
    (a,) = plain(tmp_path, f"services: {{a: {{image: x, {own}{said}}}}}").backends
    assert a.port == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("image: vllm, command: --model org/m --served-model-name n1 n2 --port 1", "n1"),
        ("image: vllm, command: --model org/m --served-model-name n a", None),
        ("image: vllm, command: --model org/m", "org/m"),
        ("image: vllm, command: [org/m, --port, '1']", "org/m"),
        ("image: own, command: vllm serve org/m --port 1", "org/m"),
        ("image: sglang, command: python3 -m sglang.launch_server --model-path=org/m", "org/m"),
        ("image: llama.cpp, command: '-m /x.gguf --alias b,c'", "b"),
        ("image: llama.cpp, command: -m /x.gguf", None),
        ("image: own, command: bin/demo-engine --model b", None),
        ("image: own, command: x --served-model-name b", "b"),
    ],
)
def test_the_engines_own_name_for_the_model(tmp_path: Path, said: str, expected: str | None) -> None:
    assert plain(tmp_path, f"services: {{a: {{{said}, x-anvil: {{}}}}}}").backends[0].served_model == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("gpus: all", "reservation"),
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", "reservation"),
        ("devices: ['nvidia.com/gpu=0']", "cdi"),
        ("runtime: nvidia", ""),
        ("devices: [/dev/dri]", ""),
    ],
)
def test_the_way_by_which_gpus_are_reserved(tmp_path: Path, said: str, expected: str) -> None:
    assert one(tmp_path, said, 'x-anvil: {gpus: ["0"]}').service.gpus_by == expected


def test_the_service_as_the_runtimes_need_it(tmp_path: Path) -> None:
    text = """
        x-anvil: {runtime: process}
        services:
          a:
            entrypoint: python3 -m
            command: ["thing", --say, "a $$b"]
            working_dir: ..
            environment: [ONE=1, HOME, NOT_SET]
            stop_grace_period: 1m30s
            profiles: [llm]
            x-anvil: {}
    """
    (a,) = plain(tmp_path, text, environ={"HOME": "/h"}).backends
    assert a.service.command == ("python3", "-m", "thing", "--say", "a $b")
    assert a.service.environment == (("HOME", "/h"), ("ONE", "1"))
    assert (a.service.working_dir, a.service.profiles) == (str(tmp_path.parent), ("llm",))
    assert a.stop_timeout == 90.0


def test_the_project_is_named_as_compose_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "My.Models"
    folder.mkdir()
    text = "services: {a: {image: x, x-anvil: {}}}"
    assert plain(folder, text).project == "mymodels"
    assert plain(folder, f"name: ${{N}}-x\n{text}", environ={"N": "Q"}).project == "q-x"
    assert plain(folder, text, environ={"COMPOSE_PROJECT_NAME": "p"}).project == "p"


# What is wrong

SERVICE = "services: {a: {image: x, x-anvil: {%s}}}"
TOP = "x-anvil: {%s}\nservices: {a: {image: x, x-anvil: {}}}"
TWO = """x-anvil: {gpus: {"0": {vram: 8GiB}}}
services: {a: {x-anvil: {gpus: ["0"], %s}}, b: {x-anvil: {gpus: ["0"], %s}}}"""
PROCESS = (
    "x-anvil: {runtime: process}\nservices: {a: {command: %s, x-anvil: {}}, b: {command: %s, x-anvil: {}}}"
)

BAD: list[tuple[str, str]] = [
    ("services: {a: {image: x}}", "compose.yaml:1: services: none serves a model; add `x-anvil: {}`"),
    ("services: [a]", "compose.yaml:1: services: none serves a model"),
    ("services: {a: 3}", "services.a: must be a mapping"),
    (SERVICE % "vrm: 1", "compose.yaml:1: services.a.x-anvil.vrm: unknown key; did you mean vram?"),
    (
        TOP % "drain_timout: 1",
        "compose.yaml:1: x-anvil.drain_timout: unknown key; did you mean drain_timeout?",
    ),
    (TOP % "zzz: 1", "x-anvil.zzz: unknown key; known: listen, runtime,"),
    (
        "services: {a: {labels: {anvil.modle: x}}}",
        "services.a.labels.anvil.modle: unknown key; did you mean model?",
    ),
    ("x-anvil: 3\nservices: {a: {x-anvil: {}}}", "x-anvil: must hold settings such as listen, not 3"),
    (SERVICE % "vram: lots", "services.a.x-anvil.vram: must be a size such as 20GiB"),
    (SERVICE % "vram: 20", "services.a.x-anvil.vram: is only 20 bytes; write 20GiB"),
    (SERVICE % "vram: 0", "services.a.x-anvil.vram: must be more than 0"),
    (SERVICE % "port: 70000", "services.a.x-anvil.port: must be a whole number from 1 to 65535, not 70000"),
    (SERVICE % "engine: vlm", "services.a.x-anvil.engine: must be one of openai, llamacpp, sglang, vllm"),
    (SERVICE % "evict_to: [sotp]", "services.a.x-anvil.evict_to: unknown: sotp; did you mean stop?"),
    (SERVICE % "evict_to: []", "services.a.x-anvil.evict_to: must name at least one"),
    (SERVICE % "pin: maybe", "services.a.x-anvil.pin: must be true or false, not 'maybe'"),
    (SERVICE % "load_timeout: -1", "services.a.x-anvil.load_timeout: must be seconds, or a time such as 30s"),
    (SERVICE % "load_timeout: 0", "services.a.x-anvil.load_timeout: must be more than 0, not 0"),
    (TOP % "upstream_timeout: 0s", "x-anvil.upstream_timeout: must be more than 0, not '0s'"),
    (TOP % "client_timeout: 0", "x-anvil.client_timeout: must be more than 0, not 0"),
    (TOP % "max_body: 0", "x-anvil.max_body: must be more than 0, not 0"),
    (TOP % "max_upload: 0", "x-anvil.max_upload: must be more than 0, not 0"),
    (TOP % "max_bodies: 0", "x-anvil.max_bodies: must be more than 0, not 0"),
    (TOP % "host_memory: 0", "x-anvil.host_memory: must be more than 0, not 0"),
    (TOP % "machines: {b: {host_memory: 0}}", "x-anvil.machines.b.host_memory: must be more than 0, not 0"),
    (TOP % "queue_timeout: 0", "x-anvil.queue_timeout: must be more than 0, not 0"),
    (
        "x-anvil: {runtime: process}\nservices: {a: {command: [x], enviroment: {A: b}, x-anvil: {}}}",
        "compose.yaml:2: services.a.enviroment: unknown key; did you mean environment?",
    ),
    (
        "services: {a: {image: x, workingdir: /m, x-anvil: {}}}",
        "compose.yaml:1: services.a.workingdir: unknown key; did you mean working_dir?",
    ),
    (
        "x-anvil: {runtime: process}\nservices: {a: {command: [x], ttl: 5m, x-anvil: {}}}",
        "compose.yaml:2: services.a.ttl: is a setting of anvil-mux: it goes into x-anvil",
    ),
    (
        SERVICE % "priority: 101",
        "services.a.x-anvil.priority: must be a whole number from -100 to 100, not 101",
    ),
    (SERVICE % "priority: high", "services.a.x-anvil.priority: must be a whole number from -100 to 100"),
    (SERVICE % "priority: 1.5", "services.a.x-anvil.priority: must be a whole number from -100 to 100"),
    (
        SERVICE % "ttl: never",
        "services.a.x-anvil.ttl: must be seconds, or a time such as 30s or 2m, not 'never'",
    ),
    (
        SERVICE % "ttl: 9999999999",
        "services.a.x-anvil.ttl: must be at most a year (8760h), not 9999999999",
    ),
    (
        SERVICE % "drain_timeout: 9999h",
        "services.a.x-anvil.drain_timeout: must be at most a year (8760h), not '9999h'",
    ),
    (
        SERVICE % f"concurrency: 1{'0' * 400}",
        f"services.a.x-anvil.concurrency: must be a whole number of at least 1, not 1{'0' * 56}...",
    ),
    (SERVICE % f"vram: 1{'0' * 400}", f"services.a.x-anvil.vram: must be at most 1000TB, not 1{'0' * 56}..."),
    (SERVICE % "ttl: -1", "services.a.x-anvil.ttl: must be seconds, or a time such as 30s or 2m, not -1"),
    (SERVICE % "min_residency: true", "services.a.x-anvil.min_residency: must be seconds"),
    (SERVICE % "min_residence: 3", "x-anvil.min_residence: unknown key; did you mean min_residency?"),
    (SERVICE % "max_wait: .inf", "services.a.x-anvil.max_wait: must be seconds"),
    (TOP % "ttl: 3", "x-anvil.ttl: is a setting of a service: it goes below services"),
    (SERVICE % "load_timeout: .inf", "services.a.x-anvil.load_timeout: must be seconds"),
    (SERVICE % 'model: "a\\nb"', "services.a.x-anvil.model: must not hold quotes or control characters"),
    (SERVICE % "model: 'a\"b'", "services.a.x-anvil.model: must not hold quotes or control characters"),
    (SERVICE % "model: 1.5", "services.a.x-anvil.model: must be text, not 1.5; write"),
    (SERVICE % "model: ''", "services.a.x-anvil.model: must be text, not ''"),
    (SERVICE % "aliases: [{}]", "services.a.x-anvil.aliases: must be text"),
    (TOP % "listen: ':80'", "x-anvil.listen: needs an address before the colon"),
    (TOP % "listen: localhost", "x-anvil.listen: must be ADDRESS:PORT such as 127.0.0.1:9292"),
    (TOP % "runtime: docker", "x-anvil.runtime: must be one of compose, process, not 'docker'"),
    (TOP % "max_queue: 0", "x-anvil.max_queue: must be a whole number of at least 1, not 0"),
    (TOP % "max_queue: true", "x-anvil.max_queue: must be a whole number of at least 1, not True"),
    (TOP % "project: A b", "x-anvil.project: must be lower-case letters"),
    (TOP % "policy: egaer", "x-anvil.policy: unknown policy 'egaer'; known: eager, debounce"),
    (TOP % "policy: {quiet: 1}", "x-anvil.policy: must be a name, or {name: ..., setting: value}"),
    (TOP % "policy: {name: debounce, quit: 1}", "x-anvil.policy: policy debounce: unknown setting 'quit'"),
    (TOP % "policy: {name: debounce, quiet: no}", "policy debounce: quiet must be a number"),
    (TOP % "policy: {name: cost_aware, serving_window: 2}", "serving_window must be true or false, not 2"),
    (TOP % "policy: {name: cost_aware, cap: off}", "policy cost_aware: cap must be a number of at least 0"),
    (TOP % "policy: {name: time_slice, slice: 3}", "unknown setting 'slice'; known: period, least"),
    (TOP % "policy: {name: adaptive, pause: -1}", "policy adaptive: pause must be a number of at least 0"),
    (TOP % "eviction: fifo", "x-anvil.eviction: unknown eviction 'fifo'"),
    (TOP % "default_model: b", "x-anvil.default_model: no service serves b; known: a"),
    (TOP % "gpus: [{}]", "x-anvil.gpus: must be text"),
    (TOP % 'gpus: {"0": 24GiB}', "x-anvil.gpus.0: must hold its memory"),
    (TOP % 'gpus: {"0": {vam: 1}}', "x-anvil.gpus.0.vam: unknown key; did you mean vram?"),
    (TOP % 'gpus: {"0": {vram: x}}', "x-anvil.gpus.0.vram: must be a size"),
    (TOP % 'gpus: {"0": {vram: 1GiB, reserve: 2GiB}}', "x-anvil.gpus.0: reserve leaves nothing"),
    (TOP % "gpus: {0: {}}", 'compose.yaml:1: x-anvil.gpus.0: the key must be text: write "0":'),
    ("services: {a: {gpus: all, x-anvil: {}}}", "services.a: uses all GPUs; say which there are"),
    ("services: {a: {gpus: some, x-anvil: {}}}", "services.a: gpus must be `all` or a list of"),
    ("services: {a: {gpus: [{count: x}], x-anvil: {}}}", "services.a: count must be `all` or a number"),
    (
        'x-anvil: {gpus: ["0"]}\nservices: {a: {x-anvil: {gpus: ["1"]}}}',
        "compose.yaml:2: services.a.x-anvil.gpus: GPU 1 is not declared; declared: 0",
    ),
    (
        TWO % ("vram: 9GiB", ""),
        "services.a.x-anvil.vram: 9.0 GiB do not fit on GPU 0, which has 8.0 GiB for models",
    ),
    (
        TWO % ("vram: 5GiB, pin: true", "vram: 5GiB, pin: true"),
        "b.x-anvil.pin: the pinned a, b do not fit on GPU 0",
    ),
    (
        TWO % ("pin: true", "pin: true"),
        "services.b.x-anvil.pin: the pinned a, b do not fit on GPU 0 together",
    ),
    (TWO % ("aliases: [b]", ""), "services.a.x-anvil.aliases: b is already a name of b"),
    (TWO % ("aliases: [c]", "aliases: [c]"), "services.b.x-anvil.aliases: c is already a name of a"),
    (
        PROCESS % ("x --port 5", "x --port 5"),
        "services.b: port 5 is also that of a, and both may run at once",
    ),
    (
        "services: {a: {network_mode: host, x-anvil: {port: 5}}, b: {ports: ['5:6'], x-anvil: {}}}",
        "services.b: port 5 is also that of a, and both may run at once",
    ),
    (PROCESS % ("x --port 9292", "y"), "services.a: port 9292 is the one that anvil-mux listens on"),
    (PROCESS % ("''", "y"), "services.a: needs a `command`, since runtime is process"),
    (
        "services: {a: {ports: ['5:5', '6:6'], x-anvil: {}}}",
        "services.a: has several ports (5, 6); say where",
    ),
    ("services: {a: {ports: [x], x-anvil: {}}}", "services.a: ports: 'x' is no port"),
    ("services: {../a: {x-anvil: {}}}", "services.../a: its name may hold letters, digits, ., _ and - only"),
    ('services: {a: {command: "\'", x-anvil: {}}}', "services.a: command: No closing quotation"),
    ("services: {a: {environment: 3, x-anvil: {}}}", "services.a: environment must be a mapping or a list"),
    ("services: {a: {stop_grace_period: soon, x-anvil: {}}}", "services.a: must be seconds, or a time"),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_a_bad_file_is_told_what_is_wrong_with_it(tmp_path: Path, text: str, expected: str) -> None:
    found = problems(tmp_path, text)
    assert [problem for problem in found if expected in problem], found
    assert len(found) == 1, found


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """x-anvil:
  drain_timout: 3
  policy: x
services:
  a:
    x-anvil:
      vram: x
  b:
    x-anvil:
      prt: 1
"""
    found = problems(tmp_path, text, environ={"ANVIL_MAX_WAIT": "soon"}, overrides={"max_queue": "x"})
    assert [problem.partition(": ")[0] for problem in found] == [
        "compose.yaml:2",
        "ANVIL_MAX_WAIT",
        "--max-queue",
        "compose.yaml:7",
        "compose.yaml:10",
        "compose.yaml:3",
    ]


def test_swap_partners_may_share_a_port(tmp_path: Path) -> None:
    shared = "command: x --port 5, x-anvil: {gpus: ['0']}"
    text = f"x-anvil: {{runtime: process}}\nservices: {{a: {{{shared}}}, b: {{{shared}}}}}"
    assert [each.port for each in plain(tmp_path, text).backends] == [5, 5]


def test_swap_partners_that_sleep_may_not_share_a_port(tmp_path: Path) -> None:
    shared = "command: x --port 5, x-anvil: {gpus: ['0'], evict_to: freeze}"
    text = f"x-anvil: {{runtime: process}}\nservices: {{a: {{{shared}}}, b: {{{shared}}}}}"
    (problem,) = problems(tmp_path, text)
    assert "port 5 is also that of a, and both may run at once" in problem


# Standby levels

VLLM = "image: vllm, environment: {VLLM_SERVER_DEV_MODE: '1'}"
CANNOT_REST = [
    ("image: x, x-anvil: {evict_to: [sleep]}", "sleep cannot work: engine openai cannot be told to sleep"),
    ("image: tabbyapi, x-anvil: {evict_to: sleep}", "engine tabbyapi cannot be told to sleep"),
    ("image: ollama, x-anvil: {evict_to: [sleep-2]}", "sleep-2 cannot work: ollama cannot drop its weights"),
    (
        f"{VLLM}, command: --model m --enable-sleep-mode --enable-lora, x-anvil: {{evict_to: sleep-2}}",
        "sleep-2 cannot work: vLLM cannot read its weights again where it has LoRA adapters",
    ),
    (
        "image: vllm, environment: {VLLM_SERVER_DEV_MODE: '1', VLLM_ALLOW_RUNTIME_LORA_UPDATING: '1'}, "
        "x-anvil: {evict_to: sleep-2, loras: {sql: /adapters/sql}}",
        "sleep-2 cannot work: vLLM cannot read its weights again where it has LoRA adapters",
    ),
    (f"{VLLM}, command: --model m, x-anvil: {{evict_to: sleep}}", "add --enable-sleep-mode to its command"),
    ("image: vllm, command: --enable-sleep-mode, x-anvil: {evict_to: sleep}", "VLLM_SERVER_DEV_MODE"),
    (
        "image: sglang, command: --enable-memory-saver, x-anvil: {evict_to: sleep}",
        "add --enable-weights-cpu-backup to its command",
    ),
    ("image: llama.cpp, command: -m x.gguf, x-anvil: {evict_to: sleep}", "unloads in router mode only"),
    (
        "image: llama.cpp, environment: {LLAMA_ARG_HF_REPO: x/y}, x-anvil: {evict_to: sleep}",
        "unloads in router mode only",
    ),
    ("image: x, gpus: [{count: 1}], x-anvil: {evict_to: freeze}", "what is frozen keeps its GPU memory"),
    (
        "image: llama.cpp, environment: {GGML_CUDA_ENABLE_UNIFIED_MEMORY: 1}, "
        "x-anvil: {evict_to: checkpoint}",
        "checkpoint cannot work: the driver cannot checkpoint unified memory",
    ),
]
CAN_REST = [
    f"{VLLM}, command: --model m --enable-sleep-mode, x-anvil: {{evict_to: [sleep, sleep-2, stop]}}",
    f"{VLLM}, x-anvil: {{evict_to: [sleep, stop]}}",
    f"{VLLM}, command: --config f.yaml, x-anvil: {{evict_to: [sleep, stop]}}",
    "image: sglang, command: --enable-memory-saver --enable-weights-cpu-backup, x-anvil: {evict_to: sleep}",
    "image: llama.cpp, command: --models-dir /models, x-anvil: {evict_to: sleep}",
    "image: ollama, x-anvil: {evict_to: sleep}",
    "image: x, x-anvil: {gpus: ['0'], evict_to: freeze}",
    "image: x, x-anvil: {gpus: ['0', '1'], evict_to: [checkpoint, stop]}",
]


@pytest.mark.parametrize(("service", "says"), CANNOT_REST)
def test_a_way_that_cannot_work_is_refused_with_the_reason(tmp_path: Path, service: str, says: str) -> None:
    (problem,) = problems(tmp_path, f"services: {{a: {{{service}}}}}")
    assert "services.a.x-anvil.evict_to: " in problem
    assert says in problem


@pytest.mark.parametrize("service", CAN_REST)
def test_a_way_that_can_work_is_taken(tmp_path: Path, service: str) -> None:
    (backend,) = plain(tmp_path, f"services: {{a: {{{service}}}}}").backends
    assert backend.evict_to != ("stop",)


def test_a_checkpoint_that_cannot_work_on_this_machine_is_refused_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    text = """
        services:
          a: {x-anvil: {gpus: ['0'], evict_to: [checkpoint, stop]}}
          b: {x-anvil: {gpus: ['0', '1'], evict_to: [checkpoint, stop]}}
          c: {x-anvil: {gpus: ['0', '1'], evict_to: [checkpoint, stop], checkpoint_anyway: true}}
          d: {x-anvil: {gpus: ['0', '1'], evict_to: [sleep, stop], engine: ollama}}
    """
    asked = []

    def judge(gpus: Sequence[str], insist: bool) -> str | None:
        asked.append((gpus, insist))
        return "holds several GPUs" if len(gpus) > 1 and not insist else None

    (problem,) = problems(tmp_path, text, judge=judge)
    assert problem.endswith(":4: services.b.x-anvil.evict_to: checkpoint cannot work: holds several GPUs")
    assert asked == [(("0",), False), (("0", "1"), False), (("0", "1"), True)]


def test_sleep_1_is_another_name_of_sleep(tmp_path: Path) -> None:
    (backend,) = plain(
        tmp_path, "services: {a: {image: ollama, x-anvil: {evict_to: [sleep-1, sleep]}}}"
    ).backends
    assert backend.evict_to == ("sleep",)


# Caveats

QUIET = "profiles: [llm], ports: ['127.0.0.1::80'], gpus: [{count: 1}]"
BITES = [
    ("restart: unless-stopped, " + QUIET, "`restart: unless-stopped` brings the engine back"),
    ("profiles: [llm], ports: ['80:80'], gpus: [{count: 1}]", "port 80 is published on all interfaces"),
    (
        "profiles: [llm], ports: ['0.0.0.0:80:80'], gpus: [{count: 1}]",
        "port 80 is published on all interfaces",
    ),
    ("ports: ['127.0.0.1::80'], gpus: [{count: 1}]", "without `profiles`, a bare `docker compose up`"),
    ("profiles: [llm], gpus: [{count: 1}]", "its port is not published"),
    ("command: x --port 81, x-anvil: {port: 81}, " + QUIET, "its port 81 is not among those published (80)"),
    ("command: x --port 81, " + QUIET, "its command listens on 81, but published is 80"),
    ("image: llama.cpp, command: -m x.gguf, " + QUIET, 'on 9931; add --port "80" to its command'),
    ("profiles: [llm], ports: ['127.0.0.1::80']", "has no GPU, so it is never evicted"),
    (
        "profiles: [llm], ports: ['127.0.0.1::80'], x-anvil: {gpus: ['0']}",
        "`x-anvil` names GPU 0, but the service reserves none",
    ),
    (
        "image: vllm, environment: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}, " + QUIET,
        "expandable_segments keeps a sleeping engine",
    ),
    (
        "image: vllm, environment: {VLLM_SERVER_DEV_MODE: 1}, profiles: [llm], ports: ['10.0.0.5::80'],"
        " gpus: [{count: 1}]",
        "VLLM_SERVER_DEV_MODE lets whoever reaches 10.0.0.5 put the engine to sleep and run /collective_rpc",
    ),
    ("x-anvil: {gpus: ['0'], vram: 1GiB}, " + QUIET, "vram: has no effect"),
    ("command: 'x ${NOT_SET}', " + QUIET, "the variable NOT_SET is not set"),
]


@pytest.mark.parametrize(("said", "expected"), BITES, ids=[expected for _, expected in BITES])
def test_what_works_but_bites_is_a_warning(tmp_path: Path, said: str, expected: str) -> None:
    own = "" if "x-anvil" in said else "x-anvil: {}, "
    (warning,) = plain(tmp_path, f"services:\n  a: {{{own}{said}}}").warnings
    assert warning.startswith(f"{tmp_path}/compose.yaml:2: ") or "NOT_SET" in warning
    assert expected in warning


SHORT = "queue_timeout (20 s) is less than "


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        ("max_wait: 60", "load_timeout: 20", [SHORT + "max_wait (60 s): a queue is overdue before that"]),
        ("max_wait: 5", "load_timeout: 20, max_wait: 21", [SHORT + "max_wait (21 s): a queue is overdue"]),
        (
            "max_wait: 5",
            "load_timeout: 21",
            [SHORT + "the load_timeout of a: requests that wait"],
        ),
        ("max_wait: 20", "load_timeout: 20", []),
        ("max_wait: auto", "load_timeout: 20", []),
    ],
)
def test_a_queue_timeout_that_leaves_no_time_to_load_is_a_warning(
    tmp_path: Path, top: str, own: str, expected: list[str]
) -> None:
    text = f"x-anvil: {{queue_timeout: 20, {top}}}\nservices: {{a: {{x-anvil: {{{own}}}, {QUIET}}}}}"
    warnings = plain(tmp_path, text).warnings
    assert [warning[: len(said)] for warning, said in zip(warnings, expected, strict=True)] == expected


def test_a_server_elsewhere_has_no_load_that_could_take_too_long(tmp_path: Path) -> None:
    there = "there: {image: scratch, profiles: [x], x-anvil: {url: 'http://127.0.0.1:1'}}"
    read = plain(tmp_path, f"x-anvil: {{queue_timeout: 20, max_wait: 5}}\nservices: {{{there}}}")
    assert read.warnings == ()


@pytest.mark.parametrize(
    "said",
    [
        *("", "command: x --port 80, "),
        *("image: llama.cpp, command: --port=80, ", "image: llama.cpp, environment: [LLAMA_ARG_PORT=80], "),
    ],
)
def test_a_quiet_service_has_no_warning(tmp_path: Path, said: str) -> None:
    assert plain(tmp_path, f"services: {{a: {{x-anvil: {{}}, {said}{QUIET}}}}}").warnings == ()


@pytest.mark.parametrize(
    ("command", "warned"),
    [
        ("llama-server -m x", True),
        ("llama-server -m x --port $$PORT", False),
        ("llama-server -m x --port 8001", False),
        ("sh -c 'llama-server --port $$PORT'", False),
        ("./my-program", False),
    ],
)
def test_an_engine_that_is_not_told_its_port_is_a_warning(tmp_path: Path, command: str, warned: bool) -> None:
    services = f"services: {{a: {{command: {command}, x-anvil: {{gpus: ['0']}}}}}}"
    warnings = plain(tmp_path, f"x-anvil: {{runtime: process}}\n{services}").warnings
    assert [
        text.endswith("service a: its command does not say where it is to listen; add --port $$PORT")
        for text in warnings
    ] == [True] * warned


PROCESSES = "x-anvil: {runtime: process}\nservices: {a: {%s}}"


@pytest.mark.parametrize(
    ("service", "warning"),
    [
        (
            "command: llama-server --port 81, x-anvil: {port: 80, gpus: []}",
            "its command listens on 81, and is asked on 80 (x-anvil: port); write x-anvil: {port: 81}",
        ),
        ("command: vllm serve m, x-anvil: {port: 81, gpus: []}", "add --port $$PORT"),
        ("command: vllm serve m, x-anvil: {port: 8000, gpus: []}", ""),
        ("command: [ollama, serve], environment: {OLLAMA_HOST: ':80'}, x-anvil: {port: 80, gpus: []}", ""),
        (
            "command: ./own, secrets: [token], x-anvil: {gpus: []}",
            "`secrets` are files of a container, which a process is not given; write environment: ..., "
            "or the path of a file in its command",
        ),
        (
            "command: './own --port $PORT', environment: {A: $PORT}, x-anvil: {gpus: []}",
            "services.a.environment.A: the variable PORT is not set, so nothing stands in its place; set it, "
            "here or in .env, or write ${PORT:-default}",
        ),
    ],
)
def test_a_process_that_listens_elsewhere_is_a_warning(tmp_path: Path, service: str, warning: str) -> None:
    warnings = plain(tmp_path, PROCESSES % service).warnings
    assert [text.endswith(warning) for text in warnings] == [True] * bool(warning), warnings


def test_a_variable_that_is_not_set_is_shown_where_it_stands(tmp_path: Path) -> None:
    doubled, single = (
        "command: './own $$PORT $$$$WORD', x-anvil: {}",
        "command: './own $$PORT $$${WORD}', x-anvil: {}",
    )
    text = f"x-anvil: {{runtime: process}}\nservices:\n  a: {{{doubled}}}\n  b: {{{single}}}"
    (warning,) = plain(tmp_path, text).warnings
    assert "compose.yaml:4: services.b.command: the variable WORD is not set" in warning


@pytest.mark.parametrize("command", ["[./own, $PORT]", "[./own, '${PORT}']", "[./own, $$PORT]"])
@pytest.mark.parametrize("key", ["command", "entrypoint"])
def test_the_port_of_a_process_may_be_written_as_any_other_variable(
    tmp_path: Path, key: str, command: str
) -> None:
    (backend,) = plain(tmp_path, PROCESSES % f"{key}: {command}").backends
    assert backend.service.command[1] in ("$PORT", "${PORT}")


def test_a_port_that_is_set_is_the_port_of_a_process(tmp_path: Path) -> None:
    for write in ("$PORT", "${PORT:-9}", "${HOST:-9}"):
        config = plain(tmp_path, PROCESSES % f"command: './own {write}'", environ={"PORT": "9"})
        assert config.backends[0].service.command == ("./own", "9")
    (tmp_path / ".env").write_text("PORT=8")
    assert plain(tmp_path, PROCESSES % "command: [./own, $PORT]").backends[0].service.command[1] == "8"


def test_a_process_with_a_command_is_a_model_unless_it_says_otherwise(tmp_path: Path) -> None:
    text = "x-anvil: {runtime: process}\nservices:\n  a: {command: a}\n  b: {entrypoint: b}\n"
    text += "  c: {command: c, x-anvil: false}\n  d: {environment: {A: b}}\n"
    assert [backend.model for backend in plain(tmp_path, text).backends] == ["a", "b"]
    containers = (
        "services: {a: {image: x, x-anvil: {port: 1}}, b: {image: x, command: b}, c: {x-anvil: false}}"
    )
    assert [backend.model for backend in plain(tmp_path, containers).backends] == ["a"]


@pytest.mark.parametrize(
    "rest", ["ports: ['127.0.0.1::80', '127.0.0.1::81']", "network_mode: host", "ports: ['127.0.0.1::80']"]
)
def test_a_container_that_listens_elsewhere_is_a_warning(tmp_path: Path, rest: str) -> None:
    service = f"image: x, command: x --port 81, profiles: [llm], gpus: [{{count: 1}}], {rest}"
    (found,) = plain(tmp_path, f"services: {{a: {{{service}, x-anvil: {{port: 80}}}}}}").warnings
    assert "its command listens on 81" in found


def test_a_model_that_fits_beside_no_pinned_one_is_a_warning(tmp_path: Path) -> None:
    warnings = plain(tmp_path, TWO % ("vram: 5GiB, pin: true", "vram: 4GiB")).warnings
    assert any("services.b: does not fit on GPU 0 beside the pinned a" in warning for warning in warnings)


# Reading without the Compose program

DOUBLED = "".join(f"{new}: &{new} [{','.join([f'*{old}'] * 6)}]\n" for old, new in pairwise("abcdefghi"))

UNREADABLE = [
    ("include: [other.yaml]\nservices: {a: {x-anvil: {}}}", "compose.yaml:1: include: needs the Docker"),
    ("services:\n  a: {extends: b, x-anvil: {}}", "compose.yaml:2: services.a.extends: needs the"),
    ("services: {a: {env_file: x, x-anvil: {}}}", "services.a.env_file: needs the Docker Compose program"),
    ("services: {a: {ports: !reset [], x-anvil: {}}}", "services.a.ports: !reset needs the Docker"),
    ("services: {a: {x-anvil: {}}, a: {}}", "compose.yaml:1: services.a: stands here twice (first"),
    ("services: {a: {command: '${A', x-anvil: {}}}", "services.a.command: ${A does not end; write $$"),
    ("services: {a: {command: '${1}', x-anvil: {}}}", "services.a.command: ${1} is no variable"),
    ("services: {a: {command: '${A:-{}}', x-anvil: {}}}", "${A:-{}} has braces in braces"),
    ("services: {a: {command: '${A:?say it}', x-anvil: {}}}", "the variable A must be set: say it"),
    ("services: [", "compose.yaml:1: is not YAML"),
    ("- a", "compose.yaml:1: is not a Compose file"),
    ("", "compose.yaml:1: services: none serves a model"),
    ("a: &a [1]\n" + DOUBLED, "compose.yaml: is too large, or its aliases"),
    ("a: &a [*a]", "compose.yaml: is too large, or its aliases"),
    ("[" * 5000, "compose.yaml:1: is not YAML: brackets are nested deeper than 50 levels"),
    ("a: " + "[" * 60 + "]" * 60, "compose.yaml:1: is not YAML: brackets are nested deeper than 50 levels"),
    ('a: ["x\\ud800"]', "compose.yaml:1: a.0: holds half a surrogate pair"),
    ('a: {"x\\udc00": 1}', "holds half a surrogate pair"),
    ("a: !!python/object:os.system {}", "compose.yaml:1: is not YAML"),
]


@pytest.mark.parametrize("key", ["image", "user", "working_dir"])
@pytest.mark.parametrize("value", ["[x]", "{x: y}", "1.5", "true"])
def test_what_must_be_text_and_is_none_is_an_error(tmp_path: Path, key: str, value: str) -> None:
    text = f"services: {{a: {{image: x, {key}: {value}, x-anvil: {{}}}}}}"
    text = text.replace("image: x, image", "image")
    assert problems(tmp_path, text) == [f"compose.yaml:1: services.a: {key} must be text"]


@pytest.mark.parametrize(("text", "expected"), UNREADABLE, ids=[expected for _, expected in UNREADABLE])
def test_what_cannot_be_read_without_compose_is_an_error(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert expected in problem


def test_yaml_is_read_as_compose_reads_it(tmp_path: Path) -> None:
    text = (
        "services: {a: {x-anvil: {}, command: [on, no, 22:22, 2001-01-01, 0o17, 1_000, true, 1.50, ~, '07']}}"
    )
    words = one(tmp_path, "").service.command
    assert words == ()
    (a,) = plain(tmp_path, text).backends
    assert a.service.command == ("on", "no", "22:22", "2001-01-01", "15", "1000", "true", "1.5", "", "07")


def test_anchors_and_merge_keys_are_read(tmp_path: Path) -> None:
    text = "x-m: &m {image: vllm, x-anvil: {pin: true}}\nservices: {a: {<<: *m}, b: {<<: *m, image: other}}"
    assert [(each.engine, each.pin) for each in plain(tmp_path, text).backends] == [
        ("vllm", True),
        ("openai", True),
    ]


def test_variables_come_from_the_environment_and_from_dot_env(tmp_path: Path) -> None:
    lines = [
        "# c",
        "A=one  # c",
        "export B='t$wo'",
        'C="th\\tree ${A}"',
        "D = $A-${E:-e}",
        "E",
        "F=dot",
        "G=x#y",
    ]
    (tmp_path / ".env").write_text("\n".join(lines))
    text = "services: {a: {x-anvil: {}, command: ['$A', '$B', '$C', '$D', '$F', '$G', '$$A', '$1', 'x$']}}"
    (a,) = plain(tmp_path, text, environ={"F": "environ"}).backends
    expected = ("one", "t$wo", "th\tree one", "one-e", "environ", "x#y", "$A", "$1", "x$")
    assert a.service.command == expected


ENVIRON = {"A": "av", "E": "", "D": "$A"}
FILLED = [
    *(
        ("$A", "av"),
        ("${A}b", "avb"),
        ("$N", ""),
        ("$D", "$A"),
        ("$$A", "$A"),
        ("$$$A", "$av"),
        ("$1 $ x$", "$1 $ x$"),
    ),
    *(("${N:-d}", "d"), ("${E:-d}", "d"), ("${A:-d}", "av"), ("${N-d}", "d"), ("${E-d}", ""), ("${N-}", "")),
    *(("${A:+r}", "r"), ("${E:+r}", ""), ("${N:+r}", ""), ("${E+r}", "r"), ("${N+r}", "")),
    *(("${A:?e}", "av"), ("${E?e}", ""), ("${N:-a:-b?c}", "a:-b?c"), ("${A+b?c:-d}", "b?c:-d")),
    *(
        ("${N:-${M:-z}}y", "zy"),
        ("${N:-${D}x}", "$Ax"),
        ("${A:+r$A}", "rav"),
        ("${N:-$$}", "$"),
        ("${A}}", "av}"),
    ),
]


@pytest.mark.parametrize(("text", "expected"), FILLED)
def test_variables_are_put_in(text: str, expected: str) -> None:
    assert Scope(ENVIRON).fill(text) == expected


@pytest.mark.parametrize(
    "text", ["${E:?e}", "${N:?}", "${N?}", "${A:-${N:?e}}", "${A:x}", "${}", "${ A }", "${a.b}"]
)
def test_variables_that_must_be_set_and_what_is_no_variable_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be set|is no variable"):
        Scope(ENVIRON).fill(text)


def test_a_variable_counts_as_unset_where_nothing_stands_in_for_it() -> None:
    scope = Scope(ENVIRON)
    scope.fill("$N ${M} ${O:-o} ${P+p} $A $E ${A:-$Q}")
    assert list(scope.unset) == ["N", "M", "Q"]


def test_a_bad_dot_env_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text('A="1\n2"\nB="two\nlines\n')
    [found] = problems(tmp_path, SERVICE % "")
    assert found == '.env:3: a quote (") is opened here and not closed'


DOT_ENV = [
    ("V=one  # c", "one"),
    ("export V='t$wo'", "t$wo"),
    ("V='it\\'s'", "it's"),
    ('V="two\nlines"\nW=x', "two\nlines"),
    ("V='two\nlines'", "two\nlines"),
    ('W="x" V=y', "y"),
    ("W='x'V=y", "y"),
    ('V="x" # c\nW=1', "x"),
    ("\ufeffV=bom", "bom"),
    ("V=crlf\r\nW='a\r\nb'\r\n", "crlf"),
    ('V="a\\tb\\"c\\\\d\\$e\\q\\0101"', 'a\tb"c\\d$e\\qA'),
    ("V: yaml", "yaml"),
    ("W=1\nW=2\nV=$W", "2"),
    ("V=x#y", "x#y"),
    ("V=$$x", "$x"),
    ("V=", ""),
    ("V\n", ""),
    ("#V=1\n  V = 2 ", "2"),
    ("V=${W:-z}", "z"),
    ("V.W=1\nV[0]=2\nV=3", "3"),
]


@pytest.mark.parametrize(("text", "expected"), DOT_ENV)
def test_a_dot_env_is_read_as_compose_reads_it(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / ".env").write_text(text, newline="")
    (a,) = plain(tmp_path, "services: {a: {x-anvil: {}, command: ['$V']}}").backends
    assert a.service.command == (expected,)


def test_the_files_of_variables_are_those_that_compose_takes(tmp_path: Path) -> None:
    for name, text in ((".env", "V=dot\nW=dot"), ("one", "V=1\nW=1"), ("two", "W=2")):
        (tmp_path / name).write_text(text)
    environ = {"COMPOSE_ENV_FILES": f"{tmp_path}/one,{tmp_path}/two"}
    (a,) = plain(tmp_path, "services: {a: {x-anvil: {}, command: [$V$W]}}", environ=environ).backends
    assert a.service.command == ("12",)


def test_what_compose_reads_is_not_refused_by_our_reader(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("not for us ' x")
    answer = Done(0, "name: p\nservices: {a: {image: x, x-anvil: {}}}", "")
    found = load([write(tmp_path, SERVICE % "")], compose=lambda argv, environ: answer, environ={})
    assert [each.name for each in found.backends] == ["a"]


def test_a_second_file_needs_compose(tmp_path: Path) -> None:
    files = [write(tmp_path, SERVICE % ""), write(tmp_path, SERVICE % "", "two.yaml")]
    with pytest.raises(ConfigError, match=r"two\.yaml: a second file needs the Docker Compose program"):
        load(files, compose=None, environ={})


def test_files_that_are_not_there_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "x.yaml", tmp_path / "y.yaml"], compose=None)
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == [
        "cannot be read: No such file or directory"
    ] * 2


# Reading through the Compose program


class Compose:
    """Stands in for the program."""

    def __init__(self, answer: Done | None) -> None:
        self.answer = answer
        self.asked: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str], environ: Mapping[str, str]) -> Done | None:
        self.asked.append(argv)
        return self.answer


def test_compose_is_asked_for_yaml_of_all_profiles(tmp_path: Path) -> None:
    assert compose_config([Path("a.yaml"), Path("b.yaml")]) == [
        *("docker", "compose", "--ansi", "never", "-f", "a.yaml", "-f", "b.yaml"),
        *("--profile", "*", "config"),
    ]


def test_what_compose_says_is_the_content_with_dollars_undoubled(tmp_path: Path) -> None:
    compose = Compose(Done(0, "name: p\nservices: {a: {command: [$$HOME], x-anvil: {}}}", ""))
    found = load([write(tmp_path, SERVICE % "")], compose=compose, environ={})
    assert (found.project, found.backends[0].service.command) == ("p", ("$HOME",))


def test_warnings_of_compose_are_kept(tmp_path: Path) -> None:
    err = 'time="x" level=warning msg="The \\"V\\" variable is not set. Defaulting to a blank string."\n'
    compose = Compose(Done(0, "services: {a: {x-anvil: {}}}", err + 'time="x" level=warning msg="other"\n'))
    warnings = load([write(tmp_path, SERVICE % "")], compose=compose, environ={}).warnings
    assert warnings[0].endswith(
        'compose.yaml: docker compose config: The "V" variable is not set. Defaulting to a blank string.'
    )
    assert warnings[1].endswith("docker compose config: other")


def test_what_compose_refuses_is_a_problem(tmp_path: Path) -> None:
    compose = Compose(Done(15, "", 'time="x" level=warning msg="w"\nservices.a is bad\n'))
    with pytest.raises(ConfigError, match=r"compose.yaml: docker compose config: services.a is bad$"):
        load([write(tmp_path, SERVICE % "")], compose=compose, environ={})


def test_without_the_program_the_file_is_read_all_the_same(tmp_path: Path) -> None:
    compose = Compose(None)
    assert load([write(tmp_path, SERVICE % "")], compose=compose, environ={}).backends
    assert len(compose.asked) == 1


@pytest.mark.parametrize("how", ["file", "variable", "environ", "flag"])
def test_the_process_runtime_never_asks_for_compose(tmp_path: Path, how: str) -> None:
    runtime = {"file": "process", "variable": "${R:-process}"}.get(how, "compose")
    file = write(
        tmp_path, f"x-anvil: {{runtime: '{runtime}'}}\nservices: {{a: {{command: x, x-anvil: {{}}}}}}"
    )
    compose = Compose(Done(1, "", "never"))
    environ = {"ANVIL_RUNTIME": "process"} if how == "environ" else {}
    found = load(
        [file], compose=compose, environ=environ, overrides={"runtime": "process"} if how == "flag" else {}
    )
    assert (found.runtime, compose.asked) == ("process", [])


def test_a_missing_program_is_no_answer(tmp_path: Path) -> None:
    assert run_compose(["docker", "compose"], {"PATH": str(tmp_path)}) is None


@pytest.mark.parametrize(
    "err", ["unknown shorthand flag: 'f' in -f", "docker: 'compose' is not a docker command."]
)
def test_docker_without_compose_is_no_answer(tmp_path: Path, err: str) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "{err}" >&2\nexit 125\n')
    docker.chmod(0o755)
    assert run_compose([str(docker), "compose"], {}) is None


# Which file


def test_the_compose_file_is_found_upward_with_its_override(tmp_path: Path) -> None:
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    second = write(tmp_path, "", "docker-compose.yml")
    assert find_files(inner, {}) == (second,)
    first = write(tmp_path, "", "compose.yml")
    for name in OVERRIDE_NAMES[::-1]:
        override = write(tmp_path, "", name)
        assert find_files(inner, {}) == (first, override)


def test_compose_file_names_the_files_in_the_environment_or_in_dot_env(tmp_path: Path) -> None:
    write(tmp_path, "")
    first, second = tmp_path / "sub" / "a.yaml", tmp_path / "b.yaml"
    assert find_files(tmp_path, {"COMPOSE_FILE": f"sub/a.yaml:{second}"}) == (first, second)
    environ = {"COMPOSE_FILE": "sub/a.yaml|b.yaml", "COMPOSE_PATH_SEPARATOR": "|"}
    assert find_files(tmp_path, environ) == (first, second)
    (tmp_path / ".env").write_text("COMPOSE_FILE=b.yaml")
    assert find_files(tmp_path, {}) == (second,)
    assert find_files(tmp_path, {"COMPOSE_FILE": "sub/a.yaml"}) == (first,)
    assert find_files(tmp_path, {"COMPOSE_FILE": ""}) == (tmp_path / "compose.yaml",)


def test_the_files_are_those_that_compose_finds(tmp_path: Path, compose: config.Compose) -> None:
    names = ("compose.yml", "docker-compose.yml", *OVERRIDE_NAMES)
    for name in names:
        write(tmp_path, f"services: {{a: {{image: x, labels: {{'{name}': here}}}}}}", name)
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    for name in ("", *names[2:]):
        if name:
            (tmp_path / name).unlink()
        (tmp_path / "at").write_text(f"cd {tmp_path} && exec docker compose config")
        answer = compose(["sh", str(tmp_path / "at")], environ)
        assert answer
        (taken,) = yaml.safe_load(answer.out)["services"].values()
        assert [*taken["labels"]] == sorted(file.name for file in find_files(tmp_path, {}))


def test_no_compose_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no compose\.yaml here or above; name a compose file"):
        find_files(tmp_path, {})


# The files we ship


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_every_shipped_file_loads_without_a_warning(file: Path) -> None:
    hosts = {name: Machine((Gpu("0", 24 << 30),), address=address) for name, address in HOSTS.items()}
    found = load([file], compose=None, environ={}, hosts=hosts if file.stem == "demo-hosts" else {})
    assert len(found.backends) >= 2
    assert found.warnings == ()


def test_the_shipped_files_show_what_they_say() -> None:
    shipped = {file.stem: load([file], compose=None, environ={}) for file in SHIPPED}
    assert set(shipped) == {
        *("demo", "demo-hosts", "demo-sleep", "llamacpp", "vllm-pair", "sglang"),
        *("tensor-parallel", "prefill-decode"),
    }
    assert shipped["demo"].runtime == "process"
    assert [each.gpus for each in shipped["vllm-pair"].backends] == [("0",), ("0",)]
    assert [each.engine for each in shipped["vllm-pair"].backends] == ["vllm", "vllm"]
    assert [each.gpus for each in shipped["tensor-parallel"].backends] == [("0", "1"), ("0",), ("1",)]
    assert {each.engine for each in shipped["llamacpp"].backends} == {"llamacpp"}
    stages = {each.infer_type: (each.model, each.gpus) for each in shipped["prefill-decode"].backends}
    assert stages == {"prefill": ("qwen3-8b", ("0",)), "decode": ("qwen3-8b", ("1",))}
    assert sum(each.vram or 0 for each in shipped["sglang"].backends) == 23 * GIB


def test_beside_its_engines_anvil_mux_leaves_itself_alone() -> None:
    file = SHIPPED[0].parent.parent / "contrib" / "compose.yaml"
    found = load([file], compose=None, environ={"PWD": "/srv/mux", "DOCKER_GID": "999"})
    assert [each.name for each in found.backends] == ["qwen3-8b", "gemma-3-12b"]
    assert (found.host, found.warnings) == ("127.0.0.1", ())
    with pytest.raises(
        ConfigError, match="the variable DOCKER_GID must be set: the group of Docker's socket"
    ):
        load([file], compose=None, environ={"PWD": "/srv/mux"})


def test_the_container_that_checkpoints_has_what_it_takes() -> None:
    file = SHIPPED[0].parent.parent / "contrib" / "compose-checkpoint.yaml"
    found = load([file], compose=None, environ={"PWD": "/srv/mux"})
    assert [each.name for each in found.backends] == ["qwen3-8b", "gemma-3-12b"]
    assert {each.evict_to for each in found.backends} == {("checkpoint", "stop")}
    assert (found.host, found.warnings) == ("127.0.0.1", ())
    mux = yaml.safe_load(file.read_text())["services"]["anvil-mux"]
    assert (mux["user"], mux["privileged"], mux["pid"]) == ("root", True, "host")
    assert mux["gpus"] == [
        {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "compute", "utility"]}
    ]
    assert mux["command"] == ["serve", file.name]


def has_compose() -> bool:
    if not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def compose() -> config.Compose:
    """The real program; that it was not simply missing is part of what it shows."""
    if not has_compose():
        pytest.skip("needs the Docker Compose program")

    def ask(argv: Sequence[str], environ: Mapping[str, str]) -> Done | None:
        answer = run_compose(argv, environ)
        assert answer is not None
        return answer

    return ask


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_compose_and_the_fallback_read_a_shipped_file_alike(file: Path, compose: config.Compose) -> None:
    assert load([file], compose=compose) == load([file], compose=None)


def random_text(random: Random, depth: int = 3) -> str:
    """Literals and expressions; the words of the expressions are made in the same way."""
    text = ""
    for _ in range(random.randrange(4)):
        text += "".join(random.choices(["a", "b", " ", ":", "-", "?", "+", "$$", "\\", '"', "1"], k=2))
        if depth:
            name, operator = random.choice("AEDNM"), random.choice([":-", "-", ":+", "+", "?"])
            word = random_text(random, depth - 1)
            text += random.choice([f"${name}", f"${{{name}}}", f"${{{name}{operator}{word}}}"])
    return text


def test_variables_are_put_in_as_compose_does(tmp_path: Path, compose: config.Compose) -> None:
    random, texts, expected = Random(7), [], []
    for text in (*(text for text, _ in FILLED), *(random_text(random) for _ in range(300))):
        with suppress(ValueError):
            expected.append(Scope(ENVIRON).fill(text))
            texts.append(text)
    file = write(tmp_path, json.dumps({"services": {"s": {"image": "x", "x-anvil": {}, "command": texts}}}))
    environ = {**ENVIRON, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert load([file], compose=compose, environ=environ).backends[0].service.command == tuple(expected)


MANY_FORMS = """
name: ${NAME:-Forms}-x
x-anvil:
  listen: 127.0.0.1:${PORT:-9393}
  policy: {name: debounce, quiet: "${QUIET-3}"}
  gpus: {"0": {vram: 24GiB}, "1": {vram: "${VRAM}"}}
  default_model: m
services:
  webui: {image: webui, ports: ["3000:80"]}
  second:
    image: vllm/vllm-openai:v1
    entrypoint: vllm serve
    command: org/m --served-model-name n --api-key $$KEY "two words" ${NOT_SET}
    environment: [A=1, HOME, ALSO_NOT_SET, "D=${DOT}"]
    ports: ["8000:8000", "127.0.0.1:9000-9001:9000-9001"]
    x-anvil: {port: 8000, load_timeout: 1m, vram: "${NO_VRAM:-2GB}"}
    gpus: all
    stop_grace_period: 1m30s
    restart: unless-stopped
  first:
    image: x
    expose: ["1234"]
    labels: [anvil.model=m, anvil.aliases=on, other]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, device_ids: ["1"], capabilities: [gpu]}]}}}
    x-anvil:
  third:
    image: x
    command: [on, "22:22", yes]
    environment: {T: true, N: 1.50, CUDA_VISIBLE_DEVICES: 0}
    devices: ["nvidia.com/gpu=0"]
    x-anvil: {pin: on, vram: 1GiB, aliases: [yes]}
"""


def test_compose_and_the_fallback_read_many_forms_alike(tmp_path: Path, compose: config.Compose) -> None:
    folder = tmp_path / "Some.Folder"
    folder.mkdir()
    (folder / ".env").write_text("DOT='from dot env'\nVRAM=20000MiB # c\n")
    file = write(folder, MANY_FORMS)
    through, without = load([file], compose=compose), load([file], compose=None)
    ours = [each for each in through.warnings if "docker compose config: The" not in each]
    assert sorted(ours) == sorted(each for each in without.warnings if "is not set, so" not in each)
    assert (len(through.warnings), len(without.warnings)) == (8, 8), json.dumps(through.warnings, indent=1)
    for each in config.Config.__dataclass_fields__:
        if each != "warnings":
            assert getattr(through, each) == getattr(without, each)
    assert [each.name for each in without.backends] == ["second", "first", "third"]
    assert (without.project, without.port) == ("forms-x", 9393)


@pytest.mark.parametrize(("text", "expected"), DOT_ENV)
def test_compose_reads_the_same_dot_env(
    tmp_path: Path, compose: config.Compose, text: str, expected: str
) -> None:
    (tmp_path / ".env").write_text(text, newline="")
    file = write(tmp_path, "services: {a: {image: x, x-anvil: {}, command: ['$V']}}")
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert load([file], compose=compose, environ=environ).backends[0].service.command == (expected,)


# Several files

BASE = """
include: [{path: [other/included.yaml]}]
x-anvil: {gpus: ["0", "1"], max_wait: 1, policy: {name: debounce, quiet: 2}}
services:
  a: {image: x, x-anvil: {gpus: ["0"], vram: "${SIZE:-1GiB}", pin: true, aliases: [n]}}
  b: {image: x, x-anvil: {gpus: ["0"], pin: true}}
  c: {extends: a, x-anvil: {gpus: ["1"], aliases: []}}
  d: {extends: {file: other/file.yaml, service: "${BASE:-base}"}, x-anvil: {vram: 2GiB, set: {top_k: "$TOP"}}}
  e: {image: x, x-anvil: {pin: true}}
  f: {image: x, x-anvil: {pin: true, ttl: 5}}
"""
OVER = """
x-anvil:
  gpus: ["1", "0", "2"]
  policy: eager
  max_queue: 2
services:
  a: {command: y, x-anvil: {gpus: ["1"], pin: }}
  b: {x-anvil: !override {gpus: ["1"]}}
  e: {x-anvil: !reset null}
  f: {x-anvil: {ttl: !reset 0}}
  included: {x-anvil: {vram: 3GiB}}
"""
OTHER = """services:
  base: {extends: root, x-anvil: {gpus: ["1"], vram: 1GiB}}
  root: {image: x, x-anvil: {gpus: ["0"], aliases: ["$WHERE"]}}
"""
INCLUDED = """
x-anvil: {policy: nobody-reads-this}
services: {included: {image: x, x-anvil: {gpus: ["1"], aliases: ["$INCLUDED"]}}}
"""


@pytest.fixture
def laid(tmp_path: Path) -> list[Path]:
    """Two files, one of which extends a third and one of which includes a fourth."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".env").write_text("INCLUDED=by-its-own\nWHERE=not-here")
    (tmp_path / ".env").write_text("WHERE=first\nTOP='$literal'")
    write(tmp_path / "other", OTHER, "file.yaml")
    write(tmp_path / "other", INCLUDED, "included.yaml")
    return [write(tmp_path, BASE), write(tmp_path, OVER, "over.yaml")]


def test_each_setting_is_that_of_the_last_file_that_has_it(laid: list[Path], compose: config.Compose) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    found = load(laid, compose=compose, environ=environ)
    assert [each.name for each in found.backends] == ["a", "b", "c", "d", "f", "included"]
    a, b, c, d, f, included = found.backends
    assert [gpu.id for gpu in found.gpus] == ["1", "0", "2"]
    assert (found.max_wait, found.max_queue, found.policy) == (1.0, 2, "eager")
    assert (a.gpus, a.vram, a.pin, a.aliases, a.service.command) == (("1",), GIB, False, ("n",), ("y",))
    assert (b.gpus, b.pin) == (("1",), False)
    assert (c.gpus, c.vram, c.pin) == (("1",), GIB, True)
    assert (d.gpus, d.vram, d.aliases, d.set) == (("1",), 2 * GIB, ("first",), (("top_k", '"$literal"'),))
    assert (f.pin, f.ttl) == (True, None)
    assert (included.gpus, included.vram, included.aliases) == (("1",), 3 * GIB, ("by-its-own",))


def test_a_setting_is_named_by_the_file_whose_value_counts(laid: list[Path], compose: config.Compose) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "SIZE": "huge", "TOP": "1"}
    laid[1].write_text(OVER.replace("max_queue: 2", "max_queue: x"))
    (laid[0].parent / "other" / "file.yaml").write_text(OTHER.replace('["$WHERE"]', "[{}]"))
    with pytest.raises(ConfigError) as caught:
        load(laid, compose=compose, environ=environ)
    said = [str(problem).removeprefix(f"{laid[0].parent}/") for problem in caught.value.problems]
    assert [" ".join(each.split(": ")[:2]) for each in said] == [
        "over.yaml:5 x-anvil.max_queue",
        "compose.yaml:5 services.a.x-anvil.vram",
        "compose.yaml:5 services.c.x-anvil.vram",
        "other/file.yaml:3 services.d.x-anvil.aliases",
    ]


def test_what_only_compose_can_read_is_merged_as_compose_does(tmp_path: Path) -> None:
    there = "extends: {file: 'https://host/base.yaml', service: b}"
    file = write(tmp_path, f"services: {{a: {{{there}, x-anvil: {{pin: true}}}}}}")
    answer = Done(0, "services: {a: {image: x, x-anvil: {pin: true, ttl: 5}}}", "")
    (a,) = load([file], compose=lambda argv, environ: answer, environ={}).backends
    assert (a.pin, a.ttl) == (True, 5.0)


def test_a_setting_of_several_files_that_cannot_be_filled_in_is_an_error(tmp_path: Path) -> None:
    first = write(tmp_path, SERVICE % "", "one.yaml")
    second = write(tmp_path, "services: {a: {x-anvil: {model: '${A:-{}}'}}}", "two.yaml")
    answer = Done(0, SERVICE % "", "")
    with pytest.raises(
        ConfigError, match=r"two\.yaml:1: services\.a\.x-anvil\.model: .* has braces in braces"
    ):
        load([first, second], compose=lambda argv, environ: answer, environ={})


def test_files_of_processes_are_laid_over_each_other_without_compose(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "x-anvil: {runtime: process}\n"
        "services: {a: {command: x, environment: {A: 1, B: 1}, x-anvil: {ttl: 1}}}",
    )
    second = write(tmp_path, "services: {a: {environment: [B=2], x-anvil: {gpus: []}}}", "two.yaml")
    (a,) = load([first, second], compose=None, environ={}).backends
    assert (a.service.command, a.service.environment, a.ttl) == (("x",), (("A", "1"), ("B", "2")), 1.0)


def test_flag_values_are_found_in_both_spellings() -> None:
    assert list(service.flag_values(("x", "--a", "1", "--a=2", "--a"), "--a")) == ["1", "2", ""]


def test_vram_may_be_measured(tmp_path: Path) -> None:
    text = "services: {a: {image: x, x-anvil: {gpus: ['0'], vram: measured}}}"
    (backend,) = plain(tmp_path, text).backends
    assert (backend.vram, backend.vram_measured) == (None, True)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (
            "image: vllm/vllm-openai, command: [--enable-sleep-mode], environment: {VLLM_SERVER_DEV_MODE: 1}",
            "sleep",
        ),
        ("image: vllm/vllm-openai, command: [--enable-sleep-mode]", "stop"),
        ("image: vllm/vllm-openai, environment: {VLLM_SERVER_DEV_MODE: 1}", "stop"),
        ("image: ollama/ollama", "sleep"),
        ("image: ggml-org/llama.cpp:server", "stop"),
    ],
)
def test_who_is_allowed_to_sleep_sleeps_unless_told_otherwise(
    tmp_path: Path, described: str, expected: str
) -> None:
    (backend,) = plain(tmp_path, f"services: {{a: {{{described}, x-anvil: {{}}}}}}").backends
    assert backend.evict_to[0] == expected


def test_a_standby_goes_down(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lightest standby level down: write \[checkpoint, stop\]"):
        plain(tmp_path, "services: {a: {image: x, x-anvil: {evict_to: [stop, checkpoint]}}}")


ROUTED = """
    x-anvil:
      runtime: process
      routing:
        default: mine
        mode: full
        policies:
          mine:
            metrics: {tax: {kappa_work: {kappa: "${KAPPA:-1e-6}"}}}
            filters: [schedulability, {metric: {metric: tax, threshold: 9000}}]
            selector: {metric: {by: [tax, num_requests]}}
    services:
      a: {command: [a], x-anvil: {model: m, kv_tokens: 4096}}
      b: {command: [b], x-anvil: {model: m, routing: mine}}
      c: {command: [c], x-anvil: {routing: sticky}}
"""


def test_a_routing_policy_of_the_file_can_be_the_default_or_a_models_own(tmp_path: Path) -> None:
    found = plain(tmp_path, ROUTED)
    assert (found.routing, found.routing_mode) == ("mine", "full")
    assert found.routing_policies["mine"]["filters"][0] == "schedulability"
    assert [(b.routing, b.kv_tokens) for b in found.backends] == [
        ("mine", 4096),
        ("mine", None),
        ("sticky", None),
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("mode: full", "store: http://10.0.0.1/3", 6, "routing.store: must be the address of a Redis"),
        ("schedulability,", "schedulable,", 10, "policies.mine.filters.0: unknown filter schedulable"),
        ("mode: full", "mode: fool", 6, "routing.mode: must be one of lite, full, not 'fool'"),
        ("default: mine", "default: mime", 4, "no policy mime; did you mean mine?"),
        ("routing: sticky", "routing: stick", 15, "services.c.x-anvil.routing: no policy stick"),
        (
            "routing: mine}",
            "routing: lmetric}",
            14,
            "is lmetric, but a, a replica of",
        ),
        ("kappa_work: {kappa", "kappa_work: {k", 9, "unknown setting of kappa_work; known: kappa"),
        ("          mine:\n", "          sticky:\n", 8, "is the name of a policy that is shipped"),
        ("metric: tax,", "metric: kv_cache_usage_ratio_projected,", 14, "services.b: needs kv_tokens"),
    ],
)
def test_what_is_wrong_with_routing_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, text: str
) -> None:
    assert old in ROUTED
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, ROUTED.replace(old, new))
    assert any(f":{line}: " in each and text in each for each in caught.value.problems), caught.value.problems


BALANCED = """
    x-anvil: {routing: HOW}
    services:
      a: {image: x, x-anvil: {model: m, gpus: ["0"]}}
      b: {image: x, x-anvil: {model: m, gpus: ["1"]}}
"""


@pytest.mark.parametrize(
    "how",
    [
        "load_balance",
        "{default: load_balance, mode: lite}",
        "{default: aware, policies: {aware: {like: load_balance, cache_aware: true}}}",
    ],
)
def test_a_policy_that_goes_by_what_engines_report_is_refused_in_the_mode_lite(
    tmp_path: Path, how: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, BALANCED.replace("HOW", how))
    [problem] = caught.value.problems
    policy = "aware" if "aware" in how else "load_balance"
    assert (
        f"{policy} goes by what engines report: write routing: {{default: {policy}, mode: full}}" in problem
    )
    assert ("or take load_balance_lite" in problem) is (policy == "load_balance")


@pytest.mark.parametrize(
    "how",
    [
        "load_balance_lite",
        "{default: load_balance, mode: full}",
        "{default: aware, mode: full, policies: {aware: {like: load_balance, cache_aware: true}}}",
    ],
)
def test_a_replica_that_takes_whole_requests_needs_nothing_of_the_stages(tmp_path: Path, how: str) -> None:
    assert plain(tmp_path, BALANCED.replace("HOW", how)).backends


def test_a_replica_for_answers_needs_what_places_them(tmp_path: Path) -> None:
    staged = BALANCED.replace("HOW", "{default: load_balance, mode: full}")
    for name, stage in (("a", "prefill"), ("b", "decode")):
        staged = staged.replace(
            f"{name}: {{image: x, x-anvil: {{", f"{name}: {{image: x, x-anvil: {{infer_type: {stage}, "
        )
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, staged)
    [problem] = caught.value.problems
    assert "services.b: needs kv_tokens, because routing is load_balance" in problem


def test_what_a_variable_leaves_empty_in_routing_says_nothing(tmp_path: Path) -> None:
    top = "x-anvil: {routing: {default: '${A:-}', mode: '${A:-}', store: '${A:-}', policies: }}"
    found = plain(tmp_path, f"{top}\nservices: {{a: {{image: x, x-anvil: {{}}}}}}")
    assert (found.routing, found.routing_mode, found.routing_store) == ("least_delay", "lite", "")


def test_what_is_wrong_within_a_setting_hides_nothing_else_of_it(tmp_path: Path) -> None:
    top = """
    x-anvil:
      gpus: {"0": {vram: x, reserve: y}, "1": {vam: 1}}
      hooks: [{run: []}, {on: [now], run: [a], timeout: soon}]
      routing:
        default: [mine]
        mode: fool
        store: http://10.0.0.1/3
        modus: lite
        policies: {mine: {filters: [schedulable], selector: round_robin}}
    services: {a: {image: x, x-anvil: {routing: mine}}}
    """
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, top)
    told = [each.partition("compose.yaml:")[2].partition(" x-anvil.")[::2] for each in caught.value.problems]
    assert [(line.rstrip(":"), text.partition(": ")[0]) for line, text in told] == [
        ("3", "gpus.0.vram"),
        ("3", "gpus.0.reserve"),
        ("3", "gpus.1.vam"),
        ("4", "hooks.0.run"),
        ("4", "hooks.1.on"),
        ("4", "hooks.1.timeout"),
        ("9", "routing.modus"),
        ("6", "routing.default"),
        ("7", "routing.mode"),
        ("8", "routing.store"),
        ("10", "routing.policies.mine.filters.0"),
    ]


# Scaled services

PROCESS = 'x-anvil: {runtime: process, gpus: {"0": {vram: 24GiB}, "1": {}}}'


def scaled(folder: Path, service: str, top: str = "") -> Config:
    """Of a file with one service, described in YAML flow."""
    return plain(folder, f"{top}\nservices: {{a: {{image: x, command: [x], {service}}}}}")


@pytest.mark.parametrize("how", ["scale: 3", "deploy: {replicas: 3}"])
def test_each_container_of_a_scaled_service_is_a_replica(tmp_path: Path, how: str) -> None:
    found = scaled(tmp_path, f"{how}, x-anvil: {{kv_tokens: 4096}}").backends
    assert [(each.name, each.model, each.kv_tokens) for each in found] == [
        *[("a-1", "a", 4096), ("a-2", "a", 4096), ("a-3", "a", 4096)]
    ]
    assert {each.service_name for each in found} == {"a"}
    assert [each.service.number for each in found] == [1, 2, 3]


@pytest.mark.parametrize(
    ("how", "key"), [("scale: 31536001", "scale"), ("deploy: {replicas: 9999999}", "deploy")]
)
def test_a_service_has_at_most_a_thousand_replicas(tmp_path: Path, how: str, key: str) -> None:
    text = f"x-anvil: {{runtime: process}}\nservices: {{a: {{command: [x], {how}, x-anvil: {{}}}}}}"
    (problem,) = problems(tmp_path, text)
    assert "replicas, of at most 1000" in problem


def test_a_service_scaled_to_one_is_like_any_other(tmp_path: Path) -> None:
    (backend,) = scaled(tmp_path, "scale: 1, x-anvil: {}").backends
    assert (backend.name, backend.service_name, backend.service.scale) == ("a", "a", 1)


def test_replicas_of_a_scaled_service_share_its_gpu_by_their_memory(tmp_path: Path) -> None:
    found = scaled(tmp_path, 'scale: 2, x-anvil: {gpus: ["0"], vram: 10GiB}', PROCESS)
    assert [each.gpus for each in found.backends] == [("0",), ("0",)]
    assert found.warnings == ()


@pytest.mark.parametrize("vram", ["", ", vram: 20GiB"])
def test_replicas_that_never_fit_beside_each_other_are_warned_of(tmp_path: Path, vram: str) -> None:
    found = scaled(tmp_path, f'scale: 3, x-anvil: {{gpus: ["0"]{vram}}}', PROCESS)
    [warning] = found.warnings
    assert "compose.yaml:2: services.a: no two of its replicas fit on GPU 0, so they take turns" in warning


def test_replicas_that_are_processes_may_each_have_a_gpu_and_see_no_other(tmp_path: Path) -> None:
    found = scaled(tmp_path, 'scale: 2, x-anvil: {gpus: [["1"], ["0"]]}, environment: {A: b}', PROCESS)
    assert [each.gpus for each in found.backends] == [("1",), ("0",)]
    seen = [dict(each.service.environment) for each in found.backends]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["1", "0"]
    assert all(each["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and each["A"] == "b" for each in seen)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("service", "top", "text"),
    [
        ('x-anvil: {gpus: [["0"], ["1"]]}', "", "Compose gives all containers of a service the same GPUs"),
        ('x-anvil: {gpus: [["0"]]}', PROCESS, "services.a: has 2 replicas, and gpus for 1"),
        ('x-anvil: {gpus: [["0"], ["7"]]}', PROCESS, "GPU 7 is not declared"),
        (
            "x-anvil: {}, ports: ['81:80']",
            "",
            'port 81 cannot be that of all its replicas: publish any, "127',
        ),
        ("x-anvil: {port: 81}, network_mode: host", "", "port 81 cannot be that of all its replicas"),
        ("x-anvil: {port: 81, gpus: []}", PROCESS, "leave it out, and each has one of its own in $PORT"),
        ("x-anvil: {}, container_name: a", "", "services.a: is scaled, so it can have no container_name"),
        ("x-anvil: {}}, a-2: {image: x, x-anvil: {}", "", "a replica of a scaled service is called a-2 too"),
        ("x-anvil: {infer_type: decode}", "", "a.x-anvil.infer_type: is decode, but no service of a is"),
    ],
)
def test_what_cannot_be_scaled_is_told_once_with_its_line(
    tmp_path: Path, service: str, top: str, text: str
) -> None:
    told = problems(tmp_path, f"{top}\nservices: {{a: {{image: x, command: [x], scale: 2, {service}}}}}")
    assert len(told) == 1, told
    assert told[0].startswith("compose.yaml:2: ")
    assert text in told[0]


@pytest.mark.parametrize("ports", ["8001-8002:8080", "127.0.0.1::8080", "8080"])
def test_replicas_may_share_what_each_gets_a_port_of_its_own_from(tmp_path: Path, ports: str) -> None:
    assert len(scaled(tmp_path, f"scale: 2, x-anvil: {{}}, ports: ['{ports}']").backends) == 2


# Keys, certificates, the engine itself


def test_files_of_keys_and_certificates_are_seen_from_the_compose_file(tmp_path: Path) -> None:
    files = "key_file: keys.txt, tls_cert: /etc/cert.pem, tls_key: ../key.pem"
    found = plain(tmp_path, TOP % f"{files}, allowed_hosts: mux.example")
    assert found.key_file == str(tmp_path / "keys.txt")
    assert (found.tls_cert, found.tls_key) == ("/etc/cert.pem", str(tmp_path.parent / "key.pem"))
    assert found.allowed_hosts == ("mux.example",)


@pytest.mark.parametrize(
    "written", ["'*'", "app.example", "https://app.example/", "'https://a, https://*.b'"]
)
def test_web_sites_are_named_each_alone(tmp_path: Path, written: str) -> None:
    [problem] = problems(
        tmp_path, f"x-anvil: {{cors: {written}}}\nservices: {{a: {{image: x, x-anvil: {{}}}}}}"
    )
    assert "must name web sites such as https://app.example" in problem


@pytest.mark.parametrize(("one", "other"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_a_certificate_needs_its_key(tmp_path: Path, one: str, other: str) -> None:
    [problem] = problems(tmp_path, f"x-anvil: {{{one}: x}}\nservices: {{a: {{image: x, x-anvil: {{}}}}}}")
    assert problem.endswith(f"x-anvil.{one}: needs {other} beside it")


def test_what_may_be_asked_of_an_engine_is_a_list_of_plain_paths(tmp_path: Path) -> None:
    found = plain(tmp_path, "services: {a: {image: x, x-anvil: {upstream: [/docs, /sdapi/]}}}")
    assert found.backends[0].upstream == ("/docs", "/sdapi/")
    for path in ("docs", "/a/../b", "/a//b", "/", "/%2e", "/a?b"):
        [problem] = problems(tmp_path, f"services: {{a: {{image: x, x-anvil: {{upstream: ['{path}']}}}}}}")
        assert "must be paths such as /docs or /sdapi/" in problem
