"""Hooks in a compose file: commands and web addresses that get the events of models.

telemetry/hooks.py tells them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anvil_mux.config import settings, shapes
from anvil_mux.config.diagnostic import as_yaml

OCCASIONS = ("loaded", "unloaded", "failed", "severed")
_KEYS = ("on", "run", "url", "timeout")


@dataclass(frozen=True, slots=True)
class Hook:
    """A command or an address, and the occasions that it is for."""

    on: tuple[str, ...] = OCCASIONS
    run: tuple[str, ...] = ()
    """The command and its arguments; no shell."""
    url: str = ""
    timeout: float = 10.0

    @property
    def name(self) -> str:
        return self.url or " ".join(self.run)


def read(value: Any) -> tuple[Hook, ...]:
    """The hooks as the compose file says them; ValueError."""
    if not isinstance(value, list):
        return (_read_one(value),)
    parts = settings.MappingReader({}, ())
    made = [parts.take(str(number), each, _read_one) for number, each in enumerate(value)]
    return tuple(parts.make(made))


def _read_one(value: Any) -> Hook:
    example = "{on: [failed], run: [notify-send, anvil]} or {url: http://...}"
    if not isinstance(value, dict) or (value.get("run") is None) == (value.get("url") is None):
        text = f"must be hooks such as {example}, not {settings.show(value)}"
        raise settings.unfit(text, "{on: [failed], run: [notify-send, anvil]}")
    parts = settings.MappingReader(value, _KEYS)
    made: Hook = parts.make(
        Hook(
            parts.read("on", settings.listed(OCCASIONS, {}).read, OCCASIONS),
            parts.read("run", _read_command, ()),
            parts.read("url", _read_url, ""),
            parts.read("timeout", settings.positive(settings.SECONDS).read, 10.0),
        )
    )
    return made


def _read_command(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        text = f"must be a list of words, [program, argument, ...], not {settings.show(value)}"
        words = value.split() if isinstance(value, str) else []
        raise settings.unfit(text, as_yaml(words) if words else "[program, argument]")
    return tuple(value)


def _read_url(value: Any) -> str:
    if not str(value).startswith(("http://", "https://")):
        text = f"must begin with http:// or https://, not {settings.show(value)}"
        raise settings.unfit(text, f"http://{str(value).rpartition('://')[2]}")
    return str(value)


_HOOK = shapes.mapping(
    {
        "on": settings.listed(OCCASIONS, {}).shape,
        "run": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        "url": shapes.text("^https?://"),
        "timeout": settings.SECONDS.shape,
    }
)
KIND = settings.ValueKind(
    "list of {on, run or url, timeout}", read, shapes.any_of(_HOOK, {"type": "array", "items": _HOOK})
)
