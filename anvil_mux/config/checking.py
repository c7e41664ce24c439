"""Checks of what the compose files say, once it could be read: can it work, each service and all together?

A problem is what cannot work; a warning is what works but will bite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from itertools import combinations
from typing import Any

from anvil_mux.config import settings
from anvil_mux.config.config import (
    DEFAULT_ROUTING,
    EITHER,
    ROUTING_NAME,
    Backend,
    Config,
    Gpu,
    default_of,
)
from anvil_mux.config.plugins import Plugins
from anvil_mux.config.problems import Problems
from anvil_mux.config.settings import gib


class Checks:
    """The checks of one configuration; what they find they add to ``problems``.

    ``values``: the arguments of ``Config`` that are given. ``host_ports``: backend -> the ports of the host
    that it takes.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        plugins: Plugins,
        values: Mapping[str, Any],
        backends: Sequence[Backend],
        gpus: Mapping[str, Gpu],
        host_ports: Mapping[str, Set[int]],
    ) -> None:
        self._problems = problems
        self._plugins = plugins
        self._values = values
        self._backends = backends
        self._gpus = gpus
        self._host_ports = host_ports

    def run(self) -> None:
        self._check_settings()
        self._check_routing()
        self._check_stages()
        self._check_names()
        self._check_room()
        self._check_ports()
        self._check_waits()

    def _value(self, key: str) -> Any:
        """The value that holds for a setting of ``Config``."""
        return self._values.get(key, default_of(Config, key))

    def _check_settings(self) -> None:
        values = self._values
        for key, build in (("policy", self._plugins.policy), ("eviction", self._plugins.eviction)):
            if key in values:
                try:
                    build(values[key], values[f"{key}_settings"])
                except (ValueError, TypeError) as error:
                    self._problems.of_setting(key, str(error))
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if one in values and other not in values:
                self._problems.of_setting(one, f"needs {other} beside it")
        names = {name for backend in self._backends for name in (backend.model, *backend.aliases)}
        if (default := values.get("default_model")) and default not in names:
            self._problems.of_setting(
                "default_model", f"no service serves {default}; {settings.nearest(default, names)}"
            )

    def _check_routing(self) -> None:
        own = self._values.get("routing_policies", {})
        shipped = self._plugins.shipped_routing()
        needs = {**shipped, **{name: self._needs(name, written, shipped) for name, written in own.items()}}
        known = (*shipped, *own)
        default = self._values.get("routing", DEFAULT_ROUTING)
        if default not in known:
            self._problems.of_setting("routing", f"no policy {default}; {settings.nearest(default, known)}")
        models: dict[str, tuple[str, str]] = {}
        for backend in self._backends:
            key = ("services", backend.service_name, "x-anvil", "routing")
            name = backend.routing or default
            if backend.routing and name not in known:
                self._problems.add(key, f"no policy {name}; {settings.nearest(name, known)}")
            first, other = models.setdefault(backend.model, (backend.name, name))
            if other != name:
                self._problems.add(key, f"is {name}, but {first}, a replica of the same model, has {other}")
            for need in sorted(needs.get(name, ())):
                if not getattr(backend, need):
                    self._problems.add(
                        ("services", backend.service_name), f"needs {need}, because routing is {name}"
                    )

    def _check_stages(self) -> None:
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            served = {backend.model for backend in self._backends if backend.infer_type in (other, EITHER)}
            for backend in self._backends:
                if backend.infer_type == one and backend.model not in served:
                    self._problems.add(
                        ("services", backend.service_name, "x-anvil", "infer_type"),
                        f"is {one}, but no service of {backend.model} is {other}: both stages are needed",
                    )

    def _needs(self, name: str, written: object, shipped: Container[str]) -> Set[str]:
        """The settings that a policy of the file's own needs of a service; its problems are noted."""
        key = ("x-anvil", "routing", "policies", name)
        if name in shipped:
            self._problems.add(key, "is the name of a policy that is shipped; call it otherwise")
        if not ROUTING_NAME.fullmatch(str(name)):
            self._problems.add(key, "a name may hold letters, digits, . _ + and - only")
        needs, problems = self._plugins.read_routing(name, written)
        for path, text in problems:
            self._problems.add((*key, *path), text)
        return needs

    def _check_names(self) -> None:
        for name, count in Counter(backend.name for backend in self._backends).items():
            if count > 1:
                self._problems.add(("services", name), f"a replica of a scaled service is called {name} too")
        owners = {backend.model: backend.model for backend in self._backends}
        for backend in self._backends:
            for alias in backend.aliases:
                owner = owners.setdefault(alias, backend.model)
                if owner != backend.model:
                    self._problems.add(
                        ("services", backend.service_name, "x-anvil", "aliases"),
                        f"{alias} is already a name of {owner}",
                    )

    def _check_room(self) -> None:
        for gpu in self._gpus.values():
            users = [backend for backend in self._backends if gpu.id in backend.gpus]
            room = _room(gpu)
            for backend in users:
                key = ("services", backend.service_name, "x-anvil", "vram")
                if backend.vram and room is None:
                    self._problems.warnings.append(
                        f"{self._problems.where(key)} has no effect: how large GPU {gpu.id} is is not known; "
                        f'declare it: x-anvil: {{gpus: {{"{gpu.id}": {{vram: ...}}}}}}'
                    )
                elif backend.vram and room is not None and backend.vram > room:
                    self._problems.add(
                        key, f"{gib(backend.vram)} never fit GPU {gpu.id}, which has {gib(room)} for models"
                    )
            self._check_replicas(gpu, room, users)
            self._check_pins(gpu, room, users)

    def _check_replicas(self, gpu: Gpu, room: int | None, users: Sequence[Backend]) -> None:
        for name, count in Counter(backend.service_name for backend in users).items():
            pair = [backend for backend in users if backend.service_name == name][:2]
            if count > 1 and not pair[0].vram_measured and not _fit(pair, room):
                self._problems.warn(
                    ("services", name),
                    f"no two of its replicas fit on GPU {gpu.id}, "
                    "so they take turns: declare what one takes, x-anvil: {vram: ...}",
                )

    def _check_pins(self, gpu: Gpu, room: int | None, users: Sequence[Backend]) -> None:
        pinned = [backend for backend in users if backend.pin]
        names = ", ".join(backend.name for backend in pinned)
        if not _fit(pinned, room):
            key = ("services", pinned[-1].service_name, "x-anvil", "pin")
            self._problems.add(key, f"the pinned {names} do not fit on GPU {gpu.id} together")
            return
        for backend in users:
            if pinned and not backend.pin and not _fit([*pinned, backend], room):
                self._problems.warn(
                    ("services", backend.service_name),
                    f"does not fit on GPU {gpu.id} beside the pinned {names}: while that is loaded its "
                    "requests are refused; unpin, or declare less vram",
                )

    def _check_waits(self) -> None:
        """Check that requests may wait for long enough to be served."""
        limit, most = self._value("queue_timeout"), self._value("max_wait")
        for longest in dict.fromkeys([most if b.max_wait is None else b.max_wait for b in self._backends]):
            if limit < longest:
                self._problems.warnings.append(
                    f"queue_timeout ({limit:g} s) is less than max_wait ({longest:g} s): a queue is overdue "
                    "before that, early enough for a load that takes as long as loads usually do"
                )
        slow = [backend.name for backend in self._backends if backend.load_timeout > limit]
        if slow:
            self._problems.warnings.append(
                f"queue_timeout ({limit:g} s) is less than the load_timeout of {', '.join(slow)}: requests "
                "that wait for a load fail when it takes longer than that, though it goes on"
            )

    def _check_ports(self) -> None:
        users: dict[int, list[int]] = {}  # port -> the backends that take it, by their place in the list
        listen = self._value("port")
        for place, backend in enumerate(self._backends):
            for port in self._host_ports[backend.name]:
                users.setdefault(port, []).append(place)
            if listen in self._host_ports[backend.name]:
                self._problems.add(
                    ("services", backend.service_name), f"port {listen} is the one that anvil-mux listens on"
                )
        for pair in sorted({pair for places in users.values() for pair in combinations(places, 2)}):
            self._check_pair(*(self._backends[place] for place in pair))

    def _check_pair(self, one: Backend, other: Backend) -> None:
        """Check that two backends that take the same port never run at once."""
        common = self._host_ports[one.name] & self._host_ports[other.name]
        if self._take_turns(one, other):
            return
        ports = ", ".join(map(str, sorted(common)))
        text = f"port {ports} is also that of {one.name}, and both may run at once"
        if one.service_name == other.service_name:
            text = f"port {ports} cannot be that of all its replicas: {self._port_advice(other)}"
        self._problems.add(("services", other.service_name), text)

    def _port_advice(self, backend: Backend) -> str:
        if self._value("runtime") == "process":
            return "leave it out, and each has one of its own in $PORT"
        return f'publish any, "127.0.0.1::{backend.port or "PORT"}", or a range'

    def _take_turns(self, one: Backend, other: Backend) -> bool:
        """Whether two backends never run at once; one in standby keeps its port."""
        if {*one.evict_to, *other.evict_to} != {"stop"} or one.vram_measured or other.vram_measured:
            return False
        common = set(one.gpus) & set(other.gpus)
        return any(not _fit((one, other), _room(self._gpus[gpu])) for gpu in common)


def _room(gpu: Gpu) -> int | None:
    return gpu.vram - gpu.reserve if gpu.vram else None


def _fit(backends: Sequence[Backend], room: int | None) -> bool:
    """Whether backends can be on a GPU with this much room at once."""
    if len(backends) < 2:
        return True
    needs = [backend.vram for backend in backends]
    return room is not None and all(needs) and sum(need or 0 for need in needs) <= room
