"""The files of weights that an engine will read, found on this machine by what its service says.

A word of its command, or the value of a variable, may be a file of weights (GGUF, with all its parts, or
safetensors), the folder of a model, or the name of a repository of Hugging Face, whose copy lies in a mounted
cache. Ollama's manifest lists the files of a model. Only files in folders that the service mounts count, with
links resolved. Where a service names nothing of that sort, nothing is guessed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from anvil_mux import state
from anvil_mux.config.config import Backend
from anvil_mux.config.service import HERE, Mounts, Service, flag_values
from anvil_mux.protocol import foreign

MOST_FILES = 512
MOST_INDEX = 64 << 20
"""Bytes of a list of files that are read."""
WEIGHTS = (".gguf", ".safetensors")
MODEL_FLAGS = ("-m", "--model", "--model-path", "serve")
"""Words after which a command names its model."""
DOWNLOADS = ("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo")
"""Flags of llama.cpp by which it gets the file that it names."""
SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.gguf$")
"""The end of the name of a GGUF file that is one of several."""
REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
"""ORGANISATION/NAME of Hugging Face, for llama.cpp with the kind of quantization."""
USUAL_QUANTIZATION = "q4_k_m"
"""The one that llama.cpp takes where none is named."""
HUB_VARIABLES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
HUBS = ("", "hub", "huggingface/hub", ".cache/huggingface/hub")
"""The places at which a mounted folder may have the cache of Hugging Face."""
LLAMA_CACHES = ("", "llama.cpp", ".cache/llama.cpp")
STORES = ("", "models", ".ollama/models")
"""The places at which it may have the store of Ollama."""
OLLAMA_NAMES = ("registry.ollama.ai", "library")
"""The parts of a model's name that are left out."""
OLLAMAS = ("model", "projector", "adapter")
"""The kinds of layers that Ollama reads whole."""


def weights_of(backend: Backend, mounted: Mounts = ()) -> list[Path]:
    """Return the files, links resolved, in the order in which they are probably read.

    ``mounted``: what its container really has mounted, which tells where Docker's volumes are.
    """
    service = backend.service
    known = {**dict(service.mounts), **dict(mounted)}
    finder = _Finder(replace(service, mounts=tuple(known.items())))
    found = finder.in_store(backend.served_model or backend.model) if backend.engine == "ollama" else ()
    wanted = dict.fromkeys(finder.inside_mounts([*found, *finder.named()]))
    return list(islice(filter(os.path.isfile, wanted), MOST_FILES))


def missing(backend: Backend) -> list[str]:
    """The paths on this machine of what the command names as its model, and that are not there."""
    service = backend.service
    words = service.command
    if any(flag in words for flag in DOWNLOADS):
        return []
    named = [*(word for word in words if word.endswith(WEIGHTS)), *_models(words)]
    places = dict.fromkeys(service.on_host(word.rpartition("=")[2]) for word in named)
    return [place for place in places if place and not os.path.exists(place)]


def _models(words: Sequence[str]) -> Iterator[str]:
    """The paths that stand where a command names its model."""
    found = [value for flag in MODEL_FLAGS for value in flag_values(words, flag)]
    yield from (each for each in found if each.startswith(("/", "./", "../")))


def shards(file: Path) -> Iterator[Path]:
    """All files of a model that is in several."""
    if not (found := SHARD.search(file.name)):
        yield file
        return
    for number in range(1, int(found[1]) + 1):
        yield file.with_name(f"{file.name[: found.start()]}-{number:05}-of-{found[1]}.gguf")


