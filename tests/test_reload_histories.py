"""Another configuration while requests run: histories in virtual time, simulated and threaded alike."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import BackendError, LoadError, UnknownModel
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.slot import Demote, Evict, Load
from tests.baton import BatonClock
from tests.lab.facts import Death, Reload
from tests.lab.test_simulate import one
from tests.multiplexer.stage import VirtualEngines, differences

A, B, C = one("a", "0"), one("b", "0"), one("c", "0")


OTHER_A = replace(A, load_timeout=1.0, engine="vllm")


TWO = Config((A, B), policy="eager", max_wait=1000.0)


def with_backends(*backends, **settings):
    return replace(TWO, backends=backends, **settings)


def story(trace, config=TWO, perform=None, *, seeds=2, **before):
    """The history as "moment kind who", once it is certain that the threaded program tells the same one."""
    perform = perform or Engines(other_load_seconds=10.0, stop_seconds=1.0)
    for seed in range(seeds):
        assert differences(config, trace, perform, seed=seed, **before) is None
    return [
        f"{event.at:g} {event.kind} {event.backend or event.model}".rstrip()
        for event in simulate(config, trace, perform, **before)
        if event.kind not in ("released",)
    ]


def events(text):
    return text.split(", ")


def test_what_is_unchanged_goes_on_and_its_streams_with_it():
    trace = [
        Arrival(0.0, "a", 100.0),
        Reload(1.0, with_backends(replace(A, priority=5, aliases=("x",)), C, drain_timeout=3.0)),
        Arrival(2.0, "a", 1.0),
        Arrival(3.0, "b", 1.0),
    ]
    assert story(trace, resident=["a"]) == ["0 ready a", "0 leased a", "1 reloaded", "2 leased a"]


def test_a_stream_of_a_changed_backend_ends_before_it_is_replaced_and_its_line_waits_on():
    trace = [Arrival(0.0, "a", 20.0), Reload(1.0, with_backends(OTHER_A, B)), Arrival(2.0, "a", 1.0)]
    assert story(trace, resident=["a"]) == events(
        "0 ready a, 0 leased a, 1 reloaded, 1 draining a, 2 queued a, 20 evicting a, 21 stopped a, "
        "21 loading a, 31 ready a, 31 leased a"
    )


def test_who_waits_for_a_removed_model_is_told_so_and_one_that_was_added_is_served():
    trace = [
        Arrival(0.0, "a", 5.0),
        Arrival(1.0, "b", 1.0),
        Reload(2.0, with_backends(A, C)),
        Arrival(3.0, "c", 1.0),
    ]
    log = simulate(TWO, trace, Engines(other_load_seconds=10.0), resident=["a"])
    assert [e.cause.detail for e in log if e.kind == "failed"] == ["model_not_found"]
    assert story(trace, resident=["a"])[4:] == events(
        "2 reloaded, 2 ready a, 2 failed b, 3 queued c, 3 draining a, 5 evicting a, 6 stopped a, "
        "6 loading c, 16 ready c, 16 leased c"
    )


def test_reload_during_a_load_of_what_it_changes_cancels_it_and_loads_again():
    trace = [Arrival(0.0, "a", 1.0), Reload(4.0, with_backends(OTHER_A, B))]
    assert story(trace) == events(
        "0 queued a, 0 loading a, 4 reloaded, 4 cancelling a, 5 stopped a, 5 loading a, 15 ready a, "
        "15 leased a"
    )


def test_load_that_fails_after_its_reload_fails_no_request_of_the_new_one():
    def perform(step, nth):
        failed = isinstance(step, Load) and nth == 0
        return Outcome(10.0, LoadError("no") if failed else None)

    trace = [Arrival(0.0, "a", 1.0), Reload(4.0, with_backends(OTHER_A, B))]
    assert story(trace, perform=perform) == events(
        "0 queued a, 0 loading a, 4 reloaded, 4 cancelling a, 10 stopped a, 10 loading a, 20 ready a, "
        "20 leased a"
    )


def test_a_reload_while_a_victim_drains_for_a_target_that_changes():
    """The swap is off, its victim stays for a moment; then the new target gets the GPU."""
    trace = [
        Arrival(0.0, "a", 20.0),
        Arrival(1.0, "b", 1.0),
        Reload(2.0, with_backends(A, replace(B, engine="vllm"))),
    ]
    assert story(trace, resident=["a"])[3:] == events(
        "1 draining a, 2 reloaded, 2 ready a, 2 draining a, 20 evicting a, 21 stopped a, 21 loading b, "
        "31 ready b, 31 leased b"
    )


def test_a_reload_while_a_changed_backend_drains_for_another():
    trace = [Arrival(0.0, "a", 20.0), Arrival(1.0, "b", 1.0, 5.0), Reload(2.0, with_backends(OTHER_A, B))]
    assert story(trace, resident=["a"])[3:] == events(
        "1 draining a, 2 reloaded, 6 gone b, 20 evicting a, 21 stopped a"
    )


def test_a_reload_in_the_middle_of_a_swap_lets_the_stop_end():
    trace = [
        Arrival(0.0, "b", 1.0),
        Reload(0.5, with_backends(A, replace(B, engine="vllm"))),
    ]
    assert story(trace, resident=["a"]) == events(
        "0 ready a, 0 queued b, 0 draining a, 0 evicting a, 0.5 reloaded, 1 stopped a, 1 loading b, "
        "11 ready b, 11 leased b"
    )


def test_backends_that_exchange_their_names_are_both_replaced():
    one_port, other_port = replace(A, port=1), replace(B, port=2)
    swapped = with_backends(replace(one_port, name="b", model="b"), replace(other_port, name="a", model="a"))
    trace = [Arrival(0.0, "a", 5.0), Reload(1.0, swapped), Arrival(2.0, "b", 1.0), Arrival(3.0, "a", 1.0)]
    assert story(trace, with_backends(one_port, other_port), resident=["a"])[2:] == events(
        "1 reloaded, 1 draining a, 2 queued b, 3 queued a, 5 evicting a, 6 stopped a, 6 loading b, "
        "16 ready b, 16 leased b, 16 draining b, 17 evicting b, 18 stopped b, 18 loading a, 28 ready a, "
        "28 leased a"
    )


def test_a_backend_that_moves_to_another_gpu_leaves_its_old_one_first():
    config = with_backends(A, B, one("z", "1"))
    moved = with_backends(replace(A, gpus=("1",)), B, one("z", "1"))
    trace = [
        Arrival(0.0, "z", 3.0),
        Arrival(0.5, "a", 10.0),
        Reload(1.0, moved),
        Arrival(2.0, "a", 1.0),
        Arrival(2.5, "b", 1.25),
    ]
    moves = ("draining", "stopped", "loading")
    told = story(trace, config, resident=["a", "z"])
    assert [line for line in told if line.split()[1] in moves] == events(
        "1 draining a, 11.5 stopped a, 11.5 draining z, 11.5 loading b, 12.5 stopped z, 12.5 loading a"
    )


def test_a_model_that_is_renamed_is_waited_for_by_its_new_name_at_once():
    renamed = with_backends(replace(A, model="new"), B)
    trace = [Arrival(0.0, "a", 5.0), Reload(1.0, renamed), Arrival(2.0, "new", 1.0), Arrival(2.5, "a", 1.0)]
    assert story(trace, resident=["a"])[2:] == events(
        "1 reloaded, 1 draining a, 2 queued new, 5 evicting a, 6 stopped a, 6 loading a, 16 ready a, "
        "16 leased a"
    )


def test_a_backend_that_ties_two_drivers_makes_them_one_while_both_swap():
    config = with_backends(A, B, one("y", "1"), one("z", "1"))
    trace = [
        Arrival(0.0, "b", 5.0),
        Arrival(0.25, "z", 5.0),
        Reload(0.5, replace(config, backends=(*config.backends, one("wide", "0", "1")))),
        Arrival(2.0, "wide", 1.0),
    ]
    told = story(trace, config, resident=["a", "y"])
    assert told[told.index("2 queued wide") + 1 :] == events(
        "11 ready b, 11 leased b, 11.25 ready z, 11.25 leased z, 11.25 draining b, 11.25 draining z, "
        "16 evicting b, 16.25 evicting z, 17 stopped b, 17.25 stopped z, 17.25 loading wide, "
        "27.25 ready wide, 27.25 leased wide"
    )


def test_a_line_follows_its_model_to_another_driver():
    config = with_backends(one("m-1", "0", model="m"), B, one("z", "1"))
    moved = with_backends(B, one("z", "1"), one("m-2", "1", model="m"))
    trace = [Arrival(0.0, "b", 50.0), Arrival(1.0, "m", 1.0), Reload(2.0, moved)]
    assert story(trace, config, resident=["b"])[4:] == events(
        "2 reloaded, 2 ready b, 2 loading m-2, 12 ready m-2, 12 leased m-2"
    )


def test_an_driver_of_which_nothing_is_left_goes():
    trace = [
        Arrival(0.0, "z", 50.0),
        Arrival(0.5, "a", 5.0),
        Reload(1.0, with_backends(A)),
        Arrival(2.0, "z", 1.0),
        Reload(40.0, with_backends(A, one("z", "1"))),
        Arrival(41.0, "z", 1.0),
    ]
    told = story(trace, with_backends(A, one("z", "1")), resident=["a", "z"])
    assert [line for line in told if line.endswith(" z")][2:] == events(
        "1 draining z, 31 severed z, 31 evicting z, 32 stopped z, 41 queued z, 41 loading z, 51 ready z, "
        "51 leased z"
    )


def test_who_waits_on_an_driver_that_goes_at_once_is_told_so():
    """It waits for the host's memory, which one on another GPU group has."""
    config = with_backends(replace(A, ram=8), one("z", "1", ram=8), host_memory=10)
    trace = [Arrival(0.0, "a", 50.0), Arrival(1.0, "z", 1.0), Reload(2.0, replace(config, backends=(A,)))]
    assert story(trace, config, resident=["a"])[2:] == ["1 queued z", "2 reloaded", "2 failed z"]
    clock = BatonClock()
    mux = Multiplexer(config, VirtualEngines(clock, Engines()), log=lambda event: None, clock=clock)
    told = []

    def wait():
        with pytest.raises(UnknownModel, match=r"`z` does not exist. Known models: a\."):
            mux.lease("z")
        told.append(clock.now())

    def main():
        mux.facts.adopt({"a": "http://127.0.0.1:1"})
        mux.start()
        clock.spawn(wait, "wait")
        clock.sleep(2.0)
        mux.facts.reconfigure(replace(config, backends=(A,)), {})
        mux.close()

    clock.run(main)
    assert told == [2.0]


