"""Compose files -> one frozen ``Config``.

Flags win over the environment (``ANVIL_*``), that over the file, that over the default.

``docker compose config`` reads the files where that program exists. It is not asked where runtime is process
(so that needs no Docker), and where it is missing interpolate.py reads one file itself. Both give the same
``Config``. Of several files each setting is, whole, that of the last one that has it (overlay.py).

Problems are collected and raised together, each with file, line and key. What works but will cause trouble
is in ``Config.warnings``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from anvil_mux.config import any_of, interpolate, overlay, settings
from anvil_mux.config.backends import BackendReader, Surroundings
from anvil_mux.config.candidates import Places
from anvil_mux.config.checking import Checks
from anvil_mux.config.composefile import Compose, Content, combine
from anvil_mux.config.composing import ComposedFiles
from anvil_mux.config.config import Backend, Config, Gpu, Judge, Machine, default_of, models_by_name
from anvil_mux.config.diagnostic import as_yaml
from anvil_mux.config.interpolate import Document
from anvil_mux.config.misplaced import misplaced
from anvil_mux.config.names import Names
from anvil_mux.config.overlay import Layers
from anvil_mux.config.problems import Problems
from anvil_mux.config.reading import read, take
from anvil_mux.config.settings import Setting
from anvil_mux.config.table import RENAMED, SETTINGS
from anvil_mux.errors import ConfigError

OURS = "ANVIL_"
"""The beginning of the names of our variables."""


class ConfigReader:
    """The compose files, read: the arguments of a ``Config``, and what is wrong with them.

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
        self._documents = documents = _documents(paths)
        self._folder = documents[0].file.parent
        self._environ = environ
        self._judge = judge
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        self.problems = Problems(documents)
        self._origins = self.problems.origins
        try:
            self._variables = interpolate.environment(self._folder, environ)
        except ConfigError:
            self._variables = dict(environ)  # whoever reads the files, Compose or we, says what is wrong
        content = combine(documents, environ, compose, process=self._wants_process())
        self.problems.places = content.places
        self.problems.warnings += content.warnings
        self.values = self._top_level(content.settings)
        self.values.setdefault("project", content.project or default_of(Config, "project"))
        self._places = Places(
            self.problems,
            declared=self.values.pop("gpus", ()),
            present=present,
            hosts=hosts,
            machines=self.values.pop("memory_of_hosts", {}),
        )
        self._composed = ComposedFiles(content, self._folder)
        around = self._surroundings(content)
        reader = BackendReader(self.problems, self._places, self._composed, around)
        backends = reader.read(self._in_order(content.services))
        names = Names(self.problems, reader.services, reader.loras)
        self.backends = names.settled(backends)
        self.services = reader.services
        """Backend -> the service of the files that it is made of."""
        self._places.tell_absent()
        self._gpus = tuple(self._places.gpus(_used_gpus(self.backends)))
        Checks(
            self.problems,
            values=self.values,
            backends=self.backends,
            gpus={gpu.name: gpu for gpu in self._gpus},
            host_ports=reader.ports,
            services=reader.services,
            names=names,
        ).run()
        if kept := self.values.get("capture"):
            text = f"capture: what is asked and answered in the last {kept} requests is kept in memory, and "
            self.problems.of_choice("capture", text + "shown to whoever may change things")

    def config(self) -> Config:
        """The configuration, or ConfigError with everything that is wrong with it."""
        self.problems.raise_all()
        any_of_models = any_of.resolved(self.values.get("any_of", {}), models_by_name(self.backends))
        return Config(
            tuple(self.backends),
            gpus=self._gpus,
            files=tuple(os.path.abspath(document.file) for document in self._documents),
            warnings=tuple(dict.fromkeys(self.problems.warnings)),
            origins=self._origins,
            memory_of_hosts=self._places.memory(),
            composed=self._composed.texts(),
            **{**self.values, "any_of": any_of_models},
        )

    def _surroundings(self, content: Content) -> Surroundings:
        values = self.values
        return Surroundings(
            folder=self._folder,
            variables=self._variables,
            project=values["project"],
            process=values.get("runtime", default_of(Config, "runtime")) == "process",
            plain=content.plain,
            preload=values.get("preload", default_of(Config, "preload")),
            read_ahead=values.get("read_ahead", default_of(Config, "read_ahead")),
            judge=self._judge,
        )

    def _in_order(self, services: Any) -> dict[str, Any]:
        """The services in the order of the files; the Compose program sorts them by name."""
        found = services if isinstance(services, dict) else {}
        written = [document.content.get("services") for document in self._documents]
        names = dict.fromkeys(name for each in written if isinstance(each, dict) for name in each)
        return {name: found[name] for name in dict.fromkeys((*names, *found)) if name in found}

    def _wants_process(self) -> bool:
        """Whether the runtime is ``process``, seen before the Compose program is asked for anything."""
        given = self._overrides.get("runtime") or self._environ.get("ANVIL_RUNTIME")
        layer = overlay.origins(Layers(self._documents, self._variables).of_all()).get("runtime")
        try:
            return (given or (layer and layer.filled("runtime"))) == "process"
        except ConfigError:
            return False

    # Settings

    def _top_level(self, given: Any) -> dict[str, Any]:
        """Arguments of ``Config``: from the file, the environment and the flags, the later the stronger."""
        values = take(self.problems, SETTINGS, given, ("x-anvil",))
        for key in values:
            self._origins[key] = self.problems.where(("x-anvil", key)).partition(": ")[0]
        for old, new in RENAMED.items():
            if self._environ.get(f"ANVIL_{old.upper()}"):
                self.problems.of_variable(f"ANVIL_{old.upper()}", f"is now ANVIL_{new.upper()}")
        self._check_variables()
        for key, setting in SETTINGS.items():
            variable = f"ANVIL_{key.upper()}"
            if text := self._environ.get(variable):
                values |= self._given(key, setting, _structure(text), variable)
        for key, value in self._overrides.items():
            values |= self._given(key, SETTINGS[key], value, "flag")
        for key in values:
            if SETTINGS[key].is_file:
                values[key] = os.path.abspath(self._folder / values[key])
        return settings.filled(SETTINGS, values)

    def _check_variables(self) -> None:
        """Complain of variables that are meant to be ours, and that no file names either."""
        files = str([document.content for document in self._documents])
        for name in self._environ:
            if name not in files and (near := _misspelt(name)):
                self.problems.of_variable(name, f"nobody reads it; did you mean {near}?")

    def _given(self, key: str, setting: Setting, value: object, origin: str) -> dict[str, Any]:
        self._origins[key] = origin
        return read(key, setting, value, partial(self.problems.of_setting, key))


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
    if problems := problems or [*misplaced(documents)]:
        raise ConfigError(problems)
    return documents


