"""Each bad file beside what is said of it, and each that works but will cause trouble beside its warning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from anvil_mux.errors import ConfigError
from tests.config.files import SERVICE, TOP, plain, problems, table

# What is wrong

SETTINGS_OF_A_SERVICE = r"""
    vrm: 1 -> vrm: unknown key; did you mean vram?
    vram: lots -> vram: must be a size such as 20GiB
    vram: 20 -> vram: is only 20 bytes; write 20GiB
    vram: 0 -> vram: must be more than 0
    vram: 1e400 -> vram: must be at most 1000TB, not 1ZEROS...
    port: 70000 -> port: must be a whole number from 1 to 65535, not 70000
    engine: vlm -> engine: must be one of openai, llamacpp, sglang, vllm
    evict_to: [sotp] -> evict_to: unknown: sotp; did you mean stop?
    evict_to: [] -> evict_to: must name at least one
    evict_to: [stop, freeze] -> evict_to: goes from the lightest standby level down: write [freeze, stop]
    pin: maybe -> pin: must be true or false, not 'maybe'
    load_timeout: -1 -> load_timeout: must be seconds, or a time such as 30s
    load_timeout: 0 -> load_timeout: must be more than 0, not 0
    load_timeout: .inf -> load_timeout: must be seconds
    priority: 101 -> priority: must be a whole number from -100 to 100, not 101
    priority: high -> priority: must be a whole number from -100 to 100
    priority: 1.5 -> priority: must be a whole number from -100 to 100
    ttl: never -> ttl: must be seconds, or a time such as 30s or 2m, not 'never'
    ttl: -1 -> ttl: must be seconds, or a time such as 30s or 2m, not -1
    ttl: 9999999999 -> ttl: must be at most a year (8760h), not 9999999999
    drain_timeout: 9999h -> drain_timeout: must be at most a year (8760h), not '9999h'
    concurrency: 1e400 -> concurrency: must be a whole number of at least 1, not 1ZEROS...
    min_residency: true -> min_residency: must be seconds
    min_residence: 3 -> min_residence: unknown key; did you mean min_residency?
    max_wait: .inf -> max_wait: must be seconds
    model: "a\nb" -> model: must not hold quotes or control characters
    model: 'a"b' -> model: must not hold quotes or control characters
    model: 1.5 -> model: must be text, not 1.5; write
    model: '' -> model: must be text, not ''
    aliases: [{}] -> aliases: must be text
"""
SETTINGS_OF_THE_WHOLE = """
    drain_timout: 1 -> drain_timout: unknown key; did you mean drain_timeout?
    zzz: 1 -> zzz: unknown key; known: listen, pages_port, runtime,
    ttl: 3 -> ttl: is a setting of a service: it goes below services
    hosts: [mux.example] -> hosts: is now called allowed_hosts: write x-anvil: {allowed_hosts: ...}
    upstream_timeout: 0s -> upstream_timeout: must be more than 0, not '0s'
    client_timeout: 0 -> client_timeout: must be more than 0, not 0
    queue_timeout: 0 -> queue_timeout: must be more than 0, not 0
    max_body: 0 -> max_body: must be more than 0, not 0
    max_upload: 0 -> max_upload: must be more than 0, not 0
    max_bodies: 0 -> max_bodies: must be more than 0, not 0
    host_memory: 0 -> host_memory: must be more than 0, not 0
    machines: {b: {host_memory: 0}} -> machines.b.host_memory: must be more than 0, not 0
    listen: ':80' -> listen: needs an address before the colon
    listen: localhost -> listen: must be ADDRESS:PORT such as 127.0.0.1:9292
    runtime: docker -> runtime: must be one of compose, process, not 'docker'
    max_queue: 0 -> max_queue: must be a whole number of at least 1, not 0
    max_queue: true -> max_queue: must be a whole number of at least 1, not True
    project: A b -> project: must be lower-case letters
    policy: egaer -> policy: unknown policy 'egaer'; known: eager, debounce
    policy: {quiet: 1} -> policy: must be a name, or {name: ..., setting: value}
    policy: {name: debounce, quit: 1} -> policy: policy debounce: unknown setting 'quit'
    policy: {name: debounce, quiet: no} -> policy: policy debounce: quiet must be a number
    policy: {name: cost_aware, serving_window: 2} -> serving_window must be true or false, not 2
    policy: {name: cost_aware, cap: off} -> policy: policy cost_aware: cap must be a number of at least 0
    policy: {name: time_slice, slice: 3} -> unknown setting 'slice'; known: period, least
    policy: {name: adaptive, pause: -1} -> policy: policy adaptive: pause must be a number of at least 0
    eviction: fifo -> eviction: unknown eviction 'fifo'
    default_model: b -> default_model: no service serves b; known: a
    gpus: [{}] -> gpus: must be text
    gpus: {"0": 24GiB} -> gpus.0: must hold its memory
    gpus: {"0": {vam: 1}} -> gpus.0.vam: unknown key; did you mean vram?
    gpus: {"0": {vram: x}} -> gpus.0.vram: must be a size
    gpus: {"0": {vram: 1GiB, reserve: 2GiB}} -> gpus.0: reserve leaves nothing
    gpus: {0: {}} -> gpus.0: the key must be text: write "0":
    tls_cert: x -> tls_cert: needs tls_key beside it
    tls_key: x -> tls_key: needs tls_cert beside it
    pages_port: 9292 -> pages_port: is the port of listen as well: pages of engines need another
    cors: '*' -> cors: must name web sites such as https://app.example
    cors: app.example -> cors: must name web sites such as https://app.example
    cors: https://app.example/ -> cors: must name web sites such as https://app.example
    cors: 'https://a, https://*.b' -> cors: must name web sites such as https://app.example
