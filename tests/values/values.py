"""Values that nobody expects, each by its name: as JSON, and as text in a query, a header or a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

_DIGITS = "9" * 4500


def _text(value: str) -> str:
    return json.dumps(value)


ODD: dict[str, str] = {
    # Numbers
    **{word: word for word in ("0", "1", "-1", "-0.0", "0.1", "1e400", "-1e400", "1e308", "1e-320", "NaN")},
    **{word: word for word in ("Infinity", "-Infinity", "9999999999", "-9999999999", "9007199254740993")},
    **{word: word for word in ("2147483648", "18446744073709551616", "1e15", "1e16", "31536001")},
    "4,500 digits": _DIGITS,
    "minus 4,500 digits": f"-{_DIGITS}",
    "309 digits": "9" * 309,
    "4,500 decimals": f"0.{_DIGITS}",
    "5,000 digits of text": _text("9" * 5000),
    # Words
    **{word: word for word in ("true", "false", "null")},
    **{
        f"text {word!r}": _text(word)
        for word in (
            "",
            " ",
            "x",
            "0",
            "-1",
            "1e400",
            "nan",
            "inf",
            "-inf",
            "true",
            "none",
            "null",
            "5m",
            "-5m",
        )
    },
    **{
        f"text {word!r}": _text(word)
        for word in ("1h1h", "9999999h", "1e9h", "-", "+", "%", "*", "..", "/", "a/b")
    },
    **{
        f"text {word!r}": _text(word)
        for word in ("0x10", "1_000", "1,2", "$x", "${x}", "{", "[", "{}", "[1]", "\\")
    },
    "superscript": _text("²"),
    "other digits": _text("١٢"),
    "full-width digits": _text("\uff15"),
    "lone surrogate": '"\\ud800"',
    "other surrogate": '"a\\udc00b"',
    "control characters": _text("\x00\x01\x1b[2J\r\n\t\x7f"),
    "line ends": _text("a\r\nb\nc\u2028d"),
    "right to left": _text("\u202eabc\ufeff"),
    "astral": _text("\U0001f600" * 100),
    "long text": _text("x" * 100_000),
    "many digits and an h": _text("1" * 60 + "h" + "1" * 60 + "x"),
    "hours of 20 digits and an x": _text(("1" * 20 + "h") * 20 + "x"),
    "40,000 digits and an x": _text("1" * 40_000 + "x"),
    "many hours": _text("1h" * 30_000 + "x"),
    "many slashes": _text("/" * 20_000),
    "many spaces": _text(" " * 40_000 + "x"),
    "many quotes": _text('\\"' * 20_000),
    "many commas": _text("," * 20_000),
    "many dots": _text("a." * 20_000),
    "half a data URL": _text("data:image/png;base64,"),
    # Lists and objects
    "[]": "[]",
    "{}": "{}",
    **{
        word: word
        for word in ("[null]", "[1]", "[true]", "[[]]", "[{}]", "[[[]]]", '[""]', '{"":null}', '["x",1]')
    },
    **{word: word for word in ('{"x":{"x":{}}}', '[{"type":[]}]', '[{"type":{}}]', '[{"type":null}]')},
    **{word: word for word in ('[{"type":"text"}]', '[{"function":1}]', '[{"function":{"name":[]}}]')},
    **{
        word: word
        for word in ('[{"id":-1}]', '[{"id":true}]', '[{"id":1e400}]', '[{"id":"x"}]', '[{"id":[]}]')
    },
    **{
        word: word
        for word in ('{"name":[]}', '{"name":"x"}', '{"name":{}}', '{"name":null,"x":1}', '{"type":1}')
    },
    "deep list": "[" * 150 + "]" * 150,
    "deep object": '{"a":' * 150 + "1" + "}" * 150,
    "very deep list": "[" * 5000 + "]" * 5000,
    "very deep object": '{"a":' * 5000 + "1" + "}" * 5000,
    "deepest list": "[" * 100_000 + "]" * 100_000,
    "5,000 brackets": "[" * 5000,
    "many lists": "[" + "[]," * 30_000 + "[]]",
    "many numbers": "[" + "1," * 100_000 + "1]",
    "many keys": "{" + ",".join(f'"k{number}":{number}' for number in range(20_000)) + "}",
    "many objects": "[" + '{"type":"text","text":"a"},' * 20_000 + "{}]",
    "one key twice": '{"x":1,"x":2}',
    "very many lists": "[" + "[]," * 20_000_000 + "[]]",
}
"""Name -> JSON, or what some take for it."""
HUGE = frozenset({"very many lists"})
"""Those of more than a few hundred kilobytes: rarely drawn."""


def as_text(name: str) -> str:
    """The same value as people write it where there is no JSON: without quotes."""
    written = ODD[name]
    if written[:1] == '"':
        found: Any = json.loads(written)
        return str(found)
    return written


def in_query(name: str) -> str:
    return quote(as_text(name).encode("utf-8", "surrogatepass")[:6000], safe="")


def in_header(name: str) -> bytes:
    """As much of it as a line of a head may hold."""
    text = "".join(each for each in as_text(name) if each >= " " and each != "\x7f")
    return text.encode("utf-8", "surrogatepass")[:6000]


Path = tuple[str | int, ...]
Change = tuple[Path, str]
"""A place in a document, and the name of the value that comes there."""


class _Raw:
    """Stands for a value's text in a document."""

    def __init__(self, text: str) -> None:
        self.text = text


def changed(document: Any, changes: tuple[Change, ...], value: Callable[[str], str] = ODD.__getitem__) -> str:
    """A document's text with odd values at some places; a place that is not there is left out."""
    copy = json.loads(json.dumps(document))
    for path, name in changes:
        if not path:
            copy = _Raw(value(name))
            continue
        _put(copy, path, _Raw(value(name)))
    return _written(copy)


def _put(place: Any, path: Path, value: object) -> None:
    for step in path[:-1]:
        try:
            place = place[step]
        except (KeyError, IndexError, TypeError):
            return
    last = path[-1]
    if isinstance(place, dict):
        place[str(last)] = value
    elif isinstance(place, list) and isinstance(last, int) and last < len(place):
        place[last] = value


def _written(value: Any) -> str:
    match value:
        case _Raw():
            return value.text
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_written(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def places(document: Any, at: Path = ()) -> list[Path]:
    """Every place in a document, its root first."""
    found = [at]
    steps = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for step, each in steps:
        found += places(each, (*at, step))
    return found


def objects_in(document: Any, at: Path = ()) -> list[Path]:
    """The places of the objects in a document."""
    return [path for path in places(document, at) if isinstance(_at(document, path), dict)]


def _at(document: Any, path: Path) -> Any:
    for step in path:
        document = document[step]
    return document
