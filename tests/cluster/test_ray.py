"""The driver against real raylets: what it tells of a cluster, and what becomes of calls when parts fail.

Processes and whole hosts fail, by SIGKILL or SIGSTOP. A call has to be answered in its time although nobody
is there: that time is far below what Ray would take.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anvil_mux
from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import (
    AgentCall,
    Node,
)
from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.host.seam import HostConfig, Loaded
from tests.cluster.driven import GUARD, OWNER, SHORT, Driven
from tests.cluster.rig import ROOT, Cluster, Host, read, wait_for, why_not

pytestmark = pytest.mark.cluster

SOON = 5.0
"""Seconds within which a wrong token is told."""
Drive = Callable[..., Driven]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head on which the driver runs, and the hosts a and b; each test leaves it as it was."""
    if reason := why_not():
        pytest.skip(reason)
    with Cluster() as cluster:
        for name in ("head", "a", "b"):
            cluster.add(name)
        cluster.wait()
        yield cluster


@pytest.fixture
def drive() -> Iterator[Callable[..., Driven]]:
    """Start a driver; at the end it has to end with its input."""
    made: list[Driven] = []

    def make(host: Host, *flags: str, **environ: str | None) -> Driven:
        made.append(Driven(host, *flags, **environ))
        return made[-1]

    yield make
    for driven in made:
        driven.close()


@pytest.fixture
def driven(cluster: Cluster, drive: Drive) -> Driven:
    """A driver that has joined, and has heard of both hosts."""
    driven = drive(cluster.hosts["head"])
    assert driven.joined()[0]
    driven.hello("a")
    driven.hello("b")
    return driven


# A cluster that is well


def test_the_nodes_are_the_hosts_with_the_label(driven: Driven):
    nodes = driven.nodes()
    assert set(nodes) == {"a", "b"}
    assert nodes["a"] == Node("a", "127.0.0.3", (("anvil-host", "a"),))


def test_each_host_has_an_agent_of_its_own(cluster: Cluster, driven: Driven):
    for name in ("a", "b"):
        hello = driven.hello(name)
        assert (hello["name"], hello["address"]) == (name, cluster.hosts[name].address)
        assert hello["version"] == anvil_mux.__version__
        assert driven.call(name, "inventory").address == cluster.hosts[name].address


def test_two_drivers_reach_the_same_agent(cluster: Cluster, driven: Driven, drive: Drive):
    other = drive(cluster.hosts["head"])
    assert other.joined()[0]
    assert other.hello("a")["instance"] == driven.hello("a")["instance"]


def test_a_long_message_crosses(driven: Driven):
    driven.call("a", "claim", "the test", False)
    text = "x" * 3_000_000
    driven.call("a", "remember", text)
    assert driven.call("a", "recall") == text


def test_calls_at_once_do_not_wait_for_each_other(driven: Driven):
    driven.call("a", "claim", "the test", False)
    driven.call("a", "reconfigure", CONFIG)
    payload = frames.dump(AgentCall(OWNER, "news", (0, GUARD)))
    waiting = driven.begin("a", "call", payload, SHORT)
    assert driven.ask("a", "hello")[0]
    assert driven.answer(waiting) == (False, f"the agent of a did not answer in {SHORT:g} s")


def test_a_host_that_is_not_there_is_named(driven: Driven):
    ok, said = driven.ask("nobody", "hello")
    assert not ok
    assert said == "nobody is not in the cluster: no raylet runs with the label anvil-host=nobody"


def test_two_hosts_of_one_name_are_refused_until_one_is_gone(cluster: Cluster, driven: Driven):
    twins = [cluster.add(name, label="anvil-host=twin") for name in ("first", "second")]
    cluster.wait()
    ok, said = driven.ask("twin", "hello")
    for twin in twins:
        twin.power_cut()
        del cluster.hosts[twin.name]
    assert not ok
    assert said.startswith("2 machines are called twin (127.0.0.5, 127.0.0.6): give each a name of its own")


def test_an_agent_of_an_older_version_is_replaced(cluster: Cluster, driven: Driven, drive: Drive):
    before = driven.hello("a")["instance"]
    driven.close()
    run_in_python(cluster.hosts["head"], MAKE_OLD_AGENT, "a")
    newer = drive(cluster.hosts["head"])
    assert newer.joined()[0]
    hello = newer.hello("a")
    assert hello["version"] == anvil_mux.__version__
    assert hello["instance"] != before


