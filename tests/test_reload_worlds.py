"""Another configuration while requests run: other hosts, drawn histories, tables, what is told in place."""

import random
from dataclasses import replace
from math import inf

import pytest

from anvil_mux.config.machines import Gpu
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.layout import BY_NAME, Layout
from anvil_mux.scheduler.model import settings_of
from anvil_mux.scheduler.slot import FoundBackend, Load
from anvil_mux.scheduler.state import order
from tests.lab.facts import Death, HostBack, HostGone, HostLost, PauseBegun, PauseEnded, Reload, Unloading
from tests.lab.test_simulate import one
from tests.multiplexer.stage import Player
from tests.scheduler.fleet import Fleet
from tests.seeds import seeds
from tests.test_reload_histories import A, B, C, events, story, with_backends

# To another host


def on(host, backend):
    return replace(backend, host=host)


def test_one_that_goes_to_another_host_is_stopped_where_it_was_and_then_loaded_there():
    trace = [
        Arrival(0.0, "a", 20.0),
        Arrival(0.5, "b", 30.0),
        Reload(1.0, with_backends(on("h", A), on("h", B))),
        Arrival(2.0, "a", 1.0),
    ]
    told = story(trace, with_backends(A, on("h", B)), resident=["a", "b"])
    assert told[told.index("1 reloaded") :] == events(
        "1 reloaded, 1 draining a, 2 queued a, 20 evicting a, 21 stopped a, 21 draining b, 30.5 evicting b, "
        "31.5 stopped b, 31.5 loading a, 41.5 ready a, 41.5 leased a"
    )


def test_its_gpus_are_free_for_others_as_soon_as_it_has_left_them():
    trace = [
        Arrival(0.0, "a", 5.0),
        Reload(1.0, with_backends(on("h", A), B)),
        Arrival(2.0, "a", 1.0),
        Arrival(3.0, "b", 1.0),
    ]
    told = story(trace, perform=Engines({"a": 10.0, "b": 12.0}, 1.0, 1.0), resident=["a"])
    assert told[told.index("3 queued b") + 1 :] == events(
        "5 evicting a, 6 stopped a, 6 loading b, 6 loading a, 16 ready a, 16 leased a, 18 ready b, "
        "18 leased b"
    )


def test_one_that_holds_nothing_is_on_its_new_host_at_once():
    trace = [Arrival(0.0, "b", 50.0), Reload(1.0, with_backends(on("h", A), B)), Arrival(2.0, "a", 1.0)]
    told = story(trace, resident=["b"])
    assert told[-4:] == ["2 queued a", "2 loading a", "12 ready a", "12 leased a"]


def test_one_that_is_to_go_and_stays_after_all_or_goes_elsewhere_is_replaced_once():
    for last in A, on("k", A):
        trace = [
            Arrival(0.0, "a", 10.0),
            Reload(1.0, with_backends(on("h", A), B)),
            Reload(2.0, with_backends(last, B)),
            Arrival(3.0, "a", 1.0),
        ]
        assert [line.split()[1] for line in story(trace, resident=["a"])[2:]] == events(
            "reloaded, draining, reloaded, queued, evicting, stopped, loading, ready, leased"
        )


def test_one_that_goes_from_a_lost_host_does_so_when_that_is_back_or_declared_gone():
    a, moved = on("h", A), with_backends(A, B)
    trace = [Arrival(0.0, "a", 50.0), HostLost(1.0, "h"), Reload(2.0, moved), Arrival(3.0, "a", 1.0)]
    for back in HostBack(4.0, "h", {"a": FoundBackend()}), HostGone(4.0, "h"):
        told = story([*trace, back, Arrival(7.0, "a", 1.0)], with_backends(a, B), resident=["a"])
        assert told[told.index("2 reloaded") + 1 : told.index("2 reloaded") + 2] == ["3 failed a"]
        assert [line for line in told if line.endswith("a")][-4:] == events(
            "7 queued a, 7 loading a, 17 ready a, 17 leased a"
        )


