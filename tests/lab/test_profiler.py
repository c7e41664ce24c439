"""How fast an engine is: a file of measurements, and what makes one."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest

from anvil_mux.cli import main as cli
from anvil_mux.config.values import Profile, read_profile
from anvil_mux.errors import BackendError
from anvil_mux.lab.player import PlayedServer
from anvil_mux.lab.profiler import OUTPUT, Profiler, Streamed, measure
from anvil_mux.routing import pipeline, routing
from anvil_mux.routing.routing import Replica, RoutingMemory, Work

MADE = Profile(
    ttft=((0.0, 0.0), (1000.0, 100.0), (2000.0, 300.0)),
    tpot=((1, ((100.0, 10.0), (1000.0, 12.0))), (4, ((100.0, 16.0), (1000.0, 24.0)))),
    chunk=2000,
)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (500, 50.0), (1000, 100.0), (1500, 200.0), (2000, 300.0), (4500, 650.0)],
)
def test_the_first_token_lies_on_the_measured_line_chunk_by_chunk(tokens, expected):
    assert MADE.first_token(tokens, 0, 0) == pytest.approx(expected)


def test_answers_under_way_slow_each_chunk_down():
    assert MADE.first_token(2500, 4, 400) == pytest.approx(300.0 + 50.0 + 2 * 16.0)


@pytest.mark.parametrize("beside", [0.0, 30.0])
@pytest.mark.parametrize("cached", [0, 300, 1000])
@pytest.mark.parametrize("tokens", [1000, 1700, 2000])
def test_what_is_computed_in_the_time_of_a_prompt_is_the_prompt(tokens, cached, beside):
    assert cached + MADE.computed(cached, MADE.prefill(cached, tokens, beside), beside) == tokens


def test_a_prompt_whose_beginning_is_cached_takes_what_it_takes_longer_than_that():
    assert MADE.prefill(1000, 2000) == 200.0
    assert MADE.prefill(1000, 2000, beside=16.0) == 200.0 + 16.0 / 2
    assert MADE.computed(1000, 100.0) == 500


def test_of_prompts_longer_than_was_measured_nothing_is_predicted():
    assert MADE.prefill(1900, 2001) == math.inf
    assert MADE.computed(2001, 500.0) == MADE.computed(0, 500.0, math.inf) == MADE.computed(0, -5.0) == 0
    assert MADE.computed(0, 9000.0) == 2000


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
def test_further_tokens_lie_between_what_was_measured(batch, each, expected):
    assert MADE.next_token(batch, each) == pytest.approx(expected)


def file(**changes: Any) -> str:
    return json.dumps(
        {
            "ttft": {"results": [{"tokens_num": 1000, "p50": 100.0}, {"tokens_num": 500, "p50": 60.0}]},
            "tpot": {"results": [{"batch_size": 1, "tokens_per_request": 100, "p50": 10.0}]},
            **changes,
        }
    )


def test_a_file_is_read_in_any_order():
    made = read_profile(file(metadata={"max_num_batched_tokens": 4096}))
    assert made.ttft == ((0.0, 0.0), (500.0, 60.0), (1000.0, 100.0))
    assert made.tpot == ((1, ((100.0, 10.0),)),)
    assert made.chunk == 4096


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold ttft.results"),
        (file(tpot={}), "must hold tpot.results"),
        (file(ttft={"results": [{"tokens_num": 3}]}), "p50 must be a number from 0 to"),
        (file(ttft={"results": [{"tokens_num": 3, "p50": -1}]}), "p50 must be a number"),
        (file(ttft={"results": [{"tokens_num": 0, "p50": 1}]}), "two measurements of the same point"),
        (file(metadata={"max_num_batched_tokens": "many"}), "max_num_batched_tokens must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text, why):
    with pytest.raises(ValueError, match=why):
        read_profile(text)


def test_where_more_was_measured_quicker_both_take_what_lies_between():
    """On a quiet GPU one answer and two take nearly the same time; where more looks quicker, nobody packs."""
    rows = [(1, 100, 10.0), (1, 900, 12.0), (2, 100, 9.0), (2, 500, 9.5), (4, 100, 14.0), (4, 900, 11.0)]
    results = [{"batch_size": b, "tokens_per_request": t, "p50": p} for b, t, p in rows]
    prompts = [{"tokens_num": 100, "p50": 60.0}, {"tokens_num": 200, "p50": 50.0}]
    made = read_profile(file(tpot={"results": results}, ttft={"results": prompts}))
    assert made.ttft == ((0.0, 0.0), (100.0, 55.0), (200.0, 55.0))
    assert made.tpot == (
        (1, ((100.0, 9.5), (500.0, 10.25), (900.0, 11.5))),
        (2, ((100.0, 9.5), (500.0, 10.25))),
        (4, ((100.0, 12.5), (500.0, 12.5), (900.0, 12.5))),
    )


def test_less_never_takes_longer_than_more_whatever_was_measured():
    draw = random.Random(5)
    for _ in range(200):
        rows = [
            {"batch_size": batch, "tokens_per_request": tokens, "p50": draw.uniform(1, 9)}
            for batch in draw.sample((1, 2, 4, 8), draw.randint(1, 4))
            for tokens in draw.sample((100, 200, 400, 800, 1600), draw.randint(1, 5))
        ]
        made = read_profile(file(tpot={"results": rows}))
        most = max(size for size, _ in made.tpot)
        for tokens in range(50, 1700, 75):
            times = [made.next_token(batch, tokens) for batch in range(1, most + 1)]
            longer = [made.next_token(batch, tokens + 75) for batch in range(1, most + 1)]
            assert all(less <= more + 1e-9 for less, more in zip(times, longer, strict=True))
            finite = [time for time in times if time < math.inf]
            assert all(less <= more + 1e-9 for less, more in pairwise(finite))


def test_slo_refuses_what_would_come_too_late_and_takes_the_quickest_of_the_others():
    slow = MADE._replace(ttft=((0.0, 0.0), (2000.0, 5200.0)))
    fast, late = Replica("fast", profile=MADE), Replica("late", profile=slow)
    policy, work = pipeline.build("slo"), Work(tokens=800)
    choice = routing.choose(policy, work, (late, fast), RoutingMemory())
    assert choice is not None
    assert (choice.backend, choice.reason) == ("fast", "predicted_ttft 80, num_requests 0")
    busy = late._replace(prefill_tokens=1300)
    choice = routing.choose(policy, work, (busy, fast), RoutingMemory())
    assert choice is not None
    assert choice.removed == (("late", "metric predicted_ttft"),)
    crowded = fast._replace(decode_batch=4, decode_tokens=400)
    assert routing.choose(policy, work, (busy, crowded), RoutingMemory()) is None


# Measuring


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as are asked for; a prompt's words are its tokens."""

    server: Engine

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        tokens = len(asked["prompt"].split()) * self.server.tokens_per_word
        status = (
            404
            if asked["model"] != "m"
            else 400
            if tokens + asked["max_tokens"] > self.server.context
            else 200
        )
        self.send_response(status)
        self.send_header("X-Anvil-Backend", self.server.backends.pop(0) if self.server.backends else "")
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"prompt_tokens": tokens}}).encode()
        self.wfile.write(b"data: %b\n\ndata: [DONE]\n\n" % usage)

    def do_GET(self) -> None:
        known = self.server.slots is not None and self.path == "/props?model=m"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"total_slots": self.server.slots}).encode())

    def log_message(self, *words: object) -> None:
        pass


