"""`anvil-mux replay` against a real anvil-mux with stand-in engines, and against what is none."""

import csv
import json
from collections.abc import Iterator
from typing import Any

import pytest

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


@pytest.fixture
def free_port() -> Any:
    import socket

    with socket.socket() as bound:  # not listening, so nobody is there
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
