"""WHERE a request goes: literal replicas in, one of them out."""

import math
import random
from typing import Any

import pytest
import yaml

from anvil_mux.config.values import Profile
from anvil_mux.routing import pipeline, routing
from anvil_mux.routing.routing import Choice, Metric, Replica, RoutingMemory, Work, choose, explain

WORK = Work(tokens=1000, session="s")
PROFILE = Profile(
    ((0, 0.0), (8192, 819.2)), ((1, ((0, 5.0), (1_000_000, 5.0))), (100, ((0, 20.0), (1_000_000, 30.0))))
)

BUSY = Replica("busy", num_requests=4, num_waiting_requests=2, prefill_tokens=3000, decode_tokens=8000,
               decode_batch=2, num_tokens=14000, hit_tokens=0)  # fmt: skip
WARM = Replica("warm", num_requests=2, num_waiting_requests=1, prefill_tokens=500, decode_tokens=4000,
               decode_batch=1, num_tokens=5000, hit_tokens=900)  # fmt: skip
COLD = Replica("cold", num_requests=1, num_waiting_requests=0, prefill_tokens=0, decode_tokens=90_000,
               decode_batch=1, num_tokens=90_000, hit_tokens=0)  # fmt: skip
IDLE = Replica("idle")
FLEET = tuple(replica._replace(profile=PROFILE) for replica in (BUSY, WARM, COLD, IDLE))


def pick(policy: str, replicas: tuple[Replica, ...] = FLEET, work: Work = WORK, **memory: object) -> str:
    choice = choose(pipeline.build(policy), work, replicas, RoutingMemory(**memory))
    assert choice is not None
    return choice.backend


def made(written: object) -> routing.Routing:
    policy, problems = pipeline.compile("mine", written)
    assert problems == []
    return policy


def order(policy: str, work: Work = WORK) -> list[str]:
    """All replicas, each chosen when those before it are gone."""
    left, found = list(FLEET), []
    while left:
        found.append(pick(policy, tuple(left), work))
        left = [replica for replica in left if replica.backend != found[-1]]
    return found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("num_requests", ["idle", "cold", "warm", "busy"]),
        ("num_tokens", ["idle", "warm", "busy", "cold"]),
        ("least_prefill_work", ["warm", "idle", "cold", "busy"]),  # 600, 1000, 1000, 4000
        ("least_delay", ["warm", "idle", "cold", "busy"]),  # 1237, 2000, 3373, 8488
        ("least_prefill_work_kappa", ["warm", "idle", "cold", "busy"]),  # 606, 1000, 1225, 4080
        ("lmetric", ["idle", "cold", "warm", "busy"]),  # 0, 1000, 1200, 16000
        ("lmetric_plus_one", ["idle", "warm", "cold", "busy"]),  # 1000, 1800, 2000, 20000
        ("unified", ["idle", "cold", "warm", "busy"]),
        ("unified_ab", ["idle", "warm", "cold", "busy"]),  # 1000, 1280, 1900, 16320
        ("round_robin", ["busy", "warm", "cold", "idle"]),
        ("sticky", ["idle", "cold", "warm", "busy"]),
        ("flood", ["busy", "warm", "cold", "idle"]),
        ("load_balance", ["cold", "idle", "warm", "busy"]),
        ("load_balance_lite", ["idle", "warm", "busy", "cold"]),
        ("load_balance_counted", ["cold", "idle", "warm", "busy"]),
        ("slo", ["warm", "idle", "cold", "busy"]),  # 65, 100, 105, 410 ms
    ],
)
def test_a_fixed_fleet_is_ranked(policy, expected):
    assert order(policy) == expected


def test_every_shipped_policy_ranks_the_fleet_in_full():
    for policy in pipeline.shipped():
        assert sorted(order(policy)) == ["busy", "cold", "idle", "warm"]


