"""The problems of compose files: each names its file, line and key, or its flag or variable."""

from __future__ import annotations

from collections.abc import Sequence

from anvil_mux.config.interpolate import Document, KeyPath
from anvil_mux.config.table import SETTINGS
from anvil_mux.errors import ConfigError


class Problems:
    """The problems and warnings that were found so far."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._found: list[str] = []
        self.warnings: list[str] = []
        self.origins = dict.fromkeys(SETTINGS, "default")
        """Setting -> what gave its value: a file and line, a variable, "flag" or "default"."""

    def raise_all(self) -> None:
        """Raise ConfigError with every problem, if there is one."""
        if self._found:
            raise ConfigError(list(dict.fromkeys(self._found)))

    def add(self, key: KeyPath, text: str) -> None:
        """Add a problem with what stands at ``key`` in the files."""
        self._found.append(f"{self.where(key)}: {text}")

    def warn(self, key: KeyPath, text: str) -> None:
        """Add a warning about what stands at ``key`` in the files."""
        self.warnings.append(f"{self.where(key)}: {text}")

    def within(self, key: KeyPath, text: str, *path: str) -> None:
        """Add a problem with what stands somewhere below ``key``."""
        self.add((*key, *path), text)

    def of_setting(self, key: str, text: str, *path: str) -> None:
        """Add a problem with a setting; it names the flag or the variable if one of them gave the value."""
        way = ".".join(path) + ": " if path else ""
        match self.origins[key]:
            case "flag":
                self._found.append(f"--{key.replace('_', '-')}: {way}{text}")
            case origin if origin == f"ANVIL_{key.upper()}":
                self._found.append(f"{origin}: {way}{text}")
            case _:
                self.add(("x-anvil", key, *path), text)

    def of_variable(self, variable: str, text: str) -> None:
        """Add a problem with a variable of the environment."""
        self._found.append(f"{variable}: {text}")

    def where(self, key: KeyPath) -> str:
        """The file, line and key that a key of the merged files comes from."""
        documents = self._documents
        if "x-anvil" in key:  # all of it is the last file's that has it
            whole = key[: key.index("x-anvil") + 1]
            documents = [each for each in documents if whole in each.lines][-1:] or documents
        return max(reversed(documents), key=lambda document: document.knows(key)).where(key)
