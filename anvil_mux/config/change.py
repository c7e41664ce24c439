"""The difference between two configurations: the backends that go on, are replaced, come or go.

A backend goes on as it is, with the streams that it serves, if only settings of it changed that steer us and
not its engine (``LIVE``). Anything else makes it another one: it is drained, stopped as it was described when
it was started, and its place is given to the new description. So are all backends on a GPU whose memory is
declared anew. Some settings of the whole are built into what runs (``RESTART``): they change at the next
start. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS, Backend, Config
from anvil_mux.config.kinds import fields_of
from anvil_mux.config.machines import Gpu

LIVE = tuple(fields_of(SERVICE_SETTINGS, lambda setting: setting.live))
"""Fields of a backend that may change under its leases."""
RESTART = tuple([name for key, setting in SETTINGS.items() for name in setting.waiting(key)])
"""Fields of the whole that change at the next start."""
TLS = ("tls_cert", "tls_key")
"""The files of TLS: others may take their place, but encryption itself is not begun or ended."""

PLACED = "secrets and configs"
"""The files that are written into a container before each start: other values are there at the next one."""


class Described(Protocol):
    """The part of a configuration by which it is known what goes on; ``Config`` has it."""

    @property
    def backends(self) -> tuple[Backend, ...]: ...
    @property
    def gpus(self) -> tuple[Gpu, ...]: ...


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between two configurations; backends by name, settings by key."""

    kept: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """The settings, also of backends that are kept (as NAME.KEY), that hold from now on."""
    later: tuple[str, ...] = ()
    """The settings that hold from the next start on."""

    def __str__(self) -> str:
        parts = {
            "changed": self.changed,
            "removed": self.removed,
            "added": self.added,
            "set": self.settings,
            "only at the next start": self.later,
        }
        told = [f"{what} {', '.join(names)}" for what, names in parts.items() if names]
        return "; ".join(told) or "nothing has changed"


def compare(old: Config, new: Config) -> Change:
    """Compare ``old`` with ``new``, which takes its place."""
    before = {backend.name: backend for backend in old.backends}
    after = {backend.name: backend for backend in new.backends}
    changed = replaced(old, new)
    kept = [name for name in before if name in after and name not in changed]
    resized = _resized(old, new)
    different = [key for key in SETTINGS if key != "gpus" and _values(old, key) != _values(new, key)]
    effective = within(old, new)
    own = [
        f"{name}.{key}"
        for name in kept
        for key in LIVE
        if getattr(before[name], key) != getattr(after[name], key)
        and (before[name].has_own(key) or after[name].has_own(key))
    ]
    own += [f"{name}.{PLACED}" for name in kept if before[name].service.files != after[name].service.files]
    return Change(
        kept=tuple(kept),
        changed=tuple(changed),
        removed=tuple(name for name in before if name not in after),
        added=tuple(name for name in after if name not in before),
        settings=(
            *(["gpus"] if resized else []),
            *[key for key in different if _values(old, key) != _values(effective, key)],
            *own,
        ),
        later=tuple(key for key in different if _values(effective, key) != _values(new, key)),
    )


def replaced(old: Described, new: Described) -> list[str]:
    """The names of the backends that both describe, and of which what runs does not go on."""
    after = {backend.name: backend for backend in new.backends}
    resized = _resized(old, new)
    return [
        name
        for backend in old.backends
        if (name := backend.name) in after
        and not (_goes_on(backend, after[name]) and resized.isdisjoint(backend.gpu_names))
    ]


def within(old: Config, new: Config) -> Config:
    """Return ``new`` as far as it can take effect in a program that was started with ``old``."""
    fixed = {name: getattr(old, name) for name in RESTART}
    if (old.tls_cert is None) != (new.tls_cert is None):
        fixed |= {name: getattr(old, name) for name in TLS}
        ours = {key: digest for key, digest in new.said.items() if key not in TLS}
        fixed["said"] = ours | {key: digest for key, digest in old.said.items() if key in TLS}
    return replace(new, **fixed)


def _resized(old: Described, new: Described) -> set[str]:
    """The GPUs whose memory is known to be another now.

    Those of a host that was not there are not: until then each of their backends had its GPUs whole. Nor are
    those that are missing, or were: what serves there goes on.
    """
    known = [gpu for gpu in old.gpus if not gpu.missing and (not gpu.host or gpu.vram is not None)]
    before = {gpu.name: gpu for gpu in known}
    return {gpu.name for gpu in new.gpus if not gpu.missing and before.get(gpu.name, gpu) != gpu}


def _goes_on(before: Backend, after: Backend) -> bool:
    ours: dict[str, Any] = {name: getattr(after, name) for name in (*LIVE, "inherits")}
    service = replace(before.service, scale=after.service.scale, files=after.service.files)
    return replace(before, **ours, service=service) == after and service.digest == after.service.digest


def _values(config: Config, key: str) -> list[object]:
    return [*(getattr(config, name) for name in SETTINGS[key].fields_of(key)), config.said.get(key)]
