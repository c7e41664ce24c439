"""llama-swap's files in, compose files out: each key, what has no counterpart, and what is wrong."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli.main import main
from anvil_mux.config import interpolate
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Written, llama_swap, swap_models
from anvil_mux.plugins import load

ROOT = Path(__file__).resolve().parent.parent.parent


def translated(folder: Path, text: str, gpus: Collection[str] = ("0",)) -> Written:
    file = folder / "config.yaml"
    file.write_text(text)
    return llama_swap.translate(interpolate.read(file), gpus=[*gpus])


def checked(folder: Path, text: str, **environ: str) -> Config:
    """The configuration that the translated file comes to."""
    file = folder / "compose.yaml"
    file.write_text(translated(folder, text).text())
    return load([file], environ=environ, compose=None)


def service(folder: Path, keys: str, top: str = "") -> dict[str, Any]:
    """The service of a model m with these keys, in YAML flow."""
    text = f"{top}\nmodels: {{m: {{cmd: 'llama-server --port ${{PORT}}', {keys}}}}}"
    return translated(folder, text).services["m"]


def settings(folder: Path, keys: str, top: str = "") -> dict[str, Any]:
    found: dict[str, Any] = service(folder, keys, top)["x-anvil"]
    return found


def notes(made: Written) -> list[str]:
    return [f"{note.about}: {note.text}" for note in made.notes]


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        translated(folder, text)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


# Commands


def test_a_model_becomes_a_process_that_is_given_its_port(tmp_path):
    config = checked(tmp_path, "models: {m: {cmd: 'llama-server --port ${PORT} -m m.gguf'}}")
    [backend] = config.backends
    assert config.runtime == "process"
    assert backend.service.command == ("llama-server", "--port", "$PORT", "-m", "m.gguf")
    assert (backend.engine, backend.gpus, backend.port) == ("llamacpp", ("0",), None)


def test_a_command_is_split_as_llama_swap_splits_it():
    command = "# all of this\n/bin/server --port 1 \\\n  # not this\n  --name 'a b'\n -c 'x\ny'"
    assert swap_models.command_words(command) == ["/bin/server", "--port", "1", "--name", "a b", "-c", "x\ny"]


MACROS = """
macros:
  dir: ${env.MODELS}/gguf
  server: "llama-server --port ${PORT} -c ${ctx}"
  ctx: 4096
models:
  a: {cmd: "${server} -m ${dir}/${MODEL_ID}.gguf", ttl: "${idle}", macros: {ctx: 16, idle: 60}}
