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
arkady-emelyanov/vllm-sglang-demo docker-compose.yaml; ASUOpenClaw/llms docker-compose.models.yml;
kime541200/inference-engine-proxy-server docker-compose.llamacpp.yml; tankbottoms/inception-search-demo
vllm/docker-compose.yml; NVIDIA-AI-Blueprints/rag deploy/compose/nims.yaml; taoari/docker-compose
infinity/docker-compose.yml; mrzzy/slm-exploration docker-compose.trtllm.yml and docker-compose.lmdeploy.yml;
chnghia/solv-stack docker-compose.models.yml; JinwangMok/InferencePack docker-compose.sglang.yml;
dr-robert-li/dgx-toolbox docker-compose.inference.yml; volod/selfsuvis docker/docker-compose.vllm.yml;
pa4080/llm-lab-setup llama-cpp/docker-compose.yml; livepeer/example-apps vllm/docker-compose.yml;
adityakunapuli/sglang-3090-4070 sglang/docker-compose.yml; gaperton/cicero-home-ai vllm/docker-compose.yml.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli.main import main
from anvil_mux.command import Done
from anvil_mux.config import compose, interpolate
from anvil_mux.config.compose import laid_over
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError
from anvil_mux.importing.roles import weights_of
from anvil_mux.importing.suggested import Suggestion
from anvil_mux.plugins import load

RESERVED = (
    "deploy: {resources: {reservations: {devices: [{driver: nvidia, count: %s, capabilities: [gpu]}]}}}"
)
ONE, ALL = RESERVED % "1", RESERVED % "all"


def read(folder: Path, services: str, **environ: str) -> Suggestion:
    file = folder / "compose.yaml"
    file.write_text(f"services:\n{services}\n")
    return Suggestion([interpolate.read(file)], environ, [])


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


def notes(made: Suggestion, about: str) -> str:
    return "\n".join(note.text for note in made.written.notes if note.about == about)


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
    ("image: 'ghcr.io/ggml-org/llama.cpp:server', command: '-m /m/${NONE} -a ${NONE} -fa --port 8080'",
     "llamacpp", ("llamacpp", "a", "8080", "none")),
    ("image: 'ghcr.io/ggml-org/llama.cpp:server', command: '-m /models/model.gguf'", "llamacpp",
     ("llamacpp", "a", "8080", "none")),
    ("image: 'ghcr.io/ggml-org/llama.cpp:server', command: '-m /models/Q-00001-of-00003.gguf'", "llamacpp",
     ("llamacpp", "Q", "8080", "none")),
    ("image: nvcr.io/nvidia/tensorrt-llm/release, command: [trtllm-serve, org/m], ports: ['8000:8000']",
     "trtllm", ("trtllm", "org/m", "8000", "none")),
    ("image: 'openmmlab/lmdeploy:v0.9', command: [lmdeploy, serve, api_server, org/m]", "openai",
     ("openai", "org/m", "23333", "none")),
    ("image: 'nvcr.io/nim/meta/llama-3.1-8b-instruct:1.14', ports: ['8999:8000']", "openai",
     ("openai", "meta/llama-3.1-8b-instruct", "8000", "none")),
    ("image: vllm/vllm-openai, entrypoint: [bash, /start.sh], environment: {LLM_HOST: a/b, "
     "VLLM_MODEL: org/m, CHAT_MODEL: 'http://x/y'}", "vllm", ("vllm", "org/m", "8000", "none")),
    ('image: own/thing, entrypoint: [bash, -c, "set -e\\nvllm serve org/m --port 9"], expose: [9]', "vllm",
     ("vllm", "org/m", "9", "none")),
    ("build: ./none, command: --model org/m --gpu-memory-utilization 0.6, expose: ['8001']", "vllm",
     ("vllm", "org/m", "8001", "none")),
    ("image: '${NONE}', command: [--model, org/m, --mem-fraction-static=0.8]", "sglang",
     ("sglang", "org/m", "30000", "none")),
]  # fmt: skip


