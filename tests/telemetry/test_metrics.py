"""Histories of events in, samples out."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.config.values import Preset
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.policies import POLICIES
from anvil_mux.scheduler.slot import Cancel, Evict, Load, Ticket
from anvil_mux.scheduler.status import Status
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.metrics import BUCKETS, TOKENS, Metrics
from tests.scheduler.lone import LoneGroup

CONFIG = Config(
    backends=(
        Backend("a", "a", gpus=("0",)),
        Backend("b", "b", gpus=("0",), aliases=("bee",)),
        Backend("c", "c", gpus=("1",)),
        Backend("both", "both", gpus=("0", "1")),
    ),
    gpus=(Gpu("0"), Gpu("1")),
)


CHAT = "/v1/chat/completions"


def nothing() -> Status:
    return Status(0.0, (), (), 0, 0)


def metrics(config: Config = CONFIG) -> Metrics:
    return Metrics(config, nothing)


def told(events: Iterable[Event]) -> Metrics:
    made = metrics()
    for event in events:
        made.observe(event)
    return made


def value(of: Metrics, name: str, **labels: str) -> float | None:
    return of.registry.get_sample_value(name, labels)


def phases(of: Metrics) -> dict[tuple[str, str], float]:
    """(model, phase) -> seconds, of those that occurred."""
    family = next(f for f in of.registry.collect() if f.name == "anvil_swap_phase_seconds")
    sums = [sample for sample in family.samples if sample.name.endswith("_sum")]
    return {(sample.labels["model"], sample.labels["phase"]): sample.value for sample in sums}


def swaps(of: Metrics, source: str, target: str, way: str, result: str) -> float | None:
    return value(of, "anvil_swaps_total", **{"from": source, "to": target, "way": way, "result": result})


def record(**changed: object) -> Served:
    given: dict[str, object] = {
        "ended": 1.0,
        "request_id": "r1",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "route": "/v1/chat/completions",
        "model": "a",
        "backend": "a",
        "status": 200,
        "code": "",
        "stream": False,
        "waited": 2.0,
        "first_byte": 2.5,
        "seconds": 3.0,
        "sent": 100,
        **changed,
    }
    return Served(**given)


class History:
    """A real GPU group; what it emits goes to the metrics."""

    def __init__(self) -> None:
        self.metrics = metrics()
        self.driver = LoneGroup(CONFIG, self.metrics.observe, policy=POLICIES["eager"]())
        self.count = 0

    def request(self, model: str, now: float) -> Ticket:
        self.count += 1
        ticket = Ticket(self.count, model, now)
        self.driver.request(ticket, now)
        return ticket

    def load(self, model: str, now: float, ready: float) -> Ticket:
        ticket = self.request(model, now)
        assert isinstance(self.driver.next_step(now), Load)
        self.driver.loaded(model, ready)
        return ticket


def test_requests_that_name_a_preset_have_a_label_of_their_own():
    fast = replace(CONFIG.backends[0], presets=(Preset("a-fast", system="Be quick."),))
    seen = metrics(replace(CONFIG, backends=(fast, *CONFIG.backends[1:])))
    assert value(seen, "anvil_tokens_total", model="a", preset="a-fast", kind="completion") == 0
    seen.served(record(preset="a-fast", tokens=7))
    seen.served(record(tokens=2))
    for labels, tokens in (({"preset": "a-fast"}, 7), ({}, 2)):
        assert value(seen, "anvil_requests_total", model="a", route=CHAT, code="200", **labels) == 1
        assert value(seen, "anvil_request_duration_seconds_count", model="a", route=CHAT, **labels) == 1
        assert value(seen, "anvil_queue_wait_seconds_count", model="a", **labels) == 1
        assert value(seen, "anvil_time_to_first_byte_seconds_count", model="a", **labels) == 1
        assert value(seen, "anvil_tokens_total", model="a", kind="completion", **labels) == tokens


def swapped(target: str) -> Metrics:
    """The metrics after a load of a until 10 s, and a swap to another model from 20 to 40 s."""
    history = History()
    driver = history.driver
    leased = history.load("a", 0.0, 10.0)
    history.request(target, 20.0)
    driver.next_step(20.0)
    driver.release(leased, 23.0)
    assert isinstance(driver.next_step(23.0), Evict)
    driver.evicted("a", 27.0)
    assert isinstance(driver.next_step(27.5), Load)
    driver.loaded(target, 40.0)
    return history.metrics


def test_a_swap_is_counted_and_timed():
    seen = swapped("b")
    assert phases(seen) == {("a", "drain"): 3.0}
    assert value(seen, "anvil_swap_duration_seconds_sum", result="ok") == 10.0 + 20.0
    assert swaps(seen, "none", "a", "stop", "ok") == 1
    assert swaps(seen, "a", "b", "stop", "ok") == 1
    assert value(seen, "anvil_evictions_total", model="a", cause="swap") == 1
    assert value(seen, "anvil_model_load_duration_seconds_sum", model="b", result="ok") == 12.5
    assert value(seen, "anvil_model_loads_total", model="b", result="ok") == 1


def test_a_swap_counts_on_each_gpu_that_its_model_takes():
    seen = swapped("both")
    assert value(seen, "anvil_gpu_swap_seconds_total", gpu="0") == 10.0 + 20.0
    assert value(seen, "anvil_gpu_swap_seconds_total", gpu="1") == 20.0


def test_each_token_is_counted_once_by_its_kind():
    made = metrics()
    made.served(record(tokens=37, prompt_tokens=12, cached_tokens=8))
    made.served(record(tokens=3))
    made.served(record(model="b", prompt_tokens=5))
    made.served(record(model="nobody", backend="", tokens=0))
    counts = {kind: value(made, "anvil_tokens_total", model="a", kind=kind) for kind in TOKENS}
    assert counts == {"prompt": 4, "cached": 8, "completion": 40}
    assert value(made, "anvil_tokens_total", model="b", kind="prompt") == 5
    assert value(made, "anvil_tokens_total", model="c", kind="completion") == 0


def test_what_was_thought_cached_is_compared_with_what_engines_say():
    two = [Backend(f"a-{number}", "a") for number in (1, 2)]
    made = metrics(Config((*two, Backend("b", "b"))))
    kinds = ("hit", "missing", "unforeseen")

    def counts() -> list[float | None]:
        return [value(made, "anvil_cache_forecast_tokens_total", model="a", kind=kind) for kind in kinds]

    assert counts() == [0, 0, 0]
    made.served(record(prompt_tokens=1000, cached_tokens=600, foreseen=0.5))
    assert counts() == [500, 0, 100]
    made.served(record(prompt_tokens=1000, cached_tokens=600, foreseen=0.75))
    assert counts() == [1100, 150, 100]
    made.served(record(prompt_tokens=1000, cached_tokens=0, foreseen=0.1))
    made.served(record(prompt_tokens=1000, cached_tokens=0))  # an engine that says nothing of it
    made.served(record(model="b", prompt_tokens=1000, cached_tokens=10, foreseen=0.1))
    assert counts() == [1100, 250, 100]
    assert value(made, "anvil_cache_forecast_tokens_total", model="b", kind="hit") is None


def test_a_swap_of_several_victims_is_one_swap():
    history = History()
    driver = history.driver
    driver.release(history.load("a", 0.0, 1.0), 1.0)
    driver.release(history.load("c", 1.0, 2.0), 2.0)
    history.request("both", 10.0)
    assert isinstance(driver.next_step(10.0), Evict)
    assert isinstance(driver.next_step(11.0), Evict)
    driver.evicted("a", 12.0)
    driver.evicted("c", 15.0)
    assert isinstance(driver.next_step(15.0), Load)
    driver.loaded("both", 20.0)
    seen = history.metrics
    assert swaps(seen, "several", "both", "stop", "ok") == 1
    assert phases(seen) == {("a", "drain"): 0.0, ("c", "drain"): 1.0}
    assert value(seen, "anvil_swap_duration_seconds_sum", result="ok") == 1.0 + 1.0 + 10.0


def sample(of: Metrics, key: str) -> float | None:
    """The value of a series by its name and labels, as in ``anvil_swaps_total{from=a,to=b}``."""
    name, _, labels = key.rstrip("}").partition("{")
    return value(of, name, **dict(label.split("=") for label in labels.split(",")))


def evicted(model: str, **why: Any) -> list[Event]:
    """A drain from 1 s to 2 s, and an eviction until 3 s."""
    at = (1.0, "draining"), (2.0, "evicting"), (3.0, "stopped")
    return [Event(moment, kind, model, model, **(why if kind == "draining" else {})) for moment, kind in at]


def loaded(model: str, since: float, until: float, loads_by: str = "", way: str = "stop") -> list[Event]:
    loading = Event(since, "loading", model, model, way=loads_by or way)
    return [loading, Event(until, "ready", model, model, seconds=until - since, way=way)]


DEMOTED = [
    *evicted("a", target="b", cause=Cause("oldest_first", waiting=1))[:2],
    Event(3.0, "standby", "a", "a", way="sleep"),
    Event(8.0, "demoting", "a", "a", target="b", cause=Cause("memory_needed")),
]
SEVERED = Event(1.0, "severed", "a", "a", 7, 1, 30.0)
HISTORIES: dict[str, tuple[list[Event], dict[str, float | None]]] = {
    "what is swapped at once on a GPU counts once": (
        [
            Event(10.0, "loading", "a", "a"),
            Event(12.0, "loading", "b", "b"),
            Event(15.0, "ready", "a", "a"),
            Event(18.0, "ready", "b", "b"),
            *loaded("b", 30.0, 31.0),
        ],
        {"anvil_gpu_swap_seconds_total{gpu=0}": 8.0 + 1.0},
    ),
    "a load that fails is a failed swap and is timed apart": (
        [
            *evicted("a", target="b"),
            Event(3.0, "loading", "b", "b", way="sleep"),
            Event(9.0, "stopped", "b", "b", cause=Cause("load_failed", detail="exited with code 1")),
        ],
        {
            "anvil_model_loads_total{model=b,result=failed}": 1,
            "anvil_swaps_total{from=a,to=b,way=sleep,result=failed}": 1,
            "anvil_model_load_duration_seconds_sum{model=b,result=failed}": 6.0,
            "anvil_swap_duration_seconds_sum{result=failed}": 8.0,
            "anvil_swap_duration_seconds_count{result=ok}": 0,
            "anvil_evictions_total{model=b,cause=died}": None,
        },
    ),
    "an unload is an eviction and no part of a later swap": (
        [*evicted("a", cause=Cause("unloaded")), *loaded("b", 100.0, 101.0)],
        {
            "anvil_evictions_total{model=a,cause=unloaded}": 1,
            "anvil_swap_duration_seconds_sum{result=ok}": 1.0,
            "anvil_swaps_total{from=none,to=b,way=stop,result=ok}": 1,
        },
    ),
    "who leaves because nobody uses it is idle": (
        evicted("a", cause=Cause("idle", seconds=60.0)),
        {"anvil_evictions_total{model=a,cause=idle}": 1},
    ),
    "a swap is counted by the way back": (
        loaded("b", 1.0, 2.0, "sleep", "sleep"),
        {"anvil_swaps_total{from=none,to=b,way=sleep,result=ok}": 1},
    ),
    "a swap is counted by the way that really brought the model back": (
        loaded("b", 1.0, 2.0, "sleep", "stop"),
        {"anvil_swaps_total{from=none,to=b,way=stop,result=ok}": 1},
    ),
    **{
        f"a demotion that ends as {way} is counted as that and is no eviction": (
            [*DEMOTED, end, *loaded("b", 10.0, 11.0)],
            {
                f"anvil_demotions_total{{model=a,way={way}}}": 1,
                "anvil_evictions_total{model=a,cause=swap}": 1,
                "anvil_evictions_total{model=a,cause=died}": None,
                "anvil_swaps_total{from=a,to=b,way=stop,result=ok}": 1,
            },
        )
        for way, end in (
            ("checkpoint", Event(9.0, "standby", "a", "a", way="checkpoint")),
            ("none", Event(9.0, "standby", "a", "a", way="sleep", cause=Cause("evict_failed", detail="no"))),
            ("stop", Event(9.0, "stopped", "a", "a")),
        )
    },
    "reloads are counted by result and those who leave for one by that cause": (
        [
            Event(1.0, "reloaded", "", cause=Cause("reconfigured", detail="changed a")),
            *evicted("a", cause=Cause("changed")),
            Event(4.0, "reload_failed", "", cause=Cause("bad_configuration", detail="no")),
        ],
        {
            "anvil_reloads_total{result=ok}": 1,
            "anvil_reloads_total{result=failed}": 1,
            "anvil_evictions_total{model=a,cause=changed}": 1,
        },
    ),
    "an adopted backend is no load": (
        [Event(1.0, "ready", "a", "a", cause=Cause("adopted"))],
        {"anvil_model_loads_total{model=a,result=ok}": 0},
    ),
    "a reprieve is one swap that did not come about": (
        [
            *[Event(1.0, "draining", model, model, target="both") for model in "ac"],
            *[Event(2.0, "ready", model, model, cause=Cause("reprieved")) for model in "ac"],
            Event(3.0, "loading", "both", "both"),
        ],
        {
            "anvil_swaps_total{from=several,to=both,way=none,result=reprieved}": 1,
            "anvil_evictions_total{model=a,cause=swap}": None,
        },
    ),
    "a victim that cannot be stopped ends its swap": (
        [
            *evicted("a", target="b")[:2],
            Event(3.0, "stuck", "a", "a", cause=Cause("evict_failed", detail="still runs")),
            Event(9.0, "stopped", "a", "a"),
            *loaded("b", 10.0, 11.0),
        ],
        {
            "anvil_swaps_total{from=a,to=b,way=none,result=stuck}": 1,
            "anvil_swap_duration_seconds_sum{result=ok}": 1.0,
        },
    ),
    "a death is an eviction of its own kind": (
        [
            Event(1.0, "draining", "a", "a", target="b"),
            Event(2.0, "stopped", "a", "a", cause=Cause("died", detail="exited with code 139")),
            *loaded("b", 50.0, 51.0),
        ],
        {
            "anvil_evictions_total{model=a,cause=died}": 1,
            "anvil_swap_duration_seconds_sum{result=ok}": 1.0,
        },
    ),
    "the target of a swap may have colons in its name": (
        [*evicted("a", target="qwen: 8b"), *loaded("qwen: 8b", 3.0, 4.0)],
        {"anvil_swaps_total{from=a,to=qwen: 8b,way=stop,result=ok}": 1},
    ),
    "severed requests and deferrals are counted by model": (
        [SEVERED, SEVERED, Event(1.0, "deferred", "b", "", 1, 1, 5.0, Cause("not_quiet"))],
        {
            "anvil_severed_requests_total{model=a}": 2,
            "anvil_deferrals_total{model=b,cause=not_quiet}": 1,
        },
    ),
}


@pytest.mark.parametrize(("events", "expected"), HISTORIES.values(), ids=HISTORIES)
def test_what_happened_is_counted(events, expected):
    seen = told(events)
    assert {key: sample(seen, key) for key in expected} == expected


def test_what_the_mechanism_tells_of_its_phases_is_counted_by_model():
    seen = metrics()
    for phase in (("a", "evict", 2.0), ("a", "evict", 3.0), ("b", "probe", 0.5)):
        seen.took(*phase)
    assert phases(seen) == {("a", "evict"): 5.0, ("b", "probe"): 0.5}


def deferred(at: float, model: str, ticket: int, cause: str = "more_awaited") -> Event:
    return Event(at, "deferred", model, "", ticket, 1, 5.0, Cause(cause))


def test_the_time_for_which_a_swap_was_held_back_is_its_cool_down_however_often_that_is_announced():
    seen = told(
        [
            deferred(1.0, "b", 7),
            Event(3.5, "draining", "a", "a", target="b"),
            Event(4.0, "loading", "b", "b"),
            deferred(5.0, "c", 8),
            Event(9.0, "loading", "c", "c"),
            Event(20.0, "loading", "a", "a"),
        ]
    )
    assert phases(seen) == {("b", "cooldown"): 2.5, ("c", "cooldown"): 4.0}
    again = [deferred(at, "b", 7, "not_quiet") for at in (1.0, 6.0)]
    seen = told([*again, Event(8.0, "loading", "b", "b")])
    assert phases(seen) == {("b", "cooldown"): 7.0}
    assert value(seen, "anvil_deferrals_total", model="b", cause="not_quiet") == 1


@pytest.mark.parametrize("kind", ["gone", "failed"])
def test_a_swap_is_not_held_back_for_those_that_have_left(kind):
    left = [deferred(1.0, "b", 7), Event(2.0, kind, "b", ticket=7)]
    assert phases(told([*left, Event(900.0, "loading", "b", "b")])) == {}
    again = [*left, deferred(3.0, "b", 9), Event(3.5, kind, "b", ticket=8), Event(5.0, "loading", "b", "b")]
    assert phases(told(again)) == {("b", "cooldown"): 2.0}


@pytest.mark.parametrize("policy", [*POLICIES, "min_residency"])
def test_every_deferral_has_a_class_of_its_own(policy):
    backends = [
        replace(backend, min_residency=5.0 * (policy == "min_residency")) for backend in CONFIG.backends
    ]
    config = replace(CONFIG, backends=tuple(backends), policy=policy if policy in POLICIES else "eager")
    if policy == "debounce":
        config = replace(config, policy_settings={"quiet": 2.0})
    trace = [Arrival(at / 4, "ab"[at // 3 % 2], 2.0) for at in range(200)]
    log = simulate(config, trace, Engines({}, 3.0))
    kinds = {event.cause.kind for event in log if event.kind == "deferred" and event.cause}
    assert bool(kinds) is (policy != "eager")
    assert kinds.isdisjoint({"policy", "policy_text"})


def test_the_reasons_of_other_policies_share_one_label():
    texts = [Cause("policy_text", detail=f"it is {hour} o'clock") for hour in range(24)]
    seen = told([deferred(1.0, "b", hour)._replace(cause=text) for hour, text in enumerate(texts)])
    assert value(seen, "anvil_deferrals_total", model="b", cause="policy_text") == 24


def test_what_backends_hold_is_shown_as_it_was_last_measured():
    known = [
        Footprint("a", "sleep", {"0": 19}, {"0": 1}, 16, 2),
        Footprint("a", "stop", {"0": 20}, {"0": 0}, 0, 1),
        Footprint("b", "sleep-2", {}, {}, 3, 1),
    ]
    seen = Metrics(CONFIG, nothing, footprints=lambda: known)
    assert value(seen, "anvil_backend_memory_bytes", backend="a", gpu="0") == 20
    assert value(seen, "anvil_backend_residual_bytes", backend="a", way="sleep", gpu="0") == 1
    assert value(seen, "anvil_backend_host_bytes", backend="a", way="sleep") == 16
    assert value(seen, "anvil_backend_host_bytes", backend="b", way="sleep-2") == 3
    assert value(seen, "anvil_backend_host_bytes", backend="a", way="stop") is None


def test_what_was_learned_of_swaps_is_shown_and_several_victims_are_one_label():
    costs = [
        Cost("", "a", "stop", 0.0, 9.0, 1),
        Cost("a", "b", "sleep", 0.5, 1.0, 3),
        Cost("a+c", "both", "stop", 1.0, 4.0, 1),
        Cost("b+c", "both", "stop", 1.0, 7.0, 1),
    ]
    seen = Metrics(CONFIG, nothing, lambda: costs)
    family = next(f for f in seen.registry.collect() if f.name == "anvil_swap_cost_seconds")
    assert {tuple(sample.labels.values()): sample.value for sample in family.samples} == {
        ("none", "a", "stop"): 9.0,
        ("a", "b", "sleep"): 1.5,
        ("several", "both", "stop"): 8.0,
    }


def test_models_that_are_served_from_now_on_begin_at_zero_and_those_of_before_go_on():
    seen = metrics()
    seen.served(record())
    seen.know(Config(backends=(Backend("new", "new", ("0",), aliases=("n",)),)))
    assert value(seen, "anvil_queue_wait_seconds_count", model="new") == 0
    seen.served(record())
    seen.served(record(model="n"))
    assert value(seen, "anvil_queue_wait_seconds_count", model="a") == 2
    assert value(seen, "anvil_queue_wait_seconds_count", model="new") == 1


def test_a_load_that_was_cancelled_is_neither_a_failure_nor_a_death():
    history = History()
    history.request("a", 0.0)
    assert isinstance(history.driver.next_step(0.0), Load)
    history.driver.unload("a", 2.0)
    assert isinstance(history.driver.next_step(2.0), Cancel)
    history.driver.load_cancelled("a", 3.0)
    seen = history.metrics
    assert value(seen, "anvil_model_loads_total", model="a", result="cancelled") == 1
    assert value(seen, "anvil_model_load_duration_seconds_sum", model="a", result="cancelled") == 2.0
    assert value(seen, "anvil_model_loads_total", model="a", result="failed") == 0
    assert value(seen, "anvil_evictions_total", model="a", cause="cancelled") == 1
    assert value(seen, "anvil_evictions_total", model="a", cause="died") is None
    history.load("a", 10.0, 14.0)
    assert value(seen, "anvil_model_loads_total", model="a", result="ok") == 1


def test_a_served_request_is_counted_with_its_times():
    seen = metrics()
    seen.served(record())
    seen.served(record(status=503, code="severed", first_byte=0.0))
    route = "/v1/chat/completions"
    assert value(seen, "anvil_requests_total", model="a", route=route, code="200") == 1
    assert value(seen, "anvil_requests_total", model="a", route=route, code="503") == 1
    assert value(seen, "anvil_request_duration_seconds_sum", model="a", route=route) == 6.0
    assert value(seen, "anvil_queue_wait_seconds_sum", model="a") == 4.0
    assert value(seen, "anvil_time_to_first_byte_seconds_count", model="a") == 1


def test_an_answer_that_was_not_whole_is_counted_by_a_code_of_its_own():
    seen = metrics()
    seen.served(record(status=200, code="backend_unavailable"))
    route = "/v1/chat/completions"
    assert value(seen, "anvil_requests_total", model="a", route=route, code="broken") == 1
    assert value(seen, "anvil_requests_total", model="a", route=route, code="200") is None


def test_labels_never_come_from_clients():
    seen = metrics()
    seen.served(record(model="bee", path="/chat/completions"))
    seen.served(record(model="x" * 100, path="/etc/passwd", route="other", backend="", status=404))
    seen.served(record(path="/v1/models/x", route="/v1/models"))
    assert value(seen, "anvil_requests_total", model="b", route="/v1/chat/completions", code="200") == 1
    assert value(seen, "anvil_requests_total", model="unknown", route="other", code="404") == 1
    counted = next(f for f in seen.registry.collect() if f.name == "anvil_requests")
    assert {sample.labels["route"] for sample in counted.samples} == {
        "/v1/chat/completions",
        "/v1/models",
        "other",
    }


def test_what_a_rate_is_asked_of_begins_at_zero():
    seen = metrics()
    for model in ("a", "b", "c", "both"):
        assert value(seen, "anvil_queue_wait_seconds_count", model=model) == 0
        assert value(seen, "anvil_time_to_first_byte_seconds_count", model=model) == 0
        assert value(seen, "anvil_severed_requests_total", model=model) == 0
        assert value(seen, "anvil_model_loads_total", model=model, result="failed") == 0
    assert value(seen, "anvil_swap_duration_seconds_sum", result="stuck") == 0


def test_a_bucket_counts_what_is_at_most_its_bound():
    seen = metrics()
    for seconds in (0.5, 0.6, 1200.0, 5000.0):
        seen.served(record(seconds=seconds))
    name, labels = "anvil_request_duration_seconds_bucket", {"model": "a", "route": "/v1/chat/completions"}
    assert [value(seen, name, le=le, **labels) for le in ("0.25", "0.5", "1.0", "1200.0", "+Inf")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert BUCKETS[-1] == 1200.0


def test_each_key_has_what_it_has_used():
    seen = metrics()
    for gpu_seconds in (1.5, 0.25):
        seen.served(record(key="alice", prompt_tokens=10, cached_tokens=4, tokens=5, gpu_seconds=gpu_seconds))
    of = {"key": "alice", "model": "a"}
    assert value(seen, "anvil_key_requests_total", **of) == 2
    assert value(seen, "anvil_key_gpu_seconds_total", **of) == 1.75
    kinds = {kind: value(seen, "anvil_key_tokens_total", kind=kind, **of) for kind in TOKENS}
    assert kinds == {"prompt": 12, "cached": 8, "completion": 10}


@pytest.mark.parametrize(
    ("accept", "content_type", "end"),
    [
        ("", "text/plain", "\n"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text", "# EOF\n"),
    ],
)
def test_a_scraper_gets_the_format_that_it_asks_for(accept, content_type, end):
    seen = metrics()
    seen.served(record())
    kind, text = seen.render(accept)
    assert kind.startswith(content_type)
    assert text.decode().endswith(end)
    assert b"anvil_build_info{" in text
    assert b"process_resident_memory_bytes" in text
    assert b"python_info" in text
    assert b"_created" not in text