def test_one_that_is_changed_twice_is_replaced_once_by_the_last_definition():
    trace = [
        Arrival(0.0, "a", 10.0),
        Reload(1.0, with_backends(OTHER_A, B)),
        Reload(2.0, with_backends(replace(OTHER_A, vram=1), B)),
        Arrival(3.0, "a", 1.0),
    ]
    assert [line.split()[1] for line in story(trace, resident=["a"])[2:]] == [
        *("reloaded", "draining", "reloaded", "queued", "evicting", "stopped", "loading", "ready", "leased")
    ]


def test_one_that_cannot_be_stopped_is_replaced_when_it_was():
    def perform(step, nth):
        return Outcome(1.0, BackendError("it stays") if isinstance(step, Evict) and nth == 0 else None)

    trace = [Arrival(0.0, "a", 1.0), Reload(0.5, with_backends(OTHER_A, B)), Arrival(20.0, "a", 1.0)]
    assert story(trace, perform=perform, resident=["a"])[2:] == events(
        "0.5 reloaded, 0.5 draining a, 1 evicting a, 2 stuck a, 7 evicting a, 8 stopped a, 20 queued a, "
        "20 loading a, 21 ready a, 21 leased a"
    )


def test_one_that_rests_is_stopped_although_somebody_waits_for_it():
    rests = replace(A, evict_to=("sleep", "stop"))
    trace = [
        Arrival(0.0, "a", 1.0),
        Arrival(1.5, "b", 10.0),
        Arrival(7.0, "a", 1.0),
        Reload(8.0, with_backends(replace(rests, engine="vllm"), B)),
    ]
    told = story(trace, with_backends(rests, B), lambda step, nth: Outcome(1.0))
    assert "3 standby a" in told
    assert told[told.index("8 reloaded") :] == events(
        "8 reloaded, 8 ready b, 8 demoting a, 9 stopped a, 9 draining b, 14 evicting b, 15 stopped b, "
        "15 loading a, 16 ready a, 16 leased a"
    )


