"""Literal snapshots in, decisions out; and what any registered policy must honour."""

import math

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import LoadError
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.policies import (
    FEW,
    FOREVER,
    PAUSES,
    POLICIES,
    RARE,
    TURN,
    Adaptive,
    CostAware,
    Debounce,
    Eager,
    Queue,
    Resident,
    Snapshot,
    Stay,
    Swapping,
    SwapTo,
    TimeSlice,
    build_policy,
)


def replace(told, **changes):
    """What a policy is told, changed."""
    return told._replace(**changes)


def seen(*lines, now=10.0, residents=(), swapping=()):
    return Snapshot(now, "0", residents, lines, swapping)


A_IS_UP = (Resident("a", "a", since=1.0, leases=0, last_used=8.0),)
OLD = Queue("b", waiting=2, oldest=3.0, newest=9.5, evicts=("a",), load_seconds=12.0)
YOUNG = Queue("c", waiting=1, oldest=9.0, newest=9.0, evicts=("a",))
B_COMES = (Swapping("b", evicts=("z",), state="evicting", since=8.0),)


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        (seen(), Stay()),
        (seen(OLD), SwapTo("b", Cause("oldest_first", waiting=2))),
        (seen(OLD, YOUNG, residents=A_IS_UP), SwapTo("b", Cause("oldest_first", waiting=2))),
        (seen(YOUNG, swapping=B_COMES), SwapTo("c", Cause("oldest_first", waiting=1))),
    ],
)
def test_eager_swaps_at_once_to_the_line_that_waits_longest(snapshot, decision):
    assert Eager().decide(snapshot) == decision


NOT_QUIET = Cause("not_quiet", seconds=2.0)


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        (seen(), Stay()),
        (seen(OLD), Stay(11.5, NOT_QUIET)),
        (seen(OLD, now=11.5), SwapTo("b", Cause("quiet", waiting=2))),
        (seen(OLD, YOUNG), Stay(11.0, NOT_QUIET)),
        (seen(OLD, YOUNG, now=11.0), SwapTo("c", Cause("quiet", waiting=1))),
        (seen(OLD, YOUNG, now=12.0), SwapTo("b", Cause("quiet", waiting=2))),
        (
            seen(replace(OLD, newest=22.5), now=23.0),
            SwapTo("b", Cause("held_longest", waiting=2)),
        ),
        (seen(replace(OLD, newest=22.5), now=22.5), Stay(23.0, NOT_QUIET)),
        (seen(replace(OLD, max_wait=8.0)), Stay(11.0, NOT_QUIET)),
        (seen(replace(YOUNG, newest=10.0, evicts=())), SwapTo("c", Cause("room_free", waiting=1))),
        (seen(OLD, replace(YOUNG, evicts=())), SwapTo("c", Cause("room_free", waiting=1))),
    ],
)
def test_debounce_holds_a_swap_until_its_line_is_quiet_or_held_long_enough(snapshot, decision):
    assert Debounce(quiet=2.0, max_hold=20.0).decide(snapshot) == decision


# cost_aware: the five checks, in the order of llmux's v3
LATE = Cause("waited_enough", waiting=2)
SERVES = Cause("swap_cost")
MORE = Cause("more_awaited")
ENOUGH_WAITED = Cause("none_awaited", waiting=2)
PAIR = Queue(
    "b", 2, oldest=99.0, newest=99.5, evicts=("a",), evict_seconds=1.0, load_seconds=7.0, learned=True
)
"""Its swap costs 8 s, so that 4 requests are worth it."""


def worth(waiting, required, seconds):
    return Cause("enough_wait", waiting=waiting, required=required, seconds=seconds)


def up(since, *, model="a", backend=None):
    return Resident(model, backend or model, since, leases=0, last_used=99.0)


FOR_LONG = (up(0.0),)


