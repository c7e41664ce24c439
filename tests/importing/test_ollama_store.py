"""A store of Ollama's, as Ollama lays it out, and the compose file that comes of it."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Written
from anvil_mux.importing.ollama_store import CONTEXT, Wanted, translate
from anvil_mux.plugins import load

KIND = "application/vnd.ollama.image."
GGUF = b"GGUF\x03\x00\x00\x00 weights of "


class Store:
    """Writes blobs and manifests as `ollama pull` does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def blob(self, content: bytes) -> dict[str, Any]:
        digest = sha256(content).hexdigest()
        path = self.folder / "blobs" / f"sha256-{digest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def add(self, name: str, layers: dict[str, bytes], **config: Any) -> Path:
        """A model; ``name``: HOST/NAMESPACE/MODEL/TAG."""
        manifest = self.folder / "manifests" / name
        manifest.parent.mkdir(parents=True, exist_ok=True)
        said = json.dumps({"model_format": "gguf", "model_family": "llama", **config}).encode()
        container = "application/vnd.docker.container.image.v1+json"
        content = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": container, **self.blob(said)},
            "layers": [{"mediaType": KIND + kind, **self.blob(text)} for kind, text in layers.items()],
        }
        manifest.write_text(json.dumps(content))
        return manifest


LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def made(store: Store, *wanted: Any) -> Written:
    return translate(store.folder, Wanted(*wanted))


def checked(store: Store, *wanted: Any) -> Config:
    file = store.folder.parent / "compose.yaml"
    file.write_text(made(store, *wanted).text())
    return load([file], environ={}, compose=None)


def words_of(store: Store, model: str) -> tuple[str, ...]:
    return next(backend for backend in checked(store).backends if backend.model == model).service.command


def path_of(store: Store, content: bytes) -> str:
    return str(store.folder / "blobs" / f"sha256-{sha256(content).hexdigest()}")


def test_a_model_becomes_a_llama_server_of_its_weights(store):
    store.add(f"{LIBRARY}/qwen3/8b", {"model": GGUF + b"q", "license": b"Apache"})
    [backend] = checked(store).backends
    assert backend.service.command == (
        *("llama-server", "-m", path_of(store, GGUF + b"q"), "--alias", "qwen3:8b", "-c", str(CONTEXT)),
        *("--host", "$HOST", "--port", "$PORT"),
    )
    assert (backend.name, backend.model, backend.engine, backend.gpus) == (
        "qwen3-8b",
        "qwen3:8b",
        "llamacpp",
        ("0",),
    )


@pytest.mark.parametrize(
    ("manifest", "model", "aliases"),
    [
        (f"{LIBRARY}/llama3.2/latest", "llama3.2", ("llama3.2:latest",)),
        (f"{LIBRARY}/qwen3/8b", "qwen3:8b", ()),
        ("registry.ollama.ai/someone/tuned/v1", "someone/tuned:v1", ()),
        ("hf.co/bartowski/X-GGUF/Q4_K_M", "hf.co/bartowski/X-GGUF:Q4_K_M", ()),
    ],
)
def test_a_model_is_called_as_ollama_calls_it(store, manifest, model, aliases):
    store.add(manifest, {"model": GGUF})
    [backend] = checked(store).backends
    assert (backend.model, backend.aliases) == (model, aliases)


def test_tags_of_the_same_layers_are_names_of_one_model(store):
    for tag in ("8b", "latest"):
        store.add(f"{LIBRARY}/qwen3/{tag}", {"model": GGUF})
    store.add(f"{LIBRARY}/qwen3/4b", {"model": GGUF + b"4"})
    found = {backend.model: backend.aliases for backend in checked(store).backends}
    assert found == {"qwen3:4b": (), "qwen3:8b": ("qwen3", "qwen3:latest")}


def test_parameters_become_defaults_of_the_engine(store):
    params = json.dumps({"num_ctx": 8192, "temperature": 0.6, "stop": ["<|im_end|>"]}).encode()
    store.add(f"{LIBRARY}/q/1", {"model": GGUF, "params": params, "template": b"T", "system": b"S"})
    assert words_of(store, "q:1")[5:9] == ("-c", "8192", "--temp", "0.6")
    assert [note.about for note in made(store).notes] == ["template", "system", "params.stop"]
    assert '  # params.stop: ["<|im_end|>"] is left out' in made(store).text()


