"""Only host/ touches a machine, and only plain values leave it."""

import ast
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from anvil_mux.config.config import Backend
from anvil_mux.host import seam
from tests.test_layers import MODULES, forgetting, imported, nodes, ours, package

__all__ = ["forgetting"]

TOUCHES = """
    claims compose_files containers cuda_checkpoint cuda_driver docker_api engine_client gpus launcher levels
    listeners notes occupants processes project prompts runs starter weights
"""
"""The modules of host/ that read NVML, /sys and /proc, or move services and memory: none is used outside."""

ALLOWED = {
    "multiplexer": {"host.seam", "host.hosts"},
    "telemetry": {"host.seam"},
    "proxy": {"host.seam", "host.engines", "host.hosts"},
    "cluster": {"host.seam", "host.local", "host.engines", "host.check"},
    "serve": {"host.seam", "host.local", "host.hosts"},
    "lab": {"host.seam", "host.local", "host.check", "host.engines"},
    "cli": {"host.seam", "host.local", "host.engines", "host.check"},
}
"""Package -> the modules of host/ that it may use. ``engines`` has what differs between engines;
``local`` opens the host, ``hosts`` asks servers that are on none, and ``check`` is for commands on the same
machine."""
BELOW = {"Runtime"}
"""The names of the seam's that are of the host's alone: they are below it."""

OUTSIDE = sorted(module for module in MODULES if package(module) != "host")
ITS_OWN = {"telemetry.eventlog": {"/proc/self/fd/"}}
"""Module -> what it reads of the program itself."""


def test_each_module_of_the_host_is_behind_the_seam_or_allowed():
    inside = {module.removeprefix("host.") for module in MODULES if module.startswith("host.")}
    open_to_some = {name.removeprefix("host.") for names in ALLOWED.values() for name in names}
    touching = set(TOUCHES.split())
    assert inside == touching | open_to_some
    assert not touching & open_to_some


def test_a_machine_is_reached_through_the_seam_alone():
    used = [(module, name) for module in OUTSIDE for name in ours(module) if name.startswith("host")]
    assert [pair for pair in used if pair[1] not in ALLOWED.get(package(pair[0]), set())] == []
    assert [module for module in OUTSIDE if "pynvml" in imported(module)] == []
    names = {
        (module, alias.name)
        for module in OUTSIDE
        for node in nodes(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {pair for pair in names if pair[1] in BELOW} == set()


def test_proc_is_read_by_the_host_alone_but_for_the_program_itself():
    texts = [
        (module, node.value)
        for module in OUTSIDE
        for node in nodes(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
    ]
    read = {pair for pair in texts if pair[1].startswith("/proc")}
    assert read <= {(module, text) for module, texts in ITS_OWN.items() for text in texts}


PLAIN = {str, int, float, bool, type(None), object}


def test_only_plain_values_cross_the_seam():
    methods = {name: each for name, each in vars(seam.Host).items() if isinstance(each, types.FunctionType)}
    crossing = {
        (name, where): hint
        for name, each in methods.items()
        if not name.startswith("_")
        for where, hint in get_type_hints(each).items()
    }
    assert {"load", "evict", "adopt", "news", "inventory"} <= {name for name, _ in crossing}
    assert {key: hint for key, hint in crossing.items() if not is_plain(hint)} == {}
    assert not is_plain(typing.Callable[[], None])
    assert not is_plain(typing.Iterator[str])
    assert not is_plain(Path)


def is_plain(hint: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether all that a type holds are texts, numbers, and tuples, lists, mappings and records of those."""
    if hint in PLAIN or hint in seen:
        return True
    if get_origin(hint) in (Union, types.UnionType, tuple, list, dict, Mapping, Sequence):
        return all(is_plain(each, seen) for each in get_args(hint) if each is not ...)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, tuple)):
        return all(is_plain(each, seen | {hint}) for each in get_type_hints(hint).values())
    return False


def test_a_backend_is_plain():
    assert is_plain(Backend)
