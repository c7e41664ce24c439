"""Every problem, warning and hint says where it is, what to write instead, and which page says more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anvil_mux.cli.checking import vram_to_declare
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS, Backend, Config
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.problems import FOLDER, page_of
from anvil_mux.config.settings import Setting
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load
from anvil_mux.serve.configuration import open_address
from tests.config.test_problems import ROOT, anchors

QUIET = "image: x, profiles: [llm], ports: ['127.0.0.1::80'], gpus: [{count: 1}]"
OWN = f"services:\n  a:\n    {QUIET.replace(', ', chr(10) + '    ')}\n    x-anvil:\n      %s\n"
TOP = f"x-anvil:\n  %s\nservices:\n  a: {{x-anvil: {{}}, {QUIET}}}\n"
RAW = "services:\n  a:\n    x-anvil: {}\n    %s\n"
INDENT = {OWN: 6, TOP: 2, RAW: 4}


def diagnostics(folder: Path, text: str, **given: Any) -> list[Diagnostic]:
    """The problems of a file, or its warnings if it has none."""
    file = folder / "compose.yaml"
    file.write_text(text)
    try:
        found = load([file], environ={}, compose=None, **given).warnings
    except ConfigError as error:
        found = error.problems
    assert all(isinstance(each, Diagnostic) for each in found), found
    return [cast(Diagnostic, each) for each in found]


def parts(found: Diagnostic) -> tuple[int | None, str, str, str]:
    page = page_of(found)
    if page:
        file, _, anchor = page.partition("#")
        assert not anchor or anchor in anchors(ROOT / file)
    return found.place.line, ".".join(found.key), found.write, page.removeprefix(FOLDER)


# Line, key, what to write, page
CASES = [
    (OWN, "vrm: 20GiB", 8, "services.a.x-anvil.vrm", "vram: 20GiB", "reference.md#x-anvil-on-a-service"),
    (OWN, "vram: lots", 8, "services.a.x-anvil.vram", "vram: 20GiB", "gpus.md#what-a-model-needs"),
    (OWN, "vram: 20", 8, "services.a.x-anvil.vram", "vram: 20GiB", "gpus.md#what-a-model-needs"),
    (OWN, "vram: 20 gigs", 8, "services.a.x-anvil.vram", "vram: 20GiB", "gpus.md#what-a-model-needs"),
    (OWN, "vram: 0", 8, "services.a.x-anvil.vram", "", "gpus.md#what-a-model-needs"),
    (OWN, "port: 70000", 8, "services.a.x-anvil.port", "port: 8000", "reference.md#engines"),
    (OWN, "engine: vlm", 8, "services.a.x-anvil.engine", "engine: vllm", "reference.md#engines"),
    (
        OWN,
        "evict_to: [sotp]",
        8,
        "services.a.x-anvil.evict_to",
        "evict_to: [stop]",
        "standby.md#the-levels",
    ),
    (
        OWN,
        "evict_to: []",
        8,
        "services.a.x-anvil.evict_to",
        "evict_to: [stop]",
        "standby.md#the-levels",
    ),
    (
        OWN,
        "evict_to: [stop, sleep]",
        8,
        "services.a.x-anvil.evict_to",
        "evict_to: [sleep, stop]",
        "standby.md#the-levels",
    ),
    (
        OWN,
        "evict_to: [stop, sleep]",
        8,
        "services.a.x-anvil.evict_to",
        "evict_to: [stop]",
        "standby.md#the-levels",
    ),
    (OWN, "pin: maybe", 8, "services.a.x-anvil.pin", "pin: true", "policies.md#pinning-a-model"),
    (
        OWN,
        "load_timeout: 5 minutes",
        8,
        "services.a.x-anvil.load_timeout",
        "load_timeout: 5m",
        "reference.md#x-anvil-on-a-service",
    ),
    (OWN, "max_wait: soon", 8, "services.a.x-anvil.max_wait", "max_wait: 30s", "policies.md"),
    (
        OWN,
        "drain_timeout: forever",
        8,
        "services.a.x-anvil.drain_timeout",
        "drain_timeout: 30s",
        "policies.md#let-answers-finish-drain_timeout",
    ),
    (
        OWN,
        "priority: 101",
        8,
        "services.a.x-anvil.priority",
        "priority: 100",
        "reference.md#x-anvil-on-a-service",
    ),
    (OWN, "model: 1.5", 8, "services.a.x-anvil.model", 'model: "1.5"', "reference.md#x-anvil-on-a-service"),
    (OWN, 'model: "a\\"b"', 8, "services.a.x-anvil.model", "model: ab", "reference.md#x-anvil-on-a-service"),
    (OWN, "aliases: [{}]", 8, "services.a.x-anvil.aliases", "", "reference.md#x-anvil-on-a-service"),
    (OWN, "gpus: [{}]", 8, "services.a.x-anvil.gpus", "", "gpus.md#supported-gpus"),
    (OWN, "gpu_count: 0", 8, "services.a.x-anvil.gpu_count", "gpu_count: 1", "cluster.md#in-the-file"),
    (OWN, "gpu_count: 1\ngpus: ['0']", 8, "services.a.x-anvil.gpu_count", "", "cluster.md#in-the-file"),
    (OWN, "hosts: [Big One]", 8, "services.a.x-anvil.hosts", "hosts: big-one", "cluster.md#in-the-file"),
    (OWN, "hosts: []", 8, "services.a.x-anvil.hosts", "hosts: any", "cluster.md#in-the-file"),
    (OWN, "routing: load_balanc", 8, "services.a.x-anvil.routing", "routing: load_balance", "routing.md"),
    (
        OWN,
        "infer_type: prefil",
        8,
        "services.a.x-anvil.infer_type",
        "infer_type: prefill",
        "routing.md#prefill-and-decode-apart",
    ),
    (
        OWN,
        "infer_type: prefill",
        8,
        "services.a.x-anvil.infer_type",
        "infer_type: either",
        "routing.md#prefill-and-decode-apart",
    ),
    (OWN, "profile: nope.json", 8, "services.a.x-anvil.profile", "", "routing.md#what-is-known-of-a-replica"),
    (OWN, "kv_tokens: none", 8, "services.a.x-anvil.kv_tokens", "", "routing.md#what-is-known-of-a-replica"),
    (OWN, "strip: [model]", 8, "services.a.x-anvil.strip", "", "presets.md#presets"),
    (OWN, "set: temperature", 8, "services.a.x-anvil.set", "set: {temperature: 0.2}", "presets.md#presets"),
    (
        OWN,
        "presets: [fast]",
        8,
        "services.a.x-anvil.presets",
        "presets: {fast: {set: {temperature: 0.2}}}",
        "presets.md#presets",
    ),
    (
        OWN,
        "presets: {fast: {}}",
        8,
        "services.a.x-anvil.presets.fast",
        "aliases: [fast]",
        "presets.md#presets",
    ),
    (
        OWN,
        "presets: {fast: {set: {model: x}}}",
        8,
        "services.a.x-anvil.presets.fast.set",
        "",
        "presets.md#presets",
    ),
    (
        OWN,
        "loras: {sql: /loras/sql}",
        8,
        "services.a.x-anvil.loras.sql",
        "loras: [sql]",
        "presets.md#lora-adapters",
    ),
    (
        OWN,
        "upstream: docs",
        8,
        "services.a.x-anvil.upstream",
        "upstream: /docs",
        "security.md#what-a-request-can-reach",
    ),
    (
        OWN,
        "prompt_cache: 5GiB",
        8,
        "services.a.x-anvil.prompt_cache",
        "",
        "standby.md#prompts-that-outlive-a-swap",
    ),
    (
        OWN,
        "url: api.openai.com/v1",
        8,
        "services.a.x-anvil.url",
        "url: https://api.openai.com/v1",
        "elsewhere.md#a-server-elsewhere",
    ),
    (
        OWN,
        "url: https://api.openai.com/v1/chat/completions",
        8,
        "services.a.x-anvil.url",
        "url: https://api.openai.com/v1",
        "elsewhere.md#a-server-elsewhere",
    ),
    (
        OWN,
        "url: https://me:secret@api.openai.com/v1",
        8,
        "services.a.x-anvil.url",
        "url: https://api.openai.com/v1",
        "elsewhere.md#a-server-elsewhere",
    ),
    (
        OWN,
        "url: https://api.openai.com/v1?key=1",
        8,
        "services.a.x-anvil.url",
        "url: https://api.openai.com/v1",
        "elsewhere.md#a-server-elsewhere",
    ),
    (
        OWN,
        "api_key_env: NO_SUCH_KEY",
        8,
        "services.a.x-anvil.api_key_env",
        "url: https://api.openai.com/v1",
        "elsewhere.md#a-server-elsewhere",
    ),
    (OWN, "fallback: [b]", 8, "services.a.x-anvil.fallback", "", "elsewhere.md#fallbacks"),
    (
        OWN,
        "fallback: {models: []}",
        8,
        "services.a.x-anvil.fallback",
        "fallback: {models: [other-model], after: 20s}",
        "elsewhere.md#fallbacks",
    ),
    (
        OWN,
        "home_after: 5m",
        8,
        "services.a.x-anvil.home_after",
        "home: true",
        "policies.md#a-home-model-home",
    ),
    (OWN, "policy: eager", 8, "services.a.x-anvil.policy", "x-anvil: {policy: eager}", "policies.md"),
    (OWN, "polcy: eager", 8, "services.a.x-anvil.polcy", "x-anvil: {policy: eager}", "policies.md"),
    (TOP, "vrm: 20GiB", 2, "x-anvil.vrm", "x-anvil: {vram: 20GiB}", "gpus.md#what-a-model-needs"),
    (
        OWN,
        "drain_timeout: {}",
        8,
        "services.a.x-anvil.drain_timeout",
        "drain_timeout: 30s",
        "policies.md#let-answers-finish-drain_timeout",
    ),
    (
        TOP,
        "drain_timout: 5s",
        2,
        "x-anvil.drain_timout",
        "drain_timeout: 5s",
        "reference.md#x-anvil-at-the-top-level",
    ),
    (TOP, "zzz: 1", 2, "x-anvil.zzz", "", "reference.md#x-anvil-at-the-top-level"),
    (TOP, "ttl: 30s", 2, "x-anvil.ttl", "x-anvil: {ttl: 30s}", "policies.md"),
    (TOP, "listen: :9292", 2, "x-anvil.listen", "listen: 127.0.0.1:9292", "security.md#who-can-reach-it"),
    (TOP, "listen: localhost", 2, "x-anvil.listen", "listen: 127.0.0.1:9292", "security.md#who-can-reach-it"),
    (TOP, "runtime: docker", 2, "x-anvil.runtime", "runtime: compose", "processes.md"),
    (
        TOP,
        "project: My Models",
        2,
        "x-anvil.project",
        "project: my-models",
        "reference.md#x-anvil-at-the-top-level",
    ),
    (TOP, 'gpus: {"0": 24GiB}', 2, "x-anvil.gpus.0", '"0": {vram: 24GiB}', "gpus.md#supported-gpus"),
    (TOP, 'gpus: {"0": {vram: 24}}', 2, "x-anvil.gpus.0.vram", "vram: 24GiB", "gpus.md#supported-gpus"),
    (
        TOP,
        'gpus: {"0": {vram: 1GiB, reserve: 2GiB}}',
        2,
        "x-anvil.gpus.0",
        '"0": {vram: 24GiB, reserve: 1GiB}',
        "gpus.md#supported-gpus",
    ),
    (TOP, "gpus: {0: {}}", 2, "x-anvil.gpus.0", '"0": ...', "gpus.md#supported-gpus"),
    (TOP, "machines: {local: {}}", 2, "x-anvil.machines.local", "", "cluster.md#in-the-file"),
    (
        TOP,
        "machines: {b: 64GiB}",
        2,
        "x-anvil.machines.b",
        "b: {host_memory: 64GiB}",
        "cluster.md#in-the-file",
    ),
    (TOP, "policy: egaer", 2, "x-anvil.policy", "policy: eager", "policies.md"),
    (TOP, "policy: {quiet: 1}", 2, "x-anvil.policy", "policy: {name: NAME, quiet: 1}", "policies.md"),
    (TOP, "policy: {name: debounce, quit: 1}", 2, "x-anvil.policy", "", "policies.md"),
    (TOP, "eviction: fifo", 2, "x-anvil.eviction", "", "reference.md#evictions"),
    (TOP, "routing: load_balanc", 2, "x-anvil.routing", "routing: load_balance", "routing.md"),
    (
        TOP,
        "routing: {default: load_balance, mode: ful}",
        2,
        "x-anvil.routing.mode",
        "mode: full",
        "routing.md",
    ),
    (
        TOP,
        "routing: {default: load_balance, mode: ful}",
        2,
        "x-anvil.routing",
        "routing: {default: load_balance, mode: full}",
        "routing.md",
    ),
    (
        TOP,
        "routing: {store: localhost}",
        2,
        "x-anvil.routing.store",
        "store: redis://host:6379/0",
        "routing.md",
    ),
    (
        TOP,
        "routing: {policies: {load_balance: {like: load_balance}}}",
        2,
        "x-anvil.routing.policies.load_balance",
        "",
        "routing.md",
    ),
    (TOP, "max_queue: 0", 2, "x-anvil.max_queue", "max_queue: 1", "reference.md#x-anvil-at-the-top-level"),
    (TOP, "max_body: big", 2, "x-anvil.max_body", "max_body: 64MiB", "reference.md#x-anvil-at-the-top-level"),
    (
        TOP,
        "default_model: aa",
        2,
        "x-anvil.default_model",
        "default_model: a",
        "reference.md#x-anvil-at-the-top-level",
    ),
    (
        TOP,
        "any_of: {any: [aa]}",
        2,
        "x-anvil.any_of.any",
        "any: [a]",
        "policies.md#any-model-that-is-loaded-any_of",
    ),
    (
        TOP,
        "any_of: {a: [a]}",
        2,
        "x-anvil.any_of.a",
        "any-a: [a]",
        "policies.md#any-model-that-is-loaded-any_of",
    ),
    (TOP, "any_of: {a: [a]}", 2, "x-anvil.any_of.a", "", "policies.md#any-model-that-is-loaded-any_of"),
    (
        TOP,
        "any_of: [a]",
        2,
        "x-anvil.any_of",
        "any_of: {a-name: [a-model, another]}",
        "policies.md#any-model-that-is-loaded-any_of",
    ),
    (TOP, "preload: perhaps", 2, "x-anvil.preload", "preload: true", "reference.md#x-anvil-at-the-top-level"),
    (TOP, "tls_cert: cert.pem", 2, "x-anvil.tls_cert", "tls_key: FILE", "security.md#tls"),
    (
        TOP,
        "cors: [app.example]",
        2,
        "x-anvil.cors",
        "cors: [https://app.example]",
        "security.md#who-can-reach-it",
    ),
    (TOP, "on_exit: leave", 2, "x-anvil.on_exit", "on_exit: keep", "running.md#stopping"),
    (TOP, "capture: 5000", 2, "x-anvil.capture", "capture: 1000", "sharing.md#what-was-asked-and-answered"),
    (
        TOP,
        "when_paused: block",
        2,
        "x-anvil.when_paused",
        "when_paused: refuse",
        "sharing.md#my-gpu-please-pausing",
    ),
    (
        TOP,
        "hooks: notify-send",
        2,
        "x-anvil.hooks",
        "hooks: {on: [failed], run: [notify-send, anvil]}",
        "seeing.md#hooks",
    ),
    (
        TOP,
        "hooks: [{run: notify-send anvil}]",
        2,
        "x-anvil.hooks.0.run",
        "run: [notify-send, anvil]",
        "seeing.md#hooks",
    ),
    (
        TOP,
        "hooks: [{url: example.com/hook}]",
        2,
        "x-anvil.hooks.0.url",
        "url: http://example.com/hook",
        "seeing.md#hooks",
    ),
    (
        TOP,
        'hooks: [{on: [fail], url: "http://127.0.0.1/"}]',
        2,
        "x-anvil.hooks.0.on",
        "on: [failed]",
        "seeing.md#hooks",
    ),
    (
        TOP,
        "hosts: [mux.example]",
        2,
        "x-anvil.hosts",
        "allowed_hosts: [mux.example]",
        "reference.md#x-anvil-at-the-top-level",
    ),
    (
        TOP,
        "- listen: 127.0.0.1:9292",
        1,
        "x-anvil",
        "x-anvil: {listen: '127.0.0.1:9292'}",
        "reference.md#x-anvil-at-the-top-level",
    ),
    (
        RAW,
        "gpus: 0",
        4,
        "services.a.gpus",
        "gpus: [{driver: nvidia, device_ids: ['0']}]",
        "gpus.md#supported-gpus",
    ),
    (
        RAW,
        "gpus: [0]",
        4,
        "services.a.gpus",
        "gpus: [{driver: nvidia, device_ids: ['0']}]",
        "gpus.md#supported-gpus",
    ),
    (RAW, "gpus: all", 2, "services.a", 'x-anvil: {gpus: ["0"]}', "gpus.md#supported-gpus"),
    (RAW, "gpus: [{count: some}]", 4, "services.a.gpus", "count: all", "gpus.md#supported-gpus"),
    (RAW, "ports: 80", 4, "services.a.ports", "ports: [80]", "reference.md#engines"),
    (RAW, "ports: [x]", 4, "services.a.ports", 'ports: ["127.0.0.1::8000"]', "reference.md#engines"),
    (RAW, 'ports: ["1:1", "2:2"]', 4, "services.a.ports", "x-anvil: {port: 1}", "reference.md#engines"),
    (RAW, "environment: A=b", 4, "services.a.environment", "environment: {A: b}", ""),
    (
        RAW,
        'command: "\'"',
        4,
        "services.a.command",
        "command: [program, argument, ...]",
        "reference.md#engines",
    ),
    (RAW, "stop_grace_period: soon", 4, "services.a.stop_grace_period", "stop_grace_period: 30s", ""),
    (
        RAW,
        "deploy: {resources: {reservations: {devices: {capabilities: [gpu]}}}}",
        4,
        "services.a.deploy.resources.reservations.devices",
        "devices: [{capabilities: [gpu]}]",
        "gpus.md#supported-gpus",
    ),
    (RAW, "extends: b", 4, "services.a.extends", "", "running.md#docker-or-podman"),
    (RAW, "env_file: x.env", 4, "services.a.env_file", "", "running.md#docker-or-podman"),
    (RAW, "image: x:${TAG:?which}", 4, "services.a.image", "TAG=... in .env", "running.md#docker-or-podman"),
    (RAW, "image: x:${TAG", 4, "services.a.image", "", "running.md#docker-or-podman"),
    (RAW, "image: x:${TAG!}", 4, "services.a.image", "", "running.md#docker-or-podman"),
    (RAW, "scale: 2\ncontainer_name: c", 2, "services.a", "", "reference.md#x-anvil-on-a-service"),
    (RAW, "restart: always", 4, "services.a.restart", 'restart: "no"', "running.md#docker-or-podman"),
    (RAW, 'ports: ["80:80"]', 4, "services.a.ports", 'ports: ["127.0.0.1::80"]', "reference.md#engines"),
    (
        RAW,
        'ports: ["127.0.0.1::80"]\ncommand: x --port 81',
        4,
        "services.a.ports",
        'ports: ["127.0.0.1::81"]',
        "reference.md#engines",
    ),
    (
        RAW,
        'ports: ["127.0.0.1::80"]\nimage: llama.cpp',
        2,
        "services.a.command",
        'command: ... --port "80"',
        "reference.md#engines",
    ),
    (
        RAW,
        'image: vllm\nenvironment: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}',
        5,
        "services.a.environment",
        "",
        "standby.md#the-levels",
    ),
    (
        RAW,
        "devices: [/dev/kfd]",
        4,
        "services.a.devices",
        "devices: [/dev/kfd, /dev/dri]",
        "gpus.md#supported-gpus",
    ),
    (
        RAW,
        "devices: [/dev/kfd]",
        4,
        "services.a.devices",
        'x-anvil: {gpus: ["amd0"]}',
        "gpus.md#supported-gpus",
    ),
    (
        RAW,
        'devices: [/dev/kfd, /dev/dri]\nuser: "1000"',
        2,
        "services.a.group_add",
        "group_add: [video, render]",
        "gpus.md#supported-gpus",
    ),
    (
        RAW,
        'devices: [/dev/kfd, /dev/dri]\nuser: "1000"',
        4,
        "services.a.devices",
        'x-anvil: {gpus: ["amd0"]}',
        "gpus.md#supported-gpus",
    ),
    (
        RAW,
        "labels: {anvil.modle: x}",
        4,
        "services.a.labels.anvil.modle",
        "model: x",
        "reference.md#x-anvil-on-a-service",
    ),
]


@pytest.mark.parametrize(("where", "said", "line", "key", "write", "page"), CASES)
def test_what_is_wrong_in_one_setting(
    tmp_path: Path, where: str, said: str, line: int, key: str, write: str, page: str
) -> None:
    text = where % said.replace("\n", "\n" + " " * INDENT[where])
    assert (line, key, write, page) in [parts(each) for each in diagnostics(tmp_path, text)]


@pytest.mark.parametrize(
    ("where", "prefix", "key", "setting"),
    [
        *(
            pytest.param(OWN, "services.a.x-anvil", *row, id=f"service-{row[0]}")
            for row in SERVICE_SETTINGS.items()
        ),
        *(pytest.param(TOP, "x-anvil", *row, id=f"top-{row[0]}") for row in SETTINGS.items()),
    ],
)
def test_a_value_that_no_setting_takes_is_told_with_line_key_and_page(
    tmp_path: Path, where: str, prefix: str, key: str, setting: Setting
) -> None:
    found = diagnostics(tmp_path, where % f"{key}: [{{'': [{{}}]}}]")
    mine = [each for each in found if ".".join(each.key).startswith(f"{prefix}.{key}")]
    assert mine
    for each in mine:
        line, _, _, page = parts(each)
        assert line == (8 if where == OWN else 2)
        assert page == (setting.page or page)
        assert page


TWO = """x-anvil: {gpus: {"0": {vram: 8GiB}}}
services:
  a:
    x-anvil: {gpus: ["0"], %s}
  b:
    x-anvil: {gpus: ["0"], %s}
