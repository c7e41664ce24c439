"""The meaning of a compose service, in whichever spelling it is written.

Compose accepts most things in a short and a long form, and prints the long one; without the Compose program
the file's own form is what we get. Functions take the service's mapping and give one form; ValueError says
which key is wrong. Guesses about the engine (its family, its port, the model id it reports) are made here
from image and command, and only here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.clock import count_in
from anvil_mux.config.diagnostic import Diagnostic, as_yaml, unfit

IMAGES: tuple[tuple[str, str], ...] = (
    (r"llama-?cpp-python", "openai"),
    (r"llama\.?-?cpp|llama-server", "llamacpp"),
    (r"sglang", "sglang"),
    (r"vllm", "vllm"),
    (r"ollama", "ollama"),
    (r"tabbyapi", "tabbyapi"),
    (r"tensorrt-?llm|trtllm", "trtllm"),
)
"""Pattern in the image's repository or the program's name -> engine; everything else is ``openai``."""

USUAL_PORT = 8000
"""The port on which most engines listen."""
USUAL_PORTS = {
    "vllm": USUAL_PORT,
    "sglang": 30000,
    "llamacpp": 8080,
    "ollama": 11434,
    "tabbyapi": 5000,
    "trtllm": USUAL_PORT,
}
"""Engine -> the port on which it listens unless another is configured."""

MOST_COPIES = 1000
"""The most containers of a service: each is a backend of its own."""
KEYS = (
    *("build", "command", "configs", "container_name", "depends_on", "deploy", "devices", "entrypoint"),
    *("env_file", "environment", "expose", "extends", "external_links", "gpus", "group_add", "image", "ipc"),
    *("label_file", "labels", "links", "network_mode", "networks", "pid", "ports", "profiles", "restart"),
    *("runtime", "scale", "secrets", "stop_grace_period", "user", "volumes", "volumes_from", "working_dir"),
    "x-anvil",
)
"""The keys of a service that anvil-mux reads; Compose has more."""
RawService = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Port:
    """One published port; ``outside`` None: Docker chooses."""

    inside: int
    outside: int | None = None
    address: str = ""


def argv(service: RawService) -> tuple[str, ...]:
    """The entrypoint and the command as one list."""
    return (*_words(service, "entrypoint"), *_words(service, "command"))


def environment(service: RawService, environ: Mapping[str, str]) -> dict[str, str]:
    """The service's variables; one without a value is taken from ``environ``, and left out if not there."""
    found = {}
    for name, value in _mapping(service, "environment", None).items():
        value = environ.get(name) if value is None else value
        if value is not None:
            found[name] = _text(value)
    return found


def labels(service: RawService, prefix: str) -> dict[str, str]:
    """The labels that begin with ``prefix``, without it."""
    if not isinstance(service, Mapping):
        raise unfit("must be a mapping, with keys such as image", write="image: ...")
    found = _mapping(service, "labels", "").items()
    return {name[len(prefix) :]: _text(value) for name, value in found if name.startswith(prefix)}


def digest(service: RawService, prefix: str) -> str:
    """A digest of the description without extensions, labels with ``prefix``, and scale."""
    said = {n: value for n, value in service.items() if not str(n).startswith("x-") and n != "scale"}
    if isinstance(deploy := said.get("deploy"), Mapping):
        said["deploy"] = {name: value for name, value in deploy.items() if name != "replicas"}
    said["labels"] = {
        name: value for name, value in _mapping(service, "labels", "").items() if not name.startswith(prefix)
    }
    return hashlib.sha256(json.dumps(_by_name(said), default=str).encode()).hexdigest()


def _by_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _by_name(value[name]) for name in sorted(value, key=str)}
    return [_by_name(each) for each in value] if isinstance(value, list) else value


def word(service: RawService, key: str) -> str | None:
    """The text that stands at a key, if any does."""
    value = service.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise unfit(f"{key} must be text", write=f'{key}: "..."', key=(key,))
    return str(value)


