"""``x-anvil`` read: where it may stand, its keys, and their values from a file, a variable or a flag.

What cannot be read is one of the ``Problems``, which are collected from here on: each names its file, line
and key, or its flag or variable, and the page of the documentation that says more: that of its setting
(config.py), or of its key of Compose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from anvil_mux.config import interpolate
from anvil_mux.config.config import LABEL, RENAMED, SERVICE_SETTINGS, SETTINGS
from anvil_mux.config.interpolate import Document
from anvil_mux.config.kinds import (
    NOWHERE,
    Diagnostic,
    KeyPath,
    Position,
    Problem,
    Setting,
    Table,
    Wrong,
    as_diagnostic,
    as_yaml,
    meant,
    show,
    unknown,
)
from anvil_mux.config.service import KEYS
from anvil_mux.errors import ConfigError

OURS = "x-anvil"
VARIABLES = "ANVIL_"
"""The beginning of the names of our variables."""
PAGE = "reference.md#settings"
NEAR = 0.8
"""How alike a misspelt key and the one that is meant are at least. Compose's other keys are less so."""
OF_A_SERVICE = "a setting of a service: it goes below services, into the x-anvil of the one that it is for"
OF_THE_WHOLE = "a setting of the whole: it goes into x-anvil at the top level, beside services"

# Settings


def of_whole(
    problems: Problems,
    given: Any,
    files: Sequence[Document],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
) -> dict[str, Any]:
    """Key -> value of ``SETTINGS``: flags win over the environment (``ANVIL_*``), that over the file."""
    values = take(problems, SETTINGS, given, (OURS,))
    for key in values:
        problems.origins[key] = str(problems.place((OURS, key)))
    for old, new in RENAMED.items():
        if environ.get(_variable(old)):
            problems.of_variable(_variable(old), f"is now {_variable(new)}")
    _check_variables(problems, files, environ)
    in_environ = [(key, environ.get(_variable(key))) for key in SETTINGS]
    stronger = [(key, _structure(text), _variable(key)) for key, text in in_environ if text]
    for key, value, origin in (*stronger, *((key, flag, "flag") for key, flag in flags.items())):
        problems.origins[key] = origin
        found, wrong = _read(key, SETTINGS[key], value)
        values |= found
        for path, why in wrong:
            problems.of_setting(key, why, *path)
    return values


def _variable(key: str) -> str:
    """The variable of the environment that gives a setting."""
    return f"{VARIABLES}{key.upper()}"


def _check_variables(problems: Problems, files: Sequence[Document], environ: Mapping[str, str]) -> None:
    """Complain of variables that are meant to be ours, and that no file names either."""
    text = str([document.content for document in files])
    for name in environ:
        if name not in text and (near := _misspelt(name)):
            problems.of_variable(name, f"nobody reads it; did you mean {near}?")


def _misspelt(variable: str) -> str:
    """The variable of ours that this one is meant to be; "" if it is ours, or one of somebody else."""
    known = [_variable(name) for name in (*SETTINGS, "api_keys", "api_key", "url")]
    is_other = not variable.startswith(VARIABLES) or variable in known
    return "" if is_other else next(iter(get_close_matches(variable, known, 1, 0.9)), "")


def _structure(text: str) -> object:
    """Read the YAML list or mapping that an environment variable may hold."""
    if text[0] not in "[{":
        return text
    try:
        return _keyed_by_text(yaml.load(text, interpolate.Loader))
    except (yaml.YAMLError, RecursionError):
        return text


