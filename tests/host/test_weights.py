"""The weights that an engine will read are found by what its service says, and nothing else is."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service, mounts_of_process
from anvil_mux.host.weights import weights_of

Mounts = tuple[tuple[str, str], ...]


def put(folder: Path, *names: str, text: str = "w") -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def found(
    folder: Path,
    command: Sequence[str],
    mounts: Mounts = (),
    *,
    environment: tuple[tuple[str, str], ...] = (),
    engine: str = "openai",
    mounted: Mounts = (),
) -> list[str]:
    """The names of the files below ``folder`` that a service reads, which has that mounted as /m."""
    mounts = mounts or (("/m", str(folder)),)
    service = Service(command=tuple(command), mounts=mounts, environment=environment)
    backend = Backend("a", "a", engine=engine, served_model="chat", service=service)
    return [str(each.relative_to(folder.resolve())) for each in weights_of(backend, mounted)]


def test_a_gguf_file_with_all_its_parts_and_what_goes_with_it(tmp_path):
    parts = [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    put(tmp_path, *parts, "eyes.gguf", "one.gguf", "two.gguf", "other.gguf")
    command = ["llama-server", "-m", f"/m/{parts[0]}", "--mmproj=/m/eyes.gguf"]
    assert found(tmp_path, [*command, "--lora", "/m/one.gguf,/m/two.gguf"]) == [
        *parts,
        "eyes.gguf",
        "one.gguf",
        "two.gguf",
    ]


def test_a_script_and_a_variable_name_files_too(tmp_path):
    put(tmp_path, "a.gguf", "b.gguf")
    script = ["sh", "-c", "exec llama-server -m '/m/a.gguf' --port $PORT"]
    assert found(tmp_path, script, environment=(("LLAMA_ARG_MODEL", "/m/b.gguf"),)) == ["a.gguf", "b.gguf"]
    assert found(tmp_path, ["sh", "-c", "it's -m /m/a.gguf"]) == []


def test_the_folder_of_a_model_has_what_its_index_lists(tmp_path):
    put(tmp_path, "llm/config.json", "llm/model-1.safetensors", "llm/model-2.safetensors", "llm/x.bin")
    serve = ["vllm", "serve", "/m/llm"]
    assert found(tmp_path, serve) == ["llm/model-1.safetensors", "llm/model-2.safetensors"]
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-2.safetensors", "c": "../away"}}
    put(tmp_path, "llm/model.safetensors.index.json", text=json.dumps(index))
    assert found(tmp_path, serve) == ["llm/model-2.safetensors"]


def test_weights_that_are_there_twice_are_read_once_and_a_folder_of_many_models_is_no_model(tmp_path):
    put(tmp_path, "llm/config.json", "llm/consolidated.safetensors", "llm/model.safetensors", "a.gguf")
    assert found(tmp_path, ["--model=/m/llm"]) == ["llm/model.safetensors"]
    assert found(tmp_path, ["llama-server", "--models-dir", "/m"]) == []


def repository(hub: Path, name: str, *files: str, revision: str = "main", commit: str = "abc") -> None:
    """A repository in the cache of Hugging Face, whose files are links to blobs."""
    folder = hub / f"models--{name.replace('/', '--')}"
    put(folder, f"refs/{revision}", text=f"{commit}\n")
    for number, file in enumerate(files):
        put(folder, f"blobs/{commit}{number}")
        link = folder / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../blobs/{commit}{number}")


@pytest.mark.parametrize("below", ["", "hub", "huggingface/hub"])
def test_a_repository_is_found_in_a_mounted_cache(tmp_path, below):
    repository(tmp_path / below, "org/llm", "config.json", "model.safetensors")
    repository(tmp_path / below, "org/other", "config.json", "model.safetensors")
    blob = str(Path(below, "models--org--llm/blobs/abc1"))
    assert found(tmp_path, ["vllm", "serve", "org/llm", "--port", "8000"]) == [blob]
    assert found(tmp_path, ["--model", "org/none"]) == []


def test_the_revision_that_is_asked_for(tmp_path):
    repository(tmp_path, "org/llm", "config.json", "model.safetensors")
    repository(tmp_path, "org/llm", "config.json", "model.safetensors", revision="v2", commit="def")
    assert found(tmp_path, ["--model", "org/llm", "--revision", "v2"]) == ["models--org--llm/blobs/def1"]
    assert found(tmp_path, ["--model", "org/llm", "--revision=abc"]) == ["models--org--llm/blobs/abc1"]


def test_variables_say_where_the_cache_is(tmp_path):
    repository(tmp_path / "x" / "hub", "org/llm", "config.json", "model.safetensors")
    blob = ["x/hub/models--org--llm/blobs/abc1"]
    command = ["--model", "org/llm"]
    assert found(tmp_path, command) == []
    assert found(tmp_path, command, environment=(("HF_HOME", "/m/x"),)) == blob
    assert found(tmp_path, command, environment=(("HF_HUB_CACHE", "/m/x/hub"),)) == blob
    assert found(tmp_path, command, environment=(("HF_HOME", "/elsewhere/x"),)) == []


def test_a_quantization_of_a_repository(tmp_path):
    repository(tmp_path, "org/llm", "llm-Q4_K_M.gguf", "llm-Q8_0.gguf")
    assert found(tmp_path, ["-hf", "org/llm"]) == ["models--org--llm/blobs/abc0"]
    assert found(tmp_path, ["-hf", "org/llm:q8_0"]) == ["models--org--llm/blobs/abc1"]


def test_the_cache_of_llama_cpp(tmp_path):
    put(tmp_path, "llama.cpp/org_llm_llm-Q4_K_M.gguf", "llama.cpp/org_llm_llm-Q8_0.gguf")
    assert found(tmp_path, ["-hf", "org/llm:Q8_0"]) == ["llama.cpp/org_llm_llm-Q8_0.gguf"]


@pytest.mark.parametrize("below", ["", "models"])
def test_the_manifest_of_a_model_in_the_store_of_ollama(tmp_path, below):
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:1"},
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:2"},
        {"mediaType": "application/vnd.ollama.image.projector", "digest": "sha256:3"},
    ]
    store = tmp_path / below
    name = store / "manifests/registry.ollama.ai/library/chat/latest"
    put(name.parent, name.name, text=json.dumps({"layers": layers}))
    put(store / "blobs", "sha256-1", "sha256-2", "sha256-3")
    wanted = [str(Path(below, "blobs", each)) for each in ("sha256-1", "sha256-3")]
    assert found(tmp_path, ["ollama", "serve"], engine="ollama") == wanted
    assert found(tmp_path, ["ollama", "serve"]) == []


def test_the_names_of_ollama(tmp_path):
    layers = {"layers": [{"mediaType": "x.model", "digest": "sha256:1"}]}
    put(tmp_path, "blobs/sha256-1")
    for place in ("registry.ollama.ai/me/chat/7b", "hf.co/org/chat/q8"):
        put(tmp_path / "manifests", place, text=json.dumps(layers))
    for model, has in (("me/chat:7b", True), ("hf.co/org/chat:q8", True), ("chat:7b", False)):
        service = Service(mounts=(("/root/.ollama/models", str(tmp_path)),))
        backend = Backend("a", "a", engine="ollama", served_model=model, service=service)
        assert bool(weights_of(backend)) == has, model


def test_a_link_out_of_what_is_mounted_is_not_followed(tmp_path):
    put(tmp_path, "in/real.gguf", "out/secret.gguf")
    (tmp_path / "in" / "near.gguf").symlink_to("real.gguf")
    (tmp_path / "in" / "far.gguf").symlink_to("../out/secret.gguf")
    inside = (("/m", str(tmp_path / "in")),)
    assert found(tmp_path, ["-m", "/m/far.gguf"], inside) == []
    assert found(tmp_path, ["-m", "/m/../out/secret.gguf"], inside) == []
    assert found(tmp_path, ["-m", "/m/near.gguf"], inside) == ["in/real.gguf"]


def test_a_volume_is_where_the_container_has_it(tmp_path):
    put(tmp_path, "a.gguf")
    volume = (("/m", ""),)
    assert found(tmp_path, ["-m", "/m/a.gguf"], volume) == []
    assert found(tmp_path, ["-m", "/m/a.gguf"], volume, mounted=(("/m", str(tmp_path)),)) == ["a.gguf"]


def test_a_process_names_paths_of_this_machine(tmp_path):
    put(tmp_path, "a.gguf", "b.gguf")
    words = ["llama-server", "-m", "a.gguf", "-md", str(tmp_path / "b.gguf")]
    assert found(tmp_path, words, mounts_of_process(str(tmp_path))) == ["a.gguf", "b.gguf"]


def test_what_is_no_file_is_left_out(tmp_path):
    (tmp_path / "a.gguf").mkdir()
    assert found(tmp_path, ["-m", "/m/a.gguf", "/m/gone.gguf", "/m/" + "x" * 5000 + ".gguf", "\0.gguf"]) == []


@pytest.mark.parametrize("commit", ["/", "../../..", "pipe"])
def test_what_an_engine_may_have_put_into_its_cache_leads_nowhere_and_keeps_nobody_waiting(tmp_path, commit):
    repository = tmp_path / "hub" / "models--Org--Model"
    put(tmp_path, "other.gguf")
    put(repository, "refs/x", "snapshots/main/model-Q4_K_M.gguf")
    (repository / "refs" / "x").unlink()
    if commit == "pipe":
        os.mkfifo(repository / "refs" / "main")
    else:
        (repository / "refs" / "main").write_text(commit)
    named = found(tmp_path, ["llama-server", "-hf", "Org/Model"])
    assert named == ["hub/models--Org--Model/snapshots/main/model-Q4_K_M.gguf"]
