"""What GPUs say of a backend that left, in virtual time."""

import os
from dataclasses import replace

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host.gpus import Gpus
from anvil_mux.host.levels import After, Before, FreedCheck, host_bytes
from tests.host.test_engines import Waiting
from tests.sleepy_engine import GIB, Ledger

A = Backend("a", "a", ("0", "1"))
PID = 100_000_000


class Desk:
    """One backend with a process on two GPUs of 24 GiB."""

    def __init__(self, *, processes: bool = True) -> None:
        self.ledger = Ledger(gpus=("0", "1"), processes=processes)
        self.time = Waiting()
        self.memory = FreedCheck(self.ledger.probe, self.time.now, self.time.sleep)

    def held(self, backend: Backend = A, *, resident: bool = True) -> Before:
        return self.memory.held(backend, lambda: [PID], resident=resident)

    def holds(self, gib: float) -> None:
        self.ledger.hold(PID, ("0", "1"), int(gib * GIB))


@pytest.mark.parametrize(
    ("before", "after", "enough"),
    [
        (20, 5, True),  # a quarter may stay, as with tensor parallelism
        (20, 5.1, False),
        (2, 1.5, True),  # a context may stay where something was given up
        (2, 1.6, False),
        (1.2, 1.2, False),
    ],
)
def test_a_sleeper_has_to_give_up_most_of_what_is_no_context(before, after, enough):
    desk = Desk()
    desk.holds(before)
    held = desk.held()
    desk.holds(after)
    if enough:
        assert desk.memory.left(held, runs=True).bytes == dict.fromkeys("01", int(after * GIB))
        assert desk.time.pauses == []
    else:
        with pytest.raises(BackendError, match=r"after 5 s it still holds .* on GPU 0, .* on GPU 1"):
            desk.memory.left(held, runs=True)


def test_of_who_was_stopped_nothing_may_be_left():
    desk = Desk()
    desk.holds(10)
    held = desk.held()
    desk.holds(0.1)
    with pytest.raises(BackendError, match=r"0.1 GiB of 10.0 GiB on GPU 0"):
        desk.memory.left(held, runs=False)
    desk.holds(0)
    assert desk.memory.left(held, runs=False) == After({}, dict.fromkeys("01", 10 * GIB))


def test_what_a_backend_holds_and_gives_back_is_its_own_whatever_others_take():
    desk = Desk()
    desk.holds(10)
    desk.ledger.hold(PID + 1, ("0",), 2 * GIB)
    held = desk.held()
    assert held.bytes == dict.fromkeys("01", 10 * GIB)
    desk.holds(1)
    desk.ledger.hold(PID + 1, ("0",), 6 * GIB)
    assert desk.memory.left(held, runs=True).freed == dict.fromkeys("01", 9 * GIB)


def test_where_processes_cannot_be_read_what_was_given_back_is_what_became_free():
    desk = Desk(processes=False)
    desk.holds(6)
    held = desk.held(Backend("a", "a", ("0",), vram=8 * GIB))
    desk.holds(0)
    assert desk.memory.left(held, runs=False) == After({}, {"0": 6 * GIB})


def test_other_processes_are_named_where_memory_is_not_freed(caplog):
    desk, me = Desk(), os.getpid()
    desk.holds(10)
    held = desk.held()
    desk.ledger.hold(me, ("0",), 3 * GIB)
    named = rf"; process {me} \(.+\) holds 3.0 GiB of GPU 0$"
    with pytest.raises(BackendError, match=named):
        desk.memory.left(held, runs=True)
    desk.holds(0)
    desk.ledger.hold(me, ("0", "1"), 9 * GIB)
    desk.memory.left(held, runs=False)
    assert f"is not free; process {me}" in caplog.text


def test_our_own_are_no_other_processes():
    desk, me = Desk(), os.getpid()
    desk.ledger.hold(me, ("0",), 3 * GIB)
    memory = FreedCheck(desk.ledger.probe, owner={me: "b"}.get)
    assert (memory.others(["0"]), FreedCheck().others(["0"])) == ("", "")


def test_what_is_declared_counts_where_processes_cannot_be_read_and_only_of_residents():
    desk = Desk(processes=False)
    desk.holds(4)
    declared = Backend("a", "a", ("0",), vram=4 * GIB)
    assert desk.held(declared).bytes == {"0": 4 * GIB}
    assert desk.held(declared, resident=False) == desk.held(A) == Before()


def test_without_gpus_to_be_read_nobody_asks_for_processes():
    assert FreedCheck().held(A, lambda: pytest.fail("asked"), resident=True) == Before()
    reads = FreedCheck(lambda pids: Gpus())
    assert reads.held(replace(A, gpus=()), lambda: pytest.fail("asked"), resident=True) == Before()
    assert reads.held(A, lambda: (), resident=True) == Before()
    assert FreedCheck().left(Before(), runs=True) == reads.left(Before(), runs=True) == After()


def test_only_the_processes_in_question_are_looked_at():
    desk, looked_at = Desk(), []

    def probe(pids: object) -> Gpus:
        looked_at.append(pids)
        return desk.ledger.probe()

    desk.holds(4)
    memory = FreedCheck(probe, desk.time.now, desk.time.sleep)
    held = memory.held(A, lambda: [PID], resident=True)
    desk.holds(0)
    memory.left(held, runs=True)
    assert looked_at == [{PID}, {PID}]


def test_host_memory_is_that_of_the_processes_that_are_there():
    assert host_bytes([os.getpid()]) > 1 << 20
    assert host_bytes([PID]) == 0