def test_projectors_adapters_and_embeddings(store):
    layers = {"model": GGUF, "projector": GGUF + b"p", "adapter": GGUF + b"a"}
    store.add(f"{LIBRARY}/see/1", layers)
    store.add(f"{LIBRARY}/nomic-embed-text/latest", {"model": GGUF + b"e"}, model_family="nomic-bert")
    seeing = words_of(store, "see:1")
    assert seeing[seeing.index("--mmproj") + 1] == path_of(store, GGUF + b"p")
    assert seeing[seeing.index("--lora") + 1] == path_of(store, GGUF + b"a")
    assert "--embeddings" in words_of(store, "nomic-embed-text")
    assert "--embeddings" not in seeing


def test_ollama_may_stay_the_engine(store):
    store.add(f"{LIBRARY}/odd/latest", {"tensor": b"no gguf"})
    [backend] = checked(store, True, "/opt/ollama").backends
    script = "OLLAMA_HOST=$HOST:$PORT exec /opt/ollama serve"
    assert backend.service.command == ("sh", "-c", script)
    assert dict(backend.service.environment)["OLLAMA_MODELS"] == str(store.folder)
    assert (backend.engine, backend.served_model, backend.model) == ("ollama", "odd:latest", "odd")
    assert backend.evict_to == ("sleep", "stop")


def test_services_may_be_containers(store):
    store.add(f"{LIBRARY}/q/1", {"model": GGUF})
    wanted = (False, "llama-server", "ghcr.io/ggml-org/llama.cpp:server-cuda", ["0", "1"])
    service = made(store, *wanted).services["q-1"]
    blob = Path(path_of(store, GGUF)).name
    assert service["entrypoint"] == ["llama-server"]
    assert service["command"][:2] == ["-m", f"/blobs/{blob}"]
    assert service["volumes"] == [f"{store.folder}/blobs:/blobs:ro"]
    [backend] = checked(store, *wanted).backends
    assert (backend.port, backend.gpus, backend.engine) == (8080, ("0", "1"), "llamacpp")
    assert made(store, True, "", "ollama/ollama").services["q-1"]["volumes"] == [
        f"{store.folder}:/root/.ollama/models"
    ]


def test_what_cannot_be_served_is_a_note(store):
    store.add(f"{LIBRARY}/good/1", {"model": GGUF})
    store.add(f"{LIBRARY}/odd/1", {"model": b"safetensors"})
    store.add(f"{LIBRARY}/cloud/1", {}, remote_host="https://ollama.com:443")
    store.add(f"{LIBRARY}/gone/1", {"model": GGUF + b"gone"})
    Path(path_of(store, GGUF + b"gone")).unlink()
    manifest = store.add(f"{LIBRARY}/torn/1", {"model": GGUF})
    manifest.write_text(manifest.read_text()[:40])
    found = made(store)
    assert [*found.services] == ["good-1"]
    assert {note.about: note.text for note in found.notes} == {
        "odd:1": "is left out: its weights are no GGUF file; --engine ollama takes it as it is.",
        "cloud:1": "is left out: it runs at https://ollama.com:443, and has no weights here.",
        "gone:1": f"is left out: {path_of(store, GGUF + b'gone')} is missing.",
        "torn:1": "is left out: its manifest cannot be read.",
    }
    assert "# odd:1: is left out" in found.text()


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "md5:00", "sha256:abc"])
def test_a_digest_leads_nowhere_but_to_the_blobs(store, digest):
    manifest = store.add(f"{LIBRARY}/q/1", {"model": GGUF})
    said = json.loads(manifest.read_text())
    said["layers"][0]["digest"] = digest
    manifest.write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="a layer has no digest of SHA-256"):
        made(store)


@pytest.mark.parametrize("content", ["[]", "{}", '{"layers": [1], "config": {}}', "null", ""])
def test_a_manifest_that_is_none_is_told(store, content):
    manifest = store.add(f"{LIBRARY}/q/1", {"model": GGUF})
    manifest.write_text(content)
    with pytest.raises(ConfigError, match="its manifest cannot be read"):
        made(store)


def test_a_folder_that_is_no_store_is_told(tmp_path):
    with pytest.raises(ConfigError, match="is no store of Ollama's"):
        translate(tmp_path, Wanted())
    (tmp_path / "manifests").mkdir()
    with pytest.raises(ConfigError, match="has no models"):
        translate(tmp_path, Wanted())


def test_the_command_finds_the_store(store, capsys, monkeypatch):
    store.add(f"{LIBRARY}/q/1", {"model": GGUF, "system": b"S"})
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    assert main(["import", "ollama"]) == 0
    printed = capsys.readouterr()
    assert "model: 'q:1'" in printed.out
    assert "manifests/registry.ollama.ai/library/q/1: is left out: clients say" in printed.err
    assert main(["import", "ollama", str(store.folder), "--engine", "ollama"]) == 0
    assert "engine: ollama" in capsys.readouterr().out