def at_100(*lines, residents=FOR_LONG):
    return seen(*lines, now=100.0, residents=residents)


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        # 1. Staleness goes before everything but room; its bound is the shorter of the two.
        (at_100(replace(PAIR, oldest=85.0), residents=(up(99.0),)), SwapTo("b", LATE)),
        (at_100(replace(PAIR, oldest=85.5), residents=(up(99.0),)), Stay(100.5, SERVES)),
        (at_100(replace(PAIR, oldest=94.0, max_wait=6.0), residents=(up(99.0),)), SwapTo("b", LATE)),
        (at_100(replace(PAIR, oldest=94.0, max_wait=7.0), residents=(up(99.0),)), Stay(101.0, SERVES)),
        # 2. Room.
        (
            at_100(replace(PAIR, waiting=1, evicts=()), residents=(up(99.0),)),
            SwapTo("b", Cause("room_free", waiting=1)),
        ),
        (at_100(replace(PAIR, evicts=()), residents=()), SwapTo("b", Cause("room_free", waiting=2))),
        # 3. The serving window, before the number of requests; that of the last that would go.
        (at_100(replace(PAIR, waiting=50), residents=(up(93.0),)), Stay(101.0, SERVES)),
        (
            at_100(replace(PAIR, waiting=50), residents=(up(92.0),)),
            SwapTo("b", worth(50, 4, 8.0)),
        ),
        (
            at_100(replace(PAIR, waiting=50, evicts=("a", "c")), residents=(up(0.0), up(94.0, model="c"))),
            Stay(102.0, SERVES),
        ),
        (at_100(replace(PAIR, waiting=50), residents=(up(0.0), up(97.0, backend="a2"))), Stay(105.0, SERVES)),
        (at_100(PAIR, residents=(up(0.0), up(99.0, model="c"))), Stay(101.0, MORE)),
        # 4. Enough requests.
        (at_100(replace(PAIR, waiting=4)), SwapTo("b", worth(4, 4, 8.0))),
        (at_100(replace(PAIR, waiting=3)), Stay(101.0, MORE)),
        (at_100(replace(PAIR, waiting=3, load_seconds=5.5)), Stay(101.0, MORE)),  # 3.25, rounded up
        (
            at_100(replace(PAIR, waiting=1, evict_seconds=0.0, load_seconds=0.0)),
            SwapTo("b", worth(1, 1, 0.0)),
        ),
        # 5. The window for more; when it is over nobody else is waited for.
        (at_100(PAIR), Stay(101.0, MORE)),
        (at_100(replace(PAIR, oldest=98.0)), SwapTo("b", ENOUGH_WAITED)),
        (at_100(replace(PAIR, max_wait=1.5)), Stay(100.5, MORE)),
        # The prior until a swap in this direction was made, whatever is estimated; then at most the cap.
        (
            at_100(replace(PAIR, waiting=5, load_seconds=300.0, learned=False)),
            SwapTo("b", worth(5, 5, 10.0)),
        ),
        (at_100(replace(PAIR, waiting=4, learned=False)), Stay(101.0, MORE)),
        (
            at_100(replace(PAIR, waiting=30, load_seconds=500.0)),
            SwapTo("b", worth(30, 30, 60.0)),
        ),
        (at_100(replace(PAIR, waiting=29, load_seconds=500.0), residents=(up(39.0),)), Stay(101.0, MORE)),
        # Several lines: the first that may go, else the earliest moment.
        (
            at_100(PAIR, replace(PAIR, model="c", waiting=4)),
            SwapTo("c", worth(4, 4, 8.0)),
        ),
        (at_100(PAIR, replace(PAIR, model="c", oldest=98.5)), Stay(100.5, MORE)),
        (at_100(residents=(up(0.0),)), Stay()),
    ],
)
def test_cost_aware_checks_age_room_the_serving_window_the_number_and_the_window_for_more(snapshot, decision):
    assert CostAware().decide(snapshot) == decision


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        (
            at_100(replace(PAIR, waiting=4), residents=(up(99.0),)),
            SwapTo("b", worth(4, 4, 8.0)),
        ),
        (at_100(PAIR, residents=(up(99.0),)), Stay(101.0, MORE)),
        (at_100(replace(PAIR, oldest=98.0), residents=(up(99.0),)), SwapTo("b", ENOUGH_WAITED)),
    ],
)
def test_cost_aware_without_the_serving_window_is_the_version_before_it(snapshot, decision):
    assert CostAware(serving_window=False).decide(snapshot) == decision


