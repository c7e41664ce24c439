"""An engine whose every byte the test sends, a multiplexer in front of it, and a client that reads raw bytes.

Nothing here sleeps: the engine hands each request to the test (or to ``answer``) and the test decides what
comes next. Time-outs are guards against hanging, far above what anything takes.
"""

from __future__ import annotations

import json
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from anvil_mux.command import API_KEYS
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Keyring, load
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import Cancelled
from anvil_mux.host.seam import Evicted, GpuUses, Loaded
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.proxy.dispatch import Patience
from anvil_mux.proxy.exchange import Relay
from anvil_mux.proxy.handler import Handler, Local
from anvil_mux.proxy.operations import Keep
from anvil_mux.proxy.server import Server, listen
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.journal import Feed

GUARD = 20.0

ASK_A = b'{"model":"a"}'
ASK_B = b'{"model":"org/b"}'
STREAM_A = b'{"model":"a","stream":true}'
ASK_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
"""A head that lacks where its body ends."""
ASK_LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"

JSON_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE = b"data: [DONE]\n\n"
END = chunk(DONE) + b"0\r\n\r\n"
"""The end of a stream: its last event, and the last chunk."""


def error_in(stream: bytes) -> dict[str, str]:
    """The error event that a stream ends with."""
    events = [line[6:] for line in stream.splitlines() if line.startswith(b'data: {"error"')]
    assert len(events) == 1, stream
    return json.loads(events[0])["error"]  # type: ignore[no-any-return]


def keyring(*lines: str) -> Keyring:
    """The keys of such lines."""
    return load(None, {API_KEYS: ";".join(lines)})


def shows(key: str) -> bytes:
    """The field that shows a key."""
    return b"Authorization: Bearer %b\r\n" % key.encode()


def answer_of(body: bytes, *fields: bytes) -> bytes:
    """A whole answer with this body, of JSON unless a field says otherwise."""
    kinds = [field for field in fields if field.startswith(b"Content-Type: ")]
    lines = b"\r\n".join(
        [b"HTTP/1.1 200 OK", *fields, *([] if kinds else [b"Content-Type: application/json"])]
    )
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (lines, len(body), body)


class Asked:
    """One request that reached the engine, and the connection to answer it on."""

    def __init__(self, head: bytes, body: bytes, size: int, connection: EngineConnection) -> None:
        self.head = head
        self.body = body
        self.size = size
        self._connection = connection

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._connection.socket.sendall(piece)

    def close(self) -> None:
        self._connection.end()

    def reset(self) -> None:
        """Ends the connection as a killed process does."""
        linger = struct.pack("ii", 1, 0)
        self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._connection.end()
        assert self._connection.ended.wait(GUARD)
        self._connection.socket.close()

    def was_left(self, seconds: float = GUARD) -> bool:
        """Waits until the other side has closed the connection."""
        return self._connection.ended.wait(seconds)


class EngineConnection:
    def __init__(self, engine: FakeEngine, connection: socket.socket) -> None:
        self.socket = connection
        self.ended = threading.Event()
        self._engine = engine
        engine.connections.append(self)
        threading.Thread(target=self._read_all, daemon=True).start()

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)

    def _read_all(self) -> None:
        buffer = b""
        try:
            while data := self.socket.recv(65536):
                buffer += data
                while (end := buffer.find(b"\r\n\r\n") + 4) >= 4:
                    buffer = self._read_body(buffer[:end], buffer[end:])
        except OSError:
            pass
        self.ended.set()

    def _read_body(self, head: bytes, rest: bytes) -> bytes:
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        body, rest = [rest[:length]], rest[length:]
        have = len(body[0])
        if have < length and self._engine.early_answer:
            self.socket.sendall(self._engine.early_answer)
            if not self._engine.ends_early:
                left = select.poll()
                left.register(self.socket, select.POLLRDHUP)
                left.poll()
            self.socket.close()
            raise ConnectionAbortedError
        while have < length:
            data = self.socket.recv(min(65536, length - have))
            if not data:
                return b""
            have += len(data)
            if self._engine.keep_bodies:
                body.append(data)
        self._engine.take(Asked(head, b"".join(body), have, self))
        return rest


