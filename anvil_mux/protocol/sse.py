"""The observers of answers, which read what one reports while its bytes pass; the only reader of events.

Pure. ``SseObserver`` sees each event once and remembers the counts of tokens, whether an error was reported
and whether the last event of the API has come. Most events hold none of that: they are only counted, since
one thread does this for all streams. ``PlainObserver`` does the same for an answer that is not a stream.
"""

from __future__ import annotations

import re

from anvil_mux.protocol import foreign
from anvil_mux.protocol.tokens import TailReader, TokenCounts, Tokens

MAX_READ = 1 << 20
"""Bytes of an event that is read; longer ones hold images and sounds."""
_NAMES = (b"data:", b"event:")
"""The beginnings of lines that are read."""
_LONGEST_NAME = 6
DONE = b"[DONE]"
LAST_TYPES = frozenset(("message_stop", "response.completed", "response.failed", "response.incomplete"))
"""The types of events that end a stream, in the APIs that name them."""
FAILURES = frozenset(("error", "response.failed"))


class SseObserver:
    """Reads a stream of server-sent events as it passes, in whatever pieces it comes."""

    __slots__ = (
        "_counts",
        "_ends",
        "_event",
        "_rest",
        "_splits_crlf",
        "events",
        "has_error",
        "has_finished",
        "has_last_event",
    )

    def __init__(self) -> None:
        self.events = 0
        """The events with JSON in them."""
        self.has_error = False
        """Whether an event reported an error."""
        self.has_finished = False
        """Whether a chunk gave the reason why the answer ended."""
        self.has_last_event = False
        """Whether the API's last event has come to its end."""
        self._counts = TokenCounts()
        self._rest = bytearray()
        """The line that has not ended."""
        self._event = b""
        """The type of the event that has begun, if it may be the last one."""
        self._splits_crlf = False
        """Whether a piece has ended with a CR, to which a LF may belong."""
        self._ends = False
        """Whether the stream ends with the next blank line."""

    @property
    def tokens(self) -> Tokens:
        """The counts of tokens that were reported so far."""
        return self._counts.tokens

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of content."""
        if self._splits_crlf or b"\r" in data:
            data = self._with_plain_ends(data)
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(data)
            return
        if self._rest:
            lines = bytes(self._rest) + data[:end]
            del self._rest[:]
        else:
            lines = data[:end]
        self._keep(data[end:])
        self.events += lines.count(b"data: {") + lines.count(b"data:{")
        if self._ends or self._event or _may_matter(lines):
            for line in lines.split(b"\n")[:-1]:
                self._read(line)

    def end(self) -> None:
        """Take in a last line that no line end follows: some engines send none behind ``[DONE]``."""
        if self._rest.endswith(DONE):
            self._read(bytes(self._rest))

    def _with_plain_ends(self, data: bytes) -> bytes:
        """Return ``data`` with LF where lines end with CR LF or CR."""
        if self._splits_crlf and data.startswith(b"\n"):
            data = data[1:]
        self._splits_crlf = data.endswith(b"\r") or (self._splits_crlf and not data)
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _keep(self, rest: bytes) -> None:
        """Keep the beginning of a line that has not ended, as far as it may be read."""
        if len(self._rest) < _LONGEST_NAME or (
            self._rest.startswith(_NAMES) and len(self._rest) <= MAX_READ + _LONGEST_NAME
        ):
            self._rest += rest

    def _read(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._read_data(line[5:].strip())
        elif line.startswith(b"event:"):
            self._event = line[6:].strip()
        elif not line:
            self.has_last_event = self.has_last_event or self._ends
            self._event, self._ends = b"", False

    def _read_data(self, data: bytes) -> None:
        if data == DONE:
            self.has_last_event = True
            return
        kind = self._event.decode("latin-1")
        if len(data) <= MAX_READ and _may_matter(data):
            event = foreign.read_object(data) or {}
            self._counts.add(event)
            type_of = event.get("type")
            kind = type_of if isinstance(type_of, str) else kind
            if event.get("error") and not kind.startswith("response."):
                kind = "error"
            choices = event.get("choices")
            if isinstance(choices, list) and any(
                isinstance(choice, dict) and choice.get("finish_reason") for choice in choices
            ):
                self.has_finished = True
        if kind in FAILURES:
            self.has_error = True
        if kind in LAST_TYPES or kind in FAILURES:
            self._ends = True


def _may_matter(text: bytes) -> bool:
    """Return whether ``text`` may hold more than a part of the answer. Quick: it is called for each piece."""
    return (
        b'_tokens"' in text
        or b'_reason":"' in text
        or b'_reason": "' in text
        or b"[DONE]" in text
        or b"error" in text
        or b'"timings"' in text
        or b"message_stop" in text
        or b"response.completed" in text
        or b"response.failed" in text
        or b"response.incomplete" in text
    )


_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
"""The rest of a string, with the quote that ends it."""
_ESCAPES = re.compile(rb"\\*\Z")


class PlainObserver:
    """Reads an answer that is not a stream of events, as its bytes pass."""

    __slots__ = ("_brackets", "_escaped", "_has_begun", "_in_string", "_reader", "events")

    has_error = has_finished = has_last_event = False

    def __init__(self, *, until_close: bool = False) -> None:
        """``until_close``: only the end of the connection ends it, so brackets are counted."""
        self.events = 0
        self._reader = TailReader()
        self._brackets = 0 if until_close else None
        self._in_string = self._escaped = self._has_begun = False

    @property
    def tokens(self) -> Tokens:
        """The counts of tokens that were reported, once all has passed."""
        return self._reader.tokens

    @property
    def is_json_cut(self) -> bool:
        """Whether what has passed cannot be all of a JSON text."""
        return not self._has_begun or self._in_string or bool(self._brackets)

    @property
    def is_open(self) -> bool:
        """Return whether a bracket is open: an error may also be no JSON, or empty, and whole."""
        return bool(self._brackets)

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of content."""
        self._reader.feed(data)
        if self._brackets is not None:
            self._count_brackets(data)

    def end(self) -> None:
        """Do nothing: all was read."""

    def _count_brackets(self, data: bytes) -> None:
        assert self._brackets is not None
        self._has_begun = self._has_begun or bool(data.strip())
        position = 1 if self._escaped and data else 0
        self._escaped = self._escaped and not data
        while position < len(data):
            if self._in_string:
                rest = _STRING.match(data, position)
                if rest is None:
                    escapes = _ESCAPES.search(data, position)
                    self._escaped = escapes is not None and len(escapes[0]) % 2 == 1
                    return
                position, self._in_string = rest.end(), False
            quote = data.find(b'"', position)
            end = len(data) if quote < 0 else quote
            outside = data[position:end]
            self._brackets += outside.count(b"{") + outside.count(b"[")
            self._brackets -= outside.count(b"}") + outside.count(b"]")
            self._in_string = quote >= 0
            position = end + 1


Observer = SseObserver | PlainObserver
