"""The values that settings take, and how people write them.

A table of settings (table.py; key -> ``Setting``) drives what is read, what is refused and how that is said,
the documentation, what a reload may change, and what the event log records. A kind's ``read`` takes what
YAML, an environment variable or a flag gave (so numbers may come as text) and returns the value, or raises
ValueError that says what it should be; with a ``Diagnostic`` in it, it also has a value to write instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from anvil_mux.clock import MOST_COUNT, YEAR_SECONDS, seconds_in
from anvil_mux.config import shapes
from anvil_mux.config.diagnostic import Diagnostic, advice, as_diagnostic, as_yaml
from anvil_mux.config.shapes import Shape


@dataclass(frozen=True, slots=True)
class ValueKind:
    name: str
    """The name that the documentation gives it."""
    read: Callable[[Any], Any]
    shape: Shape = field(default_factory=dict)
    """The JSON Schema of what ``read`` takes, by which editors complete and check (schema.py)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All that depends on one key: a row of a table."""

    kind: ValueKind
    doc: str
    """The meaning, in one line."""
    live: bool = field(kw_only=True)
    """Whether a reload applies it at once. Otherwise a setting of the whole holds from the next start on, and
    the backends of a service for which another value is set are replaced."""
    logged: bool = False
    """Whether the event log records it: when things happen depends on it."""
    fills: tuple[str, ...] | None = ()
    """The fields that it fills, in the order in which its kind reads them; (): the one of its own name; None:
    none, since it decides which backends there are."""
    later: tuple[str, ...] = ()
    """The fields of a live setting that hold from the next start on all the same."""
    is_file: bool = False
    """Whether it names a file that `serve` reads: with other content it is another value."""
    default: str | None = None
    """The default that the documentation shows, where that is not the field's."""
    page: str = ""
    """The page in docs/, and the section of it, that says more; "": the table in the reference."""

    def fields_of(self, key: str) -> tuple[str, ...]:
        """The fields that it fills under its key."""
        return () if self.fills is None else self.fills or (key,)

    def waiting(self, key: str) -> tuple[str, ...]:
        """The fields that a reload leaves as they are."""
        return self.later if self.live else self.fields_of(key)