class FakeEngine:
    """Listens on ``port`` (0: any). ``answer`` set: answers at once; else ``next`` hands requests out."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Callable[[Asked], bytes] | None = None
        self.keep_bodies = True
        self.early_answer = b""
        """The answer that it gives as soon as it has a head, if a part of the body is still to come: it reads
        no more of that."""
        self.ends_early = False
        """Whether it closes the connection behind that; else it waits until its client does."""
        self.connections: list[EngineConnection] = []
        self.asked: queue.Queue[Asked] = queue.Queue()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def accept_from(self, listener: socket.socket) -> None:
        """Takes over who waits there, and who comes later."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket | None = None) -> None:
        listener = listener or self._listener
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            EngineConnection(self, connection)

    def take(self, asked: Asked) -> None:
        if self.answer:
            asked.send(self.answer(asked))
        else:
            self.asked.put(asked)

    def next(self) -> Asked:
        return self.asked.get(timeout=GUARD)

    def answers(self, answer: bytes = JSON_OK) -> list[Asked]:
        """Has it give the same answer to all; the list grows by what it is asked from now on."""
        heard: list[Asked] = []
        self.answer = lambda asked: (heard.append(asked), answer)[1]
        return heard

    def stop_listening(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(GUARD)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self.stop_listening()
        for connection in self.connections:
            try:
                connection.end()
            except OSError:
                pass
            assert connection.ended.wait(GUARD)
            connection.socket.close()


@dataclass
class Answer:
    status: int
    head: bytes
    body: bytes
    clean: bool
    """The body ended as its framing says."""

    @property
    def json(self) -> Any:
        """The document that it is."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]  # type: ignore[no-any-return]

    @property
    def code(self) -> str:
        """The code of an error."""
        return self.error["code"]  # type: ignore[no-any-return]

    def header(self, name: bytes) -> bytes | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.lower():
                return value.strip()
        return None


class RawClient:
    """One connection to the front."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, GUARD)
        self.buffer = b""
        self.host = b"127.0.0.1:%d" % address[1]

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(
        self,
        body: bytes,
        path: bytes = b"/v1/chat/completions",
        extra: bytes = b"",
        type: bytes = b"application/json",
    ) -> None:
        self.send(
            b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: %b\r\n%b" % (path, self.host, type, extra)
            + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def ask(self, body: bytes, *how: bytes, **more: bytes) -> Answer:
        """Posts, and reads the answer."""
        self.post(body, *how, **more)
        return self.read()

    def json(self, path: bytes, extra: bytes = b"") -> Any:
        """The document that is there."""
        return json.loads(self.get(path, extra=extra).body)

    def get(self, path: bytes, method: bytes = b"GET", extra: bytes = b"") -> Answer:
        self.send(b"%b %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (method, path, self.host, extra))
        return self.read(body=method != b"HEAD")

    def more(self) -> bool:
        data = self.socket.recv(65536)
        self.buffer += data
        return bool(data)

    def read_until(self, text: bytes) -> bytes:
        """Everything up to and including ``text``."""
        while text not in self.buffer:
            assert self.more(), f"closed before {text!r}; got {self.buffer!r}"
        end = self.buffer.index(text) + len(text)
        got, self.buffer = self.buffer[:end], self.buffer[end:]
        return got

    def read(self, *, body: bool = True) -> Answer:
        """One whole answer."""
        head = self.read_until(b"\r\n\r\n")
        answer = Answer(int(head[9:12]), head, b"", True)
        if not body or answer.status == 204:
            return answer
        length = answer.header(b"content-length")
        if length is not None:
            while len(self.buffer) < int(length) and self.more():
                pass
            answer.clean = len(self.buffer) >= int(length)
            answer.body, self.buffer = self.buffer[: int(length)], self.buffer[int(length) :]
        elif answer.header(b"transfer-encoding"):
            answer.body, answer.clean = self.read_chunks()
        else:
            answer.body = self.rest()
        return answer

    def read_chunks(self) -> tuple[bytes, bool]:
        """The content of a chunked body, and whether it ended as it should."""
        content: list[bytes] = []
        while True:
            while b"\r\n" not in self.buffer:
                if not self.more():
                    return b"".join(content), False
            size = int(self.buffer.partition(b"\r\n")[0], 16)
            end = self.buffer.index(b"\r\n") + 2 + size + 2
            while len(self.buffer) < end:
                if not self.more():
                    return b"".join(content), False
            content.append(self.buffer[end - 2 - size : end - 2])
            self.buffer = self.buffer[end:]
            if size == 0:
                return b"".join(content), True

    def rest(self) -> bytes:
        """Everything until the connection ends."""
        while self.more():
            pass
        got, self.buffer = self.buffer, b""
        return got

    def is_closed(self) -> bool:
        """Waits until the other side has closed."""
        return self.rest() == b""

    def leave(self) -> None:
        self.socket.close()


@dataclass
class Mechanism:
    """Loads a backend by naming its engine's address, when the gate is open."""

    engines: dict[str, FakeEngine]
    gate: threading.Event = field(default_factory=threading.Event)
    loading: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failure: Exception | None = None
    end: str | None = None
    well: bool | None = True
    log: list[str] = field(default_factory=list)
    cancelled: dict[str, int] = field(default_factory=dict)

    def cancel(self, backend: Backend, number: int) -> None:
        self.cancelled[backend.name] = number

    def load(self, backend: Backend, how: str, number: int) -> Loaded:
        self.loading.release()
        give_up = time.monotonic() + GUARD
        while not self.gate.wait(0.01):
            if number <= self.cancelled.get(backend.name, 0):
                raise Cancelled("it was cancelled")
            assert time.monotonic() < give_up
        if self.failure:
            raise self.failure
        return Loaded(self.engines[backend.name].url, how)

    def evict(self, backend: Backend, how: str) -> Evicted:
        return Evicted(how)

    def ended(self, backend: Backend) -> str | None:
        return self.end

    def answers(self, backend: Backend, limit: float) -> bool | None:
        return self.well

    def log_tail(self, backend: Backend) -> list[str]:
        return self.log


class OnePort(Mechanism):
    """Engines that listen on one port, one after the other; the last one's connections outlive it."""

    def __init__(self, answer: Callable[[Asked], bytes]) -> None:
        super().__init__({})
        self.gate.set()
        self._answer = answer
        self._port = 0
        self.ended_engines: list[FakeEngine] = []

    def load(self, backend: Backend, how: str, number: int) -> Loaded:
        engine = self.engines[backend.name] = FakeEngine(self._port)
        engine.answer = self._answer
        self._port = engine.address[1]
        return super().load(backend, how, number)

    def evict(self, backend: Backend, how: str) -> Evicted:
        engine = self.engines.pop(backend.name)
        engine.stop_listening()
        self.ended_engines.append(engine)
        return super().evict(backend, how)

    def close(self) -> None:
        for engine in (*self.ended_engines, *self.engines.values()):
            engine.close()


class Events:
    """The multiplexer's events and the requests' records, which a test may wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.seen: list[Event | Served] = []

    def add(self, entry: Event | Served) -> None:
        if isinstance(entry, Served):
            entry.count()
        with self._changed:
            self.seen.append(entry)
            self._changed.notify_all()

    def of(self, kind: str) -> list[Event]:
        return [each for each in self.seen if isinstance(each, Event) and each.kind == kind]

    def wait(self, kind: str, count: int = 1) -> Event:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, GUARD), self.seen
        return self.of(kind)[count - 1]

    def record(self, count: int = 1) -> Served:
        def records() -> list[Served]:
            return [each for each in self.seen if isinstance(each, Served)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(records()) >= count, GUARD), self.seen
        return records()[count - 1]


class Rig:
    """Two models, ``a`` and ``b``, on one GPU, each with its fake engine, behind a real server."""

    def __init__(
        self,
        *,
        patience: Patience | None = None,
        max_connections: int = 2048,
        max_bodies: int = 1 << 30,
        keys: Keyring | None = None,
        tls: ssl.SSLContext | None = None,
        mechanism: Mechanism | None = None,
        keep_pause: Keep = lambda pause: True,
        only_local_hosts: bool = True,
        gpu_uses: Callable[[], GpuUses] = dict,
        has_pages: bool = False,
        **settings: object,
    ) -> None:
        """``has_pages``: it has the port for pages of engines, where ``client_at_pages`` asks."""
        self.engine = FakeEngine()
        self.other = FakeEngine()
        config = Config(
            backends=(
                Backend("a", "a", gpus=("0",), aliases=("alias",)),
                Backend("b", "org/b", gpus=("0",), served_model="b-inside"),
            ),
            gpus=(Gpu("0"),),
            policy="eager",
        )
        pages = listen("127.0.0.1", 0) if has_pages else None
        self.pages_port = pages.getsockname()[1] if pages else None
        self.config = replace(config, pages_port=self.pages_port, **settings)  # type: ignore[arg-type]
        self.mechanism = mechanism or Mechanism({"a": self.engine, "b": self.other})
        self.mechanism.gate.set()
        self.events = Events()
        self.relay = Relay(self.config.upstream_timeout, self.config.client_timeout)
        self.mux = Multiplexer(
            self.config,
            self.mechanism,
            log=self.events.add,
            has_heard=self.relay.has_heard,
            close_idle=self.relay.pool.end,
        )
        self.mux.start()
        self.feed = Feed()
        self.logs: dict[str, list[str]] = {}
        listener = listen("127.0.0.1", 0)
        local = Local(
            self.mux,
            self.feed,
            capture=self.config.capture,
            metrics=lambda accept: ("text/plain", b"anvil_up 1\n"),
            checks={"docker": lambda: ""},
            tail=lambda backend, lines: self.logs.get(backend, [])[-lines:],
            keep_pause=keep_pause,
            gpu_uses=gpu_uses,
        )
        self.handler = Handler(
            self.config,
            keys or Keyring(),
            self.mux,
            self.relay,
            local,
            records=self.events,
            patience=patience,
            only_local_hosts=only_local_hosts,
        )
        self.server = Server(
            listener,
            self.handler,
            self.mux,
            max_connections=max_connections,
            max_bodies=max_bodies,
            tls=tls,
            client_timeout=self.config.client_timeout,
            pages=pages,
        )
        self.address = self.server.address
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        self.clients: list[RawClient] = []

    def client(self) -> RawClient:
        self.clients.append(RawClient(self.address))
        return self.clients[-1]

    def client_at_pages(self) -> RawClient:
        assert self.pages_port
        self.clients.append(RawClient(("127.0.0.1", self.pages_port)))
        return self.clients[-1]

    def asked(self, body: bytes, *how: bytes, **more: bytes) -> tuple[RawClient, Asked]:
        """A client and its question, which the engine has."""
        client = self.client()
        client.post(body, *how, **more)
        return client, self.engine.next()

    def passes(
        self,
        body: bytes = ASK_A,
        *how: bytes,
        answer: bytes = JSON_OK,
        client: RawClient | None = None,
        engine: FakeEngine | None = None,
        **more: bytes,
    ) -> Asked:
        """A question as its engine gets it, which answers it."""
        client = client or self.client()
        client.post(body, *how, **more)
        asked = (engine or self.engine).next()
        asked.send(answer)
        assert client.read().status == 200
        return asked

    def ask(self, body: bytes = ASK_A, *how: bytes, **more: bytes) -> Answer:
        """The answer to a question on a connection of its own."""
        return self.client().ask(body, *how, **more)

    def get(self, path: bytes, method: bytes = b"GET", extra: bytes = b"") -> Answer:
        return self.client().get(path, method, extra)

    def json(self, path: bytes, extra: bytes = b"") -> Any:
        return self.client().json(path, extra)

    def streaming(self) -> tuple[RawClient, Asked]:
        """A client that has the first event of a stream, and the question that the engine answers so."""
        client = self.client()
        return client, self.streams(client)

    def streams(self, client: RawClient) -> Asked:
        """The same for a client that is there."""
        client.post(STREAM_A)
        asked = self.engine.next()
        asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        client.read_until(b"data: 1\n\n\r\n")
        return asked

    def serve(self, *bodies: bytes) -> RawClient:
        """A client that has asked these one after the other; the engines answer at once."""
        self.engine.answer = self.other.answer = lambda _: JSON_OK
        client = self.client()
        for number, body in enumerate(bodies, 1):
            assert client.ask(body).status == 200
            self.events.wait("released", number)
        return client

    def answers(self, client: RawClient) -> None:
        """The engine gives a client a whole answer."""
        client.post(ASK_A)
        self.engine.next().send(JSON_OK)
        assert client.read().body == b"{}"

    def close(self) -> None:
        for client in self.clients:
            client.leave()
        self.feed.close()
        self.server.shutdown()
        self.server.close()
        self.engine.close()
        self.other.close()
        self.mechanism.gate.set()
        self.mux.close()
        self.relay.close()
