"""Keys that stand where nobody reads them: settings below another key, and misspelt names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from anvil_mux.config.diagnostic import Diagnostic, KeyPath, as_yaml
from anvil_mux.config.interpolate import Document
from anvil_mux.config.service import KEYS
from anvil_mux.config.table import SERVICE_SETTINGS

OURS = "x-anvil"
PAGE = "reference.md#settings"
NEAR = 0.8
"""How alike a misspelt key and the one that is meant are at least. Compose's other keys are less so."""


def misplaced(documents: Sequence[Document]) -> list[Diagnostic]:
    """Return a problem for each x-anvil that is at the wrong place, and each key that is meant to be one."""
    return [
        text.at(document.place(key), key, ".".join(key))
        for document in documents
        for key in document.lines
        if key and not _is_part(key)
        for text in _wrong(document, key)
    ]


def _is_part(key: KeyPath) -> bool:
    """Whether something stands in a part that services take with ``<<``, which may hold anything."""
    return "<<" in key or (key[0].startswith("x-") and len(key) > 1)


def _wrong(document: Document, key: KeyPath) -> Iterator[Diagnostic]:
    if key[-1:] == (OURS,):
        text, written = _why_there(key), _value(document, key)
        if text:
            yield Diagnostic(text, write=f"{OURS}: {as_yaml(written)}", page=PAGE)
        return
    could_have_one = len(key) == 1 or (key[:1] == ("services",) and len(key) == 3)
    if could_have_one and (*key[:-1], OURS) not in document.lines and _is_near(key[-1]):
        text = f"nobody reads this key; did you mean {OURS}?"
        yield Diagnostic(text, write=f"{OURS}: {as_yaml(_value(document, key))}", page=PAGE)


def _why_there(key: KeyPath) -> str:
    """Why an x-anvil may not stand at a key; "" if it may."""
    if len(key) == 1 or OURS in key[:-1] or (key[0] == "services" and len(key) == 3):
        return ""
    if key == ("services", OURS):
        return "stands among the services, as if it were one: it goes to the top level, or into a service"
    if key[0] == "services":
        above, column = ".".join(key[2:-1]), f"the column of `{key[2]}:`"
        return f"stands below {above}, where nobody reads it: it belongs to the service, in {column}"
    return "stands where nobody reads it: it goes to the top level, or into a service"


def _is_near(name: str) -> bool:
    return bool(get_close_matches(name.lower(), [OURS], 1, NEAR))


def unknown_keys(documents: Sequence[Document]) -> list[Diagnostic]:
    """Return a problem for each key of a service that is a setting, or nearly a key that is known here."""
    return [
        found.at(document.place(key), key, ".".join(key))
        for document in documents
        for key in document.lines
        if key[:1] == ("services",) and len(key) == 3 and not _is_part(key)
        if (found := unknown_key(key[-1], _value(document, key)))
    ]


def unknown_key(name: str, value: object) -> Diagnostic | None:
    """Return what is wrong with a key of a service.

    None also for one that is not known here: Compose has many more, and others with each release.
    """
    if name in KEYS:
        return None
    if name in SERVICE_SETTINGS:
        text = "is a setting of anvil-mux: it goes into x-anvil"
        return Diagnostic(text, write=f"{OURS}: {{{name}: {as_yaml(value)}}}")
    for near in get_close_matches(name, KEYS, 1, NEAR):
        return Diagnostic(f"unknown key; did you mean {near}?", write=f"{near}: {as_yaml(value)}")
    return None


def _value(document: Document, key: KeyPath) -> object:
    value: object = document.content
    for part in key:
        if isinstance(value, list):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)
    return {} if value is None else value
