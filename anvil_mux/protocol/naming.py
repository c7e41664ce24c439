"""The model that a request names, wherever the name stands: JSON, a multipart form, or a query.

The name of the model is read without changing a byte of the body. Small JSON is parsed; large JSON (images in
base64) is scanned: between two strings only brackets matter, so the depth at each string is a count, and a
string at depth 1 with a colon behind it is a key of the body. Both refuse a second ``model``, of which two
parsers could choose a different one. Multipart bodies are scanned as they are spooled. What opens a realtime
session has the name further in.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, unquote_plus

from anvil_mux.errors import BadRequest, TooLarge
from anvil_mux.protocol import foreign
from anvil_mux.protocol.http1 import parse_fields

MAX_JSON_PARSED = 256 * 1024
MAX_MODEL_NAME = 512
STEP = 1024 * 1024
"""Bytes of a large body that are read at once: other threads get their turns in between."""
MAX_STRINGS = 1_000_000
MAX_PART_HEAD = 8 * 1024
MAX_PARTS = 1000


def media(content_type: bytes, body: bytes | bytearray) -> str:
    """The kind of a body, json or multipart; JSON sent as a form or as nothing (plain ``curl -d``) is known
    by its first byte."""
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == b"application/json" or kind.endswith(b"+json"):
        return "json"
    if kind == b"multipart/form-data":
        return "multipart"
    if kind in (b"", b"application/x-www-form-urlencoded") and _START.match(body):
        return "json"
    raise BadRequest("the body must be application/json (or multipart/form-data for files)", status=415)


_DECODER = json.JSONDecoder(object_pairs_hook=tuple)
"""Objects become tuples of pairs, which arrays never are; repeated keys stay visible."""
_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")
_EMPTY = re.compile(rb"[ \t\r\n]*\}")
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_RUN = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,500}', re.DOTALL)
_MAX_KEY = 6 * len("input_audio_transcription") + 2
"""The longest key of interest, with every character escaped, and its quotes."""
_MORE_MODELS = re.compile(r"models|(?:\w+_)?fallbacks", re.IGNORECASE)
_MORE_MARKS = (b'models"', b'fallbacks"', b"\\u")
"""Parts of a body of which one is there, in small letters, if a key of it is ``_MORE_MODELS``."""
_LONGEST_MARK = max(map(len, _MORE_MARKS))
_MODEL_KEY = re.compile(r"(?:\w+_)?(?:model|fallback)s?", re.IGNORECASE)
"""The keys under which a part of a body, or a field of a form, names a model."""
_FREE_TEXT = frozenset(
    ("messages", "input", "prompt", "system", "instructions", "metadata", "documents", "query", "texts")
)
"""The keys of a body whose values are what people and models wrote."""
_SCHEMAS = frozenset(
    (
        *("functions", "input_schema", "schema", "properties", "text", "response_format", "json_schema"),
        *("format", "guided_json", "structured_outputs", "output_config", "chat_template_kwargs"),
    )
)
"""The keys, also within tools, whose values describe data, in which `model` is a word like any other."""
_ADAPTERS = re.compile(r"(?:lora|adapter)s?(?:_(?:id|ids|name|path|paths|request|source))?", re.IGNORECASE)
"""The keys of a body by which engines choose an adapter for one request."""
_MARK = re.compile(rb'["\[\]{}]')
MAX_PART_PARSED = 4 * 1024 * 1024
"""The most bytes of one value of a body that is read for further models."""


def model_and_stream(body: bytes | bytearray) -> tuple[str | None, bool]:
    """The model that a JSON body names (None when it names none) and whether it asks for a stream."""
    if len(body) > MAX_JSON_PARSED:
        return _scanned(body)
    return _parse_with_care(body)


def _scanned(body: bytes | bytearray) -> tuple[str | None, bool]:
    """The same as above, for a large body, of which no objects are made."""
    _check_utf8(body)
    _, span, stream = _scan(body)
    if span is None:
        return None, stream
    try:
        model = json.loads(bytes(body[slice(*span)]).decode())
    except ValueError:
        raise BadRequest("`model` is not a JSON string", param="model") from None
    return checked(model), stream


Span = tuple[int, int]

SESSIONS = (
    ("session", "model"),
    ("session", "audio", "input", "transcription", "model"),
    ("model",),
    ("input_audio_transcription", "model"),
)
"""The keys, from the outside in, under which what opens a realtime session has its model."""


def session_models(body: bytes | bytearray) -> list[tuple[str, Span]]:
    """The models that a JSON body names which describes a session, and where each value stands, quotes
    included. The first one is the session's; the others transcribe what it hears.
    """
    if len(body) > MAX_JSON_PARSED:
        raise TooLarge(f"what describes a session has at most {MAX_JSON_PARSED} bytes")
    _parse_with_care(body)
    spans = filter(None, (_value_span(body, keys) for keys in SESSIONS))
    return [(checked(json.loads(body[slice(*span)])), span) for span in spans]


def string_of(body: bytes | bytearray, key: str) -> str:
    """The string that a JSON body, which was read before, has under a key; "" if it has none there."""
    if not (key.encode("ascii") in body or b"\\u" in body):
        return ""
    start = _value_start(body, key, str)
    if start is None or body[start : start + 1] != b'"':
        return ""
    try:
        return str(json.loads(body[start : _string_end(body, start + 1)]))
    except ValueError:
        raise BadRequest(f"`{key}` is not a JSON string", param=key) from None


def _value_span(body: bytes | bytearray, keys: tuple[str, ...]) -> Span | None:
    start, end = 0, len(body)
    for key in keys:
        place = _value_start(body[start:end], key, str.lower)
        if place is None:
            return None
        start += place
        end = start + _DECODER.raw_decode(body[start:].decode("latin-1"))[1]
    return start, end


def _value_start(value: bytes | bytearray, key: str, spelled: Callable[[str], str]) -> int | None:
    """The place where the value of an object's key begins; None: it has none.

    ``spelled`` makes of each key what is compared. BadRequest: it has the key twice.
    """
    opening = _START.match(value)
    keys = _top_level_keys(value, opening.end()) if opening else ()
    places = [place for name, place in keys if spelled(name) == key]
    if len(places) > 1:
        raise BadRequest(f"`{key}` is given twice", param=key)
    return places[0] if places else None


def model_replaced(
    body: bytes | bytearray, new: str, span: Span | None = None
) -> tuple[bytes | memoryview, ...]:
    """Return ``body`` in pieces, with ``new`` as its model and every other byte as it was; copies nothing
    large.

    ``span``: where the model stands, if not at the top.
    """
    beginning, found, _ = _scan(body)
    value = json.dumps(new).encode("ascii")
    view = memoryview(body)
    if span := span or found:
        start, end = span
        return view[:start], value, view[end:]
    comma = b"" if _EMPTY.match(body, beginning) else b","
    return view[:beginning], b'"model":' + value + comma, view[beginning:]


def _parse_with_care(body: bytes | bytearray) -> tuple[str | None, bool]:
    try:
        foreign.check(body)
        text = body.decode()
        document = _DECODER.decode(text[1:] if text[:1] == "\ufeff" else text)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", param="body") from None
    if not isinstance(document, tuple):
        raise _not_an_object()
    models: list[object] = []
    stream = False
    for key, value in document:
        if _is_model(key):
            models.append(value)
        elif key == "stream":
            stream = value is True
    if len(models) > 1:
        raise _twice()
    return (checked(models[0]) if models else None), stream


def _is_model(key: str) -> bool:
    """Whether a key is `model`; BadRequest if only its capitals differ: some servers read it all the same."""
    if key.lower() == "model" != key:
        raise BadRequest(f"`{key}` is written `model`", param="model")
    return key == "model"


def checked(model: object) -> str:
    if not isinstance(model, str) or not model:
        raise BadRequest("`model` must be a string that names a model", param="model")
    if len(model) > MAX_MODEL_NAME:
        raise BadRequest(f"`model` is longer than {MAX_MODEL_NAME} characters", param="model")
    try:
        model.encode()
    except UnicodeEncodeError:
        raise BadRequest("`model` holds half a surrogate pair", param="model") from None
    return model


def is_object(body: bytes | bytearray) -> bool:
    """Return whether a body begins as a JSON object does."""
    return _START.match(body) is not None


def refuse_more_models(body: bytes | bytearray) -> None:
    """Refuse a body with `models` or `fallbacks`, in which some servers take others to ask if the first one
    fails.
    """
    opening = _START.match(body)
    if opening is None or not _may_have_more_models(body):
        return
    for key, _ in _top_level_keys(body, opening.end()):
        if _MORE_MODELS.fullmatch(key):
            raise more_models_in(key)


def more_models_in(key: str) -> BadRequest:
    """Return the error for a field that may name other models than the one that is asked for."""
    text = f"`{key}` may name other models of the server; that needs a key with `admin`"
    return BadRequest(text, param=key, status=403)


def inner_models(body: bytes | bytearray) -> list[str]:
    """Return the models that a JSON body names elsewhere than by its own ``model``.

    Tools, realtime sessions, drafts and plugins have models of their own. Messages, schemas and other free
    text are not searched. BadRequest, TooLarge.
    """
    opening = _START.match(body)
    names: list[str] = []
    for key, start in _top_level_keys(body, opening.end()) if opening else ():
        spelled, first = key.lower(), body[start : start + 1]
        if spelled == "model" or spelled in _FREE_TEXT or spelled in _SCHEMAS:
            continue
        if first == b'"' and _MODEL_KEY.fullmatch(key):
            names.append(_parsed(body[start : _string_value(body, start)]))
        elif first in (b"{", b"["):
            part = body[start : _value_end(body, start)]
            lowered = part.lower()
            if b"model" in lowered or b"fallback" in lowered or b"\\u" in lowered:
                names += _names_within(key, _parsed(part))
    return names


def _parsed(part: bytes | bytearray) -> Any:
    """Parse one value of a body; objects become tuples of pairs."""
    try:
        foreign.check(part, of_request=True)
        return _DECODER.decode(part.decode())
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", param="body") from None


def _names_within(key: str, value: Any) -> Iterator[str]:
    """Yield the strings below keys that name models, in the value of ``key``."""
    remaining: list[tuple[str, Any]] = [(key, value)]
    while remaining:
        key, value = remaining.pop()
        names_models = _MODEL_KEY.fullmatch(key) is not None
        if isinstance(value, str):
            if names_models and value:
                yield value
        elif isinstance(value, list):
            remaining += [(key, each) for each in value]
        elif isinstance(value, tuple):
            kind = next((each for name, each in value if name == "type"), None)
            has_schema = not isinstance(kind, str) or kind in ("function", "custom")
            for name, each in value:
                spelled = name.lower()
                if not (spelled in _SCHEMAS or (spelled == "parameters" and has_schema)):
                    remaining.append((key if names_models else name, each))


def _value_end(body: bytes | bytearray, start: int) -> int:
    """Return the index just past the object or array that begins at ``start``; TooLarge, BadRequest."""
    depth, position, limit = 0, start, start + MAX_PART_PARSED
    while mark := _MARK.search(body, position, limit):
        position = mark.end()
        if mark[0] == b'"':
            position = _string_end(body, position)
            continue
        depth += 1 if mark[0] in b"[{" else -1
        if depth == 0:
            return position
    if limit < len(body):
        raise TooLarge(f"a part of the body other than its messages is over {MAX_PART_PARSED} bytes")
    raise _broken()


def adapter_field(body: bytes | bytearray) -> str:
    """Return the key by which a JSON body chooses an adapter of its engine; "" if it has none."""
    opening = _START.match(body)
    keys = _top_level_keys(body, opening.end()) if opening else ()
    return next((key for key, _ in keys if _ADAPTERS.fullmatch(key)), "")


def _may_have_more_models(body: bytes | bytearray) -> bool:
    for start in range(0, len(body), STEP):
        piece = body[start : start + STEP + _LONGEST_MARK].lower()
        if any(mark in piece for mark in _MORE_MARKS):
            return True
    return False


def _not_an_object() -> BadRequest:
    return BadRequest("the body must be a JSON object", param="body")


def _twice() -> BadRequest:
    return BadRequest("`model` is given twice", param="model")


def _broken() -> BadRequest:
    return BadRequest("the body is not JSON: a string or bracket is not closed", param="body")


def _check_utf8(body: bytes | bytearray) -> None:
    if body.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), STEP):
            decoder.decode(body[start : start + STEP], start + STEP >= len(body))
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8", param="body") from None


def _scan(body: bytes | bytearray) -> tuple[int, Span | None, bool]:
    """The place just past the opening brace, the span of the value of ``model``, quotes included,
    and whether ``stream`` is true; nothing is built for that (see the module's text).
    """
    opening = _START.match(body)
    if opening is None:
        raise _not_an_object()
    model: Span | None = None
    stream = False
    for key, start in _top_level_keys(body, opening.end()):
        if _is_model(key):
            if model is not None:
                raise _twice()
            model = start, _string_value(body, start)
        elif key == "stream":
            stream = body.startswith(b"true", start)
    return opening.end(), model, stream


def _top_level_keys(body: bytes | bytearray, position: int) -> Iterator[tuple[str, int]]:
    """The short keys at depth 1, each with the index of its value."""
    depth = 1
    for _ in range(MAX_STRINGS):
        quote = body.find(b'"', position)
        depth += _depth(body, position, quote if quote >= 0 else len(body))
        if quote < 0 and depth == 0:
            return
        if quote < 0 or depth < 1:
            raise _broken()
        position = _string_end(body, quote + 1)
        if depth == 1 and position - quote <= _MAX_KEY and (colon := _COLON.match(body, position)):
            yield _key(body[quote:position]), colon.end()
    raise TooLarge(f"the body holds more than {MAX_STRINGS} strings")


def _depth(body: bytes | bytearray, start: int, end: int) -> int:
    depth, count = 0, body.count
    while start < end:
        stop = min(start + STEP, end)
        depth += count(b"{", start, stop) + count(b"[", start, stop)
        depth -= count(b"}", start, stop) + count(b"]", start, stop)
        start = stop
    return depth


def _string_end(body: bytes | bytearray, start: int) -> int:
    """The index just past the quote that closes the string whose content begins at ``start``."""
    quote = body.find(b'"', start)
    if quote >= 0 and body[quote - 1] != 0x5C:
        return quote + 1
    while run := _RUN.match(body, start):
        end = run.end()
        if end == len(body) or (end == start and body[end] != 0x22):
            break
        if body[end] == 0x22:
            return end + 1
        start = end
    raise _broken()


def _string_value(body: bytes | bytearray, start: int) -> int:
    if body[start : start + 1] != b'"':
        raise BadRequest("`model` must be a string that names a model", param="model")
    end = _string_end(body, start + 1)
    if end - start > 6 * MAX_MODEL_NAME + 2:
        raise BadRequest(f"`model` is longer than {MAX_MODEL_NAME} characters", param="model")
    return end


def _key(quoted: bytes | bytearray) -> str:
    if b"\\" not in quoted:
        return quoted[1:-1].decode(errors="replace")
    try:
        return str(json.loads(quoted))
    except ValueError:
        raise BadRequest("the body is not JSON: bad escape in a key", param="body") from None


URLENCODED = b"application/x-www-form-urlencoded"


def is_urlencoded(content_type: bytes, body: bytes | bytearray) -> bool:
    """Whether a body is a form without files; plain ``curl -d`` says so of JSON too."""
    return content_type.partition(b";")[0].strip().lower() == URLENCODED and not _START.match(body)


def in_urlencoded(body: bytes | bytearray) -> tuple[str | None, bool]:
    """The model that a form without files names, and whether it asks for a stream."""
    try:
        fields = body.decode("ascii")
        stream = parse_qs(fields, max_num_fields=MAX_PARTS).get("stream", [""])[-1]
    except ValueError:
        raise BadRequest("the form is not urlencoded, or has too many fields", param="body") from None
    return model_in_query(fields), stream in ("true", "1")


def more_in_urlencoded(body: bytes | bytearray) -> str:
    """Return the field of a form without files that may name other models; "" if it has none."""
    fields = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_PARTS)
    return next((field for field in fields if _names_more(field.encode("utf-8", "replace"))), "")


def model_in_query(query: str) -> str | None:
    """The model that ``?model=`` names; two different ones are refused."""
    if not query:
        return None
    try:
        fields = parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_PARTS)
    except ValueError:
        raise BadRequest("the query is not UTF-8, or has too many fields", param="model") from None
    named = set(fields.get("model", ()))
    if len(named) > 1:
        raise _twice()
    return checked(named.pop()) if named else None


def model_replaced_in_query(query: str, model: str) -> str:
    """Return ``query`` with the name that the engine knows its model by; all else as it was."""
    if model_in_query(query) in (None, model):
        return query
    parts = query.split("&")
    named = [unquote_plus(part.partition("=")[0]) == "model" for part in parts]
    return "&".join(
        f"model={quote(model, safe='')}" if is_it else part for is_it, part in zip(named, parts, strict=True)
    )


def may_load(query: str) -> bool:
    """Whether a request may load its model, by ``?autoload=`` as llama.cpp's router reads it."""
    if "autoload=" not in query:
        return True
    return parse_qs(query).get("autoload", ["true"])[0] in ("true", "1")


_PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;",]*))')
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")


def boundary(content_type: bytes) -> bytes:
    """The line that separates the parts of a multipart body."""
    named = _values(_parameters(content_type), b"boundary")
    if len(named) != 1 or not _BOUNDARY.fullmatch(named[0]):
        raise BadRequest("multipart/form-data needs one valid `boundary`")
    return named[0]


class MultipartModelScanner:
    """Finds the fields ``model`` and ``stream`` of a form while it passes, wherever they stand in it.

    Keeps at most one head or value (both bounded); the content of other parts is only searched
    for the next boundary.
    """

    def __init__(self, boundary: bytes) -> None:
        self.model: str | None = None
        self.stream = False
        self.more = ""
        """The name of a field that may name other models; "" if there is none."""
        self.span: tuple[int, int] | None = None
        """The span of the model's value in the whole body."""
        self._delimiter = b"\r\n--" + boundary
        self._held = b"\r\n"
        self._offset = -2
        """The position of ``_held`` in the body; the first delimiter has no line end of its own before it."""
        self._step: Callable[[], bool] = self._content
        self._field = ""
        self._parts = 0

    def feed(self, data: bytes) -> None:
        self._held += data
        while self._step():
            pass

    def finish(self) -> None:
        """Note that the body has ended; BadRequest unless it was whole."""
        if self._step != self._epilogue:
            raise BadRequest("the form ends before its closing boundary", param="body")

    def _content(self) -> bool:
        """A part (or the preamble) whose content does not matter."""
        end = self._held.find(self._delimiter)
        if end < 0:
            self._skip(max(0, len(self._held) - len(self._delimiter) + 1))
            return False
        self._skip(end + len(self._delimiter))
        self._step = self._after_delimiter
        return True

    def _value(self) -> bool:
        end = self._held.find(self._delimiter)
        if end < 0:
            if len(self._held) > 4 * MAX_MODEL_NAME + len(self._delimiter):
                raise BadRequest(f"`{self._field}` is too long", param=self._field)
            return False
        self._take(self._held[:end])
        return self._content()

    def _after_delimiter(self) -> bool:
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self._step = self._epilogue
        elif self._held.startswith(b"\r\n"):
            self._skip(2)
            self._step = self._part_head
        else:
            raise BadRequest("a boundary of the form is not at the end of its line", param="body")
        return True

    def _part_head(self) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if end < 0 or end > MAX_PART_HEAD:
            if len(self._held) > MAX_PART_HEAD:
                raise BadRequest("a part of the form has too large a head", param="body")
            return False
        self._field = _field_name(self._held[: end + 4])
        self._skip(end + 4)
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(f"the form has more than {MAX_PARTS} parts", param="body")
        if self._field in ("model", "stream"):
            self._step = self._value
        else:
            self.more = self.more or self._field
            self._step = self._content
        return True

    def _epilogue(self) -> bool:
        self._skip(len(self._held))
        return False

    def _skip(self, count: int) -> None:
        self._held = self._held[count:]
        self._offset += count

    def _take(self, value: bytes) -> None:
        if self._field == "stream":
            self.stream = value.strip().lower() in (b"true", b"1")
            return
        if self.model is not None:
            raise _twice()
        try:
            self.model = checked(value.decode())
        except UnicodeDecodeError:
            raise BadRequest("`model` is not UTF-8", param="model") from None
        self.span = self._offset, self._offset + len(value)


def _field_name(head: bytes) -> str:
    """Return the name of a field, if it is model or stream and no file, or may name other models; else "".

    BadRequest for a file of the name model, which some servers read as the field.
    """
    for name, value in parse_fields(head):
        if name.lower() == b"content-disposition":
            parameters = _parameters(value)
            names = _values(parameters, b"name")
            if len(names) > 1:
                raise BadRequest("a part of the form has two names", param="body")
            if names and names[0] != b"model" == _as_some_read(names[0]):
                raise BadRequest('`model` in a form is written name="model"', param="model")
            is_file = any(key.partition(b"*")[0] == b"filename" for key, _, _ in parameters)
            if is_file and names == [b"model"]:
                raise BadRequest("`model` in a form is a text, and no file", param="model")
            if names in ([b"model"], [b"stream"]) and not is_file:
                return names[0].decode("ascii")
            if names and _names_more(names[0]):
                return names[0].decode("latin-1")
    return ""


def _names_more(field: bytes) -> bool:
    """Return whether a field of a form may name models, and is not the `model` itself."""
    spelled = _as_some_read(field)
    return spelled != b"model" and _MODEL_KEY.fullmatch(spelled.decode("latin-1")) is not None


def _as_some_read(name: bytes) -> bytes:
    """The name of a field as the most lenient servers read it."""
    return _ESCAPED.sub(rb"\1", name).strip(b" \t'").removesuffix(b"[]").lower()


def _parameters(value: bytes) -> list[tuple[bytes, bytes, bytes]]:
    return [(name.lower(), quoted, bare) for name, quoted, bare in _PARAMETER.findall(value)]


def _values(parameters: list[tuple[bytes, bytes, bytes]], name: bytes) -> list[bytes]:
    """The values of a parameter; BadRequest if one is encoded, or in parts, as only some servers read it."""
    if any(key.startswith(name + b"*") for key, _, _ in parameters):
        raise BadRequest(f"`{name.decode()}*` in a form is written `{name.decode()}`", param="body")
    return [quoted or bare for key, quoted, bare in parameters if key == name]