def _misspelt(variable: str) -> str:
    """The variable of ours that this one is meant to be; "" if it is ours, or one of somebody else."""
    known = [f"{OURS}{name}" for name in (*map(str.upper, SETTINGS), "API_KEYS", "API_KEY", "URL")]
    is_other = not variable.startswith(OURS) or variable in known
    return "" if is_other else next(iter(get_close_matches(variable, known, 1, 0.9)), "")


def _used_gpus(backends: Sequence[Backend]) -> dict[str, set[str]]:
    """Host -> the ids of the GPUs that are used there; anvil-mux's own among them."""
    used: dict[str, set[str]] = {"": set()}
    for backend in backends:
        used.setdefault(backend.host, set()).update(backend.gpus)
    return used


def _structure(text: str) -> object:
    """Read the YAML list or mapping that an environment variable may hold."""
    if text[0] not in "[{":
        return text
    try:
        return _keyed_by_text(yaml.load(text, interpolate.Loader))
    except (yaml.YAMLError, RecursionError):
        return text


def _keyed_by_text(value: object) -> object:
    """The value with each key as it was written: ``0`` is the name of a GPU."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else as_yaml(key): _keyed_by_text(each) for key, each in value.items()
        }
    return [_keyed_by_text(each) for each in value] if isinstance(value, list) else value