@pytest.mark.parametrize("answer", ["return Evil()", "raise EvilError()", "return {}"])
def test_an_answer_that_is_not_bytes_runs_nothing_here(
    cluster: Cluster, driven: Driven, tmp_path: Path, answer: str
):
    before, ran = driven.hello("a")["instance"], tmp_path / "ran"
    run_in_python(cluster.hosts["head"], MAKE_EVIL_AGENT.format(file=str(ran), answer=answer), "a")
    payload = frames.dump(AgentCall(OWNER, "inventory"))
    for method in ("hello", "call"):
        ok, said = driven.ask("a", method, payload)
        assert not ok
        assert "is not bytes" in said or "EvilError" in said or "has ended" in said
    assert not ran.exists()
    run_in_python(cluster.hosts["head"], END_AGENT, "a")
    wait_for(lambda: driven.ask("a", "hello")[0], "a has an agent", Path(driven.log.name))
    assert driven.hello("a")["instance"] != before


def test_a_host_that_is_back_at_another_address_has_an_agent_there(cluster: Cluster, driven: Driven):
    host = cluster.add("moving")
    host.wait()
    before = driven.hello("moving")
    host.power_cut()
    host.address = "127.0.0.99"
    host.start()
    host.wait()
    while (hello := driven.hello("moving"))["instance"] == before["instance"]:
        pass
    assert (before["address"] != "127.0.0.99", hello["address"]) == (True, "127.0.0.99")
    assert driven.nodes()["moving"].address == "127.0.0.99"
    host.power_cut()
    del cluster.hosts["moving"]


def test_a_host_without_anvil_mux_says_what_to_install(cluster: Cluster, driven: Driven, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ANVIL_MUX)
    bare = cluster.add("bare", environ={"PYTHONPATH": str(tmp_path)})
    bare.wait()
    ok, said = driven.ask("bare", "hello")
    problem = driven.nodes()["bare"].problem
    bare.power_cut()
    del cluster.hosts["bare"]
    assert not ok
    assert said == problem
    version = anvil_mux.__version__
    assert f"on bare lacks anvil-mux: install {version} there, with the extra ray" in said


# Not let in


