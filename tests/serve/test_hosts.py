"""Which hosts are in use is read by one thread while another adds to them; what runs there is taken over."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError, ConfigError
from anvil_mux.host.hosts import Hosts
from anvil_mux.host.seam import Awake, HostGpu, Inventory, Occupant, Unfit
from anvil_mux.serve.hosts import Adoption, ConfiguredHosts
from anvil_mux.serve.watches import HostWatches
from tests.cluster.test_cluster import Machines


def test_hosts_may_come_while_they_are_gone_through():
    machines = Machines(a="10.0.0.1")
    cluster = Cluster(machines)
    cluster.refresh()
    local = SimpleNamespace(reconfigure=lambda config: None)
    hosts = ConfiguredHosts(local, cluster, Config((Backend("m", "m"),)))
    clock = SimpleNamespace(now=lambda: 0.0)
    told = dict.fromkeys(("took", "read_ahead", "say", "fenced", "changed"), lambda *about: None)
    watches = HostWatches(hosts, SimpleNamespace(), None, clock, **told)
    readers = [
        iter(each.items())
        for each in (hosts.by_name, watches.by_host, cluster.hosts, cluster.nodes, cluster.problems)
    ]
    for each in readers:
        next(each, None)
    machines.up["b"] = machines.up["a"]._replace(name="b", address="10.0.0.2")
    machines.silent.add("b")
    watches._look()
    machines.silent.clear()
    watches._look()
    hosts.take(Config((Backend("m", "m"), Backend("n", "n", host="c"))))
    for each in readers:
        list(each)
    assert set(hosts.by_name) == {"", "a", "b", "c"}
    assert set(watches.by_host) == {"a", "b"}
    with watches.busy(["a", "a", "c", "b"]):  # a host for each of its backends
        assert all(watch.busy.locked() for watch in watches.by_host.values())
    assert not any(watch.busy.locked() for watch in watches.by_host.values())
    for watch in watches.by_host.values():
        watch.worker.close()


def test_a_head_that_is_down_is_a_problem_with_its_reason_until_it_is_back():
    machines = Machines(a="10.0.0.1")
    cluster = Cluster(machines)
    cluster.refresh()
    local, said = SimpleNamespace(reconfigure=lambda config: None), []
    hosts = ConfiguredHosts(local, cluster, Config((Backend("m", "m"),)))
    clock = SimpleNamespace(now=lambda: 0.0)
    told = dict.fromkeys(("took", "read_ahead", "fenced", "changed"), lambda *about: None)
    mux = SimpleNamespace(overview=SimpleNamespace(config=hosts.config))
    watches = HostWatches(hosts, mux, None, clock, say=said.append, **told)
    nodes = machines.nodes

    def fail():
        raise AgentSilent("the head of the cluster did not answer in 5 s")

    assert watches.problem() == ""
    machines.nodes = fail
    watches._look()
    watches._look()
    text = (
        "the cluster cannot be controlled (the head of the cluster did not answer in 5 s): requests go on, "
        "but no host can join or return, and nothing is swapped on hosts whose agents do not answer"
    )
    assert watches.problem() == text
    machines.nodes = nodes
    watches._look()
    assert watches.problem() == ""
    assert said == [text, "the cluster can be controlled again"]


A, B, FAR = Backend("a", "a"), Backend("b", "b"), Backend("far", "far", url="http://far")
OLD = Backend("old", "old")


def test_what_cannot_be_seen_at_the_start_is_taken_over_later_and_nothing_is_begun_beside_it_meanwhile():
    def running():
        if is_away:
            raise BackendError("Docker is away")
        return ["a"]

    def tell(what):
        return lambda about: told.append((what, sorted(about)))

    told, said, is_away = [], [], True
    host = SimpleNamespace(
        running=running,
        orphans=lambda: [OLD],
        occupants=list,
        adopt=lambda backend: Awake("http://a"),
        stop=lambda backend: told.append(("stop", [backend.name])),
    )
    facts = SimpleNamespace(expect=tell("expect"), looked_at=tell("looked at"), adopt=tell("adopt"))
    overview = SimpleNamespace(leaving=list)
    mux = SimpleNamespace(facts=facts, overview=overview)
    adoption = Adoption(Hosts({"": host, "h": host}), mux, said.append)
    adoption.begin("h", [replace(A, host="h")])
    assert (told, said) == ([("looked at", ["a"])], ["cannot see what runs already on h: Docker is away"])
    told.clear()
    said.clear()
    adoption.begin("", [FAR, A, B])
    assert told == [("looked at", ["a", "b"]), ("adopt", ["far"]), ("looked at", ["far"])]
    assert adoption.is_over.is_set()
    adoption.begin("", [A, B])
    assert adoption.blind == {"", "h"}
    assert said == ["cannot see what runs already: Docker is away"], "once"
    told.clear()
    is_away = False
    adoption.begin("", [A, B])
    assert adoption.blind == {"h"}
    assert told == [
        ("expect", ["a", "b"]),
        ("stop", ["old"]),
        ("looked at", ["b"]),
        ("adopt", ["a"]),
        ("looked at", ["a"]),
    ]


class Machine:
    """A host with engines that run; ``stubborn`` ones cannot be stopped, ``occupants`` are of others."""

    def __init__(self, found, orphans=(), stubborn=(), occupants=()):
        self.found = found
        self.occupants = lambda: list(occupants)
        self.orphans = lambda: list(orphans)
        self.stubborn = stubborn
        self.stopped = []

    def running(self):
        return list(self.found)

    def adopt(self, backend):
        return self.found[backend.name]

    def stop(self, backend):
        if backend.name in self.stubborn:
            raise BackendError("it does not end")
        self.stopped.append(backend.name)


def adopting(machine, *, leaving=(), refused=(), say=lambda text: None):
    """An adoption of what runs on a machine, and what the scheduler is told about it."""
    told = []

    def adopt(found):
        told.append(dict(found))
        return [name for name in found if name in refused and found[name] == "http://" + name]

    facts = SimpleNamespace(adopt=adopt, looked_at=lambda names: None, expect=lambda names: None)
    mux = SimpleNamespace(facts=facts, overview=SimpleNamespace(leaving=lambda: list(leaving)))
    return Adoption(Hosts({"": machine}), mux, say), told


def test_the_engines_of_others_are_reported_at_the_start():
    said = []
    machine = Machine({}, occupants=[Occupant("c", "q", "left", ("0", "1"), "anvil-mux stop --all")])
    adopting(machine, say=said.append)[0].begin("", [A])
    assert said == [
        "warning: c of the project q, which no anvil-mux serves, is on GPU 0, 1. To end it: "
        "anvil-mux stop --all"
    ]


def test_an_engine_that_cannot_stay_and_cannot_be_stopped_keeps_its_gpus():
    machine = Machine({"a": Unfit("it does not answer"), "b": Awake("http://b")}, stubborn=("a", "b"))
    adoption, told = adopting(machine, refused=("b",))
    adoption.begin("", [A, B])
    assert {name: type(found).__name__ for each in told for name, found in each.items()} == {
        "a": "Unfit",
        "b": "Unfit",
    }
    machine.stubborn = ()
    told.clear()
    adoption.begin("", [A, B])
    assert {"b": "http://b"} in told
    assert not [found for each in told for found in each.values() if isinstance(found, Unfit)]
    assert sorted(machine.stopped) == ["a", "b"]


def test_an_orphan_that_a_reload_removed_and_that_drains_is_left_to_the_scheduler():
    machine = Machine({}, orphans=[OLD, B])
    adoption, _ = adopting(machine, leaving=[B])
    adoption.begin("", [A])
    assert machine.stopped == ["old"]


def test_a_configuration_is_refused_if_a_host_cannot_take_it_and_given_later_to_one_that_fails():
    machines = Machines(a="10.0.0.1", b="10.0.0.2")
    cluster = Cluster(machines)
    cluster.refresh()
    local = SimpleNamespace(reconfigure=lambda config: None)
    before, after = Config((A,)), Config((B,))
    hosts = ConfiguredHosts(local, cluster, before)
    given = []

    def fail(config):
        raise BackendError("no space left on device")

    def refuse(config):
        given.append(config.backends)
        if config.backends != before.backends:
            raise ConfigError(["b: image x is not present"])

    hosts.by_name["a"].reconfigure = fail
    hosts.take(after)
    assert hosts.config is after
    hosts.take(before)
    hosts.by_name[""].reconfigure = refuse
    with pytest.raises(ConfigError, match="image x is not present"):
        hosts.take(after)
    assert given == [after.backends, before.backends]
    assert hosts.config is before


def test_other_gpus_of_the_own_host_have_the_configuration_read_again():
    gpus, changed = [()], []
    local = SimpleNamespace(
        reconfigure=lambda config: None,
        ping=lambda: "",
        news=lambda after, timeout: [],
        inventory=lambda: Inventory(gpus[0]),
    )
    hosts = ConfiguredHosts(local, None, Config((Backend("m", "m"),)))
    about = dict.fromkeys(("took", "read_ahead", "say", "fenced"), lambda *about: None)
    mux = SimpleNamespace(tell=lambda *about, **more: None, scheduler=SimpleNamespace(host_away=None))
    adoption, clock = SimpleNamespace(blind=()), SimpleNamespace(now=lambda: 0.0)
    watches = HostWatches(hosts, mux, adoption, clock, changed=lambda: changed.append(gpus[0]), **about)
    late = (HostGpu("0", "GPU-0"),)
    for seen in ((), (), late, late, ()):
        gpus[0] = seen
        watches._hear()
    assert changed == [late, ()]