def test_a_replica_goes_to_another_host_while_the_other_serves():
    one_there, other = one("m-1", "0", model="m"), one("m-2", "1", model="m")
    trace = [
        Arrival(0.0, "m", 5.0),
        Reload(1.0, with_backends(on("h", one_there), other)),
        Arrival(2.0, "m", 30.0),
        Arrival(20.0, "m", 1.0),
    ]
    told = story(trace, with_backends(one_there, other), resident=["m-1", "m-2"])
    assert "2 leased m-2" in told
    assert told[-1] == "20 leased m-2"


GPUS = {"a": "0", "b": "0", "c": "1", "d": "1"}


OTHERS = {"0": "1", "1": "0"}


ANY = [
    *[[one(n, gpu), one(n, gpu, engine="vllm"), one(n, OTHERS[gpu])] for n, gpu in GPUS.items()],
    [one("w", "0", "1")],
]


def any_history(seed, hosts=("",)):
    draw = random.Random(seed)
    draw_host = random.Random(f"hosts {seed}")

    def any_config():
        chosen = [draw.choice([*each, None]) for each in ANY]
        found = [on(draw_host.choice(hosts), each) for each in chosen if each]
        return with_backends(*(found or [A]), max_wait=20.0)

    trace, at, start = [], 0.0, any_config()
    for number in range(40):
        at += draw.choice([0.25, 1.5, 7.125])
        if draw.random() < 0.2:
            trace.append(Reload(at, any_config()))
        else:
            seconds = draw.choice([0.5, 3.25, 40.0]) + number / 1024
            trace.append(Arrival(at, draw.choice([*GPUS, "w"]), seconds))
    return start, trace


SERVICES = {"a": "0", "b": "0", "c": "1", "d": "1", "m-1": "0", "m-2": "1", "m-3": "1", "none": ""}


SETTINGS = {
    "evict_to": ("sleep", "stop"),
    "vram": 4,
    "pin": True,
    "concurrency": 1,
    "ttl": 5.0,
    "min_residency": 10.0,
    "demote_after": 20.0,
    "preload": True,
    "engine": "vllm",
}


STAYING = {"home": True, "home_after": 3.0, "drain_timeout": inf}

"""Settings of backends that stay, or come back."""


