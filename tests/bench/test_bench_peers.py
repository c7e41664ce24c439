"""What `bin/bench peers` computes of what clients saw, and what clients do; in virtual time."""

import math
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.lab.player import PlayedAnswer
from anvil_mux.lab.workload import Prompt
from tests.baton import BatonClock
from tests.bench import bench_peers
from tests.bench.bench_peers import Engine, Row, measured, medians, options, play, summary, traffic

Times = Callable[[Prompt], tuple[float, float]]


def answers(scenario: str, times: Times, *words: str) -> tuple[list[PlayedAnswer], Row]:
    """The answers to a scenario, and its figures; ``times``: seconds to the first token, and from it on."""
    given = options(["--seconds", "10", "--answer", "2", *words])
    clock: Any = BatonClock()
    made = traffic(scenario, given)
    found: list[PlayedAnswer] = []

    def prepare(request: Prompt, number: int, now: Callable[[], float]) -> Callable[[], PlayedAnswer]:
        def ask() -> PlayedAnswer:
            sent, (wait, rest) = now(), times(request)
            clock.sleep(wait)
            first = now()
            clock.sleep(rest)
            asked = (number, request.model, request.session, request.at, sent, first, now())
            return PlayedAnswer(*asked, 200, "", tokens=request.output)

        return ask

    clock.run(lambda: found.extend(play(made, 10.0, prepare, clock)))
    return found, measured(scenario, made, found, given.seconds)


def test_clients_ask_again_until_the_time_is_over_and_who_waits_then_is_followed_to_the_end():
    _, row = answers("2+1", lambda request: (1.0, 2.0) if request.model == "a" else (20.0, 2.0))
    waits = [1.0] * 8 + [20.0]
    assert row == {
        "answers": 6,
        "mean s": pytest.approx(sum(waits) / 9),
        "RMS s": pytest.approx(math.sqrt((8 * 1.0 + 400.0) / 9)),
        "P50 s": pytest.approx(1.0),
        "P95 s": pytest.approx(20.0),
        "longest s": pytest.approx(20.0),
        "least/most": 0.0,
        "unserved": True,
        "broken": 0,
        "swaps": 1,
    }


def test_the_worst_served_client_is_put_beside_the_best_served_one():
    _, row = answers("1+1", lambda request: (0.0, 1.0) if request.model == "a" else (1.5, 1.0))
    assert (row["answers"], row["least/most"], row["unserved"]) == (14, pytest.approx(4 / 10), False)


def test_clients_of_all_sides_ask_for_answers_as_long_as_the_pace_says():
    found, _ = answers("3+2+1", lambda _: (0.0, 10.0), "--answer", "3")
    assert sorted(each.session for each in found) == ["a0", "a1", "a2", "b0", "b1", "c0"]
    assert {each.tokens for each in found} == {30}


def test_a_swap_is_from_the_end_of_an_answer_to_the_first_token_of_the_other_model():
    found, row = answers("swap", lambda request: (1.5 if request.model == "a" else 0.5, 0.2))
    assert "".join(each.model for each in found) == "babababab"
    assert row == {"swap s": pytest.approx(1.0), "longest s": pytest.approx(1.5), "broken": 0}


def test_of_a_long_stream_it_is_told_whether_it_was_finished_and_how_long_the_other_waited():
    found, row = answers("stream", lambda request: (0.0, 48.0) if request.model == "a" else (47.0, 2.0))
    assert row == {
        "finished": True,
        "stream s": pytest.approx(48.0),
        "b waited s": pytest.approx(47.0),
        "b after the stream s": pytest.approx(1.0),
        "broken": 0,
    }
    cut = [replace(each, status=0, code="drain_timeout") if each.model == "a" else each for each in found]
    row = bench_peers.stream_figures(cut)
    assert (row["finished"], row["broken"]) == (False, 1)


def test_what_failed_is_broken_and_waited_for_nothing_that_is_counted():
    found, _ = answers("1+1", lambda _: (1.0, 1.0))
    failed = replace(found[0], status=502, first=math.nan, session="b0", model="b")
    row = bench_peers.client_figures(["a0", "b0"], [found[1], failed], 10.0)
    assert (row["answers"], row["broken"], row["longest s"]) == (1, 1, pytest.approx(1.0))
    assert row["swaps"] == 0


def test_rounds_become_medians_with_the_worst_wait_and_the_sum_of_what_broke():
    common = {"scenario": "4+4", "through": "router"}
    rounds: list[Row] = [
        {**common, "answers": 100, "longest s": 40.0, "unserved": False, "broken": 0},
        {**common, "answers": 90, "longest s": 62.0, "unserved": True, "broken": 2},
        {**common, "answers": 110, "longest s": 44.0, "unserved": False, "broken": 1},
    ]
    row = medians(rounds)
    assert row == {
        **common,
        "answers": 100,
        "longest s": 44.0,
        "worst s": 62.0,
        "unserved": "1 of 3",
        "broken": 3,
    }
    others = [{**each, "through": "eager"} for each in rounds]
    mixed = [rounds[0], others[0], others[1], rounds[1], rounds[2], others[2]]
    assert [each["through"] for each in summary(mixed)] == ["router", "eager"]


def test_whoever_starts_a_llama_server_gives_it_the_same_options(tmp_path):
    engine = Engine(("chroot", "root", "llama-server"), tmp_path, "/m")
    assert engine.route(["a", "b"], 80)[3:] == [
        *("--models-preset", "/m/models.ini", "--models-max", "1", "--host", "127.0.0.1", "--port", "80")
    ]
    preset = ConfigParser()
    preset.read_string((tmp_path / "models.ini").read_text().partition("\n")[2])
    command = engine.serve("b", "127.0.0.1", "81")
    assert command[:9] == [
        *engine.command,
        *("--model", preset["b"]["model"], "--alias", "b"),
        "--host",
        "127.0.0.1",
    ]
    words = [word for name, value in preset["*"].items() for word in (f"--{name}", value) if word != "true"]
    assert command[11:] == words


@pytest.mark.parametrize("words", [("--only", "4"), ("--only", "4+0"), ("--through", "nginx")])
def test_a_scenario_or_a_program_that_there_is_not_is_refused(words):
    with pytest.raises(SystemExit):
        options(words)
