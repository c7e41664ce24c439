"""Compressed bodies: what is unpacked, and what is refused."""

import gzip
import json
import zlib

import pytest

from anvil_mux.errors import BadRequest, TooLarge
from anvil_mux.protocol import foreign
from tests.fake_engine import JSON_OK

BODY = b'{"model":"a","messages":[]}'
PACKED = gzip.compress(BODY, mtime=0)  # the same in every process that collects tests


@pytest.mark.parametrize(
    ("name", "packed"),
    [("gzip", PACKED), ("X-GZip", PACKED), ("deflate", zlib.compress(BODY))],
)
def test_a_body_is_unpacked(name, packed):
    assert foreign.unpacked(packed, name, len(BODY)) == BODY


@pytest.mark.parametrize("packed", [b"", b"nonsense", PACKED[:-4], PACKED + b"x", BODY])
def test_a_body_that_is_cut_or_goes_on_or_is_none_is_refused(packed):
    with pytest.raises(BadRequest, match="gzip") as caught:
        foreign.unpacked(packed, "gzip", 1000)
    assert caught.value.status == 400


def test_a_bomb_is_not_unpacked():
    bomb = gzip.compress(bytes(50 << 20))
    with pytest.raises(TooLarge, match="1000 bytes"):
        foreign.unpacked(bomb, "gzip", 1000)


@pytest.mark.parametrize("name", ["br", "gzip, gzip", ""])
def test_another_coding_is_refused_with_what_is_understood(name):
    with pytest.raises(BadRequest, match="understood: gzip, deflate") as caught:
        foreign.unpacked(BODY, name, 1000)
    assert caught.value.status == 415


def test_where_zstd_is_missing_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(foreign.CODINGS, "zstd", None)
    with pytest.raises(BadRequest, match=r"anvil-mux\[zstd\]"):
        foreign.unpacked(BODY, "zstd", 1000)


def test_an_engine_gets_the_body_unpacked(rig):
    client = rig.client()
    for _ in range(2):
        client.post(gzip.compress(BODY), extra=b"Content-Encoding: gzip\r\n")
        asked = rig.engine.next()
        assert asked.body == BODY
        assert b"content-encoding" not in asked.head.lower()
        asked.send(JSON_OK)
        assert client.read().status == 200


def test_what_the_model_is_called_is_found_in_the_unpacked_body(rig):
    client = rig.client()
    client.post(gzip.compress(b'{"model":"org/b"}'), extra=b"Content-Encoding: gzip\r\n")
    asked = rig.other.next()
    assert json.loads(asked.body) == {"model": "b-inside"}
    asked.send(JSON_OK)
    assert client.read().status == 200


def test_a_compressed_form_is_refused(rig):
    client = rig.client()
    assert (
        client.ask(gzip.compress(BODY), path=b"/v1/images/edits", extra=b"Content-Encoding: gzip\r\n").status
        == 415
    )