def wild_history(seed, hosts=("",)):
    """Whatever can be configured, with deaths, unloads, failing steps, lost hosts, pauses, and impatience."""
    draw = random.Random(seed)
    draw_host = random.Random(f"hosts {seed}")
    draw_stay = random.Random(f"staying {seed}")

    def service(name):
        gpus = draw.choice([[SERVICES[name]] * 8, ["0", "1", "2"]])
        gpu = draw.choice(gpus)
        model = "m" if name in ("m-1", "m-2", "m-3") else draw.choice([name] * 9 + ["x"])
        settings = {key: value for key, value in SETTINGS.items() if draw.random() < 0.25}
        settings = stays_or_comes_back(draw_stay, settings)
        host = draw_host.choice(hosts)
        return one(name, *([gpu] if gpu else []), model=model, host=host, **settings)

    def configured(before):
        goes_on = {each.name: each for each in before if draw.random() < 0.6}
        chosen = [goes_on.get(name) or service(name) for name in SERVICES if draw.random() < 0.8]
        gpus = tuple(Gpu(id, vram=draw.choice([10, 10, 12])) for id in "012")
        gpus += tuple(replace(gpu, host=host) for host in hosts[1:] for gpu in gpus)
        policy, drain = draw.choice(["eager", "debounce", "adaptive"]), draw.choice([0.0, 10.0, 30.0])
        stays = {
            "home_after": draw_stay.choice([5.0, 50.0]),
            "when_paused": draw_stay.choice(["wait", "refuse"]),
        }
        return with_backends(
            *(chosen or [A]), gpus=gpus, policy=policy, drain_timeout=drain, max_wait=20.0, **stays
        )

    start = config = configured(())
    trace, at = [], 0.0
    for number in range(60):
        at += draw.choice([0.0625, 0.25, 1.5, 7.125]) + number / 65536
        model = draw.choice(config.backends).model
        match draw.choices(["request", "reload", "unload", "death"], [15, 3, 1, 1])[0]:
            case "request":
                seconds = draw.choice([0.5, 3.25, 40.0]) + number / 1024 + 1 / 7777
                trace.append(Arrival(at, model, seconds, draw.choice([inf, inf, 5.0])))
            case "reload":
                config = configured(config.backends)
                trace.append(Reload(at, config))
            case "unload":
                trace.append(Unloading(at, model))
            case "death":
                trace.append(Death(at, draw.choice([*SERVICES])))
        if draw_host.random() < 0.05 and len(hosts) > 1:
            trace.append(lost_or_back(draw_host, at + 1 / 32768, hosts, trace))
        trace += pauses(draw_stay, at + 1 / 20000)
    trace.append(PauseEnded(at + 1.0))
    failures = {(draw.choice([*SERVICES]), draw.randrange(6)): draw.choice([LoadError, BackendError])}

    def perform(step, nth):
        kind = failures.get((step.backend, nth))
        error = kind("no") if kind and (kind is BackendError or isinstance(step, Load)) else None
        return takes_its_time(step, nth)._replace(error=error)

    return start, trace, perform


def stays_or_comes_back(draw, settings):
    """These settings of a backend, and some by which it stays, or comes back."""
    found = settings | {key: value for key, value in STAYING.items() if draw.random() < 0.15}
    if found.get("home"):  # with a ttl it would come and go for ever
        found.pop("ttl", None)
    return found


def pauses(draw, at):
    """Now and then a pause begins, or ends."""
    kind = draw.choices([PauseBegun, PauseEnded, None], [1, 2, 17])[0]
    if kind is PauseBegun:
        return [PauseBegun(at, draw.choice([3.0 + at / 9999, inf]))]
    return [kind(at)] if kind else []


def lost_or_back(draw, at, hosts, trace):
    """A host is lost, or the one that is lost comes back or is declared gone."""
    before = [entry for entry in trace if isinstance(entry, (HostLost, HostBack))][-1:]
    if not before or isinstance(before[0], HostBack):
        return HostLost(at, draw.choice(hosts))
    found = {name: FoundBackend() for name in SERVICES if draw.random() < 0.3}
    return HostGone(at, before[0].host) if draw.random() < 0.2 else HostBack(at, before[0].host, found)


def takes_its_time(step, nth):
    """Never as long as another step."""
    number = [*SERVICES, "w"].index(step.backend)
    return Outcome(5.0 * isinstance(step, Load) + 1.0 + number / 64 + nth / 4096 + 1 / 33333)


@pytest.mark.seeds
@pytest.mark.parametrize("hosts", [("",), ("", "h", "k")])
@pytest.mark.parametrize("seed", seeds(16, of=40))
def test_whatever_changes_when_both_programs_tell_the_same_and_nobody_waits_for_ever(seed, hosts):
    start, trace, perform = wild_history(seed, hosts)
    log = simulate(start, trace, perform)
    until = max(trace[-1].at, log[-1].at)
    real = Player(start, perform, seed).play(trace, until)
    # GPU groups do not wait for each other: what happens at one moment has no order.
    assert sorted(real, key=repr) == sorted(map(tuple, log), key=repr)
    ended = {event.ticket for event in log if event.kind in ("leased", "failed", "gone")}
    assert {event.ticket for event in log if event.kind == "queued"} <= ended


