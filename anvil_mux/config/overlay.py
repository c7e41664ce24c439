"""Compose files laid over each other: their ``x-anvil`` by a rule of ours, the rest as Compose does.

Releases of Compose differ in how they merge extensions: up to 2.34 the last file's replaces all, from then on
mappings are merged and lists appended. Here each setting of an ``x-anvil`` is, whole, that of the last file
that has it. Before a file come those that it includes; before a service comes the one that it extends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.config import interpolate
from anvil_mux.config.diagnostic import KeyPath
from anvil_mux.config.interpolate import Document, Scope

OURS = "x-anvil"
RESET, OVERRIDE = "!reset", "!override"
"""The tags of Compose by which a file takes away what stands in those before it."""


class Layer(NamedTuple):
    """The ``x-anvil`` that one file has for the whole, or for a service."""

    document: Document
    key: KeyPath
    variables: Mapping[str, str]

    def settings(self) -> Any:
        """The content as it is written; a setting that is reset has no value."""
        value: Any = self.document.content
        for part in self.key:
            value = value[part]
        tags = dict(self.document.tags)
        if isinstance(value, dict):
            return {n: None if tags.get((*self.key, n)) == RESET else each for n, each in value.items()}
        return value

    def filled(self, name: str) -> Any:
        """The value of a setting with its variables replaced."""
        value = self.settings()[name]
        return interpolate.filled(self.document, value, (*self.key, name), Scope(self.variables))


class Layers:
    """The ``x-anvil`` of all files, each with its place; ``variables``: those of the project."""

    def __init__(self, documents: Sequence[Document], variables: Mapping[str, str]) -> None:
        self._documents = documents
        self._folder = documents[0].file.parent
        self._variables = variables
        self._read: dict[Path, Document] = {}
        self._inner: dict[Path, list[tuple[Document, Path, Mapping[str, str]]]] = {}
        """File -> those that it includes, each with its folder and its variables."""

    def of_all(self) -> list[Layer]:
        """The ``x-anvil`` at the top level of each file; Compose takes none from an included one."""
        found: list[Layer] = []
        for document in self._documents:
            _add(found, document, (OURS,), document.content, self._variables)
        return found

    def of_service(self, name: str) -> list[Layer]:
        """The ``x-anvil`` of a service in each file; ConfigError if one of them cannot be read."""
        found: list[Layer] = []
        for document in self._documents:
            self._take(found, document, self._folder, self._variables, name)
        return found

    def _take(
        self, found: list[Layer], document: Document, folder: Path, variables: Mapping[str, str], name: str
    ) -> None:
        if document.file not in self._inner:
            self._inner[document.file] = [*self._included(document, folder, variables)]
        for inner, its_folder, its_variables in self._inner[document.file]:
            self._take(found, inner, its_folder, its_variables, name)
        self._take_service(found, document, folder, variables, name)

    def _take_service(
        self, found: list[Layer], document: Document, folder: Path, variables: Mapping[str, str], name: str
    ) -> None:
        key, tags = ("services", name), dict(document.tags)
        if tags.get(key) in (RESET, OVERRIDE):
            found.clear()
        described = mapping(mapping(document.content.get("services")).get(name))
        if tags.get(key) == RESET:
            return
        if extends := described.get("extends"):
            about = extends if isinstance(extends, dict) else {"service": extends}
            scope = Scope(variables)
            base, its_folder = document, folder
            if file := about.get("file"):
                base = self._document(folder / scope.fill(str(file)))
                its_folder = base.file.parent
            self._take_service(found, base, its_folder, variables, scope.fill(str(about.get("service"))))
        _add(found, document, (*key, OURS), described, variables)

    def _included(
        self, document: Document, folder: Path, variables: Mapping[str, str]
    ) -> Iterator[tuple[Document, Path, Mapping[str, str]]]:
        scope = Scope(variables)
        for each in listed(document.content.get("include")):
            about = each if isinstance(each, dict) else {"path": each}
            files = [folder / scope.fill(str(path)) for path in listed(about.get("path"))]
            inner = folder / scope.fill(str(about.get("project_directory") or files[0].parent))
            own = [folder / scope.fill(str(file)) for file in listed(about.get("env_file"))]
            known = interpolate.variables_of(own or [inner / interpolate.ENV_FILE], variables)
            for file in files:
                yield self._document(file), inner, known

    def _document(self, file: Path) -> Document:
        if file not in self._read:
            self._read[file] = interpolate.read(file)
        return self._read[file]


def _add(
    found: list[Layer],
    document: Document,
    key: KeyPath,
    holder: Mapping[str, Any],
    variables: Mapping[str, str],
) -> None:
    tag = dict(document.tags).get(key)
    if tag in (RESET, OVERRIDE):
        found.clear()
    if holder.get(OURS) is not None and tag != RESET:
        found.append(Layer(document, key, variables))


def origins(layers: Sequence[Layer]) -> dict[str, Layer]:
    """Setting -> the layer whose value counts."""
    said = [(layer, layer.settings()) for layer in layers]
    return {name: layer for layer, settings in said if isinstance(settings, dict) for name in settings}


def merged(layers: Sequence[Layer]) -> Any:
    """The settings of all layers; what is no mapping, and so an error, is that of the last one."""
    last = layers[-1].settings()
    if not isinstance(last, dict):
        return last
    return {name: layer.filled(name) for name, layer in origins(layers).items()}


def laid_over(one: Any, other: Any) -> Any:
    """Merge as Compose does: mappings key by key, lists one after the other, the other's plain values win."""
    if other is None:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        found = dict(one)
        for key, value in other.items():
            if key == OURS and isinstance(value, dict):
                found[key] = {**mapping(one.get(key)), **value}
            else:
                replaces = key not in one or key in ("command", "entrypoint")
                found[key] = value if replaces else laid_over(one[key], value)
        return found
    if isinstance(one, list) and isinstance(other, dict):
        return _pairs(one) | other
    if isinstance(one, dict) and isinstance(other, list):
        return laid_over(one, _pairs(other))
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *(each for each in other if each not in one)]
    return other


def _pairs(given: list[Any]) -> dict[str, str | None]:
    """A list of NAME=VALUE as a mapping."""
    pairs = (str(each).partition("=") for each in given)
    return {name: text if equals else None for name, equals, text in pairs}


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """A list, or the one value that may stand for a list of it."""
    return value if isinstance(value, list) else [] if value is None else [value]