class Engine(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[dict[str, Any]] = []
        self.backends: list[str] = []
        self.tokens_per_word = 1
        self.context = 10_000
        self.slots: object = None


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def profiler(engine: Engine, model: str = "m") -> Profiler:
    return Profiler(PlayedServer(engine.url), model)


def test_a_measured_profile_can_be_read_and_has_the_engines_own_counts(engine):
    said: list[str] = []
    found = measure(
        profiler(engine), said.append, prompts=(100, 400), batches=(1, 3), lengths=(200,), repeat=2
    )
    assert [row["tokens_num"] for row in found["ttft"]["results"]] == [100, 400]
    made = read_profile(json.dumps(found))
    assert [batch for batch, _ in made.tpot] == [1, 3]
    assert [x for x, _ in made.tpot[0][1]] == [200 + OUTPUT // 2]
    assert made.chunk == 400
    assert len(said) == 4
    prompts = [asked["prompt"] for asked in engine.asked]
    assert len(set(prompts)) == len(prompts) == 1 + (1 + 4) + (1 + 2 + 6)


@pytest.mark.parametrize("tokens_per_word", [1, 4])
def test_prompts_have_the_length_that_was_asked_for_whatever_the_tokenizer(engine, tokens_per_word):
    engine.tokens_per_word = tokens_per_word
    found = measure(profiler(engine), print, prompts=(128, 2048), batches=(1,), lengths=(64,), repeat=1)
    assert [row["tokens_num"] for row in found["ttft"]["results"]] == [128, 2048]


def test_of_what_the_engine_has_no_context_for_the_longest_that_it_has_is_measured(engine):
    engine.context, said = 2048, []
    found = measure(
        profiler(engine),
        said.append,
        prompts=(128, 512, 2048, 8192),
        batches=(1, 2),
        lengths=(128, 2048, 8192),
        repeat=1,
    )
    prompts = [row["tokens_num"] for row in found["ttft"]["results"]]
    assert prompts[:2] == [128, 512]
    assert 0.95 * 2048 < prompts[2] <= 2047
    each = [(row["batch_size"], row["tokens_per_request"] - OUTPUT // 2) for row in found["tpot"]["results"]]
    assert [batch for batch, _ in each] == [1, 1, 2, 2]
    assert 0.95 * (2048 - OUTPUT) < each[1][1] == each[3][1] <= 2048 - OUTPUT
    made = read_profile(json.dumps(found))
    assert math.isfinite(made.next_token(2, 1900))
    assert math.isinf(made.next_token(2, 2049))
    assert sum("tokens and more are left out" in line for line in said) == 2


def test_a_longest_that_was_asked_for_anyway_is_measured_once(engine):
    engine.context = 251
    found = measure(
        profiler(engine), print, prompts=(100, 248, 255), batches=(1,), lengths=(200, 206), repeat=1
    )
    assert [row["tokens_num"] for row in found["ttft"]["results"]] == [100, 248]
    assert [row["tokens_per_request"] - OUTPUT // 2 for row in found["tpot"]["results"]] == [200]


def test_an_engine_that_has_no_context_for_any_of_it_is_quoted(engine):
    engine.context = 70
    with pytest.raises(BackendError, match="m answered 400"):
        measure(profiler(engine), print, prompts=(100,))
    with pytest.raises(BackendError, match="m answered 400"):
        measure(profiler(engine), print, prompts=(50,), batches=(1,), lengths=(100,))


def test_several_tokens_in_a_piece_are_so_many_tokens():
    """As vLLM sends them with --stream-interval, and every engine that guesses ahead."""
    moments = [10.0, 10.4, 10.8, 11.2]
    one, four = Streamed(9.0, moments, tokens=4), Streamed(9.0, moments, tokens=16)
    assert one.between_tokens(10.0, 11.2) == pytest.approx(0.4)
    assert four.between_tokens(10.0, 11.2) == pytest.approx(0.1)
    assert Streamed(9.0, moments).between_tokens(10.0, 11.2) == pytest.approx(0.4)
    assert Streamed(9.0, moments[:1]).between_tokens(10.0, 11.2) is None


def test_more_than_the_engine_answers_at_once_is_left_out(engine):
    engine.slots, said = 2, []
    found = measure(profiler(engine), said.append, prompts=(100,), batches=(1, 2, 4), lengths=(64,), repeat=1)
    assert [row["batch_size"] for row in found["tpot"]["results"]] == [1, 2]
    assert said[-1] == "4 at once and more are left out: the engine has 2 slots"


@pytest.mark.parametrize("slots", [None, "many", 0])
def test_an_engine_that_does_not_say_how_much_it_answers_at_once_is_tried(engine, slots):
    engine.slots = slots
    found = measure(profiler(engine), print, prompts=(100,), batches=(1, 8), lengths=(64,), repeat=1)
    assert [row["batch_size"] for row in found["tpot"]["results"]] == [1, 8]


def test_two_replicas_are_not_measured_as_one(engine):
    engine.backends = ["a; why", "a; why", "b; why"]
    with pytest.raises(BackendError, match="a and b both answer for m: stop all but one"):
        measure(profiler(engine), print, prompts=(100,), batches=(1,), lengths=(64,))


def test_two_that_share_an_answer_are_not_measured_as_one(engine):
    engine.backends = ["a; slo_adaptive: predicted_tpot 3; prefill by b"]
    with pytest.raises(BackendError, match="b and a share the answers of m: stop one of them"):
        measure(profiler(engine), print, prompts=(100,), batches=(1,), lengths=(64,))


def test_an_engine_that_refuses_is_quoted(engine):
    with pytest.raises(BackendError, match="other answered 404"):
        measure(profiler(engine, "other"), print)
    with pytest.raises(BackendError, match="other answered 404"):
        profiler(engine, "other").at_once(["a", "b"], 1)


def test_an_engine_that_is_not_there_is_said():
    with pytest.raises(BackendError, match="cannot be measured"):
        Profiler(PlayedServer("http://127.0.0.1:9"), "m").ask("a", 1)


def test_a_server_with_tls_is_not_asked_in_the_clear(engine):
    with pytest.raises(BackendError, match="cannot be measured"):
        Profiler(PlayedServer(engine.url.replace("http", "https")), "m").ask("a", 1)
    assert engine.asked == []


def test_the_command_writes_a_file_that_a_service_can_name(engine, tmp_path, capsys):
    target = tmp_path / "fast.json"
    words = ["profile", "m", "--url", engine.url, "--prompts", "100", "--batches", "1", "--lengths", "64"]
    assert cli.main([*words, "--repeat", "1", "-o", str(target)]) == 0
    assert read_profile(target.read_text()).tpot[0][0] == 1
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
