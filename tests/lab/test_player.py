"""Requests are sent at their moments, whatever the answers do; in virtual time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.lab import workload
from anvil_mux.lab.player import PlayedAnswer, Player, Script, of_trace, of_workload
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import Prompt, Workload
from tests.baton import BatonClock


def answered(request: Prompt, number: int, sent: float, first: float, ended: float) -> PlayedAnswer:
    return PlayedAnswer(
        number=number,
        model=request.model,
        session=request.session,
        due=request.at,
        sent=sent,
        first=first,
        ended=ended,
        status=200,
        code="",
        id=f"id-{number}",
        tokens=request.output,
    )


def play(made: Script, seconds: Callable[[Prompt], float], most: int = 512) -> list[PlayedAnswer]:
    """The answers to a script by a server that takes so long for each request."""
    clock: Any = BatonClock()
    answers: list[PlayedAnswer] = []

    def prepare(request: Prompt, number: int, now: Callable[[], float]) -> Callable[[], PlayedAnswer]:
        def ask() -> PlayedAnswer:
            sent = now()
            clock.sleep(seconds(request))
            return answered(request, number, sent, now(), now())

        return ask

    def main() -> None:
        answers.extend(Player(prepare, clock, most=most).play(made))

    clock.run(main)
    return answers


def of(made: Workload, **settings: Any) -> Script:
    return of_workload(made, dict.fromkeys(made.load_seconds, 10.0), **settings)


def test_an_open_loop_sends_at_its_moments_however_long_answers_take():
    made = Workload("w", {"m": 1.0}, tuple(Arrival(at, "m", 1.0) for at in (0.0, 1.0, 1.5, 4.0)))
    assert [round(each.sent, 6) for each in play(of(made), lambda _: 10.0)] == [0.0, 1.0, 1.5, 4.0]


def test_a_session_thinks_after_its_answer_and_speed_shortens_that():
    follow = workload.Sessions(
        {"s": [Arrival(4.0, "m", 1.0, sender="s"), Arrival(2.0, "m", 1.0, sender="s")]}
    )
    made = Workload("w", {"m": 1.0}, (Arrival(6.0, "m", 1.0, sender="s"),), lambda: follow)
    sent = [each.sent for each in play(of(made, speed=2.0), lambda _: 10.0)]
    assert sent == pytest.approx([3.0, 3.0 + 10.0 + 2.0, 3.0 + 10.0 + 2.0 + 10.0 + 1.0])


def test_rounds_follow_when_all_of_the_one_before_are_answered():
    sent = [each.sent for each in play(of(workload.PROFILES["bursty"](0)), lambda _: 1.0)]
    assert sent == pytest.approx([0.0] * 10 + [1.0] * 10 + [2.0] * 10 + [3.0] * 10)


def test_clients_without_a_pause_stop_at_the_moment_of_the_workload_by_the_speed():
    answers = play(of(workload.PROFILES["two-clients"](0), speed=10.0), lambda _: 5.0)
    assert max(each.sent for each in answers) == pytest.approx(600.0 / 10.0 - 5.0)


def test_what_is_due_beyond_the_bound_is_sent_late_and_its_time_counts_from_when_it_was_due():
    made = Workload("w", {"m": 1.0}, (Arrival(0.0, "m", 1.0), Arrival(1.0, "m", 1.0)))
    answers = play(of(made), lambda _: 10.0, most=1)
    assert [(each.due, each.sent) for each in answers] == [(0.0, 0.0), (1.0, 10.0)]


def test_a_limit_counts_what_follows_upon_answers_too():
    made = of(workload.PROFILES["balanced"](0))
    assert len(play(made.limited(7), lambda _: 1.0)) == 7
    assert len(play(made.limited(1), lambda _: 1.0)) == 1


def test_ctrl_c_leaves_the_answers_so_far():
    made = of(Workload("w", {"m": 1.0}, tuple(Arrival(float(at), "m", 1.0) for at in range(9))))
    clock: Any = BatonClock()
    players: list[Player] = []

    def prepare(request: Prompt, number: int, now: Callable[[], float]) -> Callable[[], PlayedAnswer]:
        return lambda: answered(request, number, now(), now(), now())

    def tell(done: int, under_way: int, seconds: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    def main() -> None:
        players.append(player := Player(prepare, clock))
        player.play(made, tell)

    clock.run(main)
    assert players[0].was_interrupted
    assert len(players[0].answers) == 3


def test_a_session_of_a_trace_keeps_its_moments_but_waits_for_its_answers(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"trace": "t", "block_tokens": 10, "seconds": 1000}\n'
        '{"at": 5, "in": 40, "out": 3, "blocks": "1-4"}\n'
        '{"at": 6, "in": 40, "out": 3}\n'
    )
    trace = workload.read_trace(file)
    joined = tuple(each._replace(session="s") for each in trace.alone)
    trace = replace(trace, alone=(), sessions=(joined,))
    made = of_trace(trace, "m", speed=2.0, scale=0.5)
    assert [(each.tokens, each.output) for each in made.first] == [(20, 2)]
    first, second = play(made, lambda _: 10.0)
    assert second.sent == pytest.approx(first.ended)
    first, second = play(made, lambda _: 0.1)
    assert second.sent - first.sent == pytest.approx(0.5)
