"""The settings of ``x-anvil``: the kinds of their values, what is said of a value that cannot be read, and
their rows.

A kind is how people write a value, what it is read as, and the JSON Schema of it, in one object. ``read``
takes what YAML, an environment variable or a flag gave (so numbers may come as text) and returns the value,
or raises ValueError that says what it should be; with a ``Diagnostic`` in it, it also has a value to write
instead. Parts of a value that are wrong are told one by one (``Wrong``), so that no mistake hides another.

A shape (JSON Schema, draft 7) is for editors, which complete and check by it. It takes all that ``read``
takes and refuses the common mistakes; ``read`` alone decides. A variable of Compose (``${NAME}``) may stand
for any scalar, so text with a ``$`` always passes.

A setting is all that depends on one key, in one row, which is the field that it fills: ``Config`` and
``Backend`` (config.py) are tables of settings. From their rows follow what is read and how it is refused,
the documentation, the JSON Schema, what a reload may change at once, and what the event log records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import yaml

from anvil_mux.clock import MOST_COUNT, YEAR_SECONDS, seconds_in

Made = TypeVar("Made")
Shape = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ValueKind:
    name: str
    """The name that the documentation gives it."""
    read: Callable[[Any], Any]
    shape: Shape
    """The JSON Schema of what ``read`` takes."""

    def then(self, make: Callable[[Any], Any]) -> ValueKind:
        """The same values, and what ``make`` makes of each."""

        def read(value: Any) -> Any:
            try:
                found = self.read(value)
            except Wrong as wrong:
                raise Wrong(wrong.problems, make(wrong.rest)) from None
            return make(found)

        return replace(self, read=read)

    def called(self, name: str) -> ValueKind:
        return replace(self, name=name)

    def of(self, fits: Callable[[Any], bool], must: str, example: str) -> ValueKind:
        """The same, read from what fits alone; ``must``: what is said of anything else."""

        def read(value: Any) -> Any:
            if not fits(value):
                raise unfit(f"{must}, not {show(value)}", example)
            return self.read(value)

        return replace(self, read=read)

    def but(self, fails: Callable[[Any], bool], text: str, example: str = "") -> ValueKind:
        """The same values without those of which something holds; ``text``: what is said of these."""

        def read(value: Any) -> Any:
            if fails(found := self.read(value)):
                raise unfit(text, example)
            return found

        return replace(self, read=read)


# What is wrong

KeyPath = tuple[str, ...]
"""The way to a value: services, a, ports, 0."""
LONGEST = 100
"""The longest line that is written out as an example."""


class Position(NamedTuple):
    """The place of a diagnostic in the files; ``line`` None: in a file that another one includes."""

    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


NOWHERE = Position()


class Diagnostic(str):
    """A sentence that says what is wrong, which is all that logs and clients get, and its parts.

    ``said``: the sentence without what is to be written instead. ``write``: the line to write. ``value``: the
    value to write, where whoever found it does not know its key. ``page``: only where the key tells none.
    """

    __slots__ = ("key", "page", "place", "said", "value", "write")

    said: str
    write: str
    value: str
    key: KeyPath
    place: Position
    page: str

    def __new__(
        cls,
        sentence: str,
        *,
        said: str | None = None,
        write: str = "",
        value: str = "",
        key: KeyPath = (),
        place: Position = NOWHERE,
        page: str = "",
    ) -> Diagnostic:
        made = super().__new__(cls, sentence)
        made.said = str(sentence) if said is None else said
        made.write, made.value, made.key, made.place, made.page = write, value, key, place, page
        return made

    def at(self, place: Position, key: KeyPath, shown: str) -> Diagnostic:
        """Return the same diagnostic with its place before it; ``shown``: its key as people read it."""
        write = self.write or (_line(key, self.value) if self.value else "")
        return self.about(str(place), shown, key=key, write=write, place=place)

    def about(self, *before: str, **parts: Any) -> Diagnostic:
        """Return the same diagnostic with words before it, what it is about, and other parts."""
        words = "".join([f"{each}: " for each in before if each])
        parts = {"write": self.write, "value": self.value, "key": self.key, "page": self.page, **parts}
        return Diagnostic(f"{words}{self}", said=f"{words}{self.said}", **parts)


def advice(said: str, write: str = "", more: str = "", *, joint: str = "; ", **about: Any) -> Diagnostic:
    """Return a diagnostic whose sentence ends with ``more``, or with the line, or the value, to write."""
    sentence = said + joint + (more or f"write {write or about['value']}")
    return Diagnostic(sentence, said=said, write=write, **about)


def no_such(said: str, word: str, known: Iterable[str]) -> Diagnostic:
    """Return the diagnostic about a word that is not among those known, with the nearest that is."""
    known = tuple(known)
    return Diagnostic(f"{said}; {nearest(word, known)}", value=meant(word, known))


def unfit(text: str, value: str = "", *, write: str = "", key: KeyPath = ()) -> ValueError:
    """Return the error about what cannot be taken; ``value``, ``write``: what could stand there."""
    return ValueError(Diagnostic(text, value=value, write=write, key=key))


def as_diagnostic(text: object) -> Diagnostic:
    """Return the diagnostic that a text or the error of a value is, or one that is made of it."""
    if isinstance(text, BaseException):
        text = text.args[0] if text.args else str(text)
    return text if isinstance(text, Diagnostic) else Diagnostic(str(text))


def as_yaml(value: Any) -> str:
    """Write a value in one line of YAML; ``...`` for one that is too long for an example."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= LONGEST and "\n" not in text else "..."


