"""The engine and the clients on both sides of a running anvil-mux, which note what they saw, read by h11."""

from __future__ import annotations

import logging
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from hashlib import sha256

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Key, Keyring
from anvil_mux.telemetry.accesslog import Served
from tests.fake_engine import GUARD, Mechanism, Rig
from tests.strict import AnswerReader, Received, RequestReader, Unsound
from tests.wire.cases import (
    KEYS,
    PASS_HEADERS,
    SECOND,
    WAYS,
    Ask,
    Case,
    Line,
    answer_bytes,
    cut_bytes,
    method_of,
    request_bytes,
)

ID = re.compile(rb"~\d+~")
KEPT = 500
"""Requests that are known for a while longer: one may still be under way whose client has left."""
PATIENCE = GUARD
"""Seconds within which everything comes that is to come."""


@dataclass
class Seen:
    """What was seen of one request, on both sides."""

    id: str
    ask: Ask
    before: tuple[Seen, ...] = ()
    """Those that were sent before it on its connection, whatever came of them."""
    received: list[Received] = field(default_factory=list)
    """What the engine got, each time."""
    said: list[int] = field(default_factory=list)
    """Bytes of the answer that the engine sent, each time."""
    sent: bool = False
    """Its client sent all of it."""
    answer: AnswerReader | None = None
    """What its client got."""
    reset: bool = False
    """Its client's connection ended by a reset."""
    refused: str = ""
    """What a strict client says of its answer."""
    second: threading.Event = field(default_factory=threading.Event)
    """The client has its answer: the second one may come."""
    second_came: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    """Its case is: nothing more may come."""


class Engine:
    """A strict engine that answers each request as its client wants it answered."""

    def __init__(self) -> None:
        self.known: dict[bytes, Seen] = {}
        self.flaws: list[str] = []
        """What no strict server takes, and what nobody asked for."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = RequestReader()
        answered: Seen | None = None
        with connection:
            try:
                while data := connection.recv(65536):
                    for received in reader.feed(data):
                        seen = self._find(received)
                        if seen is None or not self._answer(connection, seen):
                            return
                        answered = seen
                reader.end()
            except Unsound as error:
                after = f", after {answered.ask!r}" if answered else ""
                self.flaws.append(f"the engine got {error}{after}")
            except OSError:
                pass

    def _find(self, received: Received) -> Seen | None:
        ids = received.values(b"x-wire")
        found = [self.known[id] for id in ids if id in self.known]
        if len(ids) != 1 or not found:
            self.flaws.append(f"the engine was asked what nobody asked: {received.head!r}{received.body!r}")
            return None
        found[0].received.append(received)
        return found[0]

    def _answer(self, connection: socket.socket, seen: Seen) -> bool:
        """Answer as is wanted; whether another request may follow."""
        try:
            self._say(connection, seen)
        finally:
            seen.second_came.set()
        answer = seen.ask.answer
        return answer.end == "keep" and answer.cut < 0 and answer.framing != "close"

    def _say(self, connection: socket.socket, seen: Seen) -> None:
        answer, way = seen.ask.answer, WAYS[seen.ask.way]
        data = cut_bytes(answer, answer_bytes(answer, way, seen.id))
        seen.said.append(0)
        if answer.twice == "together":
            data += SECOND
        size = -(-len(data) // answer.pieces) or 1
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
            seen.said[-1] += len(data[start : start + size])
        if answer.twice == "later" and seen.second.wait(PATIENCE) and not seen.over:
            connection.sendall(SECOND)
        if answer.end == "reset":
            _reset(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Errors(logging.Handler):
    """What anvil-mux itself calls a mistake of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


class House:
    """One running anvil-mux between the engine and the clients."""

    def __init__(self, *, keyed: bool) -> None:
        self.engine = Engine()
        self.keyed = keyed
        keys = Keyring(
            [
                Key(sha256(KEYS["admin"]).digest(), "admin"),
                Key(sha256(KEYS["only-a"]).digest(), "only-a", frozenset({"a"}), state=False, admin=False),
            ]
        )
        engines = {"a": self.engine, "b": self.engine}
        mechanism = Mechanism(engines)  # type: ignore[arg-type]
        backends = (
            Backend("a", "a", gpus=("0",), aliases=("alias",), pass_headers=PASS_HEADERS),
            Backend("b", "org/b", gpus=("0",), served_model="b-inside", pass_headers=PASS_HEADERS),
        )
        self.rig = Rig(mechanism=mechanism, keys=keys if keyed else None, backends=backends)
        self.host = b"127.0.0.1:%d" % self.rig.address[1]
        self.errors = Errors()
        logging.getLogger("anvil_mux").addHandler(self.errors)

    def close(self) -> None:
        logging.getLogger("anvil_mux").removeHandler(self.errors)
        self.rig.close()
        self.engine.close()

    def records(self) -> dict[str, list[Served]]:
        found: dict[str, list[Served]] = {}
        for each in list(self.rig.events.seen):
            if isinstance(each, Served):
                found.setdefault(each.request_id, []).append(each)
        return found

    def wait_for_records(self, ids: set[str]) -> dict[str, list[Served]]:
        """The records once there is one of each of these requests."""
        events = self.rig.events
        with events._changed:
            events._changed.wait_for(lambda: ids <= self.records().keys(), PATIENCE)
        return self.records()


