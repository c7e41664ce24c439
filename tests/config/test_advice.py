"""Every problem, warning and hint says where it is, what to write instead, and which page says more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anvil_mux.cli.checking import vram_to_declare
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS, Backend, Config
from anvil_mux.config.kinds import Diagnostic, Setting
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.reading import FOLDER, page_of
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load
from anvil_mux.serve.files import open_address
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


# What is written -> its key (=: from the top) and line, if not the first, what to write, page
OWN_CASES = r"""
    vrm: 20GiB -> vrm | vram: 20GiB | reference.md#x-anvil-on-a-service
    vram: lots -> vram | vram: 20GiB | gpus.md#what-a-model-needs
    vram: 20 -> vram | vram: 20GiB | gpus.md#what-a-model-needs
    vram: 20 gigs -> vram | vram: 20GiB | gpus.md#what-a-model-needs
    vram: 0 -> vram |  | gpus.md#what-a-model-needs
    port: 70000 -> port | port: 8000 | reference.md#engines
    engine: vlm -> engine | engine: vllm | reference.md#engines
    evict_to: [sotp] -> evict_to | evict_to: [stop] | standby.md#the-levels
    evict_to: [] -> evict_to | evict_to: [stop] | standby.md#the-levels
    evict_to: [stop, sleep] -> evict_to | evict_to: [sleep, stop] | standby.md#the-levels
    evict_to: [stop, sleep] -> evict_to | evict_to: [stop] | standby.md#the-levels
    pin: maybe -> pin | pin: true | policies.md#pinning-a-model
    load_timeout: 5 minutes -> load_timeout | load_timeout: 5m | reference.md#x-anvil-on-a-service
    max_wait: soon -> max_wait | max_wait: 30s | policies.md
    drain_timeout: ever -> drain_timeout | drain_timeout: 30s | policies.md#let-answers-finish-drain_timeout
    priority: 101 -> priority | priority: 100 | reference.md#x-anvil-on-a-service
    model: 1.5 -> model | model: "1.5" | reference.md#x-anvil-on-a-service
    model: "a\"b" -> model | model: ab | reference.md#x-anvil-on-a-service
    aliases: [{}] -> aliases |  | reference.md#x-anvil-on-a-service
    gpus: [{}] -> gpus |  | gpus.md#supported-gpus
    gpu_count: 0 -> gpu_count | gpu_count: 1 | cluster.md#in-the-file
    gpu_count: 1\ngpus: ['0'] -> gpu_count |  | cluster.md#in-the-file
    hosts: [Big One] -> hosts | hosts: big-one | cluster.md#in-the-file
    hosts: [] -> hosts | hosts: any | cluster.md#in-the-file
    routing: load_balanc -> routing | routing: load_balance | routing.md
    infer_type: prefil -> infer_type | infer_type: prefill | routing.md#prefill-and-decode-apart
    infer_type: prefill -> infer_type | infer_type: either | routing.md#prefill-and-decode-apart
    profile: nope.json -> profile |  | routing.md#what-is-known-of-a-replica
    kv_tokens: none -> kv_tokens |  | routing.md#what-is-known-of-a-replica
    strip: [model] -> strip |  | presets.md#presets
    set: temperature -> set | set: {temperature: 0.2} | presets.md#presets
    presets: [fast] -> presets | presets: {fast: {set: {temperature: 0.2}}} | presets.md#presets
    presets: {fast: {}} -> presets.fast | aliases: [fast] | presets.md#presets
    presets: {fast: {set: {model: x}}} -> presets.fast.set |  | presets.md#presets
    loras: {sql: /loras/sql} -> loras.sql | loras: [sql] | presets.md#lora-adapters
    upstream: docs -> upstream | upstream: /docs | security.md#what-a-request-can-reach
    pass_headers: [X Tenant] ->
        pass_headers | pass_headers: [X-Tenant] | security.md#headers-that-reach-an-engine
    pass_headers: [Authorization] ->
        pass_headers | pass_headers: [X-Tenant] | security.md#headers-that-reach-an-engine
    prompt_cache: 5GiB -> prompt_cache |  | standby.md#prompts-that-outlive-a-swap
    url: api.openai.com/v1 -> url | url: https://api.openai.com/v1 | elsewhere.md#a-server-elsewhere
    url: https://api.openai.com/v1/chat/completions ->
        url | url: https://api.openai.com/v1 | elsewhere.md#a-server-elsewhere
    url: https://me:secret@api.openai.com/v1 ->
        url | url: https://api.openai.com/v1 | elsewhere.md#a-server-elsewhere
    url: https://api.openai.com/v1?key=1 ->
        url | url: https://api.openai.com/v1 | elsewhere.md#a-server-elsewhere
    api_key_env: NO_SUCH_KEY -> api_key_env | url: https://api.openai.com/v1 | elsewhere.md#a-server-elsewhere
    fallback: [b] -> fallback |  | elsewhere.md#fallbacks
    fallback: {models: []} ->
        fallback | fallback: {models: [other-model], after: 20s} | elsewhere.md#fallbacks
    home_after: 5m -> home_after | home: true | policies.md#a-home-model-home
    policy: eager -> policy | x-anvil: {policy: eager} | policies.md
    polcy: eager -> polcy | x-anvil: {policy: eager} | policies.md
    drain_timeout: {} -> drain_timeout | drain_timeout: 30s | policies.md#let-answers-finish-drain_timeout
