"""Llumnix's load-balance policy as its description has it, stage by stage and in both modes.

The description is its "Policy Framework": metrics, filters and selectors, with the defaults of its flags.
"""

import pytest

from anvil_mux.routing import pipeline, routing
from anvil_mux.routing.routing import Choice, Replica, RoutingMemory, Work, choose

STAGES = ("neutral", "prefill", "decode")


def chosen(policy: object, kind: str, *replicas: Replica, tokens: int = 2000, nth: int = 0) -> Choice | None:
    made = pipeline.build(policy) if isinstance(policy, str) else compiled(policy)
    work = Work(tokens=tokens, infer_type=kind)
    return choose(made, work, replicas, RoutingMemory(choices=nth))


def compiled(written: object) -> routing.Routing:
    made, problems = pipeline.compile("mine", written)
    assert problems == []
    return made


def taken(policy: object, kind: str, *replicas: Replica, **how: int) -> str:
    choice = chosen(policy, kind, *replicas, **how)
    assert choice is not None
    return choice.backend


def removed(policy: object, kind: str, *replicas: Replica) -> dict[str, str]:
    choice = chosen(policy, kind, *replicas)
    assert choice is not None
    return dict(choice.removed)


def steps(policy: str, kind: str) -> tuple[set[str], list[str]]:
    """The filters of a stage, and the metrics of its selector."""
    made = pipeline.build(policy).pipeline(kind)
    filters = {each.name for each in made.filters} | {"failover" for _ in made.failover}
    by = made.selector.pick.keywords["by"]
    return filters, [metric.name for metric in by]


# "Metrics (typical defaults)", "Filters", "Selector": the stages of full mode

LOAD = {
    "neutral": "all_prefills_tokens_num",
    "prefill": "all_prefills_tokens_num",
    "decode": "kv_cache_usage_ratio_projected",
}


@pytest.mark.parametrize("kind", STAGES)
def test_in_full_mode_each_stage_has_its_filters_and_one_load_metric(kind):
    filters, by = steps("load_balance", kind)
    assert filters - {"infer_type"} == {"schedulability", "staleness", f"metric {LOAD[kind]}", "failover"}
    assert by == [LOAD[kind]]


def test_a_whole_request_goes_where_fewest_tokens_are_to_be_computed_whatever_is_cached():
    less = Replica("less", prefill_tokens=4000, num_requests=9)
    more = Replica("more", prefill_tokens=4001, hit_tokens=2000)
    assert taken("load_balance", "neutral", more, less) == "less"


def test_a_prompt_goes_where_fewest_tokens_are_to_be_computed():
    less = Replica("less", infer_type="prefill", prefill_tokens=400)
    more = Replica("more", infer_type="prefill", prefill_tokens=401, hit_tokens=2000)
    other = Replica("other", infer_type="decode")
    assert taken("load_balance", "prefill", more, less, other) == "less"


def test_an_answer_goes_where_the_projected_use_of_the_cache_is_least():
    fuller = Replica("fuller", infer_type="decode", kv_tokens=1000, kv_usage=0.2, prefill_tokens=300)
    emptier = Replica("emptier", infer_type="decode", kv_tokens=4000, kv_usage=0.4, prefill_tokens=300)
    other = Replica("other", infer_type="prefill", kv_tokens=4000)
    assert taken("load_balance", "decode", fuller, emptier, other) == "emptier"


@pytest.mark.parametrize(
    ("kind", "below", "at"),
    [
        ("neutral", {"prefill_tokens": 8191}, {"prefill_tokens": 8192}),
        ("prefill", {"prefill_tokens": 2047}, {"prefill_tokens": 2048}),
        ("decode", {"kv_tokens": 100, "kv_usage": 0.99}, {"kv_tokens": 100, "kv_usage": 1.0}),
    ],
)
def test_a_load_at_its_threshold_is_too_much_unless_all_have_that(kind, below, at):
    busy, full = Replica("busy", infer_type=kind, **below), Replica("full", infer_type=kind, **at)
    assert removed("load_balance", kind, full, busy) == {"full": f"metric {LOAD[kind]}"}
    choice = chosen("load_balance", kind, full)
    assert choice is not None
    assert (choice.backend, choice.passed) == ("full", "fallback")


@pytest.mark.parametrize("kind", STAGES)
def test_what_cannot_serve_or_is_stale_takes_its_failure_domain_with_it(kind):
    there = Replica("there", infer_type=kind, kv_tokens=1, failure_domain="u2")
    broken = there._replace(backend="broken", failure_domain="u1", schedulable=False)
    beside = there._replace(backend="beside", failure_domain="u1")
    silent = there._replace(backend="silent", failure_domain="", age_seconds=61.0)
    alone = there._replace(backend="alone", failure_domain="")  # that has none is in one of its own
    gone = {"broken": "schedulability", "beside": "failover", "silent": "staleness"}
    found = removed("load_balance", kind, broken, beside, silent, alone, there)
    assert {name: step for name, step in found.items() if step != "metric"} == gone
    assert chosen("load_balance", kind, broken, beside, silent) is None  # also in the fallback pass


def test_top_k_takes_any_of_the_best_few():
    fleet = [Replica(f"r{load}", prefill_tokens=load) for load in (3, 1, 2)]
    assert {taken("load_balance", "neutral", *fleet, nth=nth) for nth in range(30)} == {"r1"}
    some = {"like": "load_balance", "top_k": 2}
    assert {taken(some, "neutral", *fleet, nth=nth) for nth in range(30)} == {"r1", "r2"}


