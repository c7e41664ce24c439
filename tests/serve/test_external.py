"""The watch over external servers, and one real anvil-mux behind another, with TLS."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anvil_mux.cli.screen import models_table
from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.host.hosts import Finding, look_at_server
from anvil_mux.host.seam import CardRead
from anvil_mux.multiplexer.circuits import Circuits
from anvil_mux.protocol.cards import NOTHING_KNOWN, ModelCard
from anvil_mux.serve.polling import ExternalServers, warnings
from tests.fake_engine import Asked, FakeEngine
from tests.proxy.test_tls import make_certificate
from tests.running import Running, begin, seen, serving

GPT = Backend("gpt", "gpt", url="https://cloud.example/v1")
LIST = b'{"data":[{"id":"gpt-5"},{"id":"gpt-5-mini","context_length":4096}]}'


@pytest.fixture
def server() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


def there(server: FakeEngine, **settings: str) -> Backend:
    made = Backend("gpt", "gpt", url=f"{server.url}/openai/v1", service=Service(key="sk-ours"))
    return replace(made, **settings)


def answer(code: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (code, len(body), body)


@pytest.mark.parametrize(
    ("said", "problem", "hint"),
    [
        (answer(200, LIST), "", "does not list the model gpt; did you mean gpt-5? (set served_model)"),
        (answer(200, b"not JSON"), "", ""),
        (answer(404), "", ""),
        (answer(401), "answers 401: it refuses the API key (none: name one with api_key_env)", ""),
        (answer(503), "answers 503 to GET /openai/v1/models", ""),
    ],
)
def test_how_a_server_is(server, said, problem, hint):
    heads: list[bytes] = []

    def say(request: Asked) -> bytes:
        heads.append(request.head)
        return said

    server.answer = say
    assert look_at_server(there(server)) == Finding(problem, hint)
    assert b"authorization: Bearer sk-ours" in heads[0]
    assert heads[0].startswith(b"GET /openai/v1/models ")


def test_a_model_that_is_listed_is_well(server):
    server.answer = lambda _: answer(200, LIST)
    assert look_at_server(there(server, served_model="gpt-5-mini")) == Finding(card=ModelCard(4096))
    assert warnings([there(server, served_model="gpt-5-mini")]) == []


def test_check_warns_of_one_that_does_not_answer(server):
    server.stop_listening()
    [told] = warnings([there(server), Backend("local", "local")])
    assert told.startswith(f"service gpt: {server.url}/openai/v1 cannot be reached: ")


class Watched:
    """A watch whose clock and server the test sets."""

    def __init__(self) -> None:
        self.moment = 1000.0
        self.problem = ""
        self.card = NOTHING_KNOWN
        self.asked: list[str] = []
        self.said: list[str] = []
        clock = Clock()
        clock.now = lambda: self.moment
        self.circuits = Circuits(clock)
        self.cards: list[CardRead] = []
        self.watch = ExternalServers(self.circuits, self.said.append, ask=self._ask, read=self.cards.append)
        self.watch.take(Config((GPT, Backend("local", "local"))))

    def _ask(self, backend: Backend) -> Finding:
        self.asked.append(backend.name)
        return Finding(self.problem, card=self.card)


def test_what_its_list_says_of_the_model_is_taken_for_its_card():
    found = Watched()
    found.watch.look()
    assert found.cards == []
    found.card, found.moment = ModelCard(4096), found.moment + 100
    found.watch.look()
    assert found.cards == [CardRead("gpt", GPT.url, ModelCard(4096))]


def test_one_is_asked_at_the_start_and_when_nothing_was_heard_for_a_while():
    found = Watched()
    found.watch.look()
    found.watch.look()
    assert found.asked == ["gpt"]
    found.moment += 50
    found.circuits.begin("gpt").succeeded()
    found.moment += 50
    found.watch.look()
    assert found.asked == ["gpt"], "a request was answered meanwhile"
    found.moment += 20
    found.watch.look()
    assert found.asked == ["gpt", "gpt"]


def test_one_that_is_away_is_asked_after_each_pause_until_it_is_back():
    found = Watched()
    found.problem = "cannot be reached: refused"
    found.watch.look()
    found.watch.look()
    assert found.asked == ["gpt"]
    found.moment += 5
    found.problem = ""
    found.watch.look()
    assert found.said == [
        "gpt: its circuit is open for 5 s, since it cannot be reached: refused",
        "gpt: its circuit is closed, its server answers again",
    ]


def test_a_server_that_is_configured_anew_begins_anew():
    found = Watched()
    found.problem = "cannot be reached"
    found.watch.look()
    found.watch.take(Config((replace(GPT, url="https://other.example/v1"),)))
    assert found.circuits.of("gpt").state == "closed"


# Two real ones


FAR = """
x-anvil: {runtime: process, gpus: ["0"], tls_cert: cert.pem, tls_key: key.pem, on_exit: stop}
services:
  small:
    command: [ENGINE, --host, 127.0.0.1, --port, $$PORT, --model, small, --load-seconds, "0"]
    x-anvil: {gpus: ["0"]}