def test_cost_aware_with_no_amortization_swaps_for_one_request():
    policy = CostAware(amortization=0.0)
    assert policy.decide(at_100(PAIR)) == SwapTo("b", worth(2, 1, 8.0))


def test_cost_aware_decides_anew_when_the_window_is_over():
    policy, begun = CostAware(), at_100(PAIR)
    over = policy.decide(begun).until
    assert policy.decide(replace(begun, now=over)) == SwapTo("b", ENOUGH_WAITED)
    assert policy.decide(replace(begun, now=over, queues=())) == Stay()
    reloaded = replace(begun, now=over, residents=(up(100.5),))
    assert policy.decide(reloaded) == Stay(108.5, SERVES)


@pytest.mark.parametrize("policy", [Debounce(quiet=2.0), CostAware(), CostAware(serving_window=False)])
def test_debounce_and_cost_aware_need_not_be_asked_when_a_lease_ends(policy):
    assert policy.decide(at_100(PAIR)).leases == 0


# time_slice
SLICED = Resident("a", "a", since=90.0, leases=3, last_used=99.0, reload_seconds=2.0)
ONE = Queue("b", 1, oldest=99.0, newest=99.0, evicts=("a",))
NOT_OVER = Cause("slice", residents=("a",))


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        # 20 s are shared out by requests: 3 of 4, of 5, of 10; never less than 3 loads of 2 s.
        (at_100(ONE, residents=(SLICED,)), Stay(105.0, NOT_OVER)),
        (at_100(replace(ONE, waiting=2), residents=(SLICED,)), Stay(102.0, NOT_OVER)),
        (
            at_100(replace(ONE, waiting=7), residents=(SLICED,)),
            SwapTo("b", Cause("slice_over", waiting=7, residents=("a",))),
        ),
        (at_100(replace(ONE, waiting=7), residents=(replace(SLICED, since=95.0),)), Stay(101.0, NOT_OVER)),
        (
            at_100(ONE, residents=(replace(SLICED, leases=0, reload_seconds=5.0),)),
            Stay(105.0, NOT_OVER),
        ),
        (
            at_100(ONE, residents=(replace(SLICED, since=85.0),)),
            SwapTo("b", Cause("slice_over", waiting=1, residents=("a",))),
        ),
        # The waiting of all lines count, and when the slice is over the longest line goes.
        (at_100(ONE, replace(ONE, model="c"), residents=(SLICED,)), Stay(102.0, NOT_OVER)),
        (
            at_100(ONE, replace(ONE, model="c", waiting=9), residents=(SLICED,)),
            SwapTo("c", Cause("slice_over", waiting=9, residents=("a",))),
        ),
        # Room, and the bound of a line, go before any slice.
        (at_100(replace(ONE, evicts=()), residents=(SLICED,)), SwapTo("b", Cause("room_free", waiting=1))),
        (at_100(replace(ONE, max_wait=3.0), residents=(SLICED,)), Stay(102.0, NOT_OVER)),
        (
            at_100(replace(ONE, max_wait=1.0), residents=(SLICED,)),
            SwapTo("b", Cause("slice_over", waiting=1, residents=("a",))),
        ),
        # So does a line of a minute, the oldest first; the slice ends for it.
        (
            at_100(
                replace(ONE, waiting=9, oldest=39.0),
                replace(ONE, model="c", oldest=38.0),
                residents=(SLICED,),
            ),
            SwapTo("c", Cause("waited_enough", waiting=1)),
        ),
        (at_100(replace(ONE, oldest=43.0), residents=(SLICED,)), Stay(103.0, NOT_OVER)),
        # Of several that would go, the last slice counts; who goes need not be known.
        (
            at_100(
                replace(ONE, evicts=("a", "c")),
                residents=(SLICED, replace(SLICED, model="c", backend="c", since=95.0)),
            ),
            Stay(110.0, Cause("slice", residents=("a", "c"))),
        ),
        (at_100(ONE, residents=()), SwapTo("b", Cause("slice_over", waiting=1, residents=("a",)))),
        (at_100(), Stay()),
    ],
)
def test_time_slice_shares_the_time_out_by_requests(snapshot, decision):
    assert TimeSlice().decide(snapshot) == decision


