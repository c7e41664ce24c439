"""The services of compose files -> backends: what each says of its engine, and each place where it may run.

A scaled service is one backend for each of its containers, one with a choice of hosts or GPUs one for each
candidate (candidates.py). Guesses about the engine come from service.py.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anvil_mux import state
from anvil_mux.config import composing, external, interpolate, prompt_cache, service, settings
from anvil_mux.config.candidates import HostChoice, Need, Places, as_name
from anvil_mux.config.composing import ComposedFiles, Place
from anvil_mux.config.config import LABEL, SERVICE_NAME, WAYS, Backend, Judge, Service, WantedHosts
from anvil_mux.config.diagnostic import Diagnostic, as_diagnostic, as_yaml
from anvil_mux.config.misplaced import unknown_key
from anvil_mux.config.presets import Loras, find_adapters
from anvil_mux.config.problems import Problems
from anvil_mux.config.profile import Profile, read
from anvil_mux.config.reading import take
from anvil_mux.config.table import SERVICE_SETTINGS

Description = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The things that hold for all services of the files."""

    folder: Path
    """The folder of the first file."""
    variables: Mapping[str, str]
    project: str
    process: bool
    """Whether services are local processes."""
    plain: bool
    """Whether the files were read without the Compose program."""
    preload: bool
    read_ahead: bool
    judge: Judge | None


