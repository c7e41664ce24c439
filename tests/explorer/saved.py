"""The contents of all objects that can be reached from one, to be put back later.

Building a scheduler takes as long as a hundred facts, and ``deepcopy`` would leave its closures behind. So
the objects stay, and get back what they held: lists, dictionaries, sets and fields. What cannot change stays.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.state import SharedSettings
from tests.explorer.worlds import SmallWorld

_SHARED = (Backend, BaseException, Config, Event, Gpu, Routing, SharedSettings, SmallWorld, type)
_IS_SHARED: dict[type, bool] = {str: True, int: True, float: True, bool: True, bytes: True, type(None): True}
_SLOTS: dict[type, tuple[str, ...]] = {}
_UNSET = object()


def _is_shared(kind: type) -> bool:
    known = _IS_SHARED.get(kind)
    if known is None:
        ours = kind in (dict, list, set, tuple, partial) or issubclass(kind, tuple)
        ours = ours or kind.__module__.startswith(("anvil_mux.", "tests."))
        known = _IS_SHARED[kind] = not ours or issubclass(kind, _SHARED)
    return known


def slots(kind: type) -> tuple[str, ...]:
    """The slots of a class and of those that it is made of; of a tuple none."""
    if kind not in _SLOTS:
        found: dict[str, None] = {}
        for each in kind.__mro__ if not issubclass(kind, tuple) else ():
            names = each.__dict__.get("__slots__", ())
            found |= dict.fromkeys([names] if isinstance(names, str) else names)
        _SLOTS[kind] = tuple([name for name in found if name[:2] != "__"])
    return _SLOTS[kind]


def _is_frozen(kind: type) -> bool:
    return getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)


class SavedState:
    """The contents of everything that can be reached from ``root``, at this moment."""

    def __init__(self, root: object) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._objects: list[tuple[Any, tuple[str, ...], list[Any]]] = []
        seen, left = {id(root)}, [root]
        while left:
            thing = left.pop()
            self._save(thing)
            for each in gc.get_referents(thing):
                if id(each) not in seen and not _is_shared(type(each)):
                    seen.add(id(each))
                    left.append(each)

    def _save(self, thing: Any) -> None:
        kind = type(thing)
        if kind is dict:
            self._dicts.append((thing, thing.copy()))
        elif kind is list:
            self._lists.append((thing, thing.copy()))
        elif kind is set:
            self._sets.append((thing, thing.copy()))
        elif (names := slots(kind)) and not _is_frozen(kind):
            self._objects.append((thing, names, [getattr(thing, name, _UNSET) for name in names]))
        if kind is not dict and (own := getattr(thing, "__dict__", None)) is not None and kind is not partial:
            self._dicts.append((own, own.copy()))

    def put_back(self) -> None:
        for dictionary, entries in self._dicts:
            dictionary.clear()
            dictionary.update(entries)
        for items, before in self._lists:
            items[:] = before
        for members, those in self._sets:
            members.clear()
            members.update(those)
        for thing, names, values in self._objects:
            for name, value in zip(names, values, strict=True):
                if value is not _UNSET:
                    setattr(thing, name, value)
