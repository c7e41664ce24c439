"""The warm-up: in which order models are asked, and what is taken from their answers."""

import math
from collections.abc import Sequence

import pytest

from anvil_mux.errors import MuxError
from anvil_mux.lab.engines import EnginePace
from anvil_mux.lab.player import PlayedAnswer
from anvil_mux.lab.replay import UsualAnswer, warm_up
from anvil_mux.lab.workload import Prompt
from tests.lab.test_player import answered


class Engines:
    """Engines that make so many tokens a second after 0.1 s; a word of a prompt is two.

    Requests of one moment are answered in batches of ``at_once``.
    """

    def __init__(self, fast: float, slower_each: float = 0.0, at_once: int = 8) -> None:
        self.fast = fast
        self.slower_each = slower_each
        self.at_once = at_once
        self.asked: list[tuple[str, int]] = []

    def __call__(self, requests: Sequence[Prompt]) -> list[PlayedAnswer]:
        return [self.answer(each, number, len(requests)) for number, each in enumerate(requests)]

    def answer(self, request: Prompt, number: int, together: int) -> PlayedAnswer:
        self.asked.append((request.model, request.output))
        made = min(together, self.at_once)
        ended = (0.1 + (request.output - 1) / self.fast) * (1 + self.slower_each * (made - 1))
        ended *= 1 + number // self.at_once
        answer = answered(request, 0, 0.0, 0.1 if request.output > 1 else math.nan, ended)
        answer.prompt_tokens = 2 * request.tokens
        return answer


def test_each_model_is_asked_and_those_that_are_to_be_resident_last():
    engines = Engines(20.0)
    paces = warm_up(engines, ["a", "b", "c"], ["a"], {})
    assert [model for model, output in engines.asked if output == 1] == ["a", "b", "c", "a"]
    assert paces["b"].tokens_per_second == pytest.approx(20.0)
    assert paces["b"].first_seconds == pytest.approx(0.1)
    assert paces["b"].tokens_per_word == 2.0
    assert paces["b"].seconds(21) == pytest.approx(1.1)


def test_an_engine_is_measured_over_an_answer_as_long_as_those_of_the_script():
    engines = Engines(1000.0)
    warm_up(engines, ["a"], [], {"a": UsualAnswer(2.0)})
    lengths = [output for _, output in engines.asked]
    assert lengths[:3] == [1, 24, 8 * 24]
    assert lengths[-11:] == lengths[-1:] * 11
    assert 2.0 / 1.25 <= lengths[-1] / 1000.0 <= 2.5


def test_an_answer_of_given_length_is_asked_for_once():
    engines = Engines(1000.0)
    warm_up(engines, ["a"], [], {"a": UsualAnswer(2.0, 40.0)})
    assert engines.asked == [("a", 1), *[("a", 80)] * 11]


def test_an_engine_may_be_slower_with_others():
    assert warm_up(Engines(20.0, 0.5), ["a"], [], {})["a"].batching == pytest.approx((0.5, math.inf))
    assert warm_up(Engines(20.0), ["a"], [], {})["a"].batching == (0.0, math.inf)


def test_an_engine_may_make_few_answers_at_a_time():
    assert warm_up(Engines(20.0, 0.5, at_once=2), ["a"], [], {})["a"].batching == pytest.approx((0.5, 2))
    assert warm_up(Engines(20.0, at_once=1), ["a"], [], {})["a"].batching == (0.0, 1)


def test_each_model_is_loaded_as_often_as_asked_for():
    engines = Engines(20.0)
    warm_up(engines, ["a", "b"], ["a"], {}, rounds=2)
    assert [model for model, output in engines.asked if output == 1] == ["a", "b", "a", "b", "a"]


def test_of_several_rounds_the_middle_one_counts():
    engines = Engines(20.0, 0.5)

    def ask(requests: Sequence[Prompt]) -> list[PlayedAnswer]:
        if requests[0].output == 1:  # a round begins
            engines.fast, engines.slower_each = next(moments)
        return engines(requests)

    moments = iter([(40.0, 0.9), (1.0, 0.1), (20.0, 0.5)])
    found = warm_up(ask, ["a"], [], {"a": UsualAnswer(2.0, 20.0)}, rounds=3)["a"]
    assert found == pytest.approx((0.1, 20.0, 2.0, 0.5, math.inf))


def test_a_model_that_does_not_answer_ends_it():
    def ask(requests: Sequence[Prompt]) -> list[PlayedAnswer]:
        error = {"status": 503, "code": "load_failed", "message": "no such file"}
        return [PlayedAnswer(0, "a", "", 0.0, 0.0, math.nan, 1.0, **error)]

    with pytest.raises(MuxError, match="a could not be asked: 503 load_failed: no such file"):
        warm_up(ask, ["a"], [], {})


def test_the_first_token_is_part_of_an_answer():
    assert EnginePace(0.5, 10.0).seconds(1) == 0.5
