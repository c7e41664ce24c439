"""The problems and warnings of compose files: each names its file, line and key, or its flag or variable.

A problem also names the page of the documentation that says more: that of its setting (config.py), or of its
key of Compose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from anvil_mux.config.config import LABEL, SERVICE_SETTINGS, SETTINGS
from anvil_mux.config.diagnostic import Diagnostic, KeyPath, Position, as_diagnostic
from anvil_mux.config.interpolate import Document
from anvil_mux.errors import ConfigError

KeyInFile = tuple[Document, KeyPath]


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
        """Add a warning about a service, which names the line of the key that it is about."""
        found = as_diagnostic(text)
        key = ("services", name, *found.key)
        self.warnings.append(found.at(self.place(key), key, f"service {name}"))

    def of_setting(self, key: str, text: str, *path: str) -> None:
        """Add a problem with a setting; it names the flag or the variable if one of them gave the value."""
        found, whole = as_diagnostic(text), ("x-anvil", key, *path)
        below = ".".join(path)
        match self.origins[key]:
            case "flag":
                flag = f"--{key.replace('_', '-')}"
                write = f"{flag} {found.value}" if found.value and not path else ""
                self._found.append(_elsewhere(found, flag, below, whole, write))
            case origin if origin == f"ANVIL_{key.upper()}":
                write = f"{origin}={found.value}" if found.value and not path else ""
                self._found.append(_elsewhere(found, origin, below, whole, write))
            case _:
                self.add(whole, text)

    def warn_of_setting(self, name: str, text: str, write: str = "") -> None:
        """Add a warning about a setting of the whole, which its sentence names.

        It says no line, since others than a file may have given the setting.
        """
        key: KeyPath = ("x-anvil", name)
        found = Diagnostic(text, write=write, key=key)
        if any(key in each.lines for each in self._documents):
            place = self.place(key)
            found = Diagnostic(text, said=f"{place}: {text}", write=write, key=key, place=place)
        self.warnings.append(found)

    def of_variable(self, variable: str, text: str) -> None:
        """Add a problem with a variable of the environment."""
        self._found.append(Diagnostic(f"{variable}: {text}", key=("x-anvil",)))

    def _placed(self, key: KeyPath, text: str, write: str) -> Diagnostic:
        found = as_diagnostic(text)
        if write:
            found = Diagnostic(found, said=found.said, write=write, page=found.page)
        return found.at(self.place(key), key, ".".join(key))

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


def _elsewhere(found: Diagnostic, origin: str, below: str, key: KeyPath, write: str) -> Diagnostic:
    """A problem with a value that no file gave; ``below``: the part of the value."""
    before = f"{origin}: {below}: " if below else f"{origin}: "
    return Diagnostic(f"{before}{found}", said=f"{before}{found.said}", write=write, key=key, page=found.page)


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
            setting = SETTINGS.get(path[0]) if path else None
            return setting.page if setting and setting.page else OF_ALL
        case ("services", _, "x-anvil", *path):
            return _of_service(path[0] if path else "")
        case ("services", _, "labels", label, *_) if label.startswith(LABEL):
            return _of_service(label.removeprefix(LABEL))
        case ("services", _, compose_key, *_):
            ours = SERVICE_SETTINGS.get(compose_key)
            return OF_COMPOSE.get(compose_key, ours.page if ours else "")
        case ("services", *_):
            return OF_SERVICES
        case (first, *_):
            return OF_COMPOSE.get(first, "")
    return ""


def _of_service(key: str) -> str:
    setting = SERVICE_SETTINGS.get(key)
    return setting.page if setting and setting.page else OF_SERVICES


def where_pages_are() -> str:
    """Say where the folder of the pages is, for people who stand elsewhere or have only a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / FOLDER / "README.md").is_file():
        return f"{FOLDER} is a folder of anvil-mux's repository, which this installation does not have"
    return "" if Path.cwd() == root else f"{FOLDER} is in {root}"
