"""Pictures show what is in the logs, also where a log has more to it than a picture has room."""

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab import plot
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.plot import Bar, CannotDraw, History, PlottedWait, draw
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.workload import PROFILES
from anvil_mux.scheduler.events import Cause, Event
from tests.lab.test_simulate import LAYOUTS, world

BEGIN = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
AB = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))), policy="eager")


def run(profile: str = "bursty", policy: str = "eager") -> plot.Drawn:
    workload = PROFILES[profile](0)
    config = replace(workload.config(), policy=policy)
    follow = workload.follow and workload.follow()
    log = simulate(
        config, workload.requests, workload.engines(config), resident=workload.resident, follow=follow
    )
    return policy, log, config, {}


def words(file: Path, runs: list[plot.Drawn]) -> list[str]:
    """The texts of a picture, in the order in which they are drawn."""
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(runs, file)
    return re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text())


# What is drawn


def test_a_bar_is_what_holds_a_gpu_for_a_while():
    told = History(
        [
            Event(10.0, "ready", "a", "a", cause=Cause("adopted")),
            Event(12.0, "draining", "a", "a", target="b"),
            Event(14.0, "evicting", "a", "a"),
            Event(15.0, "stopped", "a", "a"),
            Event(15.0, "loading", "b", "b"),
            Event(20.0, "ready", "b", "b", seconds=5.0),
            Event(22.0, "gone", "b", ticket=1, seconds=1.0),
        ]
    )
    assert told.end == 12.0
    assert told.bars == [
        Bar("a", "ready", 0.0, 2.0),
        Bar("a", "draining", 2.0, 4.0),
        Bar("a", "evicting", 4.0, 5.0),
        Bar("b", "loading", 5.0, 10.0),
        Bar("b", "ready", 10.0, 12.0),
    ]


def test_a_line_grows_with_each_arrival_and_shrinks_with_each_end():
    told = History(
        [
            Event(0.0, "queued", "a", ticket=1, size=1),
            Event(1.0, "queued", "a", ticket=2, size=2),
            Event(2.0, "gone", "a", ticket=1, seconds=2.0),
            Event(3.0, "leased", "a", "a", 2, 1, 2.0),
            Event(4.0, "leased", "a", "a", 3, 2),
        ]
    )
    assert told.lengths["a"] == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0)]


