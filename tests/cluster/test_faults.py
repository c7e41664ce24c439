"""Parts of a cluster fail in mid-stream, and clients see what docs/cluster.md says; on real raylets.

The table there and the tests here have the same rows.
"""

from __future__ import annotations

import select
import socket

import pytest

from tests.cluster import rig
from tests.cluster.rig import wait_for
from tests.cluster.site import FILE, GPUS, JSON, TOKENS_PER_SECOND, Site, Stream, question, service
from tests.running import seen

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(rig.why_not()), reason=rig.why_not())]

TOKENS = 60
"""In an answer, which takes three seconds."""


@pytest.fixture(scope="module")
def cluster():
    with rig.Cluster() as made:
        for name in ("head", "gpu-a", "gpu-b"):
            made.add(name)
        made.wait()
        yield made


@pytest.fixture
def site(cluster, tmp_path):
    made = Site(cluster, tmp_path)
    made.mux = made.begin()
    try:
        for host in ("gpu-a", "gpu-b"):
            made.becomes(host, "here")
        for model in ("a", "b", "roam"):
            assert made.answers(model)
        yield made
    finally:
        print("\n".join(made.mux.output))  # for whoever reads why a test failed
        made.end()


def test_models_on_each_host_are_served_from_one_address(site):
    streams = {model: Stream(site, model) for model in ("a", "b", "roam")}
    for model, stream in streams.items():
        stream.ended()
        assert (stream.status, stream.error, len(stream.tokens)) == (200, "", TOKENS), model
    assert "a.gpu-a" in site.ready_on("gpu-a")
    assert "b.gpu-b" in site.ready_on("gpu-b")
    hosts = {each["host"]: each for each in site.ask("GET", "/hosts")[2]["hosts"]}
    assert {name: each["state"] for name, each in hosts.items()} == {
        "local": "here",
        "gpu-a": "here",
        "gpu-b": "here",
    }
    assert hosts["gpu-a"]["round_trip_seconds"] > 0.0


def test_an_agent_that_is_killed_cuts_no_stream_and_comes_back_by_itself(site):
    stream = Stream(site, "a").begun()
    site.a.kill_agent()
    stream.ended()
    assert stream.is_whole, stream.error
    assert site.answers("a2"), site.mux.output


def test_a_raylet_that_is_killed_cuts_no_stream_and_engines_are_taken_over(site):
    engines = site.engines()["gpu-a"]
    stream = Stream(site, "a").begun()
    site.a.kill_raylet()
    stream.ended()
    assert stream.is_whole, stream.error
    assert engines <= site.engines()["gpu-a"]
    site.a.wait()
    assert site.answers("a2"), site.mux.output


def test_a_power_cut_ends_streams_with_an_error_and_others_go_on(site):
    on_a, on_b = Stream(site, "a").begun(), Stream(site, "b").begun()
    site.a.power_cut()
    on_a.ended()
    assert not on_a.is_whole
    assert on_a.error, "never a clean end"
    on_b.ended()
    assert on_b.is_whole
    site.becomes("gpu-a", "lost")
    status, headers, answer = site.complete("a")
    assert (status, answer["error"]["code"]) == (503, "host_unavailable")
    assert "gpu-a" in answer["error"]["message"]
    assert float(headers["Retry-After"]) > 0.0
    assert site.complete("roam")[0] == 200, "another host has it"
    assert "roam.gpu-b" in site.ready_on("gpu-b")
    site.a.start()
    site.a.wait()
    site.becomes("gpu-a", "here")
    assert site.answers("a")


def test_a_request_without_a_byte_is_answered_by_another_host(site):
    [name] = [n for n, b in site.backends().items() if n.startswith("roam") and b["state"] == "ready"]
    host = site.a if site.backends()[name]["host"] == "gpu-a" else site.b
    host.freeze()
    stream = Stream(site, "roam")
    stream.ended()
    assert stream.is_whole, stream.error
    host.thaw()
    site.becomes(host.name, "here")


