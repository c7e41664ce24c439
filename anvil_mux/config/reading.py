"""Mappings of settings, read by their table: what cannot be read is a problem that names its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from anvil_mux.config import settings
from anvil_mux.config.interpolate import KeyPath
from anvil_mux.config.problems import Problems
from anvil_mux.config.settings import Setting
from anvil_mux.config.table import RENAMED, SETTINGS


def take(
    problems: Problems, table: Mapping[str, Setting], given: Any, key: KeyPath, prefix: str = ""
) -> dict[str, Any]:
    """Read the settings in ``given`` by ``table``; an empty value counts as none. Key -> value."""
    if given is not None and not isinstance(given, dict):
        problems.add(key, f"must hold settings such as {next(iter(table))}, not {settings.show(given)}")
        return {}
    taken: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in table:
            problems.add((*key, prefix + name), _unknown(name, table))
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
        tell(str(error))
        return {}


def _unknown(key: str, table: Mapping[str, Setting]) -> str:
    if table is SETTINGS and key in RENAMED:
        return f"is now called {RENAMED[key]}: write x-anvil: {{{RENAMED[key]}: ...}}"
    return f"unknown key; {settings.nearest(key, table)}"