def test_one_that_rests_and_cannot_be_stopped_is_not_woken_meanwhile():
    rests = replace(A, evict_to=("sleep", "stop"))

    def perform(step, nth):
        return Outcome(1.0, BackendError("it stays") if isinstance(step, Demote) and nth == 2 else None)

    trace = [
        Arrival(0.0, "a", 1.0),
        Arrival(1.5, "b", 0.25),
        Reload(8.0, with_backends(replace(rests, engine="vllm"), B)),
        Arrival(9.5, "a", 1.0),
    ]
    told = story(trace, with_backends(rests, B), perform)
    assert told[told.index("8 reloaded") :] == events(
        "8 reloaded, 8 demoting a, 9 standby a, 9.5 queued a, 14 demoting a, 15 stopped a, 15 draining b, "
        "15 evicting b, 16 stopped b, 16 loading a, 17 ready a, 17 leased a"
    )


def test_a_resident_that_would_rest_is_stopped_if_it_goes_for_good():
    rests = with_backends(replace(A, evict_to=("sleep", "stop")), B)
    told = story([Arrival(0.0, "a", 1.0), Reload(2.0, TWO)], rests, resident=["a"])
    assert told[2:] == ["2 reloaded", "2 draining a", "2 evicting a", "3 stopped a"]


