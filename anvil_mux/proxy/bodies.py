"""The end of the body of an engine's answer, and the framing that a client gets it in."""

from __future__ import annotations

from anvil_mux.errors import BackendError
from anvil_mux.protocol import http1


class _Chunked:
    """A chunked body that stays so, byte for byte."""

    __slots__ = ("_counter", "clean", "ended")

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
    """A body until the engine closes: nobody can tell whether all of it came."""

    __slots__ = ("aligned", "clean", "ended")

    def __init__(self) -> None:
        self.ended = self.clean = False
        self.aligned = True

    def feed(self, data: bytes) -> bytes:
        self.ended = not data
        return data


class _Framed:
    """Another body as chunks."""

    __slots__ = ("_inner",)
    aligned = True

    def __init__(self, inner: _Counted | _UntilClose) -> None:
        self._inner = inner

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def clean(self) -> bool:
        return self._inner.clean

    def feed(self, data: bytes) -> bytes:
        framed = http1.chunk(self._inner.feed(data))
        return framed + http1.LAST_CHUNK if self._inner.ended else framed


AnswerBody = _Chunked | _Decoded | _Counted | _UntilClose | _Framed


def body_of(response: http1.Response, *, chunked: bool) -> AnswerBody:
    """How the body of ``response`` passes to a client that gets it chunked, or else as bare bytes."""
    if response.body == "chunked":
        return _Chunked() if chunked else _Decoded()
    source = _Counted(response.length or 0) if response.body == "length" else _UntilClose()
    return _Framed(source) if chunked else source
