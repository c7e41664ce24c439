"""Compose files -> one frozen ``Config``: they are read, and what they say is checked, each service and all
together.

``docker compose config`` reads the files where that program exists. It is not asked where runtime is process
(so that needs no Docker), and where it is missing interpolate.py reads one file itself. Both give the same
``Config`` (compose.py).

Problems are collected and raised together, each with file, line and key. A problem is what cannot work; what
works but will cause trouble is in ``Config.warnings``.

A model's own name, an alias, a preset, a LoRA adapter and a name for several models share one space: each
name stands for one thing, whichever service gave it. What one replica says of aliases and presets holds for
its model; adapters are in engines, so every replica must have them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.config import interpolate, reading
from anvil_mux.config.backends import BackendReader
from anvil_mux.config.compose import Compose, Layers, combine, origins
from anvil_mux.config.config import EITHER, SETTINGS, Backend, Config, Judge, models_by_name
from anvil_mux.config.interpolate import Document
from anvil_mux.config.kinds import (
    AUTO,
    Diagnostic,
    KeyPath,
    advice,
    as_yaml,
    filled,
    gib,
    meant,
    nearest,
    no_such,
)
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.placement import Places
from anvil_mux.config.reading import Problems
from anvil_mux.config.service import USUAL_PORT, USUAL_PORTS
from anvil_mux.config.values import AnyOf, Preset
from anvil_mux.errors import ConfigError
from anvil_mux.protocol.naming import MAX_MODEL_NAME


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
            resolved_compose=content.resolved,
            compose_variables=dict(content.variables),
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


# Checks of what could be read


MOST_CHARACTERS = 128
"""Characters of a project's and a service's name: files have both in their names, of at most 255 bytes."""


class Checks:
    """The checks of one configuration; what they find they add to ``problems``."""

    def __init__(self, problems: Problems, config: Config, reader: BackendReader, names: Names) -> None:
        self._problems = problems
        self._config = config
        self._names = names
        self._gpus = {gpu.name: gpu for gpu in config.gpus}
        self._host_ports = reader.ports
        self._described = reader.services_described
        self._own_names = reader.places.own_names
        self._services = reader.services
        singles = [self._services[each.name] for each in config.backends if each.service.scale == 1]
        self._several = Counter(singles)
        """Service -> how many backends are made of it, of which only some are loaded at once."""

    def run(self) -> None:
        self._check_settings()
        self._check_stages()
        self._check_names()
        self._check_any_of()
        self._check_homes()
        self._check_external()
        self._check_fallbacks()
        self._check_room()
        self._check_ports()
        self._check_shared_networks()
        self._check_waits()
        self._check_own_names(self._own_names)

    def _key(self, backend: Backend, *path: str) -> KeyPath:
        """The key of the files below which the backend's service stands."""
        return ("services", self._services[backend.name], *path)

    def _check_settings(self) -> None:
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self._config, one) and not getattr(self._config, other):
                self._problems.of_setting(one, Diagnostic(f"needs {other} beside it", write=f"{other}: FILE"))
        if self._config.pages_port == self._config.port:
            text = "is the port of listen as well: pages of engines need another"
            self._problems.of_setting("pages_port", Diagnostic(text))
        names = {name for backend in self._config.backends for name in backend.names}
        names |= self._config.any_of.keys()
        if (default := self._config.default_model) and default not in names:
            found = no_such(f"no service serves {default}", default, names)
            self._problems.of_setting("default_model", found)

    def _check_stages(self) -> None:
        stages = {(backend.model, backend.infer_type) for backend in self._config.backends}
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            for backend in self._config.backends:
                served = {(backend.model, other), (backend.model, EITHER)} & stages
                if backend.infer_type == one and not served:
                    text = f"is {one}, but no service of {backend.model} is {other}: both stages are needed"
                    key = self._key(backend, "x-anvil", "infer_type")
                    self._problems.add(key, text, f"infer_type: {EITHER}")

    def _check_names(self) -> None:
        for name, count in Counter(backend.name for backend in self._config.backends).items():
            if count > 1:
                scaled = any(each.name == name and each.service.scale > 1 for each in self._config.backends)
                what = "a replica of a scaled service" if scaled else "what another service becomes on a host"
                self._problems.add(("services", name), f"{what} is called {name} too")
        self._check_lengths()
        self._names.check(self._config.backends)

    def _check_lengths(self) -> None:
        """Check that no name is too long for what is named after it: files, and fields of requests."""
        project, write = self._config.project, f"name: {self._config.project[:20]}"
        if len(project) > MOST_CHARACTERS:
            text = f"must have at most {MOST_CHARACTERS} characters, not {len(project)}"
            self._problems.of_setting("project", Diagnostic(f"{text}; write {write}", said=text, write=write))
        for key, name in {self._key(each): each.name for each in self._config.backends}.items():
            if len(name) > MOST_CHARACTERS:
                text = f"its name must have at most {MOST_CHARACTERS} characters, not {len(name)}"
                self._problems.add(key, f"{text}; x-anvil: {{model: ...}} may have more")
        names = {name: self._key(each, "x-anvil") for each in self._config.backends for name in each.names}
        names |= dict.fromkeys(self._config.any_of, ("x-anvil", "any_of"))
        for name, key in names.items():
            if len(name) > MAX_MODEL_NAME:
                text = f"must have at most {MAX_MODEL_NAME} characters, not {len(name)}"
                self._problems.add(key, f"the name {name[:20]}... {text}")

    def _check_any_of(self) -> None:
        names, any_of = self._config.names, self._config.any_of
        for name, each in any_of.items():
            if name in names:
                text = f"is a name of the model {names[name]} already: call it otherwise"
                found = Diagnostic(text, write=f"any-{name}: {as_yaml(each.as_written())}")
                self._problems.of_setting("any_of", found, name)
            for model in each.models:
                if model in any_of:
                    text = f"{model} stands for several models itself: name the models"
                    self._problems.of_setting("any_of", text, name)
                elif model not in names:
                    text = f"no service serves {model}; {nearest(model, names)}"
                    near = meant(model, names)
                    mended = as_yaml(each.renamed({model: near}).as_written()) if near else ""
                    self._problems.of_setting("any_of", Diagnostic(text, value=mended), name)
            self._check_rules(name, each)

    def _check_rules(self, name: str, any_of: AnyOf) -> None:
        """Warn of rules that no request comes to, and where a request may come to none."""
        for before, rule in pairwise(any_of.rules):
            if not before.when:
                self._problems.warn_of_setting(
                    "any_of",
                    f"any_of.{name}: {before.words} has no conditions and takes every request before "
                    f"{rule.words}: put what has no `when` last",
                )
        if any_of.rules and all(rule.when for rule in any_of.rules):
            self._problems.warn_of_setting(
                "any_of",
                f"any_of.{name}: a request that none of its conditions fits is refused: end it with a model "
                "that has no `when`",
            )

    def _check_homes(self) -> None:
        """Check that home backends may come back, and stay."""
        homes = {self._services[each.name]: each for each in self._config.backends if each.home}
        for service, backend in homes.items():
            key = self._key(backend, "x-anvil", "home")
            if backend.ttl is not None:
                text = "cannot hold with ttl, which evicts it when it is idle: leave one out"
                self._problems.add(key, text)
            if not backend.gpus:
                self._problems.warn(key, "has no effect: it needs no GPU, so it is evicted for no other")
            for other in [each for name, each in homes.items() if name < service]:
                shared = [gpu for gpu in backend.gpu_names if gpu in other.gpu_names and self._is_there(gpu)]
                measured = backend.vram_measured or other.vram_measured
                if not measured and any(not _fit((backend, other), _room(self._gpus[gpu])) for gpu in shared):
                    where = f"is at home on GPU {min(shared)} too"
                    self._problems.add(key, f"{other.name} {where}, and both do not fit: one of them")

    def _check_external(self) -> None:
        served = Counter(backend.model for backend in self._config.backends)
        for backend in self._config.backends:
            if backend.url and served[backend.model] > 1:
                self._problems.add(
                    self._key(backend, "x-anvil", "url"),
                    f"{backend.model} has other services: give this one a name of its own, x-anvil: "
                    "{model: ...}, and name that in the fallback of the others",
                    f"model: {backend.model}-elsewhere",
                )

    def _check_fallbacks(self) -> None:
        names = models_by_name(self._config.backends)
        own = {each.model: each.fallback for each in self._config.backends if each.fallback}
        first: dict[str, Backend] = {}
        for backend in self._config.backends:
            key = self._key(backend, "x-anvil", "fallback")
            before = first.setdefault(backend.model, backend)
            if (before.fallback, before.fallback_after) != (backend.fallback, backend.fallback_after):
                said = f"differs from that of {before.name}, a replica of the same model: say the same"
                self._problems.add(key, said, f"fallback: {as_yaml(list(before.fallback))}")
            for name in [name for name in backend.fallback if name not in names]:
                self._problems.add(key, self._no_model(name, names))
            if before is backend and (way := _circle(backend.model, names, own)):
                self._problems.add(key, f"leads back to where it began: {' -> '.join(way)}")

    def _no_model(self, name: str, names: Mapping[str, str]) -> str:
        """Why a name is not that of a model, and what to write instead; ``names``: those that are."""
        for each in self._config.backends:
            if name in each.names:
                text = f"{name} is a preset of {each.model}, not a model: name {each.model}"
                return Diagnostic(text, value=each.model)
        if several := self._config.any_of.get(name):
            text = f"{name} stands for several models: name {', '.join(several.models)}"
            return Diagnostic(text, value=as_yaml(list(several.models)))
        return no_such(f"no service serves {name}", name, names)

    def _check_room(self) -> None:
        users: dict[str, list[Backend]] = {name: [] for name in self._gpus}
        for backend in self._config.backends:
            for name in backend.gpu_names:
                if self._is_there(name):
                    users[name].append(backend)
        told: set[str] = set()
        for name, gpu in self._gpus.items():
            for backend in users[name]:
                if backend.vram and (service := self._services[backend.name]) not in told:
                    told |= {service} if self._check_size(gpu, backend) else set()
            self._check_replicas(gpu, users[name])
        self._check_pins(users)

    def _check_size(self, gpu: Gpu, backend: Backend) -> bool:
        """Check that a GPU is large enough for a backend; return whether something was wrong with that."""
        key, room = self._key(backend, "x-anvil", "vram"), _room(gpu)
        assert backend.vram
        if room is None:
            text = f'gpus: {{"{gpu.id}": {{vram: ...}}}}'
            said = f"has no effect: the size of GPU {gpu.name} is unknown"
            write = f"x-anvil: {{{f'machines: {{{gpu.host}: {{{text}}}}}' if gpu.host else text}}}"
            self._problems.warn(key, advice(said, write, f"declare it: {write}"))
        elif backend.vram > room:
            text = f"{gib(backend.vram)} do not fit on GPU {gpu.name}, which has {gib(room)} for models"
            self._problems.add(key, text, f"vram: {room >> 20}MiB")
        return room is None or backend.vram > room

    def _check_replicas(self, gpu: Gpu, users: Sequence[Backend]) -> None:
        for name, count in Counter(self._services[backend.name] for backend in users).items():
            if count < 2:
                continue
            pair = [backend for backend in users if self._services[backend.name] == name][:2]
            if not pair[0].vram_measured and not _fit(pair, _room(gpu)):
                self._problems.warn(
                    ("services", name),
                    f"no two of its replicas fit on GPU {gpu.name}, "
                    "so they take turns: declare what one takes, x-anvil: {vram: ...}",
                    "x-anvil: {vram: measured}",
                )

    def _check_pins(self, users: Mapping[str, Sequence[Backend]]) -> None:
        """Check that what is pinned fits, and leaves room; a choice counts only if all of it is taken."""
        beaten: Counter[str] = Counter()
        for name, gpu in self._gpus.items():
            room = _room(gpu)
            pinned = [each for each in users[name] if each.pin and not self._has_choice(each)]
            names = ", ".join(backend.name for backend in pinned)
            if not _fit(pinned, room):
                key = self._key(pinned[-1], "x-anvil", "pin")
                self._problems.add(key, f"the pinned {names} do not fit on GPU {name} together")
                continue
            for backend in users[name] if pinned else ():
                if backend in pinned or _fit([*pinned, backend], room):
                    continue
                service = self._services[backend.name]
                beaten[service] += 1
                if beaten[service] >= self._several[service]:
                    self._problems.warn(
                        ("services", service),
                        f"does not fit on GPU {name} beside the pinned {names}: while that is loaded its "
                        "requests are refused; unpin, or declare less vram",
                    )

    def _is_there(self, gpu: str) -> bool:
        return not self._gpus[gpu].missing

    def _has_choice(self, backend: Backend) -> bool:
        return self._several[self._services[backend.name]] > 1

    def _check_own_names(self, names: Sequence[str]) -> None:
        """Check that the GPUs of this machine are used under one name; ``names``: its names as a host."""
        local = [backend for backend in self._config.backends if backend.gpus and not backend.host]
        for name in names:
            users = [each for each in self._config.backends if each.gpus and each.host == name]
            if local and users:
                text = (
                    f"runs on GPUs of this machine, and so does {users[0].name}, to which it is the host "
                    f"{name}: each GPU would be given to both; name the machine in one way"
                )
                self._problems.add(self._key(local[0], "x-anvil", "hosts"), text, f"hosts: {name}")

    def _check_waits(self) -> None:
        """Check that requests may wait for long enough to be served."""
        limit = self._config.queue_timeout
        for longest in dict.fromkeys([backend.max_wait for backend in self._config.backends]):
            if longest != AUTO and limit < float(longest):
                text = (
                    f"queue_timeout ({limit:g} s) is less than max_wait ({longest:g} s): a queue is overdue "
                    "before that, early enough for a load that takes as long as loads usually do"
                )
                self._problems.warn_of_setting("queue_timeout", text, f"queue_timeout: {longest:g}")
        slow = dict.fromkeys(
            self._services[b.name] for b in self._config.backends if b.load_timeout > limit and not b.url
        )
        if slow:
            text = (
                f"queue_timeout ({limit:g} s) is less than the load_timeout of {', '.join(slow)}: requests "
                "that wait for a load fail when it takes longer than that, though it goes on"
            )
            longest = max(b.load_timeout for b in self._config.backends if not b.url)
            self._problems.warn_of_setting("queue_timeout", text, f"queue_timeout: {longest:g}")

    def _check_ports(self) -> None:
        users: dict[tuple[str, int], list[int]] = {}  # (host, port) -> places of backends in the list
        listen = self._config.port
        for place, backend in enumerate(self._config.backends):
            for port in self._host_ports[backend.name]:
                users.setdefault((backend.host, port), []).append(place)
            if listen in self._host_ports[backend.name] and not backend.host:
                text = f"port {listen} is the one that anvil-mux listens on"
                write = f'ports: ["127.0.0.1::{backend.port or "PORT"}"]'
                self._problems.add(self._key(backend), text, write)
        for pair in sorted({pair for places in users.values() for pair in combinations(places, 2)}):
            self._check_pair(*(self._config.backends[place] for place in pair))

    def _check_pair(self, one: Backend, other: Backend) -> None:
        """Check that two backends that take the same port of a host never run at once."""
        common = self._host_ports[one.name] & self._host_ports[other.name]
        if self._take_turns(one, other):
            return
        ports = ", ".join(map(str, sorted(common)))
        text = f"port {ports} is also that of {one.name}, and both may run at once"
        if self._services[one.name] == self._services[other.name]:
            text = f"port {ports} cannot be that of all its replicas: {self._port_advice(other)}"
        process = self._config.runtime == "process"
        write = "" if process else f'ports: ["127.0.0.1::{other.port or "PORT"}"]'
        self._problems.add(self._key(other), text, write)

    def _check_shared_networks(self) -> None:
        """Check that two engines on the network of one service, with one port there, never run at once."""
        users: dict[tuple[str, int], list[Backend]] = {}
        for backend in self._config.backends:
            if backend.url or backend.host or self._config.runtime == "process":
                continue
            port = backend.port or USUAL_PORTS.get(backend.engine, USUAL_PORT)
            users.setdefault((self._network_of(self._services[backend.name]), port), []).append(backend)
        for (network, port), backends in users.items():
            for one, other in combinations(backends, 2):
                named = self._services[one.name], self._services[other.name]
                if named == (network, network) or self._take_turns(one, other):
                    continue
                shown = network.removeprefix("container:")
                text = (
                    f"port {port} on the network of {shown} is also that of {one.name}, and both may run at "
                    "once: have its command listen on another port, and write that as x-anvil: {port: PORT}"
                )
                self._problems.add(self._key(other), text, "")

    def _network_of(self, name: str) -> str:
        """Return the service whose network a service has, or its container as ``container:NAME``."""
        followed: set[str] = set()
        while name not in followed and isinstance(described := self._described.get(name), Mapping):
            followed.add(name)
            mode = str(described.get("network_mode") or "")
            if mode.startswith("container:"):
                return mode
            if not mode.startswith("service:"):
                break
            name = mode.removeprefix("service:")
        return name

    def _port_advice(self, backend: Backend) -> str:
        if self._config.runtime == "process":
            return "leave it out, and each has one of its own in $PORT"
        return f'publish any, "127.0.0.1::{backend.port or "PORT"}", or a range'

    def _take_turns(self, one: Backend, other: Backend) -> bool:
        """Whether two backends never run at once; one in standby keeps its port."""
        if {*one.evict_to, *other.evict_to} != {"stop"} or one.vram_measured or other.vram_measured:
            return False
        if one.most == 1 and self._services[one.name] == self._services[other.name]:
            return True
        common = set(one.gpu_names) & set(other.gpu_names)
        return any(not _fit((one, other), _room(self._gpus[gpu])) for gpu in common)