def test_a_host_that_hangs_is_lost_and_what_still_runs_there_is_taken_over(site):
    engines = site.engines()["gpu-a"]
    stream = Stream(site, "a").begun()
    site.a.freeze()
    stream.ended()
    assert not stream.is_whole
    assert stream.error
    site.becomes("gpu-a", "lost")
    site.a.thaw()
    site.becomes("gpu-a", "here")
    assert site.answers("a")
    assert engines & site.engines()["gpu-a"]


def test_a_head_that_is_lost_cuts_nothing_and_control_comes_back_with_it(site):
    streams = [Stream(site, model).begun() for model in ("a", "b")]
    site.head.kill_gcs()
    for stream in streams:
        stream.ended()
        assert stream.is_whole, stream.error
    for host in (site.head, site.a, site.b):
        host.wait()
    assert site.answers("a2"), site.mux.output
    assert site.answers("b")


def test_the_process_that_speaks_with_ray_is_started_anew(site):
    pids = site.head.pids("anvil_mux.cluster.ray_link")
    stream = Stream(site, "a").begun()
    for pid in pids:
        rig.send(pid, 9)
    stream.ended()
    assert stream.is_whole, stream.error
    assert site.answers("a2"), site.mux.output
    assert site.head.pids("anvil_mux.cluster.ray_link")
    assert not set(site.head.pids("anvil_mux.cluster.ray_link")) & set(pids)


def test_a_killed_anvil_mux_finds_its_engines_on_all_hosts(site):
    engines = site.engines()
    site.mux.process.kill()
    site.mux.process.wait(30)
    site.mux = site.begin()
    for model in ("a", "b", "roam"):
        assert site.complete(model)[0] == 200
    assert site.engines() == engines


def test_a_second_anvil_mux_is_refused_and_takes_over_when_told_to(site, tmp_path):
    second = site.serve("--port", "9293", state=tmp_path / "second")
    assert second.process.wait(60) == 1
    second.tells("belongs to project faults on .*--takeover")
    engines = site.engines()
    third = site.begin(9293, words=["--takeover"], state=tmp_path / "second")
    assert site.mux.process.wait(60) == 1
    site.mux.tells("this anvil-mux ends, its engines keep running")
    assert site.complete("a", 9293)[0] == 200
    assert site.engines() == engines
    third.process.terminate()
    third.process.wait(60)


def test_a_takeover_during_a_drain_cuts_no_answer(cluster, tmp_path):
    site = Site(cluster, tmp_path, {**FILE, "x-anvil": {**FILE["x-anvil"], "drain_timeout": "10m"}})
    first = site.mux = site.begin()
    try:
        site.becomes("gpu-a", "here")
        assert site.answers("a")
        stream = Stream(site, "a", tokens=10_000).begun()
        first.process.terminate()
        first.tells("waiting up to 600 s for 1 request")
        site.mux = site.begin(9293, words=["--takeover"], state=tmp_path / "second")
        first.tells("this anvil-mux ends, its engines keep running")
        already = len(stream.tokens)
        wait_for(lambda: len(stream.tokens) > already + TOKENS_PER_SECOND, "more of the answer", site.file)
        assert not stream.error
        first.process.terminate()
        stream.ended()
        assert not stream.is_whole, "a second signal ends the program at once"
        assert first.process.wait(60) == 130
    finally:
        print("\n".join(first.output))
        site.end()


def test_a_standby_takes_over_from_one_that_was_killed(site, tmp_path):
    """The recipe in docs/cluster.md: the standby waits until the first does not answer any more."""
    engines = site.engines()
    site.mux.process.kill()
    site.mux.process.wait(30)
    with pytest.raises(OSError):
        site.ask("GET", "/livez")
    standby = site.begin(9293, words=["--takeover"], state=tmp_path / "standby")
    for model in ("a", "b", "roam"):
        assert site.complete(model, 9293)[0] == 200
    assert site.engines() == engines
    standby.process.terminate()
    standby.process.wait(60)


def test_a_host_is_drained_and_used_again(site):
    site.ask("POST", "/hosts/drain", {"host": "gpu-a"})
    assert not seen(lambda: site.ready_on("gpu-a"), lambda names: not names)
    assert site.complete("a")[2]["error"]["code"] == "host_unavailable"
    assert site.complete("roam")[0] == 200
    site.ask("POST", "/hosts/undrain", {"host": "gpu-a"})
    assert site.answers("a")


