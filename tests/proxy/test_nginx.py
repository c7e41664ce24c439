"""Behind a real nginx: what it takes for one request is one request here."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_engine import ASK_B, ASK_HEAD, GUARD, JSON_OK, RawClient, Rig

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx here")

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream mux {{ server 127.0.0.1:{port}; keepalive 4; }}
    server {{
        listen unix:{folder}/socket;
        location / {{
            proxy_pass http://mux; proxy_http_version 1.1; proxy_request_buffering off;
            proxy_set_header Connection ""; proxy_set_header Host localhost;
        }}
    }}
}}
"""
HIDDEN = ASK_HEAD + b"Content-Length: 17\r\n\r\n" + ASK_B


@pytest.fixture
def through_nginx(rig: Rig, tmp_path: Path) -> Iterator[Callable[[], RawClient]]:
    """Makes clients of an nginx in front of the mux."""
    file, place = tmp_path / "nginx.conf", tmp_path / "socket"
    file.write_text(CONFIG.format(folder=tmp_path, port=rig.address[1]))
    process = subprocess.Popen([str(NGINX), "-e", str(tmp_path / "error.log"), "-c", str(file)])
    clients: list[RawClient] = []

    def connect() -> RawClient:
        client = RawClient.__new__(RawClient)
        client.socket = socket.socket(socket.AF_UNIX)
        client.socket.settimeout(GUARD)
        client.buffer, client.host = b"", b"localhost"
        while True:
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            try:
                client.socket.connect(str(place))
            except (FileNotFoundError, ConnectionRefusedError):
                continue  # it has only just been started
            clients.append(client)
            return client

    yield connect
    for client in clients:
        client.leave()
    process.terminate()
    process.wait(GUARD)


def test_requests_pass(rig, through_nginx):
    rig.engine.answer = lambda _: JSON_OK
    client = through_nginx()
    for _ in range(3):
        assert client.ask(b'{"model":"a"}').body == b"{}"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nX: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nTransfer_Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nContent-Length: 0\r\n\r\n",
        b"Content-Length: 0\r\nX: %d\r\nContent-Length: 5\r\n\r\n",
        b"Content-Length: %d\r\nConnection: Content-Length\r\n\r\n",
        b"Content-Length: %d\r\n\r\n",
    ],
)
def test_no_request_is_hidden_in_anothers_body(rig, through_nginx, framing):
    rig.engine.answer = lambda _: JSON_OK
    client = through_nginx()
    # Whoever believes the length sees one body that is no JSON; whoever does not sees a request behind it.
    client.send(ASK_HEAD + framing % (len(HIDDEN) + 5 * (b"0\r\n" in framing)) + HIDDEN)
    answer = client.read()
    client.socket.shutdown(socket.SHUT_WR)
    assert answer.status >= 400
    assert b"HTTP/1.1 200" not in client.rest()
    assert rig.other.asked.empty()
    assert not rig.events.of("queued")


@pytest.mark.parametrize(
    "chunks",
    [
        b"%x\r\n{}\r\n0\r\n\r\n",
        b"0x%x\r\n{}\r\n0\r\n\r\n",
        b"%x;a=\n\r\n{}\r\n0\r\n\r\n",
        b"%x \r\n{}\r\n0\r\nX: y\r\n\r\n",
        b"ffffffffffffffff%x\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_no_request_is_hidden_in_chunks(rig, through_nginx, chunks):
    body = chunks.replace(b"{}", HIDDEN) % len(HIDDEN)
    client = through_nginx()
    client.send(ASK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert client.read().status >= 400
    assert rig.other.asked.empty()
    assert not rig.events.of("queued")
