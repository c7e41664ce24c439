"""`replay --against`: two servers are asked in turns, and what one of them lacks costs the other nothing."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from anvil_mux.cli.main import main
from anvil_mux.lab.replay import Replay
from tests.fake_engine import SSE_HEAD, Asked, FakeEngine, chunk

TEXT = {"choices": [{"index": 0, "text": "hi", "finish_reason": None}]}
EVENTS = [b"data: %b\n\n" % each for each in (json.dumps(TEXT).encode(), b"[DONE]")]
WHOLE = b"".join([SSE_HEAD, *map(chunk, EVENTS), b"0\r\n\r\n"])


def answer(status: str, **about: object) -> bytes:
    body = json.dumps(about).encode()
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


NOTHING = answer("404 Not Found")
MODELS = answer("200 OK", data=[{"id": "a"}])
OVERLOADED = answer("503 Service Unavailable", error={"code": "overloaded"})


class TwoServers:
    """Two servers that note in one list which of them was sent what."""

    def __init__(self) -> None:
        self.engines = [FakeEngine(), FakeEngine()]
        self.says = [WHOLE, WHOLE]
        """The answer of each to every prompt."""
        self.lists = [99, 99]
        """How often each still says which models it has."""
        self.asked: list[tuple[int, Any]] = []
        for number, engine in enumerate(self.engines):
            engine.answer = lambda asked, number=number: self._answer(number, asked)

    def _answer(self, number: int, asked: Asked) -> bytes:
        if asked.head.startswith(b"POST /v1/completions "):
            self.asked.append((number, json.loads(asked.body)["prompt"]))
            return self.says[number]
        if asked.head.startswith(b"GET /v1/models "):
            self.lists[number] -= 1
            return MODELS if self.lists[number] >= 0 else OVERLOADED
        return NOTHING

    def replay(self, *words: str, profile: str = "single") -> int:
        first, second = [engine.url for engine in self.engines]
        quick = ["--limit", "2", "--speed", "1000", "--warm-up", "0", "--model", "a"]
        return main(["replay", "--url", first, "--against", second, "--profile", profile, *quick, *words])


@pytest.fixture
def two() -> Iterator[TwoServers]:
    made = TwoServers()
    yield made
    for engine in made.engines:
        engine.close()


def test_they_take_turns_in_the_other_order_each_time_and_get_the_same_prompts(two, capsys):
    assert two.replay("--repeat", "3") == 0
    assert [number for number, _ in two.asked] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    of_runs = [sorted(prompt for _, prompt in two.asked[at : at + 2]) for at in range(0, 12, 2)]
    assert of_runs[0] == of_runs[1]
    assert of_runs[2] == of_runs[3] != of_runs[0]
    assert of_runs[4] == of_runs[5]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = [engine.url.removeprefix("http://") for engine in two.engines]
    assert [line[1] for line in lines if line[:1] == ["single"]] == [*names, *names, "RATIO"]


def test_errors_of_one_are_told_beside_the_answers_of_the_other(two, capsys):
    two.says[1] = OVERLOADED
    assert two.replay("--repeat", "2", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["repeat"], row["clients"]["failed"], row["errors"]) for row in rows] == [
        (0, 0, {}),
        (0, 2, {"503 overloaded": 2}),
        (1, 2, {"503 overloaded": 2}),
        (1, 0, {}),
    ]


def test_one_that_is_gone_before_the_next_profile_does_not_cost_the_figures_so_far(two, capsys):
    two.lists[1] = 1
    assert two.replay("--json", profile="single,bursty") == 3
    out, err = capsys.readouterr()
    assert [row["script"] for row in json.loads(out)] == ["single", "single"]
    assert "answers 503 to GET /v1/models" in err


def test_ctrl_c_between_two_runs_leaves_the_figures_so_far(two, capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Replay, "_settle", interrupted)
    assert two.replay("--json") == 130
    assert [row["clients"]["requests"] for row in json.loads(capsys.readouterr().out)] == [2]
