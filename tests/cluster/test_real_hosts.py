"""Real llama-server containers on two hosts of a real cluster, each with a Docker Engine of its own."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import yaml

from tests.cluster import rig
from tests.cluster.site import PORT, Site, Stream
from tests.running import seen

IMAGE = "anvil-mux-test/llamacpp"
ONLY_ON_A = "anvil-mux-test/only-on-a"
MODELS = ("one", "two", "far", "roam", "picky", "later")
MORE = 500
"""So many tokens are more than are on their way at any moment."""
PATIENCE = 60.0

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(rig.why_not()), reason=rig.why_not())]


def service(folder, model, image=IMAGE, **settings):
    server = [
        "llama-server",
        "-m",
        f"/m/{model}.gguf",
        "--alias",
        model,
        "--host",
        "0.0.0.0",
        "--port",
        "8080",
    ]
    return {
        "image": image,
        "command": [*server, "-c", "1024", "-np", "2", "-t", "1", "--ignore-eos", "--context-shift"],
        "volumes": [f"{folder}:/m:ro"],
        "ports": ["127.0.0.1::8080"],
        "profiles": ["llm"],
        "init": True,
        "stop_grace_period": "2s",
        "x-anvil": settings,
    }


def content(folder, **more):
    """A compose file: two models on one GPU of a host, one on the other host, one that may be on either."""
    gpus = {"0": {"vram": "8GiB"}, "1": {"vram": "8GiB"}}
    return {
        "name": "real-hosts",
        "x-anvil": {
            "listen": f"127.0.0.1:{PORT}",
            "policy": "eager",
            "on_exit": "stop",
            "drain_timeout": "2s",
            "machines": {"gpu-a": {"gpus": gpus}, "gpu-b": {"gpus": gpus}},
        },
        "services": {
            "one": service(folder, "one", hosts=["gpu-a"], gpus=["0"]),
            "two": service(folder, "two", hosts=["gpu-a"], gpus=["0"]),
            "far": service(folder, "far", hosts=["gpu-b"], gpus=["0"]),
            "roam": service(folder, "roam", hosts=["gpu-a", "gpu-b"], gpu_count=1),
            **more,
        },
    }


class Endless(Stream):
    """An answer without an end, read until told otherwise."""

    def __init__(self, site, model):
        self._more = threading.Condition()
        self._is_left = False
        super().__init__(site, model, tokens=10_000_000)

    def _take(self, line):
        if self._is_left:
            raise ConnectionAbortedError("the client has left")
        super()._take(line)
        with self._more:
            self._more.notify()

    def goes_on(self):
        """Whether more tokens come."""
        so_far = len(self.tokens)
        with self._more:
            return self._more.wait_for(lambda: len(self.tokens) > so_far + MORE, PATIENCE)

    def leave(self):
        """Leave it; nothing was wrong with it until now."""
        assert not self.error
        self._is_left = True
        self.ended()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a tiny model of each name, which all hosts see."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(MODELS, 1):
        made = [str(rig.ROOT / "tests" / "real" / "tiny_model.py"), str(seed), str(folder / f"{name}.gguf")]
        subprocess.run([sys.executable, *made], check=True)
    return folder


@pytest.fixture(scope="module")
def cluster():
    """A head without Docker, and two hosts with an engine each; one image is on the first alone."""
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"no Docker Engine here has the image {IMAGE}")
    with rig.Cluster() as made:
        made.add("head")
        hosts = [made.add(name, docker=True) for name in ("gpu-a", "gpu-b")]
        made.wait()
        for host in hosts:
            host.bring_image(IMAGE)
        assert hosts[0].run(["docker", "tag", IMAGE, ONLY_ON_A]).returncode == 0
        yield made


@pytest.fixture(scope="module")
def kept(cluster, models, tmp_path_factory):
    """The anvil-mux of all tests."""
    made = Site(cluster, tmp_path_factory.mktemp("site"), content(models))
    yield made
    made.end()


@pytest.fixture
def site(kept, models):
    """An anvil-mux whose hosts are all here."""
    if kept.mux is None or kept.mux.process.poll() is not None:
        kept.mux = kept.begin()
    for host in (kept.a, kept.b):
        if not host.pids():
            host.start()
        kept.becomes(host.name, "here")
    yield kept
    asked = ("GET /hosts", "GET /healthz")
    print("\n".join(line for line in kept.mux.output if not any(each in line for each in asked)))


def anvil_mux(site, *words):
    """What a command prints on the machine where anvil-mux runs, on both streams."""
    done = site.head.run([sys.executable, "-m", "anvil_mux", *words])
    assert done.returncode == 0, done.stdout
    return done.stdout


def containers(host):
    """The services of which a container runs on a host."""
    form = '{{.Label "com.docker.compose.service"}}'
    return sorted(host.run(["docker", "ps", "--format", form]).stdout.split())


def run_of(host, service):
    """What differs between two runs of a service."""
    form = f"label=com.docker.compose.service={service}"
    [id] = host.run(["docker", "ps", "-q", "--filter", form]).stdout.split()
    return host.run(["docker", "inspect", "--format", "{{.Id}} {{.State.StartedAt}}", id]).stdout


def test_check_lists_the_hosts_and_the_image_that_one_of_them_lacks(cluster, models, tmp_path):
    picky = service(models, "picky", image=ONLY_ON_A, hosts=["gpu-a", "gpu-b"], gpu_count=1)
    site = Site(cluster, tmp_path, content(models, picky=picky))
    told = anvil_mux(site, "check", str(site.file), "--cluster", cluster.address)
    table = {line.split()[0]: line.split() for line in told.splitlines() if line.strip()}
    assert table["gpu-a"][1:3] == ["here", "127.0.0.3"]
    assert table["gpu-b"][1:3] == ["here", "127.0.0.4"]
    [lacking] = [line for line in told.splitlines() if "image" in line]
    service_there = "host gpu-b: service picky.gpu-b.1"
    assert lacking == (
        f"anvil-mux: warning: {service_there}: image {ONLY_ON_A} is not present: docker pull {ONLY_ON_A}"
    )


def test_each_host_serves_its_models_and_swaps_those_that_share_a_gpu(site):
    assert site.complete("one")[0] == 200
    assert site.complete("far")[0] == 200
    assert containers(site.a) == ["one.gpu-a"]
    assert containers(site.b) == ["far.gpu-b"]
    streams = [Endless(site, model).begun() for model in ("one", "far")]
    assert all(stream.goes_on() for stream in streams)
    for stream in streams:
        stream.leave()
    status, _, answer = site.complete("two")
    assert (status, answer["model"]) == (200, "two")
    assert containers(site.a) == ["two.gpu-a"]
    assert site.complete("far")[0] == 200


def test_gpus_of_both_hosts_are_used_before_anything_is_swapped(site):
    for model in ("one", "far", "roam"):
        assert site.complete(model)[0] == 200
    [roam] = [each for each in (*containers(site.a), *containers(site.b)) if each.startswith("roam")]
    assert roam in ("roam.gpu-a.1", "roam.gpu-b.1")
    assert {"one.gpu-a", "far.gpu-b", roam} == {*containers(site.a), *containers(site.b)}


def test_an_agent_that_is_killed_cuts_no_stream_and_finds_its_container(site):
    take_over(site, "one", site.a, "one.gpu-a", site.a.kill_agent)


def test_a_raylet_that_is_killed_cuts_no_stream_and_containers_are_taken_over(site):
    take_over(site, "far", site.b, "far.gpu-b", site.b.kill_raylet)
    site.b.wait()


def take_over(site, model, host, service, kill):
    """Kill what steers a host in mid-stream: the stream goes on, and another agent has the same container."""
    stream = Endless(site, model).begun()
    before, agents = run_of(host, service), host.pids("ray::HostActor")
    kill()
    assert stream.goes_on()
    assert seen(lambda: set(host.pids("ray::HostActor")) - set(agents), bool)
    site.becomes(host.name, "here")
    assert stream.goes_on()
    stream.leave()
    assert site.complete(model)[0] == 200
    assert run_of(host, service) == before


def test_a_power_cut_ends_the_streams_of_its_host_and_its_models_load_again(site):
    lost, other = Endless(site, "one").begun(), Endless(site, "far").begun()
    site.a.power_cut()
    lost.ended()
    assert not lost.is_whole
    assert lost.error, "never a clean end"
    site.becomes("gpu-a", "lost")
    assert site.complete("one")[2]["error"]["code"] == "host_unavailable"
    assert other.goes_on()
    site.a.start()
    site.a.wait()
    site.becomes("gpu-a", "here")
    assert other.goes_on()
    other.leave()
    assert site.answers("one")
    assert containers(site.a) == ["one.gpu-a"]


def test_logs_of_an_engine_on_another_host_are_shown(site):
    assert site.complete("far")[0] == 200
    for words in (["--url", f"http://127.0.0.1:{PORT}"], ["--file", str(site.file)]):
        assert "slot      release" in anvil_mux(site, "logs", "far", *words)


def test_a_reload_adds_a_model_on_a_host(site, models):
    before = site.file.read_text()
    assert site.complete("later")[0] == 404
    stream = Endless(site, "far").begun()
    more = content(models, later=service(models, "later", hosts=["gpu-b"], gpus=["1"]))
    site.file.write_text(yaml.safe_dump(more))
    told = anvil_mux(site, "reload", "--url", f"http://127.0.0.1:{PORT}")
    assert "later" in told
    status, _, answer = site.complete("later")
    assert (status, answer["model"]) == (200, "later")
    assert "later.gpu-b" in containers(site.b)
    site.file.write_text(before)
    anvil_mux(site, "reload", "--url", f"http://127.0.0.1:{PORT}")
    assert seen(lambda: containers(site.b), lambda now: "later.gpu-b" not in now)
    assert site.complete("later")[0] == 404
    assert stream.goes_on()
    stream.leave()


def test_on_exit_stop_leaves_no_container_on_any_host(site):
    for model in ("one", "far"):
        assert site.complete(model)[0] == 200
    assert site.mux.stop() == 0
    assert (containers(site.a), containers(site.b)) == ([], [])
