"""TLS: the same front behind an encrypted connection."""

import select
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError
from anvil_mux.host.hosts import trust
from anvil_mux.proxy import connections
from anvil_mux.serve.files import tls_context
from tests.cli.demo import compose, state
from tests.fake_engine import ASK_LIVEZ, END, GUARD, JSON_OK, SSE_HEAD, RawClient, Rig, chunk
from tests.running import begin, seen

__all__ = ["state"]

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


def make_certificate(folder: Path) -> tuple[str, str]:
    """One for localhost, and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    about = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*made, "-keyout", key, "-out", cert, *about], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def rig(make_rig: Callable[..., Rig], files: tuple[str, str]) -> Rig:
    return make_rig(tls=connections.build_context(*files))


@pytest.fixture
def connect(rig: Rig, files: tuple[str, str]) -> Callable[[], RawClient]:
    def make() -> RawClient:
        client = rig.client()
        trust = ssl.create_default_context(cafile=files[0])
        client.socket = trust.wrap_socket(client.socket, server_hostname="localhost")
        return client

    return make


def test_requests_are_answered_one_after_another(rig, connect):
    rig.engine.answer = lambda _: JSON_OK
    client = connect()
    for _ in range(3):
        assert client.ask(b'{"model":"a"}').body == b"{}"
    assert client.get(b"/livez").body == b"ok\n"
    assert rig.events.record().client == "127.0.0.1"


def test_a_stream_arrives_event_by_event(rig, connect):
    client = connect()
    client.post(b'{"model":"a","stream":true}')
    asked = rig.engine.next()
    for event in (b"data: 1\n\n", b"data: 2\n\n"):
        asked.send((SSE_HEAD if event[6:7] == b"1" else b"") + chunk(event))
        client.read_until(event)
    asked.send(END)
    client.read_until(b"0\r\n\r\n")


def test_large_bodies_pass_both_ways(rig, connect):
    client = connect()
    large = b"x" * 5_000_000
    sending = threading.Thread(target=client.post, args=(b'{"model":"a","x":"%b"}' % large,))
    sending.start()
    asked = rig.engine.next()
    sending.join(GUARD)
    assert large in asked.body
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large))
    answering = threading.Thread(target=asked.send, args=(large,))
    answering.start()
    assert client.read().body == large
    answering.join(GUARD)


def test_a_client_that_leaves_ends_the_engines_work(rig, connect):
    client = connect()
    asked = rig.streams(client)
    client.leave()
    assert asked.was_left()
    assert rig.events.record().code == "client_gone"


def test_a_stream_that_breaks_off_is_cut_here_too(rig, connect):
    client = connect()
    asked = rig.streams(client)
    asked.close()
    body, clean = client.read_chunks()
    assert (b'"error"' in body, clean) == (True, False)


AUDIO = b'POST /v1/audio/speech HTTP/1.0\r\nContent-Length: 13\r\n\r\n{"model":"a"}'


def test_a_client_that_takes_no_chunks_sees_that_an_answer_broke_off(rig, connect):
    client = connect()
    client.send(AUDIO)
    asked = rig.engine.next()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"
    asked.send(head, chunk(b"a wave"))
    client.read_until(b"a wave")
    client.socket.suppress_ragged_eofs = False
    asked.close()
    with pytest.raises(OSError, match=r"reset|EOF occurred in violation of protocol"):
        client.rest()


def test_a_whole_answer_without_a_length_ends_as_tls_ends(rig, connect):
    client = connect()
    client.send(AUDIO)
    rig.engine.next().send(
        b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n",
        chunk(b"a wave") + chunk(b""),
    )
    client.socket.suppress_ragged_eofs = False
    assert client.rest().endswith(b"a wave")


@pytest.mark.parametrize("end", ["close_notify", "FIN", "RST"])
def test_a_server_elsewhere_that_does_not_end_tls_has_given_no_whole_answer(files, end):
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(connections.begun, ours, trust(files[0]), "localhost", GUARD, lambda: None)
        secure = connections.build_context(*files).wrap_socket(theirs, server_side=True)
        plain = begun.result(GUARD)
        plain.settimeout(GUARD)
        plain.sendall(b"ask")
        if end == "RST":
            assert select.select([secure], [], [], GUARD)[0]  # closed with unread bytes
        else:
            assert secure.recv(3) == b"ask"
        secure.sendall(b"a wave")
        if end == "close_notify":
            ended = pool.submit(secure.unwrap)
        else:
            secure.close()
        assert plain.recv(100) == b"a wave"
        if end == "close_notify":
            assert plain.recv(100) == b""
        else:
            with pytest.raises(ConnectionResetError):
                plain.recv(100)
        plain.close()
        if end == "close_notify":
            ended.result(GUARD).close()


def test_who_does_not_speak_tls_is_let_go_and_others_are_served(rig, connect):
    plain = rig.client()
    plain.send(ASK_LIVEZ)
    with suppress(ConnectionResetError):
        assert b"HTTP" not in plain.rest()
    assert not seen(lambda: rig.server.clients, lambda connections: not connections)
    assert connect().get(b"/livez").status == 200


def test_who_begins_and_says_nothing_is_not_waited_for_long(rig, connect, monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.05)
    begun = rig.client()
    begun.send(b"\x16\x03\x01\x02\x00\x01")
    assert begun.is_closed()


def test_who_has_not_begun_is_a_connection_and_holds_no_thread(make_rig, files):
    rig = make_rig(tls=connections.build_context(*files), max_connections=3)
    before = threading.enumerate()
    silent = [rig.client() for _ in range(3)]
    assert seen(lambda: len(rig.server.clients), lambda count: count == 3) == 3
    assert set(threading.enumerate()) <= set(before)
    silent.append(rig.client())
    assert silent[0].is_closed(), "it makes way for the next one"
    silent[1].leave()
    assert seen(lambda: len(rig.server.clients), lambda count: count == 2) == 2


def test_old_versions_are_refused(rig):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(rig.address, GUARD) as raw, pytest.raises(OSError):
        old.wrap_socket(raw)


def test_a_drain_ends_idle_connections(rig, connect):
    client = connect()
    assert client.get(b"/livez").status == 200
    assert rig.server.drain(GUARD)
    assert client.is_closed()


def test_files_that_do_not_serve_are_a_problem(tmp_path, files):
    with pytest.raises(ConfigError, match="tls_cert"):
        tls_context(Config((), tls_cert=str(tmp_path / "none"), tls_key=files[1]))
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(Config((), tls_cert=files[1], tls_key=files[1]))
    assert tls_context(Config(())) is None


def test_a_reload_shows_a_renewed_certificate_to_whoever_connects_then(state):
    cert, key = make_certificate(state)
    file = compose(state, "a", tls_cert=cert, tls_key=key)
    running = begin(file, "--on-exit", "stop", state=state)
    try:
        port = int(running.tells(r"https://127\.0\.0\.1:(\d+)")[1])
        shown = ssl.get_server_certificate(("127.0.0.1", port))
        assert shown == Path(cert).read_text()
        make_certificate(state)
        running.process.send_signal(signal.SIGHUP)
        running.tells("configuration reloaded: set tls_cert, tls_key")
        assert ssl.get_server_certificate(("127.0.0.1", port)) == Path(cert).read_text() != shown
        Path(cert).write_text("nothing")
        running.process.send_signal(signal.SIGHUP)
        running.tells("configuration refused, nothing has changed: tls_cert")
    finally:
        running.stop()