@pytest.mark.parametrize(("service", "engine", "expected"), ENGINES)
def test_an_engine_is_recognised_and_check_passes_with_what_is_suggested(tmp_path, service, engine, expected):
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
        ("image: ghcr.io/speaches-ai/speaches, entrypoint: [/bin/sh, -c, 'echo a && curl -X POST http://s/v1']",
         "its command only runs curl, echo"),
        ("image: vllm/vllm-openai, entrypoint: bash -c 'until curl x; do sleep 1; done; ray start --head'",
         "its command only runs curl, ray, sleep"),
        ("image: 'nvcr.io/nim/baidu/paddleocr:1.5.0'", "it does not have OpenAI's API"),
        ("image: '${NONE}'", "its image is a variable that is not set"),
        ("image: own/app, command: python3 app.py --gpu-memory-utilization 0.9", "is not a known engine"),
        ("build: .", "it is built from Dockerfile, which is not here, and its command names no engine"),
        ("image: 'vllm/vllm-openai', x-anvil: {}", "it has x-anvil already"),
        ('image: vllm/vllm-openai, command: "--model \'x"', "No closing quotation"),
    ],
)  # fmt: skip
def test_why_a_service_is_left_alone(tmp_path, service, why):
    made = read(tmp_path, f"  a: {{{service}}}")
    assert engines(made) == {}
    (row,) = made.rows
    assert why in row.why


def test_a_dockerfile_says_what_is_built(tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM alpine AS fetch\nFROM --platform=x vllm/vllm-openai:v1 AS b\nFROM b\n"
    )
    made = read(tmp_path, "  a: {build: ., command: [--model, org/m]}")
    assert made.written.services["a"]["x-anvil"] == {"model": "org/m", "engine": "vllm"}
    (backend,) = pasted(tmp_path, made).backends
    assert backend.engine == "vllm"


def test_an_ollama_is_named_after_what_is_pulled_into_it(tmp_path):
    pulls = "sleep 3; OLLAMA_HOST=o:11434 ollama pull llama3.2; ollama run moondream"
    made = read(tmp_path, f"  o: {{image: ollama/ollama}}\n  i: {{image: ollama/ollama, entrypoint: /bin/sh, "
                f"command: ['-c', '{pulls}']}}")  # fmt: skip
    assert engines(made) == {"o": ("ollama", "llama3.2", "11434", "none")}
    assert any("this Ollama has other models (moondream)" in note.text for note in made.written.notes)


def test_who_downloads_models_for_an_ollama_goes_on_asking_it(tmp_path):
    made = read(
        tmp_path,
        """  o: {image: ollama/ollama}
  pull: {image: ollama/ollama, entrypoint: [sh, -c, ollama pull qwen3], environment: ['OLLAMA_HOST=http://o:1'],
    depends_on: [o]}""",
    )
    assert made.written.services["o"]["profiles"] == ["llm"]
    assert made.written.services["pull"] == {"profiles": ["llm"]}, "Compose refuses to start it without o"
    assert "`docker compose run --rm pull` downloads the models" in notes(made, "profiles")
    assert "listen" not in made.written.settings
    pasted(tmp_path, made)


def test_a_profile_that_waits_for_others_is_for_whoever_downloads_too(tmp_path):
    made = read(
        tmp_path,
        """  o: {image: ollama/ollama}
  pull: {image: ollama/ollama, command: [pull, qwen3], depends_on: [o]}
  app: {image: x, depends_on: [o]}""",
    )
    assert "profiles" not in made.written.services["o"]
    assert "out of the depends_on of app," in notes(made, "depends_on")
    assert notes(made, "depends_on").endswith("add profiles: [llm] here and to pull")