"""


@pytest.mark.parametrize(
    ("one", "other", "line", "key", "write"),
    [
        ("vram: 9GiB", "pin: false", 4, "services.a.x-anvil.vram", "vram: 8192MiB"),
        ("pin: true", "pin: true", 6, "services.b.x-anvil.pin", ""),
        ("aliases: [c]", "aliases: [c]", 6, "services.b.x-anvil.aliases", ""),
        ("fallback: [bb]", "pin: false", 4, "services.a.x-anvil.fallback", "fallback: b"),
        ("fallback: [b]", "fallback: [a]", 4, "services.a.x-anvil.fallback", ""),
        (
            *("model: m, fallback: [a2], aliases: [x]", "model: m, presets: {a2: {system: Hi}}"),
            *(4, "services.a.x-anvil.fallback", "fallback: m"),
        ),
        (
            "model: m, routing: round_robin",
            "model: m",
            6,
            "services.b.x-anvil.routing",
            "routing: round_robin",
        ),
        ("home: true, ttl: 5m", "pin: false", 4, "services.a.x-anvil.home", ""),
        ("home: true", "home: true", 6, "services.b.x-anvil.home", ""),
        ("vram: 5GiB, pin: true", "vram: 4GiB", 5, "services.b", ""),
        ("model: m, url: 'http://h/v1'", "model: m", 4, "services.a.x-anvil.gpus", ""),
    ],
)
def test_what_is_wrong_between_two_services(
    tmp_path: Path, one: str, other: str, line: int, key: str, write: str
) -> None:
    found = {parts(each)[:3]: parts(each)[3] for each in diagnostics(tmp_path, TWO % (one, other))}
    assert (line, key, write) in found
    assert found[line, key, write]


@pytest.mark.parametrize(
    ("text", "given", "line", "key", "write"),
    [
        (RAW % "image: x:${TAG}", {}, 4, "services.a.image", "TAG=... in .env"),
        (TOP % "queue_timeout: 20", {}, 2, "x-anvil.queue_timeout", "queue_timeout: 600"),
        (TOP % "capture: 10", {}, 2, "x-anvil.capture", ""),
        (RAW % "deploy: {}", {}, 2, "services.a.profiles", "profiles: [llm]"),
        (RAW % "deploy: {}", {}, 2, "services.a.gpus", "gpus: all"),
        (RAW % "deploy: {}", {}, 2, "services.a.ports", 'ports: ["127.0.0.1::PORT"]'),
        (RAW % "image: vllm/vllm-openai", {}, 2, "services.a.ports", 'ports: ["127.0.0.1::8000"]'),
        (OWN % "vram: 1GiB", {}, 8, "services.a.x-anvil.vram", 'x-anvil: {gpus: {"0": {vram: ...}}}'),
        (
            OWN % "hosts: bg",
            {"hosts": {"big": Machine(address="10.0.0.2", gpus=(Gpu("0"),))}},
            8,
            "services.a.x-anvil.hosts",
            "hosts: big",
        ),
        (OWN % "hosts: big", {}, 8, "services.a.x-anvil.hosts", ""),
        (
            OWN % "gpu_count: 2",
            {"present": {"0": Gpu("0")}},
            8,
            "services.a.x-anvil.gpu_count",
            "gpu_count: 1",
        ),
        ("services:\n  a: {image: x}\n", {}, 1, "services", "x-anvil: {}"),
        ("a: b: c\n", {}, 1, "", "a: 'b: c'"),
        ("a:\n\tb: 1\n", {}, 2, "", "b: 1"),
        ("a: [1, 2\nb: 1\n", {}, 1, "", "a: [1, 2]"),
        ("a: 'x\nb: 1\n", {}, 1, "", "a: 'x'"),
        ("a: @x\n", {}, 1, "", "a: '@x'"),
        ('a: "\\q"\n', {}, 1, "", "a: '\\q'"),
        ("a: 1\nb\nc: 1\n", {}, 2, "", "b: ..."),
    ],
)
def test_what_else_is_told(
    tmp_path: Path, text: str, given: dict[str, Any], line: int, key: str, write: str
) -> None:
    assert (line, key, write) in [parts(each)[:3] for each in diagnostics(tmp_path, text, **given)]


@pytest.mark.parametrize(
    ("origin", "environ", "given", "write"),
    [
        ("ANVIL_DRAIN_TIMEOUT", {"ANVIL_DRAIN_TIMEOUT": "30 sec"}, {}, "ANVIL_DRAIN_TIMEOUT=30s"),
        ("--drain-timeout", {}, {"drain_timeout": "5 minutes"}, "--drain-timeout 5m"),
    ],
)
def test_a_value_that_no_file_gave_is_mended_where_it_was_given(
    tmp_path: Path, origin: str, environ: dict[str, str], given: dict[str, str], write: str
) -> None:
    (tmp_path / "compose.yaml").write_text(RAW % "image: x")
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "compose.yaml"], environ=environ, compose=None, overrides=given)
    [found] = caught.value.problems
    assert isinstance(found, Diagnostic)
    assert found.startswith(f"{origin}: must be seconds")
    assert (found.write, page_of(found)) == (write, "docs/policies.md#let-answers-finish-drain_timeout")


def test_a_line_of_the_env_file_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\nB 'x\n")
    [found] = diagnostics(tmp_path, RAW % "image: x")
    assert (found.place, found.write) == ((str(tmp_path / ".env"), 2), "NAME=value")


def test_what_is_found_beside_the_file_has_its_page() -> None:
    backend = Backend("a", "a", gpus=("0",))
    config = Config((backend, Backend("b", "b", gpus=("0",))), host="0.0.0.0")
    told = open_address(config, cast(Any, ()))
    assert isinstance(told, Diagnostic)
    assert (told.write, page_of(told)) == ("key_file: keys.txt", "docs/security.md#who-can-reach-it")
    held = SimpleNamespace(backend="a", held={"0": 3 << 30}, is_outdated=lambda digest: False)
    [hint] = vram_to_declare(config, cast(Any, SimpleNamespace(footprints=[held])))
    assert isinstance(hint, Diagnostic)
    assert hint.write.startswith("x-anvil: {vram: ")
    assert page_of(hint) == "docs/gpus.md#what-a-model-needs"


def test_a_vram_that_its_model_exceeded_is_told() -> None:
    config = Config((Backend("a", "a", gpus=("0",), vram=12 << 30), Backend("b", "b", gpus=("0",))))
    for held, expected in ((12 << 30, []), (20 << 30, ["x-anvil: {vram: 20GiB}"])):
        footprint = SimpleNamespace(backend="a", held={"0": held}, is_outdated=lambda digest: False)
        hints = [*vram_to_declare(config, cast(Any, SimpleNamespace(footprints=[footprint])))]
        assert [cast(Diagnostic, hint).write for hint in hints] == expected
    assert hints[0].startswith("a held 20GiB of each GPU when it last ran, more than its vram")
