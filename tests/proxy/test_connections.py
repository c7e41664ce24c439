"""Connections to engines: those that idle, and engines that are gone."""

import socket
import threading
from types import SimpleNamespace

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import LoadError
from anvil_mux.host.seam import Evicted
from anvil_mux.proxy import connections, exchange
from tests.fake_engine import ASK_A, DONE, END, GUARD, JSON_OK, RawClient, Rig, chunk
from tests.running import seen

Looks = threading.Semaphore


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Released by each look of a request that waits at its engine."""
    looks, look = Looks(0), exchange.Exchange._look

    def noting(waiting: exchange.Exchange) -> None:
        look(waiting)
        looks.release()

    monkeypatch.setattr(exchange.Exchange, "_look", noting)
    return looks


def look_on(looks: Looks, count: int) -> None:
    """Wait for so many further looks."""
    while looks.acquire(blocking=False):
        pass
    for _ in range(count):
        assert looks.acquire(timeout=GUARD)


# Connections that idle


def test_a_connection_that_is_put_back_after_the_end_of_its_pool_is_closed():
    pool, (near, far) = connections.Pool(), socket.socketpair()
    of_run = pool.of("run", Backend("a", "a"))
    pool.close()
    of_run.put(connections.Upstream(near))
    with far:
        assert far.recv(1) == b""
    assert near.fileno() < 0


def test_few_connections_are_kept_to_an_engine_in_which_each_holds_a_thread(make_rig, monkeypatch):
    monkeypatch.setattr("anvil_mux.proxy.connections.LOOK_SECONDS", GUARD)  # nobody waits for so long
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), engine="llamacpp"),))
    clients = [rig.client() for _ in range(5)]
    for client in clients:
        client.post(ASK_A)
    asked = [rig.engine.next() for _ in clients]
    for number, each in enumerate(asked, 1):
        each.send(JSON_OK)
        rig.events.record(number)
    assert all(each.was_left() for each in asked[2:])
    assert sum(connection.ended.is_set() for connection in rig.engine.connections) == 3


def test_what_idles_is_closed_when_a_request_waits_on_a_connection_of_its_own(rig, monkeypatch):
    monkeypatch.setattr("anvil_mux.proxy.connections.LOOK_SECONDS", 0.05)
    waiting = rig.client()
    clients = [rig.client() for _ in range(4)]
    waiting.post(ASK_A)
    last = rig.engine.next()
    for client in clients:
        client.post(ASK_A)
    asked = [rig.engine.next() for _ in clients]
    for each in asked:
        each.send(JSON_OK)
    assert all(each.was_left() for each in asked)
    assert all(client.read().status == 200 for client in clients)
    last.send(JSON_OK)
    assert waiting.read().status == 200


def test_a_slow_answer_on_a_connection_that_was_answered_before_lets_others_idle(rig, monkeypatch, looks):
    monkeypatch.setattr("anvil_mux.proxy.connections.LOOK_SECONDS", 0.05)
    first, second = rig.client(), rig.client()
    for client in (first, second):
        client.post(ASK_A)
    asked = [rig.engine.next(), rig.engine.next()]
    for each in asked:
        each.send(JSON_OK)
    assert [client.read().status for client in (first, second)] == [200, 200]
    rig.events.record(2)
    first.post(ASK_A)
    slow = rig.engine.next()
    look_on(looks, 3)
    assert not any(connection.ended.is_set() for connection in rig.engine.connections)
    slow.send(JSON_OK)
    assert first.read().status == 200


# Engines that are gone


def test_a_pooled_connection_that_was_closed_is_replaced(rig):
    client, asked = rig.asked(ASK_A)
    asked.send(JSON_OK)
    assert client.read().status == 200
    asked.close()
    assert asked.was_left()
    rig.answers(client)
    assert len(rig.events.of("loading")) == 1


def test_a_pooled_connection_that_ends_under_the_request_is_replaced(rig):
    client = rig.client()
    rig.answers(client)
    client.post(ASK_A)
    rig.engine.next().close()
    rig.engine.next().send(JSON_OK)
    assert client.read().status == 200
    assert len(rig.engine.connections) == 2
    assert len(rig.events.of("loading")) == 1


def test_a_connection_is_looked_at_before_it_is_used_again(rig):
    client, asked = rig.asked(ASK_A)
    asked.send(JSON_OK)
    client.read()
    rig.events.wait("released")
    asked.close()
    assert asked.was_left()
    [connections] = rig.relay.pool._of_run.values()
    assert connections.take() is None


def test_a_second_answer_to_one_request_reaches_nobody(rig):
    client, asked = rig.asked(ASK_A)
    asked.send(JSON_OK)
    assert client.read().body == b"{}"
    rig.events.wait("released")
    asked.send(JSON_OK.replace(b"{}", b"[]"))
    client.post(ASK_A)
    assert asked.was_left()
    rig.engine.next().send(JSON_OK)
    assert client.read().body == b"{}"


class Impatient:
    """An engine that answers as soon as a request begins, and closes with the rest of it unread."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            connection.recv(1)
            connection.sendall(JSON_OK)