def test_a_model_may_still_be_asked_for_by_its_path(tmp_path):
    made = read(tmp_path, "  a: {image: lmsysorg/sglang, command: --model-path /models/Exa-32B --port 30000}")
    (backend,) = pasted(tmp_path, made).backends
    assert (backend.model, backend.aliases, backend.served_model) == (
        "Exa-32B",
        ("/models/Exa-32B",),
        "/models/Exa-32B",
    )


@pytest.mark.parametrize(
    ("service", "note"),
    [
        ("image: michaelf34/infinity, command: v2 --model-id a/b --model-id c/d",
         "this server has other models (c/d), which are not served"),
        ("image: 'ghcr.io/ggml-org/llama.cpp:server', command: --models-preset /router.ini --port 8080",
         "write the name of one of the models that this llama-server has"),
    ],
)  # fmt: skip
def test_of_several_models_one_is_served(tmp_path, service, note):
    assert note in notes(read(tmp_path, f"  a: {{{service}}}"), "model")


def test_it_asks_which_of_several_ports_it_is(tmp_path):
    nim = "image: nvcr.io/nim/nvidia/riva-asr, ports: ['8021:50051', '8022:9000']"
    assert "it has several (50051, 9000)" in notes(read(tmp_path, f"  a: {{{nim}}}"), "port")
    vllm = "image: vllm/vllm-openai, ports: ['8000:8000', '8265:8265']"
    assert notes(read(tmp_path, f"  a: {{{vllm}}}"), "port") == ""


def test_of_two_profiles_with_one_port_the_one_with_the_gpu_is_taken(tmp_path):
    made = read(
        tmp_path,
        f"""  cpu: {{image: ollama/ollama, profiles: [cpu], ports: ['11434:11434']}}
  gpu: {{image: ollama/ollama, profiles: [gpu], ports: ['11434:11434'], {ONE}}}""",
    )
    assert [*engines(made)] == ["gpu"]
    assert "uses a port of gpu" in made.rows[1].why
    pasted(tmp_path, made)


def test_engines_on_one_gpu_may_have_one_port(tmp_path):
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
def test_who_asks_an_engine_is_pointed_at_anvil_mux(tmp_path, client, environment):
    engine = (
        "{image: vllm/vllm-openai, container_name: vllm-1, command: [--model, org/m], ports: ['8000:8000']}"
    )
    made = read(tmp_path, f"  chat: {engine}\n  ui: {{{client}, depends_on: [chat]}}")
    assert made.written.services["ui"]["environment"] == environment
    assert made.written.settings["listen"] == "172.17.0.1:9292"
    config = pasted(tmp_path, made)
    assert (config.host, [backend.model for backend in config.backends]) == ("172.17.0.1", ["org/m"])
    assert "profiles" not in made.written.services["chat"], "Compose refuses to start who depends on it then"


def test_an_open_webui_without_a_word_on_engines_becomes_a_client(tmp_path):
    made = read(
        tmp_path,
        """  chat: {image: vllm/vllm-openai, command: [--model, org/m]}
  ui: {image: 'ghcr.io/open-webui/open-webui:ollama'}""",
    )
    assert [row.why for row in made.rows if row.service == "ui"] == ["Open WebUI: a client of anvil-mux now"]
    assert "an Ollama of its own" in notes(made, "image")
    assert notes(made, "environment") == "", "no variable of it names an Ollama that needs a key"


def test_a_command_that_names_an_engine_is_noted(tmp_path):
    made = read(
        tmp_path,
        """  chat: {image: vllm/vllm-openai, command: [--model, org/m]}
  run: {image: x, command: [run.py, '--url=http://chat:8000', '--other=http://else:1']}""",
    )
    assert "mentions chat in a way that is not converted" in notes(made, "services.run.command")


def test_who_asks_others_is_left_alone(tmp_path):
    made = read(
        tmp_path, "  a: {image: ollama/ollama}\n  b: {image: x, environment: {A: 'http://localhost:5432'}}"
    )
    assert [*made.written.services] == ["a"]
    assert "listen" not in made.written.settings