"""


def test_macros_of_the_model_win_and_variables_stay_variables(tmp_path):
    [backend] = checked(tmp_path, MACROS, MODELS="/srv").backends
    assert backend.service.command[3:] == ("-c", "16", "-m", "/srv/gguf/a.gguf")
    assert backend.ttl == 60.0


def test_a_variable_has_to_be_set_as_llama_swap_wants_it(tmp_path):
    with pytest.raises(ConfigError, match=r"the variable MODELS must be set"):
        checked(tmp_path, MACROS)


def test_what_a_comment_names_is_no_macro(tmp_path):
    text = 'macros: {a: "x\\n--y"}\nmodels: {m: {cmd: "# ${a} ${gone}\\nserver ${PORT}"}}'
    assert translated(tmp_path, text).services["m"]["command"] == ["server", "$$PORT"]


def test_a_dollar_of_a_script_stays_one(tmp_path):
    text = """models: {m: {cmd: "bash -c 'echo $HOME $(date); exec s --port ${PORT}0'", env: [A=1$2]}}"""
    [backend] = checked(tmp_path, text).backends
    assert backend.service.command[2] == "echo $HOME $(date); exec s --port ${PORT}0"
    assert dict(backend.service.environment)["A"] == "1$2"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "macros: {a: '${b}', b: '${a}'}\nmodels: {m: {cmd: '${a}'}}",
            "the macro a holds itself: a -> b -> a",
        ),
        ("models: {m: {cmd: 's ${prot}'}}", "config.yaml:1: models.m.cmd: ${prot} is no macro of the file"),
        ("models: {m: {ttl: 3}}", "config.yaml:1: models.m: has no cmd"),
        ("models: {}", "config.yaml:1: models: the file has no models"),
        ("groups: {}", "config.yaml:1: the file has no models"),
        ("models: [a]", "config.yaml:1: models: must hold keys, not ['a']"),
        ("models: {m: [cmd]}", "config.yaml:1: models.m: must hold keys, not ['cmd']"),
        ("models: {m: {cmd: s, aliases: {a: b}}}", "models.m.aliases: must be a list of texts"),
        ("models: {m: {cmd: s, env: A=1}}", "models.m.env: must be a list of texts, not 'A=1'"),
        ("models: {m: {cmd: s, filters: [a]}}", "models.m.filters: must hold stripParams"),
        ("models: {m: {cmd: 's \"'}}", "models.m.cmd: No closing quotation"),
        ("models: {m: {cmd: [s, t]}}", "models.m.cmd: must be text, not ['s', 't']"),
        ("models: {m: {cmd: s, filters: {setParamsByID: [a]}}}", "models.m.filters: setParamsByID must hold"),
        (
            "models: {m: {cmd: s}, n: {cmd: s}}\ngroups: {g: {members: 5}}",
            "config.yaml:2: groups.g.members: must be a list of texts, not 5",
        ),
        ("models: {m: {cmd: s}}\nselectors: {x: y}", "config.yaml:2: selectors: must hold a name and keys"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, text, problem):
    assert any(problem in found for found in problems(tmp_path, text)), problems(tmp_path, text)


# Keys of models


def test_an_id_that_is_no_name_of_a_service_stays_the_model(tmp_path):
    text = "models: {'q/w:8b': {cmd: 's ${PORT}'}, 'q/w 8b': {cmd: 's ${PORT}'}}"
    config = checked(tmp_path, text)
    assert [(each.name, each.model) for each in config.backends] == [
        ("q-w-8b", "q/w:8b"),
        ("q-w-8b-2", "q/w 8b"),
    ]


@pytest.mark.parametrize(
    ("keys", "top", "expected"),
    [
        ("aliases: [a, m, b]", "", {"aliases": ["a", "b"]}),
        ("aliases: [{id: a, unlisted: true}]", "", {"aliases": ["a"]}),
        ("ttl: 60", "globalTTL: 5", {"ttl": 60}),
        ("ttl: -1", "globalTTL: 5", {"ttl": 5}),
        ("name: ''", "globalTTL: 5", {"ttl": 5}),
        ("ttl: 0", "globalTTL: 5", {}),
        ("unloadTimeout: 7", "unloadTimeout: 20", {"stop_timeout": 7}),
        ("unloadTimeout: 0", "unloadTimeout: 20", {"stop_timeout": 20}),
        ("unlisted: false", "healthCheckTimeout: 300", {"load_timeout": 300}),
        ("unlisted: false", "healthCheckTimeout: 3", {"load_timeout": 15}),
        ("useModelName: org/m", "", {"served_model": "org/m"}),
        ("concurrencyLimit: 4", "", {"concurrency": 4}),
        ("concurrencyLimit: 0", "", {}),
        ("capabilities: {tools: true, context: 4096}", "", {"context": 4096, "capabilities": ["tools"]}),
        (
            "capabilities: {in: [text, image], out: [text], reranker: true}",
            "",
            {"capabilities": ["completion", "vision", "reranking"]},
        ),
        ("capabilities: {}", "", {}),
        ("proxy: 'http://127.0.0.1:8999'", "", {"port": 8999}),
        ("proxy: 'http://localhost:${PORT}/'", "", {}),
        ("filters: {stripParams: 'a, model,b'}", "", {"strip": ["a", "b"]}),
        ("filters: {setParams: {t: 0.5, o: {a: [1]}}}", "", {"set": {"t": 0.5, "o": {"a": [1]}}}),
        ("checkEndpoint: /health", "", {}),
    ],
)
def test_a_key_becomes_a_setting(tmp_path, keys, top, expected):
    assert settings(tmp_path, keys, top) == {"gpus": "all", **expected}


def test_variables_of_the_environment_say_on_which_gpu(tmp_path):
    text = """models:
  a: {cmd: 's ${PORT}', env: [CUDA_VISIBLE_DEVICES=1]}
  b: {cmd: 's ${PORT}', env: ["CUDA_VISIBLE_DEVICES=0,1"]}"""
    assert [backend.gpus for backend in checked(tmp_path, text).backends] == [("1",), ("0", "1")]


def test_parameters_of_a_name_become_a_preset(tmp_path):
    keys = "filters: {setParams: {a: 1}, setParamsByID: {'${MODEL_ID}': {b: 2}, 'm:high': {c: 3}}}"
    found = settings(tmp_path, keys)
    assert (found["set"], found["presets"]) == ({"a": 1, "b": 2}, {"m:high": {"set": {"c": 3}}})
    [backend] = checked(tmp_path, f"models: {{m: {{cmd: 's ${{PORT}}', {keys}}}}}").backends
    assert [preset.name for preset in backend.presets] == ["m:high"]


def test_an_alias_that_has_parameters_is_a_preset_and_no_alias(tmp_path: Path) -> None:
    keys = "aliases: [a, high, low], filters: {setParamsByID: {high: {c: 3}, low: {}, more: }}"
    [backend] = checked(tmp_path, f"models: {{m: {{cmd: 's ${{PORT}}', {keys}}}}}").backends
    assert (backend.aliases, [preset.name for preset in backend.presets]) == (("a", "low", "more"), ["high"])


def test_a_parameter_that_a_client_may_give_is_a_default(tmp_path: Path) -> None:
    keys = "filters: {setParams: {a: 1, 'b?': 2, 'model?': x}, setParamsByID: {m: {'c?': 3}, n: {'d?': 4}}}"
    found = settings(tmp_path, keys)
    assert (found["set"], found["default"], found["presets"]) == (
        {"a": 1},
        {"b": 2, "c": 3},
        {"n": {"default": {"d": 4}}},
    )


NO_COUNTERPART = [
    *("name: N", "description: D", "metadata: {a: 1}", "unlisted: true"),
    *("sendLoadingState: true", "timeouts: {connect: 1}", "compat: {ignoreWebsockets: true}", "typo: 1"),
    *(
        "checkEndpoint: none",
        "cmdStop: 'kill ${PID}'",
        "proxy: 'http://10.0.0.1:80'",
        "healthCheckTimeout: 9",
    ),
    *("proxy: 'http://localhost:1/v1'", "filters: {stripParams: stream}"),
    *("filters: {other: 1}", "concurrencyLimit: 4"),
]


@pytest.mark.parametrize("keys", NO_COUNTERPART)
def test_what_has_no_counterpart_is_a_note_above_its_service(tmp_path, keys):
    made = translated(tmp_path, f"models: {{m: {{cmd: 's ${{PORT}}', {keys}}}}}")
    [note] = made.notes
    assert (note.service, note.about) == ("m", keys.partition(":")[0])
    assert note.where.endswith(f"config.yaml:1: models.m.{note.about}")
    lines = made.text().splitlines()
    assert any(line.startswith(f"  # {note.about}: ") for line in lines[: lines.index("  m:")])


@pytest.mark.parametrize("key", sorted(llama_swap.TOP_NOTES))
def test_what_has_no_counterpart_in_the_whole_is_a_note_at_the_top(tmp_path, key):
    made = translated(tmp_path, f"{key}: {{a: 1}}\nmodels: {{m: {{cmd: 's ${{PORT}}'}}}}")
    assert notes(made) == [f"{key}: {llama_swap.TOP_NOTES[key]}"]


def test_keys_of_the_api_are_not_copied(tmp_path):
    made = translated(tmp_path, "apiKeys: [sk-secret]\nmodels: {m: {cmd: 's ${PORT}'}}")
    assert "sk-secret" not in made.text()
    assert notes(made)[0].startswith("apiKeys: 1 keys are not written here")


def test_models_that_are_loaded_at_the_start_are_preloaded(tmp_path):
    text = """hooks: {on_startup: {preload: [a, gone]}}
