"""Real SDKs against a mux whose models load slowly, fail to load, are evicted and die within an answer.

Their user sees text, or an error that says what happened: never silence, an empty success, or half an
answer that looks like a whole one. `bin/test clients` makes the environments that they live in.

The clients live in one process per language. Each of the histories is lived through by all of them side by
side, on a GPU of its own, and then looked at client by client.
"""

import itertools
import json
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import Running, seen, serving

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACE = Path(os.environ.get("ANVIL_CLIENTS", ""))
GUARD = 240.0
PORT_TAKEN = "Address already in use"
"""Somebody else on this machine took the port that was free a moment ago."""
FEW = 7
"""As many tokens as an answer has of itself."""

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif("ANVIL_CLIENTS" not in os.environ, reason="ANVIL_CLIENTS names no folder of clients"),
]

WHOLE = [
    *("py openai", "py anthropic", "py ollama", "py litellm", "py langchain"),
    *("js openai", "js anthropic", "js ollama", "js ai"),
]
STREAMS = [
    *("py openai-stream", "py openai-async", "py anthropic-stream", "py ollama-stream"),
    *("py litellm-stream", "py langchain-async"),
    *("js openai-stream", "js anthropic-stream", "js ollama-stream", "js ai-stream"),
]
ALL = WHOLE + STREAMS
ANTHROPIC = [client for client in ALL if "anthropic" in client]
NEVER_RETRY = [client for client in ALL if "ollama" in client]

Outcome = dict[str, Any]
Outcomes = Mapping[str, "Future[Outcome]"]