def test_another_api_of_a_server_is_left_alone_and_noted(tmp_path):
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


def test_a_policy_of_restarts_is_taken_back(tmp_path):
    made = read(
        tmp_path, "  a: {image: ollama/ollama, restart: always}\n  b: {image: redis, restart: always}"
    )
    assert made.written.services["a"]["restart"] == "no"
    assert "b" not in made.written.services
    assert not any("`restart" in warning for warning in pasted(tmp_path, made).warnings)


def test_what_is_not_known_is_a_note_and_no_error(tmp_path):
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


def test_a_variable_that_must_be_set_hides_nothing_but_itself(tmp_path):
    made = read(
        tmp_path,
        """  a: {image: vllm/vllm-openai, command: '--port 81 --api-key ${KEY:?say} --served-model-name m',
    deploy: {resources: {reservations: {devices: [{device_ids: ['${GPU:?}'], capabilities: [gpu]}]}}}}""",
    )
    assert engines(made) == {"a": ("vllm", "m", "81", "?")}
    assert "the variable KEY must be set: say" in [note.text for note in made.written.notes]


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            f"{key}: 1"
            for key in ("command", "entrypoint", "profiles", "depends_on", "devices", "gpus", "ports")
        ),
        RESERVED % "'${NONE}'",
    ],
)
def test_what_compose_would_refuse_is_no_crash(tmp_path, wrong):
    made = read(
        tmp_path,
        f"""  a: {{image: x, {wrong}}}
  b: {{image: vllm/vllm-openai, {wrong}}}
  c: {{image: vllm/vllm-openai, command: [--model, org/m]}}""",
    )
    assert engines(made)["c"] == ("vllm", "org/m", "8000", "none")
    assert [row.service for row in made.rows if row.service != "c"] in (["b", "a"], ["a", "b"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("org/m-7B --gpu-memory-utilization 0.5", "takes 0.5 of each GPU"),
        ("--model org/m-7B", "add --gpu-memory-utilization to its command"),
        ("serve org/m-7B --served-model-name chat", "the weights take about 13.0 GiB"),
    ],
)
def test_what_to_write_for_an_engine_that_takes_a_share_of_the_gpu(tmp_path, command, said):
    hint = notes(read(tmp_path, f"  a: {{image: vllm/vllm-openai, command: {command}}}"), "vram")
    assert said in hint
    assert hint.endswith("as its vram, such as x-anvil: {vram: 12GiB}")


@pytest.mark.parametrize(
    ("name", "engine", "more", "gib"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "vllm", "", 14.9),
        ("Qwen/Qwen3-8B-AWQ", "vllm", "", 4.2),
        ("x/m-7b", "vllm", "fp8", 6.9),
        ("Qwen3-0.6B-UD-Q4_K_XL", "llamacpp", "", 0.3),
        ("mixtral-8x7b-Q8_0", "llamacpp", "", 55.4),
        ("llama3.2:3b", "ollama", "", 1.7),
        ("openai/gpt-oss-20b", "vllm", "", 10.5),
        ("x/gpt-oss-20b-BF16", "vllm", "", 37.3),
        ("org/Llama-3.3-70B-Instruct-GGUF", "vllm", "", 39.1),
        ("org/model", "vllm", "", None),
        ("phi3-mini-128k", "vllm", "", None),
    ],
)
def test_how_large_weights_are_by_their_name(name, engine, more, gib):
    found = weights_of(name, engine, more)
    assert (found and round(found, 1)) == gib


def test_the_command_prints_the_yaml_and_says_the_rest_beside_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker
    file = tmp_path / "compose.yaml"
    file.write_text(f"services:\n  a: {{image: ollama/ollama, {ALL}}}\n  db: {{image: redis}}\n")
    assert main(["check", "--suggest", str(file)]) == 0
    seen = capsys.readouterr()
    assert yaml.safe_load(seen.out)["services"]["a"]["x-anvil"] == {"model": "a"}
    assert "image redis is not a known engine" in seen.err
    assert "1 model; with this added, check has 0 problems" in seen.err
    assert main(["check", "--suggest", "--json", str(file)]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(row["service"], row["what"], row["where"]) for row in told["services"]] == [
        ("a", "ollama", f"{file}:2"),
        ("db", "", f"{file}:3"),
    ]
    assert told["problems"] == []