models: {m: {cmd: 's ${PORT}', aliases: [a]}, n: {cmd: 's ${PORT}'}}"""
    made = translated(tmp_path, text)
    assert [bool(each["x-anvil"].get("preload")) for each in made.services.values()] == [True, False]
    [backend] = checked(
        tmp_path,
        """hooks: {on_startup: {preload: ["high "]}}
models: {m: {cmd: 's ${PORT}', filters: {setParamsByID: {high: {a: 1}}}}}""",
    ).backends
    assert backend.preload
    assert notes(made) == ["hooks.on_startup.preload: gone is no model of the file."]


def test_priorities_are_kept_within_what_there_is(tmp_path):
    text = """routing: {scheduler: {settings: {fifo: {priority: {m: 7, n: 500}}}}}
models: {m: {cmd: 's ${PORT}'}, n: {cmd: 's ${PORT}'}}"""
    made = translated(tmp_path, text)
    assert [each["x-anvil"]["priority"] for each in made.services.values()] == [7, 100]
    assert "n: 500 becomes 100" in notes(made)[0]


def test_a_load_that_takes_longer_than_requests_wait_makes_them_wait(tmp_path):
    made = translated(tmp_path, "healthCheckTimeout: 900\nmodels: {m: {cmd: 's ${PORT}'}}")
    assert made.settings["queue_timeout"] == 900


SELECTORS = """selectors:
  first: {strategy: pin, targets: [m, n]}
  warm: {strategy: warm, targets: [n, m, gone]}
  spill: {strategy: spillover, targets: [n, m]}
  lost: {strategy: warm, targets: [gone]}