def test_one_that_is_put_to_sleep_when_it_changes_is_stopped_after_that():
    rests = replace(A, evict_to=("sleep", "stop"))

    def perform(step, nth):
        return Outcome({Load: 1.5, Evict: 4.0, Demote: 1.0}[type(step)])

    trace = [Arrival(0.0, "b", 1.0), Reload(2.0, with_backends(B))]
    told = story(trace, with_backends(rests, B), perform, resident=["a"])
    assert [line for line in told if line.endswith("a")][2:] == events(
        "0 evicting a, 4 standby a, 4 demoting a, 5 stopped a"
    )


def test_one_that_dies_on_its_way_out_is_replaced():
    trace = [
        Arrival(0.0, "a", 20.0),
        Reload(1.0, with_backends(OTHER_A, B)),
        Death(3.0, "a"),
        Arrival(4.0, "a", 1.0),
    ]
    assert [line.split()[1] for line in story(trace, resident=["a"])[2:]] == [
        *("reloaded", "draining", "stopped", "queued", "loading", "ready", "leased")
    ]


def test_a_pinned_one_that_goes_makes_room():
    pinned = with_backends(replace(A, pin=True), B)
    trace = [Arrival(0.0, "a", 10.0), Reload(1.0, with_backends(B)), Arrival(2.0, "b", 1.0)]
    assert [line.split()[1] for line in story(trace, pinned, resident=["a"])[2:]] == [
        *("reloaded", "draining", "queued", "evicting", "stopped", "loading", "ready", "leased")
    ]


def test_a_gpu_with_other_memory_is_not_shared_with_those_of_before():
    """They are replaced, and until then they have as much of it as they had: all."""
    small = replace(B, vram=4)
    trace = [
        Arrival(0.0, "a", 10.0),
        Reload(1.0, with_backends(A, small, gpus=(Gpu("0", 10),))),
        Arrival(2.0, "b", 1.0),
    ]
    told = story(trace, with_backends(A, B, gpus=(Gpu("0"),)), resident=["a"])
    assert told[3:] == events(
        "1 draining a, 2 queued b, 10 evicting a, 11 stopped a, 11 loading b, 21 ready b, 21 leased b"
    )


def test_a_higher_limit_lets_more_of_the_line_in_and_none_lets_all():
    limited = [with_backends(replace(A, concurrency=limit), B) for limit in (1, 2, None)]
    trace = [
        *[Arrival(number / 8, "a", 20.0 + number) for number in range(5)],
        Reload(1.0, limited[1]),
        Reload(2.0, limited[2]),
    ]
    told = story(trace, limited[0], resident=["a"])
    assert [line for line in told if "leased" in line or "reloaded" in line] == [
        *("0 leased a", "1 reloaded", "1 leased a", "2 reloaded", "2 leased a", "2 leased a", "2 leased a")
    ]


def test_replicas_come_and_go_under_their_requests():
    first, second = one("m-1", "0", model="m"), one("m-2", "1", model="m")
    trace = [
        Arrival(0.0, "m", 5.0),
        Reload(1.0, with_backends(first, second)),
        Arrival(2.0, "m", 1.5),
        Arrival(3.0, "m", 10.0),
        Reload(4.0, with_backends(second)),
        Arrival(4.5, "m", 1.0),
        Arrival(20.0, "m", 1.0),
    ]
    assert story(trace, with_backends(first), resident=["m-1"])[2:] == events(
        "1 reloaded, 2 leased m-1, 3 leased m-1, 4 reloaded, 4 draining m-1, 4.5 queued m, 4.5 loading m-2, "
        "13 evicting m-1, 14 stopped m-1, 14.5 ready m-2, 14.5 leased m-2, 20 leased m-2"
    )


def test_a_new_policy_and_new_limits_hold_at_once():
    patient = replace(TWO, policy="debounce", policy_settings={"quiet": 2.0, "max_hold": 10.0})
    trace = [Arrival(0.0, "a", 0.5), Reload(1.0, patient), Arrival(2.0, "b", 1.0)]
    assert "4 draining a" in story(trace, resident=["a"])