def test_a_wrong_token_is_told_soon(cluster: Cluster, drive: Drive, tmp_path: Path):
    (tmp_path / "token").write_text("0" * 64)
    driven = drive(cluster.hosts["head"], RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    ok, said = driven.joined(within=SOON)
    assert not ok
    assert "refuses the token of this machine: copy ~/.ray/auth_token from the head" in said
    assert driven.ends() == 1


def test_a_machine_without_a_token_is_told_where_to_get_it(cluster: Cluster, drive: Drive, tmp_path: Path):
    ok, said = drive(cluster.hosts["head"], RAY_AUTH_TOKEN_PATH=None, HOME=str(tmp_path)).joined(within=SOON)
    assert not ok
    assert said.startswith("this machine has no token for the cluster: copy ~/.ray/auth_token")


def test_an_address_where_nobody_listens_is_told_soon(cluster: Cluster, drive: Drive):
    address, cluster.address = cluster.address, "127.0.0.2:6390"
    try:
        ok, said = drive(cluster.hosts["head"]).joined(within=SOON)
    finally:
        cluster.address = address
    assert not ok
    assert "nothing answers at 127.0.0.2:6390 (Connection refused)" in said


def test_a_machine_without_a_raylet_is_told_to_start_one(cluster: Cluster, drive: Drive):
    bare = cluster.add("raylet-less", label="")
    bare.wait()
    bare.stop_ray()
    ok, said = drive(bare).joined()
    bare.power_cut()
    del cluster.hosts["raylet-less"]
    assert not ok
    assert f"`ray start --address={cluster.address} --num-cpus=0 --num-gpus=0`" in said


def test_other_versions_of_ray_and_python_are_told(cluster: Cluster, drive: Drive):
    before = run_in_python(
        cluster.hosts["head"], SET_VERSIONS, json.dumps({"ray_version": "2.53.0", "python_version": "3.9.1"})
    )
    try:
        ok, said = drive(cluster.hosts["head"]).joined()
    finally:
        run_in_python(cluster.hosts["head"], SET_VERSIONS, before)
    assert not ok
    assert "has Ray 2.53.0 and Python 3.9.1, and this machine Ray" in said


def test_an_open_cluster_is_refused_unless_that_is_allowed(drive: Drive):
    if reason := why_not():
        pytest.skip(reason)
    with Cluster() as cluster:
        head = cluster.add("head", environ={"RAY_AUTH_MODE": "disabled"})
        head.wait()
        ok, said = drive(head).joined()
        assert not ok
        assert "is open, so whoever reaches it can run programs there" in said
        allowed = drive(head, "--insecure", RAY_AUTH_TOKEN_PATH=None, HOME=str(head.folder))
        assert allowed.joined()[0]
        allowed.close()


# Failures


@pytest.mark.parametrize("fail", [Host.kill_agent, Host.kill_raylet])
def test_what_was_killed_comes_back_and_its_engines_were_never_gone(
    cluster: Cluster, driven: Driven, fail: Callable[[Host], None]
):
    host = cluster.hosts["a"]
    engine = Engine(host, driven)
    fail(host)
    while driven.hello(host.name)["instance"] == engine.agent:
        pass
    assert engine.answers()
    host.wait()
    os.kill(engine.pid, signal.SIGKILL)


def test_an_agent_ends_with_its_raylet_and_lets_the_next_one_have_the_host(cluster: Cluster, driven: Driven):
    host = cluster.add("c", environ={"RAY_raylet_death_check_interval_milliseconds": "3600000"})
    host.wait()
    before = driven.hello("c")["instance"]
    driven.call("c", "claim", "the test", False)
    [agent] = [os.pidfd_open(pid) for pid in host.pids("ray::HostActor")]
    host.kill_raylet()
    ended = select.select([agent], [], [], GUARD)[0]
    os.close(agent)
    assert ended
    host.wait()
    while driven.hello("c")["instance"] == before:
        pass
    driven.call("c", "claim", "the test", False)
    host.power_cut()
    del cluster.hosts["c"]


def test_a_host_that_is_frozen_fails_in_time_and_holds_up_no_other(cluster: Cluster, driven: Driven):
    before = driven.hello("a")["instance"]
    waiting = driven.begin("a", "hello", timeout=GUARD)
    assert driven.answer(waiting)[0]
    cluster.hosts["a"].freeze()
    try:
        assert driven.ask("a", "hello", timeout=SHORT) == (
            False,
            f"the agent of a did not answer in {SHORT:g} s",
        )
        assert driven.ask("b", "hello", timeout=SHORT)[0]
    finally:
        cluster.hosts["a"].thaw()
    assert driven.hello("a")["instance"] == before


def test_a_host_that_lost_its_power_comes_back_with_an_agent(cluster: Cluster, driven: Driven):
    before = driven.hello("b")["instance"]
    cluster.hosts["b"].power_cut()
    assert not driven.ask("b", "hello", timeout=SHORT)[0]
    assert driven.ask("a", "hello", timeout=SHORT)[0]
    cluster.hosts["b"].start()
    cluster.hosts["b"].wait()
    assert driven.hello("b")["instance"] != before


def test_the_driver_ends_when_all_hosts_are_silent(cluster: Cluster, driven: Driven, drive: Drive):
    for name in ("a", "b"):
        cluster.hosts[name].freeze()
    try:
        assert not driven.ask("a", "hello", timeout=SHORT)[0]
        assert driven.ends() == 3
        assert driven.answer(0) == (False, "no host has answered for 5 s")
        again = drive(cluster.hosts["head"])
        assert again.joined()[0]
        assert not again.ask("a", "hello", timeout=SHORT)[0]
    finally:
        for name in ("a", "b"):
            cluster.hosts[name].thaw()
    assert again.hello("a")
    assert again.hello("b")


def test_a_driver_that_is_killed_leaves_the_agents_alone(cluster: Cluster, driven: Driven, drive: Drive):
    before = driven.hello("a")["instance"]
    driven.process.send_signal(signal.SIGKILL)
    assert driven.ends() != 0
    again = drive(cluster.hosts["head"])
    assert again.joined()[0]
    assert again.hello("a")["instance"] == before


LOOKING = {"RAY_raylet_liveness_self_check_interval_ms": "1000"}
"""How often raylets ask whether the head still knows them: in contrib/ 5 s, and with Ray itself a minute."""


def test_a_head_that_comes_back_without_its_memory_costs_the_agents_but_no_engine(drive: Drive):
    if reason := why_not():
        pytest.skip(reason)
    with Cluster() as cluster:
        head = cluster.add("head", environ=LOOKING)
        beside = cluster.add("beside", label="", environ=LOOKING)
        host = cluster.add("a", environ=LOOKING)
        cluster.wait()
        driven = drive(beside)
        assert driven.joined()[0]
        engine = Engine(host, driven)
        head.power_cut()
        assert driven.ask("a", "hello", timeout=SHORT)[0]
        assert not driven.ask("", "nodes", timeout=SHORT)[0]
        head.start()
        # The raylets end, and start again with what is another cluster.
        driven.is_asked_until_it_ends("a")
        again = until_joined(beside, drive)
        assert again.hello("a")["instance"] != engine.agent
        assert engine.answers()
        again.close()
        driven.close()


def test_a_head_that_keeps_its_memory_comes_back_unnoticed(drive: Drive):
    if reason := why_not():
        pytest.skip(reason)
    with Cluster() as cluster:
        store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(cluster.folder / "gcs")}
        head = cluster.add("head", environ=store)
        beside = cluster.add("beside", label="")
        cluster.add("a")
        cluster.wait()
        driven = drive(beside)
        assert driven.joined()[0]
        before = driven.hello("a")["instance"]
        head.power_cut()
        assert driven.ask("a", "hello", timeout=SHORT)[0]
        head.start()
        head.wait()
        assert driven.nodes()["a"].is_alive
        assert driven.hello("a")["instance"] == before
        driven.close()