def test_time_slice_need_not_be_asked_when_a_lease_ends_before_the_shortest_slice_is_over():
    short, long = replace(SLICED, leases=1, since=99.0), replace(SLICED, leases=3, since=99.0)
    pair = replace(ONE, waiting=9)
    assert [TimeSlice().decide(at_100(pair, residents=(each,))) for each in (short, long)] == [
        Stay(105.0, NOT_OVER),
        Stay(105.0, NOT_OVER),
    ]
    assert TimeSlice().decide(at_100(pair, residents=(short,))).leases == 0
    assert TimeSlice().decide(at_100(ONE, residents=(long,))).leases == FOREVER


# adaptive. A load of 9 s there and of 3 s back; b's line grows slowly, a is asked for once a second.
THERE = Queue("b", 1, 9.0, 9.0, ("a",), 1.0, 9.0, growth=0.2, service_seconds=2.0, max_wait=60.0)
LOVED = Resident(
    "a",
    "a",
    since=-100.0,
    leases=0,
    last_used=8.0,
    rate=1.0,
    growth=1.0,
    pause_seconds=1.0,
    service_seconds=4.0,
    reload_seconds=3.0,
)
CLOSED = replace(LOVED, since=5.0, last_used=9.0, growth=0.01, service_seconds=0.5)
"""The same rate, from clients that wait for their answers: its line would not grow."""


def adapted(resident, *lines, now=10.0):
    return Adaptive().decide(seen(*(lines or (THERE,)), now=now, residents=(resident,)))


def swaps(decision):
    return isinstance(decision, SwapTo)


def test_adaptive_swaps_at_once_if_nobody_has_asked_for_the_resident_of_late():
    assert swaps(adapted(replace(LOVED, rate=0.0, growth=0.0, last_used=-50.0)))


@pytest.mark.parametrize("leases", [1, 2, 4, 8, 50])
def test_adaptive_keeps_a_model_that_answers_and_takes_the_moment_when_it_does_not(leases):
    stay = adapted(replace(LOVED, since=5.0, leases=leases, last_used=9.5), replace(THERE, waiting=2))
    assert (stay.cause.kind, stay.cause.residents, stay.leases) == ("turn", ("a",), 1)
    assert swaps(adapted(replace(LOVED, since=5.0, leases=0, last_used=9.5), replace(THERE, waiting=2)))


def test_adaptive_asks_more_of_a_line_the_dearer_the_way_there_and_back():
    cheap = adapted(replace(CLOSED, reload_seconds=0.25), replace(THERE, waiting=5, load_seconds=0.5))
    assert swaps(cheap)
    assert not swaps(adapted(CLOSED, replace(THERE, waiting=5)))
    assert swaps(adapted(CLOSED, replace(THERE, waiting=20)))


def test_adaptive_waits_a_moment_after_an_answer_for_a_client_that_asks_again():
    unloved = replace(LOVED, rate=0.0, growth=0.0, last_used=9.9)
    line = replace(THERE, newest=9.95)
    stay = adapted(unloved, line, now=9.95)
    assert stay.until == 9.9 + Adaptive().pause
    assert (stay.cause.kind, stay.cause.residents) == ("in_use", ("a",))
    assert swaps(adapted(unloved, line, now=stay.until))