METRICS = {
    "num_requests": [4, 2, 1, 0],
    "num_waiting_requests": [2, 1, 0, 0],
    "num_tokens": [14000, 5000, 90_000, 0],
    "all_prefills_tokens_num": [3000, 500, 0, 0],
    "kv_cache_hit_len": [0, 900, 0, 0],
    "prefix_miss_tokens": [1000, 100, 1000, 1000],
    "cache_aware_all_prefills_tokens_num": [4000, 600, 1000, 1000],
    "all_decodes_tokens_num": [8000, 4000, 90_000, 0],
    "decode_batch_size": [2, 1, 1, 0],
    "lmetric": [16_000, 1200, 1000, 0],
    "predicted_ttft": [405.151919, 65.0, 105.0, 100.0],
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_a_fixed_fleet(name):
    assert [routing.METRICS[name](WORK, replica) for replica in FLEET] == pytest.approx(METRICS[name])


def test_the_projected_use_of_the_cache_is_a_share_of_what_it_holds():
    of = routing.kv_cache_usage_ratio_projected
    assert of(WORK, COLD._replace(kv_tokens=180_000)) == 0.5
    assert of(WORK, COLD) == math.inf


def test_metrics_made_of_others():
    requests, waiting = Metric("r", routing.num_requests), Metric("w", routing.num_waiting_requests)
    assert routing.weighted_sum(WORK, BUSY, of={requests: 10.0, waiting: 0.5}) == 41.0
    assert routing.bucket(WORK, COLD, of=Metric("d", routing.all_decodes_tokens_num), size=8192) == 10
    assert routing.bucket(WORK, COLD, of=requests, size=0) == 1


def test_what_is_not_a_number_is_the_worst():
    assert Metric("broken", lambda work, replica: math.nan).rank(WORK, IDLE) == math.inf
    assert Metric("broken", lambda work, replica: math.nan, higher=True).rank(WORK, IDLE) == math.inf


# What the policies have in common, and how they relate


def fleet(rng: random.Random, size: int = 6) -> tuple[Replica, ...]:
    def count(most: int) -> int:
        return rng.choice([0, rng.randrange(1, most)])

    replicas = []
    for index in range(size):
        answering, waiting = count(4), count(4)
        replicas.append(
            Replica(
                f"r{index}",
                num_requests=answering + waiting,
                num_waiting_requests=waiting,
                prefill_tokens=count(9000) if waiting else 0,
                decode_tokens=count(50_000) if answering else 0,
                decode_batch=answering,
                num_tokens=count(90_000),
                hit_tokens=rng.choice([0, 512, 1000]),
                profile=PROFILE,
            )
        )
    return tuple(replicas)


@pytest.mark.parametrize("policy", pipeline.shipped())
def test_the_same_fleet_and_memory_give_the_same_choice_and_are_left_as_they_were(policy):
    rng, built = random.Random(policy), pipeline.build(policy)
    for _ in range(50):
        replicas = fleet(rng)
        memory = RoutingMemory(
            choices=rng.randrange(9), last="r3", owners={"s": "r2"}, picked={"r1": 3, "r4": 2}
        )
        before = repr((replicas, memory))
        choices = [choose(built, WORK, replicas, memory) for _ in range(2)]
        assert choices[0] == choices[1]
        assert repr((replicas, memory)) == before


@pytest.mark.parametrize("policy", pipeline.shipped())
def test_a_choice_names_a_reason_and_a_step_for_every_other_replica(policy):
    choice = choose(pipeline.build(policy), WORK, FLEET, RoutingMemory())
    assert choice is not None
    assert choice.reason
    assert sorted(name for name, _ in choice.removed) == sorted({r.backend for r in FLEET} - {choice.backend})
    assert all(step for _, step in choice.removed)


def test_metrics_order_replicas_strictly():
    """No replica is better than itself, none better than one that is better than it; and so on."""
    rng = random.Random(7)
    metrics = [Metric(n, of, n in routing.HIGHER) for n, of in routing.METRICS.items() if n in METRICS]
    for _ in range(200):
        a, b, c = fleet(rng, 3)
        for metric in metrics:
            x, y, z = (metric.rank(WORK, replica) for replica in (a, b, c))
            assert not x < x
            assert not (x < y and y < x)
            assert not (x < y and y < z) or x < z


def test_idle_replicas_with_nothing_cached_take_turns():
    replicas = tuple(Replica(name) for name in "abc")
    for policy in ("least_prefill_work", "num_requests", "round_robin", "lmetric_plus_one"):
        memory, found = RoutingMemory(), []
        for _ in range(7):
            choice = choose(pipeline.build(policy), WORK, replicas, memory)
            assert choice is not None
            memory.note(WORK, choice)
            found.append(choice.backend)
        assert "".join(found) == "abcabca"


def test_least_prefill_work_leaves_the_warm_replica_when_waiting_there_costs_more():
    """With the other cold and idle: as soon as what is pending exceeds what is cached."""
    for pending, expected in ((899, "warm"), (901, "cold")):
        warm = Replica("warm", num_requests=1, prefill_tokens=pending, hit_tokens=900)
        assert pick("least_prefill_work", (warm, Replica("cold"))) == expected


def test_a_replica_without_a_hit_misses_the_whole_prompt():
    assert pick("least_prefill_work", (Replica("cold"), Replica("warm", hit_tokens=900))) == "warm"


def test_the_scale_of_tokens_does_not_matter_to_least_prefill_work():
    rng = random.Random(3)
    for _ in range(100):
        replicas = fleet(rng)
        larger = tuple(
            r._replace(prefill_tokens=r.prefill_tokens * 7, hit_tokens=r.hit_tokens * 7) for r in replicas
        )
        assert pick("least_prefill_work", replicas) == pick(
            "least_prefill_work", larger, WORK._replace(tokens=7000)
        )


def delays(*replicas: Replica, tokens: int = 1000) -> list[float]:
    return [routing.weighted_prefill(Work(tokens=tokens), replica) for replica in replicas]


def test_delay_counts_those_who_follow_a_large_request_to_a_replica_that_many_go_to():
    at_work = Replica("a", prefill_tokens=500, usual_tokens=250.0)
    calm, hot = at_work._replace(share=0.125), at_work._replace(share=0.75)
    assert delays(calm, hot) == [1500 * (1 + 0.125 * 4), 1500 * (1 + 0.75 * 4)]
    assert delays(calm, hot, tokens=0) == [500, 500]  # who computes nothing delays nobody


def test_delay_grows_with_the_answers_that_fill_the_cache():
    free = Replica("a", share=0.0)
    half = free._replace(decode_tokens=50_000, cache_tokens=100_000)
    assert delays(free, half) == [1000, 1500]


def test_the_scale_of_tokens_does_not_matter_to_delay():
    draw = random.Random(5)
    for _ in range(200):
        replica = Replica(
            "a",
            prefill_tokens=draw.randrange(5000),
            hit_tokens=draw.randrange(1000),
            decode_tokens=draw.randrange(50_000),
            cache_tokens=100_000,
            share=draw.uniform(0, 1),
            usual_tokens=draw.uniform(1, 2000),
        )
        counts = ("prefill_tokens", "hit_tokens", "decode_tokens", "cache_tokens", "usual_tokens")
        scaled = {name: getattr(replica, name) * 7 for name in counts}
        [small] = delays(replica)
        [large] = delays(replica._replace(**scaled), tokens=7000)
        assert large == pytest.approx(7 * small)


def test_kappa_of_nothing_is_least_prefill_work():
    policy = made({"selector": {"metric": {"by": [{"kappa_work": {"kappa": 0}}, "num_requests"]}}})
    rng = random.Random(5)
    for _ in range(100):
        replicas = fleet(rng)
        choice = choose(policy, WORK, replicas, RoutingMemory())
        assert choice is not None
        assert choice.backend == pick("least_prefill_work", replicas)


# Filters, in two passes

GUARDED = {
    "filters": [
        "schedulability",
        {"staleness": {"seconds": 60}},
        {"metric": {"metric": "num_requests", "threshold": 2}},
        {"metric": {"metric": "num_tokens", "threshold": 80_000, "in_fallback": True}},
        {"failover": {"domain": "node"}},
    ],
    "selector": {"metric": {"by": ["num_tokens"]}},
}


def test_thresholds_leave_out_what_is_at_or_above_them():
    choice = choose(made(GUARDED), WORK, (BUSY, WARM, COLD, IDLE), RoutingMemory())
    assert choice is not None
    assert (choice.backend, choice.passed) == ("idle", "normal")
    assert dict(choice.removed) == {
        "busy": "metric num_requests",
        "warm": "metric num_requests",
        "cold": "metric num_tokens",
    }


def test_the_fallback_pass_drops_the_thresholds_that_may_be_dropped_and_no_other_filter():
    choice = choose(made(GUARDED), WORK, (BUSY, WARM, COLD), RoutingMemory())
    assert choice is not None
    assert (choice.backend, choice.passed) == ("warm", "fallback")
    assert dict(choice.removed) == {"busy": "metric", "cold": "metric num_tokens"}
    assert choose(made(GUARDED), WORK, (COLD, IDLE._replace(schedulable=False)), RoutingMemory()) is None
    assert choose(made(GUARDED), WORK, (), RoutingMemory()) is None


def test_of_a_metric_of_which_more_is_better_the_threshold_is_the_least():
    policy = made(
        {
            "filters": [{"metric": {"metric": "kv_cache_hit_len", "threshold": 900}}],
            "selector": "round_robin",
        }
    )
    more = Replica("more", hit_tokens=901)
    choice = choose(policy, WORK, (WARM, more), RoutingMemory())
    assert choice is not None
    assert choice.removed == (("warm", "metric kv_cache_hit_len"),)


@pytest.mark.parametrize(("age", "stays"), [(0.0, True), (60.9, True), (61.0, False)])
def test_a_report_is_stale_after_its_seconds(age, stays):
    assert routing.staleness(WORK, Replica("a", age_seconds=age), seconds=60) is stays


def test_all_filters_see_all_replicas_even_those_that_are_out():
    """A replica that is over its threshold and cannot serve still takes its node with it."""
    broken = BUSY._replace(schedulable=False, node="n1")
    choice = choose(
        made(GUARDED), WORK, (IDLE._replace(node="n1"), broken, WARM._replace(node="n2")), RoutingMemory()
    )
    assert choice is not None
    assert (choice.backend, dict(choice.removed)["idle"]) == ("warm", "failover")


UNITS = (
    Replica("a", node="n1", failure_domain="u1", schedulable=False),
    Replica("b", node="n1", failure_domain="u2"),
    Replica("c", node="n2", failure_domain="u1"),
    Replica("d", node="n2", failure_domain="u2"),
    Replica("e", node="n3", failure_domain="u3"),
    Replica("f"),
)


@pytest.mark.parametrize(
    ("domain", "gone"),
    [("instance", "a"), ("node", "ab"), ("failure-domain", "ac"), ("node-failure-domain", "abcd")],
)
def test_a_failure_takes_its_domain_with_it(domain, gone):
    assert routing.failover(UNITS, {"a"}, domain=domain) == set(gone)


def test_those_without_a_node_do_not_share_one():
    replicas = (Replica("a"), Replica("b"), Replica("c"))
    assert routing.failover(replicas, {"a"}, domain="node-failure-domain") == {"a"}


def test_a_stage_goes_to_replicas_of_its_type():
    replicas = (Replica("p", infer_type="prefill"), Replica("d", infer_type="decode"))
    assert pick("load_balance", replicas, WORK._replace(infer_type="decode")) == "d"
    assert pick("load_balance", replicas, WORK._replace(infer_type="prefill")) == "p"


def test_who_takes_either_stage_stays_for_both():
    replicas = (Replica("n"), Replica("e", infer_type="either"))
    for stage in ("prefill", "decode"):
        assert pick("load_balance", replicas, WORK._replace(infer_type=stage)) == "e"


# Adaptive prefill and decode

SPEED = Profile(
    ttft=((0.0, 0.0), (8192.0, 4000.0)),
    tpot=(
        (1, ((0.0, 10.0), (8192.0, 10.0))),
        (4, ((0.0, 40.0), (8192.0, 40.0))),
        (8, ((0.0, 80.0), (8192.0, 80.0))),
    ),
)
"""Four answers at once keep the 42.5 ms, a fifth does not; 10,000 tokens take less than 5.1 s."""


def either(name: str, **known: Any) -> Replica:
    return Replica(name, infer_type=known.pop("infer_type", "either"), profile=SPEED, **known)


def stage(kind: str, *replicas: Replica) -> str:
    return pick("slo_adaptive", replicas, WORK._replace(infer_type=kind))


def test_answers_are_packed_where_most_are_that_still_keep_their_time():
    idle, some, full = either("idle"), either("some", decode_batch=2), either("full", decode_batch=4)
    assert stage("decode", idle, some, full) == "some"
    assert stage("decode", idle, full) == "idle"


def test_answers_are_packed_also_if_as_many_take_no_longer_than_one():
    flat = SPEED._replace(tpot=((1, ((0.0, 10.0), (8192.0, 10.0))), (4, ((0.0, 10.0), (8192.0, 10.0)))))
    idle, some = (
        replica._replace(profile=flat) for replica in (either("idle"), either("some", decode_batch=2))
    )
    assert stage("decode", idle, some) == "some"


def test_one_that_only_decodes_gets_answers_before_one_that_could_compute_prompts():
    reserved, packed = either("reserved", infer_type="decode"), either("packed", decode_batch=2)
    assert stage("decode", reserved, packed) == "reserved"
    assert stage("decode", reserved._replace(decode_batch=4), packed) == "packed"


def test_if_all_are_too_slow_the_least_slow_gets_the_answer():
    assert stage("decode", either("more", decode_batch=6), either("less", decode_batch=5)) == "less"


def test_an_answer_may_go_where_prompts_wait_if_nobody_else_keeps_its_time():
    # With 10,240 tokens to compute it misses the time to a first token, but not that for each further one.
    late = either("late", decode_batch=2, prefill_tokens=16384)
    assert stage("decode", either("slow", decode_batch=5), late) == "late"


def test_an_answer_goes_where_no_prompt_holds_up_its_tokens_if_that_keeps_its_time():
    free = either("free", decode_batch=1, hit_tokens=1000)
    slow = free._replace(backend="slow", decode_batch=5)
    computing = either("computing", decode_batch=2, hit_tokens=1000, prefill_tokens=100)  # 69 ms
    assert stage("decode", computing, free) == "free"
    assert stage("decode", computing, slow) == "computing"
    assert stage("decode", computing._replace(prefill_tokens=10), free) == "computing"


def test_prompts_go_to_those_that_answer_nothing():
    quick, busy = either("quick"), either("busy", decode_batch=1)
    assert stage("prefill", busy, quick) == "quick"
    assert stage("prefill", busy, quick._replace(prefill_tokens=4096)) == "quick"
    assert pick_or_none("prefill", busy) is None


def test_among_equals_one_that_only_computes_prompts_gets_them():
    reserved = either("reserved", infer_type="prefill")
    assert stage("prefill", either("other"), reserved) == "reserved"
    assert stage("prefill", either("other"), reserved._replace(prefill_tokens=10)) == "other"


def pick_or_none(kind: str, *replicas: Replica) -> Choice | None:
    return choose(pipeline.build("slo_adaptive"), WORK._replace(infer_type=kind), replicas, RoutingMemory())


# Selectors


def test_of_the_best_few_any_may_be_taken_and_none_else():
    policy = made({"selector": {"metric": {"by": ["num_requests"], "top_k": 2}}})
    found = set()
    for number in range(40):
        choice = choose(policy, WORK, FLEET, RoutingMemory(choices=number))
        assert choice is not None
        found.add(choice.backend)
    assert found == {"idle", "cold"}


def test_two_that_are_drawn_are_never_the_worst():
    found = {pick("power_of_two", choices=number) for number in range(200)}
    assert found == {"idle", "cold", "warm"}
    assert pick("power_of_two", (BUSY,)) == "busy"


def test_a_session_stays_where_it_was():
    assert pick("sticky", owners={"s": "busy"}) == "busy"
    assert pick("sticky", owners={"other": "busy"}) == "idle"
    assert pick("sticky", owners={"s": "gone"}) == "idle"
    assert pick("sticky", work=WORK._replace(session=""), owners={"": "busy"}) == "idle"


def test_a_session_leaves_a_replica_that_is_overloaded_or_knows_little_of_it():
    owner = {"s": "warm"}
    fresh = (WARM._replace(hit_tokens=500), COLD, IDLE)
    assert pick("unified", owners=owner) == "warm"
    assert pick("unified", fresh, owners=owner) == "idle"  # half of the prompt is not more than half
    loaded = (WARM._replace(num_requests=5), COLD, IDLE)  # the mean is 2
    assert pick("unified", loaded, owners=owner) == "idle"
    assert pick("sticky", loaded, owners=owner) == "warm"


def test_the_memory_of_sessions_is_bounded(monkeypatch):
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    memory = RoutingMemory()
    for session in "abac":
        memory.note(Work(session=session), routing.Choice("r", "p", "normal", ""))
    assert list(memory.owners) == ["a", "c"]


def test_an_explanation_shows_the_metrics_and_who_removed_whom():
    rows = explain(pipeline.build("least_prefill_work"), WORK, (BUSY, WARM), RoutingMemory())
    assert rows == [
        {
            "backend": "busy",
            "chosen": False,
            "removed_by": "metric",
            "metrics": {"cache_aware_all_prefills_tokens_num": 4000, "num_requests": 4},
        },
        {
            "backend": "warm",
            "chosen": True,
            "removed_by": "",
            "metrics": {"cache_aware_all_prefills_tokens_num": 600, "num_requests": 2},
        },
    ]


# What users write


@pytest.mark.parametrize("policy", pipeline.shipped())
def test_a_shipped_policy_survives_being_written_and_read(policy):
    written = yaml.safe_load(yaml.safe_dump(pipeline.shipped()[policy]))
    mine, shipped = made(written), pipeline.build(policy)
    rng = random.Random(11)
    for _ in range(50):
        replicas, memory = fleet(rng), RoutingMemory(choices=rng.randrange(100), owners={"s": "r1"})
        one, other = choose(mine, WORK, replicas, memory), choose(shipped, WORK, replicas, memory)
        assert one is not None
        assert one._replace(policy=policy) == other


def problems(written: object) -> list[str]:
    return [f"{'.'.join(path)}: {text}" for path, text in pipeline.compile("mine", written)[1]]


GOOD = {"selector": "round_robin"}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({}, ": must hold metrics, filters and a selector, not {}"),
        ("x", ": must hold metrics, filters and a selector, not 'x'"),
        ({"neutral": 3}, "neutral: must hold metrics"),
        ({"neutral": GOOD, "decod": GOOD}, "decod: stands beside infer types; did you mean decode?"),
        ({"filters": []}, ": has no selector; known: metric, "),
        (GOOD | {"filter": []}, "filter: unknown key; did you mean filters?"),
        (GOOD | {"filters": "staleness"}, "filters: must be a list of filters, not 'staleness'"),
        (GOOD | {"filters": [3]}, "filters.0: must be a filter, or {filter: its settings}, not 3"),
        (GOOD | {"filters": [{"staleness": 3}]}, "filters.0.staleness: must hold settings, not 3"),
        (GOOD | {"filters": [{"metric": {"metric": "num_tokens"}}]}, "needs the setting threshold"),
        (GOOD | {"filters": [{"failover": {"domain": "rack"}}]}, "domain: must be one of instance, node, "),
        (GOOD | {"filters": [{"staleness": {"seconds": "soon"}}]}, "must be a number of at least 0"),
        (GOOD | {"filters": [{"staleness": {"seconds": math.nan}}]}, "must be a number of at least 0"),
        (GOOD | {"filters": [{"staleness": {"seconds": 10**400}}]}, "must be a number of at least 0"),
        (GOOD | {"metrics": 3}, "metrics: must be a list, or names for metrics, not 3"),
        (
            GOOD | {"metrics": {"num_tokens": "lmetric"}},
            "metrics.num_tokens: is the name of a metric",
        ),
        (GOOD | {"metrics": ["num_token"]}, "metrics.0: unknown metric num_token; did you mean num_tokens?"),
        ({"selector": "round-robin"}, "selector: unknown selector round-robin; did you mean round_robin?"),
        ({"selector": {"round_robin": {"by": 1}}}, "by: unknown setting of round_robin; it has none"),
        ({"selector": {"metric": {"by": []}}}, "selector.metric.by: must be a list of metrics, not []"),
        ({"selector": {"metric": {"by": ["num_tokens"], "top_k": 0}}}, "a whole number of at least 1, not 0"),
        ({"selector": {"metric": {"by": ["num_tokens"], "ties": "no"}}}, "ties: must be one of round_robin"),
        ({"selector": {"sticky": {}}}, "selector: sticky needs the setting otherwise"),
        (
            {"selector": {"metric": {"by": [{"weighted_sum": {"of": {"num_tokens": "much"}}}]}}},
            "of.num_tokens: must be a number of at least 0, not 'much'",
        ),
    ],
)
def test_what_cannot_be_a_policy_is_told_with_the_way_to_it(written, text):
    assert any(text in problem for problem in problems(written)), problems(written)


