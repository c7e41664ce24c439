"""Checks of what the compose files say, once it could be read: can it work, each service and all together?

A problem is what cannot work; a warning is what works but will cause trouble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import combinations
from typing import Any

from anvil_mux.config import any_of, fallback, settings
from anvil_mux.config.config import (
    EITHER,
    Backend,
    Config,
    Gpu,
    default_of,
    models_by_name,
)
from anvil_mux.config.diagnostic import Diagnostic, KeyPath, as_yaml
from anvil_mux.config.names import Names
from anvil_mux.config.problems import Problems
from anvil_mux.config.settings import AUTO, gib


class Checks:
    """The checks of one configuration; what they find they add to ``problems``.

    ``values``: the arguments of ``Config`` that are given. ``gpus``: by their names. ``host_ports``: backend
    -> the ports of its host that it takes. ``services``: backend -> the service of the files behind it.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        values: Mapping[str, Any],
        backends: Sequence[Backend],
        gpus: Mapping[str, Gpu],
        host_ports: Mapping[str, Set[int]],
        services: Mapping[str, str],
        names: Names,
    ) -> None:
        self._problems = problems
        self._names = names
        self._values = values
        self._backends = backends
        self._gpus = gpus
        self._host_ports = host_ports
        self._services = services
        self._several = Counter(services[each.name] for each in backends if each.service.scale == 1)
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
        self._check_waits()

    def _key(self, backend: Backend, *path: str) -> KeyPath:
        """The key of the files below which the backend's service stands."""
        return ("services", self._services[backend.name], *path)

    def _value(self, key: str) -> Any:
        """The value that holds for a setting of ``Config``."""
        return self._values.get(key, default_of(Config, key))

    def _check_settings(self) -> None:
        values = self._values
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if one in values and other not in values:
                self._problems.of_setting(one, Diagnostic(f"needs {other} beside it", write=f"{other}: FILE"))
        names = {name for backend in self._backends for name in backend.names}
        names |= values.get("any_of", {}).keys()
        if (default := values.get("default_model")) and default not in names:
            text = f"no service serves {default}; {settings.nearest(default, names)}"
            near = settings.meant(default, names)
            self._problems.of_setting("default_model", Diagnostic(text, value=near))

    def _check_stages(self) -> None:
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            served = {backend.model for backend in self._backends if backend.infer_type in (other, EITHER)}
            for backend in self._backends:
                if backend.infer_type == one and backend.model not in served:
                    self._problems.add(
                        self._key(backend, "x-anvil", "infer_type"),
                        f"is {one}, but no service of {backend.model} is {other}: both stages are needed",
                        f"infer_type: {EITHER}",
                    )

    def _check_names(self) -> None:
        for name, count in Counter(backend.name for backend in self._backends).items():
            if count > 1:
                scaled = any(each.name == name and each.service.scale > 1 for each in self._backends)
                what = "a replica of a scaled service" if scaled else "what another service becomes on a host"
                self._problems.add(("services", name), f"{what} is called {name} too")
        self._names.check(self._backends)

    def _check_any_of(self) -> None:
        names = {name: each.model for each in self._backends for name in each.names}
        for name, text in any_of.check(self._values.get("any_of", {}), names):
            self._problems.of_setting("any_of", text, name)

    def _check_homes(self) -> None:
        """Check that home backends may come back, and stay."""
        homes = {self._services[each.name]: each for each in self._backends if each.home}
        for backend in {self._services[each.name]: each for each in self._backends}.values():
            if backend.home_after is not None and not backend.home:
                key = self._key(backend, "x-anvil", "home_after")
                self._problems.warn(key, "has no effect without home: true", "home: true")
        for service, backend in homes.items():
            key = self._key(backend, "x-anvil", "home")
            if backend.ttl is not None:
                self._problems.add(
                    key, "cannot hold with ttl, which evicts it when it is idle: leave one out"
                )
            if not backend.gpus:
                self._problems.warn(key, "has no effect: it needs no GPU, so it is evicted for no other")
            for other in [each for name, each in homes.items() if name < service]:
                shared = set(backend.gpu_names) & set(other.gpu_names)
                measured = backend.vram_measured or other.vram_measured
                if not measured and any(not _fit((backend, other), _room(self._gpus[gpu])) for gpu in shared):
                    gpu = min(shared)
                    self._problems.add(
                        key, f"{other.name} is at home on GPU {gpu} too, and both do not fit: one of them"
                    )

    def _check_external(self) -> None:
        served = Counter(backend.model for backend in self._backends)
        for backend in self._backends:
            if backend.url and served[backend.model] > 1:
                self._problems.add(
                    self._key(backend, "x-anvil", "url"),
                    f"{backend.model} has other services: give this one a name of its own, x-anvil: "
                    "{model: ...}, and name that in the fallback of the others",
                    f"model: {backend.model}-elsewhere",
                )

    def _check_fallbacks(self) -> None:
        names = models_by_name(self._backends)
        own = {each.model: each.fallback for each in self._backends if each.fallback}
        first: dict[str, Backend] = {}
        for backend in self._backends:
            key = self._key(backend, "x-anvil", "fallback")
            before = first.setdefault(backend.model, backend)
            if (before.fallback, before.fallback_after) != (backend.fallback, backend.fallback_after):
                said = f"differs from that of {before.name}, a replica of the same model: say the same"
                self._problems.add(key, said, f"fallback: {as_yaml(list(before.fallback))}")
            for name in [name for name in backend.fallback if name not in names]:
                self._problems.add(key, self._no_model(name, names))
            if before is backend and (way := fallback.circle(backend.model, names, own)):
                self._problems.add(key, f"leads back to where it began: {' -> '.join(way)}")

    def _no_model(self, name: str, names: Mapping[str, str]) -> str:
        """Why a name is not that of a model, and what to write instead; ``names``: those that are."""
        for each in self._backends:
            if name in each.names:
                text = f"{name} is a preset of {each.model}, not a model: name {each.model}"
                return Diagnostic(text, value=each.model)
        if several := self._values.get("any_of", {}).get(name):
            text = f"{name} stands for several models: name {', '.join(several.models)}"
            return Diagnostic(text, value=as_yaml(list(several.models)))
        text = f"no service serves {name}; {settings.nearest(name, names)}"
        return Diagnostic(text, value=settings.meant(name, names))

    def _check_room(self) -> None:
        users: dict[str, list[Backend]] = {name: [] for name in self._gpus}
        for backend in self._backends:
            for name in backend.gpu_names:
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
            self._problems.warn(key, Diagnostic(f"{said}; declare it: {write}", said=said, write=write))
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

    def _has_choice(self, backend: Backend) -> bool:
        return self._several[self._services[backend.name]] > 1

    def _check_waits(self) -> None:
        """Check that requests may wait for long enough to be served."""
        limit, most = self._value("queue_timeout"), self._value("max_wait")
        for longest in dict.fromkeys([most if b.max_wait is None else b.max_wait for b in self._backends]):
            if longest != AUTO and limit < longest:
                text = (
                    f"queue_timeout ({limit:g} s) is less than max_wait ({longest:g} s): a queue is overdue "
                    "before that, early enough for a load that takes as long as loads usually do"
                )
                self._problems.of_limit("queue_timeout", text, float(longest))
        slow = dict.fromkeys(
            self._services[b.name] for b in self._backends if b.load_timeout > limit and not b.url
        )
        if slow:
            text = (
                f"queue_timeout ({limit:g} s) is less than the load_timeout of {', '.join(slow)}: requests "
                "that wait for a load fail when it takes longer than that, though it goes on"
            )
            longest = max(b.load_timeout for b in self._backends if not b.url)
            self._problems.of_limit("queue_timeout", text, longest)

    def _check_ports(self) -> None:
        users: dict[tuple[str, int], list[int]] = {}  # (host, port) -> places of backends in the list
        listen = self._value("port")
        for place, backend in enumerate(self._backends):
            for port in self._host_ports[backend.name]:
                users.setdefault((backend.host, port), []).append(place)
            if listen in self._host_ports[backend.name] and not backend.host:
                text = f"port {listen} is the one that anvil-mux listens on"
                write = f'ports: ["127.0.0.1::{backend.port or "PORT"}"]'
                self._problems.add(self._key(backend), text, write)
        for pair in sorted({pair for places in users.values() for pair in combinations(places, 2)}):
            self._check_pair(*(self._backends[place] for place in pair))

    def _check_pair(self, one: Backend, other: Backend) -> None:
        """Check that two backends that take the same port of a host never run at once."""
        common = self._host_ports[one.name] & self._host_ports[other.name]
        if self._take_turns(one, other):
            return
        ports = ", ".join(map(str, sorted(common)))
        text = f"port {ports} is also that of {one.name}, and both may run at once"
        if self._services[one.name] == self._services[other.name]:
            text = f"port {ports} cannot be that of all its replicas: {self._port_advice(other)}"
        process = self._value("runtime") == "process"
        write = "" if process else f'ports: ["127.0.0.1::{other.port or "PORT"}"]'
        self._problems.add(self._key(other), text, write)

    def _port_advice(self, backend: Backend) -> str:
        if self._value("runtime") == "process":
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