def test_adaptive_waits_a_shorter_moment_where_the_way_there_and_back_is_short():
    unloved = replace(LOVED, rate=0.0, growth=0.0, last_used=9.9, reload_seconds=0.1)
    frozen = replace(THERE, newest=9.9, evict_seconds=0.05, load_seconds=0.1)
    assert adapted(unloved, frozen, now=9.9).until == pytest.approx(9.93)


def test_adaptive_waits_for_clients_that_ask_again_after_their_answers_but_not_for_ever():
    far = replace(THERE, load_seconds=40.0)
    for idle in (0.25, 1.0, PAUSES * CLOSED.pause_seconds - 0.01):
        assert not swaps(adapted(replace(CLOSED, last_used=10.0 - idle)))
    assert swaps(adapted(replace(CLOSED, last_used=10.0 - PAUSES * CLOSED.pause_seconds)))
    assert not swaps(adapted(replace(CLOSED, last_used=7.0, pause_seconds=2.0), far))
    assert swaps(adapted(replace(CLOSED, last_used=6.0, pause_seconds=2.0), far))


SERVING = replace(CLOSED, since=0.0, leases=1, pause_seconds=0.5, service_seconds=2.0, growth=0.0)
"""It answers one client at a time, for 2 s each; the way there and back takes 1 + 9 + 3 s."""


def turn_over(resident, *lines):
    """The moment until which the resident stays, which is the same for whoever asks before it."""
    until = adapted(resident, *lines).until
    assert not swaps(adapted(resident, *lines, now=until - 0.01))
    decision = adapted(resident, *lines, now=until + 0.01)
    assert (decision.model, decision.cause.kind) == ("b", "turn_over")
    return until


def lost(line, now):
    """The seconds between two turns: there and back, half an answer, and those of all who wait at the end."""
    expected = line.waiting + line.growth * (2.0 * math.log(2) + 10.0)
    return 13.0 + 1.0 + 2.0 * math.log1p(expected)


@pytest.mark.parametrize(("since", "oldest"), [(0.0, 9.0), (9.0, 0.0), (-90.0, 9.0), (9.0, -20.0)])
def test_a_turn_is_half_as_long_again_as_a_swap_there_and_back_once_the_model_is_there_and_somebody_waits(
    since, oldest
):
    line = replace(THERE, oldest=oldest, newest=oldest, max_wait=600.0)
    until = turn_over(replace(SERVING, since=since), line)
    assert until == pytest.approx(max(since, oldest) + TURN * lost(line, until))


@pytest.mark.parametrize(("load_seconds", "answers"), [(0.1, 1), (1.0, 2), (4.0, 4), (9.0, 8), (90.0, 73)])
def test_while_all_clients_wait_a_turn_is_as_many_answers_as_fit_into_a_swap_there_and_back(
    load_seconds, answers
):
    together = replace(THERE, waiting=4, oldest=9.0, newest=9.1, load_seconds=load_seconds, max_wait=600.0)
    busy = replace(SERVING, leases=4, reload_seconds=load_seconds)
    ahead = 2.0 * 4 / 5 / 2  # the drain begins before the last answers end
    assert turn_over(busy, together) == pytest.approx(9.0 + answers * 2.5 - ahead)


@pytest.mark.parametrize("waiting", [FEW, 5, 20])
def test_all_clients_wait_once_nobody_has_joined_for_longer_than_at_random(waiting):
    line = replace(THERE, waiting=waiting, oldest=8.9, newest=9.9, evict_seconds=0.1, load_seconds=0.1)
    busy = replace(SERVING, reload_seconds=0.1, service_seconds=0.5, pause_seconds=0.0, growth=1.0)
    quiet = turn_over(busy, line) - line.newest
    assert (1.0 / (1.0 + quiet)) ** (waiting - 1) == pytest.approx(RARE)


