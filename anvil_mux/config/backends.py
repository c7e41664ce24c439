"""The services of compose files -> backends: what each says of its engine, and each place where it may run.

A scaled service is one backend for each of its containers, one with a choice of hosts or GPUs one for each
candidate (placement.py). Guesses about the engine come from service.py.
"""

from __future__ import annotations

import os
import re
import ssl
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from anvil_mux import state
from anvil_mux.config import abilities, compose, grants, interpolate, service
from anvil_mux.config.compose import Content, GeneratedFiles, Place
from anvil_mux.config.config import (
    LABEL,
    SERVICE_NAME,
    SERVICE_SETTINGS,
    WAYS,
    Backend,
    Config,
    Judge,
    inherited,
)
from anvil_mux.config.kinds import TEXT, as_diagnostic, as_yaml, filled, read_seconds, unfit
from anvil_mux.config.machines import WantedHosts
from anvil_mux.config.placement import HostChoice, Need, Places
from anvil_mux.config.reading import Problems, take, unknown_key
from anvil_mux.config.service import GivenGpus, Service
from anvil_mux.config.values import URL_EXAMPLE, Loras, Profile, read_profile

Description = dict[str, Any]
NEED_URL = ("api_key_env", "ca_file")
"""Settings of servers elsewhere alone."""
ELSEWHERE = "elsewhere"
"""The digest of every service elsewhere: what Compose would make of it does not matter."""


