"""The store of Ollama (``~/.ollama/models``) -> a compose file: a llama-server, or an Ollama, for each model.

A manifest (``manifests/HOST/NAMESPACE/MODEL/TAG``) lists layers, each with its kind and the digest by which
``blobs/`` has it: the weights as a GGUF file, parameters, a template, ... Names whose layers are the same are
names of one model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux import state
from anvil_mux.config.compose import escaped
from anvil_mux.config.service import USUAL_PORTS
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Note, Written
from anvil_mux.protocol import foreign

NAME = "from-ollama"
ORIGIN = "Made by `anvil-mux import ollama` of {}; docs/migrating.md says more."
REGISTRY = ("registry.ollama.ai", "library")
KIND = "application/vnd.ollama.image."
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
CONTEXT = 4096
"""The context in tokens that Ollama gives a model which says nothing of it."""
EMBEDDING = ("bert", "nomic-bert", "nomic-bert-moe", "gemma-embedding")
"""Families of models that only make embeddings."""
FLAGS = {
    "num_ctx": "-c",
    "num_predict": "-n",
    "num_gpu": "-ngl",
    "num_thread": "-t",
    "num_batch": "-b",
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "typical_p": "--typical",
    "repeat_penalty": "--repeat-penalty",
    "repeat_last_n": "--repeat-last-n",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "seed": "--seed",
}
"""A parameter of Ollama's -> the flag by which llama-server has it as its default."""
LEFT_OUT = {
    "template": "is left out: llama-server takes the template in the file of the weights.",
    "system": "is left out: clients say what their system message is.",
    "messages": "is left out: clients say what was said before.",
}
"""The kinds of layers that a llama-server is not given."""


class Wanted(NamedTuple):
    """The kind of services that is to be written."""

    ollama: bool = False
    """Whether Ollama is the engine, and not llama-server."""
    program: str = ""
    """The program; empty: the one that is found by its name, or that the image starts."""
    image: str = ""
    """The image of containers; empty: local processes."""
    gpus: Sequence[str] = ()
    """The GPUs of this machine."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One model of the store."""

    names: tuple[str, ...]
    manifest: Path
    layers: tuple[tuple[str, Path], ...]
    """Kind -> the file of each layer."""
    config: Mapping[str, Any]

    def files(self, kind: str) -> list[Path]:
        return [path for each, path in self.layers if each == kind]


def translate(store: Path, wanted: Wanted) -> Written:
    """Return a compose file for the models of ``store``; ConfigError where it is none."""
    made = Written(NAME, ORIGIN.format(store))
    if not wanted.image:
        made.settings["runtime"] = "process"
    made.settings["gpus"] = [*(wanted.gpus or ["0"])]
    if not (store / "manifests").is_dir():
        raise ConfigError([f"{store}: is no store of Ollama's: it has no folder `manifests`"])
    for model in _models(store, made.notes):
        _ModelWriter(made, store, model, wanted).write()
    return made.checked(f"{store}: has no models")


# The store


def _models(store: Path, notes: list[Note]) -> Iterator[Stored]:
    """The models, each once; what cannot be read is noted."""
    found: dict[tuple[tuple[str, Path], ...], Stored] = {}
    for manifest in sorted((store / "manifests").rglob("*")):
        if not manifest.is_file():
            continue
        name = _name(manifest.relative_to(store / "manifests").parts)
        try:
            model = _read(store, manifest, name)
        except ValueError as error:
            notes.append(Note(str(manifest), name, f"is left out: {error}."))
            continue
        had = found.get(model.layers)
        names = (*had.names, *model.names) if had else model.names
        found[model.layers] = Stored(names, model.manifest, model.layers, model.config)
    yield from found.values()


def _name(parts: Sequence[str]) -> str:
    *place, tag = parts
    *origin, model = place or [""]
    shown = [*origin, model]
    if tuple(origin) == REGISTRY:
        shown = [model]
    elif origin[:1] == [REGISTRY[0]]:
        shown = [*origin[1:], model]
    return f"{'/'.join(shown)}:{tag}"


