"""The end of the body of an engine's answer, and the framing that a client gets it in.

A body that has ``ended`` is followed by its ``end`` (the last chunk, where the chunks are ours) once it is
known to be whole: ``is_whole`` says whether its framing, or its last event, tells.
"""

from __future__ import annotations

import re

from anvil_mux.errors import BackendError
from anvil_mux.protocol import http1

_LAST_EVENT = re.compile(
    rb'\n(?:data: ?(?:\[DONE\]|\{"error")'
    rb"|event: ?(?:message_stop|response\.(?:completed|failed|incomplete)|error)\b)"
)
"""How streams begin their last event, in the APIs that have one."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"[DONE]", b"[DONE]\n", b"[DONE]\r\n")
TAIL = 32
"""The length of the end of a piece that the beginning of a last event can lie in."""


def has_last_event(text: bytes) -> bool:
    """Whether a line of ``text`` but the first begins a stream's last event."""
    return _LAST_EVENT.search(text) is not None


def has_whole_last_event(text: bytes) -> bool:
    """The same, and that event has come to its end."""
    found = _LAST_EVENT.search(text)
    return found is not None and any(end in text[found.start() :] for end in EVENT_ENDS)


class _Chunked:
    """A chunked body that stays so, byte for byte."""

    __slots__ = ("_counter", "clean", "ended")
    end, is_whole = b"", True

    def __init__(self) -> None:
        self._counter = http1.ChunkCounter()
        self.ended = False
        self.clean = True

    @property
    def aligned(self) -> bool:
        return self._counter.between_chunks

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise BackendError("The engine's connection ended in the middle of its answer.")
        end = self._counter.feed(data)
        if end is None:
            return data
        self.ended = True
        self.clean = end == len(data)
        return data[:end]


class _Decoded:
    """A body in chunks, for a client that cannot take chunks."""

    __slots__ = ("_decoder", "aligned", "clean", "ended")
    end, is_whole = b"", True

    def __init__(self) -> None:
        self._decoder = http1.ChunkDecoder()
        self.ended = False
        self.clean = self.aligned = True

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise BackendError("The engine's connection ended in the middle of its answer.")
        payload = self._decoder.feed(data)
        self.ended = self._decoder.done
        self.clean = not self._decoder.rest
        return payload


class _Counted:
    """A body as long as its Content-Length said."""

    __slots__ = ("_missing", "aligned", "clean", "ended")
    end, is_whole = b"", True

    def __init__(self, length: int) -> None:
        self._missing = length
        self.ended = length == 0
        self.clean = True
        self.aligned = False

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise BackendError("The engine's connection ended in the middle of its answer.")
        self.clean = len(data) <= self._missing
        data = data[: self._missing]
        self._missing -= len(data)
        self.ended = not self._missing
        return data


class _UntilClose:
    """A body until the engine closes: only a last event in it tells that all of it came."""

    __slots__ = ("_has_last_event", "_tail", "aligned", "clean", "ended")
    end = b""

    def __init__(self) -> None:
        self.ended = self.clean = self._has_last_event = False
        self.aligned = True
        self._tail = b"\n"

    @property
    def is_whole(self) -> bool:
        return self._has_last_event and self._tail.endswith(EVENT_ENDS)

    def feed(self, data: bytes) -> bytes:
        self.ended = not data
        text = self._tail + data
        self._has_last_event = self._has_last_event or has_last_event(text)
        self._tail = text[-TAIL:]
        return data


class _Framed:
    """Another body as chunks."""

    __slots__ = ("_inner",)
    aligned = True
    end = http1.LAST_CHUNK

    def __init__(self, inner: _Counted | _UntilClose) -> None:
        self._inner = inner

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def clean(self) -> bool:
        return self._inner.clean

    @property
    def is_whole(self) -> bool:
        return self._inner.is_whole

    def feed(self, data: bytes) -> bytes:
        return http1.chunk(self._inner.feed(data))


AnswerBody = _Chunked | _Decoded | _Counted | _UntilClose | _Framed


def body_of(response: http1.Response, *, chunked: bool) -> AnswerBody:
    """How the body of ``response`` passes to a client that gets it chunked, or else as bare bytes."""
    if response.body == "chunked":
        return _Chunked() if chunked else _Decoded()
    source = _Counted(response.length or 0) if response.body == "length" else _UntilClose()
    return _Framed(source) if chunked else source
