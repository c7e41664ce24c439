"""Traffic is played against real engines, and its swaps and waits are those of the events."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from anvil_mux.lab.report import CLIENTS_HEAD
from tests.docker.conftest import Stack
from tests.docker.served import ENDLESS, PATIENCE, eventually, served
from tests.lab.again import REQUESTS, SESSION, check, recorded, sent
from tests.running import Running

SESSIONS = """
{"workload": "turns", "models": {"x": {"load_seconds": 1}, "y": {"load_seconds": 1}}, "resident": ["x"]}
{"session": 1, "at": 0, "model": "x", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "y", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "x", "seconds": 1}
{"session": 1, "think": 0, "model": "x", "seconds": 1}
""".lstrip()
NAMES = ["--model", "x=model-1", "--model", "y=model-2"]


def replayed(stack: Stack, url: str, *words: str) -> str:
    """What a replay against a server prints."""
    command = [sys.executable, "-m", "anvil_mux", "replay", "--url", url, *words]
    env = {**stack.engine.env, "XDG_STATE_HOME": str(stack.file.parent)}
    done = subprocess.run(command, env=env, timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def replay(stack: Stack, mux: Running, *words: str) -> list[dict[str, Any]]:
    """The rows of a replay against an anvil-mux."""
    rows: list[dict[str, Any]] = json.loads(replayed(stack, url_of(mux), *words, "--json"))
    return rows


def url_of(mux: Running) -> str:
    return f"http://127.0.0.1:{mux.port}"


def plain(stack: Stack, model: str) -> str:
    """Start the model's llama-server without anvil-mux, and return its address."""
    stack.compose("up", "-d", model)
    url = f"http://{stack.compose('port', model, '8080').strip()}"

    def is_well() -> bool:
        try:
            with urlopen(f"{url}/health") as answer:
                return bool(answer.status == 200)
        except HTTPError as refused:
            refused.close()
            return False
        except OSError:
            return False

    eventually(is_well)
    return url


def test_sessions_are_played_against_llama_servers_and_beside_their_simulation(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2, services={"model-1": ENDLESS, "model-2": ENDLESS})
    workload, requests = tmp_path / "w.jsonl", tmp_path / "requests.csv"
    workload.write_text(SESSIONS)
    lengths = ["--tokens-per-second", "40", "--prompt-tokens", "60", "--csv", str(requests)]
    with served(stack) as mux:
        # The compose file is found, since the server runs here.
        measured, simulated = replay(stack, mux, "--trace", str(workload), *NAMES, *lengths)
    assert (measured["requests"], measured["swaps"], measured["failed"]) == (4, 2, 0)
    assert (simulated["at"], simulated["requests"], simulated["swaps"]) == ("simulated", 4, 2)
    assert measured["clients"]["cache_hit_ratio"] is not None
    rows = list(csv.DictReader(requests.read_text().splitlines()))
    assert [row["tokens"] for row in rows] == ["20", "20", "40", "40"]
    # The words of a prompt are as many as the tokenizer, which the warm-up learned of, makes that length of.
    assert all(abs(int(row["prompt_tokens"]) - 60) <= 4 for row in rows)
    assert [float(row["waited"]) > 0 for row in rows] == [False, True, True, False]


def test_a_trace_of_prompts_shares_its_prefixes_in_a_real_cache(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1, slots=1, services={"model-1": ENDLESS})
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"trace": "grows", "block_tokens": 64, "seconds": 100}\n'
        '{"session": 1, "at": 0, "in": 130, "out": 4, "blocks": "1-2"}\n'
        '{"session": 1, "at": 0, "in": 258, "out": 4, "blocks": "1-4"}\n'
        '{"session": 1, "at": 0, "in": 386, "out": 4, "blocks": "1-6"}\n'
    )
    words = ["--trace", str(trace), "--model", "model-1", "--speed", "1000", "--seed", "1"]
    with served(stack) as mux:
        [measured] = replay(stack, mux, *words)
    assert (measured["requests"], measured["failed"]) == (3, 0)
    # 128 tokens of the second and 256 of the third were there: of 774 together, but for where words end.
    assert 0.4 < measured["clients"]["cache_hit_ratio"] < 0.55


