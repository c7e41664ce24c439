"""Clusters that are not as they should be: what `check` and `serve` say of them, and that the rest is used.

One cluster has a host that is well, one without Docker, two machines of one name, and one with an anvil-mux
of another version. The file names one more that is not there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

import anvil_mux
from anvil_mux.cluster import ray_link
from tests.cluster import rig
from tests.cluster.site import PORT, Site
from tests.cluster.test_real_hosts import IMAGE, service

NO_IMAGE = "anvil-mux-test/nowhere"
NO_DOCKER = "unix:///nonexistent/docker.sock"
NEWER = "99.0.0"
PATIENCE = 60.0
OURS = anvil_mux.__version__

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(rig.why_not()), reason=rig.why_not())]


def content(folder):
    gpus = {"gpus": {"0": {"vram": "8GiB"}, "1": {"vram": "8GiB"}}}
    return {
        "name": "bad-input",
        "x-anvil": {
            "listen": f"127.0.0.1:{PORT}",
            "policy": "eager",
            "on_exit": "stop",
            "drain_timeout": "2s",
            "machines": dict.fromkeys(("gpu-a", "gpu-b", "twin", "newer", "nowhere"), gpus),
        },
        "services": {
            "well": service(folder, "well", hosts=["gpu-b"], gpus=["0"]),
            "imageless": service(folder, "imageless", image=NO_IMAGE, hosts=["gpu-b"], gpus=["1"]),
            "dockerless": service(folder, "dockerless", hosts=["gpu-a"], gpus=["0"]),
            "either": service(folder, "either", hosts=["gpu-a", "gpu-b"], gpus=["1"]),
            "twin": service(folder, "twin", hosts=["twin"], gpus=["0"]),
            "newer": service(folder, "newer", hosts=["newer"], gpus=["0"]),
            "nowhere": service(folder, "nowhere", hosts=["nowhere"], gpus=["0"]),
        },
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"no Docker Engine here has the image {IMAGE}")
    models = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("well", "either"), 1):
        made = [str(rig.ROOT / "tests" / "real" / "tiny_model.py"), str(seed), str(models / f"{name}.gguf")]
        subprocess.run([sys.executable, *made], check=True)
    with rig.Cluster() as cluster:
        cluster.add("head")
        cluster.add("gpu-a", environ={"DOCKER_HOST": NO_DOCKER})
        cluster.add("gpu-b", docker=True)
        made = Site(cluster, tmp_path_factory.mktemp("site"), content(models))
        for name in ("first", "second"):
            cluster.add(name, label="anvil-host=twin")
        cluster.add("newer")
        cluster.wait()
        made.b.bring_image(IMAGE)
        done = made.head.run([sys.executable, "-c", MAKE_NEWER_AGENT])
        assert done.returncode == 0, done.stdout
        yield made


MAKE_NEWER_AGENT = f"""
import ray
ray.init("auto", namespace="anvil-mux", log_to_driver=False)
class Newer:
    def hello(self):
        return b'{{"version": "{NEWER}"}}'
