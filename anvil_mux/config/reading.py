"""Mappings of settings, read by their table: what cannot be read is a problem that names its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from anvil_mux.config import settings
from anvil_mux.config.diagnostic import Diagnostic, KeyPath, as_diagnostic, as_yaml
from anvil_mux.config.problems import Problems
from anvil_mux.config.settings import Setting
from anvil_mux.config.table import RENAMED, SERVICE_SETTINGS, SETTINGS

OF_A_SERVICE = "a setting of a service: it goes below services, into the x-anvil of the one that it is for"
OF_THE_WHOLE = "a setting of the whole: it goes into x-anvil at the top level, beside services"


def take(
    problems: Problems, table: Mapping[str, Setting], given: Any, key: KeyPath, prefix: str = ""
) -> dict[str, Any]:
    """Read the settings in ``given`` by ``table``; an empty value counts as none. Key -> value."""
    if given is not None and not isinstance(given, dict):
        problems.add(key, _no_mapping(table, given))
        return {}
    taken: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in table:
            problems.add((*key, prefix + name), _unknown(name, table, value))
        elif value is not None:
            tell = partial(problems.within, (*key, prefix + name))
            taken |= read(name, table[name], value, tell)
    return taken


def read(key: str, setting: Setting, value: Any, tell: Callable[..., None]) -> dict[str, Any]:
    """The value of a setting, as far as it can be read; ``tell`` is called with each problem's way."""
    try:
        return {key: setting.kind.read(value)}
    except settings.Wrong as wrong:
        for path, text in wrong.problems:
            tell(text, *path)
        return {key: wrong.rest}
    except ValueError as error:
        tell(as_diagnostic(error))
        return {}


def _unknown(key: str, table: Mapping[str, Setting], value: Any) -> Diagnostic:
    """The diagnostic about a key that is not in its table: it may be in the other one."""
    if table is SETTINGS and key in RENAMED:
        new = RENAMED[key]
        text = f"is now called {new}: write x-anvil: {{{new}: ...}}"
        return Diagnostic(text, said=f"is now called {new}", write=f"{new}: {as_yaml(value)}")
    other, where = (SERVICE_SETTINGS, OF_A_SERVICE) if table is SETTINGS else (SETTINGS, OF_THE_WHOLE)
    near = settings.meant(key, other) if key in other or not settings.meant(key, table) else ""
    if near:
        said = f"is {where}" if near == key else f"unknown key; did you mean {near}? It is {where}"
        return Diagnostic(said, write=f"x-anvil: {{{near}: {as_yaml(value)}}}", page=other[near].page)
    return settings.unknown(key, table, value)


def _no_mapping(table: Mapping[str, Setting], given: Any) -> Diagnostic:
    """The diagnostic about a list of settings, or of a setting without its value."""
    first = next(iter(table))
    said = f"must hold settings such as {first}, not {settings.show(given)}"
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        joined = {name: value for each in given for name, value in each.items()}
        return Diagnostic(said, value=as_yaml(joined))
    if isinstance(given, str) and given in table:
        return Diagnostic(said, value=f"{{{given}: ...}}")
    return Diagnostic(said, value="{}" if table is SERVICE_SETTINGS else f"{{{first}: ...}}")
