"""The server: its connections, its threads and its end."""

import errno
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from anvil_mux import clock
from anvil_mux.config.config import Backend
from anvil_mux.proxy import client, server
from tests.fake_engine import (
    ASK_A,
    ASK_B,
    ASK_HEAD,
    ASK_LIVEZ,
    DONE,
    END,
    GUARD,
    JSON_OK,
    RawClient,
    Rig,
    chunk,
    keyring,
    shows,
)
from tests.running import seen

FORM = b"application/x-www-form-urlencoded"

OURS = "a-key-of-our-own"

# Connections


def test_200_simultaneous_connections_are_all_answered(rig):
    rig.engine.answer = lambda _: JSON_OK
    connections = []
    for _ in range(200):
        connections.append(rig.client())
        connections[-1].post(ASK_A)
    assert [each.read().status for each in connections] == [200] * 200


def test_pipelined_requests_are_answered_in_order(rig):
    connection = rig.client()
    connection.send(
        b"".join(
            b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"/livez", b"/health", b"/x")
        )
    )
    assert [connection.read().body for _ in range(2)] == [b"ok\n", b"OK\n"]
    assert connection.read().status == 404


def test_a_head_may_come_in_pieces(rig):
    connection = rig.client()
    for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n":
        connection.send(bytes([byte]))
    assert connection.read().body == b"ok\n"


def test_half_a_head_is_not_waited_for_long(rig, monkeypatch):
    monkeypatch.setattr(client, "HEAD_SECONDS", 0.05)
    connection = rig.client()
    connection.send(b"GET /livez HTTP/1.1\r\nHost: loc")
    assert connection.read().status == 408
    assert connection.is_closed()


def test_of_too_many_half_heads_the_oldest_is_refused(rig, monkeypatch):
    monkeypatch.setattr(client, "HEADS", 2)
    connections = [rig.client() for _ in range(3)]
    for connection in connections:
        connection.send(b"GET /livez HTTP/1.1\r\nHost: loc")
        assert rig.get(b"/livez").status == 200  # what came before it has been read
    assert connections[0].read().status == 408
    assert connections[0].is_closed()
    for connection in connections[1:]:
        connection.send(b"alhost\r\n\r\n")
        assert connection.read().body == b"ok\n"


@pytest.mark.parametrize("coding", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_half_a_body_is_not_waited_for_long(rig, monkeypatch, coding):
    monkeypatch.setattr(client, "BODY_SECONDS", 0.05)
    connection = rig.client()
    connection.send(ASK_HEAD + coding + b"\r\n\r\n")
    answer = connection.read()
    assert (answer.status, answer.header(b"connection")) == (408, b"close")
    assert connection.is_closed()


def test_an_idle_connection_is_closed(rig, monkeypatch):
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.05)
    assert rig.client().is_closed()


