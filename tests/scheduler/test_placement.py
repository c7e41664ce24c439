"""The arithmetic of a GPU group: who holds what, what is missing, who could go."""

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.scheduler.layout import gpu_groups
from anvil_mux.scheduler.memory import LeastRecentlyUsed, Placement
from tests.scheduler.driver import backend as one


def placed(*backends, gpus=(), **states):
    placement = Placement(backends, gpus, LeastRecentlyUsed)
    for name, state in states.items():
        enter(placement, name, state)
    return placement


def enter(placement, name, state):
    placement.slots[name].state = state
    placement.note(placement.slots[name])


def missing(placement, name):
    return placement.missing(placement.slots[name])


TWENTY = (Gpu("0", vram=20, reserve=2),)


def test_a_backend_without_declared_memory_needs_the_whole_of_a_gpu():
    placement = placed(one("a"), one("b", vram=5), gpus=TWENTY)
    assert placement.slots["a"].holds == {"0": 18}
    assert missing(placement, "b") == {"0": -13}


def test_the_reserve_is_given_to_nobody():
    placement = placed(one("a", vram=10), one("b", vram=9), gpus=TWENTY, a="ready")
    assert missing(placement, "b") == {"0": 1}


def test_what_is_standby_holds_what_it_left_behind():
    placement = placed(one("a", vram=10), one("b", vram=10), gpus=TWENTY, a="standby")
    assert missing(placement, "b") == {"0": -8}
    placement.slots["a"].residual = {"0": 9}
    assert missing(placement, "b") == {"0": 1}
    assert missing(placement, "a") == {"0": -8}  # it gets its own back


@pytest.mark.parametrize(
    ("states", "busy", "expected"),
    [
        ({}, set(), []),
        ({"a": "ready"}, set(), ["a"]),
        ({"a": "ready"}, {"0"}, None),
        ({"a": "loading"}, set(), None),
        ({"a": "draining"}, set(), None),
        ({"pair": "ready"}, set(), ["pair"]),
        ({"pair": "ready"}, {"1"}, None),
        ({"pinned": "ready"}, set(), None),
        ({"far": "ready"}, {"1"}, []),
    ],
)
def test_only_what_is_ready_and_in_no_swap_can_go(states, busy, expected):
    backends = one("a"), one("b"), one("pair", "0", "1"), one("pinned", pin=True), one("far", "1")
    placement = placed(*backends, **states)
    found = placement.victims(placement.slots["b"], busy)
    assert (found and [slot.name for slot in found]) == expected or found == expected


@pytest.mark.parametrize(
    ("staying", "expected"),
    [((), ["a"]), (("a",), ["c"]), (("c",), ["a"]), (("a", "c"), None), (("b",), ["a"])],
)
def test_who_is_staying_cannot_go(staying, expected):
    placement = placed(*(one(name, vram=9) for name in "abc"), gpus=TWENTY, a="ready", c="ready")
    found = placement.victims(placement.slots["b"], set(), set(staying))
    assert (found and [slot.name for slot in found]) == expected


def test_what_can_never_fit_is_known_before_anything_is_drained():
    backends = one("large", vram=19), one("b", vram=9), one("p", vram=10, pin=True), one("s", vram=8)
    placement = placed(*backends, gpus=TWENTY)
    why = {name: placement.never_fits(slot) for name, slot in placement.slots.items()}
    assert why == {"large": "it does not fit on GPU 0", "b": "", "p": "", "s": ""}
    enter(placement, "p", "ready")
    beside = "it does not fit on GPU 0 beside the pinned p (see `anvil-mux unpin`)"
    assert placement.never_fits(placement.slots["b"]) == beside
    assert placement.never_fits(placement.slots["s"]) == ""
    assert placement.never_fits(placement.slots["p"]) == ""
    enter(placement, "p", "draining")  # it was told to go all the same
    assert placement.never_fits(placement.slots["b"]) == ""


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([], []),
        ([one("a"), one("b")], [("0", "ab")]),
        ([one("a"), one("b", "1")], [("0", "a"), ("1", "b")]),
        ([one("a"), one("b", "1"), one("t", "0", "1")], [("0+1", "abt")]),
        ([one("t", "1", "2"), one("a", "0"), one("u", "0", "2")], [("0+1+2", "tau")]),
        ([one("r", "0", model="m"), one("s", "1", model="m")], [("0", "r"), ("1", "s")]),
        (
            [Backend("c", "c"), one("a"), Backend("d", "d")],
            [("no-gpu:c", "c"), ("0", "a"), ("no-gpu:d", "d")],
        ),
        ([Backend("c", "m"), one("d", "0", model="m")], [("no-gpu:c", "c"), ("0", "d")]),
        (
            [one("a"), one("b", "1"), one("c", "2"), one("t", "0", "2"), one("u", "1"), one("v", "3")],
            [("0+2", "act"), ("1", "bu"), ("3", "v")],
        ),
    ],
)
def test_gpus_are_tied_by_sets_and_not_by_replicas(backends, expected):
    assert [(name, "".join(b.name for b in members)) for name, members in gpu_groups(backends)] == expected


def test_who_needs_a_gpu_whole_takes_what_the_standby_leave():
    placement = placed(one("a", vram=10), one("b"), gpus=TWENTY, a="standby")
    placement.slots["a"].residual = {"0": 2}
    assert placement.missing(placement.slots["b"]) == {"0": 0}