"""
NEAR = """
x-anvil: {runtime: process, gpus: ["0"], on_exit: stop}
services:
  broken: {command: [sh, -c, "echo no such model; exit 1"], x-anvil: {gpus: ["0"], fallback: gpt}}
  slow:
    command: [ENGINE, --host, 127.0.0.1, --port, $$PORT, --model, slow, --load-seconds, "600"]
    x-anvil: {gpus: ["0"], fallback: {models: [gpt], after: 0s}}
  gpt:
    x-anvil: {url: "https://localhost:PORT/v1", api_key_env: FAR_KEY, ca_file: cert.pem, served_model: small}
"""
ENGINE = str(Path(__file__).resolve().parent.parent.parent / "bin" / "demo-engine")


def wrote(folder: Path, text: str, **put: str) -> Path:
    for name, value in {"ENGINE": ENGINE, **put}.items():
        text = text.replace(name, value)
    file = folder / "compose.yaml"
    file.write_text(text)
    return file


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_one_anvil_mux_behind_another(tmp_path):
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    cert, _ = make_certificate(tmp_path / "far")
    shutil.copy(cert, tmp_path / "near")
    keys = {"ANVIL_API_KEYS": "k-of-near-to-far", "ANVIL_MUX_MACHINE": "far"}
    far = begin(wrote(tmp_path / "far", FAR), state=tmp_path / "far", environ=keys)
    try:
        port = far.tells(r"https://127\.0\.0\.1:(\d+)")[1]
        near_file = wrote(tmp_path / "near", NEAR.replace("localhost:PORT", f"localhost:{port}"))
        with serving(near_file, state=tmp_path / "near", environ={"FAR_KEY": "k-of-near-to-far"}) as near:
            check_both(near)
            far.stop()
            codes = [near.chat("gpt")[0] for _ in range(6)]
            assert codes == [502] * 5 + [503]
            assert "is refused: gpt is not asked for now" in near.get("/why?model=gpt")["sentence"]
            [row] = [line for line in models_table(near.get("/healthz")) if line.startswith("gpt")]
            assert "circuit open" in row
            near.tells("gpt: its circuit is open for 5 s, since the server of gpt cannot be reached")
    finally:
        far.stop()


def check_both(near: Running) -> None:
    status, headers, text = near.chat("gpt")
    assert (status, "x-anvil-fallback" in headers) == (200, False), text
    status, headers, text = near.chat("broken")
    assert (status, headers["x-anvil-fallback"]) == (200, "gpt; broken load_failed"), text
    status, headers, _ = near.chat("slow", stream=True)
    assert (status, headers["x-anvil-fallback"]) == (200, "gpt; slow fell_back")
    near.tells(r"gpt@gpt instead of broken \(load_failed\)")
    metrics = seen(lambda: near.request("GET", "/metrics")[2], lambda text: 'model="slow",to="gpt"' in text)
    assert 'anvil_fallbacks_total{cause="load_failed",model="broken",to="gpt"} 1.0' in metrics
    assert 'anvil_circuit_state{backend="gpt",state="closed"} 1.0' in metrics
    lines = near.get("/why?model=broken")["sentence"].splitlines()
    assert lines[0].endswith(" If it cannot be served, gpt answers instead.")
    assert lines[-1] == "no such model"
    sentence = near.get("/why?model=slow")["sentence"]
    assert sentence.endswith("If it is not served within 0 s, gpt answers instead.")
    assert near.get("/healthz")["models"]["gpt"]["elsewhere"]["circuit"] == "closed"
    [row] = [line for line in models_table(near.get("/healthz")) if line.startswith("gpt")]
    assert "elsewhere" in row
    assert "localhost:" in row
