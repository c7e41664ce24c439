"""Compose files -> one mapping, through the Compose program or without it.

``docker compose config`` knows every form that Compose knows, so it is asked where it can be; it needs no
Docker Engine. Where it is missing interpolate.py reads one file, and for local processes several. ``x-anvil``
is merged by overlay.py in each case.
Either way the variables are in, and what the file left open (unset variables) is a warning.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from anvil_mux.command import Done, run
from anvil_mux.config import interpolate, overlay
from anvil_mux.config.diagnostic import Diagnostic, KeyPath, Position, advice
from anvil_mux.config.interpolate import Document
from anvil_mux.config.misplaced import unknown_keys
from anvil_mux.config.overlay import Layer, Layers
from anvil_mux.config.problems import KeyInFile
from anvil_mux.errors import ConfigError

FILE_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
OVERRIDE_NAMES = (
    "compose.override.yml",
    "compose.override.yaml",
    "docker-compose.override.yml",
    "docker-compose.override.yaml",
)
COMPOSE_TIMEOUT = 60.0
OF_PROCESSES = ("HOST", "PORT")
"""Variables that a local process is given when it starts."""
SHARED = ("networks", "volumes", "secrets", "configs")
"""The things beside services that services use."""


@dataclass(frozen=True, slots=True)
class Content:
    """The files' content, taken together."""

    services: Any
    settings: Any
    """The top-level ``x-anvil``."""
    project: str
    warnings: tuple[str, ...]
    plain: bool
    """Whether it was read without the Compose program."""
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``SHARED`` -> name -> description."""
    places: Mapping[KeyPath, KeyInFile] = field(default_factory=dict)
    """The key of each setting of ``x-anvil`` -> the file whose value counts, and its key there."""


Compose = Callable[[Sequence[str], Mapping[str, str]], Done | None]
"""Runs a command; None where there is no such program."""


def find_files(folder: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The compose files that Compose itself would take in ``folder``; ConfigError."""
    folder = folder.absolute()
    variables = interpolate.environment(folder, environ)
    if named := variables.get("COMPOSE_FILE"):
        separator = variables.get("COMPOSE_PATH_SEPARATOR") or os.pathsep
        return tuple(folder / file for file in named.split(separator))
    for place in (folder, *folder.parents):
        if found := [place / name for name in FILE_NAMES if (place / name).is_file()]:
            overrides = [place / name for name in OVERRIDE_NAMES if (place / name).is_file()]
            return (found[0], *overrides[:1])
    raise ConfigError([f"{folder}: no compose.yaml here or above; name a compose file on the command line"])


def combine(
    documents: Sequence[Document],
    environ: Mapping[str, str],
    compose: Compose | None = None,
    *,
    process: bool = False,
) -> Content:
    """The content of the files, through ``compose`` if that is given and there is such a program.

    ``process``: the services are local processes, of which Compose knows nothing.
    """
    if compose is not None and not process:
        answer = compose(compose_config([document.file for document in documents]), environ)
        if answer is not None:
            return _composed(documents, answer, environ)
    if len(documents) > 1 and not process:
        text = f"{documents[1].file}: a second file {interpolate.NEED_COMPOSE}"
        raise ConfigError([Diagnostic(text, page="running.md#docker-or-podman")])
    variables = interpolate.environment(documents[0].file.parent, environ)
    content: Any = {}
    warnings: list[str] = []
    for document in documents:
        resolved, unset = interpolate.resolve(document, variables)
        content = overlay.laid_over(content, resolved)
        warnings += [_unset(documents, name, process=process) for name in unset]
    project = _project(documents[0].file, content, environ)
    return _content(content, project, warnings, Layers(documents, variables), plain=True)


def compose_config(files: Iterable[Path]) -> list[str]:
    # YAML, because its JSON leaves out the x- keys of services.
    words = [word for file in files for word in ("-f", str(file))]
    return ["docker", "compose", "--ansi", "never", *words, "--profile", "*", "config"]


def run_compose(argv: Sequence[str], environ: Mapping[str, str]) -> Done | None:
    """Run the Compose program; None where there is none."""
    try:
        done = run(argv, COMPOSE_TIMEOUT, env=environ)
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        raise ConfigError([f"`{' '.join(argv)}` did not end within {COMPOSE_TIMEOUT:g} s"]) from None
    if done.code and re.search(r"is not a docker command|unknown (shorthand )?(flag|command)", done.err):
        return None
    return done