def _room(gpu: Gpu) -> int | None:
    return gpu.vram - gpu.reserve if gpu.vram else None


def _fit(backends: Sequence[Backend], room: int | None) -> bool:
    """Whether backends can be on a GPU with this much room at once."""
    if len(backends) < 2:
        return True
    needs = [backend.vram for backend in backends]
    return room is not None and all(needs) and sum(need or 0 for need in needs) <= room


# Names


class _NameUse(NamedTuple):
    """The first that has a name."""

    model: str
    what: str
    key: KeyPath
    preset: Preset | None = None


class Names:
    """The names in one configuration."""

    def __init__(self, problems: Problems, reader: BackendReader) -> None:
        self._problems = problems
        self._services = reader.services
        self._loras = reader.loras

    # Adapters that only a command names

    def settled(self, backends: Sequence[Backend]) -> list[Backend]:
        """The backends without those adapters of commands that cannot be names, of which it is warned."""
        if not any(preset.is_adapter for backend in backends for preset in backend.presets):
            return list(backends)
        replicas = Counter(backend.model for backend in backends)
        having = Counter((backend.model, preset.name) for backend in backends for preset in backend.presets)
        owners = self._said_names(backends)
        made = []
        for backend in backends:
            kept = list(backend.presets)
            for preset in self._from_command(backend):
                model = backend.model
                why = ""
                if owners.get(preset.name, model) != model or preset.name in (model, *backend.aliases):
                    why = f"that is a name of {owners[preset.name]}"
                elif having[model, preset.name] < replicas[model]:
                    why = f"not every replica of {model} has it"
                if why:
                    kept.remove(preset)
                    text = f"its LoRA adapter {preset.name} cannot be asked for: {why}"
                    self._problems.warn(("services", self._services[backend.name]), text)
                owners.setdefault(preset.name, model)
            is_whole = len(kept) == len(backend.presets)
            made.append(backend if is_whole else replace(backend, presets=tuple(kept)))
        return made

    def _from_command(self, backend: Backend) -> list[Preset]:
        said = self._loras.get(self._services[backend.name], frozenset())
        return [preset for preset in backend.presets if preset.is_adapter and preset.name not in said]

    def _said_names(self, backends: Sequence[Backend]) -> dict[str, str]:
        """The names that do not come from commands -> the model."""
        owners: dict[str, str] = {}
        for backend in backends:
            from_command = self._from_command(backend)
            said = [preset.name for preset in backend.presets if preset not in from_command]
            owners |= dict.fromkeys([backend.model, *backend.aliases, *said], backend.model)
        return owners

    # Clashes

    def check(self, backends: Sequence[Backend]) -> None:
        """Note the names that mean two things, and the adapters that a replica lacks."""
        owners: dict[str, _NameUse] = {}
        for backend in backends:
            key: KeyPath = ("services", self._services[backend.name])
            owners.setdefault(backend.model, _NameUse(backend.model, "the name", key))
        for backend in backends:
            key = ("services", self._services[backend.name], "x-anvil", "aliases")
            for alias in backend.aliases:
                owner = owners.setdefault(alias, _NameUse(backend.model, "an alias", key))
                if owner.model != backend.model:
                    self._problems.add(key, f"{alias} is already a name of {owner.model}")
        for backend in backends:
            for own in self._presets(backend):
                assert own.preset
                owner = owners.setdefault(own.preset.name, own)
                if owner is not own and not _is_same(owner, own):
                    where = self._problems.place(owner.key)
                    self._problems.add(own.key, f"is {owner.what} of {owner.model} already ({where})")
        self._check_adapters(backends)

    def _presets(self, backend: Backend) -> Iterator[_NameUse]:
        for preset in backend.presets:
            kind, what = ("loras", "a LoRA adapter") if preset.is_adapter else ("presets", "a preset")
            key = ("services", self._services[backend.name], "x-anvil", kind, preset.name)
            yield _NameUse(backend.model, what, key, preset)

    def _check_adapters(self, backends: Sequence[Backend]) -> None:
        """Check that every replica has the adapters that another one's settings name."""
        having: dict[str, dict[str, str]] = {}
        for backend in backends:
            adapters = [preset.name for preset in backend.presets if preset.is_adapter]
            having.setdefault(backend.model, {}).update(dict.fromkeys(adapters, self._services[backend.name]))
        for backend in backends:
            lacking = having[backend.model].keys() - {preset.name for preset in backend.presets}
            for name in sorted(lacking):
                other = having[backend.model][name]
                text = f"lacks the adapter {name}, which {other}, a replica of the same model, has"
                self._problems.add(("services", self._services[backend.name], "x-anvil", "loras"), text)


def _is_same(one: _NameUse, other: _NameUse) -> bool:
    """Whether two replicas give a name one meaning; adapters may have other numbers in each."""
    if one.preset is None or other.preset is None or one.model != other.model or one.key == other.key:
        return one.key == other.key
    return one.preset == other.preset or (one.preset.is_adapter and other.preset.is_adapter)


def _circle(model: str, names: Mapping[str, str], own: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The way on which the fallbacks of a model lead back to it; () if they do not."""
    ways: list[tuple[str, ...]] = [(model,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        for other in [names[name] for name in own.get(way[-1], ()) if name in names]:
            if other == model:
                return (*way, model)
            if other not in seen:
                seen.add(other)
                ways.append((*way, other))
    return ()
