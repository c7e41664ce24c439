"""Routing policies under recorded prompts, through the router of the program itself."""

import csv
import io
import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from anvil_mux.config.values import DEFAULT_ROUTING
from anvil_mux.lab import contest, engines, report
from anvil_mux.lab.contest import Attainment, InFlightRouter, Objectives, Scenario, draw, run
from anvil_mux.lab.engines import SimulatedEngine
from anvil_mux.lab.fleet import REFUSED, PromptOutcome, simulate
from anvil_mux.lab.workload import BadWorkload, Prompt


def fields(trace: str, sessions: int = 0, seeds: int = 1) -> list[Scenario]:
    return list(draw([trace], (sessions,) if sessions else (), range(seeds), 8, SimulatedEngine()))


def mean_ttft(policy: str, every: list[Scenario]) -> float:
    return fmean(run(field, policy).latencies.ttft_mean_ms for field in every)


def test_on_short_sessions_knowing_the_work_beats_counting_requests_beats_taking_turns():
    [field] = fields("claude_code_le64k", 92)
    order = (DEFAULT_ROUTING, "least_prefill_work", "lmetric", "num_requests", "round_robin")
    means = [run(field, policy).latencies.ttft_mean_ms for policy in order]
    assert means == sorted(means)


def test_on_long_sessions_prefill_work_waits_a_fifth_of_taking_turns_and_the_default_less_than_that():
    every = fields("claude_code_le131k", 70, seeds=2)
    default, work, turns = (
        mean_ttft(p, every) for p in (DEFAULT_ROUTING, "least_prefill_work", "round_robin")
    )
    assert default < work
    assert 0.15 < work / turns < 0.25


def test_without_sessions_the_default_waits_less_than_the_least_prefill_work():
    every = fields("mooncake_conversation_600s")
    assert mean_ttft(DEFAULT_ROUTING, every) < mean_ttft("least_prefill_work", every)


def test_every_policy_gets_the_same_requests_and_answers_all_of_them():
    [field] = fields("claude_code_le64k", 8)
    for policy in contest.choose_policies("all"):
        answers = run(field, policy).answers
        assert sorted(answer.prompt for answer in answers) == sorted(field.prompts)


def test_the_same_run_gives_the_same_row():
    [field] = fields("claude_code_le64k", 20)
    assert run(field, "power_of_two").row() == run(field, "power_of_two").row()


def test_a_trace_without_sessions_is_run_once_whatever_the_seeds():
    assert [field.seed for field in fields("mooncake_conversation_600s", seeds=5)] == [0]


# What the router knows


def two_beginnings(**engine: Any) -> Scenario:
    """Prompts of two blocks of 4,096 tokens, the second and the third with the first's beginning."""
    ids = ((1, 2), (1, 2), (1, 3), (4, 5))
    prompts = [Prompt(50.0 * number, 8192, 10, blocks) for number, blocks in enumerate(ids)]
    return Scenario("t", 0, 0, prompts, 4096, 2, SimulatedEngine(**engine))


def test_requests_are_read_from_their_bytes_and_not_from_what_the_trace_knows():
    first, same, half, other = two_beginnings().works.values()
    for work in (first, same, half, other):
        assert 2.8 * 8192 < work.size < 4.5 * 8192
        assert work.tokens == round(work.size / 4) != 8192
        assert work.block_tokens == 512
    assert first.blocks == same.blocks
    alike = [one == another for one, another in zip(first.blocks, half.blocks, strict=False)]
    assert alike.index(False) in range(int(2.8 * 4096 / 2048), int(4.4 * 4096 / 2048) + 1)
    assert not set(first.blocks) & set(other.blocks)


def test_a_known_router_has_the_tokens_of_the_trace_and_every_answer_is_streamed():
    field = replace(two_beginnings(streamed=0.0), known=True)
    assert [work[:2] for work in field.works.values()] == [(8192, prompt.blocks) for prompt in field.prompts]
    assert all(work.stream for work in field.works.values())


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_of_some_answers_only_the_end_is_seen(share, monkeypatch):
    [field] = draw(["claude_code_le64k"], (20,), range(1), 8, SimulatedEngine(streamed=share))
    streamed = [work.stream for work in field.works.values()]
    assert fmean(streamed) == pytest.approx(share, abs=0.1)
    router = InFlightRouter("least_prefill_work", field)
    seen: list[int] = []
    monkeypatch.setattr(router._in_flight, "first_byte", lambda key, now: seen.append(key))
    for key, prompt in enumerate(field.prompts):
        assert router.choose(key, prompt, prompt.at) is not None
        router.first_byte(key, prompt.at)
    assert len(seen) == sum(streamed)