models: {m: {cmd: 's ${PORT}'}, n: {cmd: 's ${PORT}'}}"""


def test_a_selector_becomes_a_name(tmp_path):
    made = translated(tmp_path, SELECTORS)
    assert made.services["m"]["x-anvil"]["aliases"] == ["first"]
    assert made.settings["any_of"] == {"warm": ["n", "m"]}
    assert notes(made)[0].startswith("selectors.spill: is a name of n alone, not of m")
    assert [note.about for note in made.notes] == ["selectors.spill", "selectors.lost"]
    assert checked(tmp_path, SELECTORS).backends


def test_a_selector_may_name_an_alias_parameters_or_a_model_of_a_peer(tmp_path: Path) -> None:
    text = """selectors:
  one: {strategy: pin, targets: [a]}
  high: {strategy: pin, targets: [m:high]}
  far: {strategy: pin, targets: [p/x]}
  away: {strategy: pin, targets: [x]}
  warm: {strategy: warm, targets: [a, n]}
peers: {p: {proxy: 'http://10.0.0.2:1', models: [x, a]}}
models:
  m: {cmd: 's ${PORT}', aliases: [a], filters: {setParamsByID: {'m:high': {b: 1}}}}
  n: {cmd: 's ${PORT}'}"""
    made = translated(tmp_path, text)
    assert not made.notes
    assert made.services["m"]["x-anvil"]["aliases"] == ["a", "one"]
    assert {name: each.models for name, each in checked(tmp_path, text).any_of.items()} == {
        "high": ("m:high",),
        "far": ("p/x",),
        "away": ("p/x",),
        "warm": ("m", "n"),
    }
    assert "aliases" not in made.services["p-a"]["x-anvil"]  # the model of the file has that name


PEERS = """peers:
  cloud:
    proxy: https://cloud.example/api/
    apiKey: ${env.CLOUD_KEY}
    models: [org/big, m]
    filters: {stripParams: top_p, setParams: {zdr: true, 'seed?': 1}}
  other: {proxy: 'http://10.0.0.2:1', apiKey: secret, models: [x]}
  cat: {proxy: 'tailcat://abc', models: [y]}
models: {m: {cmd: 's ${PORT}'}}"""


def test_a_peers_models_become_services_elsewhere(tmp_path):
    made = translated(tmp_path, PEERS)
    assert made.services["cloud-org-big"]["x-anvil"] == {
        "model": "cloud/org/big",
        "served_model": "org/big",
        "aliases": ["org/big"],
        "url": "https://cloud.example/api/v1",
        "api_key_env": "CLOUD_KEY",
        "strip": ["top_p"],
        "set": {"zdr": True},
        "default": {"seed": 1},
    }
    assert "aliases" not in made.services["cloud-m"]["x-anvil"]
    assert [note.about for note in made.notes] == ["peers.other.apiKey", "peers.cat"]
    assert "secret" not in made.text()
    config = checked(tmp_path, PEERS, CLOUD_KEY="k")
    assert {each.model for each in config.backends} == {"m", "cloud/org/big", "cloud/m", "other/x"}


# Containers


def test_models_that_are_all_containers_become_services_of_compose(tmp_path):
    text = """startPort: 9100
