"""`anvil-mux replay` against a real anvil-mux with stand-in engines, and against what is none."""

import csv
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from anvil_mux.cli.main import main
from tests.cli.demo import compose
from tests.running import Running, serving


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("replay")
    with serving(compose(folder, load_seconds=0.3, tokens_per_second=400), state=folder) as running:
        running.folder = folder
        yield running


@pytest.fixture
def url(mux: Running) -> str:
    return f"http://127.0.0.1:{mux.port}"


SESSION = """
{"workload": "w", "models": {"a": {"load_seconds": 1}, "b": {"load_seconds": 1}}, "resident": ["a"]}
{"session": 1, "at": 0, "model": "a", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "b", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "a", "seconds": 0.5}
""".lstrip()


def test_a_session_is_played_and_stands_beside_its_simulation(mux, url, tmp_path, capsys):
    workload, requests = tmp_path / "w.jsonl", tmp_path / "requests.csv"
    workload.write_text(SESSION)
    words = ["--trace", str(workload), "--tokens-per-second", "20", "--csv", str(requests)]
    simulate = ["--simulate", str(mux.folder / "compose.yaml")]
    assert main(["replay", "--url", url, *words, *simulate, "--json"]) == 0
    measured, simulated = json.loads(capsys.readouterr().out)
    assert measured["requests"] == simulated["requests"] == measured["clients"]["requests"] == 3
    assert measured["swaps"] == simulated["swaps"] == 2
    assert measured["failed"] == measured["severed"] == 0
    assert measured["clients"]["ttft"]["mean"] > measured["wait_mean_seconds"] > 0
    assert 0 < measured["serving_ratio"] < 1
    assert (measured["script"], simulated["at"]) == ("w", "simulated")
    waits = measured["wait_mean_seconds"], simulated["wait_mean_seconds"]
    assert simulated["difference"]["ratio"] == pytest.approx(waits[0] / waits[1] - 1)
    rows = list(csv.DictReader(requests.read_text().splitlines()))
    assert [(row["model"], row["tokens"], row["prompt_tokens"]) for row in rows] == [
        (model, "10", "32") for model in "aba"
    ]
    assert [float(row["waited"]) > 0 for row in rows] == [False, True, True]


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--profile", "single", "--model", "x"], 1, "does not serve x, but a, b; say with --model x=NAME"),
        (["--trace", "nowhere.jsonl"], 1, "nowhere.jsonl: no such file; shipped: "),
    ],
)
def test_what_cannot_be_played_is_said_in_a_sentence(url, words, code, why, capsys):
    assert main(["replay", "--url", url, *words]) == code
    assert why in capsys.readouterr().err


def test_a_server_that_does_not_answer(capsys, free_port):
    assert main(["replay", "--url", f"127.0.0.1:{free_port}", "--profile", "single"]) == 3
    assert "nobody answers at http://127.0.0.1:" in capsys.readouterr().err


BREAKS_OFF = """
import http.server, os, socketserver
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "a"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
        self.wfile.write(b'data: {"error": {"type": "server_error", "message": "context exceeded"}}\\n\\n')
socketserver.TCPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


def test_the_server_tells_of_answers_that_broke_off(tmp_path, capsys):
    engine = {"command": [sys.executable, "-c", BREAKS_OFF], "x-anvil": {"gpus": ["0"]}}
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": {"runtime": "process"}, "services": {"a": engine}}))
    with serving(file, state=tmp_path) as mux:
        words = ["--profile", "single", "--limit", "2", "--model", "a", "--warm-up", "0"]
        main(["replay", "--url", f"http://127.0.0.1:{mux.port}", *words])
    said = capsys.readouterr()
    assert "server_error: context exceeded" in said.out + said.err
    assert "did not tell" not in said.err


@pytest.fixture
def free_port() -> Any:
    import socket

    with socket.socket() as bound:  # not listening, so nobody is there
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