def until_joined(host: Host, drive: Drive) -> Driven:
    """Return a driver that has joined, started again as often as it takes."""
    while True:
        driven = drive(host)
        if driven.joined()[0]:
            return driven


# What runs on hosts

ENGINE = (
    sys.executable,
    str(ROOT / "bin" / "demo-engine"),
    "--model",
    "m",
    "--load-seconds",
    "0.1",
    "--host",
    "$HOST",
)
MODEL = Backend("m", "m", load_timeout=GUARD, service=Service(command=ENGINE))
CONFIG = HostConfig((MODEL,), project="anvil-ray", runtime="process")


class Engine:
    """An engine that an agent has started."""

    def __init__(self, host: Host, driven: Driven) -> None:
        self._host = host
        self.agent = driven.hello(host.name)["instance"]
        driven.call(host.name, "claim", "the test", False)
        driven.call(host.name, "reconfigure", CONFIG)
        driven.call(host.name, "begin", 1, "load", (MODEL, "stop", 1))
        state = driven.call(host.name, "result", 1, GUARD)
        assert state.done
        self._url = frames.of(Loaded, state.value).url
        [self.pid] = [
            pid for pid in host.pids("demo-engine") if "demo-engine" in read(f"/proc/{pid}/cmdline")
        ]

    def answers(self) -> bool:
        """Whether it is still the same process, and well."""

        def ask() -> bool:
            with urllib.request.urlopen(f"{self._url}/health", timeout=GUARD) as answer:
                return bool(answer.status == 200)

        return self.pid in self._host.pids("demo-engine") and self._host.cluster.inside(ask)


MAKE_OLD_AGENT = """
import ray, sys
ray.init("auto", namespace="anvil-mux", log_to_driver=False)
name = sys.argv[1]
ray.kill(ray.get_actor(f"anvil-host-{name}"))
class Old:
    def hello(self):
        return b'{"version": "0.0.1"}'
options = dict(name=f"anvil-host-{name}", lifetime="detached", num_cpus=0, memory=1)
options["label_selector"] = {"anvil-host": name}
while True:
    try:
        old = ray.remote(Old).options(**options).remote()
        break
    except ValueError:
        pass  # the name is taken until the other has ended
assert b"0.0.1" in ray.get(old.hello.remote())
"""

MAKE_EVIL_AGENT = """
import os, ray, sys
ray.init("auto", namespace="anvil-mux", log_to_driver=False)
name = sys.argv[1]
ray.kill(ray.get_actor(f"anvil-host-{{name}}"))
class Evil:
    def __reduce__(self):
        return os.mkdir, ({file!r},)
class EvilError(Exception):
    def __reduce__(self):
        return os.mkdir, ({file!r},)
class Agent:
    def hello(self):
        {answer}
    def call(self, text):
        {answer}
    def ready(self):
        return b""
options = dict(name=f"anvil-host-{{name}}", lifetime="detached", num_cpus=0, memory=1)
options["label_selector"] = {{"anvil-host": name}}
while True:
    try:
        evil = ray.remote(Agent).options(**options).remote()
        break
    except ValueError:
        pass  # the name is taken until the other has ended
ray.get(evil.ready.remote())
"""

END_AGENT = """
import ray, sys
ray.init("auto", namespace="anvil-mux", log_to_driver=False)
ray.kill(ray.get_actor(f"anvil-host-{sys.argv[1]}"))
"""

SET_VERSIONS = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address="127.0.0.2:6379")
print(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster").decode())
client.internal_kv_put(b"CLUSTER_METADATA", sys.argv[1].encode(), True, b"cluster")
"""

WITHOUT_ANVIL_MUX = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "anvil_mux":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Without())
"""


def run_in_python(host: Host, text: str, *args: str) -> str:
    """Return what a program prints that runs on a host."""
    done = host.run([sys.executable, "-c", text, *args])
    assert done.returncode == 0, done.stdout
    return str(done.stdout).strip()
