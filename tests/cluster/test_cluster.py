"""Which hosts a cluster has, and that they are claimed, in turns of who asks."""

from __future__ import annotations

import os

import pytest

from anvil_mux import __version__
from anvil_mux.cluster import frames
from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.cluster import Cluster, Identity, owner_id
from anvil_mux.cluster.frames import AgentAnswer, AgentCall, Claimed, Node
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.errors import BackendError
from anvil_mux.host.seam import HostGpu, Inventory
from tests.cluster.answers import arguments_of

GIB = 1 << 30


class Machines:
    """Agents by the name of their host, in one process, and the way to them."""

    def __init__(self, **addresses):
        self.up = {name: Node(name, address, (("zone", "x"),)) for name, address in addresses.items()}
        self.silent = set()
        self.versions = {}
        self.ids = {}
        self.owners = {}
        self.epochs = {}
        self.kept = {}

    def nodes(self):
        return list(self.up.values())

    def call(self, host, method, payload, timeout):
        if host in self.silent or host not in self.up:
            raise AgentSilent("no answer")
        if method == "hello":
            version = self.versions.get(host, __version__)
            epoch = str(self.epochs.get(host, 0))
            said = {"version": version, "instance": host, "machine": self.ids.get(host, "")}
            return frames.dump({**said, "epoch": epoch})
        call = frames.read(AgentCall, payload)
        try:
            value = getattr(self, call.method)(host, call.owner, *arguments_of(call))
        except Claimed as error:
            return frames.dump(AgentAnswer(host, error=frames.plain_error(error)))
        return frames.dump(AgentAnswer(host, value))

    def inventory(self, host, owner):
        return Inventory((HostGpu("0", "u", "card", 24 * GIB),), 64 * GIB, self.up[host].address)

    def claim(self, host, owner, name, takeover):
        if self.owners.get(host, owner.id) != owner.id and not takeover:
            raise Claimed(f"host {host} belongs to another")
        self.owners[host], self.epochs[host] = owner.id, owner.epoch

    def release(self, host, owner):
        if self.owners.get(host) == owner.id:
            del self.owners[host]

    def recall(self, host, owner):
        return self.kept.get(host, "")

    def close(self):
        pass


def test_hosts_are_found_with_their_gpus_memory_and_labels():
    cluster = Cluster(Machines(a="10.0.0.1"))
    assert cluster.refresh()
    found = Machine((Gpu("0", 24 * GIB),), 64 * GIB, "10.0.0.1", (("zone", "x"),))
    assert cluster.machines() == {"a": found}
    assert not cluster.refresh(), "nothing has changed since"


def test_a_host_that_joins_or_moves_is_a_change_and_one_that_leaves_is_still_known():
    machines = Machines(a="10.0.0.1")
    cluster = Cluster(machines)
    cluster.refresh()
    machines.up["b"] = Node("b", "10.0.0.2")
    assert cluster.refresh()
    assert set(cluster.machines()) == {"a", "b"}
    machines.up["b"] = machines.up["b"]._replace(address="10.0.0.9")
    assert cluster.refresh()
    assert cluster.machines()["b"].address == cluster.hosts["b"].node.address == "10.0.0.9"
    del machines.up["a"]
    cluster.refresh()
    assert set(cluster.nodes) == {"b"}
    assert set(cluster.machines()) == {"a", "b"}


def test_a_host_that_is_back_with_other_gpus_is_a_change_whoever_learns_of_them_first():
    machines = Machines(a="10.0.0.1")
    cluster = Cluster(machines)
    cluster.refresh()
    machines.inventory = lambda host, owner: Inventory(address="10.0.0.1")
    cluster.hosts["a"].fetch_inventory()  # as its watch does when the agent was started anew
    assert cluster.refresh()
    assert cluster.machines()["a"].gpus == ()
    assert not cluster.refresh()


def test_a_host_that_cannot_be_used_says_why_and_the_others_are_used():
    machines = Machines(a="10.0.0.1", b="10.0.0.2", c="10.0.0.3", d="10.0.0.4")
    machines.versions["b"] = "0.0.1"
    machines.silent.add("c")
    machines.up["d"] = Node("d", problem="2 machines are called d")
    cluster = Cluster(machines)
    cluster.refresh()
    assert set(cluster.nodes) == {"a"}
    assert "install the same" in cluster.problems["b"]
    assert cluster.problems["c"] == "no answer"
    assert cluster.problems["d"] == "2 machines are called d"
    machines.silent.clear()
    assert cluster.refresh(), "it is looked at again as long as it is not used"
    assert set(cluster.nodes) == {"a", "c"}


def test_a_machine_that_has_two_names_is_used_under_one():
    machines = Machines(a="10.0.0.1", b="10.0.0.2", c="10.0.0.3")
    machines.ids = {"a": "boot-1", "b": "boot-1", "c": "boot-2"}
    cluster = Cluster(machines, own=Identity("boot-2", frozenset(["u"])))
    cluster.refresh()
    assert set(cluster.nodes) == {"a", "c"}
    assert "is the same machine as a" in cluster.problems["b"]
    assert [name for name, each in cluster.machines().items() if each.is_own] == ["c"]


def test_containers_that_were_given_different_gpus_are_different_hosts():
    one, other = Identity("boot-1", frozenset(["u"])), Identity("boot-1", frozenset(["v"]))
    assert not one.is_same(other)
    assert one.is_same(Identity("boot-1"))
    assert not Identity().is_same(Identity())


def test_all_hosts_are_claimed_or_none(tmp_path):
    machines = Machines(a="10.0.0.1", b="10.0.0.2")
    machines.owners["b"] = "another"
    cluster = Cluster(machines)
    cluster.refresh()
    with pytest.raises(Claimed, match="host b belongs to another"):
        cluster.claim(tmp_path, "project lab", takeover=False)
    assert machines.owners == {"b": "another"}
    cluster.claim(tmp_path, "project lab", takeover=True)
    assert len(set(machines.owners.values())) == 1


def test_a_later_start_on_the_same_state_folder_is_the_same_owner(tmp_path):
    machines = Machines(a="10.0.0.1")
    for start in (1, 2):
        cluster = Cluster(machines)
        cluster.refresh()
        cluster.claim(tmp_path, "project lab", takeover=False)
        assert machines.epochs["a"] == start


def test_what_hosts_keep_is_recalled_from_those_that_answer():
    machines = Machines(a="10.0.0.1", b="10.0.0.2")
    machines.kept["a"] = "learned"
    cluster = Cluster(machines)
    cluster.refresh()
    machines.silent.add("b")
    assert cluster.recall() == {"a": "learned", "b": ""}


def test_who_an_anvil_mux_is_outlives_a_power_cut_or_is_an_error(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    (tmp_path / "owner").write_text("")
    first = owner_id(tmp_path)
    assert first
    assert synced == [f"{tmp_path}/owner.part", str(tmp_path)]
    assert owner_id(tmp_path) == first
    (tmp_path / "owner").unlink()
    (tmp_path / "owner").mkdir()
    with pytest.raises(BackendError, match="owner cannot be read or written"):
        owner_id(tmp_path)