class Clients:
    """The clients of one language, in one process; any number of questions at once."""

    def __init__(self, *command: str) -> None:
        environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self._asked: dict[int, Future[Outcome]] = {}
        self._ids = itertools.count()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, client: str, url: str, model: str, most: int) -> Future[Outcome]:
        number = next(self._ids)
        asked = self._asked[number] = Future()
        question = {"id": number, "client": client, "url": url, "model": model, "most": most}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return asked

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            outcome = json.loads(line)
            self._asked.pop(outcome.pop("id")).set_result(outcome)
        for asked in tuple(self._asked.values()):
            asked.set_exception(ConnectionError("the clients' process has ended"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()


class House:
    """A running mux, and the clients that ask it."""

    def __init__(self, mux: Running, clients: Mapping[str, Clients]) -> None:
        self.mux = mux
        self._clients = clients

    def ask(self, clients: Sequence[str], model: str, tokens: int = FEW) -> Outcomes:
        url = f"http://127.0.0.1:{self.mux.port}"
        names = {client: client.split() for client in clients}
        return {
            client: self._clients[kind].ask(name, url, model, tokens)
            for client, (kind, name) in names.items()
        }

    def load(self, model: str) -> None:
        """``model`` is resident, also if a port was taken on a busy machine and its first load failed."""
        until = time.monotonic() + GUARD
        while (answer := self.mux.chat(model, max_tokens=1))[0] != 200:
            assert time.monotonic() < until, answer

    def leases(self, model: str, count: int) -> int:
        """How many ask ``model`` now, once these are ``count``."""
        return seen(lambda: self.mux.get("/healthz")["models"][model]["leases"], lambda n: n == count)


def engine(
    model: str, gpu: str, *more: str, tokens: int = 2000, load: float = 0.1, **environment: str
) -> dict[str, Any]:
    program = "tests/clients/frail-engine" if environment else "bin/demo-engine"
    flags = ["--model", model, "--load-seconds", str(load), "--tokens-per-second", str(tokens)]
    return {
        "command": [program, *flags, *more],
        "working_dir": str(ROOT),
        "environment": environment,
        "x-anvil": {"gpus": [gpu]},
    }


def failing(model: str, gpu: str, script: str) -> dict[str, Any]:
    return {**engine(model, gpu), "command": ["sh", "-c", script]}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("clients")
    frail = {"FRAIL_DIES_AFTER": "3"}
    services = {
        "quick": engine("quick", "0"),
        "slow": engine("slow", "0", load=2.5),
        "short": engine("short", "1"),
        "long": engine("long", "1", tokens=40),
        "steady": engine("steady", "2", tokens=2),
        "urgent": engine("urgent", "2"),
        "frail": engine("frail", "3", tokens=50, **frail),
        "frail-stream": engine("frail-stream", "4", tokens=50, **frail, FRAIL_ANSWERS=str(len(STREAMS))),
        "frail-curl": engine("frail-curl", "9", tokens=50, **frail),
        "broken": failing("broken", "5", "echo no such file; exit 1"),
        "doomed": failing("doomed", "6", "sleep 2; echo out of memory; exit 1"),
        "plain": engine("plain", "7", FRAIL_LACKS="/v1/messages"),
        "hapless": failing("hapless", "8", "sleep 2; echo out of memory; exit 1"),
    }
    settings = {
        "runtime": "process",
        "project": f"clients-{secrets.token_hex(4)}",
        "policy": "eager",
        "loading_grace": 0.3,
        "drain_timeout": 0.5,
    }
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": settings, "services": services}))
    clients = {
        "py": Clients(str(PLACE / "python/bin/python"), str(HERE / "ask.py")),
        "js": Clients(str(PLACE / "node/node"), str(PLACE / "node/ask.mjs")),
    }
    try:
        with serving(file, state=folder) as mux:
            yield House(mux, clients)
    finally:
        for each in clients.values():
            each.close()


@pytest.fixture(scope="module")
def at_a_slow_load(house: House) -> Outcomes:
    house.load("quick")
    return house.ask(ALL, "slow")


@pytest.fixture(scope="module")
def at_failing_loads(house: House) -> Mapping[str, Outcomes]:
    return {model: house.ask(ALL, model) for model in ("broken", "doomed")}


@pytest.fixture(scope="module")
def at_a_death(house: House) -> Outcomes:
    return {**house.ask(WHOLE, "frail"), **house.ask(STREAMS, "frail-stream")}


@pytest.fixture(scope="module")
def cut_off(house: House) -> Outcomes:
    """Their streams are under way, with minutes to go, when their model is evicted."""
    house.load("steady")
    outcomes = house.ask(STREAMS, "steady", 1000)
    assert house.leases("steady", len(STREAMS)) == len(STREAMS)
    house.load("urgent")
    return outcomes


@pytest.fixture(scope="module")
def put_out(house: House) -> Outcomes:
    """Their model is evicted before the first byte of their answers, and can be had again."""
    house.load("long")
    outcomes = house.ask(WHOLE, "long", 300)
    assert house.leases("long", len(WHOLE)) == len(WHOLE)
    house.load("short")
    return outcomes


def said(model: str) -> str:
    return f"This is {model}. You said: Say hello."


@pytest.mark.parametrize("client", ALL)
def test_a_load_is_waited_for(at_a_slow_load, house, client):
    outcome = at_a_slow_load[client].result(GUARD)
    if PORT_TAKEN in outcome.get("message", ""):
        outcome = house.ask([client], "slow")[client].result(GUARD)
    assert outcome == {"text": said("slow")}


@pytest.mark.parametrize("client", ANTHROPIC)
def test_an_engine_without_anthropics_route_is_none_the_less_its(house, client):
    assert house.ask([client], "plain")[client].result(GUARD) == {"text": said("plain")}


@pytest.mark.parametrize("client", ALL)
@pytest.mark.parametrize(("model", "why"), [("broken", "no such file"), ("doomed", "out of memory")])
def test_a_load_that_fails_is_an_error_that_says_why(at_failing_loads, client, model, why):
    outcome = at_failing_loads[model][client].result(GUARD)
    assert "text" not in outcome, outcome
    assert why in outcome["message"], outcome


@pytest.mark.parametrize("client", ALL)
def test_an_engine_that_dies_within_its_answer_is_an_error(at_a_death, client):
    outcome = at_a_death[client].result(GUARD)
    assert "text" not in outcome, outcome
    assert outcome["message"]


@pytest.mark.parametrize("client", STREAMS)
def test_a_stream_that_is_cut_off_for_another_model_is_an_error(cut_off, client):
    outcome = cut_off[client].result(GUARD)
    assert "text" not in outcome, outcome
    assert "was evicted for" in outcome["message"], outcome


@pytest.mark.parametrize("client", WHOLE)
def test_whoever_is_put_out_without_a_byte_succeeds_by_asking_again(put_out, client):
    outcome = put_out[client].result(GUARD)
    if client in NEVER_RETRY:
        assert "was evicted for" in outcome["message"], outcome
    else:
        assert outcome.get("text", "").endswith(" 293"), outcome


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize(("model", "code"), [("quick", 0), ("frail-curl", 18), ("hapless", 18)])
def test_curl_tells_a_whole_stream_from_a_cut_one(house, model, code):
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    url = f"http://127.0.0.1:{house.mux.port}/v1/chat/completions"
    done = subprocess.run(
        ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert ('"error"' in done.stdout) == (code != 0)