class Player:
    """Plays cases, and returns what was seen of each request."""

    def __init__(self) -> None:
        self.houses: dict[bool, House] = {}
        self.asked = 0

    def house(self, *, keyed: bool) -> House:
        if keyed not in self.houses:
            self.houses[keyed] = House(keyed=keyed)
        return self.houses[keyed]

    def close(self) -> None:
        for house in self.houses.values():
            house.close()

    def play(self, case: Case) -> tuple[House, list[Seen], list[str]]:
        """What was seen of its requests, and what no client takes."""
        house = self.house(keyed=case.keyed)
        house.rig.relay.pool.sweep()  # as the program does now and then
        house.rig.events.seen.clear()
        known = house.engine.known
        for id in list(known)[:-KEPT]:
            del known[id]
        lines: list[list[Seen]] = []
        for line in case.lines:
            lines.append([])
            for ask in line.asks:
                self.asked += 1
                seen = Seen(f"~{self.asked}~", ask, tuple(lines[-1]) if line.pipelined else ())
                house.engine.known[seen.id.encode()] = seen
                lines[-1].append(seen)
        flaws: list[str] = []
        pairs = list(zip(case.lines, lines, strict=True))
        if case.at_once:
            threads = [threading.Thread(target=_speak, args=(house, *pair, flaws)) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for line, seen_of_line in pairs:
                _speak(house, line, seen_of_line, flaws)
        asked = [seen for each in lines for seen in each]
        for seen in asked:
            seen.over = True
            seen.second.set()
        return house, asked, flaws


def _speak(house: House, line: Line, asks: list[Seen], flaws: list[str]) -> None:
    left = list(asks)
    try:
        while left:
            connection = ClientConnection(house)
            with connection.socket:
                if line.pipelined:
                    connection.pipeline(left)
                    left = []
                else:
                    while left and connection.ask(left.pop(0)):
                        pass
                connection.end()
    except Unsound as error:
        flaws.append(f"a client got {error}")
    except TimeoutError:
        flaws.append("a client waits in vain")


class ClientConnection:
    """A strict client's connection."""

    def __init__(self, house: House) -> None:
        self._host = house.host
        self.socket = socket.create_connection(house.rig.address, PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._open = True
        self._reset = False

    def ask(self, seen: Seen) -> bool:
        """Ask, and read the answer; whether another may be asked here."""
        ask = seen.ask
        data = request_bytes(ask, seen.id, self._host)
        if ask.cut >= 0:
            data = data[: len(data) * ask.cut // 1000]
        seen.sent = ask.cut < 0
        reader = seen.answer = AnswerReader(method_of(ask).encode())
        reader.feed(self._rest) if self._rest else None
        self._rest = b""
        self._send(ask, data, reader)
        if not seen.sent or (ask.reads < 0 and ask.leave != "close"):
            self._leave(ask.leave)
        if seen.sent and ask.reads >= 0:
            while reader.size < ask.reads and not reader.ended and self._more(reader):
                pass
            self._leave(ask.leave)
        return self._read(seen, reader)

    def _send(self, ask: Ask, data: bytes, reader: AnswerReader) -> None:
        expects = any(line.lower() == "expect: 100-continue" for line in ask.fields)
        if expects and ask.cut < 0 and ask.version == "1.1":
            end = data.find(b"\r\n\r\n") + 4
            head, data = data[:end], data[end:]
            self._write(head)
            while data and not (reader.interim or reader.status) and self._more(reader):
                pass
            if reader.status:
                self._open = False  # refused before its body: that may not follow
                return
        size = -(-len(data) // ask.pieces) or 1
        for start in range(0, len(data), size):
            self._write(data[start : start + size])

    def _write(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            pass  # what was said before is still read

    def _more(self, reader: AnswerReader) -> bool:
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            self._reset, data = True, b""
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not (self._reset and not data):
            reader.feed(data)
        self._open = self._open and bool(data)
        return bool(data)

    def _leave(self, how: str) -> None:
        self._open = False
        if how == "half":
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        elif how == "reset":
            _reset(self.socket)
        else:
            self.socket.close()

    def _read(self, seen: Seen, reader: AnswerReader) -> bool:
        while self.socket.fileno() >= 0 and not reader.ended and self._more(reader):
            pass
        seen.reset = self._reset
        if reader.ended:
            if seen.ask.answer.twice == "later" and seen.received:
                seen.second.set()
                seen.second_came.wait(PATIENCE)
            self._rest = reader.rest
        return self._open and reader.ended and not closes(seen.ask, reader)

    def pipeline(self, asks: list[Seen]) -> None:
        """Ask all, then read all answers."""
        self._write(b"".join(request_bytes(seen.ask, seen.id, self._host) for seen in asks))
        for seen in asks:
            seen.sent = True
            reader = seen.answer = AnswerReader(method_of(seen.ask).encode())
            if self._rest:
                reader.feed(self._rest)
                self._rest = b""
            if not self._read(seen, reader):
                break

    def end(self) -> None:
        """Nothing more comes."""
        if self.socket.fileno() < 0:
            return
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while data := self.socket.recv(65536):
                self._rest += data
        except TimeoutError:
            raise Unsound("no end of its connection") from None
        except OSError:
            pass
        if self._rest:
            raise Unsound(f"bytes that belong to no answer: {self._rest[:500]!r}")


def closes(ask: Ask, reader: AnswerReader) -> bool:
    """Whether nothing follows on the connection."""
    options = b",".join(reader.values(b"connection")).lower()
    return b"close" in options or (ask.version == "1.0" and b"keep-alive" not in options)
