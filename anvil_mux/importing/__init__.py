"""The configuration of other programs -> a compose file: llama-swap's, llama.cpp's presets, Ollama's store.

``Written`` is that compose file: its settings, its services, and notes on what they do not say. Each note is
a comment in the file, above the service that it is about, and a message on standard error; whatever has no
counterpart is a note, and nothing is left out without one. The function ``translate`` of ``llama_swap``,
``llamacpp_presets`` and ``ollama_store`` gives one; ``suggested.Suggestion`` has one that is laid over an
existing file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from anvil_mux.errors import ConfigError

WIDTH = 110
ServiceKeys = dict[str, Any]
"""A service of a compose file, as it is written there."""
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9._-]")


@dataclass(frozen=True, slots=True)
class Note:
    """A part of the other program's configuration that the file says otherwise, or not at all."""

    where: str
    """The file, line and key that it is about."""
    about: str
    """The key, within the model that it is about."""
    text: str
    service: str = ""
    """The service above which it stands; empty: at the top."""


@dataclass
class Written:
    """A compose file, in the order in which it will stand there."""

    name: str
    """The Compose project; "" where the file is laid over one that has a name."""
    origin: str
    """A sentence that says what the file was made of."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings in ``x-anvil`` at the top level."""
    services: dict[str, ServiceKeys] = field(default_factory=dict)
    volumes: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def free_name(self, model: str) -> str:
        """A name for the service of a model that no other service has."""
        name = found = NOT_IN_NAMES.sub("-", model).strip("-.") or "model"
        number = 1
        while found in self.services:
            number += 1
            found = f"{name}-{number}"
        return found

    def checked(self, nothing: str) -> Written:
        """The same, or ConfigError with its notes where it has no service, or with ``nothing``."""
        if not self.services:
            raise ConfigError([f"{note.where}: {note.text}" for note in self.notes] or [nothing])
        return self

    def text(self) -> str:
        """The file."""
        top = [note for note in self.notes if note.service not in self.services]
        services = "\n\n".join(self._service(name) for name in self.services)
        parts = [
            "\n".join([*_comment(self.origin), *_notes(top)]),
            f"name: {self.name}" if self.name else "",
            _yaml({"x-anvil": self.settings}) if self.settings or self.name else "",
            f"services:\n{services}",
        ]
        if self.volumes:
            parts.append(_yaml({"volumes": self.volumes}))
        return "\n\n".join(filter(None, parts)) + "\n"

    def _service(self, name: str) -> str:
        about = [note for note in self.notes if note.service == name]
        service = textwrap.indent(_yaml({name: self.services[name]}), "  ")
        return "\n".join([*_notes(about, "  "), service])


def _notes(notes: Collection[Note], indent: str = "") -> Iterator[str]:
    for note in notes:
        yield from _comment(f"{note.about}: {note.text}" if note.about else note.text, indent)


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


class _Dumper(yaml.SafeDumper):
    """A dumper that writes no aliases, and lists of words in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(content: Mapping[str, Any]) -> str:
    dumped = yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, default_flow_style=None
    )
    return str(dumped).rstrip("\n")
