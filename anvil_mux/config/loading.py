"""Compose files -> one frozen ``Config``.

``docker compose config`` reads the files where that program exists. It is not asked where runtime is process
(so that needs no Docker), and where it is missing interpolate.py reads one file itself. Both give the same
``Config`` (compose.py).

Problems are collected and raised together, each with file, line and key. What works but will cause trouble
is in ``Config.warnings``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anvil_mux.config import interpolate, reading
from anvil_mux.config.backends import BackendReader
from anvil_mux.config.checks import Checks, Names
from anvil_mux.config.compose import Compose, Layers, combine, origins
from anvil_mux.config.config import SETTINGS, Backend, Config, Judge, models_by_name
from anvil_mux.config.interpolate import Document
from anvil_mux.config.kinds import filled
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.placement import Places
from anvil_mux.config.reading import Problems
from anvil_mux.errors import ConfigError


class ConfigReader:
    """The compose files, read: a ``Config``, as far as they could be, and what is wrong with them.

    Whether the policies that they name can be built is for ``plugins.load`` to find out.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        *,
        environ: Mapping[str, str],
        compose: Compose | None,
        present: Mapping[str, Gpu],
        overrides: Mapping[str, object],
        judge: Judge | None,
        hosts: Mapping[str, Machine],
    ) -> None:
        """ConfigError where there is nothing to go on with; the arguments are those of ``plugins.load``."""
        documents = _documents(paths)
        folder = documents[0].file.parent
        flags = {key: value for key, value in overrides.items() if value is not None}
        try:
            variables = interpolate.environment(folder, environ)
        except ConfigError:
            variables = dict(environ)  # whoever reads the files, Compose or we, says what is wrong
        runtime = flags.get("runtime") or environ.get("ANVIL_RUNTIME") or _runtime(documents, variables)
        content = combine(documents, environ, compose, process=runtime == "process")
        self.problems = problems = Problems(documents, content.places, content.warnings)
        given = reading.of_whole(problems, content.settings, documents, environ, flags)
        for key in given:
            if SETTINGS[key].is_file:
                given[key] = os.path.abspath(folder / given[key])
        values = filled(SETTINGS, given)
        values.setdefault("project", content.project or Config(()).project)
        places = Places(
            problems,
            declared=values.pop("gpus", ()),
            present=present,
            hosts=hosts,
            machines=values.pop("memory_of_hosts", {}),
        )
        whole = Config((), **values)
        reader = BackendReader(
            problems, places, content, whole, folder=folder, variables=variables, judge=judge
        )
        names = Names(problems, reader)
        backends = names.settled(reader.read(_in_order(content.services, documents)))
        places.tell_absent()
        self.config = Config(
            tuple(backends),
            gpus=tuple(places.gpus(_used_gpus(backends))),
            files=tuple(os.path.abspath(document.file) for document in documents),
            origins=problems.origins,
            memory_of_hosts=places.memory(),
            generated_compose=reader.composed.texts(),
            **values,
        )
        """The configuration, as far as it could be read."""
        self.services = reader.services
        """Backend -> the service of the files that it is made of."""
        Checks(problems, self.config, reader, names).run()
        if kept := self.config.capture:
            text = f"capture: what is asked and answered in the last {kept} requests is kept in memory, and "
            problems.warn_of_setting("capture", text + "shown to whoever may change things")

    def checked(self) -> Config:
        """The configuration, or ConfigError with everything that is wrong with it."""
        self.problems.raise_all()
        models = models_by_name(self.config.backends)  # in place of aliases; presets keep their names
        return replace(
            self.config,
            warnings=tuple(dict.fromkeys(self.problems.warnings)),
            any_of={name: each.renamed(models) for name, each in self.config.any_of.items()},
        )


def _documents(paths: Sequence[Path | str]) -> list[Document]:
    """The files as they are written; ConfigError with what is wrong with each that cannot be read."""
    if not paths:
        raise ConfigError(["no compose file is given"])
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            documents.append(interpolate.read(Path(path)))
        except ConfigError as error:
            problems += error.problems
    if problems := problems or [*reading.misplaced(documents)]:
        raise ConfigError(problems)
    return documents


def _runtime(documents: Sequence[Document], variables: Mapping[str, str]) -> Any:
    """The runtime that the files name, seen before the Compose program is asked for anything."""
    layer = origins(Layers(documents, variables).of_all()).get("runtime")
    try:
        return layer and layer.filled("runtime")
    except ConfigError:
        return None


def _in_order(services: Any, documents: Sequence[Document]) -> dict[str, Any]:
    """The services in the order of the files; the Compose program sorts them by name."""
    found = services if isinstance(services, dict) else {}
    written = [document.content.get("services") for document in documents]
    names = dict.fromkeys(name for each in written if isinstance(each, dict) for name in each)
    return {name: found[name] for name in dict.fromkeys((*names, *found)) if name in found}


def _used_gpus(backends: Sequence[Backend]) -> dict[str, set[str]]:
    """Host -> the ids of the GPUs that are used there; anvil-mux's own among them."""
    used: dict[str, set[str]] = {"": set()}
    for backend in backends:
        used.setdefault(backend.host, set()).update(backend.gpus)
    return used
