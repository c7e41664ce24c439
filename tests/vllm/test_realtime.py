"""A real vLLM that listens on the websocket /v1/realtime, asked by OpenAI's client through anvil-mux.

Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM and torchvision, which this model of vLLM imports.
What it hears in the sound is noise, as its weights are made up; the socket and its events are real.
"""

import base64
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from websockets.exceptions import ConnectionClosedError

from tests.running import Running, seen, serving

PYTHON = os.environ.get("ANVIL_VLLM_PYTHON", "")
ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = 900.0
FLAGS = (
    "--load-format dummy --enforce-eager --max-model-len 2048 --dtype float32 --host 127.0.0.1 --port $$PORT"
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
SECOND = bytes(2 * 16_000)
"""Silence, as vLLM wants it: 16 bits, 16 kHz."""


def can_listen() -> bool:
    needs = "from torchvision.transforms.v2 import functional"
    return subprocess.run([PYTHON, "-c", needs], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="ANVIL_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.skipif(bool(PYTHON) and not can_listen(), reason="ANVIL_VLLM_PYTHON has no torchvision"),
    pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager"),
]


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("realtime")
    model = folder / "model"
    subprocess.run([PYTHON, ROOT / "tests/real/tiny_asr_model.py", model], check=True, timeout=GUARD)
    serve = (
        f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name inside {FLAGS}"
    )
    services = {
        "ears": {
            "command": serve,
            "environment": ENVIRONMENT,
            "x-anvil": {"engine": "vllm", "gpus": ["0"], "load_timeout": GUARD},
        },
        "other": {
            "command": f"{ROOT}/bin/demo-engine --model other --load-seconds 0.1",
            "x-anvil": {"gpus": ["0"]},
        },
    }
    settings = {"runtime": "process", "policy": "eager", "drain_timeout": 0.5}
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"name": "ears", "x-anvil": settings, "services": services}))
    with serving(file, state=folder) as running:
        yield running


@contextmanager
def listening(mux: Running) -> Iterator[Any]:
    """A socket on which the model has been told to listen."""
    url = f"http://127.0.0.1:{mux.port}/v1"
    patience = {"open_timeout": None}
    with (
        closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0)) as client,
        client.realtime.connect(model="ears", websocket_connection_options=patience) as connection,
    ):
        assert told(connection)["type"] == "session.created"
        connection.send({"type": "session.update", "model": "inside"})
        connection.send({"type": "input_audio_buffer.commit"})
        yield connection


def told(connection: Any) -> dict[str, Any]:
    """The next event; vLLM's have fields that OpenAI's do not."""
    found: dict[str, Any] = json.loads(connection.recv_bytes())
    return found


def say(connection: Any, seconds: int) -> None:
    sound = base64.b64encode(SECOND * seconds).decode()
    connection.send({"type": "input_audio_buffer.append", "audio": sound})


def error_of(connection: Any) -> ConnectionClosedError:
    try:
        while True:
            told(connection)
    except ConnectionClosedError as error:
        return error


def test_what_is_said_is_written_down_as_it_comes(mux):
    with listening(mux) as connection:
        assert mux.get("/healthz")["models"]["ears"]["leases"] == 1
        say(connection, 2)
        connection.send({"type": "input_audio_buffer.commit", "final": True})
        events = [told(connection)]
        while events[-1]["type"] == "transcription.delta":
            events.append(told(connection))
        *deltas, done = events
        assert (done["type"], done["text"]) == ("transcription.done", "".join(e["delta"] for e in deltas))
        assert done["usage"]["completion_tokens"] == 64
    assert seen(lambda: mux.get("/healthz")["models"]["ears"]["leases"], lambda count: not count) == 0


def test_whoever_listens_is_drained_and_told_that_another_model_is_wanted(mux):
    with listening(mux) as connection:
        say(connection, 5)
        assert told(connection)["type"] == "transcription.delta"
        assert mux.chat("other")[0] == 200
        error = error_of(connection)
    assert error.rcvd
    assert error.rcvd.code == 1012
    assert "ears was evicted for other" in error.rcvd.reason


def test_whoever_listens_is_told_that_the_engine_was_killed(mux):
    with listening(mux) as connection:
        say(connection, 5)
        assert told(connection)["type"] == "transcription.delta"
        os.kill(engine(mux), signal.SIGKILL)
        error = error_of(connection)
    assert error.rcvd
    assert (error.rcvd.code, error.rcvd.reason) == (1011, "The engine of ears broke off the connection.")


def engine(mux: Running) -> int:
    """The process that anvil-mux started."""
    children = Path(f"/proc/{mux.process.pid}/task").glob("*/children")
    started = [int(pid) for each in children for pid in each.read_text().split()]
    [found] = [pid for pid in started if b"--served-model-name" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found