def test_its_own_recipe_works_for_processes(tmp_path, capsys):
    file, second = tmp_path / "compose.yaml", tmp_path / "second.yaml"
    file.write_text(
        "x-anvil: {runtime: process}\nservices: {a: {command: llama-server -m /m/a.gguf --port 80}}"
    )
    assert main(["check", "--suggest", str(file)]) == 0
    second.write_text(capsys.readouterr().out)
    (a,) = load([file, second], environ={}, compose=None).backends
    assert (a.model, a.service.command[-1]) == ("a", "80")


@pytest.mark.parametrize(
    ("top", "more", "gpus_here", "shown"),
    [
        ("runtime: process", "", ["0", "1"], "all"),
        ('runtime: process, gpus: ["0"]', "", [], "all"),
        ("runtime: process", "", [], "none"),
        ("runtime: process", ', environment: {CUDA_VISIBLE_DEVICES: ""}', ["0"], "none"),
        ("runtime: process", ', environment: {CUDA_VISIBLE_DEVICES: "1"}', ["0", "1"], "1"),
        ("policy: eager", "", ["0"], "none"),
    ],
)
def test_a_process_that_says_nothing_of_gpus_has_all_of_them(tmp_path, top, more, gpus_here, shown):
    text = f"x-anvil: {{{top}}}\nservices: {{a: {{command: llama-server -m /m/a.gguf --port 80{more}}}}}"
    (tmp_path / "compose.yaml").write_text(text)
    (row,) = Suggestion([interpolate.read(tmp_path / "compose.yaml")], {}, gpus_here).rows
    assert row.gpus == shown


def test_the_command_tells_what_compose_would_refuse_in_the_file(tmp_path, capsys, monkeypatch):
    file = tmp_path / "compose.yaml"
    file.write_text("services:\n  a: {image: ollama/ollama}\n")
    asked: list[list[str]] = []

    def answer(argv: list[str], environ: object) -> Done:
        asked.append([word for word in argv if word.endswith("yaml")])
        return Done(1, "", "services.a.image is bad\n")

    monkeypatch.setattr(compose, "run_compose", answer)
    assert main(["check", "--suggest", str(file)]) == 0
    assert [[Path(each).name for each in files] for files in asked] == [
        ["compose.yaml", "compose.anvil.yaml"]
    ]
    said = capsys.readouterr().err
    assert f"error: {file} and compose.anvil.yaml: docker compose config: services.a.image is bad" in said
    assert "with this added, check has 1 problem" in said


def test_the_command_tells_what_to_write_against_the_problems_that_are_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker
    file = tmp_path / "compose.yaml"
    file.write_text("services:\n  a: {image: ollama/ollama, devices: 1}\n")
    assert main(["check", "--suggest", str(file)]) == 0
    said = capsys.readouterr().err
    assert "error: services.a: devices must be a list\n    write: devices: [1]\n" in said


def test_the_command_fails_where_nothing_serves_models(tmp_path, capsys):
    file = tmp_path / "compose.yaml"
    file.write_text("services: {db: {image: '${DB_OF_NOBODY}'}}\n")
    assert main(["check", "--suggest", str(file)]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "DB_OF_NOBODY: the variable is not set" in seen.err
    assert "no service looks like an engine" in seen.err


def test_without_it_check_still_refuses_such_a_file(tmp_path):
    read(tmp_path, "  a: {image: ollama/ollama}")
    with pytest.raises(ConfigError, match="none serves a model"):
        load([tmp_path / "compose.yaml"], environ={}, compose=None)
