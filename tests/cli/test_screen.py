"""What a terminal shows: messages in, lines out."""

from typing import Any

import pytest

from anvil_mux.cli import screen
from anvil_mux.cli.main import main
from anvil_mux.cli.output import paint, table, width
from anvil_mux.cli.screen import (
    LAST,
    MODEL_COLUMNS,
    TopScreen,
    event_line,
    hosts_not_here,
    last_lines,
    models_table,
    other_programs,
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


@pytest.mark.parametrize(
    ("waiting", "printed"), [(1, "A request for b waits.\n"), (0, "Nobody waits for a model.\n")]
)
def test_why_without_a_model_explains_those_that_somebody_waits_for(waiting, printed, monkeypatch, capsys):
    def ask(given: object, method: str, path: str, query: Any = None, **how: object) -> dict[str, Any]:
        if path == "/why":
            return {"sentence": f"A request for {query['model']} waits.", "stages": {}}
        seen = state()
        seen["models"]["b"]["waiting"] = waiting
        return seen

    monkeypatch.setattr(screen, "ask", ask)
    assert main(["why"]) == 0
    assert capsys.readouterr().out == printed


def test_presets_stand_below_the_models():
    seen = state()
    seen["models"]["a"]["presets"] = ["a-fast", "a-think"]
    assert models_table(seen)[3:] == ["presets of a: a-fast, a-think"]


def test_a_queue_with_a_length_of_its_own_is_shown_with_it():
    seen = state()
    seen["models"]["b"] |= {"waiting": 3, "max_queue": 8}
    seen["models"]["a"]["waiting"] = 2
    column = models_table(seen)[0].index("WAITING")
    shown = {line[:2].strip(): line[column : column + 6].strip() for line in models_table(seen)[1:3]}
    assert shown == {"a": "2", "b": "3 of 8"}


def test_prompts_on_disk_stand_below_the_models():
    seen = state()
    kept = {"prompts": 2, "tokens": 12345, "size": 3 << 19}
    seen["models"]["b"]["backends"] = {"it": BACKEND, "b-2": {**BACKEND, "kept_prompts": kept}}
    assert models_table(seen)[3:] == ["prompts of b-2 on disk: 2 (12345 tokens, 1.5 MiB)"]


def test_a_drain_without_an_end_says_whose_answer_it_waits_for():
    answers = [{"model": "a", "request": "id-1", "run_seconds": 750.0}]
    drain = {"target": "b", "leases": 1, "seconds_left": None, "answers": answers}
    models = {"a": {**MODEL, "state": "draining", "leases": 1, "draining": drain}}
    gpus = {"0": {"state": "draining", "residents": ["a"], "draining": drain}}
    picture = TopScreen()
    picture.take("snapshot", state(models=models, gpus=gpus, events=[]))
    shown = [" ".join(row) for row in rows(picture)]
    assert "GPU 0 draining a makes room for b, once its requests have ended" in shown
    assert "a draining GPU 0 1 0 id-1 ends (12 min)" in shown


def event(number: int) -> dict[str, Any]:
    return {"at": float(number), "model": "a", "text": f"event {number}"}


def rows(picture: TopScreen, now: float = 0.0) -> list[list[str]]:
    return [line.split() for line in picture.lines(now)]


def test_a_picture_shows_gpus_models_and_lines():
    picture = TopScreen()
    picture.take("snapshot", state(queued=[{"ticket": 7, "model": "b", "since": 100.0}], events=[]))
    shown = rows(picture, 112.0)
    assert shown[0] == ["anvil-mux", "1.0:", "ok,", "2", "in", "flight,", "1", "waiting"]
    assert ["GPU", "0", "draining", "a", *["makes", "room", "for", "b,", "12", "s", "left"]] in shown
    assert ["a", "draining", "GPU", "0", "2", "0", "3.0", "s", "leaving"] in shown
    assert ["b", "stopped", "pinned", "GPU", "0", "0", "1", "exited", "with", "code", "1"] in shown
    assert ["#7", "b", "12", "s"] in shown


def test_what_happened_to_a_backend_that_failed_is_shown_in_full_with_its_engines_last_lines():
    failed = {"error": "exited with code 139", "log": [f"line {n}" for n in range(9)]}
    models = {"a": {"backends": {"a": {"error": None, "log": []}}}, "b": {"backends": {"b-1": failed}}}
    shown = list(last_lines(models))
    assert shown == ["", "b-1: exited with code 139", *[f"  | line {n}" for n in range(4, 9)]]


# Several hosts

GPU: dict[str, Any] = {"state": "free", "residents": [], "draining": None}
HOST: dict[str, Any] = {"lost": False, "lost_seconds": None, "away": False, "drained": False}
LOST = {**HOST, "lost": True, "lost_seconds": 12.3}


def on(host: str, state: str = "ready", *, lost: bool = False, **more: Any) -> dict[str, Any]:
    return {**BACKEND, "state": state, "gpus": [f"{host}/0"], "host": host, "host_lost": lost, **more}


def model(candidates: tuple[int, int], **backends: dict[str, Any]) -> dict[str, Any]:
    counted = dict(zip(("backends", "hosts"), candidates, strict=True))
    first, about = next(iter(backends.items()))
    lost = all(each["host_lost"] for each in backends.values())
    told = {"state": about["state"], "backend": first, "backends": backends, "candidates": counted}
    return {**MODEL, **told, "host_lost": lost}


def test_a_host_that_is_not_here_is_named_with_what_is_loaded_there():
    models = {
        "m": model((3, 3), m0=on("h2"), m1=on("h1", lost=True), m2=on("h1", "stopped", lost=True)),
        "c": model((1, 1), c=on("h1", lost=True)),
    }
    gpus = {"h1/0": {**GPU, "state": "ready", "residents": ["c"], "host": "h1", "host_lost": True}}
    hosts = {"h1": LOST, "h2": {**HOST, "drained": True}, "h3": {**HOST, "away": True}, "h4": HOST}
    seen = state(models=models, gpus=gpus, hosts=hosts)
    told = [
        "host h1: lost for 12 s; loaded there, serving nobody: m1, c",
        "host h2: drained; loaded there, until its requests have ended: m0",
        "host h3: away",
    ]
    assert list(hosts_not_here(seen)) == told
    picture = TopScreen()
    picture.take("snapshot", {**seen, "events": []})
    shown = picture.lines(0.0)
    assert [line for line in shown if line.startswith("problem: ")] == [f"problem: {each}" for each in told]
    assert [line.split()[:4] for line in shown if "host lost" in line] == [["c", "host", "lost", "h1/0"]]
    assert list(hosts_not_here(state())) == []


def test_other_programs_that_hold_a_gpu_are_named_the_largest_first():
    held = [
        {"pid": 1019, "name": "python3", "bytes": 12 << 30, "container": None},
        {"pid": 7, "name": "x", "bytes": None, "container": "c" * 64},
    ]
    seen = state(gpus={"0": {**GPU, "others": held}, "1": GPU})
    told = "other programs on GPU 0: python3 (process 1019) 12.0 GiB, x (process 7, container cccccccccccc)"
    assert list(other_programs(seen)) == [told]
    picture = TopScreen()
    picture.take("snapshot", {**seen, "events": []})
    assert told in picture.lines(0.0)


@pytest.mark.parametrize(
    ("about", "place"),
    [
        (model((8, 4), a=on("h1", "stopped")), "any of 4 hosts"),
        (model((8, 1), a=on("h1", "stopped")), "any of 8 on h1"),
        (model((1, 1), a=on("h1", "stopped")), "h1/0"),
        (model((8, 4), a=on("h1", "stopped"), b=on("h2", "loading"), c=on("h3")), "h2/0, h3/0"),
        (model((8, 4), a=on("h1", lost=True), b=on("h2")), "h2/0"),
        (model((8, 4), a=on("h1", lost=True)), "h1/0"),
        (model((8, 4), a=on("h1", gpus=[])), "h1"),
        (
            model((9, 9), **{f"b{n}": on(f"h{n}") for n in range(7)}),
            "h0/0, h1/0, h2/0, h3/0, h4/0 and 2 more",
        ),
    ],
)
def test_a_row_says_where_a_model_is_or_how_many_hosts_may_have_it(about, place):
    seen = state(models={"m": about}, hosts={"h1": HOST})
    head, shown = models_table(seen)
    assert shown[head.index("WHERE") :].startswith(place + " ")
    head = models_table(state())[0]
    assert "WHERE" not in head
    assert head.index("GPU") < head.index("IN FLIGHT") < head.index("WAITING") < head.index("LAST LOAD")


def test_of_many_hosts_the_screen_shows_those_that_are_not_here_and_counts_others():
    names = [f"h{number:02}" for number in range(30)]
    gpus = {f"{name}/{gpu}": {**GPU, "host": name} for name in names for gpu in "01"}
    drain = {"target": "b", "leases": 2, "seconds_left": 11.6}
    gpus["h28/1"] |= {"state": "draining", "residents": ["a"], "draining": drain}
    hosts = {**dict.fromkeys(names, HOST), "h20": LOST, "h29": {**HOST, "away": True}}
    picture = TopScreen()
    picture.take("snapshot", {**state(gpus=gpus, hosts=hosts), "events": []})
    shown = picture.lines(0.0)
    table = shown[shown.index("HOST  STATE          GPUS                RESIDENT") + 1 :]
    assert [line[:3] for line in table[:15]] == [*names[:12], "h20", "h28", "h29"]
    assert "lost for 12 s  2 free" in table[12]
    assert "a         makes room for b, 12 s left" in table[13]
    assert table[15] == "and 15 more hosts: 30 free"


def test_a_gpu_is_shown_with_its_memory_and_what_it_measures():
    sensors = {"utilization": 0.874, "celsius": 61.0, "watts": 213.0}
    told = {"used": 20 << 30, "total": 24 << 30, "sensors": sensors}
    quiet = {"utilization": None, "celsius": 40.0, "watts": None}
    free = {"state": "free", "residents": [], "draining": None}
    gpus = {"0": {**free, **told}, "amd0": {**free, "used": None, "total": 8 << 30, "sensors": quiet}}
    picture = TopScreen()
    picture.take("snapshot", state(gpus=gpus, events=[]))
    first, second = [line for line in picture.lines(0.0) if line.startswith(("GPU 0 ", "GPU amd0 "))]
    assert first.endswith("20.0 of 24.0 GiB  87% 61 °C 213 W")
    assert second.split() == ["GPU", "amd0", "free", "40", "°C"]


def test_a_screen_without_gpus_has_a_table_without_rows():
    picture = TopScreen()
    picture.take("snapshot", state(gpus={}, events=[]))
    assert "GPU  STATE  RESIDENT  MEMORY  LOAD" in picture.lines(0.0)


def test_an_event_names_the_host_of_its_backend():
    assert event_line({**event(0), "host": "h1"}).endswith(" a on h1: event 0")


def test_a_picture_follows_the_state_and_keeps_the_last_events():
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
        ({"state": "ready"}, None, "next swap"),
        ({"state": "ready"}, 90.0, "90 s from now"),
        ({"state": "ready"}, 250.0, "4 min from now"),
        ({"state": "ready", "pinned": True}, None, "unpinned"),
        ({"state": "ready", "pinned": True}, 90.0, "90 s from now"),
        ({"state": "ready", "leases": 1}, None, "in use"),
        ({"state": "evicting"}, None, "leaving"),
        ({"state": "stopped"}, None, ""),
    ],
)
def test_a_row_says_what_a_model_takes_and_how_long_it_stays(about, seconds, until):
    backends = {"it": {"size": 3 << 29, "unload_seconds": seconds}}
    model = {**MODEL, **about, "backends": backends}
    assert (MODEL_COLUMNS["SIZE"](model), MODEL_COLUMNS["UNTIL"](model)) == ("1.5 GiB", until)


def test_colours_take_no_room_in_a_table(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    cell = paint("ready", "32")
    assert (len(cell) > 5, width(cell)) == (True, 5)
    assert table(("A", "B"), [(cell, "x"), ("longer", "y")])[1] == f"{cell}   x"