@pytest.mark.parametrize(
    ("longest", "others", "waiting", "all_wait"),
    [
        (1.0, 1, 1, True),
        (2.0, 2, 2, True),
        (1.6, 2, 2, True),
        (2.0, 2, 1, False),
        (2.0, 3, 2, False),
        (0.0, 1, 1, False),
    ],
)
def test_one_or_two_who_wait_are_all_if_no_queue_was_longer_and_the_model_that_answers_has_no_more_clients(
    longest, others, waiting, all_wait
):
    line = replace(THERE, waiting=waiting, oldest=9.0, newest=9.0, longest=longest)
    busy = replace(SERVING, growth=1 - 1 / others)
    whole_answers = 9.0 + 6 * 2.5 - 2.0 / 2 / 2
    assert turn_over(busy, line) == pytest.approx(whole_answers if all_wait else 9.0 + TURN * lost(line, 9.0))


def test_not_all_wait_while_queues_were_longer_before():
    line = replace(THERE, waiting=4, oldest=8.9, newest=9.0, longest=4.1)
    assert turn_over(SERVING, line) == pytest.approx(8.9 + TURN * lost(line, 8.9))


def test_adaptive_serves_the_queue_first_that_is_oldest_once_a_turn_is_over():
    near = replace(THERE, model="near", waiting=5, oldest=4.0, newest=8.0, load_seconds=3.0)
    assert adapted(SERVING, replace(THERE, oldest=1.0, newest=1.0), near, now=50.0).model == "b"
    assert (
        adapted(SERVING, replace(THERE, oldest=1.0, newest=1.0), replace(near, priority=1), now=50.0).model
        == "near"
    )


def test_adaptive_waits_less_for_them_the_longer_their_model_has_served():
    assert swaps(adapted(replace(CLOSED, since=-100.0)))


def test_adaptive_never_waits_past_the_bound_of_any_line():
    busy = replace(LOVED, since=9.0, leases=50, last_used=10.0)
    later = replace(THERE, model="c", oldest=-49.9)
    assert adapted(busy, THERE, later).until == -49.9 + 60.0
    assert adapted(busy, THERE, replace(later, oldest=-50.0)) == SwapTo(
        "c", Cause("waited_enough", waiting=1)
    )
    unloved = replace(LOVED, rate=0.0, growth=0.0, last_used=10.0)
    assert adapted(unloved, replace(THERE, newest=10.0, max_wait=1.1)).until == 9.0 + 1.1


def test_adaptive_serves_those_first_with_whom_the_squares_of_all_waits_are_least():
    unloved = replace(LOVED, rate=0.0, growth=0.0, last_used=-50.0)
    slow, quick = (
        replace(THERE, model="slow", waiting=3, load_seconds=60.0),
        replace(THERE, model="quick", waiting=2),
    )
    assert adapted(unloved, slow, quick).model == "quick"
    assert adapted(unloved, replace(slow, waiting=30), quick).model == "slow"
    long_ago = replace(slow, oldest=-145.0, newest=-140.0, max_wait=600.0)
    assert adapted(unloved, long_ago, quick).model == "slow"


@pytest.mark.parametrize("name", POLICIES)
def test_of_two_lines_that_may_go_that_with_the_higher_priority_goes_first_even_if_it_is_shorter(name):
    low = replace(PAIR, model="low", waiting=3, oldest=70.0, newest=70.0)
    high = replace(PAIR, model="high", waiting=1, oldest=75.0, newest=75.0, priority=1)
    assert build_policy(name).decide(at_100(high, low)).model == "high"
    assert build_policy(name).decide(at_100(replace(low, priority=2), high)).model == "low"


def test_adaptive_loads_into_free_room_at_once():
    line = replace(THERE, evicts=())
    assert adapted(replace(LOVED, leases=9), THERE, line) == SwapTo("b", Cause("room_free", waiting=1))


# What was at fault in llmux, in the simulator: model a loads in 3 s, b in 9 s, a is up at the start.