@pytest.mark.seeds
@pytest.mark.parametrize("hosts", [("",), ("", "h")])
@pytest.mark.parametrize("seed", seeds(12, of=30))
def test_whatever_changes_when_no_gpu_is_ever_held_twice(seed, hosts):
    start, trace = any_history(seed, hosts)
    gpus = {each.name: each.gpu_names for each in start.backends}
    configs = {entry.at: entry.config for entry in trace if isinstance(entry, Reload)}
    wanted, holding = dict(gpus), {}
    for event in simulate(start, trace, takes_its_time):
        name = event.backend
        if event.kind == "reloaded":
            wanted = {each.name: each.gpu_names for each in configs[event.at].backends}
        elif event.kind == "loading":
            holding[name] = wanted[name]
            held = [gpu for gpus in holding.values() for gpu in gpus]
            assert len(held) == len(set(held)), event
        elif event.kind == "stopped":
            del holding[name]
        elif event.kind == "leased":
            assert name in holding
    assert not holding.keys() - wanted.keys()


def test_the_lines_of_removed_models_end_in_the_order_in_which_their_models_stood():
    """The log of a run must not depend on how names are hashed."""
    names = "bcdefghi"
    config = with_backends(A, *(one(name, "0") for name in names))
    trace = [
        Arrival(0.0, "a", 5.0),
        *(Arrival(1.0, name, 1.0) for name in names),
        Reload(2.0, with_backends(A)),
    ]
    log = simulate(config, trace, Engines(), resident=["a"])
    assert "".join(event.model for event in log if event.kind == "failed") == names


def test_a_routing_policy_may_go_with_the_replica_that_named_it():
    own = {"mine": {"selector": "round_robin"}}
    pair = (one("m-1", "0", model="m", routing="mine"), one("m-2", "1", model="m", routing="mine"))
    without = with_backends(replace(pair[1], routing="least_delay"))
    trace = [Arrival(0.0, "m", 10.0), Reload(1.0, without), Arrival(2.0, "m", 1.0)]
    config = with_backends(*pair, routing_policies=own)
    assert story(trace, config, resident=["m-1", "m-2"])[-3:] == [
        "2 leased m-2",
        "10 evicting m-1",
        "11 stopped m-1",
    ]


def wide(*models, **settings):
    """A backend of each of these models on each of 40 GPUs, each with a resident of its own."""
    own = [one(f"own-{gpu}", str(gpu)) for gpu in range(40)]
    return with_backends(
        *own, *(one(f"{m}.{b.gpus[0]}", *b.gpus, model=m, most=1) for m in models for b in own), **settings
    )


@pytest.mark.parametrize(
    "after",
    [
        wide("m", policy="debounce", drain_timeout=5.0),
        wide("m", "n"),
        wide(),
        with_backends(*(replace(b, engine="vllm") if b.model == "m" else b for b in wide("m").backends)),
        with_backends(*(replace(b, priority=3) if b.model == "m" else b for b in wide("m").backends)),
    ],
    ids=["policy", "joins", "leaves", "replaced", "described"],
)
def test_a_reload_that_concerns_very_many_gpus_ends_where_one_of_few_does(after, monkeypatch):
    resident = [f"own-{gpu}" for gpu in range(39)] + ["m.39"]
    trace = [
        Arrival(0.0, "m", 5.0),
        *(Arrival(0.5 + gpu / 128, f"own-{gpu}", 3.0 + gpu / 64) for gpu in range(39)),
        Arrival(0.75 + 1 / 256, "own-39", 1.0),
        Reload(1.0, after),
        Arrival(1.0 + 1 / 4096, after.backends[-1].model, 2.0),
        Arrival(2.0, "own-7", 2.0),
        Arrival(8.0, after.backends[-1].model, 2.59375),
    ]
    trace.sort(key=lambda entry: entry.at)
    story(trace, wide("m"), takes_its_time_anywhere, resident=resident, seeds=1)
    layouts = []
    regroup = Layout.regroup
    monkeypatch.setattr(Layout, "regroup", lambda self: layouts.append(self) or regroup(self))
    log = simulate(wide("m"), trace, takes_its_time_anywhere, resident=resident)
    audit(layouts[-1])
    assert {slot.name for slot in layouts[-1].slots} == {backend.name for backend in after.backends}
    assert not [slot for slot in layouts[-1].slots if slot.leaving]
    ended = {event.ticket for event in log if event.kind in ("leased", "failed")}
    assert {event.ticket for event in log if event.kind == "queued"} <= ended