options = dict(name="anvil-host-newer", lifetime="detached", num_cpus=0, memory=1)
newer = ray.remote(Newer).options(**options, label_selector={{"anvil-host": "newer"}}).remote()
assert b"{NEWER}" in ray.get(newer.hello.remote())
"""


@pytest.fixture(scope="module")
def checked(site):
    """What `check` says."""
    done = site.head.run(
        [sys.executable, "-m", "anvil_mux", "check", str(site.file), "--cluster", site.cluster.address]
    )
    assert done.returncode == 0, done.stdout
    print(done.stdout)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def served(site):
    """The running anvil-mux."""
    site.mux = site.begin()
    yield site
    print("\n".join(site.mux.output))
    site.end()


def warnings(lines, host):
    """What is said of a host, which is said once."""
    before = f"anvil-mux: warning: host {host}: "
    return [line.removeprefix(before) for line in lines if line.startswith(before)]


def refusal(site, model):
    """How a request for a model is refused."""
    status, _, answer = site.complete(model)
    return status, answer["error"]["code"], answer["error"]["message"]


# A host that cannot be used


TWINS = (
    "2 machines are called twin (127.0.0.5, 127.0.0.6): give each a name of its own"
    " (`ray start --labels=anvil-host=NAME`)"
)
OTHER = f"newer has anvil-mux {NEWER}, and this machine {OURS}: install the same version on both"


@pytest.mark.parametrize(("host", "why"), [("twin", TWINS), ("newer", OTHER)])
def test_a_host_that_cannot_be_used_is_named_with_what_to_do(checked, served, host, why):
    assert warnings(checked, host) == [why]
    assert [line.split()[:2] for line in checked if line.startswith(host)][:1] == [[host, "unusable"]]
    served.mux.tells(re.escape(f"host {host} cannot be used: {why}"))
    hosts = {each["host"]: each for each in served.ask("GET", "/hosts")[2]["hosts"]}
    assert hosts[host] == {**hosts[host], "state": "unusable", "why": why}
    assert refusal(served, host)[:2] == (503, "host_unavailable")


def test_a_host_that_is_not_in_the_cluster_is_a_warning_and_its_models_name_it(checked, served):
    said = "services.nowhere.x-anvil.hosts: not in the cluster: nowhere; nowhere wait for that"
    assert [line for line in checked if said in line]
    assert [line for line in served.mux.output if said in line]
    status, code, message = refusal(served, "nowhere")
    assert (status, code) == (503, "host_unavailable")
    assert "nowhere" in message


def test_models_of_a_host_without_docker_fail_with_the_reason(checked, served):
    [said] = warnings(checked, "gpu-a")
    assert said.startswith(f"Cannot connect to the Docker daemon at {NO_DOCKER}")
    status, code, message = refusal(served, "dockerless")
    assert (status, code) == (503, "load_failed")
    assert f"Cannot connect to the Docker daemon at {NO_DOCKER}" in message


def test_a_model_of_which_the_image_is_missing_says_which_and_where(checked, served):
    assert warnings(checked, "gpu-b") == [
        f"service imageless.gpu-b: image {NO_IMAGE} is not present: docker pull {NO_IMAGE}"
    ]
    status, code, message = refusal(served, "imageless")
    assert (status, code) == (503, "load_failed")
    assert f"image {NO_IMAGE} is not present: docker pull {NO_IMAGE}" in message


def test_what_is_well_is_served_beside_all_that(served):
    assert served.complete("well")[0] == 200
    assert served.answers("either"), "the other host has it"
    assert "either.gpu-b" in served.ready_on("gpu-b")
    for host in ("gpu-a", "gpu-b"):
        served.becomes(host, "here")


# A cluster that cannot be used


def not_served(site, *words, **environ):
    """What `serve` says that does not come to serving."""
    argv = [sys.executable, "-m", "anvil_mux", "serve", str(site.file), "--port", "0", *words]
    env = {name: text for name, text in {**site.head.environ(), **environ}.items() if text is not None}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begun = time.monotonic()
    with site.head.popen(argv, env=env, text=True, **pipes) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    print(f"{time.monotonic() - begun:.1f} s: {said}")
    assert process.returncode == 1
    [sentence] = said.splitlines()
    return sentence


def test_a_wrong_token_is_one_sentence(site, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    said = not_served(site, "--cluster", site.cluster.address, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    assert said == (
        f"anvil-mux: error: the cluster at {site.cluster.address} cannot be used: the cluster at"
        f" {site.cluster.address} refuses the token of this machine: copy ~/.ray/auth_token from the head,"
        " or name its file in RAY_AUTH_TOKEN_PATH"
    )


def test_no_token_at_all_is_one_sentence(site, tmp_path):
    said = not_served(site, "--cluster", site.cluster.address, RAY_AUTH_TOKEN_PATH=None, HOME=str(tmp_path))
    assert "this machine has no token for the cluster: copy ~/.ray/auth_token from the head" in said


def test_an_address_where_nothing_listens_is_one_sentence(site):
    said = not_served(site, "--cluster", "127.0.0.2:6390")
    assert "nothing answers at 127.0.0.2:6390 (Connection refused): is that the head, does Ray run" in said


def test_what_is_no_address_is_one_sentence(site):
    said = not_served(site, "--cluster", "gpu-a")
    assert "`gpu-a` is no address of a cluster: HOST:PORT, as in 10.0.0.1:6379" in said


def test_the_head_is_looked_for_less_than_five_seconds():
    assert ray_link.REACH_SECONDS < 5.0


def test_a_cluster_without_a_token_is_refused_and_accepted_where_that_is_allowed(tmp_path):
    file = tmp_path / "compose.yaml"
    file.write_text("services: {m: {image: m, ports: ['8080'], x-anvil: {engine: vllm, hosts: any}}}\n")
    with rig.Cluster() as cluster:
        head = cluster.add("head", label="anvil-host=solo", environ={"RAY_AUTH_MODE": "disabled"})
        head.wait()
        check = [sys.executable, "-m", "anvil_mux", "check", str(file), "--cluster", cluster.address]
        refused = head.run(check)
        allowed = head.run([*check, "--insecure-cluster"])
    assert refused.returncode == 1
    assert f"the cluster at {cluster.address} is open, so whoever reaches it can run programs there" in (
        refused.stdout
    )
    assert allowed.returncode == 0, allowed.stdout
    assert "m.solo" in allowed.stdout