def _keyed_by_text(value: object) -> object:
    """The value with each key as it was written: ``0`` is the name of a GPU."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else as_yaml(key): _keyed_by_text(each) for key, each in value.items()
        }
    return [_keyed_by_text(each) for each in value] if isinstance(value, list) else value


def take(problems: Problems, table: Table, given: Any, key: KeyPath, prefix: str = "") -> dict[str, Any]:
    """Read the settings in ``given`` by ``table``; an empty value counts as none. Key -> value."""
    if given is not None and not isinstance(given, dict):
        problems.add(key, _no_mapping(table, given))
        return {}
    taken: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in table:
            problems.add((*key, prefix + name), _unknown(name, table, value))
        elif value is not None:
            values, wrong = _read(name, table[name], value)
            taken |= values
            for path, text in wrong:
                problems.add((*key, prefix + name, *path), text)
    return taken


def _read(key: str, setting: Setting, value: Any) -> tuple[dict[str, Any], Sequence[Problem]]:
    """The value of a setting, as far as it can be read, under its key, and what is wrong with it."""
    try:
        return {key: setting.kind.read(value)}, ()
    except Wrong as wrong:
        return {key: wrong.rest}, wrong.problems
    except ValueError as error:
        return {}, [((), as_diagnostic(error))]


def _unknown(key: str, table: Table, value: Any) -> Diagnostic:
    """The diagnostic about a key that is not in its table: it may be in the other one."""
    if table is SETTINGS and key in RENAMED:
        new = RENAMED[key]
        text = f"is now called {new}: write x-anvil: {{{new}: ...}}"
        return Diagnostic(text, said=f"is now called {new}", write=f"{new}: {as_yaml(value)}")
    other, where = (SERVICE_SETTINGS, OF_A_SERVICE) if table is SETTINGS else (SETTINGS, OF_THE_WHOLE)
    near = meant(key, other) if key in other or not meant(key, table) else ""
    if near:
        said = f"is {where}" if near == key else f"unknown key; did you mean {near}? It is {where}"
        return Diagnostic(said, write=f"x-anvil: {{{near}: {as_yaml(value)}}}", page=other[near].page)
    return unknown(key, table, value)


def _no_mapping(table: Table, given: Any) -> Diagnostic:
    """The diagnostic about a list of settings, or of a setting without its value."""
    first = next(iter(table))
    said = f"must hold settings such as {first}, not {show(given)}"
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        joined = {name: value for each in given for name, value in each.items()}
        return Diagnostic(said, value=as_yaml(joined))
    if isinstance(given, str) and given in table:
        return Diagnostic(said, value=f"{{{given}: ...}}")
    return Diagnostic(said, value="{}" if table is SERVICE_SETTINGS else f"{{{first}: ...}}")


# Keys that nobody reads


def misplaced(documents: Sequence[Document]) -> list[Diagnostic]:
    """Return a problem for each x-anvil that is at the wrong place, and each key that is meant to be one."""
    return [*_wrong_keys(documents, _why_misplaced)]


def _wrong_keys(
    documents: Sequence[Document], why: Callable[[Document, KeyPath], Diagnostic | None]
) -> Iterator[Diagnostic]:
    """A problem for each key of which ``why`` says what is wrong with it."""
    for document in documents:
        for key in document.lines:
            if key and not _is_part(key) and (found := why(document, key)):
                yield document.diagnostic(key, found)


def _is_part(key: KeyPath) -> bool:
    """Whether something stands in a part that services take with ``<<``, which may hold anything."""
    return "<<" in key or (key[0].startswith("x-") and len(key) > 1)


def _why_misplaced(document: Document, key: KeyPath) -> Diagnostic | None:
    could_have_one = len(key) == 1 or (key[:1] == ("services",) and len(key) == 3)
    text = ""
    if key[-1:] == (OURS,):
        text = _why_there(key)
    elif could_have_one and (*key[:-1], OURS) not in document.lines:
        near = get_close_matches(key[-1].lower(), [OURS], 1, NEAR)
        text = f"nobody reads this key; did you mean {OURS}?" if near else ""
    write = f"{OURS}: {as_yaml(_value(document, key))}" if text else ""
    return Diagnostic(text, write=write, page=PAGE) if text else None


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


def unknown_keys(documents: Sequence[Document]) -> list[Diagnostic]:
    """Return a problem for each key of a service that is a setting, or nearly a key that is known here."""

    def why(document: Document, key: KeyPath) -> Diagnostic | None:
        in_service = key[:1] == ("services",) and len(key) == 3
        return unknown_key(key[-1], _value(document, key)) if in_service else None

    return [*_wrong_keys(documents, why)]


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


# What is wrong

KeyInFile = tuple[Document, KeyPath]


def services(names: Sequence[str]) -> str:
    """Return services as messages name them: "service a" or "services a, b"."""
    return f"service{'s' * (len(names) > 1)} {', '.join(names)}"


class Problems:
    """The problems and warnings that were found so far.

    ``places``: the key of a setting -> where it stands, if that is known better than by its name.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        places: Mapping[KeyPath, KeyInFile] = MappingProxyType({}),
        warnings: Iterable[str] = (),
    ) -> None:
        self._documents = documents
        self._places = places
        self._found: list[str] = []
        self.warnings = [*warnings]
        self._of_services: dict[Diagnostic, tuple[int, list[str]]] = {}
        """Warning about services -> its index among all, and the services."""
        self.origins = dict.fromkeys(SETTINGS, "default")
        """Setting -> what gave its value: a file and line, a variable, "flag" or "default"."""

    def raise_all(self) -> None:
        """Raise ConfigError with every problem, if there is one."""
        if self._found:
            raise ConfigError(list(dict.fromkeys(self._found)))

    def add(self, key: KeyPath, text: str, write: str = "") -> None:
        """Add a problem with what stands at ``key`` in the files; ``write``: the line to write instead."""
        self._found.append(self._placed(key, text, write))

    def warn(self, key: KeyPath, text: str, write: str = "") -> None:
        """Add a warning about what stands at ``key`` in the files."""
        self.warnings.append(self._placed(key, text, write))

    def of_part(self, key: KeyPath, error: ValueError) -> None:
        """Add a problem with a part of what stands at ``key``, which the error names itself."""
        found = as_diagnostic(error)
        whole = (*key, *found.key)
        self._found.append(found.at(self.place(whole), whole, ".".join(key)))

    def of_service(self, name: str, text: str) -> None:
        """Add a warning about a service, which names the line of the key that it is about.

        The same warning about several services is one that names them, with the line of the first.
        """
        found = as_diagnostic(text)
        index, names = self._of_services.setdefault(found, (len(self.warnings), []))
        if name not in names:
            names.append(name)
        key = ("services", names[0], *found.key)
        warning = found.at(self.place(key), key, services(names))
        self.warnings[index : index + 1] = [warning]

    def of_setting(self, key: str, text: str, *path: str) -> None:
        """Add a problem with a setting; it names the flag or the variable if one of them gave the value."""
        found, whole = as_diagnostic(text), ("x-anvil", key, *path)
        match self.origins[key]:
            case "flag":
                origin, joint = f"--{key.replace('_', '-')}", " "
            case origin if origin == f"{VARIABLES}{key.upper()}":
                joint = "="
            case _:
                self.add(whole, text)
                return
        write = f"{origin}{joint}{found.value}" if found.value and not path else ""
        self._found.append(found.about(origin, ".".join(path), key=whole, write=write))

    def warn_of_setting(self, name: str, text: str, write: str = "") -> None:
        """Add a warning about a setting of the whole, which its sentence names.

        It says no line, since others than a file may have given the setting.
        """
        key: KeyPath = (OURS, name)
        place = self.place(key) if any(key in each.lines for each in self._documents) else NOWHERE
        said = f"{place}: {text}" if place.file else text
        self.warnings.append(Diagnostic(text, said=said, write=write, key=key, place=place))

    def of_variable(self, variable: str, text: str) -> None:
        """Add a problem with a variable of the environment."""
        self._found.append(Diagnostic(f"{variable}: {text}", key=("x-anvil",)))

    def _placed(self, key: KeyPath, text: str, write: str) -> Diagnostic:
        found = as_diagnostic(text)
        return found.about(write=write or found.write).at(self.place(key), key, ".".join(key))

    def place(self, key: KeyPath) -> Position:
        """The file and line that a key of the merged files comes from."""
        documents = self._documents
        if "x-anvil" in key:
            at = key.index("x-anvil") + 1
            if found := self._places.get(key[: at + 1]):
                document, setting = found
                return document.place((*setting, *key[at + 1 :]))
            documents = [each for each in documents if key[:at] in each.lines][-1:] or documents
        return max(reversed(documents), key=lambda document: document.knows(key)).place(key)