def takes_its_time_anywhere(step, nth):
    return Outcome(5.0 * isinstance(step, Load) + 1.0 + len(step.backend) / 64 + nth / 4096)


def takes_longer_by_gpu(step, nth):
    gpu = int(step.backend.split("-" if "-" in step.backend else ".")[1])
    return takes_its_time_anywhere(step, nth)._replace(seconds=2.0 + gpu / 64)


@pytest.mark.parametrize("after", [wide("m", "n", when_paused="wait"), wide()], ids=["waits", "refuses"])
def test_a_pause_that_begins_while_a_reload_is_carried_out_holds_for_all_gpus(after):
    trace = [
        Arrival(0.0, "own-0", 5.0),
        Reload(1.0, after),
        PauseBegun(1.0 + 1 / 4096, 10.0),
        Arrival(3.0, after.backends[-1].model, 1.0),
        Arrival(20.0, after.backends[-1].model, 1.0),
    ]
    resident = [f"own-{gpu}" for gpu in range(40)]
    told = story(trace, wide("m"), takes_longer_by_gpu, resident=resident, seeds=1)
    begun, ended = (next(n for n, line in enumerate(told) if word in line) for word in ("paused", "resumed"))
    during = told[begun:ended]
    assert {line.split()[2] for line in during if " evicting " in line} == {*resident}
    assert not [line for line in during if " loading " in line]


@pytest.mark.seeds
@pytest.mark.parametrize("hosts", [("",), ("", "h", "k")])
@pytest.mark.parametrize("seed", seeds(8, of=20))
def test_after_an_exchange_of_gpu_groups_each_is_where_the_tables_say(seed, hosts, monkeypatch):
    note, count = Layout._note, 0

    def audited(layout, groups):
        nonlocal count
        note(layout, groups)
        audit(layout)
        count += 1

    monkeypatch.setattr(Layout, "_note", audited)
    start, trace, perform = wild_history(seed, hosts)
    simulate(start, trace, perform)
    assert count > 1


def audit(layout):
    groups = layout.groups
    assert layout.of_backend == {name: group for group in groups for name in group.slots}
    assert layout.by_name == {group.name: group for group in groups}
    assert set(layout.records) == {group.host for group in groups}
    gpus = [gpu for group in groups for gpu in {g for slot in group.slots.values() for g in slot.holds}]
    assert len(gpus) == len(set(gpus))
    for host in layout.hosts:
        here = [group for group in groups if group.host.name == host]
        assert layout.on_host(host) == sorted(here, key=BY_NAME)
        names = {slot.name for group in here for slot in group.slots.values() if slot.backend.host == host}
        assert layout.memories[host]._slots.keys() == names
    assert layout.models.keys() == {name for group in groups for name in group.models}
    for name, model in layout.models.items():
        own = sorted([group for group in groups if name in group.models], key=BY_NAME)
        assert layout.groups_of[name] == own
        assert all(group.models[name] is model for group in own)
        assert all(group.groups_of(model) == own for group in own)
        assert sorted(slot.name for slot in model.slots) == sorted(
            slot.name for group in own for slot in group.own(model)
        )
        assert layout.of_model[name] in own
        assert model.queue_group == (layout.of_model[name].name if len(own) > 1 else "")
        assert (name in layout.spread) == (len(own) > 1)
        assert model.slots == sorted((slot for group in own for slot in group.own_slots[name]), key=order)
        assert model.ready == [slot for slot in model.slots if slot.model == name and slot.serves]
        own = [slot for slot in model.slots if slot.model == name]
        assert model.active == dict.fromkeys(s for s in own if s.coming or s.state != "stopped")
        assert (model.replicas is None) == (len(model.slots) < 2)
        if model.replicas:
            assert set(model.replicas.in_flight._accounts) == {slot.name for slot in model.slots}
            assert model.replicas._by_name == {slot.name: slot for slot in model.slots}
        audit_settings(layout, model)
    for group in groups:
        audit_state(layout, group)
    assert layout.touched.keys() <= {*groups}
    assert all(host.pause is layout.pause for host in layout.hosts.values())
    assert layout.pause.waits == (layout.settings.config.when_paused == "wait")


