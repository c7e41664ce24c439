"""Compose files in, one frozen Config out."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import attrgetter
from pathlib import Path

import pytest

from anvil_mux.config import config, service
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.errors import ConfigError
from anvil_mux.host import engines, levels
from tests.config.files import GIB, TOP, one, plain, problems, table

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
           tls_key: /key, when_paused: wait, capture: 50, home_after: 8, pages_port: 81,
           yield: {when_others_hold: 4GiB}, any_of: {any: [a]}, read_ahead: no}
        services: {a: {command: [a], x-anvil: {}}}
    """
    found = plain(tmp_path, text)
    assert (found.host, found.port, found.runtime, found.project) == ("0.0.0.0", 80, "process", "p")
    assert found.pages_port == 81
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
    of_compose = {"generated_compose", "resolved_compose", "compose_variables"}
    for owner, table_of in ((Config, config.SETTINGS), (Backend, config.SERVICE_SETTINGS)):
        filled = [name for key, setting in table_of.items() for name in setting.fields_of(key)]
        beside = set(owner.__dataclass_fields__) - set(filled)
        assert len(filled) == len(set(filled)), "each field is filled by one setting"
        assert set(filled) <= set(owner.__dataclass_fields__)
        assert beside in (
            {"backends", "files", "warnings", "origins", "said", *of_compose},
            {"name", "service", "inherits"},
        )


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


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ANVIL_DRAIN_TIMOUT", "ANVIL_DRAIN_TIMEOUT"),
        ("ANVIL_APIKEYS", "ANVIL_API_KEYS"),
        ("ANVIL_HOSTS", "ANVIL_ALLOWED_HOSTS"),
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
        why = f"is now {meant}" if variable == "ANVIL_HOSTS" else f"nobody reads it; did you mean {meant}?"
        assert told == f"{variable}: {why}"
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


def test_replicas_share_a_model_and_its_aliases(tmp_path: Path) -> None:
    text = "services: {a: {x-anvil: {model: m, aliases: [n]}}, b: {x-anvil: {model: m, aliases: [n]}}}"
    assert [each.model for each in plain(tmp_path, text).backends] == ["m", "m"]


# What is read off the service


READ = {
    "engine": """
        image: vllm/vllm-openai:v0.11 -> vllm
        image: 'lmsysorg/sglang@sha256:00' -> sglang
        image: ghcr.io/ggml-org/llama.cpp:server-cuda -> llamacpp
        image: ghcr.io/abetlen/llama-cpp-python:latest -> openai
        image: ollama/ollama -> ollama
        image: ghcr.io/theroyallab/tabbyapi:latest -> tabbyapi
        image: nvcr.io/nvidia/tensorrt-llm/release:1.0 -> trtllm
        image: ghcr.io/huggingface/text-generation-inference:3 -> openai
        image: 'registry:5000/own:vllm' -> openai
        image: own, command: /opt/llama-server -m x -> llamacpp
        image: own, command: python3 -m sglang.launch_server --model-path x -> sglang
        image: own, entrypoint: [vllm, serve], command: [m] -> vllm
        image: own, command: [bin/demo-engine, --model, vllm] -> openai
    """,
    "gpus": """
        deploy: {resources: {reservations: {devices: [{count: 2, capabilities: [gpu]}]}}} -> 0, 1
        deploy: {resources: {reservations: {devices: [{count: all, capabilities: [gpu]}]}}} -> 0, 1, 2
        deploy: {resources: {reservations: {devices: [{count: -1, capabilities: [gpu]}]}}} -> 0, 1, 2
        deploy: {resources: {reservations: {devices: [{device_ids: [2, 0], capabilities: [gpu]}]}}} -> 2, 0
        deploy: {resources: {reservations: {devices: [{count: 1, capabilities: [tpu]}]}}} ->
        gpus: all -> 0, 1, 2
        gpus: [{driver: nvidia, count: 3}] -> 0, 1, 2
        gpus: [{device_ids: ['1']}] -> 1
        devices: ['nvidia.com/gpu=1', /dev/fuse] -> 1
        devices: [{source: nvidia.com/gpu=2, target: nvidia.com/gpu=2}] -> 2
        runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: '1,2'} -> 1, 2
        runtime: nvidia, environment: [NVIDIA_VISIBLE_DEVICES=none] ->
        environment: {CUDA_VISIBLE_DEVICES: 1} -> 1
        gpus: all, environment: {CUDA_VISIBLE_DEVICES: '2'} -> 2
        gpus: [{device_ids: ['1', '2']}], environment: {CUDA_VISIBLE_DEVICES: '1'} -> 1, 2
        gpus: all, labels: {anvil.gpus: '1'} -> 1
        gpus: all, x-anvil: {gpus: []} ->
        restart: no ->
    """,
    "service.gpus_by": """
        gpus: all -> reservation
        deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}} -> reservation
        devices: ['nvidia.com/gpu=0'] -> cdi
        runtime: nvidia ->
        runtime: nvidia, gpus: all -> reservation
        devices: [/dev/dri] ->
    """,
    "port": """
        x-anvil: {port: 1}, ports: ['2:3'] -> 1
        ports: ['127.0.0.1::8000'] -> 8000
        ports: [{target: 7, published: '9', host_ip: 127.0.0.1}] -> 7
        ports: ['[::1]:77:78/tcp', '9:9/udp'] -> 78
        expose: ['1234'] -> 1234
        ports: ['1:1', '2:2'], command: x --port 2 -> 2
        command: [x, --port, 4, '--port=5'] -> 5
        command: [x, --port, $$PORT] ->
        restart: no ->
    """,
    "served_model": """
        image: vllm, command: --model org/m --served-model-name n1 n2 --port 1 -> n1
        image: vllm, command: --model org/m --served-model-name n a ->
        image: vllm, command: --model org/m -> org/m
        image: vllm, command: [org/m, --port, '1'] -> org/m
        image: own, command: vllm serve org/m --port 1 -> org/m
        image: sglang, command: python3 -m sglang.launch_server --model-path=org/m -> org/m
        image: llama.cpp, command: '-m /x.gguf --alias b,c' -> b
        image: llama.cpp, command: -m /x.gguf ->
        image: own, command: bin/demo-engine --model b ->
        image: own, command: x --served-model-name b -> b
    """,
    "aliases": "labels: {anvil.aliases: 'a,b'} -> b",
    "vram_measured": "x-anvil: {gpus: ['0'], vram: measured} -> True",
}