def test_a_connection_that_did_not_take_the_whole_request_carries_no_other(make_rig):
    rig = make_rig()
    rig.mechanism.engines["a"] = Impatient()
    assert rig.ask(b'{"model":"a","x":"%b"}' % (b"x" * 16_000_000)).status == 200
    rig.events.wait("released")
    [connections] = rig.relay.pool._of_run.values()
    assert not connections._idle


@pytest.mark.parametrize("length", [2, 300_000], ids=["whole", "passed_on"])
def test_an_answers_coding_is_told_with_every_answer(rig, length):
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % length
    rig.engine.answer = lambda _: packed + b"g" * length
    client = rig.client()
    for _ in range(3):
        answer = client.ask(ASK_A)
        assert (answer.header(b"content-encoding"), len(answer.body)) == (b"gzip", length)


def test_what_is_sent_to_an_engine_is_not_paced(rig):
    connection = connections.connect(rig.engine.address)
    with connection:
        chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert chosen.rstrip(b"\0") == b"reno"


def test_idle_connections_are_swept(rig, monkeypatch):
    rig.engine.answer = lambda _: JSON_OK
    rig.ask(ASK_A)
    rig.events.wait("released")
    rig.relay.pool.sweep()
    assert not rig.engine.connections[0].ended.is_set()
    monkeypatch.setattr("anvil_mux.proxy.connections.IDLE_SECONDS", 0.0)
    rig.relay.pool.sweep()
    assert rig.engine.connections[0].ended.wait(20)


def test_no_connection_idles_to_an_engine_that_is_told_to_go(rig, monkeypatch):
    were_closed = []

    def evict(backend: Backend, how: str) -> Evicted:
        were_closed.append(rig.engine.connections[0].ended.wait(GUARD))
        return Evicted(how)

    monkeypatch.setattr(rig.mechanism, "evict", evict)
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    client = rig.client()
    for model in (b"a", b"org/b"):
        assert client.ask(b'{"model":"%b"}' % model).status == 200
    assert were_closed == [True]


def served(rig: Rig, client: RawClient) -> None:
    """The engine gives a whole answer, so that its end is not one right after its load."""
    rig.answers(client)
    rig.events.wait("released")
    rig.relay.pool.close()


def test_a_dead_engine_is_loaded_anew_and_the_request_sent_again(rig):
    client = rig.client()
    served(rig, client)
    client.post(ASK_A)
    rig.mechanism.end = "exited with code 137"
    rig.engine.next().reset()
    asked = rig.engine.next()
    assert len(rig.events.of("loading")) == 2
    asked.send(JSON_OK)
    assert client.read().status == 200


def test_an_engine_that_ends_under_its_first_request_is_not_loaded_again_for_every_other(rig):
    rig.mechanism.end = "exited with code 139"
    client = rig.client()
    for n in range(6):
        client.post(ASK_A)
        if n == 0:
            rig.engine.next().reset()
        answer = client.read()
        assert (answer.status, answer.header(b"x-should-retry")) == (503, b"false")
        assert b"exited with code 139" in answer.body
    assert len(rig.events.of("loading")) == 1


def test_a_request_under_which_its_engine_ends_twice_is_refused_with_what_happened(rig):
    client, other = rig.client(), rig.client()
    rig.mechanism.end = "exited with code 139"
    served(rig, client)
    client.post(ASK_A)
    poison = rig.engine.next()
    poison.reset()
    poison = rig.engine.next()
    rig.answers(other)
    rig.events.wait("released", 2)
    poison.reset()
    answer = client.read()
    assert (answer.status, answer.header(b"x-should-retry")) == (502, b"false")
    assert answer.code == "engine_crashed"
    assert b"exited with code 139" in answer.body
    assert len(rig.events.of("loading")) == 2
    rig.answers(other)