def audit_settings(layout, model):
    """They follow from the configuration, or from the backends as they are while one of them leaves."""
    own = [each for each in layout.settings.config.backends if each.model == model.name]
    if any(slot.leaving for slot in model.active):
        own = [slot.backend for slot in model.slots if slot.model == model.name]
    if own:
        expected = settings_of(own, layout.settings.config)
        assert model.settings._replace(routing="") == expected._replace(routing="")


def audit_state(layout, state):
    wanted = {backend.name: backend for backend in layout.settings.config.backends}
    slots = list(state.slots.values())
    assert {slot.name: slot.backend for slot in slots if not slot.leaving} == {
        slot.name: wanted[slot.name] for slot in slots if not slot.leaving
    }
    assert state.ready == [slot for slot in slots if slot.serves]
    assert state.stayers == [slot for slot in slots if slot.backend.min_residency]
    assert state.idlers == [slot for slot in slots if slot.ttl is not None]
    assert state.sleepers == [slot for slot in slots if slot.backend.evict_to != ("stop",)]
    assert state.homes == [slot for slot in slots if slot.backend.home]
    assert state.routed == [model for model in state.models.values() if model.replicas]
    assert state.bounded == [model for model in state.models.values() if model.bounded]
    assert all(slot.holds.keys() == set(slot.backend.gpu_names) for slot in slots)
    assert state.placement.active == dict.fromkeys(slot for slot in slots if slot.state != "stopped")
    assert all(slot.backend.host == state.host.name for slot in slots)


# What a backend is told in place


def retold(fleet, at, *backends, **settings):
    """Have a fleet go on with these backends, and settings that are otherwise as they were."""
    config = replace(fleet.core.layout.settings.config, backends=backends, **settings)
    effects = fleet.take(fleet.core.reconfigured(config, at))
    audit(fleet.core.layout)
    return effects


@pytest.mark.parametrize(
    "said", [{"ttl": 5.0}, {"min_residency": 9.0}, {"home": True}, {"drain_timeout": inf}], ids=str
)
def test_one_setting_of_one_backend_is_known_to_its_gpu_group_until_it_is_gone(said):
    fleet = Fleet(A, B)
    retold(fleet, 1.0, replace(A, **said), B)
    retold(fleet, 2.0, A, B)
    assert fleet.core.layout.slot("a").backend == fleet.core.layout.settings.config.completed(A)


@pytest.mark.parametrize("by", [{"home": True, "home_after": 5.0}, {"home": True}])
def test_a_backend_that_is_at_home_since_a_reload_comes_back(by):
    after = with_backends(replace(A, **by), B, home_after=5.0 if len(by) < 2 else 300.0)
    trace = [Arrival(0.0, "b", 1.0), Reload(8.0, after), Arrival(60.0, "a", 1.0)]
    assert story(trace, resident=["b"])[-7:] == events(
        "8 reloaded, 8 draining b, 8 evicting b, 9 stopped b, 9 loading a, 19 ready a, 60 leased a"
    )