models:
  a:
    cmd: docker run --name ${MODEL_ID} --init --rm -p ${PORT}:8080 -v /srv:/models img:1 -m /models/a.gguf
    cmdStop: docker stop ${MODEL_ID}
  b:
    cmd: docker run -it --gpus '"device=1"' -p ${PORT}:${PORT} -v hf:/hf -e A=1 img:2 --port ${PORT}
    ttl: 5"""
    made = translated(tmp_path, text)
    assert not made.notes
    assert made.settings == {"gpus": ["0", "1"]}
    assert made.volumes == {"hf": {"name": "hf"}}
    assert made.services["a"] == {
        "image": "img:1",
        "init": True,
        "volumes": ["/srv:/models"],
        "command": ["-m", "/models/a.gguf"],
        "profiles": ["llm"],
        "ports": ["127.0.0.1::8080"],
        "x-anvil": {"gpus": "all"},
    }
    assert made.services["b"]["command"] == ["--port", "9101"]
    config = checked(tmp_path, text)
    assert config.runtime == "compose"
    assert [(b.name, b.gpus, b.port) for b in config.backends] == [
        ("a", ("0", "1"), 8080),
        ("b", ("1",), 9101),
    ]


def test_an_option_without_a_counterpart_keeps_the_command_a_process(tmp_path):
    text = "models: {a: {cmd: 'docker run --dns 10.0.0.1 -p ${PORT}:80 img'}}"
    made = translated(tmp_path, text)
    assert made.settings["runtime"] == "process"
    assert made.services["a"]["command"][:2] == ["docker", "run"]
    assert "--dns has no counterpart" in made.notes[0].text


def test_the_engine_of_a_container_that_stays_a_process_is_that_of_its_image(tmp_path):
    text = "models: {a: {cmd: 'docker run --dns x -p ${PORT}:80 ghcr.io/ggml-org/llama.cpp:server'}}"
    assert translated(tmp_path, text).services["a"]["x-anvil"]["engine"] == "llamacpp"


def test_containers_beside_processes_stay_processes(tmp_path):
    text = """models:
  a: {cmd: 'docker run -p ${PORT}:80 img', cmdStop: docker stop a}
  b: {cmd: 's ${PORT}'}"""
    made = translated(tmp_path, text)
    assert [each["command"][0] for each in made.services.values()] == ["docker", "s"]
    assert not made.notes


@pytest.mark.parametrize("proxy", ["http://172.17.0.1:9601", "http://172.17.0.2:9501", "http://llm:9501/"])
@pytest.mark.parametrize("beside", ["", "\n  b: {cmd: 's ${PORT}'}"])
def test_the_address_of_a_container_is_its_published_port(tmp_path, proxy, beside):
    cmd = "docker run -p 1:2 -p 9601:9501 img --port 9501"
    made = translated(tmp_path, f"models:\n  a: {{cmd: '{cmd}', proxy: '{proxy}'}}{beside}")
    service = made.services["a"]
    assert service["x-anvil"]["port"] == (9601 if beside else 9501)
    if not beside:
        assert service["ports"] == ["127.0.0.1::9501", "127.0.0.1:1:2"]
    assert not made.notes


def test_the_address_of_another_machine_is_left_out_of_a_container(tmp_path):
    text = "models: {a: {cmd: 'docker run -p 9601:9501 img', proxy: 'http://10.0.0.9:80'}}"
    assert "is left out: engines listen on this machine" in translated(tmp_path, text).notes[0].text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--ipc=host --shm-size 8g", {"ipc": "host", "shm_size": "8g"}),
        ("-v/a:/a -eB=2 -e C", {"volumes": ["/a:/a"], "environment": {"B": "2", "C": None}}),
        (
            "--mount type=bind,src=/a,dst=/b,readonly --mount source=v,target=/v",
            {
                "volumes": [
                    {"type": "bind", "source": "/a", "target": "/b", "read_only": True},
                    {"type": "volume", "source": "v", "target": "/v"},
                ]
            },
        ),
        ("--network host --user 1:1", {"network_mode": "host", "user": "1:1"}),
        (
            "--ulimit memlock=-1:-1 --ulimit stack=8",
            {"ulimits": {"memlock": {"soft": -1, "hard": -1}, "stack": 8}},
        ),
        ("--device nvidia.com/gpu=all", {"devices": ["nvidia.com/gpu=all"]}),
        ("--entrypoint s --label a=b -itd --rm=true", {"entrypoint": ["s"], "labels": {"a": "b"}}),
        ("--init=false --privileged", {"privileged": True}),
    ],
)
def test_options_of_docker_run(words, expected):
    made = swap_models.read_container(["docker", "run", *words.split(), "img"])
    assert (made.service, made.unknown) == ({"image": "img", **expected}, [])


NVIDIA = {"driver": "nvidia", "capabilities": ["gpu"]}


@pytest.mark.parametrize(
    ("words", "expected", "gpus"),
    [
        (["all"], {**NVIDIA, "count": "all"}, []),
        (["2"], {**NVIDIA, "count": 2}, ["0", "1"]),
        (["count=2"], {**NVIDIA, "count": 2}, ["0", "1"]),
        (["driver=nvidia"], {**NVIDIA, "count": 1}, ["0"]),
        (["device=1"], {**NVIDIA, "device_ids": ["1"]}, ["1"]),
        (["device=nvidia.com/gpu=1"], {**NVIDIA, "device_ids": ["nvidia.com/gpu=1"]}, ["1"]),
        (["driver=amd,device=1"], {**NVIDIA, "driver": "amd", "device_ids": ["1"]}, ["amd1"]),
        (
            ['"device=0,1",capabilities=utility'],
            {"driver": "nvidia", "capabilities": ["utility", "gpu"], "device_ids": ["0", "1"]},
            ["0", "1"],
        ),
        (
            ['all,"capabilities=compute,utility","options=a=b,c=d"'],
            {
                "driver": "nvidia",
                "capabilities": ["compute", "utility", "gpu"],
                "options": {"a": "b", "c": "d"},
                "count": "all",
            },
            [],
        ),
    ],
)
def test_gpus_of_docker_run_are_those_that_docker_reads(words, expected, gpus):
    made = swap_models.read_container(["docker", "run", "--gpus", *words, "img"])
    assert made.service["deploy"]["resources"]["reservations"]["devices"] == [expected]
    assert (made.gpus, made.reserves, made.unknown) == (gpus, True, [])


@pytest.mark.parametrize(
    "words", ["--gpus two", "--gpus device=0,1", "--gpus size=1", "--ulimit nofile=many"]
)
def test_what_docker_would_refuse_is_an_option_without_a_counterpart(words):
    assert swap_models.read_container(["docker", "run", *words.split(), "img"]).unknown == [words]


# Who is resident beside whom


def gpus(made: Written) -> dict[str, list[str]]:
    return {name: each["x-anvil"]["gpus"] for name, each in made.services.items()}


def models(*names: str) -> str:
    return "models: {" + ", ".join(f"{name}: {{cmd: 's ${{PORT}}'}}" for name in names) + "}\n"


GROUPS = """
  llms: {members: [a, b]}
  small: {swap: false, exclusive: false, members: [c, d]}
  forever: {persistent: true, swap: true, exclusive: false, members: [e, f]}