class _Finder:
    """Looks for the weights of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._environment = dict(service.environment)
        self._is_process = HERE in dict(service.mounts)
        folders = [outside for inside, outside in service.mounts if outside and inside != HERE]
        self._mounted = [Path(os.path.realpath(each)) for each in folders]

    def inside_mounts(self, files: Iterable[Path]) -> Iterator[Path]:
        """The files with links resolved, without those that lead out of what is mounted."""
        for file in files:
            real = Path(os.path.realpath(file))
            if any(each == real or each in real.parents for each in self._mounted):
                yield real

    def named(self) -> Iterator[Path]:
        """The files that a word of the command or the environment leads to."""
        for word in dict.fromkeys(self._words()):
            place = self._service.on_host(word) if len(word) < 4096 else ""
            path = Path(place) if place else None
            if path and word.endswith(WEIGHTS):
                yield from shards(path)
            elif path and os.path.isfile(path / "config.json"):
                yield from _of_model(path)
            elif found := REPOSITORY.fullmatch(word):
                yield from self._of_repository(found[1], found[2], found[3] or "")

    def _words(self) -> Iterator[str]:
        """The words of the command, of a script within it, and the values of variables."""
        for text in (*self._service.command, *self._environment.values()):
            words = [text]
            if " " in text or "\n" in text:
                with suppress(ValueError):
                    words = shlex.split(text)
            for word in words:
                for part in word.rpartition("=")[2].split(","):
                    if part and "\0" not in part:
                        yield part

    # The cache of Hugging Face, and that of llama.cpp

    def _of_repository(self, owner: str, name: str, quantization: str) -> Iterator[Path]:
        for hub in self._folders(HUB_VARIABLES, HUBS):
            if snapshot := self._snapshot(hub / f"models--{owner}--{name}"):
                yield from _of_model(snapshot) or _of_quantization(snapshot.rglob("*.gguf"), quantization)
                return
        for cache in self._folders((("LLAMA_CACHE", ""),), LLAMA_CACHES):
            if cached := _of_quantization(cache.glob(f"{owner}_{name}_*.gguf"), quantization):
                yield from cached
                return

    def _snapshot(self, repository: Path) -> Path | None:
        """The folder with the files of a repository, of the revision that is asked for."""
        revision = next(flag_values(self._service.command, "--revision"), "main")
        with suppress(OSError, ValueError):
            named = state.read_bytes(repository / "refs" / revision, MOST_INDEX).decode().strip()
            revision = named if named.isalnum() else revision
        folder = repository / "snapshots" / revision
        return folder if os.path.isdir(folder) else None

    def _folders(self, variables: Iterable[tuple[str, str]], below: Iterable[str]) -> Iterator[Path]:
        """The folders in which a store may be: where a variable says, in a mounted one, or at home."""
        for name, rest in variables:
            inside = self._environment.get(name)
            if inside and (outside := self._service.on_host(inside)):
                yield Path(outside, rest)
        home = self._environment.get("HOME") or os.path.expanduser("~")
        for folder in [Path(home)] if self._is_process else self._mounted:
            yield from (folder / each for each in below)

    # The store of Ollama

    def in_store(self, model: str) -> list[Path]:
        """The files that the manifest of a model lists."""
        name, _, tag = model.partition(":")
        parts = name.split("/")
        place = (*OLLAMA_NAMES[: max(3 - len(parts), 0)], *parts)
        for store in self._folders((("OLLAMA_MODELS", ""),), STORES):
            said = _json(store.joinpath("manifests", *place, tag or "latest"))
            try:
                layers = [(str(each["mediaType"]), str(each["digest"])) for each in said["layers"]]
            except (KeyError, TypeError):
                continue
            read = [digest for kind, digest in layers if kind.rpartition(".")[2] in OLLAMAS]
            return [store / "blobs" / each.replace(":", "-") for each in read if "/" not in each]
        return []


def _of_model(folder: Path) -> list[Path]:
    """The weights in the folder of a model: those that its index lists, or all of one kind."""
    for kind in ("safetensors", "bin"):
        for index in sorted(folder.glob(f"*.{kind}.index.json")):
            with suppress(KeyError, TypeError, AttributeError):
                named = sorted({str(each) for each in _json(index)["weight_map"].values()})
                return [folder / each for each in named if ".." not in Path(each).parts]
        found = sorted(folder.glob(f"*.{kind}"))
        # Mistral's repositories have all weights twice.
        if found := [each for each in found if not each.name.startswith("consolidated")] or found:
            return found
    return []


def _of_quantization(files: Iterable[Path], quantization: str) -> list[Path]:
    wanted = (quantization or USUAL_QUANTIZATION).lower()
    return sorted(each for each in files if wanted in each.name.lower())


def _json(file: Path) -> Any:
    """The content of a JSON file; None where there is none."""
    try:
        return foreign.read(state.read_bytes(file, MOST_INDEX))
    except (OSError, ValueError):
        return None
