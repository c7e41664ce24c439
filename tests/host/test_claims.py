"""Claims to the containers of a project and to GPUs, which every anvil-mux on a machine sees."""

import dataclasses
import os
import subprocess
import sys

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError
from anvil_mux.host.claims import Claims, GpuClaim, StartClaims, claimed_gpus, shared_gpus
from anvil_mux.host.seam import HostConfig, NotBegun

A = Backend("a", "a", gpus=("0",))
B = Backend("b", "b", gpus=("1", "2"))


def config(*backends, project="p", runtime="compose"):
    return HostConfig.of(Config(backends or (A,), project=project, runtime=runtime))


@pytest.fixture
def make_claims(tmp_path):
    """Make claims of an anvil-mux whose user has a home of its own; all are given up with the test."""
    made = []

    def make(home="home", **environ):
        variables = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/docker.sock", "HOME": home, **environ}
        made.append(Claims(variables))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_project_of_containers_has_one_anvil_mux_of_whatever_home(make_claims):
    first = make_claims("/home/alice")
    first.take_project(config())
    with pytest.raises(
        BackendError, match=rf"another anvil-mux \(process {os.getpid()}\) serves the project p"
    ):
        make_claims("/root").take_project(config())
    make_claims().take_project(config(project="q"))
    make_claims(DOCKER_HOST="unix:///elsewhere.sock").take_project(config())
    make_claims().take_project(config(runtime="process"))
    first.close()
    make_claims().take_project(config())


def test_a_project_of_processes_has_one_anvil_mux_though_its_state_folder_is_removed(make_claims, tmp_path):
    first = make_claims(XDG_STATE_HOME=str(tmp_path / "state"))
    first.take_project(config(runtime="process"))
    with pytest.raises(BackendError, match="serves the project p already, and two would"):
        make_claims(XDG_STATE_HOME=str(tmp_path / "state")).take_project(config(runtime="process"))
    make_claims(XDG_STATE_HOME=str(tmp_path / "other")).take_project(config(runtime="process"))
    first.close()
    make_claims(XDG_STATE_HOME=str(tmp_path / "state")).take_project(config(runtime="process"))


def test_an_engine_of_containers_is_known_by_its_id_whatever_its_address(make_claims, docker):
    docker.said = {"ID": "the engine"}
    link = docker.path.with_name("link")
    link.symlink_to(docker.path)
    make_claims(DOCKER_HOST=docker.host).take_project(config())
    with pytest.raises(BackendError, match="on the same container engine"):
        make_claims(DOCKER_HOST=f"unix://{link}").take_project(config())


def test_the_gpus_of_an_anvil_mux_follow_its_configuration(make_claims):
    claims = make_claims()
    claims.take_gpus(config(A, B))
    assert claimed_gpus(os.environ) == [GpuClaim(gpu, os.getpid(), "p") for gpu in "012"]
    claims.take_gpus(config(A))
    assert claimed_gpus(os.environ) == [GpuClaim("0", os.getpid(), "p")]
    assert claims.others(config(A)) == [], "its own"
    claims.close()
    assert claimed_gpus(os.environ) == []


CLAIMS = """
import sys
from anvil_mux.config.config import Backend, Config
from anvil_mux.host.claims import Claims
from anvil_mux.host.seam import HostConfig
import os
claims = Claims(os.environ)
claims.take_gpus(HostConfig.of(Config((Backend("x", "x", gpus=("0", "3")),), project="q")))
print("claimed", flush=True)
sys.stdin.read()
"""


def test_two_anvil_mux_with_one_gpu_are_reported(make_claims):
    claims = make_claims()
    claims.take_gpus(config(A, B))
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "claimed\n"
        who = f"process {other.pid}, project q"
        assert claims.others(config(A, B)) == [f"GPU 0 is used by another anvil-mux as well: {who}"]
        [line] = shared_gpus(os.environ)
        assert line.startswith("GPU 0 is used by 2 anvil-mux: ")
        assert who in line
        assert f"process {os.getpid()}, project p" in line
        other.stdin.close()
    assert shared_gpus(os.environ) == []


def test_long_names_are_claimed_too(make_claims):
    claims = make_claims()
    long = dataclasses.replace(A, gpus=("GPU-" + "a" * 36,))
    claims.take_gpus(config(long, project="p" * 80))
    [claim] = claimed_gpus(os.environ)
    assert claim.gpu == long.gpus[0]


def test_claims_tell_one_gpu_by_the_id_that_its_driver_has(make_claims):
    make_claims().take_gpus(config(dataclasses.replace(A, gpus=("GPU-5a6b",))))
    known = {"GPU-5a6b": "3"}
    assert claimed_gpus(os.environ, lambda names: known) == [GpuClaim("3", os.getpid(), "p")]


STARTS = """
import os, sys
from anvil_mux.host.claims import StartClaims
with StartClaims(os.environ).held(["0", "2"], lambda: 0.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_start_waits_until_another_program_has_started_its_engine():
    starts, asked = StartClaims(os.environ), []
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with starts.held(["1"], lambda: 0.0):
            pass
        with pytest.raises(NotBegun, match="is starting an engine on GPU 2"), starts.held("12", lambda: 0.0):
            pass

        def remaining():
            asked.append(None)
            other.stdin.close()
            return 60.0

        with starts.held("012", remaining):
            assert other.wait() == 0
    assert asked


def test_starts_of_one_program_share_a_claim_until_the_last_ends():
    starts, others = StartClaims(os.environ), StartClaims(os.environ)
    with starts.held("0", lambda: 0.0):
        with starts.held("0", lambda: 0.0):
            pass
        with pytest.raises(NotBegun), others.held("0", lambda: 0.0):
            pass
    with others.held("0", lambda: 0.0):
        pass
