"""The names by which models may be asked for: each stands for one thing, whichever service gave it.

A model's own name, an alias, a preset and a LoRA adapter share one space. What one replica says of aliases
and presets holds for its model; adapters are in engines, so every replica must have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.config.diagnostic import KeyPath
from anvil_mux.config.presets import Preset
from anvil_mux.config.problems import Problems


class _NameUse(NamedTuple):
    """The first that has a name."""

    model: str
    what: str
    key: KeyPath
    preset: Preset | None = None


class Names:
    """The names in one configuration. ``services``: backend -> the service of the files behind it.

    ``loras``: service -> the adapters that its settings name; others are read from its command.
    """

    def __init__(
        self, problems: Problems, services: Mapping[str, str], loras: Mapping[str, Set[str]]
    ) -> None:
        self._problems = problems
        self._services = services
        self._loras = loras

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
                    where = self._problems.where(owner.key).partition(": ")[0]
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


def presets_of(backends: Sequence[Backend]) -> dict[tuple[str, str], Preset]:
    """Find what each name of a preset means at each backend: its own, or what another replica says."""
    of_models: dict[str, dict[str, Preset]] = {}
    for backend in backends:
        for preset in backend.presets:
            of_models.setdefault(backend.model, {}).setdefault(preset.name, preset)
    if not of_models:
        return {}
    found: dict[tuple[str, str], Preset] = {}
    for backend in backends:
        own = of_models.get(backend.model, {}) | {preset.name: preset for preset in backend.presets}
        found |= {(backend.name, name): preset for name, preset in own.items()}
    return found