def test_for_how_long_a_model_at_home_is_away_may_change_for_all():
    home = replace(A, home=True)
    trace = [
        Arrival(0.0, "b", 1.0),
        Reload(8.0, with_backends(home, B, home_after=20.0)),
        Arrival(60.0, "a", 1.0),
    ]
    assert "21 draining b" in story(trace, with_backends(home, B), resident=["b"])


def test_a_keep_alive_outlasts_another_ttl_and_the_next_load_goes_by_that():
    fleet = Fleet(A, B)
    fleet.take(fleet.core.adopted("a", 0.0))
    ticket = fleet.request("a", 1.0)
    fleet.core.keep_alive_asked(ticket, 50.0, 1.0)
    fleet.take(fleet.core.released(ticket, 2.0))
    retold(fleet, 3.0, replace(A, ttl=5.0), B)
    assert fleet.last.ask_at == 52.0
    assert fleet.take(fleet.core.time_passed(52.0)) == ["evict a"]
    fleet.evicted("a", 53.0)
    again = fleet.request("a", 54.0)
    fleet.loaded("a", 55.0)
    fleet.take(fleet.core.released(again, 56.0))
    assert fleet.last.ask_at == 61.0


def test_answers_that_a_model_may_end_since_a_reload_turn_others_away():
    fleet = Fleet(A, B, queue_timeout=60.0)
    fleet.take(fleet.core.adopted("a", 0.0))
    fleet.take(fleet.core.released(fleet.request("a", 0.0), 1000.0))  # its answers take that long
    fleet.request("a", 1000.0)
    retold(fleet, 1001.0, replace(A, drain_timeout=inf), B)
    assert fleet.request("b", 1002.0).error.code == "would_wait_too_long"
    retold(fleet, 1003.0, A, B)
    assert fleet.request("b", 1004.0).error is None


def test_what_a_model_held_is_known_after_a_reload_and_not_of_another_engine():
    digested = replace(A, service=replace(A.service, digest="1"))
    fleet = Fleet(digested, B, gpus=(Gpu("0", vram=24),))
    fleet.take(fleet.core.adopted("a", 0.0))
    fleet.request("b", 1.0)
    fleet.evicted("a", 2.0, freed={"0": 20})
    slot = fleet.core.layout.slot("a")
    retold(fleet, 3.0, replace(digested, ttl=5.0, priority=2), B)
    assert (fleet.core.layout.slot("a"), slot.held_last) == (slot, {"0": 20})
    retold(fleet, 4.0, replace(digested, service=replace(A.service, digest="2")), B)
    assert fleet.core.layout.slot("a").held_last == {}


def test_memory_that_is_the_hosts_too_counts_once_however_a_reload_tells_it():
    sized = replace(A, vram=60, ram=10)
    fleet = Fleet(sized, B, gpus=(Gpu("0", vram=120, shared=120),), host_memory=200)
    slot = fleet.core.layout.slot("a")
    assert slot.ram == 70
    retold(fleet, 1.0, replace(sized, ram=15), B)
    assert (fleet.core.layout.slot("a"), slot.ram) == (slot, 75)
    retold(fleet, 2.0, replace(sized, ram=15), B, gpus=(Gpu("0", vram=120, shared=90),))
    assert fleet.core.layout.slot("a").ram == 15 + 30
    retold(fleet, 3.0, replace(sized, ram=15, vram=70), B)
    assert fleet.core.layout.slot("a").ram == 15 + 40


def test_a_backend_that_is_told_otherwise_while_all_is_paused_stays_away():
    fleet = Fleet(A, B, when_paused="wait")
    fleet.take(fleet.core.paused(0.0))
    waiting = fleet.request("a", 1.0)
    assert retold(fleet, 2.0, replace(A, preload=True, home=True), B, home_after=1.0) == []
    assert retold(fleet, 3.0, A, B, C, when_paused="refuse") == []
    assert waiting.error.code == "paused"
    assert fleet.request("c", 4.0).error.code == "paused"
