"""Figures of swaps, from literal logs, and the standby levels that are not measured, with the reason."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from anvil_mux.cli.output import Columns
from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host import check
from anvil_mux.lab import swap_figures
from anvil_mux.lab.plot import PhaseBar
from anvil_mux.lab.swap_figures import (
    UNMEASURED,
    SwapFigures,
    TimedPhase,
    TimedSwap,
    Unmeasured,
    unmeasured,
    why_not,
)
from anvil_mux.scheduler.events import Event

GIB = 1 << 30


def rows_of(columns: Columns[Any], rows: Iterable[Any]) -> list[tuple[str, ...]]:
    """A table as people read it, below its headings."""
    return [tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)]


def table(rows: Sequence[SwapFigures]) -> list[tuple[str, ...]]:
    return rows_of(swap_figures.columns(rows), rows)


LOG = [
    Event(7.0, "leased", "a", "a", 1, 1),
    Event(8.0, "draining", "a", "a", target="b"),
    Event(8.5, "queued", "b", ticket=2, size=1),
    Event(10.0, "released", "a", "a", 1),
    Event(10.5, "evicting", "a", "a"),
    Event(12.0, "stopped", "a", "a"),
    Event(12.0, "loading", "b", "b"),
    Event(20.0, "ready", "b", "b", seconds=8.0),
    Event(20.0, "leased", "b", "b", 2, 1),
    Event(23.0, "released", "b", "b", 2),
]


def test_phases_follow_each_other_from_the_last_leases_end_to_the_first_byte():
    assert swap_figures.phases(LOG, 21.0) == {"drain": 0.5, "evict": 1.5, "load": 8.0, "first_token": 1.0}


def test_what_the_mechanism_tells_is_taken_out_of_the_phase_in_which_it_happened():
    told = [
        TimedPhase(11.0, "evict", 0.5),
        TimedPhase(12.0, "verify", 1.0),
        TimedPhase(13.0, "load", 1.0),
        TimedPhase(17.0, "ready", 4.0),
        TimedPhase(20.0, "probe", 3.0),
    ]
    found = swap_figures.phases(LOG, 21.0, told)
    assert found == {
        "drain": 0.5,
        "evict": 0.5,
        "verify": 1.0,
        "load": 1.0,
        "ready": 4.0,
        "probe": 3.0,
        "first_token": 1.0,
    }
    assert sum(found.values()) == 11.0


def test_who_had_to_be_stopped_did_not_rest_in_the_way_that_is_measured():
    standby = [event._replace(kind="standby") if event.kind == "stopped" else event for event in LOG]
    assert swap_figures.phases(standby, 21.0, way="sleep") == swap_figures.phases(LOG, 21.0)
    with pytest.raises(BackendError, match="a had to be stopped: it did not go into standby by sleep"):
        swap_figures.phases(LOG, 21.0, way="sleep")


def test_half_a_swap_is_none():
    with pytest.raises(BackendError, match="no event ready"):
        swap_figures.phases(LOG[:-3], 21.0)


def swap(number: int, way: str, load: float, by_hand: float, **told: float) -> TimedSwap:
    return TimedSwap("b", "a", way, number, {"evict": 1.0, "load": load, **told}, by_hand)


def test_figures_are_medians_and_the_overhead_that_of_the_differences():
    swaps = [swap(1, "stop", 9.0, 9.5), swap(2, "stop", 19.0, 19.0), swap(3, "stop", 4.0, 4.9)]
    [row] = swap_figures.figures(swaps)
    assert (row.backend, row.replaces, row.way, row.swaps) == ("b", "a", "stop", 3)
    assert row.phases == {"evict": 1.0, "load": 9.0}
    assert (row.total_seconds, row.by_hand_seconds) == (10.0, 9.5)
    assert row.overhead_seconds == 0.5
    assert row.overhead_quartiles == pytest.approx((0.3, 0.75))
    assert row.cold_start_ratio == 1.0
    assert (row.bytes, row.bytes_per_second, row.bus_bytes_per_second) == (None, None, None)


def test_a_way_back_is_compared_with_a_cold_start():
    asleep, cold = swap_figures.figures([swap(1, "sleep", 1.5, 3.0, probe=0.5), swap(1, "stop", 8.0, 9.0)])
    assert (asleep.way, asleep.cold_start_ratio) == ("sleep", 4.0)
    assert cold.cold_start_ratio == 1.0
    [alone] = swap_figures.figures([swap(1, "sleep", 1.5, 3.0)])
    assert alone.cold_start_ratio is None


def test_the_table_has_a_column_for_each_phase_that_occurs():
    rows = swap_figures.figures(
        [swap(1, "stop", 8.0, 8.75), swap(1, "sleep", 1.5, 3.0, probe=0.5, thaw=0.25)]
    )
    assert table(rows) == [
        (
            *("BACKEND", "REPLACES", "WAY", "EVICT", "LOAD", "PROBE", "THAW"),
            *("TOTAL", "BY-HAND", "OVERHEAD", "HALF-WITHIN", "COLD/BACK"),
        ),
        ("b", "a", "stop", "1.000", "8.000", "", "", "9.000", "8.750", "250 ms", "250..250 ms", "1.0"),
        (
            "b",
            "a",
            "sleep",
            "1.000",
            "1.500",
            "0.500",
            "0.250",
            "3.250",
            "3.000",
            "250 ms",
            "250..250 ms",
            "3.6",
        ),
    ]


def test_memory_that_came_back_is_weighed_against_the_bus():
    swaps = [
        TimedSwap("b", "a", "sleep", n, {"evict": 9.0, "load": 2.0, "ready": 1.0}, 9.0, 24 * GIB, 64e9)
        for n in (1, 2)
    ]
    swaps.append(TimedSwap("b", "a", "sleep", 3, {"load": 9.0}, 9.0))
    rows = swap_figures.figures(swaps)
    assert (rows[0].bytes, rows[0].bytes_per_second, rows[0].bus_bytes_per_second) == (
        24 * GIB,
        8 * GIB,
        64e9,
    )
    head, line = table(rows)
    assert head[-3:] == ("GIB", "GIB/S", "BUS")
    assert line[-3:] == ("24.00", "8.00", "59.60")


def test_every_swap_is_a_line_that_a_spreadsheet_reads():
    file = io.StringIO()
    swap_figures.write_csv([swap(1, "stop", 8.0, 8.75), swap(2, "sleep", 1.5, 3.0, probe=0.5)], file)
    first, second = csv.DictReader(file.getvalue().splitlines())
    assert (first["round"], first["load_seconds"], first["probe_seconds"]) == ("1", "8.000000", "0.000000")
    assert (second["way"], second["total_seconds"], second["overhead_seconds"]) == (
        "sleep",
        "3.000000",
        "0.000000",
    )
    assert first["bytes"] == ""
    assert (second["out_seconds"], second["back_seconds"]) == ("1.000000", "2.000000")


def test_the_picture_has_a_panel_for_each_engine_with_the_cold_start_first():
    rows = swap_figures.figures([swap(1, "sleep", 1.5, 3.0), swap(1, "stop", 8.0, 8.75)])
    other = TimedSwap("x", "x", "stop", 1, {"load": 2.0}, 2.5, engine="vllm")
    untried = [
        Unmeasured("vllm", ("x",), "checkpoint", "no driver"),
        Unmeasured("vllm", ("x",), "freeze", ""),
        Unmeasured("sglang", ("y",), "checkpoint", "no driver"),
    ]
    found = swap_figures.bars([*rows, *swap_figures.figures([other])], untried)
    assert found == {
        "": [
            PhaseBar("b, stop", {"evict": 1.0, "load": 8.0}, 8.75, "9 s"),
            PhaseBar("b, sleep", {"evict": 1.0, "load": 1.5}, 3.0, "2.5 s; back in 1/5 of a cold start"),
        ],
        "vllm": [
            PhaseBar("x, stop", {"load": 2.0}, 2.5, "2 s"),
            PhaseBar("checkpoint", {}, None, "not possible here: no driver"),
        ],
    }


def test_the_table_names_the_engines_where_there_are_several():
    other = TimedSwap("x", "x", "stop", 1, {"load": 2.0}, 2.5, engine="vllm")
    head, first, second = table(swap_figures.figures([swap(1, "stop", 8.0, 8.75), other]))
    assert (head[:2], first[:2], second[:2]) == (("ENGINE", "BACKEND"), ("", "b"), ("vllm", "x"))


def test_a_burst_is_told_by_its_medians():
    bursts = [swap_figures.Burst("b", "a", 100, n, took, 2.0) for n, took in enumerate((1.0, 3.0, 9.0), 1)]
    [row] = swap_figures.burst_figures(bursts)
    assert (row.bursts, row.seconds, row.direct_seconds, row.ratio) == (3, 3.0, 2.0, 1.5)
    assert rows_of(swap_figures.BURSTS, [row])[1:] == [("b", "a", "100", "3.000", "2.000", "1.50")]


# What is not measured

LLAMA = Backend(
    "one",
    "one",
    ("0",),
    engine="llamacpp",
    evict_to=("freeze", "stop"),
    service=Service(command=("llama-server", "-m", "/m/one.gguf")),
)
ROUTER = "llama-server unloads in router mode only, without a model of its own: give it --models-dir"


def no_driver(gpus: Sequence[str], insist: bool) -> str:
    return f"no driver for {','.join(gpus)}{' (insisted)' if insist else ''}"


@pytest.fixture
def can_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "why_not_checkpoint", lambda gpus, insist: None)


@pytest.fixture
def cannot_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "why_not_checkpoint", no_driver)


@pytest.mark.usefixtures("cannot_checkpoint")
def test_what_the_engine_or_the_machine_cannot_do_is_a_row_with_the_reason():
    found = unmeasured([LLAMA])
    assert found == [
        Unmeasured("llamacpp", ("one",), "sleep", ROUTER),
        Unmeasured("llamacpp", ("one",), "checkpoint", "no driver for 0"),
    ]
    assert rows_of(UNMEASURED, found)[1:] == [
        ("llamacpp", "one", "sleep", f"not possible here: {ROUTER}"),
        ("llamacpp", "one", "checkpoint", "not possible here: no driver for 0"),
    ]


@pytest.mark.usefixtures("can_checkpoint")
def test_what_could_be_done_and_is_not_named_is_told_as_that():
    cold = Backend("two", "two", ("0",), engine="vllm", service=Service(gpus_by="reservation"))
    found = {each.way: each.why for each in unmeasured([cold])}
    assert found.keys() == {"sleep", "sleep-2", "checkpoint", "freeze"}
    assert found["checkpoint"] == ""
    assert found["freeze"] == "what is frozen keeps its GPU memory"
    assert "VLLM_SERVER_DEV_MODE" in found["sleep"]
    [row] = [line for line in rows_of(UNMEASURED, unmeasured([cold])) if "checkpoint" in line]
    assert row[-1] == "not named in evict_to"


NAMED = Backend("a", "a", ("0", "1"), evict_to=("checkpoint", "stop"), checkpoint_anyway=True)


@pytest.mark.usefixtures("can_checkpoint")
def test_a_level_that_is_named_is_measured():
    assert why_not(NAMED, "checkpoint") == ""
    assert [each.way for each in unmeasured([NAMED])] == ["sleep", "freeze"]


@pytest.mark.usefixtures("cannot_checkpoint")
def test_a_level_that_is_named_and_the_machine_cannot_take_is_a_row_with_the_reason():
    assert why_not(NAMED, "stop") == ""
    [row] = [each for each in unmeasured([NAMED]) if each.way == "checkpoint"]
    assert (row.named, row.why) == (True, "no driver for 0,1 (insisted)")
    assert row.to_json() == {
        "engine": "openai",
        "backends": ["a"],
        "way": "checkpoint",
        "not_possible": "no driver for 0,1 (insisted)",
    }


@pytest.mark.usefixtures("cannot_checkpoint")
def test_backends_of_one_engine_share_a_row_where_they_share_the_reason():
    both = [LLAMA, Backend("two", "two", ("0",), engine="llamacpp", evict_to=("freeze",))]
    rows = [(each.way, each.backends) for each in unmeasured(both)]
    assert ("checkpoint", ("one", "two")) in rows