class BackendReader:
    """Reads services into backends; what is wrong with one hides nothing of another."""

    def __init__(
        self, problems: Problems, places: Places, composed: ComposedFiles, around: Surroundings
    ) -> None:
        self._problems = problems
        self._places = places
        self._composed = composed
        self._around = around
        self.ports: dict[str, set[int]] = {}
        """Backend -> the ports of its host that it takes."""
        self.services: dict[str, str] = {}
        """Backend -> the service of the files that it is made of."""
        self.loras: dict[str, frozenset[str]] = {}
        """Service -> the LoRA adapters that its settings name, and not its command alone."""
        self._most: dict[str, int] = {}
        """Service that has a choice -> how many of its backends are resident at once."""
        self._silent: list[str] = []
        """The services that say nothing of the GPUs that they need."""
        self._anew: dict[tuple[str, Place], tuple[Description, Service]] = {}

    def read(self, services: Mapping[str, Any]) -> list[Backend]:
        """The backends of the services, in their order."""
        backends: list[Backend] = []
        ours = False
        for name, described in services.items():
            key = ("services", name)
            try:
                said = service.labels(described, LABEL)
                if not said and "x-anvil" not in described:
                    continue
                ours = True
                self._check_keys(name, described)
                given = take(self._problems, SERVICE_SETTINGS, said, (*key, "labels"), LABEL)
                given |= take(self._problems, SERVICE_SETTINGS, described.get("x-anvil"), (*key, "x-anvil"))
                made = list(self._backends(name, described, settings.filled(SERVICE_SETTINGS, given)))
                self.services |= dict.fromkeys([backend.name for backend in made], name)
                backends += made
            except ValueError as error:
                ours = True
                self._problems.of_part(key, error)
        self._warn_of_silent()
        if not ours:
            self._problems.add(
                ("services",),
                "none serves a model; add `x-anvil: {}` to each service that does (`anvil-mux check "
                "--suggest` says to which, and what else)",
                "x-anvil: {}",
            )
        return self._bounded(backends)

    def _warn_of_silent(self) -> None:
        """Warn once of all services that take every GPU because they name none."""
        if self._silent:
            says = "says nothing of GPUs: it" if len(self._silent) == 1 else "say nothing of GPUs: each"
            self._problems.warn(
                ("services", self._silent[0]),
                f"{', '.join(self._silent)} {says} needs all of its machine; name those that it needs, or "
                "none ([]) if it computes on the CPU",
                "x-anvil: {gpus: all}",
            )

    def _bounded(self, backends: list[Backend]) -> list[Backend]:
        """The backends with ``most``, which is a model's, or a stage's: what its services have together."""
        choosing = {_role(backend) for backend in backends if self.services[backend.name] in self._most}
        if not choosing:
            return backends
        each = Counter((_role(backend), self.services[backend.name]) for backend in backends)
        most: Counter[tuple[str, str]] = Counter()
        for (role, name), count in each.items():
            most[role] += self._most.get(name, count)
        return [replace(b, most=most[_role(b)]) if _role(b) in choosing else b for b in backends]

    # One service

    def _backends(self, name: str, described: Description, given: dict[str, Any]) -> Iterator[Backend]:
        _check_service(name, described)
        if given.get("url"):
            yield self._external(name, described, given)
            return
        for key in [key for key in external.NEED_URL if key in given]:
            self._problems.add(
                ("services", name, "x-anvil", key), "needs url beside it", f"url: {external.EXAMPLE}"
            )
        if self._around.plain and "env_file" in described:
            self._problems.add(("services", name, "env_file"), interpolate.NEED_COMPOSE)
        hosts, count, most = (given.pop(key, None) for key in ("host", "gpu_count", "most"))
        engine = self._fill_in(name, described, given)
        variables = service.environment(described, self._around.variables)
        used = given.pop("gpus", None)
        self._check_choice(name, described, hosts=hosts, count=count, most=most, used=used)
        given.setdefault("preload", self._around.preload)
        given.setdefault("read_ahead", self._around.read_ahead)
        given.setdefault("evict_to", service.lightest_levels(described, variables, engine))
        if "profile" in given:
            given["profile"] = self._profile(name, given["profile"])
        given["aliases"] = tuple(alias for alias in given.get("aliases", ()) if alias != given["model"])
        self._name_adapters(name, described, variables, given)
        template = Backend(name, service=self._service(described, variables), **given)
        if self._around.process and not template.service.command:
            text = "needs a `command`, since runtime is process"
            self._problems.add(("services", name), text, "command: llama-server --port $$PORT ...")
        if isinstance(used, list) or service.copies(described) > 1:
            yield from self._replicas(template, described, variables, used)
            return
        others = service.others_gpus(described, variables)
        if others and hosts is None and not self._places.used_here(name, others):
            others = None  # the file has other names for what is there
        need = count or (used if used is not None else others or self._reserved(described, variables))
        vendors = others.vendors if others else ()
        candidates = self._places.candidates(name, hosts, need, template.vram, vendors)
        self._silent += [name for each in candidates[:1] if need == service.ALL_THERE_ARE and each.gpus]
        if hosts is not None or count is not None or most is not None or len(candidates) > 1:
            self._most[name] = most or 1
        if most is not None and hosts is None and not isinstance(need, int):
            self._problems.add(
                ("services", name, "x-anvil", "most"),
                "has nothing to choose among: name hosts, or say with gpu_count how many GPUs it needs",
                "gpu_count: 1",
            )
        as_written = partial(self._is_as_written, described, count=count, need=need)
        yield from self._placed(template, described, variables, candidates, as_written)

    def _reserved(self, described: Description, variables: Mapping[str, str]) -> Need:
        """The GPUs that a service says it needs, to Compose or by its environment."""
        counted = service.counted_gpus(described, variables)
        return counted or service.gpus(described, variables) or self._unsaid(variables)

    def _unsaid(self, variables: Mapping[str, str]) -> str | tuple[str, ...]:
        """The GPUs that a service needs which names none: a container has none then, and a process all."""
        return service.ALL_THERE_ARE if self._around.process and not service.hides_gpus(variables) else ()

    def _check_keys(self, name: str, described: Description) -> None:
        """Complain of misspelt keys, where Compose was not asked."""
        for key, value in described.items() if self._around.plain else ():
            if wrong := unknown_key(key, value):
                self._problems.add(("services", name, key), wrong)

    def _external(self, name: str, described: Description, given: dict[str, Any]) -> Backend:
        """The backend of a service that somebody else runs."""
        key, variables = ("services", name, "x-anvil"), service.environment(described, self._around.variables)
        said = {*(described.get("x-anvil") or ()), *service.labels(described, LABEL)}
        for setting in sorted(external.OF_ENGINES & said):
            self._problems.add((*key, setting), "says nothing about a server elsewhere (url): leave it out")
            for filled in (setting, *SERVICE_SETTINGS[setting].fields_of(setting)):
                given.pop(filled, None)
        if service.copies(described) > 1:
            raise ValueError("is scaled, and its url names one server")
        secret = ""
        if named := given.get("api_key_env"):
            try:
                secret = external.key_of(named, {**self._around.variables, **variables})
            except ValueError as error:
                self._problems.add((*key, "api_key_env"), as_diagnostic(error))
        if file := given.get("ca_file"):
            given["ca_file"] = os.path.abspath(self._around.folder / file)
            try:
                external.trust(given["ca_file"])
            except OSError as error:
                self._problems.add((*key, "ca_file"), f"{given['ca_file']} cannot be used: {error}")
        model = given.pop("model", settings.TEXT.read(name))
        given["aliases"] = tuple(alias for alias in given.get("aliases", ()) if alias != model)
        compose = not self._around.process
        self._warn(
            name,
            external.caveats(given["url"], key=secret, compose=compose, profiles=service.profiles(described)),
        )
        self.ports[name] = set()
        made = Service(profiles=service.profiles(described), key=secret, digest=external.DIGEST)
        return Backend(name, model, service=made, **given)

    def _check_choice(
        self,
        name: str,
        described: Description,
        *,
        hosts: WantedHosts | None,
        count: int | None,
        most: int | None,
        used: object,
    ) -> None:
        key = ("services", name, "x-anvil")
        if count is not None and used is not None:
            self._problems.add(
                (*key, "gpu_count"), "and gpus are both given: gpus names them, gpu_count takes any so many"
            )
        scaled = isinstance(used, list) or service.copies(described) > 1
        for setting, value in (("hosts", hosts), ("gpu_count", count), ("most", most)):
            if scaled and value is not None:
                raise ValueError(f"is scaled, and has x-anvil.{setting}: say with most how many are loaded")

    def _fill_in(self, name: str, described: Description, given: dict[str, Any]) -> str:
        """Fill in settings that are not given by what the service says; return its engine."""
        model = given.setdefault("model", settings.TEXT.read(name))
        engine = given.setdefault("engine", service.engine(described))
        names = service.served_model(described, engine)
        if names and model not in names:
            given.setdefault("served_model", names[0])
        if grace := described.get("stop_grace_period"):
            given.setdefault("stop_timeout", _grace(grace))
        if "port" not in given:
            listens = service.commanded_port if self._around.process else service.listens_on
            given["port"] = listens(described)
        return str(engine)

    def _name_adapters(
        self, name: str, described: Description, variables: dict[str, str], given: dict[str, Any]
    ) -> None:
        """Make names of the LoRA adapters that are wanted, and of those that the engine's command has."""
        wanted: Loras | None = given.pop("loras", None)
        found = find_adapters(given["engine"], service.argv(described), variables, wanted)
        for path, text in found.problems:
            self._problems.add(("services", name, "x-anvil", "loras", *path), text)
        self._warn(name, iter(found.caveats))
        if wanted:
            self.loras[name] = frozenset([adapter for adapter, _ in wanted])
        given["presets"] = (*given.get("presets", ()), *found.presets)
        given["set"] = tuple((dict(found.put) | dict(given.get("set", ()))).items())
        given["loras"] = found.to_load

    def _check_levels(
        self, name: str, backend: Backend, described: Description, variables: dict[str, str]
    ) -> None:
        levels = backend.evict_to
        key = ("services", name, "x-anvil", "evict_to")
        if list(levels) != sorted(levels, key=WAYS.index):
            down = ", ".join(sorted(levels, key=WAYS.index))
            self._problems.add(
                key, f"goes from the lightest standby level down: write [{down}]", f"evict_to: [{down}]"
            )
        for way in levels:
            why = service.cannot_evict_to(described, variables, backend.engine, way)
            if way == "sleep-2" and backend.loras:
                why = why or service.NO_DEEP_SLEEP
            if way == "checkpoint" and self._around.judge and not backend.host:
                why = why or self._around.judge(backend.gpus, backend.checkpoint_anyway) or ""
            if why:
                found = as_diagnostic(why)
                self._problems.add(key, f"{way} cannot work: {why}", found.write)

    def _profile(self, name: str, file: str) -> Profile | None:
        """The profile in a file, whose path begins at the folder of the first compose file."""
        path = self._around.folder / file
        try:
            return read(state.read_text(path))
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}"
        except ValueError as error:
            text = f"{path}: {error}"
        self._problems.add(("services", name, "x-anvil", "profile"), text)
        return None

    def _service(self, described: Description, variables: dict[str, str]) -> Service:
        folder = service.word(described, "working_dir")
        if folder is not None and self._around.process:
            folder = os.path.abspath(self._around.folder / folder)
        return Service(
            image=service.word(described, "image"),
            command=service.argv(described),
            environment=tuple(sorted(variables.items())),
            working_dir=folder,
            profiles=service.profiles(described),
            user=service.word(described, "user") or "",
            gpus_by=service.gpus_by(described),
            mounts=self._mounts(described),
            digest=service.digest(described, LABEL),
        )

    def _mounts(self, described: Description) -> prompt_cache.Mounts:
        folder = str(self._around.folder)
        if self._around.process:
            return prompt_cache.mounts_of_process(folder)
        return prompt_cache.mounts(described, folder)

    def _check_prompt_cache(self, name: str, backend: Backend) -> None:
        if backend.prompt_cache is None:
            return
        if why := prompt_cache.problem(backend):
            self._problems.add(("services", name, "x-anvil", "prompt_cache"), why)
        else:
            self._warn(name, prompt_cache.caveats(backend.service))

    def _note(self, name: str, backend: Backend, described: Description, variables: dict[str, str]) -> None:
        """Note the caveats of a service, as it is described for its first backend, and check its levels."""
        self._check_levels(name, backend, described, variables)
        self._check_prompt_cache(name, backend)
        if self._around.process:
            caveats = service.process_caveats(described, backend.port)
        else:
            caveats = service.caveats(described, backend.engine, backend.port, backend.gpus)
        self._warn(name, caveats)

    def _warn(self, name: str, caveats: Iterator[str]) -> None:
        for text in caveats:
            self._problems.of_service(name, text)

    def _ports(self, described: Description, port: int | None, *, fixed: bool) -> set[int]:
        """The ports of its host that a service takes; ``fixed``: those that it publishes are as written."""
        if self._around.process:
            return {port} if port else set()
        found = {each.outside for each in service.published(described) if each.outside} if fixed else set()
        return {*found, *({port} if port and described.get("network_mode") == "host" else ())}

    # Scaled services

    def _replicas(
        self,
        template: Backend,
        described: Description,
        variables: dict[str, str],
        used: str | tuple[str, ...] | list[tuple[str, ...]] | None,
    ) -> Iterator[Backend]:
        """The containers of a scaled service, each a backend."""
        name, scale = template.name, service.copies(described)
        if not isinstance(used, list):
            others = service.others_gpus(described, variables)
            given = self._places.used_here(name, others) if others else ()
            reserved = service.gpus(described, variables) or self._unsaid(variables)
            reserved = used if used is not None else given or reserved
            vendors = others.vendors if given and others else ()
            each_gpus, gpus = None, self._places.used_here(name, reserved, vendors)
            if reserved == service.ALL_THERE_ARE and gpus:
                self._silent.append(name)
        else:
            if not self._around.process:
                self._problems.add(
                    ("services", name, "x-anvil", "gpus"),
                    "differ between replicas, and Compose gives all containers of a service the same GPUs: "
                    "write a service for each, each with the same x-anvil: {model: ...}",
                )
            each_gpus = [self._places.used_here(name, each) for each in used]
            if len(each_gpus) != scale:
                raise ValueError(f"has {scale} replicas, and gpus for {len(each_gpus)}")
            gpus = each_gpus[0]
        self._note(name, replace(template, gpus=gpus), described, variables)
        ports = self._ports(described, template.port, fixed=True)
        for number in range(1, scale + 1):
            made = replace(template.service, name=name, number=number, scale=scale)
            if each_gpus:
                gpus = each_gpus[number - 1]
                made = _seeing(made, gpus)
            self.ports[f"{name}-{number}"] = ports
            yield replace(template, name=f"{name}-{number}", gpus=gpus, service=made)

    # Services with a choice

    def _placed(
        self,
        template: Backend,
        described: Description,
        variables: dict[str, str],
        candidates: Sequence[HostChoice],
        as_written: Callable[[HostChoice], bool],
    ) -> Iterator[Backend]:
        """A backend for each candidate."""
        name = template.name
        ports = {fixed: self._ports(described, template.port, fixed=fixed) for fixed in (True, False)}
        for number, candidate in enumerate(candidates):
            backend = replace(template, name=candidate.name, host=candidate.host, gpus=candidate.gpus)
            shown = described
            if self._around.process and not as_written(candidate):
                backend = replace(backend, service=self._process_of(template.service, candidate))
            elif not as_written(candidate):
                made, needed = self._described_anew(template, described, variables, candidate)
                backend = replace(backend, service=needed)
                self._compose(backend, made)
                shown = composing.at(composing.HERE, made)
            self.ports[backend.name] = ports[shown is described or candidate.alone]
            if number == 0:
                self._note(name, backend, shown, variables)
            yield backend
        if not self._around.process and any(candidate.host for candidate in candidates):
            for key, text in composing.cannot_leave(described, template.port):
                self._problems.add(("services", name, key), text)
            self._warn(name, composing.caveats(described, self._image(name, described)))

    def _is_as_written(
        self, described: Description, candidate: HostChoice, *, count: int | None, need: Need
    ) -> bool:
        """Whether the service, as it is written, has the candidate's GPUs and no others."""
        if candidate.host or not candidate.alone:
            return False
        if not isinstance(need, int):
            return True
        if self._around.process:
            return count is None and candidate.gpus == tuple(map(str, range(need)))
        if others := service.others_gpus(described, {}):
            return self._places.used_here(candidate.name, others) == candidate.gpus
        reserved = service.reserved(described)
        return reserved in (None, candidate.gpus) or (
            reserved == service.ALL and candidate.gpus == self._places.all_here
        )

    def _process_of(self, made: Service, candidate: HostChoice) -> Service:
        folder = made.working_dir or os.path.abspath(self._around.folder)
        made = replace(made, working_dir=folder) if candidate.host else made
        return _seeing(made, candidate.gpus) if candidate.gpus else made

    def _described_anew(
        self, template: Backend, described: Description, variables: dict[str, str], candidate: HostChoice
    ) -> tuple[Description, Service]:
        """The description for a candidate, and what the runtimes need of it; of one kind on all hosts."""
        name = template.name
        files, elsewhere = self._places.files(candidate), bool(candidate.host)
        place = Place(candidate.gpus, template.port, candidate.alone, elsewhere=elsewhere, files=files)
        if (name, place) not in self._anew:
            image = self._image(name, described)
            made = composing.described_anew(described, place, variables=variables, image=image)
            needed = self._service({**made, "image": described.get("image")}, made["environment"])
            # Beside the service of the files, which keeps its name, there is one of another name.
            own = "" if candidate.host or not candidate.alone else f"{name}.{as_name(candidate.gpus)}"
            self._anew[name, place] = made, replace(needed, name=own)
        return self._anew[name, place]

    def _compose(self, backend: Backend, made: Description) -> None:
        """Write the description into the file of its host, if that is there."""
        if not backend.host:
            self._composed.add("", backend.service_name, composing.at(composing.HERE, made))
        elif address := self._places.address(backend.host):
            self._composed.add(backend.host, backend.service_name, composing.at(address, made))

    def _image(self, name: str, described: Description) -> str:
        return str(described.get("image") or f"{self._around.project}-{name}")


def _grace(written: Any) -> float:
    try:
        return settings.read_seconds(written)
    except ValueError as error:
        found = as_diagnostic(error)
        raise ValueError(Diagnostic(found, value=found.value, key=("stop_grace_period",))) from None


def _role(backend: Backend) -> tuple[str, str]:
    """The model and the stage of it that a backend serves."""
    return backend.model, backend.infer_type


def _seeing(made: Service, gpus: Sequence[str]) -> Service:
    """The service as a process that sees these GPUs alone."""
    variables = {**dict(made.environment), **service.sees_only(gpus)}
    return replace(made, environment=tuple(sorted(variables.items())))


def _check_service(name: str, described: Description) -> None:
    if not SERVICE_NAME.fullmatch(name):
        mended = re.sub(r"[^a-zA-Z0-9._-]+", "-", name).strip("._-") or "model"
        text = "its name may hold letters, digits, ., _ and - only; x-anvil: {model: ...} any"
        raise ValueError(Diagnostic(text, write=f"{mended}: {{..., x-anvil: {{model: {as_yaml(name)}}}}}"))
    if service.copies(described) > 1 and "container_name" in described:
        raise ValueError("is scaled, so it can have no container_name")