def profiles(service: RawService) -> tuple[str, ...]:
    return tuple(str(each) for each in listed(service, "profiles"))


def published(service: RawService) -> list[Port]:
    """The TCP ports that the host can reach."""
    return [port for each in listed(service, "ports") for port in _published(each)]


def listens_on(service: RawService) -> int | None:
    """The port that the service says its engine listens on, if it does."""
    for ports in (
        [port.inside for port in published(service)],
        [port for each in listed(service, "expose") for port in _range(str(each).partition("/")[0])],
    ):
        if len(set(ports)) == 1:
            return ports[0]
        if ports and commanded_port(service) is None:
            several = ", ".join(map(str, sorted(set(ports))))
            said = f"has several ports ({several}); say where the engine listens"
            write, text = f"x-anvil: {{port: {ports[0]}}}", f"{said}: x-anvil: {{port: ...}}"
            raise ValueError(Diagnostic(text, said=said, write=write, key=("ports",)))
    return commanded_port(service)


def commanded_port(service: RawService) -> int | None:
    ports = [count_in(value) for value in flag_values(argv(service), "--port")]
    return next((port for port in reversed(ports) if port is not None), None)


def copies(service: RawService) -> int:
    """How many containers Compose makes of it."""
    deploy = service.get("deploy")
    asked = deploy.get("replicas") if isinstance(deploy, Mapping) else None
    given = str(service.get("scale", asked if asked is not None else 1))
    found = count_in(given)
    if found is not None and found > MOST_COPIES:
        key = "scale" if "scale" in service else "deploy"
        raise unfit(f"has {found} replicas, of at most {MOST_COPIES}", write="scale: 2", key=(key,))
    return 1 if found is None else found


def engine(service: RawService) -> str:
    """The engine family by the image, or by the program where there is none that says it."""
    image = (word(service, "image") or "").partition("@")[0]
    repository = re.sub(r":[^/]*$", "", image).lower()
    words = argv(service)
    program = PurePosixPath(words[0]).name if words else ""
    if re.fullmatch(r"python[0-9.]*", program):
        program = next(flag_values(words, "-m"), "")
    for text in (repository, program.lower()):
        for pattern, name in IMAGES:
            if re.search(pattern, text):
                return name
    return "openai"


def served_model(service: RawService, engine: str) -> tuple[str, ...]:
    """The ids under which the engine knows its model, as far as its command says so."""
    words = argv(service)
    match engine:
        case "llamacpp":
            names = [*flag_values(words, "--alias"), *flag_values(words, "-a")]
            return tuple(part.strip() for name in names for part in name.split(",") if part.strip())
        case "vllm" | "sglang":
            return _names_given(words) or tuple(models_given(service))[-1:]
    return tuple(flag_values(words, "--served-model-name"))


def _names_given(words: Sequence[str]) -> tuple[str, ...]:
    """The names after --served-model-name: vLLM takes several."""
    for index, word in enumerate(words):
        if word.startswith("--served-model-name="):
            return (word.partition("=")[2],)
        if word == "--served-model-name":
            names = []
            for name in words[index + 1 :]:
                if name.startswith("-"):
                    break
                names.append(name)
            return tuple(names)
    return ()


def models_given(service: RawService) -> Iterator[str]:
    """--model, --model-path, or the word after `vllm serve`, which may be the image's own entrypoint."""
    words = argv(service)
    if "serve" in words:
        words = words[words.index("serve") + 1 :]
    elif service.get("entrypoint") or not service.get("image"):
        words = ("-", *words)
    if words and re.fullmatch(r"[^-/.][^/]*(/[^/]+)?|/.+", words[0]):
        yield words[0]
    yield from flag_values(words, "--model")
    yield from flag_values(words, "--model-path")


def flag_values(words: Sequence[str], flag: str) -> Iterator[str]:
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word == flag:
            yield following
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


