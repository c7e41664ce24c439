"""Which hosts are in use is read by one thread while another adds to them."""

from types import SimpleNamespace

from anvil_mux.cluster.cluster import Cluster
from anvil_mux.config.config import Backend, Config
from anvil_mux.serve.hosts import ConfiguredHosts
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
    for watch in watches.by_host.values():
        watch.worker.close()
