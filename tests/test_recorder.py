"""What the library that is preloaded into real engines writes down, and what it does not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accounting import read_record
from tests.docker.load_containers import build_recorder

pytestmark = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")

ENGINE = """
import socket
def connection():
    here, there = socket.socketpair()
    def exchange(asked, *answer):
        there.sendall(asked)
        here.recv(4096)
        for piece in answer:
            here.sendall(piece)
    return here, there, exchange

HEAD = b"POST / HTTP/1.1\\r\\nX-Request-ID: load-%d\\r\\n\\r\\n"
WHOLE = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n"
CHUNKED = b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
"""


def recorded(folder: Path, script: str) -> dict[str, list[str]]:
    """By id, what was written of an engine that did this."""
    build_recorder(folder / "made")
    record = folder / "made" / "record"
    preloaded = {"LD_PRELOAD": str(folder / "made" / "recorder.so"), "LOAD_MODEL": "m"}
    environ = {**os.environ, **preloaded, "LOAD_RECORD": str(record)}
    subprocess.run([sys.executable, "-c", ENGINE + script], env=environ, check=True, timeout=60)
    found = read_record(record)
    assert all(each.model == "m" for entries in found.values() for each in entries)
    return {id: [each.what for each in entries] for id, entries in found.items()}


def test_what_came_was_answered_and_was_sent_is_written_down_once_each(tmp_path):
    script = """
here, there, exchange = connection()
exchange(HEAD % 7, WHOLE, b"{}")
exchange(HEAD % 8, CHUNKED, b"e\\r\\ndata: [DONE]\\n\\n\\r\\n")
"""
    whole = ["received", "answered", "sent"]
    assert recorded(tmp_path, script) == {"load-7": whole, "load-8": whole}


def test_an_id_that_comes_in_two_pieces_is_one(tmp_path):
    script = """
here, there, exchange = connection()
exchange(b"X-Request-ID: load-1")
exchange(b"23\\r\\n\\r\\n")
"""
    assert recorded(tmp_path, script) == {"load-123": ["received"]}


def test_what_is_refused_or_cut_is_not_answered(tmp_path):
    script = """
here, there, exchange = connection()
exchange(HEAD % 7, b"HTTP/1.1 400 Bad Request\\r\\nContent-Length: 2\\r\\n\\r\\n")
exchange(HEAD % 8, CHUNKED, b"5\\r\\ndata:\\r\\n")
"""
    assert recorded(tmp_path, script) == {"load-7": ["received"], "load-8": ["received"]}


def test_what_is_drained_from_a_connection_that_ends_was_never_received(tmp_path):
    script = """
here, there, exchange = connection()
here.shutdown(socket.SHUT_WR)
exchange(HEAD % 7)
number = here.fileno()
here.close()
there.close()
again, there, exchange = connection()
again, there = (again, there) if again.fileno() == number else (there, again)
there.sendall(HEAD % 8)
again.recv(4096)
"""
    assert recorded(tmp_path, script) == {"load-8": ["received"]}