def played(policy, trace, *, engines=None, resident="a", **settings):
    backends = tuple(Backend(name, name, ("0",)) for name in "ab")
    config = Config(backends, policy=policy, policy_settings=settings, max_wait=60.0, drain_timeout=30.0)
    engines = engines or Engines({"a": 3.0, "b": 9.0}, stop_seconds=0.0)
    log = simulate(config, trace, engines, resident=[resident])
    assert check(log, config) == []
    return log


def moments(log, kind, model):
    return [event.at for event in log if event.kind == kind and event.model == model]


def waits(log, model):
    return [event.seconds for event in log if event.kind == "leased" and event.model == model]


def endless(model, seconds, every=0.5, service=2.0):
    return [Arrival(n * every, model, service) for n in range(round(seconds / every))]


def test_p1_a_request_that_arrives_in_mid_swap_is_decided_like_any_other():
    trace = [*(Arrival(20.0, "b", 1.0) for _ in range(5)), Arrival(24.0, "a", 1.0)]
    log = played("cost_aware", trace)
    assert moments(log, "ready", "b") == [29.0]
    assert moments(log, "draining", "b") == [29.0 + 10.0]  # its serving window: the prior
    assert moments(played("time_slice", trace), "draining", "b") == [29.0 + 3 * 9.0]  # its shortest slice


def test_p2_a_lone_request_goes_when_it_has_waited_long_enough_though_no_other_arrives():
    log = played("cost_aware", [Arrival(20.0, "b", 1.0)], window=1000.0)
    assert moments(log, "draining", "a") == [35.0]
    assert [event.cause for event in log if event.kind == "loading"] == [Cause("waited_enough", waiting=1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_p3_a_lone_request_under_endless_traffic_for_the_resident_is_served(policy):
    trace = sorted([*endless("a", 300.0), Arrival(50.125, "b", 1.0)])
    (wait,) = waits(played(policy, trace), "b")
    assert wait <= 60.0 + 2.0 + 9.0
    if policy in ("cost_aware", "time_slice"):  # their own bounds are closer
        assert wait <= 20.0 + 2.0 + 9.0


@pytest.mark.parametrize("policy", POLICIES)
def test_p4_a_swap_that_failed_leaves_no_deferral_behind(policy):
    class FailsOnce(Engines):
        def __call__(self, step, nth):
            outcome = super().__call__(step, nth)
            broken = step.backend == "b" and nth == 0
            return Outcome(outcome.seconds, LoadError("broken") if broken else None)

    engines = FailsOnce({"a": 3.0, "b": 9.0}, stop_seconds=0.0)
    trace = [
        Arrival(20.0, "b", 1.0),
        Arrival(60.0, "a", 1.0),
        Arrival(120.0, "b", 1.0),
        Arrival(300.0, "a", 1.0),
    ]
    log = played(policy, trace, engines=engines)
    assert [event.model for event in log if event.kind == "failed"] == ["b"]
    assert waits(log, "b")[0] <= 15.0 + 9.0


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "eager"])
def test_p5_a_deferral_whose_requests_have_left_loads_nothing(policy):
    trace = sorted([*endless("a", 40.0), Arrival(20.125, "b", 1.0, patience=0.5), Arrival(60.0, "a", 1.0)])
    log = played(policy, trace)
    assert [event.kind for event in log if event.model == "b"][-1] == "gone"
    assert moments(log, "loading", "b") == []


def test_p6_who_has_left_counts_neither_as_number_nor_as_age():
    left = [Arrival(20.0, "b", 1.0, patience=1.0) for _ in range(4)]
    log = played("cost_aware", [*left, Arrival(20.5, "b", 1.0)])  # five are worth a swap at once
    assert moments(log, "draining", "a") == [20.5]
    log = played("cost_aware", [*left, Arrival(21.5, "b", 1.0)])
    assert moments(log, "draining", "a") == [23.5]
    log = played("cost_aware", [left[0], Arrival(34.0, "b", 1.0)], window=99.0)
    assert moments(log, "draining", "a") == [34.0 + 15.0]
