"""WHEN a swap is worth its cost.

A policy is a frozen dataclass whose fields are its settings and whose ``decide`` is a pure function from a
``Snapshot`` of one island to a ``Decision``. It never waits, draws no random numbers and keeps no state, so
that the simulator, the tests and the program ask exactly the same question. ``Stay(until)`` is how a policy
waits: the question is asked again at that moment, and before it whenever a line or a swap has changed, or a
lease has ended while a line waits.

The policy proposes, the residency disposes: bounded drains, ``max_wait``, gates and cool-downs hold under
any policy, even a wrong one.

To add one: a dataclass with ``decide`` and a line in ``POLICIES``; its users may also name it as
``package.module:Class``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pkgutil import resolve_name
from typing import Protocol

FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class Line:
    """The requests that wait for one model whose swap could begin now."""

    model: str
    count: int
    oldest: float
    """The moment at which the first of them arrived."""
    newest: float
    evicts: tuple[str, ...] = ()
    """The models that would be put out; empty when there is room."""
    load_seconds: float | None = None
    """What its last load took, or None before the first."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One backend that holds GPUs and may be leased."""

    model: str
    backend: str
    since: float
    leases: int
    last_used: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a policy may know of an island."""

    now: float
    island: str
    residents: tuple[Resident, ...]
    lines: tuple[Line, ...]
    """Oldest first; only those whose swap could begin now."""
    swapping: tuple[str, ...] = ()
    """Models that are being loaded on this island, on other GPUs than those the lines need."""


@dataclass(frozen=True, slots=True)
class Stay:
    """No swap before ``until``."""

    until: float = FOREVER
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SwapTo:
    """Load ``model`` now, one of the lines."""

    model: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unload:
    """Put ``model`` out although nobody waits for its GPUs."""

    model: str
    reason: str = ""


Decision = Stay | SwapTo | Unload


class Policy(Protocol):
    def decide(self, seen: Snapshot) -> Decision: ...


@dataclass(frozen=True)
class Eager:
    """Swap at once, the longest waiting line first. Batches form while a load runs (ADR-0006)."""

    def decide(self, seen: Snapshot) -> Decision:
        if not seen.lines:
            return Stay()
        first = seen.lines[0]
        return SwapTo(first.model, f"{first.count} waiting, oldest first")


@dataclass(frozen=True)
class Debounce:
    """Hold a swap that puts a model out until its line has been quiet (the follow-up that ADR-0006 names)."""

    quiet: float = 1.0
    """Seconds without a new arrival after which the swap begins."""
    max_hold: float = 10.0
    """Seconds after the first arrival at which it begins in any case."""

    def decide(self, seen: Snapshot) -> Decision:
        due = [(self._due(line), line) for line in seen.lines]
        for moment, line in due:
            if moment <= seen.now:
                return SwapTo(line.model, f"{line.count} waiting, {self._why(line, seen.now)}")
        if not due:
            return Stay()
        return Stay(min(moment for moment, _ in due), f"no line has been quiet for {self.quiet:g} s yet")

    def _due(self, line: Line) -> float:
        if not line.evicts:
            return line.oldest
        return min(line.newest + self.quiet, line.oldest + self.max_hold)

    def _why(self, line: Line, now: float) -> str:
        if not line.evicts:
            return "room is free"
        return "line quiet" if line.newest + self.quiet <= now else "held for the longest time allowed"


POLICIES: dict[str, type] = {
    "eager": Eager,
    "debounce": Debounce,
}


def build_policy(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """The policy called ``name`` with ``settings``; ValueError says what is wrong and what is known."""
    made = build(POLICIES, "policy", name, settings or {})
    if not callable(getattr(made, "decide", None)):
        raise ValueError(f"policy {name}: has no method `decide`")
    return made  # type: ignore[return-value]


def build(registry: Mapping[str, type], what: str, name: str, settings: Mapping[str, object]) -> object:
    """An instance of a registered (or dotted) frozen dataclass with ``settings`` as its fields."""
    cls = registry.get(name)
    if cls is None and ":" in name:
        try:
            cls = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{what} {name}: cannot be imported: {error}") from None
    if cls is None:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(registry)} (or package.module:Class)")
    if not is_dataclass(cls):
        raise ValueError(f"{what} {name}: is not a dataclass")
    known = {field.name: field for field in fields(cls)}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{what} {name}: unknown setting {key!r}; known: {', '.join(known) or 'none'}")
        if isinstance(known[key].default, float) and not _is_seconds(value):
            raise ValueError(f"{what} {name}: {key} must be a number of at least 0, not {value!r}")
    return cls(**settings)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