@pytest.mark.parametrize(
    ("what", "said", "expected"), [(what, *row) for what, rows in READ.items() for row in table(rows)]
)
def test_what_is_read_off_a_service(tmp_path: Path, what: str, said: str, expected: str) -> None:
    found = attrgetter(what)(one(tmp_path, said, 'x-anvil: {gpus: ["0", "1", "2"]}'))
    assert expected == (", ".join(found) if isinstance(found, tuple) else "" if found is None else str(found))


PROCESSES = "x-anvil: {runtime: process}\nservices: {a: {%s}}"


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


# Keys, certificates, the engine itself


def test_files_of_keys_and_certificates_are_seen_from_the_compose_file(tmp_path: Path) -> None:
    files = "key_file: keys.txt, tls_cert: /etc/cert.pem, tls_key: ../key.pem"
    found = plain(tmp_path, TOP % f"{files}, allowed_hosts: mux.example")
    assert found.key_file == str(tmp_path / "keys.txt")
    assert (found.tls_cert, found.tls_key) == ("/etc/cert.pem", str(tmp_path.parent / "key.pem"))
    assert found.allowed_hosts == ("mux.example",)


@pytest.mark.parametrize(
    "name", ["x-api-key", "Api-Key", "Content-Length", "Connection", "X-Anvil-Via", "X-Forwarded-For", "a:b"]
)
def test_headers_to_pass_on_are_names_that_anvil_mux_does_not_use(tmp_path: Path, name: str) -> None:
    found = plain(tmp_path, "services: {a: {image: x, x-anvil: {pass_headers: [X-Tenant, cookie]}}}")
    assert found.backends[0].pass_headers == ("x-tenant", "cookie")
    [problem] = problems(tmp_path, f"services: {{a: {{image: x, x-anvil: {{pass_headers: ['{name}']}}}}}}")
    assert "pass_headers" in problem
    assert "must " in problem


def test_what_may_be_asked_of_an_engine_is_a_list_of_plain_paths(tmp_path: Path) -> None:
    found = plain(tmp_path, "services: {a: {image: x, x-anvil: {upstream: [/docs, /sdapi/]}}}")
    assert found.backends[0].upstream == ("/docs", "/sdapi/")
    for path in ("docs", "/a/../b", "/a//b", "/", "/%2e", "/a?b"):
        [problem] = problems(tmp_path, f"services: {{a: {{image: x, x-anvil: {{upstream: ['{path}']}}}}}}")
        assert "must be paths such as /docs or /sdapi/" in problem


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("docker", "run", "x"), "docker"),
        (("/usr/bin/podman", "container", "run", "x"), "/usr/bin/podman"),
        (("docker", "exec", "x"), ""),
        (("llama-server", "run"), ""),
        ((), ""),
    ],
)
def test_a_command_that_runs_a_container_is_known(words: tuple[str, ...], program: str) -> None:
    assert service.container_program(words) == program
    labelled = service.labelled(words, "a=b")
    assert labelled == words or labelled[labelled.index("run") :] == ("run", "--label", "a=b", "x")


@pytest.mark.parametrize(
    ("command", "rest", "warned"),
    [
        ("llama-server --port $$PORT", "", "names no model, so llama-server starts as a router"),
        ("llama-server --port $$PORT -m /x.gguf", "", ""),
        ("llama-server --port $$PORT -hf org/x", "", ""),
        ("llama-server --port $$PORT --models-dir /m", "", ""),
        ("llama-server --port $$PORT", "environment: {LLAMA_ARG_MODEL: /x}", ""),
        ("llama-server --port $$PORT", "environment: {LLAMA_ARG_MODEl: /x}", "names no model"),
        ("./my-llama-server.sh $$PORT", "", ""),
        ("llama-server --port $$PORT -m /x --sleep-idle-seconds 90", "", "write x-anvil: {ttl: 90s}"),
        ("llama-server --port $$PORT -m /x --sleep-idle-seconds -1", "", ""),
        (
            "llama-server --port $$PORT -m /x",
            "environment: {LLAMA_ARG_SLEEP_IDLE_SECONDS: 60}",
            "{ttl: 60s}",
        ),
    ],
)
def test_a_llama_server_without_a_model_or_that_dozes_is_warned_of(
    tmp_path: Path, command: str, rest: str, warned: str
) -> None:
    own = f"command: {command}, x-anvil: {{gpus: []}}, {rest}"
    found = plain(tmp_path, f"x-anvil: {{runtime: process}}\nservices: {{a: {{{own}}}}}")
    told = [text for text in found.warnings if "llama-server starts" in text or "sleep-idle" in text]
    assert bool(told) == bool(warned)
    assert warned in "".join(told)


def test_a_process_that_runs_a_container_is_warned_of(tmp_path: Path) -> None:
    warnings = plain(
        tmp_path, "x-anvil: {runtime: process}\nservices: {a: {command: docker run --rm x}}"
    ).warnings
    assert any("its command is `docker run`: the container is removed" in text for text in warnings)