def test_all_problems_of_a_policy_are_told_at_once_and_each_only_once():
    found = problems(
        {
            "metrics": {"tax": {"kappa_work": {"kapa": 1}}},
            "filters": ["stale", {"metric": {"metric": "tax", "threshold": -1}}],
            "selector": {"metric": {"by": ["tax"], "top_k": 1.5}},
        }
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "metrics.tax.kappa_work.kapa",
        "filters.0",
        "filters.1.metric.threshold",
        "selector.metric.top_k",
    ]


def test_numbers_and_flags_may_come_from_variables_as_text():
    policy = made(
        {
            "filters": [{"metric": {"metric": "num_requests", "threshold": "2", "in_fallback": "true"}}],
            "selector": {"metric": {"by": [{"kappa_work": {"kappa": "1e-3"}}], "top_k": "1"}},
        }
    )
    assert choose(policy, WORK, (BUSY,), RoutingMemory()) is None


def test_a_policy_says_which_settings_of_a_service_it_needs():
    usage = {"metric": {"metric": "kv_cache_usage_ratio_projected", "threshold": 0.9}}
    policy = made({"neutral": GOOD, "decode": GOOD | {"filters": [usage]}})
    needs = {kind: set(policy.needs(kind)) for kind in ("neutral", "prefill", "decode", "either")}
    assert needs == {"neutral": set(), "prefill": set(), "decode": {"kv_tokens"}, "either": {"kv_tokens"}}
    assert made(GOOD | {"filters": [usage]}).needs("prefill") == {"kv_tokens"}


@pytest.mark.parametrize("registry", [routing.METRICS, routing.FILTERS, routing.SELECTORS])
def test_every_step_says_what_it_does_in_one_sentence(registry):
    for name, step in registry.items():
        assert step.__doc__, name
        assert step.__doc__.endswith("."), name