def _read(store: Path, manifest: Path, name: str) -> Stored:
    try:
        said = foreign.read(state.read_text(manifest))
        layers = tuple((each["mediaType"].removeprefix(KIND), _blob(store, each)) for each in said["layers"])
        config = foreign.read(state.read_text(_blob(store, said["config"])))
    except (OSError, UnicodeDecodeError, KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise ValueError("its manifest cannot be read") from None
    if not isinstance(config, dict):
        raise ValueError("its configuration cannot be read")
    if remote := config.get("remote_host"):
        raise ValueError(f"it runs at {remote}, and has no weights here")
    return Stored((name,), manifest, layers, config)


def _blob(store: Path, layer: Mapping[str, Any]) -> Path:
    found = DIGEST.fullmatch(layer["digest"])
    if found is None:
        raise ValueError(f"a layer has no digest of SHA-256: {layer['digest']}")
    path = store / "blobs" / f"sha256-{found[1]}"
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return path


# Services


class _ModelWriter:
    """Writes the service of one model."""

    def __init__(self, made: Written, store: Path, model: Stored, wanted: Wanted) -> None:
        self._made = made
        self._store = store.absolute()
        self._model = model
        self._wanted = wanted
        names = [each for name in model.names for each in dict.fromkeys((name.removesuffix(":latest"), name))]
        self._id, *self._aliases = names
        self._service = made.free_name(self._id)

    def write(self) -> None:
        service: dict[str, Any] = {}
        settings: dict[str, Any] = {"model": self._id} if self._id != self._service else {}
        if self._aliases:
            settings["aliases"] = self._aliases
        if self._wanted.ollama:
            settings |= {"engine": "ollama", "served_model": self._model.names[0]}
            service = self._ollama_container() if self._wanted.image else self._ollama()
        elif words := self._words():
            service = self._container(words) if self._wanted.image else self._process(words)
        if service:
            self._made.services[self._service] = {**service, "x-anvil": {**settings, "gpus": "all"}}

    def _note(self, about: str, text: str) -> None:
        self._made.notes.append(Note(str(self._model.manifest), about, text, self._service))

    def _words(self) -> list[str]:
        """The words of a llama-server; none where it cannot load the model."""
        weights = self._model.files("model")
        if not weights or not all(map(_is_gguf, weights)):
            self._note(
                self._id, "is left out: its weights are no GGUF file; --engine ollama takes it as it is."
            )
            return []
        words = ["-m", self._path(weights[0]), "--alias", self._id]
        for kind, flag in (("projector", "--mmproj"), ("adapter", "--lora")):
            for path in self._model.files(kind):
                words += [flag, self._path(path)]
        if self._model.config.get("model_family") in EMBEDDING:
            words.append("--embeddings")
        for kind, text in LEFT_OUT.items():
            if self._model.files(kind):
                self._note(kind, text)
        return words + self._parameters()

    def _parameters(self) -> list[str]:
        said: dict[str, Any] = {}
        for path in self._model.files("params"):
            try:
                said |= foreign.read(state.read_text(path))
            except (ValueError, TypeError):
                self._note("params", f"are left out: {path} cannot be read.")
        said.setdefault("num_ctx", CONTEXT)
        words: list[str] = []
        for name, value in said.items():
            if name in FLAGS:
                words += [FLAGS[name], str(value)]
            else:
                self._note(
                    f"params.{name}", f"{json.dumps(value)} is left out: llama-server has no such default."
                )
        return words

    def _path(self, blob: Path) -> str:
        """The path of a blob as the engine sees it."""
        return escaped(f"/blobs/{blob.name}" if self._wanted.image else str(blob.absolute()))

    # Processes

    def _process(self, words: list[str]) -> dict[str, Any]:
        program = escaped(self._wanted.program or "llama-server")
        return {"command": [program, *words, "--host", "$$HOST", "--port", "$$PORT"]}

    def _ollama(self) -> dict[str, Any]:
        program = escaped(self._wanted.program or "ollama")
        script = f"OLLAMA_HOST=$$HOST:$$PORT exec {program} serve"
        return {
            "command": ["sh", "-c", script],
            "environment": {"OLLAMA_MODELS": escaped(str(self._store))},
        }

    # Containers

    def _container(self, words: list[str]) -> dict[str, Any]:
        port = USUAL_PORTS["llamacpp"]
        command = [*words, "--host", "0.0.0.0", "--port", str(port)]
        volume = f"{escaped(str(self._store))}/blobs:/blobs:ro"
        return self._contained(command, volume, port)

    def _ollama_container(self) -> dict[str, Any]:
        volume = f"{escaped(str(self._store))}:/root/.ollama/models"
        return self._contained([], volume, USUAL_PORTS["ollama"])

    def _contained(self, command: list[str], volume: str, port: int) -> dict[str, Any]:
        service: dict[str, Any] = {"image": self._wanted.image}
        if self._wanted.program:
            service["entrypoint"] = [escaped(self._wanted.program)]
        if command:
            service["command"] = command
        service |= {"profiles": ["llm"], "ports": [f"127.0.0.1::{port}"], "volumes": [volume], "init": True}
        if self._wanted.gpus:
            asked = {"driver": "nvidia", "capabilities": ["gpu"], "device_ids": [*self._wanted.gpus]}
            service["deploy"] = {"resources": {"reservations": {"devices": [asked]}}}
        return service


def _is_gguf(path: Path) -> bool:
    with os.fdopen(state.open_regular(path), "rb") as file:
        return file.read(4) == b"GGUF"