def test_a_wait_stands_at_its_arrival_and_says_how_it_ended():
    told = History(
        [
            Event(5.0, "queued", "a", ticket=1, size=1),
            Event(5.0, "queued", "a", ticket=2, size=2),
            Event(7.0, "failed", "a", ticket=2, seconds=2.0, cause=Cause("error", detail="load_failed")),
            Event(9.0, "leased", "a", "a", 1, 1, 4.0),
            Event(9.0, "leased", "a", "a", 3, 2),
            Event(11.0, "severed", "a", "a", 1, 1, 2.0),
        ]
    )
    assert told.waits == {
        1: PlottedWait(0.0, 4.0, "a", "severed"),
        2: PlottedWait(0.0, 2.0, "a", "unserved"),
        3: PlottedWait(4.0, 0.0, "a"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backends_that_share_a_gpu_get_rows_of_their_own(layout):
    most = 0
    for seed in range(4):
        config, trace, engines = world(layout, "eager", seed)
        told = History(simulate(config, trace, engines))
        lanes = plot._lanes(told.bars, config)
        assert {gpu for b in config.backends for gpu in b.gpus} == lanes.keys() - {""}
        for rows in lanes.values():
            for row in rows:
                assert all(before.until <= after.since for before, after in pairwise(row))
        most = max(most, *[len(rows) for rows in lanes.values()])
        drawn = sum(len(row) for rows in lanes.values() for row in rows)
        gpus = {backend.name: len(backend.gpus) or 1 for backend in config.backends}
        assert drawn == sum(gpus[bar.backend] for bar in told.bars)
    shared = any(backend.vram for backend in config.backends)
    assert most > 1 if shared else most == 1


def test_a_stack_shows_the_length_of_each_line_from_each_moment_on():
    lengths = {"a": [(1.0, 1), (1.0, 2), (3.0, 0)], "b": [(2.0, 5), (2.0, 0)]}
    moments, rows = plot._stack(lengths, ["a", "b"], 4.0)
    assert moments == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rows == [[0, 2, 2, 0, 0], [0, 0, 0, 0, 0]]


def test_hours_of_lines_are_thinned_out_but_no_peak_is_lost():
    steps = [(n / 10, n % 7) for n in range(100_000)]
    steps[50_000] = (5000.0, 99)
    moments, [row] = plot._stack({"a": steps}, ["a"], 10_000.0)
    assert len(moments) == len(row) == plot.COLUMNS + 1
    assert max(row) == 99
    assert set(row[:-1]) == {6, 99}


# The picture


@pytest.mark.parametrize("suffix", BEGIN)
def test_the_name_of_the_file_says_what_kind_of_picture_it_is(tmp_path, suffix):
    for name in ("one", "again"):
        draw([run()], tmp_path / (name + suffix))
    one = (tmp_path / ("one" + suffix)).read_bytes()
    assert one.startswith(BEGIN[suffix])
    assert one == (tmp_path / ("again" + suffix)).read_bytes()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_run_has_a_panel_with_its_figures_and_there_is_one_legend(tmp_path, count):
    runs = [(f"policy {n}", *run(policy="eager")[1:]) for n in range(count)]
    texts = words(tmp_path / "picture.svg", runs)
    for n in range(count):
        assert texts.count(f"policy {n}") == 1
    assert texts.count("3 swaps; mean wait 5.2 s, longest 9 s") == count
    for entry in ("a", "b", "loading", "mean wait"):
        assert texts.count(entry) == 1
    assert "draining" not in texts


def test_panels_share_their_scales(tmp_path):
    texts = words(tmp_path / "picture.svg", [run(policy="eager"), run(policy="debounce")])
    assert texts.count("seconds") == 2
    marks = [text for text in texts if text.isdigit()]
    assert marks.count("20") == 2


def test_a_log_of_hours_makes_no_bigger_picture_than_one_of_minutes(tmp_path):
    config = replace(AB, max_wait=60.0)
    trace = [Arrival(n * 2.0, "ab"[n // 10 % 2], 1.0) for n in range(5_500)]
    log = simulate(config, trace, Engines(other_load_seconds=3.0))
    texts = words(tmp_path / "long.svg", [("long", log, config, {})])
    assert "hours" in texts
    assert (tmp_path / "long.svg").stat().st_size < 3_000_000


def test_more_models_than_colours_share_a_grey_one(tmp_path):
    config = Config(tuple(Backend(f"m{n}", f"m{n}", (str(n),)) for n in range(12)))
    log = simulate(config, [Arrival(float(n), f"m{n}", 1.0) for n in range(12)])
    texts = words(tmp_path / "many.svg", [("many", log, config, {})])
    assert "other models" in texts
    assert [text for text in texts if re.fullmatch(r"m\d+", text)] == [
        "m0",
        "m1",
        "m10",
        "m11",
        "m2",
        "m3",
        "m4",
    ]


@pytest.mark.parametrize(
    "log", [[], [Event(1.0, "ready", "a", "a", cause=Cause("adopted"))]], ids=["stopped", "idle"]
)
def test_a_log_in_which_nothing_happens_is_drawn_too(tmp_path, log):
    assert "0 swaps; mean wait 0 s, longest 0 s" in words(tmp_path / "idle.svg", [("idle", log, AB, {})])


@pytest.mark.parametrize(
    ("end", "unit", "step"),
    [(0.4, "seconds", 0.1), (40.0, "seconds", 10), (290.0, "seconds", 50), (1800.0, "minutes", 5),
     (4 * 3600.0, "hours", 1), (86400.0 * 7, "days", 2), (86400.0 * 1000, "days", 365)],
)  # fmt: skip
def test_the_time_is_marked_a_few_times_in_round_numbers(end, unit, step):
    assert plot._time_scale(end)[1:] == (unit, step)


# What cannot be drawn


# Phases of swaps


def test_phases_stand_in_their_order_and_those_that_nobody_could_see_are_left_out(tmp_path):
    file = tmp_path / "swaps.svg"
    bars = [
        plot.PhaseBar("a", {"load": 1.0, "first_token": 0.5}, 1.4, "1.5 s"),
        plot.PhaseBar("b", {"drain": 0.001, "load": 1.0, "ready": 2.0}, 3.0),
        plot.PhaseBar("c", {}, None, f"not possible: {'x' * 100}"),
    ]
    panels = {"one": bars, "other": [plot.PhaseBar("d", {"load": 0.1, "probe": 0.0}, 0.1)]}
    with mpl.rc_context({"svg.fonttype": "none"}), plot.picture(file) as figure:
        plot.draw_phases(panels, ("drain", "load", "ready", "probe", "first_token"), figure)
    told = re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text())
    assert told[-4:] == ["load", "ready", "first token", "by hand"]
    assert [told.count(word) for word in ("one", "other", *"abcd", "1.5 s")] == [1] * 7
    assert any(word.startswith("not possible: x") and word.endswith("x...") for word in told)


def test_without_matplotlib_the_advice_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CannotDraw, match=r"pip install 'anvil-mux\[plot\]'"):
        draw([run()], tmp_path / "picture.png")


def test_other_kinds_of_files_are_refused(tmp_path):
    with pytest.raises(CannotDraw, match=r"picture\.bmp: its name must end in \.png, \.svg or \.pdf"):
        draw([run()], tmp_path / "picture.bmp")
    with pytest.raises(CannotDraw, match="nothing to draw"):
        draw([], tmp_path / "picture.png")
    with pytest.raises(CannotDraw, match="cannot be written: No such file"):
        draw([run()], tmp_path / "nowhere" / "picture.png")
