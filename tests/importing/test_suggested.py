"""Small compose files that know nothing of anvil-mux, with the traits of those in public repositories.

The traits are those of these files on GitHub, on which `check --suggest` was tried: open-webui/open-webui
docker-compose.yaml and docker-compose.gpu.yaml; sgl-project/sglang docker/compose.yaml; mudler/LocalAI
docker-compose.yaml; n8n-io/self-hosted-ai-starter-kit docker-compose.yml; opea-project/GenAIExamples
ChatQnA/docker_compose/ nvidia/gpu/compose.yaml, intel/cpu/xeon/compose_tgi.yaml,
amd/gpu/rocm/compose_vllm.yaml; valiantlynx/ollama-docker docker-compose-ollama-gpu.yaml; av/harbor
compose.aphrodite.yml and compose.vllm.yml; lucasavila00/LmScript docker/tgi/docker-compose.yml and
sglang-docker/docker-compose.yml; sachinsshetty/warehouse backend/vllm/mistral-vllm.yml;
boanlab/KloudChat-LLM docker-compose.vllm.yml; calcottdotcom/local-ai-stack docker-compose.llamacpp.yml;
java-alchemist/inference-stack docker-compose.sglang.yml; mrzzy/slm-exploration docker-compose.tgi.yml;
alirezzazm/local-ai-stack docker-compose.vllm.yml; DevXT-LLC/ezlocalai docker-compose-cuda.yml;
azmil72/ollama-webUI-monitoring docker-compose.yml; spacegator/ollama-webui-intel docker-compose.yml;
sergey21000/docker-compose-webui-llm-examples combinations/openwebui_vllm/compose.cuda.yml;
Cosmicjedi/jane-llm-setup docker-compose.yml; thr3a/llama-cpp-docker-compose docker-compose.yml;
arkady-emelyanov/vllm-sglang-demo docker-compose.yaml.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli.main import main
from anvil_mux.config import interpolate
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError
from anvil_mux.host.engine import ENGINES as FAMILIES
from anvil_mux.importing.overlay import laid_over
from anvil_mux.importing.roles import PORTS
from anvil_mux.importing.suggested import Suggestion, suggest
from anvil_mux.importing.weights import weights_of
from anvil_mux.plugins import load

RESERVED = (
    "deploy: {resources: {reservations: {devices: [{driver: nvidia, count: %s, capabilities: [gpu]}]}}}"
)
ONE, ALL = RESERVED % "1", RESERVED % "all"


def read(folder: Path, services: str, **environ: str) -> Suggestion:
    file = folder / "compose.yaml"
    file.write_text(f"services:\n{services}\n")
    return suggest([interpolate.read(file)], environ, [])


def pasted(folder: Path, made: Suggestion) -> Config:
    """What is read once the printed text stands in the file; ConfigError if check would have a problem."""
    over = yaml.safe_load(made.written.text())
    content = yaml.safe_load((folder / "compose.yaml").read_text())
    for service in content["services"].values():
        service.pop("env_file", None)
    file = folder / "pasted.yaml"
    file.write_text(yaml.safe_dump(laid_over(content, over)))
    return load([file], environ={}, compose=None)


def engines(made: Suggestion) -> dict[str, tuple[str, str, str, str]]:
    return {row.service: (row.what, row.model, row.port, row.gpus) for row in made.rows if row.model}


ENGINES: list[tuple[str, str, tuple[str, str, str, str]]] = [
    ("image: vllm/vllm-openai, command: [--model, a/b-7B], ports: ['8000:8000'], gpus: all", "vllm",
     ("vllm", "a/b-7B", "8000", "all")),
    ("image: vllm/vllm-openai, command: --model /models --served-model-name m n, runtime: nvidia", "vllm",
     ("vllm", "m", "8000", "all")),
    (f"image: vllm/vllm-openai, command: ['serve', 'org/m', '--port', '81'], ports: ['80:81'], {ONE}", "vllm",
     ("vllm", "org/m", "81", "0")),
    ("image: own/thing, entrypoint: [bash, -c, 'sleep 1; vllm serve org/m --port 9'], expose: [9]", "vllm",
     ("vllm", "org/m", "9", "none")),
    ("image: lmsysorg/sglang, entrypoint: python3 -m sglang.launch_server, network_mode: host, "
     "command: --model-path org/m --port 30000", "sglang", ("sglang", "org/m", "30000", "none")),
    ("image: 'ghcr.io/ggml-org/llama.cpp:server-cuda', expose: ['5000'], "
     "command: ['-m', '/models/Q-0.6B-Q4_K_M.gguf', '--port', '5000']", "llamacpp",
     ("llamacpp", "Q-0.6B-Q4_K_M", "5000", "none")),
    ("image: 'ghcr.io/ggml-org/llama.cpp:server', ports: ['11435:11435'], environment: "
     "[LLAMA_ARG_MODEL=/models/x.gguf, LLAMA_ARG_PORT=11435]", "llamacpp",
     ("llamacpp", "x", "11435", "none")),
    ("image: 'ghcr.io/ggml-org/llama.cpp:server', command: -hf org/name-GGUF:Q4_K_M", "llamacpp",
     ("llamacpp", "name:Q4_K_M", "8080", "none")),
    ("image: 'huggingface/text-generation-inference:3', command: '--model-id org/m', ports: ['8080:80']",
     "openai", ("openai", "org/m", "80", "none")),
    ("image: 'ghcr.io/huggingface/text-generation-inference:3', environment: {MODEL_ID: /data/m}", "openai",
     ("openai", "m", "80", "none")),
    ("image: 'localai/localai:latest', build: ., env_file: [.env], command: [phi-2], ports: ['8080:8080']",
     "openai", ("openai", "phi-2", "8080", "none")),
    ("image: 'x/vllm-rocm:${TAG:-latest}', devices: ['/dev/kfd:/dev/kfd', '/dev/dri:/dev/dri'], "
     "command: '--model ${LLM:-org/m} --port 8011', ports: ['${P:-8081}:8011']", "vllm",
     ("vllm", "org/m", "8011", "amd: all")),
    ("image: vllm/vllm-openai, command: [--model, org/m], ports: ['8000:8000', '8265:8265']", "vllm",
     ("vllm", "org/m", "8000", "none")),
    ("image: vllm/vllm-openai, command: [--model, org/m], environment: [CUDA_VISIBLE_DEVICES=1], "
     "devices: [nvidia.com/gpu=all]", "vllm", ("vllm", "org/m", "8000", "1")),
    ("image: 'huggingface/text-generation-inference:3', command: '--model-id org/m', ports: ['8080:8080'], "
     "network_mode: host", "openai", ("openai", "org/m", "80", "none")),
    ("image: vllm/vllm-openai, command: '--model ${NONE} --swap-space 16', ports: ['1:8000']", "vllm",
     ("vllm", "a", "8000", "none")),
    ("image: 'ghcr.io/ggml-org/llama.cpp:server', command: '--model /models/${NONE} --port 8080'", "llamacpp",
     ("llamacpp", "a", "8080", "none")),
    ("image: ollama/ollama, ports: ['11434:11434'], profiles: [gpu], gpus: all", "ollama",
     ("ollama", "a", "11434", "all")),
]  # fmt: skip


@pytest.mark.parametrize(("service", "engine", "expected"), ENGINES)
def test_an_engine_is_recognised_and_check_passes_with_what_is_suggested(
    tmp_path: Path, service: str, engine: str, expected: tuple[str, str, str, str]
) -> None:
    made = read(tmp_path, f"  a: {{{service}}}")
    assert engines(made) == {"a": expected}
    (backend,) = pasted(tmp_path, made).backends
    assert (backend.engine, backend.model) == (engine, expected[1])
    assert str(backend.port or expected[2]) == expected[2]


@pytest.mark.parametrize(
    ("service", "why"),
    [
        ("image: 'postgres:16'", "image postgres:16 is not a known engine"),
        ("image: ghcr.io/ollama-webui/ollama-webui", "its image is a web interface"),
        ("image: ghcr.io/berriai/litellm", "it forwards requests"),
        ("image: lmsysorg/sglang-router", "it forwards requests"),
        ("image: x/ollama-exporter", "it monitors an engine"),
        ("image: 'ghcr.io/mostlygeek/llama-swap:cuda'", "see `anvil-mux import llama-swap`"),
        ("image: ollama/ollama, command: [pull, llama3.2]", "it downloads models and exits"),
        ("image: curlimages/curl, command: curl http://o/api/pull -d x", "it downloads models and exits"),
        ("build: .", "neither its Dockerfile nor its command names an engine"),
        ("image: 'vllm/vllm-openai', x-anvil: {}", "it has x-anvil already"),
        ('image: vllm/vllm-openai, command: "--model \'x"', "No closing quotation"),
    ],
)
def test_why_a_service_is_left_alone(tmp_path: Path, service: str, why: str) -> None:
    made = read(tmp_path, f"  a: {{{service}}}")
    assert engines(made) == {}
    (row,) = made.rows
    assert why in row.why


def test_a_dockerfile_says_what_is_built(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM alpine AS fetch\nFROM --platform=x vllm/vllm-openai:v1 AS b\nFROM b\n"
    )
    made = read(tmp_path, "  a: {build: ., command: [--model, org/m]}")
    assert made.written.services["a"]["x-anvil"] == {"model": "org/m", "engine": "vllm"}
    (backend,) = pasted(tmp_path, made).backends
    assert backend.engine == "vllm"


def test_an_ollama_is_named_after_what_is_pulled_into_it(tmp_path: Path) -> None:
    pulls = "sleep 3; OLLAMA_HOST=o:11434 ollama pull llama3.2; ollama run moondream"
    made = read(tmp_path, f"  o: {{image: ollama/ollama}}\n  i: {{image: ollama/ollama, entrypoint: /bin/sh, "
                f"command: ['-c', '{pulls}']}}")  # fmt: skip
    assert engines(made) == {"o": ("ollama", "llama3.2", "11434", "none")}
    assert any("this Ollama has other models (moondream)" in note.text for note in made.written.notes)


def test_of_two_profiles_with_one_port_the_one_with_the_gpu_is_taken(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        f"""  cpu: {{image: ollama/ollama, profiles: [cpu], ports: ['11434:11434']}}
  gpu: {{image: ollama/ollama, profiles: [gpu], ports: ['11434:11434'], {ONE}}}""",
    )
    assert [*engines(made)] == ["gpu"]
    assert "uses a port of gpu" in made.rows[1].why
    pasted(tmp_path, made)


def test_engines_on_one_gpu_may_have_one_port(tmp_path: Path) -> None:
    service = "image: vllm/vllm-openai, ports: ['8000:8000'], gpus: all"
    made = read(
        tmp_path, f"  a: {{{service}, command: [--model, m/1]}}\n  b: {{{service}, command: [--model, m/2]}}"
    )
    assert [backend.model for backend in pasted(tmp_path, made).backends] == ["m/1", "m/2"]


@pytest.mark.parametrize(
    ("client", "environment"),
    [
        ("image: x, environment: ['API=http://chat:8000/v1']", {"API": "http://host.docker.internal:9292/v1"}),
        ("image: x, environment: {A: 'http://vllm-1:8000'}", {"A": "http://host.docker.internal:9292"}),
        ("image: x, environment: {A: '${NOT-http://localhost:8000/v1}'}",
         {"A": "http://host.docker.internal:9292/v1"}),
        ("image: x, network_mode: host, environment: {A: 'http://127.0.0.1:8000/v1', OPENAI_API_KEY: k}",
         {"A": "http://127.0.0.1:9292/v1", "OPENAI_API_KEY": "${ANVIL_API_KEY:-}"}),
        ("image: 'ghcr.io/open-webui/open-webui:main', environment: ['OLLAMA_BASE_URL=http://chat:8000']",
         {"OPENAI_API_BASE_URL": "http://host.docker.internal:9292/v1", "ENABLE_OLLAMA_API": "false",
          "OPENAI_API_KEY": "${ANVIL_API_KEY:-}"}),
    ],
)  # fmt: skip
def test_who_asks_an_engine_is_pointed_at_anvil_mux(
    tmp_path: Path, client: str, environment: dict[str, str]
) -> None:
    engine = (
        "{image: vllm/vllm-openai, container_name: vllm-1, command: [--model, org/m], ports: ['8000:8000']}"
    )
    made = read(tmp_path, f"  chat: {engine}\n  ui: {{{client}, depends_on: [chat]}}")
    assert made.written.services["ui"]["environment"] == environment
    assert made.written.settings["listen"] == "172.17.0.1:9292"
    config = pasted(tmp_path, made)
    assert (config.host, [backend.model for backend in config.backends]) == ("172.17.0.1", ["org/m"])
    assert "profiles" not in made.written.services["chat"], "Compose refuses to start who depends on it then"


def test_who_asks_others_is_left_alone(tmp_path: Path) -> None:
    made = read(
        tmp_path, "  a: {image: ollama/ollama}\n  b: {image: x, environment: {A: 'http://localhost:5432'}}"
    )
    assert [*made.written.services] == ["a"]
    assert "listen" not in made.written.settings


def test_another_api_of_a_server_is_left_alone_and_noted(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        """  tei: {image: 'ghcr.io/huggingface/text-embeddings-inference:cpu', command: --model-id org/m}
  a: {image: x, environment: {TEI: 'http://tei:80', LLM_HOST: tei}}""",
    )
    assert [*made.written.services] == ["tei"]
    assert [note.about for note in made.written.notes if "by hand" in note.text] == [
        "services.a.environment.TEI",
        "services.a.environment.LLM_HOST",
    ]


def test_a_policy_of_restarts_is_taken_back(tmp_path: Path) -> None:
    made = read(
        tmp_path, "  a: {image: ollama/ollama, restart: always}\n  b: {image: redis, restart: always}"
    )
    assert made.written.services["a"]["restart"] == "no"
    assert "b" not in made.written.services
    assert not any("`restart" in warning for warning in pasted(tmp_path, made).warnings)


def test_what_is_not_known_is_a_note_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("services: {e: {image: vllm/vllm-openai, command: [--model, org/m]}}")
    made = read(
        tmp_path,
        """  a: {extends: {file: base.yaml, service: e}, ports: ["${PORT:?say}:8000"]}
  b: {extends: {file: none.yaml, service: e}, image: "${IMAGE}"}""",
    )
    assert engines(made) == {"a": ("vllm", "org/m", "8000", "none")}
    texts = [note.text for note in made.written.notes]
    assert "the variable PORT must be set: say" in texts
    assert any("none.yaml cannot be read" in text for text in texts)
    assert any(note.about == "IMAGE" for note in made.written.notes)


@pytest.mark.parametrize(
    ("name", "engine", "more", "gib"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "vllm", "", 14.9),
        ("Qwen/Qwen3-8B-AWQ", "vllm", "", 4.2),
        ("x/m-7b", "vllm", "fp8", 6.9),
        ("Qwen3-0.6B-UD-Q4_K_XL", "llamacpp", "", 0.3),
        ("mixtral-8x7b-Q8_0", "llamacpp", "", 55.4),
        ("llama3.2:3b", "ollama", "", 1.7),
        ("org/model", "vllm", "", None),
        ("phi3-mini-128k", "vllm", "", None),
    ],
)
def test_how_large_weights_are_by_their_name(name: str, engine: str, more: str, gib: float | None) -> None:
    found = weights_of(name, engine, more)
    assert (found and round(found, 1)) == gib


def test_the_command_prints_the_yaml_and_says_the_rest_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker
    file = tmp_path / "compose.yaml"
    file.write_text(f"services:\n  a: {{image: ollama/ollama, {ALL}}}\n  db: {{image: redis}}\n")
    assert main(["check", "--suggest", str(file)]) == 0
    seen = capsys.readouterr()
    assert yaml.safe_load(seen.out)["services"]["a"]["x-anvil"] == {"model": "a"}
    assert "image redis is not a known engine" in seen.err
    assert "1 model; with this check has 0 problems" in seen.err
    assert main(["check", "--suggest", "--json", str(file)]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(row["service"], row["what"], row["where"]) for row in told["services"]] == [
        ("a", "ollama", f"{file}:2"),
        ("db", "", f"{file}:3"),
    ]
    assert told["problems"] == []


def test_the_command_fails_where_nothing_serves_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {db: {image: redis}}\n")
    assert main(["check", "--suggest", str(file)]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "no service looks like an engine" in seen.err


def test_without_it_check_still_refuses_such_a_file(tmp_path: Path) -> None:
    read(tmp_path, "  a: {image: ollama/ollama}")
    with pytest.raises(ConfigError, match="none serves a model"):
        load([tmp_path / "compose.yaml"], environ={}, compose=None)


def test_engines_listen_where_the_host_expects_them() -> None:
    assert {name: family.port for name, family in FAMILIES.items() if name != "openai"} == PORTS