# "Lite-mode": requests and tokens, and no filter but the threshold


@pytest.mark.parametrize("kind", STAGES)
def test_in_lite_mode_each_stage_has_a_threshold_and_tokens(kind):
    filters, by = steps("load_balance_lite", kind)
    assert (filters - {"infer_type"}, by) == ({"metric num_tokens"}, ["num_tokens"])
    less = Replica("less", infer_type=kind, num_tokens=400, prefill_tokens=400, num_requests=4)
    more = Replica("more", infer_type=kind, num_tokens=500, hit_tokens=2000, num_requests=1)
    assert taken("load_balance_lite", kind, more, less) == "less"


def problems(written: object) -> list[str]:
    return [f"{'.'.join(path)}: {text}" for path, text in pipeline.compile("mine", written)[1]]


@pytest.mark.parametrize("metric", sorted(set(routing.METRICS) - routing.LITE - routing.MADE_OF_OTHERS))
def test_a_policy_for_the_mode_lite_may_go_by_requests_and_tokens_only(metric):
    written = {"mode": "lite", "selector": {"metric": {"by": ["num_requests", metric]}}}
    assert problems(written) == [
        f"selector.metric.by.1: is {metric}, which the mode lite of this policy does not know: "
        "use num_requests or num_tokens"
    ]
    assert not problems({**written, "mode": "full"})


def test_coarse_tokens_are_tokens():
    by = [{"bucket": {"of": "num_tokens"}}, {"weighted_sum": {"of": {"num_requests": 2}}}]
    assert not problems({"mode": "lite", "selector": {"metric": {"by": by}}})


# "Cache-aware scheduling": the metric of what is cached, in front of the selector's

AWARE = {"like": "load_balance", "cache_aware": True}


@pytest.mark.parametrize("kind", ["neutral", "prefill"])
def test_with_cache_aware_prompts_go_where_least_of_them_and_of_others_is_to_be_computed(kind):
    warm = Replica("warm", infer_type=kind, prefill_tokens=1000, hit_tokens=1500)
    cold = Replica("cold", infer_type=kind)
    assert taken("load_balance", kind, warm, cold) == "cold"
    assert taken(AWARE, kind, warm, cold) == "warm"  # 1,500 against 2,000
    made = compiled(AWARE).pipeline(kind).selector
    assert [each.name for each in made.pick.keywords["by"]] == [
        "cache_aware_all_prefills_tokens_num",
        "all_prefills_tokens_num",
    ]


def test_with_cache_aware_the_threshold_is_of_the_load_still():
    full = Replica("full", prefill_tokens=8192, hit_tokens=90_000)
    made = chosen(AWARE, "neutral", full, Replica("cold"), tokens=90_000)
    assert made is not None
    assert made.removed == (("full", "metric all_prefills_tokens_num"),)


def test_short_prompts_are_looked_for_in_no_cache():
    warm, cold = Replica("warm", prefill_tokens=1, hit_tokens=1024), Replica("cold")
    assert taken(AWARE, "neutral", warm, cold, tokens=1023) == "cold"
    assert taken(AWARE, "neutral", warm, cold, tokens=1024) == "warm"


def test_with_cache_aware_answers_go_where_they_did():
    made = compiled(AWARE).pipeline("decode").selector
    assert [each.name for each in made.pick.keywords["by"]] == [LOAD["decode"]]


# The switches


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"like": "load_balanse"}, "like: no policy load_balanse is shipped; did you mean load_balance?"),
        ({"like": "sticky", "selector": "round_robin"}, "selector: stands beside like: sticky"),
        ({"like": "sticky", "mode": "half"}, "mode: must be one of lite, full, not 'half'"),
        ({"like": "sticky", "predict_prefill": 1}, "predict_prefill: must be true or false, not 1"),
        ({"like": "sticky", "cache_aware": True}, "changes the selector `metric`, and this policy has anoth"),
        ({"like": "load_balance_lite", "cache_aware": True}, "goes with the mode full"),
        ({"like": "load_balance", "top_k": 0}, "top_k: must be a whole number of at least 1, not 0"),
        ({"mode": "full"}, ": must hold metrics, filters and a selector, not {'mode': 'full'}"),
        ({"selector": "round_robin", "mode": 3, "filter": 1}, "filter: unknown key; did you mean filters?"),
    ],
)
def test_what_is_wrong_with_a_switch_is_told(written, text):
    assert any(text in problem for problem in problems(written)), problems(written)


def test_switches_may_come_from_variables_as_text():
    aware = compiled({"like": "load_balance", "cache_aware": "true", "predict_prefill": "true", "top_k": "2"})
    assert aware.predict_prefill
    assert len(aware.pipeline("neutral").selector.pick.keywords["by"]) == 2
    plain = compiled({"like": "load_balance", "cache_aware": "false"})
    assert len(plain.pipeline("neutral").selector.pick.keywords["by"]) == 1


def test_one_pipeline_for_all_stages_is_cache_aware_where_prompts_are_placed():
    made = compiled({"selector": {"metric": {"by": ["num_requests"]}}, "cache_aware": True})
    counts = [len(made.pipeline(kind).selector.pick.keywords["by"]) for kind in STAGES]
    assert counts == [2, 2, 1]