class BackendReader:
    """Reads services into backends; what is wrong with one hides nothing of another.

    ``whole``: the configuration without backends. ``folder``: that of the first file.
    """

    def __init__(
        self,
        problems: Problems,
        places: Places,
        content: Content,
        whole: Config,
        *,
        folder: Path,
        variables: Mapping[str, str],
        judge: Judge | None,
    ) -> None:
        self.problems = problems
        self.places = places
        self.folder = folder
        self.variables = variables
        self.judge = judge
        self.project = whole.project
        self.process = whole.runtime == "process"
        """Whether services are local processes."""
        self.plain = content.plain
        """Whether the files were read without the Compose program."""
        self.shared = content.shared
        """The volumes, networks, secrets and configs of the files."""
        self.composed = GeneratedFiles(content, folder)
        self.ports: dict[str, set[int]] = {}
        """Backend -> the ports of its host that it takes."""
        self.services: dict[str, str] = {}
        """Backend -> the service of the files that it is made of."""
        self.loras: dict[str, frozenset[str]] = {}
        """Service -> the LoRA adapters that its settings name, and not its command alone."""
        self.most: dict[str, int] = {}
        """Service that has a choice -> how many of its backends are resident at once."""
        self.services_described: Mapping[str, Description] = {}
        """All services of the files."""
        self.models: frozenset[str] = frozenset()
        """The services that serve a model."""
        self.silent: list[str] = []
        """The services that say nothing of the GPUs that they need."""

    def read(self, services: Mapping[str, Any]) -> list[Backend]:
        """The backends of the services, in their order."""
        backends: list[Backend] = []
        ours = False
        self.services_described = services
        self.models = frozenset(name for name, each in services.items() if self._may_be_model(each))
        for name, described in services.items():
            try:
                said = service.labels(described, LABEL)
                if not self._is_model(described, said):
                    continue
                ours = True
                made = list(_ServiceReader(self, name, described).backends(said))
                self.services |= dict.fromkeys([backend.name for backend in made], name)
                backends += made
            except ValueError as error:
                ours = True
                self.problems.of_part(("services", name), error)
        self._warn_of_silent()
        if not ours:
            self.problems.add(
                ("services",),
                "none serves a model; add `x-anvil: {}` to each service that does (`anvil-mux check "
                "--suggest` says to which, and what else)",
                "x-anvil: {}",
            )
        return self._bounded(backends)

    def _may_be_model(self, described: Any) -> bool:
        try:
            return self._is_model(described, service.labels(described, LABEL))
        except ValueError:
            return True  # what is wrong with it is reported where it is read

    def _is_model(self, described: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
        """Whether a service is a model: with ``x-anvil``, or as a local process with a command."""
        if "x-anvil" in described:
            return described["x-anvil"] is not False
        return bool(labels) or (self.process and any(described.get(key) for key in ("command", "entrypoint")))

    def _warn_of_silent(self) -> None:
        """Warn once of all services that take every GPU because they name none."""
        if self.silent:
            says = "says nothing of GPUs: it" if len(self.silent) == 1 else "say nothing of GPUs: each"
            self.problems.warn(
                ("services", self.silent[0]),
                f"{', '.join(self.silent)} {says} needs all of its machine; name those that it needs, or "
                "none ([]) if it computes on the CPU",
                "x-anvil: {gpus: all}",
            )

    def _bounded(self, backends: list[Backend]) -> list[Backend]:
        """The backends with ``most``, which is a model's, or a stage's: what its services have together."""
        choosing = {_role(backend) for backend in backends if self.services[backend.name] in self.most}
        if not choosing:
            return backends
        each = Counter((_role(backend), self.services[backend.name]) for backend in backends)
        most: Counter[tuple[str, str]] = Counter()
        for (role, name), count in each.items():
            most[role] += self.most.get(name, count)
        return [replace(b, most=most[_role(b)]) if _role(b) in choosing else b for b in backends]


def _role(backend: Backend) -> tuple[str, str]:
    """The model and the stage of it that a backend serves."""
    return backend.model, backend.infer_type


class _ServiceReader:
    """One service, and what is wrong with it."""

    def __init__(self, files: BackendReader, name: str, described: Description) -> None:
        self._files = files
        self._places = files.places
        self._name = name
        self._described = described

    @cached_property
    def _variables(self) -> dict[str, str]:
        return service.environment(self._described, self._files.variables)

    @cached_property
    def _showing(self) -> dict[str, str]:
        """The variables that decide which GPUs it sees; a process of this machine inherits ours."""
        if not self._files.process:
            return self._variables
        inherited = self._files.variables
        ours = {name: inherited[name] for name in service.SHOWING if name in inherited}
        return self._variables if ours.keys() & self._variables.keys() else {**ours, **self._variables}

    def _add(self, key: Sequence[str], text: str, write: str = "") -> None:
        """Add a problem with what stands at a key of the service."""
        self._files.problems.add(("services", self._name, *key), text, write)

    def _refuse(self, setting: str, text: str, write: str = "", *path: str) -> None:
        """Add a problem with a setting."""
        self._add(("x-anvil", setting, *path), text, write)

    def _warn(self, found: Iterable[str]) -> None:
        for text in found:
            self._files.problems.of_service(self._name, text)

    def backends(self, labels: Mapping[str, str]) -> Iterator[Backend]:
        """The backends that it comes to; ``labels``: those that are settings, which ``x-anvil`` overrides."""
        key, described, problems = ("services", self._name), self._described, self._files.problems
        for name, value in described.items() if self._files.plain else ():
            if wrong := unknown_key(name, value):  # where Compose was not asked
                self._add((name,), wrong)
        given = take(problems, SERVICE_SETTINGS, labels, (*key, "labels"), LABEL)
        given |= take(problems, SERVICE_SETTINGS, described.get("x-anvil"), (*key, "x-anvil"))
        self._check_service()
        values = filled(SERVICE_SETTINGS, given)
        if values.get("url"):
            return iter([self._external(values, {*(described.get("x-anvil") or ()), *labels})])
        for setting in [setting for setting in NEED_URL if setting in values]:
            self._refuse(setting, "needs url beside it", f"url: {URL_EXAMPLE}")
        if "home_after" in values and not values.get("home"):
            home = (*key, "x-anvil", "home_after")
            problems.warn(home, "has no effect without home: true", "home: true")
        if self._files.plain and "env_file" in described:
            self._add(("env_file",), interpolate.NEED_COMPOSE)
        return self._loaded(values)

    def _check_service(self) -> None:
        if not SERVICE_NAME.fullmatch(self._name):
            mended = re.sub(r"[^a-zA-Z0-9._-]+", "-", self._name).strip("._-") or "model"
            text = "its name may hold letters, digits, ., _ and - only; x-anvil: {model: ...} any"
            write = f"{mended}: {{..., x-anvil: {{model: {as_yaml(self._name)}}}}}"
            raise unfit(text, write=write)
        if service.copies(self._described) > 1 and "container_name" in self._described:
            raise ValueError("is scaled, so it can have no container_name")

    # A server elsewhere

    def _external(self, values: dict[str, Any], said: set[str]) -> Backend:
        """The backend of a service that somebody else runs; ``said``: the keys that it has."""
        for key in sorted(key for key, each in SERVICE_SETTINGS.items() if key in said and each.of_engines):
            self._refuse(key, "says nothing about a server elsewhere (url): leave it out")
            for field in (key, *SERVICE_SETTINGS[key].fields_of(key)):
                values.pop(field, None)
        if service.copies(self._described) > 1:
            raise ValueError("is scaled, and its url names one server")
        secret = ""
        if named := values.get("api_key_env"):
            try:
                secret = _key_of(named, {**self._files.variables, **self._variables})
            except ValueError as error:
                self._refuse("api_key_env", as_diagnostic(error))
        if file := values.get("ca_file"):
            values["ca_file"] = os.path.abspath(self._files.folder / file)
            try:
                ssl.create_default_context(cafile=values["ca_file"])
            except OSError as error:
                self._refuse("ca_file", f"{values['ca_file']} cannot be used: {error}")
        self._take_name(values)
        profiles, compose = service.profiles(self._described), not self._files.process
        self._warn(abilities.external_caveats(values["url"], key=secret, compose=compose, profiles=profiles))
        self._files.ports[self._name] = set()
        made = Service(profiles=profiles, key=secret, digest=ELSEWHERE)
        own = {*values, "preload", "read_ahead"}  # nothing of it is loaded
        return Backend(self._name, service=made, inherits=inherited(own), **values)

    def _take_name(self, values: dict[str, Any]) -> None:
        model = values.setdefault("model", TEXT.read(self._name))
        values["aliases"] = tuple(alias for alias in values.get("aliases", ()) if alias != model)

    # An engine

    def _loaded(self, values: dict[str, Any]) -> Iterator[Backend]:
        """The backends of a service that is loaded."""
        described = self._described
        hosts, count, most = (values.pop(key, None) for key in ("host", "gpu_count", "most"))
        self._fill_in(values)
        used = values.pop("gpus", None)
        scaled = isinstance(used, list) or service.copies(described) > 1
        if count is not None and used is not None:
            self._refuse("gpu_count", "and gpus are both given: gpus names them, gpu_count takes any so many")
        choices = {"hosts": hosts, "gpu_count": count, "most": most}
        if scaled and (choice := next((key for key, value in choices.items() if value is not None), "")):
            raise ValueError(f"is scaled, and has x-anvil.{choice}: say with most how many are loaded")
        levels = abilities.lightest_levels(described, self._variables, values["engine"])
        values.setdefault("evict_to", levels)
        if "profile" in values:
            values["profile"] = self._profile(values["profile"])
        self._name_adapters(values)
        made = self._service(described, self._variables)
        template = Backend(self._name, service=made, inherits=inherited(values), **values)
        if self._files.process and not template.service.command:
            text = "needs a `command`, since runtime is process"
            self._add((), text, "command: llama-server --port $$PORT ...")
        others = self._others(hosts)
        vendors = others.vendors if others else ()
        need = count or (used if used is not None else others or self._reserved(counted=not scaled))
        self._check_order()
        if scaled:
            yield from self._replicas(template, need, vendors)
            return
        candidates = self._places.candidates(self._name, hosts, need, template.vram, vendors)
        if need == service.ALL_THERE_ARE and candidates and candidates[0].gpus:
            self._files.silent.append(self._name)
        if hosts is not None or count is not None or most is not None or len(candidates) > 1:
            self._files.most[self._name] = most or 1
        if most is not None and hosts is None and not isinstance(need, int):
            self._refuse(
                "most",
                "has nothing to choose among: name hosts, or say with gpu_count how many GPUs it needs",
                "gpu_count: 1",
            )
        yield from self._placed(template, candidates, hides=used == ())

    def _check_order(self) -> None:
        """Refuse an order of CUDA's other than the one in which GPUs are named here."""
        order = grants.wrong_order(self._variables)
        chosen = self._variables.get(service.CUDA_VISIBLE)
        by_number = self._files.process if chosen is None else any(map(str.isdigit, chosen.split(",")))
        if order and by_number:
            self._add(
                ("environment", grants.ORDER),
                f"must be {grants.PCI_ORDER}, not {order}: GPUs are numbered in that order here. "
                "Leave it out, and use the numbers that `anvil-mux check` shows, or UUIDs",
            )

    def _others(self, hosts: WantedHosts | None) -> GivenGpus | None:
        """The GPUs of AMD or Intel that the service is given; None: none, or not by these names."""
        if self._files.process:
            return service.by_variables(self._showing, self._places.here) if hosts is None else None
        others = service.others_gpus(self._described, self._variables)
        is_known = others and (hosts is not None or self._places.used_here(self._name, others))
        return others if is_known else None

    def _reserved(self, *, counted: bool) -> Need:
        """The GPUs that a service says it needs, to Compose or by its environment.

        A container that names none has none, and a process all. ``counted``: any so many may do.
        """
        count = service.counted_gpus(self._described, self._variables) if counted else None
        if found := count or service.gpus(self._described, self._showing):
            return found
        hides = service.hides_gpus(self._showing)
        return service.ALL_THERE_ARE if self._files.process and not hides else ()

    def _fill_in(self, values: dict[str, Any]) -> None:
        """Fill in settings that are not given by what the service says."""
        described = self._described
        self._take_name(values)
        engine = values.setdefault("engine", service.engine(described))
        names = service.served_model(described, engine)
        if names and values["model"] not in names:
            values.setdefault("served_model", names[0])
        if grace := described.get("stop_grace_period"):
            values.setdefault("stop_timeout", _grace(grace))
        if "port" not in values:
            listens = service.commanded_port if self._files.process else service.listens_on
            values["port"] = listens(described)

    def _name_adapters(self, values: dict[str, Any]) -> None:
        """Make names of the LoRA adapters that are wanted, and of those that the engine's command has."""
        wanted: Loras | None = values.pop("loras", None)
        words = service.argv(self._described)
        found = abilities.find_adapters(values["engine"], words, self._variables, wanted)
        for path, text in found.problems:
            self._refuse("loras", text, "", *path)
        self._warn(found.caveats)
        if wanted:
            self._files.loras[self._name] = frozenset([adapter for adapter, _ in wanted])
        values["presets"] = (*values.get("presets", ()), *found.presets)
        values["set"] = tuple((dict(found.put) | dict(values.get("set", ()))).items())
        values["loras"] = found.to_load

    def _profile(self, file: str) -> Profile | None:
        """The profile in a file, whose path begins at the folder of the first compose file."""
        path = self._files.folder / file
        try:
            return read_profile(state.read_text(path))
        except OSError as error:
            self._refuse("profile", f"{path} cannot be read: {error.strerror}")
        except ValueError as error:
            self._refuse("profile", f"{path}: {error}")
        return None

    def _service(self, described: Description, variables: dict[str, str]) -> Service:
        """The part that the runtimes need, of the service as it is written or as it is described anew."""
        folder = service.word(described, "working_dir")
        root = str(self._files.folder)
        if self._files.process:
            folder = os.path.abspath(self._files.folder / folder) if folder is not None else None
            mounts = service.mounts_of_process(root)
            needs: service.Needs = ()
            files: tuple[service.PlacedFile, ...] = ()
            externals: tuple[tuple[str, str], ...] = ()
            published: list[service.Port] = []
        else:
            mounts = service.mounts(described, root)
            needs = service.needs(described, self._files.services_described, self._files.models)
            shared = self._files.shared
            files = service.placed_files(described, shared, self._files.variables)
            users = [described, *(self._files.services_described[name] for name, _ in needs)]
            externals = sum((service.externals(each, shared) for each in users), ())
            published = service.published(described)
        return Service(
            image=service.word(described, "image"),
            command=service.argv(described),
            environment=tuple(sorted(variables.items())),
            working_dir=folder,
            profiles=service.profiles(described),
            user=service.word(described, "user") or "",
            gpus_by=service.gpus_by(described),
            mounts=mounts,
            on_host_network=not self._files.process and described.get("network_mode") == "host",
            needs=needs,
            ports=tuple([(each.address, each.outside) for each in published if each.outside]),
            externals=tuple(dict.fromkeys(externals)),
            files=files,
            digest=service.digest(described, LABEL),
        )

    def _note(self, backend: Backend, described: Description) -> None:
        """Note what its first backend cannot do, and the caveats of how that one is described."""
        self._check_levels(backend, described)
        if backend.prompt_cache is not None:
            if why := abilities.cannot_keep_prompts(backend):
                self._refuse("prompt_cache", why)
            else:
                self._warn(abilities.prompt_caveats(backend.service))
        self._warn(abilities.command_caveats(described))
        if backend.engine == "llamacpp":
            words = service.argv(described)
            self._warn(abilities.llamacpp_caveats(words, self._variables, backend.evict_to))
        if self._files.process:
            self._warn(abilities.process_caveats(described, backend.port))
        else:
            engine, port, gpus = backend.engine, backend.port, backend.gpus
            self._warn(abilities.container_caveats(described, engine, port, gpus))
            self._warn(abilities.dependency_caveats(described, self._files.models))

    def _check_levels(self, backend: Backend, described: Description) -> None:
        levels, judge = backend.evict_to, self._files.judge
        down = tuple(sorted(levels, key=WAYS.index))
        if levels != down:
            text = f"goes from the lightest standby level down: write {as_yaml([*down])}"
            self._refuse("evict_to", text, f"evict_to: {as_yaml([*down])}")
        for way in levels:
            why = abilities.cannot_evict_to(described, self._variables, backend.engine, way)
            if way == "sleep-2" and backend.loras:
                why = why or abilities.NO_DEEP_SLEEP
            if way == "checkpoint" and judge and not backend.host:
                why = why or judge(backend.gpus, backend.checkpoint_anyway) or ""
            if why:
                self._refuse("evict_to", f"{way} cannot work: {why}", as_diagnostic(why).write)

    def _ports(self, port: int | None, *, fixed: bool) -> set[int]:
        """The ports of its host that a service takes; ``fixed``: those that it publishes are as written."""
        if self._files.process:
            return {port} if port else set()
        published = service.published(self._described) if fixed else ()
        found = {each.outside for each in published if each.outside}
        return {*found, *({port} if port and self._described.get("network_mode") == "host" else ())}

    # Scaled

    def _replicas(self, template: Backend, need: Any, vendors: Sequence[str]) -> Iterator[Backend]:
        """The containers of a scaled service, each a backend; ``need``: also a list, with that of each."""
        name, scale = self._name, service.copies(self._described)
        if not isinstance(need, list):
            each_gpus = [self._places.used_here(name, need, vendors)] * scale
            if need == service.ALL_THERE_ARE and each_gpus[0]:
                self._files.silent.append(name)
        else:
            if not self._files.process:
                self._refuse(
                    "gpus",
                    "differ between replicas, and Compose gives all containers of a service the same GPUs: "
                    "write a service for each, each with the same x-anvil: {model: ...}",
                )
            each_gpus = [self._places.used_here(name, each) for each in need]
            if len(each_gpus) != scale:
                raise ValueError(f"has {scale} replicas, and gpus for {len(each_gpus)}")
        shown = self._described
        if not self._files.process and not self._is_as_written(each_gpus[0]):
            shown, needed = self._given_service(each_gpus[0])
            template = replace(template, service=needed)
        self._note(replace(template, gpus=each_gpus[0]), shown)
        ports = self._ports(template.port, fixed=True)
        for number, gpus in enumerate(each_gpus, 1):
            made = replace(template.service, name=name, number=number, scale=scale)
            made = _seeing(made, gpus) if self._files.process and gpus else made
            self._files.ports[f"{name}-{number}"] = ports
            yield replace(template, name=f"{name}-{number}", gpus=gpus, service=made)

    # With a choice

    def _placed(
        self, template: Backend, candidates: Sequence[HostChoice], *, hides: bool
    ) -> Iterator[Backend]:
        """Yield a backend for each candidate, whose service is given the candidate's GPUs.

        ``hides``: it is to see no GPU.
        """
        ports = {fixed: self._ports(template.port, fixed=fixed) for fixed in (True, False)}
        anew: dict[Place, tuple[Description, Service]] = {}
        for number, candidate in enumerate(candidates):
            backend = replace(template, name=candidate.name, host=candidate.host, gpus=candidate.gpus)
            shown = self._described
            if self._files.process:
                made = self._process_of(template.service, candidate, hides=hides)
                backend = replace(backend, service=made)
            elif candidate.host or not candidate.alone:
                files, elsewhere = self._places.files(candidate), bool(candidate.host)
                place = Place(candidate.gpus, template.port, candidate.alone, elsewhere, files)
                if place not in anew:  # of one kind on all hosts
                    anew[place] = self._placed_service(place)
                shown, needed = anew[place]
                backend = replace(backend, service=needed)
                self._compose(backend, shown)
                shown = compose.at(compose.HERE, shown)
            elif not self._is_as_written(candidate.gpus):
                shown, needed = self._given_service(candidate.gpus)
                backend = replace(backend, service=needed)
            self._files.ports[backend.name] = ports[candidate.alone]
            if number == 0:
                self._note(backend, shown)
            yield backend
        if not self._files.process and any(candidate.host for candidate in candidates):
            for key, text in compose.cannot_leave(self._described, template.port):
                self._add((key,), text)
            self._warn(compose.caveats(self._described, self._image))

    def _is_as_written(self, gpus: tuple[str, ...]) -> bool:
        """Return whether Docker gives the container exactly these GPUs, by the files' own words.

        Where GPUs are names of the file's own, those words are all that says which it has.
        """
        if not grants.are_ids(gpus):
            return True
        if others := service.others_gpus(self._described, self._variables):
            return set(self._places.find_here(others)) == set(gpus)
        given = grants.of_container(self._described, self._variables)
        if isinstance(given, str):
            return self._places.all_present == gpus
        return given is None or not gpus or set(self._places.find_here(given)) == set(gpus)

    def _given_service(self, gpus: tuple[str, ...]) -> tuple[Description, Service]:
        """Return the service of the files, given these GPUs, and what the runtimes need of it."""
        files = self._places.files(HostChoice(self._name, "", gpus))
        made = compose.given_service(self._described, gpus, files, self._variables)
        self._files.composed.override(self._name, self._described, made)
        return made, self._service(made, service.environment(made, self._files.variables))

    def _process_of(self, made: Service, candidate: HostChoice, *, hides: bool) -> Service:
        folder = made.working_dir or os.path.abspath(self._files.folder)
        made = replace(made, working_dir=folder) if candidate.host else made
        return _seeing(made, candidate.gpus) if candidate.gpus or hides else made

    def _placed_service(self, place: Place) -> tuple[Description, Service]:
        """The description for a place, and what the runtimes need of it."""
        described = self._described
        made = compose.placed_service(described, place, variables=self._variables, image=self._image)
        return made, self._service({**made, "image": described.get("image")}, made["environment"])

    def _compose(self, backend: Backend, made: Description) -> None:
        """Write the description into the file of its host, if that is there."""
        if address := self._places.address(backend.host) if backend.host else compose.HERE:
            self._files.composed.add(backend.host, backend.service_name, compose.at(address, made))

    @property
    def _image(self) -> str:
        return str(self._described.get("image") or f"{self._files.project}-{self._name}")


def _grace(written: Any) -> float:
    try:
        return read_seconds(written)
    except ValueError as error:
        found = as_diagnostic(error)
        raise unfit(found, found.value, key=("stop_grace_period",)) from None


def _seeing(made: Service, gpus: Sequence[str]) -> Service:
    """Return the service as a process that sees these GPUs alone."""
    variables = grants.to_process(dict(made.environment), gpus)
    return replace(made, environment=tuple(sorted(variables.items())))


def _key_of(name: str, variables: Mapping[str, str]) -> str:
    """The key in the variable of that name; ValueError if there is none."""
    key = variables.get(name, "").strip()
    if not key:
        said = f"the variable {name} is not set, here or in .env; it should hold the server's API key"
        raise unfit(said, write=f"{name}=... in .env")
    if any(not "!" <= sign <= "~" for sign in key):
        raise ValueError(f"the variable {name} holds more than a key: space, or what is not ASCII")
    return key