def _composed(documents: Sequence[Document], answer: Done, environ: Mapping[str, str]) -> Content:
    said, warnings = [], []
    for line in answer.err.splitlines():
        if warning := re.search(r'level=warning msg="(.*)"\s*$', line):
            warnings.append(_of_compose(documents, warning[1].replace('\\"', '"')))
        elif line.strip():
            said.append(line.strip())
    if answer.code:
        why = " ".join(said) or f"exit status {answer.code}"
        own = [*unknown_keys(documents), *_without_image(documents)]
        raise ConfigError([*warnings, _of_compose(documents, why), *own])
    # It prints every $ that stands for itself as $$.
    content = yaml.load(answer.out.replace("$$", "$"), interpolate.Loader) or {}
    try:
        variables = interpolate.environment(documents[0].file.parent, environ)
    except ConfigError:
        variables = dict(environ)  # Compose has read the file, whatever we make of it
    layers = Layers(documents, variables)
    return _content(content, content.get("name", ""), warnings, layers, plain=False)


def _content(
    content: dict[str, Any], project: str, warnings: Iterable[str], layers: Layers, *, plain: bool
) -> Content:
    places: dict[KeyPath, KeyInFile] = {}

    def lay(holder: Any, key: KeyPath, found: Sequence[Layer]) -> None:
        """Merge what several files have; what one file has is right as it was read."""
        if not plain and len(found) > 1:
            holder[overlay.OURS] = overlay.merged(found)
        counting = overlay.origins(found).items()
        places.update({(*key, overlay.OURS, n): (each.document, (*each.key, n)) for n, each in counting})

    lay(content, (), layers.of_all())
    for name, described in overlay.mapping(content.get("services")).items():
        own: list[Layer] = []
        with suppress(ConfigError, ValueError):  # what stands at an address Compose alone has read
            own = layers.of_service(name)
        lay(described, ("services", name), own)
    shared = {kind: found for kind in SHARED if isinstance(found := content.get(kind), dict)}
    services, settings = content.get("services"), content.get(overlay.OURS)
    return Content(services, settings, project, tuple(warnings), plain=plain, shared=shared, places=places)


def _of_compose(documents: Sequence[Document], text: str) -> Diagnostic:
    """A problem or warning of the Compose program, in its own words: it says itself where, if it knows."""
    first = documents[0].file
    files = " and ".join([str(first), *(each.file.name for each in documents[1:])])
    return Diagnostic(f"{files}: docker compose config: {text}", place=Position(str(first)))


def _without_image(documents: Sequence[Document]) -> Iterator[Diagnostic]:
    """A problem for each server elsewhere without what Compose wants of a service."""
    written = [overlay.mapping(each.content.get("services")) for each in documents]
    for document, services in zip(documents, written, strict=True):
        for name, described in services.items():
            keys = {key for each in written for key in overlay.mapping(each.get(name))}
            ours = overlay.mapping(overlay.mapping(described).get(overlay.OURS))
            if "url" in ours and not keys & {"image", "build", "extends"}:
                text = "Compose wants `image: scratch` and `profiles` also of a server elsewhere (url)"
                missing = Diagnostic(text, write="image: scratch", page="elsewhere.md")
                yield missing.at(document.place(("services", name)), ("services", name), f"services.{name}")


def _unset(documents: Sequence[Document], name: str, *, process: bool = False) -> str:
    """A warning about a variable that is not set, at the first line that uses it."""
    said = f"the variable {name} is not set, so nothing stands in its place"
    if process and name in OF_PROCESSES:
        found = advice(f"{said}; anvil-mux puts in a {name} that begins with $$", f"$${name}")
    else:
        text = f"{said}; set it, here or in .env, or write ${{{name}:-default}}"
        found = Diagnostic(text, said=said, write=f"{name}=... in .env")
    for document in documents:
        for key, value in _texts(document.content, ()):
            if re.search(rf"(?<!\$)(?:\$\$)*\$(?:{name}\b|{{{name}[:}}?+-])", value):
                return found.at(document.place(key), key, ".".join(key))
    return found.at(Position(str(documents[0].file)), (), "")


def _texts(value: Any, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Every text in a file, with its key."""
    match value:
        case str():
            yield key, value
        case dict():
            for name, inner in value.items():
                yield from _texts(inner, (*key, str(name)))
        case list():
            for index, inner in enumerate(value):
                yield from _texts(inner, (*key, str(index)))


def _project(file: Path, content: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The project's name as Compose finds it."""
    folder = Path(os.path.abspath(file)).parent
    chosen = interpolate.environment(folder, environ).get("COMPOSE_PROJECT_NAME")
    name = chosen or content.get("name") or folder.name
    return re.sub(r"[^a-z0-9_-]", "", str(name).lower()).lstrip("_-")