# Short and long forms


def _words(service: RawService, key: str) -> list[str]:
    value = service.get(key)
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            write = f"{key}: [program, argument, ...]"
            raise unfit(f"{key}: {error}", write=write, key=(key,)) from None
    return [_text(word) for word in listed(service, key)]


def listed(service: Mapping[str, Any], key: str) -> list[Any]:
    """The list that stands at a key; ValueError if something else does."""
    value = service.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise unfit(f"{key} must be a list", write=f"{key}: {as_yaml([value])}", key=(key,))
    return value


def _mapping(service: RawService, key: str, nothing: str | None) -> dict[str, Any]:
    """A mapping, or a list of NAME=VALUE; ``nothing`` for a name alone."""
    value = service.get(key)
    if isinstance(value, list):
        pairs = [str(each).partition("=") for each in value]
        return {name: text if equals else nothing for name, equals, text in pairs}
    if value is not None and not isinstance(value, dict):
        name, equals, text = str(value).partition("=")
        write = f"{key}: {{{name}: {as_yaml(text)}}}" if equals else f"{key}: {{NAME: value}}"
        raise unfit(f"{key} must be a mapping or a list of NAME=VALUE", write=write, key=(key,))
    return {name: nothing if each is None else each for name, each in (value or {}).items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        raise ValueError(f"{value!r} must be text")
    return "" if value is None else str(value)


def _published(entry: Any) -> Iterator[Port]:
    if isinstance(entry, Mapping):
        inside, outside = str(entry.get("target", "")), str(entry.get("published") or "")
        address, protocol = str(entry.get("host_ip") or ""), entry.get("protocol", "tcp")
    else:
        text, _, protocol = str(entry).partition("/")
        rest, _, inside = text.rpartition(":")
        address, _, outside = rest.rpartition(":")
    if protocol not in ("tcp", ""):
        return
    ports = _range(inside)
    outsides: list[int | None] = [*_range(outside)] if outside else [None] * len(ports)
    if len(outsides) == len(ports):
        for port, open_as in zip(ports, outsides, strict=True):
            yield Port(port, open_as, address.strip("[]"))
    else:
        # Docker takes a free one of a range.
        for port in ports:
            yield Port(port, None, address.strip("[]"))


def _range(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    if count_in(first, 65535) is None or (dash and count_in(last, 65535) is None):
        raise unfit(f"ports: {text!r} is no port", write='ports: ["127.0.0.1::8000"]', key=("ports",))
    return list(range(int(first), int(last if dash else first) + 1))


# Folders

Mounts = tuple[tuple[str, str], ...]
"""Paths inside a service, and the paths on its host that they are; "" for what is not in a folder there."""
HERE = "."
"""The place at which relative paths of a local process begin, among its mounts."""


def mounts_of_process(folder: str) -> Mounts:
    """A local process sees the whole host; ``folder`` is where it is started if it does not say."""
    return ("/", "/"), (HERE, os.path.abspath(folder))


def mounts(described: Mapping[str, Any], folder: str) -> Mounts:
    """The mounts of a service, in the long or the short form; ``folder`` is where relative paths begin."""
    volumes = described.get("volumes")
    found = [_mount(each, folder) for each in volumes] if isinstance(volumes, list) else []
    return tuple([(str(PurePosixPath(inside)), outside) for inside, outside in found if inside])


def _mount(volume: Any, folder: str) -> tuple[str, str]:
    if isinstance(volume, Mapping):
        inside, source = str(volume.get("target") or ""), str(volume.get("source") or "")
        is_folder = volume.get("type") == "bind"
    else:
        first, *others = str(volume).split(":")
        source, inside = (first, others[0]) if others else ("", first)
        is_folder = source.startswith(("/", ".", "~"))
    return inside, os.path.abspath(os.path.join(folder, os.path.expanduser(source))) if is_folder else ""
