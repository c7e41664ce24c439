"""The record of each request, and its line in the access log.

A handler hands one record to its ``Sink`` and goes on; journal.py counts it and writes the line from a thread
of its own. Bodies, keys and query strings are never logged, and probes that are answered well make no line.
"""

from __future__ import annotations

import os
import select
import stat
import time
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Protocol

from anvil_mux.errors import printable
from anvil_mux.protocol.tokens import NO_TOKENS, Tokens, tokens_in

PATIENCE_SECONDS = 1.0
"""How long whoever reads a pipe may take nothing before lines for it are lost."""


class Output:
    """A descriptor that lines are written to. It never raises, and waits for a reader once, and not for long.

    What a full disk or a full pipe does not take is lost; what engines say steers no terminal. Any thread.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._blocked = False

    def write(self, text: str) -> None:
        data = printable(text).encode("utf-8", "replace")
        if self._blocked:
            data = b"\n" + data  # the last line may have been cut
        patience = 0.0 if self._blocked else PATIENCE_SECONDS
        try:
            while data and (sent := write_some(self._descriptor, data, patience)):
                data = data[sent:]
            self._blocked = bool(data)
        except OSError:
            pass


def write_some(descriptor: int, data: bytes | bytearray, patience: float) -> int:
    """Write as much as is taken at once; how much that was, 0 if nothing for so many seconds. OSError."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    if not ready.poll(patience * 1000):
        return 0
    # A pipe that has room takes so many bytes without blocking.
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    return os.write(descriptor, data if is_file else data[: select.PIPE_BUF])


@dataclass(slots=True)  # frozen ones take three times as long to make
class Served:
    """The record of a request, until its end. Moments are Unix time, durations seconds.

    The thread that serves the request fills it in and hands it to the ``Sink``; from then on nobody alters it
    but ``count``, which the ``Sink`` calls once.
    """

    request_id: str
    client: str
    method: str
    path: str
    ended: float = 0.0
    route: str = ""
    """The row of the route that it asked for, by which it is counted; never what a client wrote."""
    model: str = ""
    preset: str = ""
    """The preset by which the model was asked for."""
    backend: str = ""
    status: int = 0
    code: str = ""
    """The code of the error; empty when there was none."""
    stream: bool = False
    waited: float = 0.0
    """Seconds in the queue, until the model was ready."""
    first_byte: float = 0.0
    """Seconds from the request's head to the first byte of the engine's answer; 0: none came."""
    seconds: float = 0.0
    sent: int = 0
    tokens: int = 0
    """Tokens of the answer: the events of its stream, unless its engine reports them; 0: not known."""
    prompt_tokens: int = 0
    """Tokens of the input, as its engine reported."""
    cached_tokens: int = 0
    """Tokens of the input that the engine had in its cache."""
    key: str = ""
    """The name of its API key; empty where none is asked for, or it was not shown."""
    gpu_seconds: float = 0.0
    """The GPU time that it had: of n requests that a backend serves at once each has an nth."""
    fallback_of: str = ""
    """The model that was asked for, if a fallback of it answers."""
    fallback_cause: str = ""
    """The code of the error that its model came to."""
    foreseen: float | None = None
    """The part of the input that its replica was thought to have cached; None: nobody knows if it was."""
    said: bytes = b""
    """A whole answer, in which engines report what it took; ``count`` reads it and lets go of it."""
    usage: Tokens = NO_TOKENS
    """The tokens that the engine reported in an answer that came in pieces."""
    is_quiet: bool = False
    """Whether it makes no line if it was answered well: programs, and the open page, ask it over and over."""

    def count(self) -> None:
        """Read what the answer took, of many records in a row: no client waits for that."""
        if not self.said and self.usage == NO_TOKENS:
            return
        answer, prompt, cached = self.reported()
        self.said = b""
        if answer is not None:
            self.tokens = answer
        self.prompt_tokens, self.cached_tokens = prompt or 0, cached or 0
        if cached is None:
            self.foreseen = None

    @property
    def is_broken(self) -> bool:
        """Whether an answer that began well was not whole: its status does not tell."""
        return bool(self.code) and self.status < 400

    def reported(self) -> Tokens:
        """Return the tokens that the engine reported."""
        return tokens_in(self.said) if self.said else self.usage

    def as_json(self) -> dict[str, object]:
        """Return its fields as they are shown to people."""
        return {
            "id": self.request_id,
            "ended": round(self.ended, 3),
            "key": self.key,
            "client": self.client,
            "path": self.path,
            "model": self.model,
            "backend": self.backend,
            "status": self.status,
            "code": self.code,
            "stream": self.stream,
            "waited": round(self.waited, 3),
            "first_byte": round(self.first_byte, 3),
            "seconds": round(self.seconds, 3),
            "bytes": self.sent,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "fallback_of": self.fallback_of,
            "fallback_cause": self.fallback_cause,
        }


class Sink(Protocol):
    """A sink for the records of handlers; it never blocks."""

    def add(self, entry: Served) -> object: ...


_last = (0, "")


def stamp(moment: float) -> str:
    """RFC 3339 with milliseconds. Any thread; the last one is remembered, since records come in groups."""
    global _last
    milliseconds, last = int(moment * 1000), _last
    if last[0] != milliseconds:
        second, rest = divmod(milliseconds, 1000)
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        _last = last = (milliseconds, f"{text}.{rest:03d}Z")
    return last[1]


def json_line(r: Served) -> str:
    if r.is_quiet and r.status == 200:
        return ""
    preset = f'"preset":{quoted(r.preset)},' if r.preset else ""
    turned = f'"fallback_of":{quoted(r.fallback_of)},"fallback_cause":"{r.fallback_cause}",'
    return (
        f'{{"ts":"{stamp(r.ended)}","level":"info","event":"request","request_id":"{r.request_id}",'
        f'"client":"{r.client}",{_key(r)}"method":{quoted(r.method)},"path":{quoted(r.path)},"model":{quoted(r.model)},'
        f'{preset}"service":{quoted(r.backend)},{turned if r.fallback_of else ""}"status":{r.status},'
        f'"code":"{r.code}",'
        f'"stream":{"true" if r.stream else "false"},"queue_s":{r.waited:.3f},"ttfb_s":{r.first_byte:.4f},'
        f'"duration_s":{r.seconds:.4f},"bytes":{r.sent}{_used(r)}}}\n'
    )


def _key(r: Served) -> str:
    return f'"key":{quoted(r.key)},' if r.key else ""


def _used(r: Served) -> str:
    """The fields of a request that a backend served: what it took there."""
    if not r.backend:
        return ""
    return f',"prompt_tokens":{r.prompt_tokens},"tokens":{r.tokens},"gpu_s":{r.gpu_seconds:.4f}'


def human_line(r: Served) -> str:
    if r.is_quiet and r.status == 200:
        return ""
    code = f" {r.code}" if r.code else ""
    waited = f" waited {r.waited:.1f}s" if r.waited >= 0.1 else ""
    asked_for = r.preset or r.model
    where = f" {asked_for}@{r.backend}" if r.backend else f" {asked_for}" if asked_for else ""
    turned = f" instead of {r.fallback_of} ({r.fallback_cause})" if r.fallback_of else ""
    return (
        f"{stamp(r.ended)} {r.status}{code} {r.method} {ascii(r.path)[1:-1]}{where}{turned} "
        f"{r.seconds:.3f}s{waited} {r.sent}B {r.client}{f' {r.key}' if r.key else ''} {r.request_id}\n"
    )