def _line(key: KeyPath, value: str) -> str:
    last = key[-1] if key else ""
    if last.isdigit():
        return f'"{last}": {value}' if key[-2:-1] == ("gpus",) else f"- {value}"
    return f"{last}: {value}"


Problem = tuple[tuple[str, ...], str]
"""The way to a part of a value, and what is wrong with it."""


class Wrong(ValueError):
    """Parts of a value are wrong; ``rest`` is what it comes to without them."""

    def __init__(self, problems: Sequence[Problem], rest: Any) -> None:
        super().__init__("; ".join([": ".join((".".join(path), text)) for path, text in problems]))
        self.problems = problems
        self.rest = rest


def unknown(key: str, known: Collection[str], value: Any) -> Diagnostic:
    """The diagnostic about an unknown key: the nearest one, with the value that it was given."""
    near = meant(key, known)
    written = "..." if value is None else as_yaml(value)
    return Diagnostic(f"unknown key; {nearest(key, known)}", write=f"{near}: {written}" if near else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is nearest to an unknown one."""
    known = tuple(known)
    close = meant(word, known)
    return f"did you mean {close}?" if close else f"known: {', '.join(known)}"


def meant(word: str, known: Iterable[str]) -> str:
    """The known word that is near an unknown one; "" if none is."""
    return next(iter(get_close_matches(word, tuple(known), 1, 0.6)), "")


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Kinds made of others


def record(make: Callable[..., Any], **parts: ValueKind) -> ValueKind:
    """A mapping that has these keys and no others, of which ``make`` makes one thing.

    A key without a value counts as not given, so that ``make`` knows what holds without it.
    """

    def read(value: Mapping[str, Any]) -> Any:
        problems: list[Problem] = [
            ((str(key),), unknown(str(key), parts, each)) for key, each in value.items() if key not in parts
        ]
        given = {key: each for key, each in value.items() if key in parts and each is not None}
        made = make(**_read_each(given, lambda key, each: parts[key].read(each), problems))
        return _whole(made, problems)

    shape = object_shape({key: kind.shape for key, kind in parts.items()})
    return ValueKind(f"{{{', '.join(parts)}}}", read, shape)


def _read_each(
    values: Mapping[Any, Any], read: Callable[[Any, Any], Any], problems: list[Problem]
) -> dict[Any, Any]:
    """Name -> what ``read`` makes of it and its value, and the problems with that."""
    found: dict[Any, Any] = {}
    for name, value in values.items():
        try:
            found[name] = read(name, value)
        except Wrong as wrong:
            problems += [((str(name), *path), text) for path, text in wrong.problems]
            found[name] = wrong.rest
        except ValueError as error:
            problems.append(((str(name),), as_diagnostic(error)))
    return found


def _whole(made: Made, problems: list[Problem]) -> Made:
    if problems:
        raise Wrong(problems, made)
    return made


def by_name(read: Callable[[Any, Any], Any], value: Shape, wanted: str, example: str) -> ValueKind:
    """A mapping with any names, of which each is read with its value; ``wanted``: how it is written."""

    def read_all(given: Any) -> dict[Any, Any]:
        problems: list[Problem] = []
        return _whole(_read_each(given, read, problems), problems)

    return ValueKind(wanted, read_all, names_shape(value)).of(is_mapping, f"must hold {wanted}", example)


def list_of(item: ValueKind) -> ValueKind:
    """A list of values, or a single one."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            return (item.read(value),)
        problems: list[Problem] = []
        found = _read_each(dict(enumerate(value)), lambda _, each: item.read(each), problems)
        return _whole(tuple(found.values()), problems)

    shape = any_of(item.shape, {"type": "array", "items": item.shape})
    return ValueKind(f"list of {item.name}", read, shape)


def either(short: ValueKind, long: ValueKind) -> ValueKind:
    """A mapping that ``long`` reads, or a short form that stands for it."""

    def read(value: Any) -> Any:
        return long.read(value) if isinstance(value, dict) else short.read(value)

    return ValueKind(f"{short.name}, or {long.name}", read, any_of(short.shape, long.shape))


def or_word(kind: ValueKind, word: str, stands_for: Any) -> ValueKind:
    """The values of a kind, or a word that stands for one."""

    def read(value: Any) -> Any:
        return stands_for if value == word else kind.read(value)

    return ValueKind(f"{kind.name}, or {word}", read, any_of({"enum": [word]}, kind.shape))


def is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def has_one_of(*keys: str) -> Callable[[Any], bool]:
    """Whether a value is a mapping with exactly one of these keys."""
    return lambda value: is_mapping(value) and sum(value.get(key) is not None for key in keys) == 1


def positive(kind: ValueKind) -> ValueKind:
    """The values of a kind that are more than 0."""

    def read(value: Any) -> Any:
        if found := kind.read(value):
            return found
        raise unfit(f"must be more than 0, not {show(value)}")

    return replace(kind, read=read)


# Words


def one_of(*known: str) -> ValueKind:
    def read(value: Any) -> str:
        if value not in known:
            text = f"must be one of {', '.join(known)}, not {show(value)}"
            raise unfit(text, meant(str(value).lower(), known) or known[0])
        return str(value)

    return ValueKind(" | ".join(known), read, word_shape(known))


def some_of(known: Collection[str], aliases: Mapping[str, str]) -> ValueKind:
    """A list of words, in order, each once."""

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

    return ValueKind("list of " + " | ".join(known), read, list_shape(word_shape([*known, *aliases])))


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


FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _read_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in FLAGS:
        raise unfit(f"must be true or false, not {show(value)}", "true")
    return FLAGS[value.lower()]


# Numbers


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

    return ValueKind("whole number", read, whole_shape(least, most))


SIZES = {unit + "iB": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
SIZES |= {unit + "B": 1000**power for power, unit in enumerate("KMGT", 1)}
SIZES |= {"kB": 1000, "B": 1, "": 1}


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

    return ValueKind("size", read, amount_shape(rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(SIZES)})\s*$"))


def _unit(written: str) -> str:
    """The unit that people mean who write g, G, Gb or gib."""
    return f"{written[0].upper()}iB" if written and written[0].upper() in "KMGT" else "GiB"


def gib(amount: float) -> str:
    """Bytes as people say them."""
    return f"{amount / (1 << 30):.1f} GiB"


# Times

ENDLESS = "none"
"""How people write that something has no end."""
AUTO = "auto"
"""How people write that a time follows what goes on."""


def span(seconds: float) -> str:
    """A length of time for people."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def read_seconds(value: Any, must: str = "must be seconds, or a time such as 30s or 2m") -> float:
    """A time from outside: seconds, or text such as 2m; at most a year. ``must``: what is said of others."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    seconds = value if is_number else seconds_in(value) if isinstance(value, str) else None
    if seconds is None or not 0 <= seconds < math.inf:
        raise unfit(f"{must}, not {show(value)}", _seconds_near(value))
    if seconds > YEAR_SECONDS:
        raise unfit(f"must be at most a year (8760h), not {show(value)}", "8760h")
    return float(seconds)


def seconds_or(word: str, stands_for: float | str, meaning: str = "") -> ValueKind:
    """A time, or a word; ``meaning``: what is said of it to whoever wrote neither."""
    must = f"must be seconds, a time such as 30s or 2m, or {word}{meaning}"
    return or_word(replace(SECONDS, read=lambda value: read_seconds(value, must)), word, stands_for)


def seconds_or_none(seconds: float) -> str:
    """Seconds as people read them, or ``none``."""
    return f"{seconds:g} s" if seconds < math.inf else ENDLESS


def _seconds_near(value: Any) -> str:
    """A time in our words for one in others' (30 sec, 2 minutes), or an example."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(h|ms|us|m|s)[a-z]*\.?", str(value).strip().lower())
    return f"{found[1]}{found[2]}" if found else "30s"


# Shapes

NOTHING: Shape = {"type": "null"}
"""The shape of a key without a value, which counts as not given."""
VARIABLE: Shape = {"type": "string", "pattern": r"\$"}


def any_of(*shapes: Shape) -> Shape:
    return {"anyOf": list(shapes)}


def text_shape(pattern: str = r"\S") -> Shape:
    """Text, or a number that is taken as text, of which some part fits ``pattern``."""
    return {"type": ["string", "integer"], "pattern": rf"{pattern}|\$"}


def word_shape(known: Iterable[str]) -> Shape:
    return any_of({"enum": list(known)}, VARIABLE)


def whole_shape(least: float, most: float) -> Shape:
    """A whole number, which may also be written as text."""
    limits = {"minimum": least, "maximum": most}
    number = {
        "type": "integer",
        **{key: int(each) for key, each in limits.items() if not math.isinf(each)},
    }
    return any_of(number, {"type": "string", "pattern": r"^-?[0-9]+$|\$"})


def amount_shape(pattern: str, most: float = math.inf) -> Shape:
    """A number from 0 to ``most``, or text that fits ``pattern``."""
    limits = {"minimum": 0} if math.isinf(most) else {"minimum": 0, "maximum": int(most)}
    return any_of({"type": "number", **limits}, {"type": "string", "pattern": rf"{pattern}|\$"})


def list_shape(item: Shape) -> Shape:
    """A list, for which a single item, or items with commas in between, may stand."""
    return any_of(item, {"type": "array", "items": item}, {"type": "string", "pattern": r",|\$|^\s*$"})


def object_shape(keys: Mapping[str, Shape]) -> Shape:
    """A mapping that has these keys and no others; each may be left without a value."""
    known = {key: any_of(shape, NOTHING) for key, shape in keys.items()}
    return {"type": "object", "properties": known, "additionalProperties": False}


def names_shape(value: Shape) -> Shape:
    """A mapping with any keys."""
    return {"type": "object", "additionalProperties": value}


# The usual kinds

TEXT = ValueKind("text", _read_text, text_shape())
NAMES = ValueKind("list of names", _read_names, list_shape(TEXT.shape))
FLAG = ValueKind("true | false", _read_flag, any_of({"type": "boolean"}, word_shape(FLAGS)))
PORT = whole_number(1, 65535, "8000")
COUNT = whole_number(1)
SIZE = size()
MEMORY = size(least=1 << 20)
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
DURATIONS = rf"^({_NUMBER}|({_NUMBER}(ms|us|µs|μs|ns|h|m|s))+)$"
SECONDS = ValueKind("seconds", read_seconds, amount_shape(DURATIONS, YEAR_SECONDS))
SECONDS_OR_NONE = seconds_or(ENDLESS, math.inf, " (as long as it takes)")
SECONDS_OR_AUTO = seconds_or(AUTO, AUTO)


# Projects and addresses


def _read_project(value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", str(value)):
        text = f"must be lower-case letters, digits, - and _, not {show(value)}"
        raise unfit(text, re.sub("[^a-z0-9_-]+", "-", str(value).lower()).strip("-_"))
    return str(value)


PROJECT = ValueKind("text", _read_project, text_shape(r"^[a-z0-9][a-z0-9_-]*$"))


def _read_listen(value: Any) -> tuple[str, int]:
    host, colon, port = str(value).rpartition(":")
    if colon and not host:
        text = f"needs an address before the colon: 127.0.0.1{value}, or 0.0.0.0{value} for all"
        raise unfit(text, f"127.0.0.1{value}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or isinstance(value, bool):
        raise unfit(f"must be ADDRESS:PORT such as 127.0.0.1:9292, not {show(value)}", "127.0.0.1:9292")
    return host.strip("[]") or "127.0.0.1", int(port)


LISTEN = ValueKind("ADDRESS:PORT", _read_listen, text_shape("^(.+:)?[0-9]{1,5}$"))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


def _read_origins(value: Any) -> tuple[str, ...]:
    origins = tuple(each.lower() for each in NAMES.read(value))
    for each in origins:
        if not _ORIGIN.fullmatch(each):
            text = f"must name web sites such as https://app.example, each alone, not {show(each)}"
            raise unfit(text, "[https://app.example]")
    return origins


ORIGINS = ValueKind("list of origins", _read_origins, list_shape(text_shape("://")))


def _read_paths(value: Any) -> tuple[str, ...]:
    paths = NAMES.read(value)
    for path in paths:
        if not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+/?", path):
            text = f"must be paths such as /docs or /sdapi/, not {show(path)}"
            raise unfit(text, f"/{path}" if re.fullmatch(r"[\w-]+/?", path) else "/docs")
    return tuple(paths)


PATHS = ValueKind("list of paths", _read_paths, list_shape(text_shape(r"^/[A-Za-z0-9_-]")))


_NOT_PASSED = frozenset(
    (
        *("authorization", "x-api-key", "api-key", "sec-websocket-protocol", "x-request-id"),
        *("host", "content-length", "content-encoding", "transfer-encoding", "trailer", "te"),
        *("connection", "keep-alive", "upgrade", "http2-settings", "expect", "forwarded"),
    )
)
"""The headers of a client that no setting passes on: they may hold its key for anvil-mux, or belong to its
connection to anvil-mux."""
_NOT_PASSED_BEGINNINGS = ("x-anvil-", "x-forwarded-", "proxy-")


def _read_headers(value: Any) -> tuple[str, ...]:
    """Return the names of headers in lower case."""
    headers = tuple(name.lower() for name in NAMES.read(value))
    for name in headers:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name):
            raise unfit(f"must be names of headers such as X-Tenant, not {show(name)}", "[X-Tenant]")
        if name in _NOT_PASSED or name.startswith(_NOT_PASSED_BEGINNINGS):
            raise unfit(f"must not name {name}, which anvil-mux reads itself, or writes anew", "[X-Tenant]")
    return headers


HEADERS = ValueKind("list of headers", _read_headers, NAMES.shape)


# Settings

ROWS = "settings"
"""The key of a field's metadata under which its settings stand."""


@dataclass(frozen=True, slots=True)
class Setting:
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
    of_engines: bool = False
    """Whether it is about an engine that we load, and says nothing about a server elsewhere."""
    default: str = ""
    """The default that the documentation shows."""
    page: str = ""
    """The page in docs/, and the section of it, that says more; "": the table in the reference."""

    def fields_of(self, key: str) -> tuple[str, ...]:
        """The fields that it fills under its key."""
        return () if self.fills is None else self.fills or (key,)

    def waiting(self, key: str) -> tuple[str, ...]:
        """The fields that a reload leaves as they are."""
        return self.later if self.live else self.fields_of(key)


Table = Mapping[str, Setting]
"""Key -> its setting."""


def setting(
    default: Any,
    kind: ValueKind,
    doc: str,
    *,
    key: str = "",
    shown: str | None = None,
    beside: Mapping[str, Setting] = MappingProxyType({}),
    **about: Any,
) -> Any:
    """A field with its default, or what makes it, that a setting fills; ``key``: the setting's, if another.

    ``shown``: the default for people, where that is not what they would write. ``beside``: further settings,
    by their keys, that decide about the field.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    row = Setting(kind, doc, default=plain(default) if shown is None else shown, **about)
    return field(**made, metadata={ROWS: {key: row, **beside}})


def table_of(owner: type) -> dict[str, Setting]:
    """The settings in the rows of a dataclass."""
    return {
        key or each.name: row for each in fields(owner) for key, row in each.metadata.get(ROWS, {}).items()
    }


def fields_of(table: Table, holds: Callable[[Setting], bool]) -> list[str]:
    """The fields that those settings fill of which something holds."""
    return [field for key, each in table.items() if holds(each) for field in each.fields_of(key)]


def filled(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value, of what was read: key -> value; a setting that fills none keeps its key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        names = table[key].fields_of(key) or (key,)
        found |= zip(names, value if len(names) > 1 else (value,), strict=True)
    return found


def plain(value: object) -> str:
    """A default as people write it."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return ", ".join(value)
        case float():
            return f"{value:g}"
    return "" if value in (None, MISSING) else str(value)


# For people and their editors


COMPOSE = "https://raw.githubusercontent.com/compose-spec/compose-spec/main/schema/compose-spec.json"
"""The schema of the Compose Specification; what Compose itself knows is left to it."""
DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that YAML's language server knows."""

Choices = Mapping[str, Sequence[str]]
"""Key -> the names of plug-ins that come with the program, which editors offer; others may be named too."""


def describe(table: Table) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every setting, for the documentation."""
    for key, each in table.items():
        yield key, each.kind.name, each.default, each.doc


def compose_schema(top: Table, of_service: Table, choices: Choices) -> dict[str, Any]:
    """The schema of a whole compose file."""
    ours = {"anyOf": [{"$ref": "#/definitions/service"}, {"const": False}]}
    service = {"type": "object", "properties": {"x-anvil": ours}}
    return {
        "$schema": DRAFT,
        "title": "A compose file for anvil-mux",
        "type": "object",
        "allOf": [{"$ref": COMPOSE}],
        "properties": {
            "x-anvil": {"$ref": "#/definitions/top"},
            "services": {"type": "object", "additionalProperties": service},
        },
        "definitions": {
            "top": _schema("The settings of anvil-mux.", top, choices),
            "service": _schema(
                "With this key, even if it is empty, the service is a model; with `false` it is none.",
                of_service,
                choices,
            ),
        },
    }


def _schema(meaning: str, table: Table, choices: Choices) -> Shape:
    keys = {key: _shape(each, choices.get(key, ())) for key, each in table.items()}
    known = {"type": "object", "properties": keys, "additionalProperties": False}
    return {"description": meaning, **any_of(known, NOTHING)}


def _shape(each: Setting, choices: Sequence[str]) -> Shape:
    told = f"{each.doc}\n\n{each.kind.name}" + (f"; by default {each.default}" if each.default else "")
    offered = {"examples": list(choices)} if choices else {}
    return {"description": told, **offered, **any_of(each.kind.shape, NOTHING)}
