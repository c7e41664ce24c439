"""Compose files -> one frozen ``Config``.

Flags win over the environment (``ANVIL_*``), that over the file, that over the default.

``docker compose config`` reads the files where that program exists. It is not asked where runtime is process
(so that needs no Docker), and where it is missing interpolate.py reads one file itself. Both give the same
``Config``. Compose merges ``x-anvil`` of several files key by key at no level: the last file's replaces it.

Problems are collected and raised together, each with file, line and key. What works but will bite is in
``Config.warnings``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from anvil_mux.config import interpolate, service, settings
from anvil_mux.config.checking import Checks
from anvil_mux.config.composefile import Compose, combine, run_compose
from anvil_mux.config.config import (
    LABEL,
    SERVICE_NAME,
    WAYS,
    Backend,
    Config,
    Gpu,
    Judge,
    Service,
    default_of,
)
from anvil_mux.config.interpolate import Document, KeyPath
from anvil_mux.config.plugins import Plugins
from anvil_mux.config.problems import Problems
from anvil_mux.config.profile import Profile, read
from anvil_mux.config.settings import Setting
from anvil_mux.config.table import RENAMED, SERVICE_SETTINGS, SETTINGS
from anvil_mux.errors import ConfigError


def load(
    paths: Sequence[Path | str],
    *,
    plugins: Plugins,
    environ: Mapping[str, str] = os.environ,
    compose: Compose | None = run_compose,
    present: Mapping[str, Gpu] | None = None,
    overrides: Mapping[str, object] | None = None,
    judge: Judge | None = None,
) -> Config:
    """The configuration in these files, or ConfigError with everything that is wrong with it.

    ``present``: the GPUs that this machine has, by index and by UUID, where they can be asked.
    ``overrides``: keys of ``SETTINGS`` as the command line gave them; None means not given.
    ``judge``: asked about services that are to be checkpointed; None: the file is not for this machine.
    """
    if not paths:
        raise ConfigError(["no compose file is given"])
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            documents.append(interpolate.read(Path(path)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _ConfigReader(
        documents=documents,
        plugins=plugins,
        environ=environ,
        present=present or {},
        overrides=overrides or {},
        judge=judge,
    ).load(compose)


class _ConfigReader:
    """The reading of some files: what was found so far, good and bad."""

    def __init__(
        self,
        documents: Sequence[Document],
        plugins: Plugins,
        environ: Mapping[str, str],
        present: Mapping[str, Gpu],
        overrides: Mapping[str, object],
        judge: Judge | None,
    ) -> None:
        self._documents = documents
        self._plugins = plugins
        self._environ = environ
        self._present = present
        self._judge = judge
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        self._problems = Problems(documents)
        self._origins = self._problems.origins
        self._variables = interpolate.environment(documents[0].file.parent, environ)
        self._host_ports: dict[str, set[int]] = {}
        self._each_gpus: dict[str, list[tuple[str, ...]]] = {}  # scaled service -> those of each replica

    def load(self, compose: Compose | None) -> Config:
        content = combine(self._documents, self._environ, None if self._wants_process() else compose)
        self._problems.warnings += content.warnings
        values = self._top_level(content.settings)
        self._preload = values.get("preload", default_of(Config, "preload"))
        values.setdefault("project", content.project or default_of(Config, "project"))
        self._plain = content.plain
        self._process = values.get("runtime", default_of(Config, "runtime")) == "process"
        self._gpus = {gpu.id: gpu for gpu in map(self._known, values.pop("gpus", ()))}
        self._declared = bool(self._gpus)
        backends = self._backends(content.services)
        used = {gpu for backend in backends for gpu in backend.gpus}
        for gpu in sorted(used, key=lambda id: (len(id), id)):
            self._gpus.setdefault(gpu, self._known(Gpu(gpu)))
        Checks(
            self._problems,
            plugins=self._plugins,
            values=values,
            backends=backends,
            gpus=self._gpus,
            host_ports=self._host_ports,
        ).run()
        self._problems.raise_all()
        return Config(
            tuple(backends),
            gpus=tuple(self._gpus.values()),
            files=tuple(os.path.abspath(document.file) for document in self._documents),
            warnings=tuple(dict.fromkeys(self._problems.warnings)),
            origins=self._origins,
            **values,
        )

    def _wants_process(self) -> bool:
        """Whether the runtime is ``process``, seen before the Compose program is asked for anything."""
        found: object = ""
        for document in self._documents:
            top = document.content.get("x-anvil")
            if isinstance(top, dict):
                found = top.get("runtime", "")  # Compose takes all of it from the last file
        found = self._overrides.get("runtime") or self._environ.get("ANVIL_RUNTIME") or found
        try:
            return interpolate.Scope(self._variables).fill(str(found)) == "process"
        except ValueError:
            return False

    # Settings

    def _top_level(self, given: Any) -> dict[str, Any]:
        """Arguments of ``Config``: from the file, the environment and the flags, the later the stronger."""
        values = self._take(SETTINGS, given, ("x-anvil",))
        for key in values:
            self._origins[key] = self._problems.where(("x-anvil", key)).partition(": ")[0]
        for old, new in RENAMED.items():
            if self._environ.get(f"ANVIL_{old.upper()}"):
                self._problems.of_variable(f"ANVIL_{old.upper()}", f"is now ANVIL_{new.upper()}")
        for key, setting in SETTINGS.items():
            variable = f"ANVIL_{key.upper()}"
            if text := self._environ.get(variable):
                values |= self._given(key, setting, _structure(text), variable)
        for key, value in self._overrides.items():
            values |= self._given(key, SETTINGS[key], value, "flag")
        for key in values:
            if SETTINGS[key].is_file:
                values[key] = os.path.abspath(self._documents[0].file.parent / values[key])
        return settings.filled(SETTINGS, values)

    def _given(self, key: str, setting: Setting, value: object, origin: str) -> dict[str, Any]:
        self._origins[key] = origin
        return self._read(key, setting, value, partial(self._problems.of_setting, key))

    def _read(self, key: str, setting: Setting, value: Any, tell: Callable[..., None]) -> dict[str, Any]:
        """The value of a setting, as far as it can be read; ``tell`` is called with each problem's way."""
        try:
            return {key: setting.kind.read(value)}
        except settings.Wrong as wrong:
            for path, text in wrong.problems:
                tell(text, *path)
            return {key: wrong.rest}
        except ValueError as error:
            tell(str(error))
            return {}

    def _take(
        self, table: Mapping[str, Setting], given: Any, key: KeyPath, prefix: str = ""
    ) -> dict[str, Any]:
        """Read the settings in ``given`` by ``table``; an empty value counts as none."""
        if given is not None and not isinstance(given, dict):
            self._problems.add(
                key, f"must hold settings such as {next(iter(table))}, not {settings.show(given)}"
            )
            return {}
        taken: dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name not in table:
                self._problems.add((*key, prefix + name), _unknown(name, table))
            elif value is not None:
                tell = partial(self._problems.within, (*key, prefix + name))
                taken |= self._read(name, table[name], value, tell)
        return taken

    # Services

    def _backends(self, services: Any) -> list[Backend]:
        backends: list[Backend] = []
        ours = False
        for name, described in self._in_order(services):
            key = ("services", name)
            try:
                said = service.labels(described, LABEL)
                if not said and "x-anvil" not in described:
                    continue
                ours = True
                given = self._take(SERVICE_SETTINGS, said, (*key, "labels"), LABEL)
                given |= self._take(SERVICE_SETTINGS, described.get("x-anvil"), (*key, "x-anvil"))
                given = settings.filled(SERVICE_SETTINGS, given)
                backends += self._replicas(self._backend(name, described, given), described)
            except ValueError as error:
                ours = True
                self._problems.add(key, str(error))
        if not ours:
            self._problems.add(
                ("services",), "none serves a model; add `x-anvil: {}` to each service that does"
            )
        return backends

    def _replicas(self, backend: Backend, described: dict[str, Any]) -> Iterator[Backend]:
        """The containers of a scaled service, each a backend; of any other the one."""
        name, scale, each_gpus = backend.name, service.copies(described), self._each_gpus.get(backend.name)
        if each_gpus and len(each_gpus) != scale:
            raise ValueError(f"has {scale} replicas, and gpus for {len(each_gpus)}")
        if scale == 1 and not each_gpus:
            yield backend
            return
        for number in range(1, scale + 1):
            made = replace(backend.service, name=name, number=number, scale=scale)
            gpus = backend.gpus
            if each_gpus:
                gpus = each_gpus[number - 1]
                variables = {**dict(made.environment), **service.sees_only(gpus)}
                made = replace(made, environment=tuple(sorted(variables.items())))
            self._host_ports[f"{name}-{number}"] = self._host_ports[name]
            yield replace(backend, name=f"{name}-{number}", gpus=gpus, service=made)

    def _in_order(self, services: Any) -> list[tuple[str, Any]]:
        """The services in the order of the files; the Compose program sorts them by name."""
        found = services if isinstance(services, dict) else {}
        written = [document.content.get("services") for document in self._documents]
        names = dict.fromkeys(name for each in written if isinstance(each, dict) for name in each)
        return [(name, found[name]) for name in dict.fromkeys((*names, *found)) if name in found]

    def _backend(self, name: str, described: dict[str, Any], given: dict[str, Any]) -> Backend:
        _check_service(name, described)
        if self._plain and "env_file" in described:
            self._problems.add(("services", name, "env_file"), interpolate.NEED_COMPOSE)
        engine = self._fill_in(name, described, given)
        variables = service.environment(described, self._variables)
        given["gpus"] = self._gpus_of(name, given.get("gpus", service.gpus(described, variables)))
        given.setdefault("preload", self._preload)
        given.setdefault("evict_to", service.lightest_levels(described, variables, engine))
        self._check_rest(name, described, variables, given)
        if "profile" in given:
            given["profile"] = self._profile(name, given["profile"])
        given["aliases"] = tuple(alias for alias in given.get("aliases", ()) if alias != given["model"])
        backend = Backend(name, service=self._service(described, variables), **given)
        if self._process:
            self._host_ports[name] = {backend.port} if backend.port else set()
            if not backend.service.command:
                self._problems.add(("services", name), "needs a `command`, since runtime is process")
            bites = service.process_bites(described, backend.port)
        else:
            published = service.published(described)
            self._host_ports[name] = {port.outside for port in published if port.outside}
            if described.get("network_mode") == "host" and backend.port:
                self._host_ports[name].add(backend.port)
            bites = service.bites(described, engine, backend.port, backend.gpus)
        place = self._problems.where(("services", name)).partition(": ")[0]
        self._problems.warnings += [f"{place}: service {name}: {text}" for text in bites]
        return backend

    def _fill_in(self, name: str, described: dict[str, Any], given: dict[str, Any]) -> str:
        """Fill in settings that are not given by what the service says; return its engine."""
        model = given.setdefault("model", settings.TEXT.read(name))
        engine = given.setdefault("engine", service.engine(described))
        names = service.served_model(described, engine)
        if names and model not in names:
            given.setdefault("served_model", names[0])
        if grace := described.get("stop_grace_period"):
            given.setdefault("stop_timeout", settings.read_seconds(grace))
        if "port" not in given:
            given["port"] = self._port(described)
        return str(engine)

    def _check_rest(
        self, name: str, described: dict[str, Any], variables: dict[str, str], given: Mapping[str, Any]
    ) -> None:
        levels = given["evict_to"]
        if list(levels) != sorted(levels, key=WAYS.index):
            down = ", ".join(sorted(levels, key=WAYS.index))
            self._problems.add(
                ("services", name, "x-anvil", "evict_to"),
                f"goes from the lightest standby level down: write [{down}]",
            )
        for way in levels:
            why = service.cannot_evict_to(described, variables, given["engine"], way)
            if way == "checkpoint" and self._judge:
                why = why or self._judge(given["gpus"], given.get("checkpoint_anyway", False)) or ""
            if why:
                self._problems.add(("services", name, "x-anvil", "evict_to"), f"{way} cannot work: {why}")

    def _profile(self, name: str, file: str) -> Profile | None:
        """The profile in a file, whose path begins at the folder of the first compose file."""
        path = self._documents[0].file.parent / file
        try:
            return read(path.read_text(encoding="utf-8"))
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}"
        except ValueError as error:
            text = f"{path}: {error}"
        self._problems.add(("services", name, "x-anvil", "profile"), text)
        return None

    def _port(self, described: dict[str, Any]) -> int | None:
        return (service.commanded_port if self._process else service.listens_on)(described)

    def _service(self, described: dict[str, Any], variables: dict[str, str]) -> Service:
        folder = described.get("working_dir")
        if folder is not None and self._process:
            folder = os.path.abspath(self._documents[0].file.parent / str(folder))
        return Service(
            image=described.get("image"),
            command=service.argv(described),
            environment=tuple(sorted(variables.items())),
            working_dir=folder,
            profiles=service.profiles(described),
            user=str(described.get("user") or ""),
            digest=service.digest(described, LABEL),
        )

    def _gpus_of(
        self, name: str, used: str | tuple[str, ...] | list[tuple[str, ...]] | None
    ) -> tuple[str, ...]:
        """The GPUs of the service, or of its first replica where each has its own."""
        if not isinstance(used, list):
            return self._used(name, used)
        if not self._process:
            key = ("services", name, "x-anvil", "gpus")
            self._problems.add(
                key,
                "differ between replicas, and Compose gives all containers of a service the same GPUs: "
                "write a service for each, each with the same x-anvil: {model: ...}",
            )
        self._each_gpus[name] = [self._used(name, each) for each in used]
        return self._each_gpus[name][0]

    def _used(self, name: str, used: str | tuple[str, ...] | None) -> tuple[str, ...]:
        if used == service.ALL:
            known = self._gpus or {gpu.id: gpu for gpu in self._present.values()}
            if not known:
                say = 'say which there are at the top level: x-anvil: {gpus: ["0"]}'
                self._problems.add(("services", name), f"uses all GPUs; {say}")
            return tuple(known)
        ids = tuple(dict.fromkeys(self._known(Gpu(id)).id for id in used or ()))
        for id in ids:
            if self._declared and id not in self._gpus:
                declared = ", ".join(self._gpus)
                self._problems.add(
                    ("services", name, "x-anvil", "gpus"), f"GPU {id} is not declared; declared: {declared}"
                )
        return ids

    def _known(self, gpu: Gpu) -> Gpu:
        """The GPU under its own id, with its real memory where none is declared."""
        real = self._present.get(gpu.id)
        return gpu if real is None else Gpu(real.id, gpu.vram or real.vram, gpu.reserve)


def _unknown(key: str, table: Mapping[str, Setting]) -> str:
    if table is SETTINGS and key in RENAMED:
        return f"is now called {RENAMED[key]}: write x-anvil: {{{RENAMED[key]}: ...}}"
    return f"unknown key; {settings.nearest(key, table)}"


def _check_service(name: str, described: dict[str, Any]) -> None:
    if not SERVICE_NAME.fullmatch(name):
        raise ValueError("its name may hold letters, digits, ., _ and - only; x-anvil: {model: ...} any")
    if service.copies(described) > 1 and "container_name" in described:
        raise ValueError("is scaled, so it can have no container_name")


def _structure(text: str) -> object:
    """Read the YAML list or mapping that an environment variable may hold."""
    if text[0] not in "[{":
        return text
    try:
        return yaml.load(text, interpolate.Loader)
    except yaml.YAMLError:
        return text
