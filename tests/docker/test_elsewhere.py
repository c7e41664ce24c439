"""Real llama-servers behind a second anvil-mux with TLS, as the server elsewhere of a first one."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docker.conftest import PROFILE, Stack
from tests.docker.served import BUSYBOX, PATIENCE, client_of, error_of, flaw_of, served, stream
from tests.proxy.test_tls import make_certificate
from tests.running import Running, begin

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")

MakeStack = Callable[..., Stack]
KEY = "k-of-near-to-far"
TOKENS = 50
BAD = {**BUSYBOX, "command": ["false"], "profiles": [PROFILE]}
"""A service that ends at once."""


@contextmanager
def far(stack: Stack) -> Iterator[tuple[Running, int]]:
    """anvil-mux with TLS on ``stack``, and its port."""
    environ = {**stack.engine.env, "ANVIL_API_KEYS": KEY}
    mux = begin(stack.file, "--on-exit", "stop", state=stack.file.parent, environ=environ)
    try:
        yield mux, int(mux.tells(r"https://127\.0\.0\.1:(\d+)")[1])
    finally:
        mux.stop()


def near(make: MakeStack, folder: Path, port: int) -> Stack:
    """Two services that fall back on one elsewhere: a real engine, and one that cannot be loaded."""

    def elsewhere(**said: str) -> dict[str, Any]:
        about = {"url": f"https://localhost:{port}/v1", "api_key_env": "FAR_KEY", "ca_file": "cert.pem"}
        return {"image": "scratch", "profiles": ["elsewhere"], "x-anvil": {**about, **said}}

    special = {
        "model-1": {"x-anvil": {"gpus": ["0"], "fallback": {"models": ["cloud"], "after": "0s"}}},
        "bad": {**BAD, "x-anvil": {"gpus": ["0"], "engine": "llamacpp", "fallback": ["cloud"]}},
        "cloud": elsewhere(served_model="model-1", aliases="gpt"),
        "second": elsewhere(served_model="model-2"),
    }
    return make(folder, models=1, services=special)


def test_streams_and_fallbacks_through_a_second_anvil_mux(llamacpp_compose, tmp_path, monkeypatch):
    monkeypatch.setenv("FAR_KEY", KEY)
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    cert, key = make_certificate(tmp_path / "far")
    shutil.copy(cert, tmp_path / "near")
    behind = llamacpp_compose(tmp_path / "far", models=2, top={"x-anvil": {"tls_cert": cert, "tls_key": key}})
    with far(behind) as (server, port):
        stack = near(llamacpp_compose, tmp_path / "near", port)
        check_that_compose_leaves_it_alone(stack)
        with served(stack) as mux, client_of(mux) as client:
            for model, theirs in (("cloud", "model-1"), ("second", "model-2"), ("gpt", "model-1")):
                assert flaw_of(stream(client, model, TOKENS), theirs, TOKENS) == ""
            assert behind.up() == {"model-1"}, "the second anvil-mux swapped for them"
            check_fallbacks(mux)
            assert flaw_of(stream(client, "model-1", TOKENS), "model-1", TOKENS) == ""
            server.stop()
            check_circuit(mux)


def check_that_compose_leaves_it_alone(stack: Stack) -> None:
    """``docker compose up`` starts nothing, with and without the profile of the models' services."""
    command = ["docker", "compose", "-f", str(stack.file), "up", "-d"]
    done = subprocess.run(command, env=stack.engine.env, timeout=PATIENCE, capture_output=True, text=True)
    assert "no service selected" in done.stderr
    stack.compose("create", "model-1")
    assert stack.up() == set()


def check_fallbacks(mux: Running) -> None:
    status, headers, text = mux.chat("bad", max_tokens=5)
    assert (status, headers.get("x-anvil-fallback")) == (200, "cloud; bad load_failed"), text
    status, headers, text = mux.chat("model-1", max_tokens=5)
    assert (status, headers.get("x-anvil-fallback")) == (200, "cloud; model-1 fell_back"), text
    mux.tells(r"cloud@cloud instead of model-1 \(fell_back\)")
    mux.tells(r"model-1: ready after")


def check_circuit(mux: Running) -> None:
    answers = [mux.chat("cloud") for _ in range(6)]
    assert [status for status, _, _ in answers] == [502] * 5 + [503]
    _, headers, text = answers[-1]
    assert error_of(text)["code"] == "circuit_open"
    assert int(headers["retry-after"]) <= 5
    assert mux.get("/healthz")["models"]["cloud"]["elsewhere"]["circuit"] == "open"