"""
FILES = """
    services: [a] -> compose.yaml:1: services: none serves a model
    services: {a: {image: x}} -> compose.yaml:1: services: none serves a model; add `x-anvil: {}`
    services: {a: 3} -> services.a: must be a mapping
    services: {a: {labels: {anvil.modle: x}}} -> a.labels.anvil.modle: unknown key; did you mean model?
    services: {a: {labels: {anvil.set: "{x"}}} -> a.labels.anvil.set: is not JSON
    services: {../a: {x-anvil: {}}} -> services.../a: its name may hold letters, digits, ., _ and - only
    include: [other.yaml] -> compose.yaml:1: include: needs the Docker
    - a -> compose.yaml:1: is not a Compose file
    services: [ -> compose.yaml:1: is not YAML
    -> compose.yaml:1: services: none serves a model
    a: &a [*a] -> compose.yaml: is too large, or its aliases
    a: ["x\\ud800"] -> compose.yaml:1: a.0: holds half a surrogate pair
    a: {"x\\udc00": 1} -> holds half a surrogate pair
    a: !!python/object:os.system {} -> compose.yaml:1: is not YAML
    a: !!bool maybe -> compose.yaml: is not YAML: a value is not what its tag (!!) says it is ('maybe')
    a: !!timestamp now -> compose.yaml: is not YAML: a value is not what its tag (!!) says it is
    a: !!int '' -> compose.yaml: is not YAML: a value is not what its tag (!!) says it is
    services: {a: {x-anvil: {}}, a: {}} -> compose.yaml:1: services.a: stands here twice (first
"""
SERVICES = """
    workingdir: /m -> services.a.workingdir: unknown key; did you mean working_dir?
    ttl: 5m -> services.a.ttl: is a setting of anvil-mux: it goes into x-anvil
    gpus: all -> services.a: uses all GPUs; say which there are
    gpus: some -> services.a: gpus must be `all` or a list of
    gpus: [{count: x}] -> services.a: count must be `all` or a number
    ports: ['5:5', '6:6'] -> services.a: has several ports (5, 6); say where
    ports: [x] -> services.a: ports: 'x' is no port
    command: "'" -> services.a: command: No closing quotation
    environment: 3 -> services.a: environment must be a mapping or a list
    stop_grace_period: soon -> services.a: must be seconds, or a time
    extends: b -> services.a.extends: needs the
    env_file: x -> services.a.env_file: needs the Docker Compose program
    ports: !reset [] -> services.a.ports: !reset needs the Docker
    command: '${A' -> services.a.command: ${A does not end; write $$
    command: '${1}' -> services.a.command: ${1} is no variable
    command: '${A:-{}}' -> ${A:-{}} has braces in braces
    command: '${A:?say it}' -> the variable A must be set: say it
    user: [x] -> services.a: user must be text
    user: {x: y} -> services.a: user must be text
    working_dir: 1.5 -> services.a: working_dir must be text
    working_dir: true -> services.a: working_dir must be text
"""
PROCESSES = """
    command: [x], enviroment: {A: b} -> :2: services.a.enviroment: unknown key; did you mean environment?
    command: [x], ttl: 5m -> compose.yaml:2: services.a.ttl: is a setting of anvil-mux: it goes into x-anvil
    command: x --port 9292 -> services.a: port 9292 is the one that anvil-mux listens on
    command: '' -> services.a: needs a `command`, since runtime is process
"""
TWO = """x-anvil: {gpus: {"0": {vram: 8GiB}}}
services: {a: {x-anvil: {gpus: ["0"], %s}}, b: {x-anvil: {gpus: ["0"], %s}}}"""
PROCESSES_AT_5 = """x-anvil: {runtime: process}
services: {a: {command: x --port 5, x-anvil: {%s}}, b: {command: x --port 5, x-anvil: {%s}}}"""
PAIRS = """
    vram: 9GiB | -> a.x-anvil.vram: 9.0 GiB do not fit on GPU 0, which has 8.0 GiB for models
    vram: 5GiB, pin: true | vram: 5GiB, pin: true -> b.x-anvil.pin: the pinned a, b do not fit on GPU 0
    pin: true | pin: true -> services.b.x-anvil.pin: the pinned a, b do not fit on GPU 0 together
    aliases: [b] | -> services.a.x-anvil.aliases: b is already a name of b
    aliases: [c] | aliases: [c] -> services.b.x-anvil.aliases: c is already a name of a
"""


def numbers(text: str) -> str:
    return text.replace("1e400", "1" + "0" * 400).replace("ZEROS", "0" * 56)


DOUBLED = "".join(f"{new}: &{new} [{','.join([f'*{old}'] * 6)}]\n" for old, new in pairwise("abcdefghi"))
CLASH = "services.b: port 5 is also that of a, and both may run at once"
UNDECLARED = "compose.yaml:2: services.a.x-anvil.gpus: GPU 1 is not declared; declared: 0"
DEEP = "compose.yaml:1: is not YAML: brackets are nested deeper than 50 levels"
BAD = [
    *[(SERVICE % said, f"services.a.x-anvil.{says}") for said, says in table(numbers(SETTINGS_OF_A_SERVICE))],
    *[(TOP % said, says) for said, says in table(SETTINGS_OF_THE_WHOLE)],
    *table(FILES),
    *[(f"services: {{a: {{image: x, {said}, x-anvil: {{}}}}}}", says) for said, says in table(SERVICES)],
    *[
        (f"x-anvil: {{runtime: process}}\nservices: {{a: {{{said}, x-anvil: {{gpus: []}}}}}}", says)
        for said, says in table(PROCESSES)
    ],
    *[(TWO % tuple(said.split("|")), says) for said, says in table(PAIRS)],
    (
        f"services: {{a: {{x-anvil: {{priority: 0x{'f' * 4000}}}}}}}",
        "a.x-anvil.priority: is too great a number",
    ),
    ("x-anvil: 3\nservices: {a: {x-anvil: {}}}", "x-anvil: must hold settings such as listen, not 3"),
    ("services: {a: {image: [x], x-anvil: {}}}", "services.a: image must be text"),
    (PROCESSES_AT_5 % (("",) * 2), CLASH),
    (PROCESSES_AT_5 % (("gpus: ['0'], evict_to: freeze",) * 2), CLASH),
    ('x-anvil: {gpus: ["0"]}\nservices: {a: {x-anvil: {gpus: ["1"]}}}', UNDECLARED),
    ("services: {a: {network_mode: host, x-anvil: {port: 5}}, b: {ports: ['5:6'], x-anvil: {}}}", CLASH),
    ("a: &a [1]\n" + DOUBLED, "compose.yaml: is too large, or its aliases"),
    ("[" * 5000, DEEP),
    ("a: " + "[" * 60 + "]" * 60, DEEP),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_a_bad_file_is_told_what_is_wrong_with_it(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert expected in problem


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
    places = ("compose.yaml:2", "ANVIL_MAX_WAIT", "--max-queue", "compose.yaml:7", "compose.yaml:10")
    assert [problem.partition(": ")[0] for problem in found] == [*places, "compose.yaml:3"]


def test_swap_partners_may_share_a_port(tmp_path: Path) -> None:
    text = PROCESSES_AT_5 % (("gpus: ['0']",) * 2)
    assert [each.port for each in plain(tmp_path, text).backends] == [5, 5]


SHARED_NETWORK = """
x-anvil: {{gpus: {{"0": {{}}, "1": {{}}}}}}
services:
  net: {{image: pause}}
  via: {{image: pause, network_mode: "service:net"}}
  a: {{image: {a_image}, network_mode: "service:{a_net}", x-anvil: {{gpus: ["0"]}}}}
  b: {{image: vllm/vllm-openai, network_mode: "service:via", command: "{b}", x-anvil: {{gpus: ["{gpu}"]}}}}
"""


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ({}, True),
        ({"a_net": "via"}, True),
        ({"b": "serve m --port 8000"}, True),
        ({"b": "serve m --port 8001"}, False),
        ({"a_image": "ghcr.io/ggml-org/llama.cpp:server"}, False),
        ({"gpu": "0"}, False),
    ],
)
def test_engines_on_one_network_with_one_port_are_refused(tmp_path, changed, is_refused):
    settings = {"a_image": "vllm/vllm-openai", "a_net": "net", "b": "serve m", "gpu": "1", **changed}
    text = SHARED_NETWORK.format(**settings)
    if not is_refused:
        assert len(plain(tmp_path, text).backends) == 2
        return
    (problem,) = problems(tmp_path, text)
    assert "port 8000 on the network of net is also that of a, and both may run at once" in problem


def test_engine_on_the_network_of_another_with_its_port_is_refused(tmp_path):
    text = SHARED_NETWORK.format(a_image="vllm/vllm-openai", a_net="b", b="serve m", gpu="1")
    text = text.replace('network_mode: "service:via", ', "")
    (problem,) = problems(tmp_path, text)
    assert "port 8000 on the network of b is also that of a" in problem


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
    told = [each.removeprefix("compose.yaml:").partition(": x-anvil.") for each in problems(tmp_path, top)]
    assert [(line, text.partition(": ")[0]) for line, _, text in told] == [
        *[("3", "gpus.0.vram"), ("3", "gpus.0.reserve"), ("3", "gpus.1.vam")],
        *[("4", "hooks.0.run"), ("4", "hooks.1.on"), ("4", "hooks.1.timeout")],
        *[("9", "routing.modus"), ("6", "routing.default"), ("7", "routing.mode"), ("8", "routing.store")],
        ("10", "routing.policies.mine.filters.0"),
    ]


# Standby levels

CANNOT_REST = """
    image: x, x-anvil: {evict_to: [sleep]} -> sleep cannot work: engine openai cannot be told to sleep
    image: tabbyapi, x-anvil: {evict_to: sleep} -> engine tabbyapi cannot be told to sleep
    image: ollama, x-anvil: {evict_to: [sleep-2]} -> sleep-2 cannot work: ollama cannot drop its weights
    VLLM --enable-sleep-mode --enable-lora, x-anvil: {evict_to: sleep-2} -> where it has LoRA adapters
    LORA, x-anvil: {evict_to: sleep-2, loras: {sql: /sql}} -> sleep-2 cannot work: vLLM cannot read
    VLLM --model m, x-anvil: {evict_to: sleep} -> add --enable-sleep-mode to its command
    image: vllm, command: --enable-sleep-mode, x-anvil: {evict_to: sleep} -> VLLM_SERVER_DEV_MODE
    image: sglang, command: --enable-memory-saver, x-anvil: {evict_to: sleep} -> --enable-weights-cpu-backup
    image: llama.cpp, command: -m x.gguf, x-anvil: {evict_to: sleep} -> unloads in router mode only
    image: llama.cpp, environment: {LLAMA_ARG_HF_REPO: x/y}, x-anvil: {evict_to: sleep} -> in router mode only
    image: x, gpus: [{count: 1}], x-anvil: {evict_to: freeze} -> what is frozen keeps its GPU memory
    image: llama.cpp, environment: {UNIFIED: 1}, x-anvil: {evict_to: checkpoint} -> checkpoint unified memory
"""
CAN_REST = """
    VLLM --model m --enable-sleep-mode, x-anvil: {evict_to: [sleep, sleep-2, stop]} -> sleep, sleep-2, stop
    VLLM --config f.yaml, x-anvil: {evict_to: [sleep, stop]} -> sleep, stop
    VLLM --enable-sleep-mode, x-anvil: {} -> sleep, stop
    VLLM --model m, x-anvil: {} -> stop
    image: vllm, command: [--enable-sleep-mode], x-anvil: {} -> stop
    image: sglang, command: --enable-memory-saver --enable-weights-cpu-backup, x-anvil: {} -> sleep, stop
    image: llama.cpp, command: --models-dir /models, x-anvil: {evict_to: sleep} -> sleep
    image: llama.cpp, x-anvil: {} -> stop
    image: ollama, x-anvil: {evict_to: [sleep-1, sleep]} -> sleep
    image: ollama, x-anvil: {} -> sleep, stop
    image: x, x-anvil: {gpus: ['0'], evict_to: freeze} -> freeze
    image: x, x-anvil: {gpus: ['0', '1'], evict_to: [checkpoint, stop]} -> checkpoint, stop
"""


def written_out(service: str) -> str:
    """A file with this service; VLLM stands for one that may sleep if its command says so."""
    allowed = "VLLM_SERVER_DEV_MODE: '1', VLLM_ALLOW_RUNTIME_LORA_UPDATING: '1'"
    vllm = f"image: vllm, environment: {{{allowed}}}, command:"
    for name, text in (("VLLM -", f"{vllm} -"), ("LORA,", f"{vllm.removesuffix(', command:')},")):
        service = service.replace(name, text)
    return f"services: {{a: {{{service.replace('UNIFIED', 'GGML_CUDA_ENABLE_UNIFIED_MEMORY')}}}}}"


@pytest.mark.parametrize(("service", "says"), table(CANNOT_REST))
def test_a_way_that_cannot_work_is_refused_with_the_reason(tmp_path: Path, service: str, says: str) -> None:
    (problem,) = problems(tmp_path, written_out(service))
    assert "services.a.x-anvil.evict_to: " in problem
    assert says in problem


@pytest.mark.parametrize(("service", "levels"), table(CAN_REST))
def test_a_way_that_can_work_is_taken_and_who_may_sleep_sleeps(
    tmp_path: Path, service: str, levels: str
) -> None:
    (backend,) = plain(tmp_path, written_out(service)).backends
    assert ", ".join(backend.evict_to) == levels


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


# What works and causes trouble

QUIET = "profiles: [llm], ports: ['127.0.0.1::80'], gpus: [{count: 1}]"
PORTED = "image: x, command: x --port 81, profiles: [llm], gpus: [{count: 1}], x-anvil: {port: 80}"
CAVEATS = """
    restart: always, QUIET -> `restart: always` starts an evicted engine again
    profiles: [llm], ports: ['80:80'], gpus: [{count: 1}] -> port 80 is published on all interfaces
    profiles: [llm], ports: ['0.0.0.0:80:80'], gpus: [{count: 1}] -> port 80 is published on all interfaces
    ports: ['127.0.0.1::80'], gpus: [{count: 1}] -> without `profiles`, a bare `docker compose up`
    profiles: [llm], gpus: [{count: 1}] -> its port is not published
    command: x --port 81, x-anvil: {port: 81}, QUIET -> its port 81 is not among those published (80)
    command: x --port 81, QUIET -> its command listens on 81, but published is 80
    image: llama.cpp, command: -m x.gguf, QUIET -> on 9931; add --port "80" to its command
    profiles: [llm], ports: ['127.0.0.1::80'] -> has no GPU, so it is never evicted
    profiles: [llm], ports: ['127.0.0.1::80'], x-anvil: {gpus: ['0']} -> names GPU 0, but the service
    image: vllm, environment: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}, QUIET -> keeps a sleeping
    image: vllm, environment: {VLLM_SERVER_DEV_MODE: 1}, ports: ['10.0.0.5::80'], SAFE -> reaches 10.0.0.5 put
    x-anvil: {gpus: ['0'], vram: 1GiB}, QUIET -> vram: has no effect
    command: 'x ${NOT_SET}', QUIET -> the variable NOT_SET is not set
    PORTED, ports: ['127.0.0.1::80', '127.0.0.1::81'] -> its command listens on 81
    PORTED, ports: ['127.0.0.1::80'] -> its command listens on 81
    PORTED, network_mode: host -> its command listens on 81
    QUIET ->
    command: x --port 80, QUIET ->
    image: llama.cpp, command: -m x --port=80, QUIET ->
    image: llama.cpp, environment: [LLAMA_ARG_PORT=80], QUIET ->
"""


@pytest.mark.parametrize(("said", "expected"), table(CAVEATS))
def test_what_works_and_causes_trouble_is_a_warning(tmp_path: Path, said: str, expected: str) -> None:
    for name, text in (("QUIET", QUIET), ("PORTED", PORTED), ("SAFE", "profiles: [llm], gpus: [{count: 1}]")):
        said = said.replace(name, text)
    own = "" if "x-anvil" in said else "x-anvil: {}, "
    warnings = plain(tmp_path, f"services:\n  a: {{{own}{said}}}").warnings
    assert len(warnings) == bool(expected)
    for warning in warnings:
        assert warning.startswith(f"{tmp_path}/compose.yaml:2: ")
        assert expected in warning


SHORT = "queue_timeout (20 s) is less than "


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        ("max_wait: 60", "load_timeout: 20", [SHORT + "max_wait (60 s): a queue is overdue before that"]),
        ("max_wait: 5", "load_timeout: 20, max_wait: 21", [SHORT + "max_wait (21 s): a queue is overdue"]),
        ("max_wait: 5", "load_timeout: 21", [SHORT + "the load_timeout of a: requests that wait"]),
        ("max_wait: 20", "load_timeout: 20", []),
        ("max_wait: auto", "load_timeout: 20", []),
        ("max_wait: 5", "url: 'http://127.0.0.1:1'", []),
    ],
)
def test_a_queue_timeout_that_leaves_no_time_to_load_is_a_warning(
    tmp_path: Path, top: str, own: str, expected: list[str]
) -> None:
    text = f"x-anvil: {{queue_timeout: 20, {top}}}\nservices: {{a: {{x-anvil: {{{own}}}, {QUIET}}}}}"
    warnings = plain(tmp_path, text).warnings
    assert [warning[: len(said)] for warning, said in zip(warnings, expected, strict=True)] == expected


UNSET = "is not set, so nothing stands in its place; set it, here or in .env, or write"
OF_PROCESSES = """
    llama-server -m x -> its command does not say where it is to listen; add --port $$PORT
    llama-server -m x --port $$PORT ->
    llama-server -m x --port 8001 ->
    sh -c 'llama-server --port $$PORT' ->
    ./my-program ->
    vllm serve m, x-anvil: {port: 81, gpus: []} -> add --port $$PORT
    vllm serve m, x-anvil: {port: 8000, gpus: []} ->
    [ollama, serve], environment: {OLLAMA_HOST: ':80'}, x-anvil: {port: 80, gpus: []} ->
    llama-server -m x --port 81, x-anvil: {port: 80, gpus: []} ->
        on 80 (x-anvil: port); write x-anvil: {port: 81}
    ./own, secrets: [token] -> not given; write environment: ..., or the path of a file in its command
    './own $PORT', environment: {A: $PORT} -> a.environment.A: the variable PORT UNSET ${PORT:-default}
    './own $$PORT $$${WORD}' -> compose.yaml:2: services.a.command: the variable WORD UNSET ${WORD:-default}
    './own $$PORT $$$$WORD' ->
"""


LONG, LONGEST = "n" * 129, "m" * 513
LONG_NAMES = [
    (
        f"services: {{{LONG}: {{command: x, x-anvil: {{gpus: []}}}}}}",
        "must have at most 128 characters, not 129",
    ),
    (
        f"services: {{a: {{command: x, x-anvil: {{gpus: [], model: {LONGEST}}}}}}}",
        "at most 512 characters, not 513",
    ),
    (
        f"services: {{a: {{command: x, x-anvil: {{gpus: [], aliases: [{LONGEST}]}}}}}}",
        "at most 512 characters",
    ),
    (
        f"name: {LONG}\nservices: {{a: {{command: x, x-anvil: {{gpus: []}}}}}}",
        "project: must have at most 128",
    ),
]


@pytest.mark.parametrize(("text", "problem"), LONG_NAMES)
def test_a_name_that_is_too_long_is_refused(tmp_path, text, problem):
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, f"x-anvil: {{runtime: process}}\n{text}")
    assert [problem in str(each) for each in caught.value.problems] == [True], caught.value.problems


def test_names_as_long_as_they_may_be_are_taken(tmp_path):
    service = f"{LONG[1:]}: {{command: x, x-anvil: {{gpus: [], model: {LONGEST[1:]}}}}}"
    config = plain(tmp_path, f"name: {LONG[1:]}\nx-anvil: {{runtime: process}}\nservices: {{{service}}}")
    assert config.backends[0].name == LONG[1:]


OF_COMMANDS = [
    ("|\n{}llama-server \\\n{}-m x.gguf", "a backslash and the newline behind it become"),
    (">\n{}llama-server \\\n{}-m x.gguf", "a backslash and the newline behind it become"),
    ("|\n{}llama-server\n{}-m 'my file' a\\ b ' c'", ""),
    ("|\n{}sh -c 'llama-server \\\n{}-m x.gguf'", ""),
    ("|\n{}llama-server -c 2 # small", "# and what follows it is given to the engine"),
    ("|\n{}llama-server\n{}#--port 1", "#--port and what follows it is given to the engine"),
    ("|\n{}sh -c 'llama-server # x' a#b", ""),
    (
        "llama-server \u2013port 8000",
        "\u2013port begins with a dash that is not a hyphen, so it is not a flag",
    ),
    ("[llama-server, \u2014port, '8000']", "write --port"),
    ("llama-server --alias a\u2013b", ""),
]


@pytest.mark.parametrize(("command", "warning"), OF_COMMANDS)
@pytest.mark.parametrize("top", ["x-anvil: {runtime: process}\n", ""])
def test_a_word_of_a_command_that_no_shell_has_read_is_a_warning(
    tmp_path: Path, command: str, warning: str, top: str
) -> None:
    own = "" if top else "    image: x\n"
    indented = command.format(*[" " * 6] * 2)
    text = f"{top}services:\n  a:\n{own}    x-anvil: {{gpus: [], port: 8000}}\n    command: {indented}\n"
    ours = re.compile("a backslash and the newline|is given to the engine|not a hyphen")
    said = [each for each in plain(tmp_path, text).warnings if ours.search(each)]
    assert len(said) == bool(warning), said
    assert warning in "".join(said)


@pytest.mark.parametrize(("command", "warning"), table(OF_PROCESSES))
def test_what_a_process_is_not_given_or_not_told_is_a_warning(
    tmp_path: Path, command: str, warning: str
) -> None:
    own = "" if "x-anvil" in command else ", x-anvil: {gpus: []}"
    text = f"x-anvil: {{runtime: process}}\nservices: {{a: {{command: {command}{own}}}}}"
    warnings = plain(tmp_path, text).warnings
    assert [each.endswith(warning.replace("UNSET", UNSET)) for each in warnings] == [True] * bool(warning)


def test_a_model_that_fits_beside_no_pinned_one_is_a_warning(tmp_path: Path) -> None:
    warnings = plain(tmp_path, TWO % ("vram: 5GiB, pin: true", "vram: 4GiB")).warnings
    assert any("services.b: does not fit on GPU 0 beside the pinned a" in warning for warning in warnings)