def loading(site):
    return [pid for pid in site.a.pids("demo-engine") if "slow" in rig.read(f"/proc/{pid}/cmdline")]


@pytest.mark.parametrize("words", [(), ("--takeover",)])
def test_whoever_comes_in_the_middle_of_a_load_ends_it_before_anything_else(cluster, tmp_path, words):
    slow = service("slow", ["gpu-a"], "0")
    slow["command"] = ["3600" if word == "0.3" else word for word in slow["command"]]
    site = Site(cluster, tmp_path, {**FILE, "services": {**FILE["services"], "slow": slow}})
    site.mux = site.begin()
    try:
        site.becomes("gpu-a", "here")
        assert site.answers("a")
        Stream(site, "slow")
        wait_for(lambda: site.backends()["slow.gpu-a"]["state"] == "loading", "a load", site.file)
        wait_for(lambda: loading(site), "an engine that loads", site.file)
        site.mux.process.kill()
        site.mux.process.wait()
        assert loading(site), "the agent goes on with it"
        site.mux = site.begin(words=words, state=tmp_path / "other" if words else None)
        assert not loading(site)
        assert site.answers("a")
        assert [name for name in site.ready_on("gpu-a") if "roam" not in name] == ["a.gpu-a"]
    finally:
        print("\n".join(site.mux.output))
        site.end()


class Card:
    """The network card of a host that sleeps: it has power, and reads each frame that its cable brings."""

    MAC = "02:00:00:aa:bb:cc"
    BROADCAST = "10.77.0.255"

    def __init__(self, cluster, head):
        self._head = head
        # A cable with two ends: anvil-mux's machine has an address at one, the card is the other.
        for line in (
            f"link add cable type veth peer name card address {self.MAC}",
            "address add 10.77.0.1/24 broadcast + dev cable",
            "link set cable up",
            "link set card up",
        ):
            made = head.run(["ip", *line.split()])
            assert made.returncode == 0, made.stdout
        self._socket = cluster.inside(
            lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        )
        self._socket.bind(("card", 0))

    def close(self):
        self._socket.close()
        self._head.run(["ip", "link", "delete", "cable"])

    def is_called(self):
        """Whether a frame for all cards has come that has this one's address sixteen times in a row."""
        mac = bytes.fromhex(self.MAC.replace(":", ""))
        while select.select([self._socket], [], [], 0.0)[0]:
            frame = self._socket.recv(2048)
            if frame[:6] == b"\xff" * 6 and b"\xff" * 6 + 16 * mac in frame[14:]:
                return True
        return False


def test_a_host_that_sleeps_is_woken_through_its_network_card(cluster, tmp_path, request):
    card = Card(cluster, cluster.hosts["head"])
    request.addfinalizer(card.close)
    wake = {"mac": Card.MAC, "broadcast": Card.BROADCAST}
    machines = {**FILE["x-anvil"]["machines"], "gpu-a": {"gpus": GPUS, "wake": wake}}
    site = Site(cluster, tmp_path, {**FILE, "x-anvil": {**FILE["x-anvil"], "machines": machines}})
    site.mux = site.begin()
    try:
        site.becomes("gpu-a", "here")
        site.a.power_cut()
        site.becomes("gpu-a", "lost")
        never = site.ask(
            "POST", "/v1/chat/completions", question("a", 2), headers={**JSON, "X-Anvil-Swap": "never"}
        )
        assert never[2]["error"]["code"] == "nothing_resident", never
        assert not card.is_called(), "nobody waits yet"
        stream = Stream(site, "a")
        wait_for(card.is_called, "a magic packet", site.file)
        site.becomes("gpu-a", "waking")
        site.a.start()
        stream.ended()
        assert (stream.status, stream.error, stream.is_whole) == (200, "", True)
        assert site.ready_on("gpu-a") == ["a.gpu-a"]
    finally:
        print("\n".join(site.mux.output))
        site.end()