def test_http_1_0_is_answered_and_closed_unless_it_asks_otherwise(rig):
    connection = rig.client()
    connection.send(b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert connection.read().header(b"connection") == b"keep-alive"
    connection.send(b"GET /livez HTTP/1.0\r\n\r\n")
    assert connection.read().header(b"connection") == b"close"
    assert connection.is_closed()


def test_connections_over_the_limit_are_told_so(make_rig):
    rig = make_rig(max_connections=1)
    first = rig.client()
    assert first.get(b"/livez").status == 200
    second = rig.client()
    answer = second.read()
    assert (answer.status, answer.code) == (503, "overloaded")
    assert b"overloaded" in answer.body
    assert second.is_closed()
    assert first.get(b"/livez").status == 200


KEYED = f"Authorization: Bearer {OURS}\r\n".encode()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_connections_without_a_key_make_way_for_new_ones(make_rig, sent):
    rig = make_rig(keys=keyring(OURS), max_connections=3)
    keyed = rig.client()
    assert keyed.get(b"/v1/models", extra=KEYED).status == 200
    silent = [rig.client() for _ in range(2)]
    for each in silent:
        each.send(sent)
        if sent.endswith(b"\r\n\r\n"):
            assert each.read().status == 200
    assert seen(lambda: watched(rig), lambda count: count == 3) == 3
    another = rig.client()
    assert another.get(b"/v1/models", extra=KEYED).status == 200
    assert rig.client().get(b"/livez").status == 200
    assert all(each.is_closed() for each in silent)
    assert keyed.get(b"/v1/models", extra=KEYED).status == 200


def test_livez_answers_though_all_connections_are_taken(make_rig):
    rig = make_rig(keys=keyring(OURS), max_connections=1)
    keyed = rig.client()
    assert keyed.get(b"/v1/models", extra=KEYED).status == 200
    near, far = socket.socketpair()
    with far:
        far.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        rig.server.admit(near, "127.0.0.1")
        far.settimeout(GUARD)
        assert far.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert rig.client().read().status == 503
    assert keyed.get(b"/v1/models", extra=KEYED).status == 200


def test_without_free_files_it_does_not_try_on_and_on(rig, monkeypatch):
    starves, tries, looked = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
    [listener], earlier = rig.server.listeners.values(), rig.client()
    assert earlier.get(b"/livez").status == 200

    def starved() -> object:
        if starves.is_set():
            tries.release()
            raise OSError(errno.EMFILE, "Too many open files")
        return listener.accept()

    def swept(now: float) -> None:
        looked.release()

    monkeypatch.setattr(rig.server, "_sweep", swept)
    assert looked.acquire(timeout=GUARD), "it has accepted the earlier one, and looks for no more"
    monkeypatch.setattr(server, "STARVED_SECONDS", 60.0)
    starving = SimpleNamespace(accept=starved, fileno=listener.fileno, close=listener.close)
    monkeypatch.setitem(rig.server.listeners, listener.fileno(), starving)
    starves.set()
    connection = rig.client()
    assert tries.acquire(timeout=GUARD)
    while looked.acquire(blocking=False):
        pass
    assert looked.acquire(timeout=GUARD)
    assert looked.acquire(timeout=GUARD)
    assert not tries.acquire(blocking=False), "the front goes on, and does not try again"
    assert earlier.get(b"/livez").status == 200
    starves.clear()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
    monkeypatch.setattr(server, "time", later)
    assert connection.get(b"/livez").status == 200


def test_a_connection_that_ended_makes_room(make_rig, monkeypatch):
    rig = make_rig(max_connections=1)
    end, gone = rig.server.end, threading.Event()

    def note(connection: client.Client) -> None:
        end(connection)
        gone.set()

    monkeypatch.setattr(rig.server, "end", note)
    first = rig.client()
    assert first.get(b"/livez", extra=b"Connection: close\r\n").status == 200
    assert first.is_closed()
    assert gone.wait(GUARD)
    assert rig.get(b"/livez").status == 200


# Threads


def watched(rig: Rig) -> int:
    """How many connections are watched."""
    return len(rig.server._idle) + len(rig.server._begun)


def request_threads() -> int:
    return sum(thread.name.startswith("request-") for thread in threading.enumerate())


def test_idle_connections_and_heads_in_the_making_have_no_thread(rig):
    silent, asked, begun = ([rig.client() for _ in range(50)] for _ in range(3))
    for connection in asked:
        assert connection.get(b"/livez").status == 200
    for connection in begun:
        connection.send(b"GET /livez HTTP/1.1\r\nHost: loc")
    assert seen(lambda: watched(rig), lambda count: count == 150) == 150
    for connection in begun:
        connection.send(b"alhost\r\n\r\n")
        assert connection.read().body == b"ok\n"
    for connection in (*silent, *asked):
        assert connection.get(b"/livez").status == 200


def test_a_thread_that_has_served_a_request_serves_others(rig):
    before = request_threads()
    for _ in range(50):
        connection = rig.client()
        assert connection.get(b"/livez", extra=b"Connection: close\r\n").status == 200
        assert connection.is_closed()
    assert request_threads() - before < 25


def test_a_thread_that_is_not_needed_ends(monkeypatch):
    monkeypatch.setattr(server, "SPARE_SECONDS", 0.0)
    pool, served = server.Threads(), []
    for number in range(3):
        pool.run(lambda number=number: served.append((number, threading.current_thread())))
        assert seen(lambda: len(served), lambda count: count > number)  # noqa: B023
    for _, thread in served:
        thread.join(GUARD)
    assert [number for number, _ in served] == [0, 1, 2]


def test_what_is_known_of_a_head_is_not_believed_of_another_one(make_rig):
    """A new connection begins with the last head of one that ended; another key is another head."""
    lines = "key-of-ann name=ann models=a;key-of-bob name=bob models=org/b"
    rig = make_rig(keys=keyring(lines))
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    for name, body, status in (
        ("ann", ASK_A, 200),
        ("bob", ASK_A, 404),
        ("ann", ASK_B, 404),
        ("ann", ASK_A, 200),
        ("eve", ASK_A, 401),
    ):
        connection = rig.client()
        assert connection.ask(body, extra=shows(f"key-of-{name}")).status == status, name
        connection.leave()
        assert seen(lambda: rig.server.clients, lambda left: not left) == set()


# The end


def test_a_drain_finishes_what_runs_and_refuses_what_waits(rig):
    running, waiting, idle = rig.client(), rig.client(), rig.client()
    assert idle.get(b"/livez").status == 200
    asked = rig.streams(running)
    waiting.post(ASK_B)
    rig.events.wait("queued", 2)
    ended: list[bool] = []
    drain = threading.Thread(target=lambda: ended.append(rig.server.drain(20.0)))
    drain.start()
    answer = waiting.read()
    assert (answer.status, answer.code) == (503, "shutting_down")
    assert answer.header(b"retry-after") == b"10"
    assert idle.is_closed()
    assert drain.is_alive()
    asked.send(chunk(b"data: 2\n\n"), END)
    assert running.read_chunks() == (b"data: 2\n\n" + DONE, True)
    assert running.is_closed()
    drain.join()
    assert ended == [True]
    with pytest.raises(ConnectionRefusedError):
        RawClient(rig.address)


def test_whoever_comes_during_a_drain_is_told_so(rig):
    running, asked = rig.asked(ASK_A)
    drain = threading.Thread(target=rig.server.drain, args=(60.0,))
    drain.start()
    assert seen(lambda: rig.get(b"/readyz").status, lambda status: status == 503) == 503
    readiness, probe, health, late = rig.client(), rig.client(), rig.client(), rig.client()
    assert b"[-]accepting shutting down" in readiness.get(b"/readyz").body
    assert probe.get(b"/livez").status == 200
    assert health.json(b"/healthz")["problems"] == {"accepting": "shutting down"}
    answer = late.ask(ASK_A)
    assert (answer.status, answer.code) == (503, "shutting_down")
    assert answer.header(b"retry-after") == b"10"
    assert all(each.is_closed() for each in (readiness, probe, health, late))
    assert drain.is_alive()
    asked.send(JSON_OK)
    assert running.read().status == 200
    drain.join()


def test_those_who_come_during_a_drain_do_not_prolong_it(rig):
    running, asked = rig.asked(ASK_A)
    drain = threading.Thread(target=rig.server.drain, args=(3600.0,))
    drain.start()
    assert seen(lambda: rig.get(b"/readyz").status, lambda status: status == 503) == 503
    rig.client().send(ASK_HEAD + b"Content-Length: 100\r\n\r\n{")
    asked.send(JSON_OK)
    assert running.read().status == 200
    drain.join(60.0)
    assert not drain.is_alive()


def test_an_acceptor_that_accepts_nobody_hangs(rig, monkeypatch):
    gate, admit = threading.Event(), rig.server.admit

    def stuck(request: socket.socket, address: str, *, at_pages: bool) -> None:
        gate.wait(GUARD)
        admit(request, address, at_pages=at_pages)

    monkeypatch.setattr(server, "PULSE_SECONDS", 1.5)
    monkeypatch.setattr(rig.server, "admit", stuck)
    assert not rig.server.hangs
    connection = rig.client()
    assert seen(lambda: rig.server.hangs, bool)
    gate.set()
    assert connection.get(b"/livez").status == 200
    assert seen(lambda: rig.server.hangs, lambda hangs: not hangs) is False


@pytest.mark.parametrize("is_watched", [False, True], ids=["accepted", "watched"])
def test_a_mistake_with_one_connection_ends_that_one_and_is_told(rig, monkeypatch, is_watched):
    receive, wrong = client.Client.receive, []

    def mistaken(self: client.Client) -> bool:
        if not wrong:
            wrong.append(self)
            raise RuntimeError("a mistake")
        return receive(self)

    one = rig.client() if is_watched else None
    assert seen(lambda: watched(rig), lambda count: count == is_watched) == is_watched
    monkeypatch.setattr(client.Client, "receive", mistaken)
    monkeypatch.setattr(
        server, "safely", lambda thread, do, default: do()
    )  # a turn that succeeds says it is over
    one = one or rig.client()
    one.send(ASK_LIVEZ)
    told = seen(lambda: clock.mistakes().get("acceptor"), lambda told: told is not None)
    assert told == "RuntimeError: a mistake"
    assert rig.get(b"/livez").status == 200
    try:
        assert one.is_closed()
    except ConnectionResetError:
        pass
    assert seen(lambda: len(rig.server.clients), lambda count: count == 1) == 1


def test_a_mistake_in_accepting_pauses_that_for_a_moment(rig, monkeypatch):
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.02)
    admit, wrong = rig.server.admit, []

    def mistaken(request: socket.socket, address: str, *, at_pages: bool) -> None:
        if not wrong:
            wrong.append(address)
            request.close()
            raise RuntimeError("a mistake")
        admit(request, address, at_pages=at_pages)

    monkeypatch.setattr(rig.server, "admit", mistaken)
    try:
        assert rig.client().is_closed()
    except ConnectionResetError:
        pass
    assert rig.get(b"/livez").status == 200


