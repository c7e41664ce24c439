"""The checker sees what is broken: each log is sound but for its last event, or the one marked."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.lab.checker import check
from anvil_mux.scheduler.events import Cause, Event
from tests.lab.test_simulate import TWO, one


def said(*events, config=TWO):
    """What ``check`` says of events written as (moment, kind, name, ticket, more...)."""
    models = {backend.name: backend.model for backend in config.backends}
    log = []
    for at, kind, name, ticket, *more in events:
        fields = dict(more[0]) if more else {}
        where = "" if kind in ("queued", "gone", "failed", "deferred") else name
        size = fields.pop("size", 1 if kind == "leased" else 0)
        log.append(Event(at, kind, models.get(name, name), where, ticket, size, **fields))
    return check(log, config)


UP = [(0.0, "queued", "a", 1), (0.0, "loading", "a", 0), (3.0, "ready", "a", 0), (3.0, "leased", "a", 1)]
FOR_B = {"seconds": 5.0, "target": "b"}
DRAINING = [*UP, (4.0, "queued", "b", 2), (4.0, "draining", "a", 0, FOR_B)]


def test_a_sound_log_has_no_fault():
    assert said(*UP) == []
    assert said(*DRAINING, (9.0, "severed", "a", 1), (9.0, "evicting", "a", 0)) == []
    assert said(*UP, (5.0, "released", "a", 1)) == []
    assert said((0.0, "pinned", "a", 0), (0.0, "unpinned", "a", 0), *DRAINING) == []
    cancelled = [*UP[:2], (1.0, "gone", "a", 1), (1.0, "cancelling", "a", 0), (2.0, "stopped", "a", 0)]
    assert said(*cancelled, (2.0, "queued", "a", 2), (2.0, "loading", "a", 0)) == []  # without cool-down


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([*UP, (2.0, "released", "a", 1)], "time goes backwards"),
        ([(0.0, "queued", "a", 1), (0.0, "ready", "a", 0), (0.0, "released", "a", 1)], "still waits"),
        ([*DRAINING, (5.0, "leased", "a", 3)], "not ready"),
        ([*UP, (4.0, "failed", "a", 1)], "ends twice"),
        ([*UP, (4.0, "ready", "other", 0)], "no such backend or model"),
        ([*UP, (4.0, "queued", "other", 2)], "no such backend or model"),
        ([*UP, (4.0, "queued", "a", 1)], "has ended"),
        ([(0.0, "queued", "a", 1), (51.0, "failed", "a", 1)], "queue_timeout"),
        ([*UP, (4.0, "queued", "b", 2), (4.0, "loading", "b", 0)], "overfull"),
        ([*UP, (4.0, "evicting", "a", 0)], "it was ready"),
        ([*DRAINING, (9.5, "evicting", "a", 0)], "longer than drain_timeout"),
        ([*UP, (4.0, "draining", "a", 0, FOR_B)], "for nobody"),
        ([*DRAINING[:-1], (4.0, "draining", "a", 0, {**FOR_B, "seconds": 5.5})], "than its drain_timeout"),
        ([(0.0, "pinned", "a", 0), *DRAINING], "it is pinned"),
        ([*DRAINING, (5.0, "gone", "b", 2), (5.0, "evicting", "a", 0)], "nobody waits for b"),
        ([(0.0, "loading", "a", 0)], "nobody waits for it"),
        ([*UP[:2], (1.0, "cancelling", "a", 0)], "somebody waits for it"),
        ([*UP[:2], (1.0, "gone", "a", 1), (1.0, "cancelling", "a", 0, {"target": "b"})], "for nobody"),
        ([*UP, (4.0, "released", "a", 1), (5.0, "released", "a", 1)], "held no lease"),
        ([*UP, (4.0, "queued", "b", 2), (25.0, "released", "a", 1)], "overdue"),
        ([*UP, (4.0, "queued", "b", 2, {"bound": 5.0}), (9.5, "released", "a", 1)], "overdue"),
        (
            [
                *UP[:2],
                (1.0, "stopped", "a", 0, {"cause": Cause("load_failed", detail="no")}),
                (1.0, "failed", "a", 1),
                (5.0, "queued", "a", 2),
                (5.0, "loading", "a", 0),
            ],
            "cool-down",
        ),
    ],
)
def test_the_checker_names_what_is_wrong(events, problem):
    assert any(problem in line for line in said(*events)), said(*events)


@pytest.mark.parametrize(
    ("own", "moment", "overdue"),
    [
        ("auto", 23.5, False),  # so that of all
        ("auto", 24.5, True),
        (5.0, 8.5, False),
        (5.0, 9.5, True),
        (30.0, 33.5, False),
        (30.0, 34.5, True),
    ],
)
def test_the_checker_knows_the_max_wait_of_each_model(own, moment, overdue):
    config = replace(TWO, backends=(one("a", "0"), one("b", "0", max_wait=own)))
    found = said(*UP, (4.0, "queued", "b", 2), (moment, "released", "a", 1), config=config)
    assert any("b is overdue" in line for line in found) == overdue


def test_slack_forgives_what_threads_are_late():
    config = Config(policy="eager", backends=TWO.backends, queue_timeout=50.0)
    log = [Event(0.0, "queued", "a", ticket=1), Event(0.0, "loading", "a", "a")]
    log.append(Event(50.01, "failed", "a", ticket=1))
    assert len(check(log, config)) == 1
    assert check(log, config, slack=0.1) == []