"""


@pytest.mark.parametrize(
    "text", [f"groups:{GROUPS}", f"routing: {{router: {{settings: {{groups: {{{GROUPS}}}}}}}}}"]
)
def test_members_of_a_group_take_turns_as_it_says(tmp_path, text):
    flow = text.replace("\n  forever", ",\n  forever").replace("\n  small", ",\n  small")
    made = translated(tmp_path, models("a", "b", "c", "d", "e", "f") + (flow if "routing" in text else text))
    assert gpus(made) == {
        "a": ["turns-1"],
        "b": ["turns-1"],
        "c": ["alone-1"],
        "d": ["alone-2"],
        "e": ["turns-2"],
        "f": ["turns-2"],
    }
    assert "only names" in made.notes[-1].text


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("cmd: 's ${PORT}'", ["alone-1"]),
        ("cmd: 's ${PORT}', env: [CUDA_VISIBLE_DEVICES=1]", ["alone-1"]),
        ("cmd: 's ${PORT}', env: ['CUDA_VISIBLE_DEVICES=']", []),
        ("cmd: 's ${PORT}', env: [CUDA_VISIBLE_DEVICES=-1]", []),
        ("cmd: 'docker run --gpus all -p ${PORT}:80 img', cmdStop: 'docker stop x'", ["alone-1"]),
        ("cmd: 'docker run -p ${PORT}:80 img', cmdStop: 'docker stop x'", []),
    ],
)
def test_a_model_beside_all_others_has_gpus_unless_it_hides_them(tmp_path, model, expected):
    others = "b: {cmd: 's ${PORT}'}, c: {cmd: 's ${PORT}'}"
    group = "{persistent: true, exclusive: false, members: [a]}"
    text = f"models: {{a: {{{model}}}, {others}}}\ngroups: {{x: {group}}}"
    assert gpus(translated(tmp_path, text)) == {"a": expected, "b": ["turns-1"], "c": ["turns-1"]}


def test_exclusive_groups_take_turns_and_models_in_no_group_with_them(tmp_path):
    text = models("a", "b", "c") + "groups: {x: {swap: false, members: [a, b]}}"
    assert gpus(translated(tmp_path, text)) == {
        "a": ["turns-1"],
        "b": ["turns-2"],
        "c": ["turns-1", "turns-2"],
    }


def test_groups_by_which_all_take_turns_need_no_names_for_it(tmp_path):
    text = models("a", "b") + "groups: {x: {members: [a]}, y: {members: [b]}}"
    assert gpus(translated(tmp_path, text)) == {"a": "all", "b": "all"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("matrix: {vars: {x: a}, evict_costs: {x: 3}, sets: {s: x & (b | gone}}", "matrix"),
        (
            "routing: {router: {use: matrix, settings: {matrix: {sets: {s: a & b}}}}}",
            "routing.router.settings.matrix",
        ),
    ],
)
def test_a_matrix_is_left_out_and_what_to_write_instead_is_told(tmp_path, text, key):
    made = translated(tmp_path, models("a", "b", "c") + text)
    assert gpus(made) == {"a": "all", "b": "all", "c": "all"}
    assert [note for note in notes(made) if note.startswith(f"{key}: is left out") and "`vram`" in note]


def test_the_router_in_use_counts(tmp_path):
    router = (
        "{use: groups, settings: {groups: {g: {swap: false, members: [a, b]}}, matrix: {sets: {s: a & c}}}}"
    )
    made = translated(tmp_path, models("a", "b", "c") + f"routing: {{router: {router}}}")
    assert gpus(made) == {"a": ["turns-1"], "b": ["turns-2"], "c": ["turns-1", "turns-2"]}
    assert notes(made)[0] == "routing.router.settings.matrix: is not in use: routing.router.use says so."


# The command


def test_the_command_prints_a_file_that_check_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text("models: {'q:8b': {cmd: 's ${PORT}', unlisted: true}}")
    assert main(["import", "llama-swap", str(tmp_path / "config.yaml")]) == 0
    printed = capsys.readouterr()
    assert "config.yaml:1: models.q:8b.unlisted: every model is listed" in printed.err
    file = tmp_path / "compose.yaml"
    file.write_text(printed.out)
    assert main(["check", str(file)]) == 0
    assert "q:8b" in capsys.readouterr().out


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("models: {m: {}}")
    assert main(["import", "llama-swap", str(tmp_path / "config.yaml")]) == 78
    assert "config.yaml:1: models.m: has no cmd" in capsys.readouterr().err


MIGRATING = (ROOT / "docs" / "migrating.md").read_text()


@pytest.mark.parametrize(
    "key",
    sorted(
        {
            *swap_models.KEYS,
            *swap_models.NOTES,
            *llama_swap.OF_MODELS,
            *llama_swap.TOP,
            *llama_swap.TOP_NOTES,
        }
    ),
)
def test_the_document_has_each_key(key):
    assert f"| `{key}`" in MIGRATING or f", `{key}`" in MIGRATING


def test_what_the_document_shows_is_what_comes_out(tmp_path):
    """The first file of the document, translated, is its second one."""
    shown = [part.partition("```")[0] for part in MIGRATING.split("```yaml\n")[1:]]
    made = translated(tmp_path, shown[0])
    assert yaml.safe_load(shown[1]) == yaml.safe_load(made.text())
    assert shown[1] == made.text()