"""
TOP_CASES = r"""
    vrm: 20GiB -> vrm | x-anvil: {vram: 20GiB} | gpus.md#what-a-model-needs
    drain_timout: 5s -> drain_timout | drain_timeout: 5s | reference.md#x-anvil-at-the-top-level
    zzz: 1 -> zzz |  | reference.md#x-anvil-at-the-top-level
    ttl: 30s -> ttl | x-anvil: {ttl: 30s} | policies.md
    listen: :9292 -> listen | listen: 127.0.0.1:9292 | security.md#who-can-reach-it
    listen: localhost -> listen | listen: 127.0.0.1:9292 | security.md#who-can-reach-it
    runtime: docker -> runtime | runtime: compose | processes.md
    project: My Models -> project | project: my-models | reference.md#x-anvil-at-the-top-level
    gpus: {"0": 24GiB} -> gpus.0 | "0": {vram: 24GiB} | gpus.md#supported-gpus
    gpus: {"0": {vram: 24}} -> gpus.0.vram | vram: 24GiB | gpus.md#supported-gpus
    gpus: {"0": {vram: 1GiB, reserve: 2GiB}} ->
        gpus.0 | "0": {vram: 24GiB, reserve: 1GiB} | gpus.md#supported-gpus
    gpus: {0: {}} -> gpus.0 | "0": ... | gpus.md#supported-gpus
    machines: {local: {}} -> machines.local |  | cluster.md#in-the-file
    machines: {b: 64GiB} -> machines.b | b: {host_memory: 64GiB} | cluster.md#in-the-file
    policy: egaer -> policy | policy: eager | policies.md
    policy: {quiet: 1} -> policy | policy: {name: NAME, quiet: 1} | policies.md
    policy: {name: debounce, quit: 1} -> policy |  | policies.md
    eviction: fifo -> eviction |  | reference.md#evictions
    routing: load_balanc -> routing | routing: load_balance | routing.md
    routing: {default: load_balance, mode: ful} -> routing.mode | mode: full | routing.md
    routing: {default: load_balance, mode: ful} ->
        routing | routing: {default: load_balance, mode: full} | routing.md
    routing: {store: localhost} -> routing.store | store: redis://host:6379/0 | routing.md
    routing: {policies: {load_balance: {like: load_balance}}} -> routing.policies.load_balance |  | routing.md
    max_queue: 0 -> max_queue | max_queue: 1 | reference.md#x-anvil-at-the-top-level
    max_body: big -> max_body | max_body: 64MiB | reference.md#x-anvil-at-the-top-level
    default_model: aa -> default_model | default_model: a | reference.md#x-anvil-at-the-top-level
    any_of: {any: [aa]} -> any_of.any | any: [a] | policies.md#any-model-that-is-loaded-any_of
    any_of: {a: [a]} -> any_of.a | any-a: [a] | policies.md#any-model-that-is-loaded-any_of
    any_of: {a: [a]} -> any_of.a |  | policies.md#any-model-that-is-loaded-any_of
    any_of: {any: [{model: aa, when: {tools: true}}, a]} -> any_of.any |
        any: [{model: a, when: {tools: true}}, a] | policies.md#any-model-that-is-loaded-any_of
    any_of: [a] -> any_of | any_of: {a-name: [a-model, another]} | policies.md#any-model-that-is-loaded-any_of
    preload: perhaps -> preload | preload: true | reference.md#x-anvil-at-the-top-level
    tls_cert: cert.pem -> tls_cert | tls_key: FILE | security.md#tls
    cors: [app.example] -> cors | cors: [https://app.example] | security.md#who-can-reach-it
    on_exit: leave -> on_exit | on_exit: keep | running.md#stopping
    capture: 5000 -> capture | capture: 1000 | sharing.md#what-was-asked-and-answered
    when_paused: block -> when_paused | when_paused: refuse | sharing.md#my-gpu-please-pausing
    hooks: notify-send -> hooks | hooks: {on: [failed], run: [notify-send, anvil]} | seeing.md#hooks
    hooks: [{run: notify-send anvil}] -> hooks.0.run | run: [notify-send, anvil] | seeing.md#hooks
    hooks: [{url: example.com/hook}] -> hooks.0.url | url: http://example.com/hook | seeing.md#hooks
    hooks: [{on: [fail], url: "http://127.0.0.1/"}] -> hooks.0.on | on: [failed] | seeing.md#hooks
    hosts: [mux.example] -> hosts | allowed_hosts: [mux.example] | reference.md#x-anvil-at-the-top-level
    - listen: 127.0.0.1:9292 ->
        =x-anvil:1 | x-anvil: {listen: '127.0.0.1:9292'} | reference.md#x-anvil-at-the-top-level
"""
RAW_CASES = r"""
    gpus: 0 -> gpus | gpus: [{driver: nvidia, device_ids: ['0']}] | gpus.md#supported-gpus
    gpus: [0] -> gpus | gpus: [{driver: nvidia, device_ids: ['0']}] | gpus.md#supported-gpus
    gpus: all -> =services.a:2 | x-anvil: {gpus: ["0"]} | gpus.md#supported-gpus
    gpus: [{count: some}] -> gpus | count: all | gpus.md#supported-gpus
    ports: 80 -> ports | ports: [80] | reference.md#engines
    ports: [x] -> ports | ports: ["127.0.0.1::8000"] | reference.md#engines
    ports: ["1:1", "2:2"] -> ports | x-anvil: {port: 1} | reference.md#engines
    environment: A=b -> environment | environment: {A: b} |
    command: "'" -> command | command: [program, argument, ...] | reference.md#engines
    stop_grace_period: soon -> stop_grace_period | stop_grace_period: 30s |
    deploy: {resources: {reservations: {devices: {capabilities: [gpu]}}}} ->
        deploy.resources.reservations.devices | devices: [{capabilities: [gpu]}] | gpus.md#supported-gpus
    extends: b -> extends |  | running.md#docker-or-podman
    env_file: x.env -> env_file |  | running.md#docker-or-podman
    image: x:${TAG:?which} -> image | TAG=... in .env | running.md#docker-or-podman
    image: x:${TAG -> image |  | running.md#docker-or-podman
    image: x:${TAG!} -> image |  | running.md#docker-or-podman
    scale: 2\ncontainer_name: c -> =services.a:2 |  | reference.md#x-anvil-on-a-service
    restart: always -> restart | restart: "no" | running.md#docker-or-podman
    ports: ["80:80"] -> ports | ports: ["127.0.0.1::80"] | reference.md#engines
    ports: ["127.0.0.1::80"]\ncommand: x --port 81 -> ports | ports: ["127.0.0.1::81"] | reference.md#engines
    ports: ["127.0.0.1::80"]\nimage: llama.cpp -> command:2 | command: ... --port "80" | reference.md#engines
    image: vllm\nenvironment: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"} ->
        environment:5 |  | standby.md#the-levels
    devices: [/dev/kfd] -> devices | devices: [/dev/kfd, /dev/dri] | gpus.md#supported-gpus
    devices: [/dev/kfd] -> devices | x-anvil: {gpus: ["amd0"]} | gpus.md#supported-gpus
    devices: [/dev/kfd, /dev/dri]\nuser: "1000" ->
        group_add:2 | group_add: [video, render] | gpus.md#supported-gpus
    devices: [/dev/kfd, /dev/dri]\nuser: "1000" ->
        devices | x-anvil: {gpus: ["amd0"]} | gpus.md#supported-gpus
    labels: {anvil.modle: x} -> labels.anvil.modle | model: x | reference.md#x-anvil-on-a-service
"""
TEMPLATES = {OWN: ("services.a.x-anvil.", 8), TOP: ("x-anvil.", 2), RAW: ("services.a.", 4)}
"""File -> the key above, and the first line, of what is put into it."""


def cases() -> Iterator[tuple[str, str, int, str, str, str]]:
    for (where, (above, first)), text in zip(
        TEMPLATES.items(), (OWN_CASES, TOP_CASES, RAW_CASES), strict=True
    ):
        for row in re.split(r"\n(?= {4}\S)", text.strip("\n")):
            said, _, parts = row.replace("\\n", "\n").partition(" ->")
            place, write, page = (each.strip() for each in parts.split("|"))
            key, _, line = place.partition(":")
            key = key[1:] if key.startswith("=") else above + key
            yield where, said.strip(), int(line or first), key, write, page


@pytest.mark.parametrize(("where", "said", "line", "key", "write", "page"), [*cases()])
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


def test_the_same_warning_about_several_services_is_one_that_names_them(tmp_path):
    described = "image: x, profiles: [llm], ports: ['127.0.0.1::80'], x-anvil: {gpus: ['0']}"
    text = f"services:\n  a: {{{described}}}\n  b: {{{described}, restart: always}}\n  c: {{{described}}}\n"
    file = tmp_path / "compose.yaml"
    file.write_text(text)
    none, restart = load([file], compose=None, environ={}).warnings
    assert none.startswith(f"{file}:2: services a, b, c: `x-anvil` names GPU 0")
    assert restart.startswith(f"{file}:3: service b: `restart: always`")