def test_the_length_of_a_token_is_learned_from_answers():
    field = two_beginnings()
    router = InFlightRouter("least_prefill_work", field)
    simulate(field.prompts, router, 2, field.block_tokens, field.engine)
    assert router._in_flight.bytes_per_token != 4.0


def test_some_engines_say_what_was_cached_and_some_do_not(monkeypatch):
    router = InFlightRouter("least_prefill_work", two_beginnings())
    heard: list[int | None] = []
    monkeypatch.setattr(router._in_flight, "ended", lambda key, **said: heard.append(said["cached_tokens"]))
    for replica in (0, 1):
        router.ended(replica, 1.0, answer(1.0, replica=replica, cached=77))
    assert heard == [None, 77]


def test_requests_that_wait_behind_others_are_taken_back_once():
    prompts = [Prompt(number / 8, 60_000, 10) for number in range(4)]
    field = Scenario("t", 0, 0, prompts, 64, 2, SimulatedEngine(streamed=1.0))
    router = InFlightRouter("least_prefill_work", field)
    for key, prompt in enumerate(prompts):
        assert router._in_flight.choose(key, field.works[prompt], ["replica-0"])
    assert router.take_back(1, 1.0) == [3, 2]
    assert [router.choose(key, prompts[key], 1.0) for key in (3, 2)] == [1, 1]
    for key in (0, 1):
        router.ended(key, 2.0, answer(1.0))
    assert router.take_back(0, 2.0) == []


# Figures


def answer(
    ttft: float, tokens: int = 100, output: int = 11, replica: int = 0, cached: int = 0
) -> PromptOutcome:
    return PromptOutcome(Prompt(0.0, tokens, output), replica, 10.0, 10.0 + ttft, 11.0 + ttft, cached)


def test_latencies_are_those_of_the_answers():
    answers = [answer(n / 10, replica=n % 3) for n in range(1, 11)]
    told = contest.latencies(answers, replicas=4)
    assert told.requests == 10
    assert told.ttft_mean_ms == pytest.approx(550)
    assert (told.ttft_p50_ms, told.ttft_p90_ms, told.ttft_p99_ms) == pytest.approx((500, 900, 1000))
    assert (told.e2e_mean_ms, told.e2e_p90_ms, told.e2e_p99_ms) == pytest.approx((1550, 1900, 2000))
    assert told.tpot_p90_ms == pytest.approx(100)
    assert told.request_balance == 4  # the fourth replica had none
    assert contest.latencies([answer(1.0, cached=75), answer(1.0)], 1).cache_hit_ratio == 0.375


def test_an_answer_of_one_token_has_no_pace():
    assert contest.latencies([answer(1.0, output=1)], 1).tpot_p90_ms == 0.0


def test_classes_are_by_the_length_of_the_input():
    lengths = (4_999, 5_000, 20_000, 50_000, 60_000)
    told = contest.classes([answer(n, tokens=tokens) for n, tokens in enumerate(lengths)])
    assert [(name, each["requests"]) for name, each in told.items()] == [
        ("warm", 1),
        ("med", 1),
        ("heavy", 1),
        ("heavy_plus", 2),
    ]
    assert told["heavy_plus"]["ttft_mean_ms"] == pytest.approx(3500)
    assert told["heavy_plus"]["ttft_p50_ms"] == pytest.approx(3000)


def test_a_row_says_which_policy_is_the_default():
    [field] = fields("claude_code_le64k", 10)
    rows = [run(field, policy).row() for policy in ("round_robin", DEFAULT_ROUTING)]
    assert [row["default"] for row in rows] == [False, True]
    assert rows[0]["trace"] == "claude_code_le64k"
    assert rows[0]["sessions"] == 10
    assert all(math.isfinite(value) for value in rows[0].values() if isinstance(value, float))


def test_the_table_compares_with_the_default_run_by_run():
    results = [
        run(field, policy)
        for field in fields("claude_code_le64k", 20, seeds=2)
        for policy in (DEFAULT_ROUTING, "round_robin")
    ]
    default, other = report.routing_table(results)
    assert default[2:4] == (f"{DEFAULT_ROUTING} (default)", "2")
    assert len(default) == len(other) == len(report.ROUTING_HEAD)
    assert default[-1] == ""
    assert other[-1].endswith("longer in 2 of 2")


