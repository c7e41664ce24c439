"""The form of a state: equal for two states from which everything goes on alike.

It is read off the objects themselves, all that can be reached and every field of it, so that no field is
forgotten. Two things are not taken as they are. Moments count from now: the explorer's time begins at
``EPOCH``, and nothing else is so large a float. Numbers of tickets count in their order. Left out are what
cannot change, and counters of which only matters whether they are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import Ticket
from anvil_mux.scheduler.state import SharedSettings
from tests.explorer.saved import slots

EPOCH = 1_000_000.0
"""When the time of the explorer begins."""

_PLAIN = frozenset((str, int, bool, bytes, type(None)))
_CALLS = (FunctionType, BuiltinFunctionType, MethodType, partial, type, count)
_FIXED = (Backend, Gpu, Routing, SharedSettings)
"""The kinds of objects that follow from the configuration, of which is read which one it is."""
_LEFT_OUT = frozenset(("_plans", "_under_way"))
"""Counters, and what is set anew before it is read."""


class _Reader:
    """One reading of everything that can be reached from some objects."""

    def __init__(self, now: float, ranks: Mapping[int, int]) -> None:
        self._now, self._ranks = now, ranks
        self._seen: dict[int, int] = {}
        self._out: list[Any] = []
        self._alive: list[Any] = []

    def form(self, *roots: object) -> int:
        for root in roots:
            self._read(root)
        return hash(tuple(self._out))

    def _read(self, thing: Any) -> None:
        kind, out = type(thing), self._out
        if kind in _PLAIN:
            out.append(thing)
        elif kind is float:
            is_moment = EPOCH / 2 < thing < EPOCH * 2
            out.append(round(thing - self._now, 6) if is_moment else round(thing, 9))
        elif id(thing) in self._seen:
            out.append(("again", self._seen[id(thing)]))
        else:
            self._seen[id(thing)] = len(self._seen)
            self._alive.append(thing)  # else another object might get its id
            self._read_object(thing, kind)

    def _read_object(self, thing: Any, kind: type) -> None:
        out = self._out
        if isinstance(thing, (dict, MappingProxyType)):
            self._read_all([each for pair in thing.items() for each in pair])
        elif isinstance(thing, (list, tuple)):
            self._read_all(thing)
        elif isinstance(thing, (set, frozenset)):
            self._read_all(sorted(thing, key=str))
        elif isinstance(thing, Config):
            out.append(id(thing))
        elif isinstance(thing, (*_CALLS, *_FIXED)):
            out.append(kind.__name__)
        elif isinstance(thing, BaseException):
            out.append((kind.__name__, str(thing)))
        elif isinstance(thing, Ticket):
            self._read_ticket(thing)
        else:
            out.append(kind.__name__)
            self._read_fields(thing, kind)

    def _read_all(self, things: Sequence[Any]) -> None:
        out = self._out
        out.append(len(things))
        for each in things:
            if type(each) in _PLAIN:
                out.append(each)
            else:
                self._read(each)

    def _read_fields(self, thing: Any, kind: type) -> None:
        for name in slots(kind):
            if name in _LEFT_OUT:
                continue
            if (value := getattr(thing, name, None)) is not None:
                self._out.append(name)
                self._read(value)
        for name, value in getattr(thing, "__dict__", {}).items():
            if name not in _LEFT_OUT:
                self._out.append(name)
                self._read(value)
        if isinstance(thing, Scheduler):
            self._read(sorted(thing._under_way))

    def _read_ticket(self, ticket: Ticket) -> None:
        self._out.append(("ticket", self._ranks.get(ticket.id, -1)))
        for name in slots(Ticket):
            if name != "id":
                self._read(getattr(ticket, name))


def form(now: float, tickets: Iterable[int], *roots: object) -> int:
    """The form of the state that can be reached from ``roots``; ``tickets``: the numbers of open ones."""
    return _Reader(now, {number: rank for rank, number in enumerate(sorted(tickets))}).form(*roots)
