"""The log of a run, out of what an anvil-mux tells on /events: like that of a simulation."""

from typing import Any

import pytest

from anvil_mux.lab.figures import figures
from anvil_mux.lab.plot import History
from anvil_mux.lab.watching import EventWatch, serving_share
from anvil_mux.scheduler.events import Event


def backend(state: str, *gpus: str) -> dict[str, Any]:
    return {"state": state, "gpus": list(gpus), "standby_level": None}


def move(at: float, kind: str, name: str, seconds: float | None = 0.0, **more: Any) -> dict[str, Any]:
    said = {"at": at, "kind": kind, "model": name, "backend": name, "size": 0, "seconds": seconds}
    return {**said, "cause": None, "target": "", "way": "", **more}


def request(id: str, model: str, ended: float, seconds: float, waited: float, **more: Any) -> dict[str, Any]:
    said = {"id": id, "model": model, "ended": ended, "seconds": seconds, "waited": waited, "status": 200}
    return {**said, "code": "", **more}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> EventWatch:
    """A server whose clock is 1000 s ahead; a is resident, both models stand on GPU 0, b on GPU 1 too."""
    monkeypatch.setattr("anvil_mux.lab.watching.time.time", lambda: 500.0)
    made = EventWatch("http://nobody:1")
    models = {
        "a": {"backends": {"a": backend("ready", "0")}},
        "b": {"backends": {"b": backend("stopped", "0", "1")}},
    }
    made.take("snapshot", {"now": 1500.0, "models": models})
    return made


def test_it_is_folded_into_the_figures_of_a_simulation(watch):
    for kind, name, at, seconds in (
        ("draining", "a", 1601.0, None),
        ("evicting", "a", 1602.0, 1.0),
        ("stopped", "a", 1602.5, 0.0),
        ("loading", "b", 1602.5, 0.0),
        ("ready", "b", 1605.5, 3.0),
    ):
        watch.take("event", move(at, kind, name, seconds))
    watch.take("event", move(1603.0, "deferred", "a"))
    watch.take("requests", {"requests": [request("1", "a", 1602.0, 2.0, 0.0)]})
    watch.take(
        "requests", {"requests": [request("2", "b", 1607.5, 6.5, 4.5), request("other", "a", 1603.0, 1, 0)]}
    )
    told = watch.log(600.0, ["1", "2"])
    assert [(round(e.at, 3), e.kind, e.ticket) for e in told.events if e.ticket] == [
        (0.0, "leased", 1),
        (1.0, "queued", 2),
        (2.0, "released", 1),
        (5.5, "leased", 2),
        (7.5, "released", 2),
    ]
    found = figures(told.events, begins=told.begins)
    assert (found.requests, found.swaps, found.failed, found.severed) == (2, 1, 0, 0)
    assert found.makespan_seconds == pytest.approx(7.5)
    assert found.wait_mean_seconds == pytest.approx(2.25)
    assert found.swap_seconds == pytest.approx(0.5 + 3.0)
    assert found.busy_fraction == pytest.approx((2.0 + 2.0) / 7.5)
    assert told.waits == {"1": 0.0, "2": 4.5}
    assert told.served == {"1": 2.0, "2": 2.0}
    assert told.missed == 0
    # GPU 0 is swapped from the drain of a on, GPU 1 while b is loaded.
    share = serving_share(told.events, told.begins, watch.gpus, 7.5)
    assert share == pytest.approx(1 - (4.5 + 3.0) / 15.0)
    states = [(bar.backend, bar.state) for bar in History(told.events, told.begins).bars]
    assert states[:3] == [("a", "ready"), ("a", "draining"), ("a", "evicting")]


def test_a_run_begins_with_what_happened_before_it(watch):
    watch.take("event", move(1550.0, "draining", "a", 30.0))
    watch.take("event", move(1550.0, "evicting", "a"))
    watch.take("event", move(1551.0, "stopped", "a"))
    watch.take("event", move(1551.0, "loading", "b"))
    watch.take("event", move(1554.0, "ready", "b", 3.0))
    told = watch.log(600.0, [])
    assert {name: each.get("state") for name, each in told.begins["backends"].items()} == {"b": "ready"}
    assert told.events == []
    assert watch.swap_times().loads == {"b": [3.0]}
    assert watch.swap_times().evictions == {"a": [1.0]}
    assert watch.swap_times(since=600.0).loads == {}


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ({"code": "severed"}, ["queued", "leased", "severed"]),
        ({"status": 503, "code": "overloaded"}, ["queued", "failed"]),
        ({"status": 499, "code": "client_left"}, ["queued", "gone"]),
    ],
)
def test_requests_that_failed(watch, said, kinds):
    watch.take("requests", {"requests": [request("1", "a", 1603.0, 2.0, 0.5, **said)]})
    assert [event.kind for event in watch.log(600.0, ["1"]).events] == kinds


def test_what_was_not_told_is_counted(watch):
    watch.take("lost", {"events": 3})
    watch.take("requests", {"requests": [request("1", "a", 1603.0, 2.0, 0.5)]})
    assert watch.log(600.0, ["1", "2"]).missed == 4


def test_a_gpu_that_is_swapped_to_the_end_does_not_serve():
    log = [Event(6.0, "loading", "b", "b")]
    assert serving_share(log, {}, {"b": ("0",)}, 8.0) == pytest.approx(6.0 / 8.0)
    assert serving_share(log, {}, {"b": ()}, 8.0) is None