ALONE = """
{"workload": "alone", "models": {"x": {"load_seconds": 1}}, "resident": ["x"]}
{"session": 1, "at": 0, "model": "x", "seconds": 0.5}
{"session": 1, "think": 0, "model": "x", "seconds": 1}
""".lstrip()


def test_an_anvil_mux_and_a_llama_server_are_asked_in_turns(llamacpp_compose, tmp_path):
    """The same engine on both sides, so that both answer with as many tokens."""
    ours, theirs = [llamacpp_compose(tmp_path, models=1, services={"model-1": ENDLESS}) for _ in range(2)]
    workload, requests = tmp_path / "w.jsonl", tmp_path / "requests.csv"
    workload.write_text(ALONE)
    url = plain(theirs, "model-1")
    words = ["--trace", str(workload), "--model", "model-1", "--tokens-per-second", "40", "--repeat", "2"]
    with served(ours) as mux:
        shown = replayed(ours, url_of(mux), *words, "--against", url, "--csv", str(requests))
    names = [each.removeprefix("http://") for each in (url_of(mux), url)]
    rows = list(csv.DictReader(requests.read_text().splitlines()))
    runs = [(repeat, names[at]) for repeat, at in (("0", 0), ("0", 1), ("1", 1), ("1", 0))]
    assert [(row["repeat"], row["at"]) for row in rows] == [run for run in runs for _ in range(2)]
    assert [(row["status"], row["tokens"]) for row in rows] == [("200", "20"), ("200", "40")] * 4
    assert [bool(row["waited"]) for row in rows] == [row["at"] == names[0] for row in rows]
    told = [line.split() for line in shown.splitlines() if line.startswith("alone")]
    assert [line[1] for line in told] == [names[0], "simulated", names[1], *names, "RATIO"]
    first, second, ratio = [float(line[2:][CLIENTS_HEAD[2:].index("TOKENS/S")]) for line in told[-3:]]
    assert second / first == pytest.approx(ratio, abs=0.01)


def test_a_server_that_refuses_everybody_costs_the_other_nothing(llamacpp_compose, tmp_path):
    """A llama-server whose context is too short has the model, and answers none of these prompts."""
    short = "llama-server -m /m/tiny.gguf --alias model-1 --host 0.0.0.0 --port 8080 -c 256 -np 1"
    ours, theirs = [
        llamacpp_compose(tmp_path, models=1, services={"model-1": special})
        for special in ({}, {"command": short.split()})
    ]
    workload = tmp_path / "w.jsonl"
    workload.write_text(ALONE)
    url = plain(theirs, "model-1")
    words = ["--trace", str(workload), "--model", "model-1", "--tokens-per-second", "40", "--warm-up", "0"]
    words += ["--prompt-tokens", "100"]
    with served(ours) as mux:
        rows = replay(ours, mux, *words, "--against", url, "--repeat", "2")
    seen = [(row["repeat"], row["clients"]["requests"], row["errors"]) for row in rows if row["clients"]]
    refused = {"400 exceed_context_size_error": 2}
    assert seen == [(0, 2, {}), (0, 2, refused), (1, 2, refused), (1, 2, {})]


def test_the_clients_of_a_log_come_again(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2, services={"model-1": ENDLESS, "model-2": ENDLESS})
    workload, log = tmp_path / "w.jsonl", tmp_path / "events.jsonl"
    workload.write_text(SESSION.replace('"a"', '"model-1"').replace('"b"', '"model-2"'))
    with served(stack, "--event-log", str(log)) as mux:

        def play(name: str, *traffic: str) -> Path:
            table = tmp_path / name
            how = ["--tokens-per-second", "1000", "--warm-up", "0", "--csv", str(table)]
            [measured] = [row for row in replay(stack, mux, *traffic, *how) if row["at"] != "simulated"]
            assert (measured["requests"], measured["failed"]) == (REQUESTS, 0)
            return table

        first = sent(play("first.csv", "--trace", str(workload)))
        day = recorded(mux, log, REQUESTS)
        again = sent(play("again.csv", "--log", str(log)))
    assert [int(row["tokens"]) for row in first] == [250, 500, 100, 300, 200]
    check(first, day, again, 1000)