FOLDER = "docs/"
"""The folder of the pages in the repository, before each page's name."""
OF_COMPOSE = {
    **dict.fromkeys(("gpus", "deploy", "devices", "runtime", "group_add"), "gpus.md#supported-gpus"),
    **dict.fromkeys(("ports", "command", "expose"), "reference.md#engines"),
    **dict.fromkeys(("extends", "include", "env_file", "label_file"), "running.md#docker-or-podman"),
    **dict.fromkeys(("restart", "image", "profiles"), "running.md#docker-or-podman"),
}
"""Keys of Compose -> the page that says what anvil-mux makes of them."""
OF_SERVICES = "reference.md#x-anvil-on-a-service"
OF_ALL = "reference.md#x-anvil-at-the-top-level"


def page_of(diagnostic: str) -> str:
    """Return the page for a diagnostic; "" for one that is about no key, such as bad YAML."""
    if not isinstance(diagnostic, Diagnostic):
        return ""
    page = diagnostic.page or _page_of_key(diagnostic.key)
    return FOLDER + page if page else ""


def _page_of_key(key: KeyPath) -> str:
    match key:
        case ("x-anvil", *path):
            return _page_in(SETTINGS, path[:1]) or OF_ALL
        case ("services", _, "x-anvil", *path):
            return _page_in(SERVICE_SETTINGS, path[:1]) or OF_SERVICES
        case ("services", _, "labels", label, *_) if label.startswith(LABEL):
            return _page_in(SERVICE_SETTINGS, [label.removeprefix(LABEL)]) or OF_SERVICES
        case ("services", _, compose_key, *_):
            return OF_COMPOSE.get(compose_key) or _page_in(SERVICE_SETTINGS, [compose_key])
        case ("services", *_):
            return OF_SERVICES
        case (first, *_):
            return OF_COMPOSE.get(first, "")
    return ""


def _page_in(table: Table, keys: Sequence[str]) -> str:
    """The page of a setting; "" where its row or the table has none."""
    return next((table[key].page for key in keys if key in table), "")


def where_pages_are() -> str:
    """Say where the folder of the pages is, for people who stand elsewhere or have only a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / FOLDER / "README.md").is_file():
        return f"{FOLDER} is a folder of anvil-mux's repository, which this installation does not have"
    return "" if Path.cwd() == root else f"{FOLDER} is in {root}"