def test_a_connection_that_is_closed_without_an_answer_is_the_failure_of_its_request_alone(rig):
    streaming, client = rig.client(), rig.client()
    stream = rig.streams(streaming)
    client.post(ASK_A)
    rig.engine.next().close()
    answer = client.read()
    assert (answer.status, answer.code) == (502, "backend_unavailable")
    assert rig.engine.asked.empty()
    stream.send(chunk(b"data: 2\n\n"), END)
    assert streaming.read_chunks() == (b"data: 2\n\n" + DONE, True)
    rig.answers(client)
    assert rig.events.of("draining") == []
    assert len(rig.events.of("loading")) == 1


@pytest.mark.parametrize("well", [None, False])
def test_a_neighbour_that_gets_bytes_is_proof_of_life_whatever_the_engine_says(rig, well):
    """Its health route may have to wait for a thread as any request does."""
    asked, may_answer = threading.Event(), threading.Event()

    def answers(backend: Backend, limit: float) -> bool | None:
        asked.set()
        assert may_answer.wait(GUARD)
        return well

    rig.mechanism.answers = answers
    streaming, client = rig.client(), rig.client()
    stream = rig.streams(streaming)
    client.post(ASK_A)
    rig.engine.next().close()
    assert asked.wait(GUARD)
    stream.send(chunk(b"data: 2\n\n"))
    streaming.read_until(b"data: 2\n\n\r\n")
    may_answer.set()
    assert client.read().status == 502
    assert seen(lambda: rig.mux.facts.doubts._open, lambda doubts: not doubts) == {}
    assert rig.events.of("draining") == []


def test_a_request_that_waited_on_an_idle_connection_is_not_asked_twice(rig, looks):
    client = rig.client()
    rig.answers(client)
    client.post(ASK_A)
    asked = rig.engine.next()
    look_on(looks, 1)
    asked.close()
    assert client.read().status == 502
    assert rig.engine.asked.empty()
    assert rig.events.of("draining") == []


def elsewhere(rig: Rig, listener: socket.socket) -> None:
    """Where the engine of ``a`` listens, and nobody takes what comes."""
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    rig.mechanism.engines["a"] = SimpleNamespace(url=url)


def test_a_frozen_engine_with_a_full_backlog_answers_all_when_it_goes_on(rig, monkeypatch, looks):
    monkeypatch.setattr("anvil_mux.proxy.connections.CONNECT_SECONDS", 0.5)
    rig.engine.answer = lambda _: JSON_OK
    with socket.create_server(("127.0.0.1", 0), backlog=5) as frozen:
        elsewhere(rig, frozen)
        clients = [rig.client() for _ in range(20)]
        for client in clients:
            client.post(ASK_A)
        look_on(looks, 20 * 6)
        assert rig.mux.overview.status().leases == 20
        rig.engine.accept_from(frozen)
        assert [client.read().status for client in clients] == [200] * 20
        frozen.shutdown(socket.SHUT_RDWR)
    assert rig.events.of("severed") == rig.events.of("draining") == []
    assert len(rig.events.of("loading")) == 1


def test_who_waits_for_a_connection_leaves_with_its_client(rig):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        elsewhere(rig, full)
        clients = [rig.client() for _ in range(4)]
        for client in clients:
            client.post(ASK_A)
        rig.events.wait("leased", 4)
        for client in clients:
            client.leave()
        rig.events.wait("released", 4)
    assert rig.events.of("draining") == []


def test_an_engine_that_cannot_be_reached_twice_is_a_502(rig):
    rig.engine.stop_listening()
    answer = rig.ask(ASK_A)
    assert answer.status == 502
    assert answer.code == "backend_unavailable"
    assert len(rig.events.of("leased")) == 2


def test_a_load_that_fails_is_a_503_with_the_engines_last_words(rig):
    rig.mechanism.failure = LoadError("a exited with code 1.", log=["CUDA out of memory"])
    answer = rig.ask(ASK_A)
    assert answer.status == 503
    assert b"CUDA out of memory" in answer.body


def test_an_engines_redirect_is_told_and_not_followed(rig):
    client, asked = rig.asked(ASK_A)
    asked.send(
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    )
    assert client.read().status == 307
    assert rig.engine.asked.empty()


def test_header_values_cannot_smuggle_lines(rig):
    answers = iter([b"HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\n{}", JSON_OK])
    rig.engine.answer = lambda _: next(answers)
    assert rig.ask(ASK_A).status == 502
