"""What a terminal shows: messages in, lines out."""

from __future__ import annotations

from typing import Any

import pytest

from anvil_mux.cli.screen import (
    LAST,
    MODEL_HEAD,
    TopScreen,
    last_lines,
    lost_hosts,
    model_row,
    paint,
    table,
    width,
)

BACKEND: dict[str, Any] = {"size": None, "unload_seconds": None}
MODEL: dict[str, Any] = {
    "gpus": ["0"],
    "leases": 0,
    "waiting": 0,
    "load_seconds": None,
    "last_error": None,
    "backend": "it",
    "backends": {"it": BACKEND},
}


def state(**more: Any) -> dict[str, Any]:
    models = {
        "a": {**MODEL, "state": "draining", "leases": 2, "load_seconds": 3.04},
        "b": {
            **MODEL,
            "state": "stopped",
            "pinned": True,
            "waiting": 1,
            "last_error": "exited with code 1\nmore",
        },
    }
    drain = {"target": "b", "leases": 2, "seconds_left": 11.6}
    gpus = {"0": {"state": "draining", "residents": ["a"], "draining": drain}}
    told = {"version": "1.0", "status": "ok", "leases": 2, "waiting": 1, "problems": {}, "queued": []}
    return {**told, "models": models, "gpus": gpus, **more}


def event(number: int) -> dict[str, Any]:
    return {"at": float(number), "model": "a", "text": f"event {number}"}


def rows(picture: TopScreen, now: float = 0.0) -> list[list[str]]:
    return [line.split() for line in picture.lines(now)]


def test_a_picture_shows_gpus_models_and_lines() -> None:
    picture = TopScreen()
    picture.take("snapshot", state(queued=[{"ticket": 7, "model": "b", "since": 100.0}], events=[]))
    shown = rows(picture, 112.0)
    assert shown[0] == ["anvil-mux", "1.0:", "ok,", "2", "in", "flight,", "1", "waiting"]
    assert ["0", "draining", "a", *["makes", "room", "for", "b,", "12", "s", "left"]] in shown
    assert ["a", "draining", "0", "2", "0", "3.0", "s", "leaving"] in shown
    assert ["b", "stopped", "pinned", "0", "0", "1", "exited", "with", "code", "1"] in shown
    assert ["#7", "b", "12", "s"] in shown


def test_what_happened_to_a_backend_that_failed_is_shown_in_full_with_its_engines_last_lines() -> None:
    failed = {"error": "exited with code 139", "log": [f"line {n}" for n in range(9)]}
    models = {"a": {"backends": {"a": {"error": None, "log": []}}}, "b": {"backends": {"b-1": failed}}}
    shown = list(last_lines(models))
    assert shown == ["", "b-1: exited with code 139", *[f"  | line {n}" for n in range(4, 9)]]


def test_a_lost_host_is_named_with_its_backends_and_those_who_are_there_are_marked() -> None:
    backends = {"m0": BACKEND, "m1": {**BACKEND, "host": "h1", "host_lost": True}}
    only_there = {"c": {**BACKEND, "host": "h1", "host_lost": True}}
    models = {
        "m": {**MODEL, "state": "ready", "backend": "m0", "backends": backends, "host_lost": False},
        "c": {**MODEL, "state": "ready", "backend": "c", "backends": only_there, "host_lost": True},
    }
    gpu = {"state": "ready", "residents": ["c"], "draining": None, "host": "h1", "host_lost": True}
    hosts = {"h1": {"lost": True, "lost_seconds": 12.3}, "h2": {"lost": False, "lost_seconds": None}}
    seen = state(models=models, gpus={"h1/0": gpu}, hosts=hosts)
    assert list(lost_hosts(seen)) == ["host h1: lost for 12 s; its backends serve nobody: m1, c"]
    picture = TopScreen()
    picture.take("snapshot", {**seen, "events": []})
    shown = picture.lines(0.0)
    assert f"problem: {next(lost_hosts(seen))}" in shown
    assert [line.split()[:5] for line in shown if "host lost" in line] == [
        ["h1/0", "ready", "host", "lost", "c"],
        ["c", "ready", "host", "lost", "0"],
    ]
    assert list(lost_hosts(state())) == []


def test_a_picture_follows_the_state_and_keeps_the_last_events() -> None:
    picture = TopScreen()
    picture.take("snapshot", state(events=[event(0)]))
    for number in range(1, LAST + 3):
        picture.take("event", event(number))
    picture.take("state", state(status="unhealthy", problems={"docker": "cannot be reached"}))
    lines = picture.lines(0.0)
    assert [line.partition("a: ")[2] for line in lines[-LAST:]] == [f"event {n}" for n in range(3, LAST + 3)]
    assert "problem: docker: cannot be reached" in lines


@pytest.mark.parametrize(
    ("about", "seconds", "until"),
    [
        ({"state": "ready"}, None, "another comes"),
        ({"state": "ready"}, 90.0, "90 s from now"),
        ({"state": "ready"}, 250.0, "4 min from now"),
        ({"state": "ready", "pinned": True}, None, "unpinned"),
        ({"state": "ready", "pinned": True}, 90.0, "90 s from now"),
        ({"state": "ready", "leases": 1}, None, "in use"),
        ({"state": "evicting"}, None, "leaving"),
        ({"state": "stopped"}, None, ""),
    ],
)
def test_a_row_says_what_a_model_takes_and_how_long_it_stays(
    about: dict[str, Any], seconds: float | None, until: str
) -> None:
    backends = {"it": {"size": 3 << 29, "unload_seconds": seconds}}
    row = dict(zip(MODEL_HEAD, model_row("a", {**MODEL, **about, "backends": backends}), strict=True))
    assert (row["SIZE"], row["UNTIL"]) == ("1.5 GiB", until)


def test_colours_take_no_room_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    cell = paint("ready", "32")
    assert (len(cell) > 5, width(cell)) == (True, 5)
    assert table(("A", "B"), [(cell, "x"), ("longer", "y")])[1] == f"{cell}   x"