def test_who_has_stopped_accepting_does_not_hang(rig, monkeypatch):
    assert rig.server.drain(0.0)
    monkeypatch.setattr(server, "PULSE_SECONDS", -1.0)
    assert not rig.server.hangs


def test_a_drain_has_an_end(rig):
    rig.client().post(ASK_A)
    rig.engine.next()
    assert rig.server.drain(0.0) is False


def test_a_client_that_leaves_within_its_request_does_no_harm(rig):
    for cut in (b"GET /li", ASK_HEAD + b"Content-Length: 100\r\n\r\n{"):
        connection = rig.client()
        connection.send(cut)
        connection.socket.shutdown(socket.SHUT_WR)
        connection.rest()
    assert rig.get(b"/livez").status == 200


def test_requests_are_numbered_and_harmless_ids_are_kept(rig):
    connection = rig.client()
    first, second = connection.get(b"/livez"), connection.get(b"/livez")
    assert first.header(b"x-request-id") != second.header(b"x-request-id")
    assert connection.get(b"/livez", extra=b"X-Request-ID: mine.1\r\n").header(b"x-request-id") == b"mine.1"
    assert connection.get(b"/livez", extra=b"X-Request-ID: a b\r\n").header(b"x-request-id") != b"a b"


def test_who_is_stopped_before_it_began_to_accept_begins_no_more(rig):
    never = server.Server(server.listen("127.0.0.1", 0), rig.handler, rig.mux)
    never.shutdown()
    never.close()
    never.serve_forever()