def test_csv_has_a_line_for_each_run_and_columns_for_the_classes():
    [field] = fields("claude_code_le64k", 10)
    file = io.StringIO()
    report.write_routing_csv([run(field, policy) for policy in ("round_robin", "sticky")], file)
    file.seek(0)
    lines = list(csv.DictReader(file))
    assert [line["policy"] for line in lines] == ["round_robin", "sticky"]
    assert int(lines[0]["warm.requests"]) + int(lines[0]["med.requests"]) <= int(lines[0]["requests"])


def test_attainment_is_read_off_what_became_of_each_request():
    refused = PromptOutcome(Prompt(0.0, 100, 11), REFUSED, 10.0, math.inf, math.inf, 0)
    quick, late, slow = answer(1.0), answer(2.5), answer(1.0)._replace(finished=17.0)
    one_token = answer(2.0, output=1)
    found = contest.attained([quick, late, slow, one_token, refused], Objectives(ttft=2.0, tpot=0.2))
    assert found == Attainment(slo_ttft=0.6, slo_tpot=0.6, slo=0.4, refused=1)


def test_a_refused_request_has_no_latency_and_its_session_goes_on():
    prompts = [Prompt(0.0, 900_000, 10, session="s"), Prompt(1.0, 1000, 10, session="s")]
    field = Scenario("two", 0, 1, prompts, 64, 2, SimulatedEngine(kv_tokens=1_000_000))
    result = run(field, "slo", kept=Objectives())
    assert [each.is_refused for each in result.answers] == [True, False]
    assert result.latencies.requests == 2
    assert result.latencies.ttft_mean_ms < 200
    assert result.attainment == Attainment(0.5, 0.5, 0.5, 1)
    assert sum(each["requests"] for each in contest.classes(result.answers).values()) == 1
    alone = run(Scenario("one", 0, 1, prompts[:1], 64, 2, field.engine), "slo", kept=Objectives())
    assert alone.latencies.ttft_mean_ms == 0.0


def test_the_table_has_columns_for_objectives_where_there_are_any():
    [field] = fields("claude_code_le64k", 20)
    kept = Objectives(ttft=0.5)
    rows = list(report.routing_table([run(field, policy, kept=kept) for policy in ("sticky", "round_robin")]))
    assert all(len(row) == len((*report.ROUTING_HEAD, *report.KEPT_HEAD)) for row in rows)
    parts = [float(row[len(report.ROUTING_HEAD)]) for row in rows]
    assert 0 < parts[1] < parts[0] < 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ttf=6", "unknown objective 'ttf'; known: ttft, tpot"),
        ("ttft=soon", "ttft must be seconds, not 'soon'"),
        ("ttft=6,tpot=0", "tpot must be more than 0 seconds, not 0"),
    ],
)
def test_what_is_no_objective_is_told(text, problem):
    with pytest.raises(ValueError, match=problem):
        contest.read_objectives(text)
    assert contest.read_objectives("tpot=0.1") == Objectives(6.0, 0.1)


# What may be asked for


def test_all_leaves_out_what_refuses_requests_for_a_prediction():
    chosen = contest.choose_policies("all", {"mine": {"selector": "round_robin"}})
    assert {"round_robin", "least_delay", "unified", "mine"} <= set(chosen)
    assert "slo" not in chosen
    assert contest.choose_policies("slo") == ("slo",)
    with pytest.raises(ValueError, match="unknown routing policy nothing"):
        contest.choose_policies("round_robin,nothing")


def test_an_engine_is_the_default_but_for_what_is_said():
    made = engines.read_engine("kv_tokens=100000,step_seconds=0.01")
    assert (made.kv_tokens, made.step_seconds, made.step_tokens) == (100_000, 0.01, 8192)
    for text, problem in [
        ("kv=1", "unknown setting 'kv' of an engine; known: ingress_seconds"),
        ("kv_tokens=much", "kv_tokens must be a number, not 'much'"),
        ("kv_tokens=-5", "kv_tokens must be 0 or more"),
    ]:
        with pytest.raises(ValueError, match=problem):
            engines.read_engine(text)


def test_a_trace_that_has_nothing_in_time_is_refused(tmp_path):
    file = tmp_path / "late.jsonl"
    file.write_text('{"trace": "late", "block_tokens": 64, "seconds": 10}\n{"at": 20, "in": 5, "out": 1}\n')
    with pytest.raises(BadWorkload, match="late has no request within 10 s"):
        list(draw([str(file)], (), range(1), 2, SimulatedEngine()))