def filled(table: Mapping[str, Setting], values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value, of what was read: key -> value; a setting that fills none keeps its key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        names = table[key].fields_of(key) or (key,)
        found |= zip(names, value if len(names) > 1 else (value,), strict=True)
    return found


Problem = tuple[tuple[str, ...], str]
"""The way to a part of a value, and what is wrong with it."""


class Wrong(ValueError):
    """Parts of a value are wrong; ``rest`` is what it comes to without them."""

    def __init__(self, problems: Sequence[Problem], rest: Any) -> None:
        super().__init__("; ".join([": ".join((".".join(path), text)) for path, text in problems]))
        self.problems = problems
        self.rest = rest


class MappingReader:
    """A mapping that is read key by key, so that what is wrong with one hides nothing of another."""

    def __init__(self, value: Mapping[str, Any], known: Collection[str]) -> None:
        self._value = value
        self.problems: list[Problem] = []
        for key in value:
            if key not in known:
                self.problems.append(((str(key),), unknown(str(key), known, value[key])))

    def read(self, key: str, read: Callable[[Any], Any], default: Any = None) -> Any:
        """The value of a key; the default if there is none, or none that could be read."""
        value = self._value.get(key)
        return default if value is None else self.take(key, value, read, default)

    def take(self, key: str, value: Any, read: Callable[[Any], Any], default: Any = None) -> Any:
        try:
            return read(value)
        except Wrong as wrong:
            self.problems += [((key, *path), text) for path, text in wrong.problems]
            return wrong.rest
        except ValueError as error:
            self.problems.append(((key,), as_diagnostic(error)))
            return default

    def make(self, value: Any) -> Any:
        """Return what was made of the parts, if nothing is wrong with them."""
        if self.problems:
            raise Wrong(self.problems, value)
        return value


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is nearest to an unknown one."""
    known = tuple(known)
    close = meant(word, known)
    return f"did you mean {close}?" if close else f"known: {', '.join(known)}"


def meant(word: str, known: Iterable[str]) -> str:
    """The known word that is near an unknown one; "" if none is."""
    return next(iter(get_close_matches(word, tuple(known), 1, 0.6)), "")


def unknown(key: str, known: Collection[str], value: Any) -> Diagnostic:
    """The diagnostic about an unknown key: the nearest one, with the value that it was given."""
    near = meant(key, known)
    written = "..." if value is None else as_yaml(value)
    return Diagnostic(f"unknown key; {nearest(key, known)}", write=f"{near}: {written}" if near else "")


def unfit(said: str, value: str = "") -> ValueError:
    """The error of a value that cannot be taken; ``value``: one that could stand there."""
    return ValueError(Diagnostic(said, value=value))


def one_of(*known: str) -> ValueKind:
    def read(value: Any) -> str:
        if value not in known:
            text = f"must be one of {', '.join(known)}, not {show(value)}"
            raise unfit(text, meant(str(value).lower(), known) or known[0])
        return str(value)

    return ValueKind(" | ".join(known), read, shapes.one_of(known))


def whole_number(least: int, most: float = math.inf, example: str = "") -> ValueKind:
    """A whole number; ``example``: what to write for one that does not fit, if not the nearest that does."""

    def read(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}", value):
            value = int(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= min(most, MOST_COUNT):
            limits = f"of at least {least}" if math.isinf(most) else f"from {least} to {most:.0f}"
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
            near = example or f"{min(max(value, least), most, MOST_COUNT):.0f}" if fits else ""
            raise unfit(f"must be a whole number {limits}, not {show(value)}", near)
        return int(value)

    return ValueKind("whole number", read, shapes.whole(least, most))


SIZES = {unit + "iB": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
SIZES |= {unit + "B": 1000**power for power, unit in enumerate("KMGT", 1)}
SIZES |= {"kB": 1000, "B": 1, "": 1}


def positive(kind: ValueKind) -> ValueKind:
    """The values of a kind that are more than 0."""

    def read(value: Any) -> Any:
        if found := kind.read(value):
            return found
        raise unfit(f"must be more than 0, not {show(value)}")

    return replace(kind, read=read)


def size(least: int = 0) -> ValueKind:
    """Bytes; 0 passes as well as anything of at least ``least``."""

    def read(value: Any) -> int:
        written = "" if value is True else str(value).strip()
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", written)
        if found is None or found[2] not in SIZES:
            text = f"must be a size such as 20GiB, 20GB, 20000MiB or bytes, not {show(value)}"
            raise unfit(text, f"{found[1]}{_unit(found[2])}" if found else "20GiB" if least else "64MiB")
        amount = int(min(float(found[1]) * SIZES[found[2]], MOST_COUNT + 1))
        if amount > MOST_COUNT:
            raise unfit(f"must be at most 1000TB, not {show(value)}", "64MiB")
        if 0 < amount < least:
            raise ValueError(advice(f"is only {amount} bytes", value=f"{found[1]}GiB"))
        return amount

    return ValueKind("size", read, shapes.amount(rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(SIZES)})\s*$"))


def _unit(written: str) -> str:
    """The unit that people mean who write g, G, Gb or gib."""
    return f"{written[0].upper()}iB" if written and written[0].upper() in "KMGT" else "GiB"


def read_seconds(value: Any) -> float:
    """A time from outside: seconds, or text such as 2m; at most a year."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    seconds = value if is_number else seconds_in(value) if isinstance(value, str) else None
    if seconds is None or not 0 <= seconds < math.inf:
        raise unfit(f"must be seconds, or a time such as 30s or 2m, not {show(value)}", _seconds_near(value))
    if seconds > YEAR_SECONDS:
        raise TooLong(Diagnostic(f"must be at most a year (8760h), not {show(value)}", value="8760h"))
    return float(seconds)


class TooLong(ValueError):
    """A time of more than a year."""


def _seconds_near(value: Any) -> str:
    """A time in our words for one in others' (30 sec, 2 minutes), or an example."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(h|ms|us|m|s)[a-z]*\.?", str(value).strip().lower())
    return f"{found[1]}{found[2]}" if found else "30s"


def _read_text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(_not_text(value))
    if any(character < " " or character in "\"'`\\\x7f" for character in value):
        kept = re.sub(r"[\x00-\x1f\"'`\\\x7f]", "", value).strip()
        raise unfit(f"must not hold quotes or control characters: {show(value)}", kept and as_yaml(kept))
    return value.strip()


def _not_text(value: Any) -> Diagnostic:
    said = f"must be text, not {show(value)}"
    if isinstance(value, (bool, float)):
        return advice(said, value=f'"{as_yaml(value)}"')
    return Diagnostic(said)


def _read_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        value = [value]
    return tuple(dict.fromkeys(_read_text(each) for each in value))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


def _read_origins(value: Any) -> tuple[str, ...]:
    origins = tuple(each.lower() for each in _read_names(value))
    for each in origins:
        if not _ORIGIN.fullmatch(each):
            text = f"must name web sites such as https://app.example, each alone, not {show(each)}"
            raise unfit(text, "[https://app.example]")
    return origins


FLAGS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _read_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in FLAGS:
        raise unfit(f"must be true or false, not {show(value)}", "true")
    return FLAGS[value.lower()]


def _read_listen(value: Any) -> tuple[str, int]:
    host, colon, port = str(value).rpartition(":")
    if colon and not host:
        text = f"needs an address before the colon: 127.0.0.1{value}, or 0.0.0.0{value} for all"
        raise unfit(text, f"127.0.0.1{value}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or isinstance(value, bool):
        raise unfit(f"must be ADDRESS:PORT such as 127.0.0.1:9292, not {show(value)}", "127.0.0.1:9292")
    return host.strip("[]") or "127.0.0.1", int(port)


def _read_chosen(value: Any) -> tuple[str, dict[str, object]]:
    if isinstance(value, str) and value:
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        named = as_yaml({"name": "NAME", **value}) if isinstance(value, dict) else ""
        raise unfit(f"must be a name, or {{name: ..., setting: value}}, not {show(value)}", named)
    return value["name"], {key: _read_chosen_setting(each) for key, each in value.items() if key != "name"}


def _read_chosen_setting(value: Any) -> object:
    """Read a policy and its settings, which are numbers or flags where they can be, also from text."""
    try:
        return read_seconds(value) if isinstance(value, str) else value
    except ValueError:
        return FLAGS.get(value.lower(), value)


def listed(known: Collection[str], aliases: Mapping[str, str]) -> ValueKind:
    def read(value: Any) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(aliases.get(name, name) for name in _read_names(value)))
        for name in names:
            if name not in known:
                near = meant(name, known) or next(iter(known))
                mended = [near if each == name else each for each in names]
                raise unfit(f"unknown: {name}; {nearest(name, known)}", as_yaml(mended))
        if not names:
            raise unfit("must name at least one", as_yaml([*known][-1:]))
        return names

    names = shapes.listed(shapes.one_of([*known, *aliases]))
    return ValueKind("list of " + " | ".join(known), read, names)


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def gib(amount: float) -> str:
    """Bytes as people say them."""
    return f"{amount / (1 << 30):.1f} GiB"


def span(seconds: float) -> str:
    """A length of time for people."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def plain(value: object) -> str:
    """A default as people write it."""
    match value:
        case None | ():
            return ""
        case bool():
            return str(value).lower()
        case tuple():
            return ", ".join(value)
        case float():
            return f"{value:g}"
    return str(value)


_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
DURATIONS = rf"^({_NUMBER}|({_NUMBER}(ms|us|µs|μs|ns|h|m|s))+)$"
SECONDS = ValueKind("seconds", read_seconds, shapes.amount(DURATIONS, YEAR_SECONDS))
ENDLESS = "none"
"""How people write that something has no end."""


def _read_seconds_or_none(value: Any) -> float:
    if value == ENDLESS:
        return math.inf
    try:
        return read_seconds(value)
    except TooLong:
        raise
    except ValueError:
        text = f"must be seconds, a time such as 30s or 2m, or {ENDLESS} (as long as it takes)"
        raise unfit(f"{text}, not {show(value)}", _seconds_near(value)) from None


def seconds_or_none(seconds: float) -> str:
    """Seconds as people read them, or ``none``."""
    return f"{seconds:g} s" if seconds < math.inf else ENDLESS


SECONDS_OR_NONE = ValueKind(
    f"seconds, or {ENDLESS}",
    _read_seconds_or_none,
    shapes.any_of({"enum": [ENDLESS]}, SECONDS.shape),
)
AUTO = "auto"
"""How people write that a time follows what goes on."""


def _read_seconds_or_auto(value: Any) -> float | str:
    if value == AUTO:
        return AUTO
    try:
        return read_seconds(value)
    except TooLong:
        raise
    except ValueError:
        text = f"must be seconds, a time such as 30s or 2m, or {AUTO}, not {show(value)}"
        raise unfit(text, _seconds_near(value)) from None


SECONDS_OR_AUTO = ValueKind(
    f"seconds, or {AUTO}",
    _read_seconds_or_auto,
    shapes.any_of({"enum": [AUTO]}, SECONDS.shape),
)
TEXT = ValueKind("text", _read_text, shapes.text())
NAMES = ValueKind("list of names", _read_names, shapes.listed(TEXT.shape))
ORIGINS = ValueKind("list of origins", _read_origins, shapes.listed(shapes.text("://")))
FLAG = ValueKind("true | false", _read_flag, shapes.any_of({"type": "boolean"}, shapes.one_of(FLAGS)))
LISTEN = ValueKind("ADDRESS:PORT", _read_listen, shapes.text("^(.+:)?[0-9]{1,5}$"))
CHOSEN = ValueKind(
    "name, or {name: ..., its settings}",
    _read_chosen,
    shapes.any_of(
        {"type": "string", "minLength": 1},
        {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    ),
)
PORT = whole_number(1, 65535, "8000")
SIZE = size()
MEMORY = size(least=1 << 20)
