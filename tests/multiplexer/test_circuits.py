"""The circuit before a server elsewhere, in a clock that the test sets."""

import threading

import pytest

from anvil_mux.clock import Clock
from anvil_mux.errors import CircuitOpen
from anvil_mux.multiplexer.circuits import FIRST_PAUSE, LONGEST_PAUSE, MOST_FAILURES, Circuit, Circuits


class SetClock(Clock):
    """Time is what the test says."""

    def __init__(self) -> None:
        self.moment = 100.0
        self.now = lambda: self.moment

    def lock(self) -> threading.Lock:
        return threading.Lock()


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def circuits(clock: SetClock, told: list[tuple[str, str]]) -> Circuits:
    return Circuits(clock, lambda name, to: told.append((name, to.state)))


def fail(circuits: Circuits, times: int = MOST_FAILURES, pause: float | None = None) -> None:
    for _ in range(times):
        circuits.begin("gpt").failed("it answered 500", pause=pause)


def test_failures_in_a_row_open_it_and_a_success_begins_anew(circuits, told):
    fail(circuits, MOST_FAILURES - 1)
    circuits.begin("gpt").succeeded()
    fail(circuits, MOST_FAILURES - 1)
    assert (circuits.of("gpt").state, told) == ("closed", [])
    fail(circuits, 1)
    assert (circuits.of("gpt").state, told) == ("open", [("gpt", "open")])
    with pytest.raises(CircuitOpen) as refused:
        circuits.begin("gpt")
    assert refused.value.retry_after == FIRST_PAUSE
    assert refused.value.message == "gpt is not asked for now, since it answered 500. Try again in 5 s."
    circuits.begin("other").succeeded()


def test_half_open_by_one_request(circuits, clock, told):
    fail(circuits)
    clock.moment += FIRST_PAUSE
    trial = circuits.begin("gpt")
    assert trial.is_trial
    with pytest.raises(CircuitOpen) as refused:
        circuits.begin("gpt")
    assert refused.value.retry_after == 1.0
    with pytest.raises(CircuitOpen):
        circuits.check("gpt")
    trial.succeeded()
    trial.failed("the first report counts")
    assert not circuits.begin("gpt").is_trial
    assert told == [("gpt", "open"), ("gpt", "closed")]


def test_each_trial_that_fails_doubles_the_pause(circuits, clock):
    fail(circuits)
    pauses = []
    for _ in range(6):
        pauses.append(circuits.pause_left("gpt"))
        clock.moment += pauses[-1]
        circuits.begin("gpt").failed("it answered 500")
    assert pauses == [5.0, 10.0, 20.0, 40.0, LONGEST_PAUSE, LONGEST_PAUSE]


def test_a_trial_that_says_nothing_leaves_it_to_the_next(circuits, clock):
    fail(circuits)
    clock.moment += FIRST_PAUSE
    circuits.begin("gpt").left()
    assert circuits.begin("gpt").is_trial


def test_a_pause_that_is_asked_for_holds_at_once_and_is_bounded(circuits, clock):
    fail(circuits, 1, pause=17.0)
    assert circuits.pause_left("gpt") == 17.0
    clock.moment += 17.0
    fail(circuits, 1, pause=1e9)
    assert circuits.pause_left("gpt") == 300.0


def test_what_was_under_way_when_it_opened_changes_nothing(circuits):
    early, late = circuits.begin("gpt"), circuits.begin("gpt")
    fail(circuits, 1, pause=30.0)
    early.succeeded()
    late.failed("it broke off")
    assert circuits.of("gpt").state == "open"
    assert circuits.pause_left("gpt") == 30.0


def test_a_server_that_cannot_be_reached_when_asked_opens_it_until_it_can(circuits, told):
    circuits.asked("gpt", "cannot be reached: refused")
    with pytest.raises(CircuitOpen, match="since it cannot be reached: refused"):
        circuits.begin("gpt")
    circuits.asked("gpt", "")
    assert not circuits.begin("gpt").is_trial
    assert told == [("gpt", "open"), ("gpt", "closed")]


def test_that_it_is_there_does_not_say_that_it_works(circuits):
    fail(circuits)
    circuits.asked("gpt", "")
    assert circuits.of("gpt").state == "open"


def test_a_trial_under_way_is_not_disturbed(circuits, clock):
    fail(circuits)
    clock.moment += FIRST_PAUSE
    trial = circuits.begin("gpt")
    circuits.asked("gpt", "cannot be reached")
    trial.succeeded()
    assert circuits.of("gpt").state == "closed"


def test_only_what_is_configured_is_remembered(circuits):
    fail(circuits)
    circuits.keep(frozenset(("other",)))
    assert circuits.of("gpt") == Circuit()


def test_one_that_requests_could_not_reach_is_asked_too(circuits):
    for _ in range(MOST_FAILURES):
        circuits.begin("gpt").failed("it cannot be reached", away=True)
    circuits.asked("gpt", "")
    assert circuits.of("gpt").state == "closed"
