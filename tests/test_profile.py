"""How fast an engine is: a file of measurements, and what makes one."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from anvil_mux import cli, pipeline, profile, routing
from anvil_mux.errors import BackendError
from anvil_mux.profiler import Profiler, measure
from anvil_mux.routing import Memory, Replica, Work

MADE = profile.Profile(
    ttft=((0.0, 0.0), (1000.0, 100.0), (2000.0, 300.0)),
    tpot=((1, ((100.0, 10.0), (1000.0, 12.0))), (4, ((100.0, 16.0), (1000.0, 24.0)))),
    chunk=2000,
)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (500, 50.0), (1000, 100.0), (1500, 200.0), (2000, 300.0), (4500, 650.0)],
)
def test_the_first_token_lies_on_the_measured_line_chunk_by_chunk(tokens: int, expected: float) -> None:
    assert MADE.first_token(tokens, 0, 0) == pytest.approx(expected)


def test_answers_under_way_slow_each_chunk_down() -> None:
    assert MADE.first_token(2500, 4, 400) == pytest.approx(300.0 + 50.0 + 2 * 16.0)


@pytest.mark.parametrize(
    ("batch", "each", "expected"),
    [
        (1, 100, 10.0),
        (1, 550, 11.0),
        (4, 1000, 24.0),
        (2.5, 100, 13.0),
        (2.5, 1000, 18.0),
        (1, 5, 10.0),
        (0.5, 100, 10.0),
        (5, 100, math.inf),
        (1, 1001, math.inf),
        (2, 1001, math.inf),
    ],
)
def test_further_tokens_lie_between_what_was_measured(batch: float, each: float, expected: float) -> None:
    assert MADE.next_token(batch, each) == pytest.approx(expected)


def file(**changes: Any) -> str:
    return json.dumps(
        {
            "ttft": {"results": [{"tokens_num": 1000, "p50": 100.0}, {"tokens_num": 500, "p50": 60.0}]},
            "tpot": {"results": [{"batch_size": 1, "tokens_per_request": 100, "p50": 10.0}]},
            **changes,
        }
    )


def test_a_file_is_read_in_any_order() -> None:
    made = profile.read(file(metadata={"max_num_batched_tokens": 4096}))
    assert made.ttft == ((0.0, 0.0), (500.0, 60.0), (1000.0, 100.0))
    assert made.tpot == ((1, ((100.0, 10.0),)),)
    assert made.chunk == 4096


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold ttft.results"),
        (file(tpot={}), "must hold tpot.results"),
        (file(ttft={"results": [{"tokens_num": 3}]}), "p50 must be a number of at least 0"),
        (file(ttft={"results": [{"tokens_num": 3, "p50": -1}]}), "p50 must be a number"),
        (file(ttft={"results": [{"tokens_num": 0, "p50": 1}]}), "two measurements of the same point"),
        (file(metadata={"max_num_batched_tokens": "many"}), "max_num_batched_tokens must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        profile.read(text)


def test_slo_refuses_what_would_come_too_late_and_takes_the_quickest_of_the_others() -> None:
    slow = MADE._replace(ttft=((0.0, 0.0), (2000.0, 5200.0)))
    fast, late = Replica("fast", profile=MADE), Replica("late", profile=slow)
    policy, work = pipeline.build("slo"), Work(tokens=800)
    choice = routing.choose(policy, work, (late, fast), Memory())
    assert choice is not None
    assert (choice.backend, choice.reason) == ("fast", "predicted_ttft 80, num_requests 0")
    busy = late._replace(prefill_tokens=1300)
    choice = routing.choose(policy, work, (busy, fast), Memory())
    assert choice is not None
    assert choice.removed == (("late", "metric predicted_ttft"),)
    crowded = fast._replace(decode_batch=4, decode_tokens=400)
    assert routing.choose(policy, work, (busy, crowded), Memory()) is None


# Measuring


class Engine(BaseHTTPRequestHandler):
    """Streams as many tokens as are asked for; a prompt's words are its tokens."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        self.send_response(200 if asked["model"] == "m" else 404)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = {"prompt_tokens": len(asked["prompt"].split())}
        self.wfile.write(
            b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        )

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url(engine: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{engine.server_address[1]}"


def test_a_measured_profile_can_be_read_and_has_the_engines_own_counts(engine: ThreadingHTTPServer) -> None:
    said: list[str] = []
    found = measure(
        Profiler(url(engine), "m"), said.append, prompts=(100, 400), batches=(1, 3), lengths=(200,), repeat=2
    )
    assert [row["tokens_num"] for row in found["ttft"]["results"]] == [50, 200]
    made = profile.read(json.dumps(found))
    assert [batch for batch, _ in made.tpot] == [1, 3]
    assert [x for x, _ in made.tpot[0][1]] == [100 + 24]
    assert len(said) == 4
    prompts = [asked["prompt"] for asked in engine.asked]  # type: ignore[attr-defined]
    assert len(set(prompts)) == len(prompts) == 1 + 4 + 2 + 6


def test_an_engine_that_refuses_is_quoted(engine: ThreadingHTTPServer) -> None:
    with pytest.raises(BackendError, match="other answered 404"):
        measure(Profiler(url(engine), "other"), print)
    with pytest.raises(BackendError, match="other answered 404"):
        Profiler(url(engine), "other").at_once(["a", "b"], 1)


def test_an_engine_that_is_not_there_is_said() -> None:
    with pytest.raises(BackendError, match="cannot be measured"):
        Profiler("http://127.0.0.1:9", "m").ask("a", 1)


def test_the_command_writes_a_file_that_a_service_can_name(
    engine: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "fast.json"
    words = ["profile", "m", "--url", url(engine), "--prompts", "100", "--batches", "2", "--lengths", "64"]
    assert cli.main([*words, "--repeat", "1", "-o", str(target)]) == 0
    assert profile.read(target.read_text()).tpot[0][0] == 2
    assert "x-anvil: {profile: " in capsys.readouterr().err
    compose = tmp_path / "compose.yaml"
    compose.write_text(
        "x-anvil: {runtime: process, routing: slo}\n"
        "services:\n"
        "  a: {command: [a], x-anvil: {model: m, profile: fast.json}}\n"
        "  b: {command: [b], x-anvil: {model: m}}\n"
    )
    assert cli.main(["check", str(compose)]) == 78
    assert capsys.readouterr().err.count("error") == 1  # b has none
    target.write_text("{}")
    assert cli.main(["check", str(compose)]) == 78
    assert "compose.yaml:3: services.a.x-anvil.profile: " in capsys.readouterr().err
