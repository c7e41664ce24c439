"""Which hosts are in use is read by one thread while another adds to them."""

from __future__ import annotations

from types import SimpleNamespace

from anvil_mux.cluster.cluster import Cluster
from anvil_mux.config.config import Backend, Config
from anvil_mux.serve.hosts_in_use import HostsInUse
from tests.cluster.test_cluster import Machines


def test_hosts_may_come_while_they_are_gone_through():
    machines = Machines(a="10.0.0.1")
    cluster = Cluster(machines)
    cluster.look()
    local = SimpleNamespace(reconfigure=lambda config: None)
    hosts = HostsInUse(local, cluster, Config((Backend("m", "m"),)))
    mux = SimpleNamespace()
    hosts.begin(
        mux, None, SimpleNamespace(now=lambda: 0.0), took=print, read_ahead=print, say=print, fenced=print
    )
    readers = [
        iter(each.items())
        for each in (hosts.all.by_name, hosts.watches, cluster.hosts, cluster.nodes, cluster.problems)
    ]
    for each in readers:
        next(each, None)
    machines.up["b"] = machines.up["a"]._replace(name="b", address="10.0.0.2")
    machines.silent.add("b")
    hosts._look(lambda: None)
    machines.silent.clear()
    hosts._look(lambda: None)
    hosts.take(Config((Backend("m", "m"), Backend("n", "n", host="c"))))
    for each in readers:
        list(each)
    assert set(hosts.all.by_name) == {"", "a", "b", "c"}
    assert set(hosts.watches) == {"a", "b"}
    for watch in hosts.watches.values():
        watch.worker.close()