def test_500_clients_that_drip_do_not_hold_up_another(rig):
    rig.engine.answer = lambda _: JSON_OK
    slow = [rig.client() for _ in range(500)]
    for number, connection in enumerate(slow):
        connection.send(
            b"GET /livez HTTP/1.1\r\nHost: loc" if number % 2 else ASK_HEAD + b"Content-Length: 99\r\n\r\n{"
        )
    connection = rig.client()
    assert connection.ask(ASK_A).status == 200
    assert connection.get(b"/livez").status == 200
    slow[1].send(b"alhost\r\n\r\n")
    assert slow[1].read().body == b"ok\n"


def test_a_form_without_files_reaches_the_engine_with_its_own_name_for_the_model(make_rig):
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), served_model="inside & out"),))
    asked = rig.passes(b"language=en&model=a&prompt=x%20y", b"/v1/audio/transcriptions", type=FORM)
    assert asked.body == b"language=en&model=inside%20%26%20out&prompt=x%20y"


def test_an_engine_is_asked_for_answers_that_can_be_read(rig):
    asked = rig.passes(extra=b"Accept-Encoding: gzip, br\r\n")
    assert asked.head.lower().count(b"accept-encoding: identity\r\n") == 1
    assert b"gzip" not in asked.head


def test_json_is_no_form(rig):
    assert rig.ask(ASK_A, b"/v1/audio/transcriptions", type=FORM).status == 415


def test_the_end_of_a_thread_is_a_problem_that_healthz_and_readyz_tell(rig, monkeypatch):
    monkeypatch.setitem(clock._mistakes, "scheduler", "ended: OverflowError")
    client = rig.client()
    health = client.get(b"/healthz")
    assert (health.status, json.loads(health.body)["problems"]) == (
        503,
        {"threads": "scheduler: ended: OverflowError"},
    )
    assert client.get(b"/readyz").status == 503
