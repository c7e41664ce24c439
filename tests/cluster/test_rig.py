"""The rig of the cluster tests: it is shut off, ends with its maker, and has real containers on its hosts."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.rig import PORT, ROOT, Cluster, Host, ids_of, why_not

pytestmark = pytest.mark.cluster

GUARD = 30.0
IMAGE = "anvil-mux-test/llamacpp"


@pytest.fixture(autouse=True)
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


def test_a_cluster_is_reached_from_inside_alone():
    def connect() -> str:
        with socket.create_connection(("127.0.0.2", PORT), GUARD) as connection:
            return str(connection.getpeername()[0])

    with Cluster() as cluster:
        cluster.add("head").wait()
        assert cluster.inside(connect) == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            connect()


MAKE = """
from tests.cluster.rig import Cluster
cluster = Cluster()
host = cluster.add("a")
host.wait()
print(cluster.folder, *host.pids(), flush=True)
input()
"""


def test_a_cluster_ends_with_its_maker_however_that_ends(tmp_path: Path):
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout
    folder, *pids = maker.stdout.readline().split()
    assert len(pids) > 3
    handles = [os.pidfd_open(int(pid)) for pid in pids if ids_of(int(pid))]
    maker.kill()
    maker.communicate()
    for handle in handles:
        assert select.select([handle], [], [], GUARD)[0]
        os.close(handle)
    subprocess.run(["rm", "-r", folder], check=True)


COMPOSE = """
name: rig
services:
  one:
    image: {image}
    ports: ["{address}:18080:8080"]
    volumes: ["{models}:/m:ro"]
    init: true
    command: [llama-server, -m, /m/tiny.gguf, --alias, one, --host, 0.0.0.0, --port, "8080", -t, "1"]
"""


def test_containers_on_two_hosts_answer_at_their_addresses_and_end_with_their_host(tmp_path: Path):
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"no Docker Engine here has the image {IMAGE}")
    model = [str(ROOT / "tests" / "real" / "tiny_model.py"), "1", str(tmp_path / "tiny.gguf")]
    subprocess.run([sys.executable, *model], check=True)
    with Cluster() as cluster:
        head = cluster.add("head")
        hosts = [cluster.add(name, docker=True) for name in ("a", "b")]
        cluster.wait()
        for host in hosts:
            host.bring_image(IMAGE)
            file = host.folder / "compose.yaml"
            file.write_text(COMPOSE.format(image=IMAGE, address=host.address, models=tmp_path))
            up = host.run(["docker", "compose", "-f", str(file), "up", "-d"])
            assert up.returncode == 0, up.stdout
        for host in hosts:
            assert '"one"' in models_of(
                host, head, "--retry", "60", "--retry-all-errors", "--retry-delay", "1"
            )
            assert host.pids("llama-server")

        hosts[0].freeze()
        assert "timed out" in models_of(hosts[0], head, "--max-time", "1")
        hosts[0].thaw()
        assert '"one"' in models_of(hosts[0], head)

        hosts[0].power_cut()
        assert "Failed to connect" in models_of(hosts[0], head)
        assert '"one"' in models_of(hosts[1], head)

        hosts[0].start()
        hosts[0].wait()
        assert "Exited" in hosts[0].run(["docker", "ps", "-a", "--format", "{{.Status}}"]).stdout


def models_of(host: Host, asker: Host, *flags: str) -> str:
    """Return what a host's engine answers to another host, or what curl says."""
    return str(asker.run(["curl", "-sS", *flags, f"http://{host.address}:18080/v1/models"]).stdout)
