"""What is made of Docker's description of a container."""

from dataclasses import replace

import pytest

from anvil_mux.config.service import Service
from anvil_mux.host.containers import base_url, differing_parts
from anvil_mux.host.docker_api import Container, read_container
from anvil_mux.host.project import how_it_ended

INSPECTED = {
    "Id": "0f95e31e3d91",
    "Name": "/p-a-1",
    "State": {
        "Status": "running",
        "Running": True,
        "OOMKilled": False,
        "ExitCode": 0,
        "Error": "",
        "StartedAt": "2026-11-21T13:38:31.55644524Z",
        "FinishedAt": "0001-01-01T00:00:00Z",
    },
    "HostConfig": {
        "NetworkMode": "p_default",
        "PortBindings": {
            "8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "81"}],
            "1/udp": [{"HostPort": ""}],
        },
        "DeviceRequests": [{"Driver": "nvidia"}],
    },
    "Config": {
        "Tty": True,
        "Image": "llama:1",
        "Entrypoint": ["/llama-server"],
        "Cmd": ["-m", "/models/a.gguf"],
        "Env": ["PATH=/bin", "A=1"],
        "Labels": {
            "com.docker.compose.config-hash": "58a4aa18",
            "com.docker.compose.container-number": "1",
            "com.docker.compose.image": "sha256:77af4d6b",
            "com.docker.compose.project": "p",
            "com.docker.compose.service": "a",
            "com.docker.compose.version": "2.26.1",
        },
    },
    "NetworkSettings": {
        "Ports": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "32775"}], "9090/tcp": None},
        "Networks": {"p_default": {"IPAddress": "172.21.0.2"}, "other": {"IPAddress": ""}},
    },
    "Mounts": [
        {"Type": "volume", "Name": "v", "Source": "/docker/volumes/v/_data", "Destination": "/models"},
        {"Type": "tmpfs", "Source": "", "Destination": "/tmp"},
    ],
}


def test_inspect_is_read():
    assert read_container(INSPECTED) == Container(
        id="0f95e31e3d91",
        service="a",
        number=1,
        status="running",
        started_at="2026-11-21T13:38:31.55644524Z",
        network_mode="p_default",
        ports=(("8080/tcp", "127.0.0.1", 32775),),
        ips=("172.21.0.2",),
        tty=True,
        wants_ports=(("127.0.0.1", 81),),
        wants_devices=True,
        mounts=(("/models", "/docker/volumes/v/_data"),),
        image="llama:1",
        image_id="sha256:77af4d6b",
        command=("/llama-server", "-m", "/models/a.gguf"),
        environment=frozenset({"PATH=/bin", "A=1"}),
        hash="58a4aa18",
        compose="2.26.1",
    )


@pytest.mark.parametrize(
    "uses",
    [
        {"NetworkMode": "container:0f95"},
        {"IpcMode": "container:0f95"},
        {"PidMode": "container:0f95"},
        {"VolumesFrom": ["0f95:rw"]},
    ],
)
def test_a_hash_with_the_id_of_another_container_in_it_is_not_compared(uses):
    assert read_container({**INSPECTED, "HostConfig": uses}).hash == ""


@pytest.mark.parametrize(
    ("service", "parts"),
    [
        (Service(), []),
        (Service(image="llama:1", command=("-m", "/models/a.gguf"), environment=(("A", "1"),)), []),
        (Service(command=("/llama-server", "-m", "/models/a.gguf")), []),
        (Service(image="llama:2"), ["image"]),
        (Service(command=("-m", "/models/b.gguf")), ["command"]),
        (Service(environment=(("A", "2"),)), ["environment"]),
        (Service(mounts=(("/models", "/volumes/v/_data"), ("/cache", ""))), []),
        (Service(mounts=(("/models", "/elsewhere"),)), ["mounts"]),
        (Service(mounts=(("/cache", "/models"),)), ["mounts"]),
        (
            Service(image="a:1", command=("b",), environment=(("B", "1"),)),
            ["image", "command", "environment"],
        ),
    ],
)
def test_the_parts_of_a_description_that_a_container_was_not_made_by(service, parts):
    assert differing_parts(read_container(INSPECTED), service) == parts


def test_a_container_that_was_never_started_is_read():
    bare = {"Id": "c1", "State": {"Status": "created"}, "Config": {"Labels": None}}
    assert read_container(bare) == Container(id="c1", service="", number=1, status="created", started_at="")


RUNNING = Container(id="c1", service="a", number=1, status="running", started_at="T1")


@pytest.mark.parametrize(
    ("special", "here", "from_elsewhere"),
    [
        ({"ports": (("8080/tcp", "127.0.0.1", 32775),)}, "http://127.0.0.1:32775", "http://127.0.0.1:32775"),
        ({"ports": (("8080/tcp", "10.0.0.2", 81),)}, "http://10.0.0.2:81", "http://10.0.0.2:81"),
        (
            {"ports": (("8080/tcp", "0.0.0.0", 81), ("8080/tcp", "::", 81))},
            "http://127.0.0.1:81",
            "http://10.0.0.2:81",
        ),
        ({"ports": (("8080/tcp", "::", 81),)}, "http://[::1]:81", "http://10.0.0.2:81"),
        (
            {"ports": (("8080/udp", "127.0.0.1", 81),), "ips": ("172.21.0.2",)},
            "http://172.21.0.2:8080",
            None,
        ),
        ({"ips": ("172.21.0.2",)}, "http://172.21.0.2:8080", None),
        ({"network_mode": "host"}, "http://127.0.0.1:8080", "http://10.0.0.2:8080"),
        ({}, None, None),
    ],
)
def test_where_an_engine_is_reached(special, here, from_elsewhere):
    assert base_url(replace(RUNNING, **special), 8080) == here
    assert base_url(replace(RUNNING, **special), 8080, "10.0.0.2") == from_elsewhere


def test_an_address_of_ipv6_stands_in_brackets():
    assert base_url(replace(RUNNING, network_mode="host"), 8080, "fd00::2") == "http://[fd00::2]:8080"


@pytest.mark.parametrize(
    ("told", "moment"),
    [
        ("1970-01-01T00:01:00.25544524Z", 60.25544524),
        ("1970-01-01T01:01:00.5+01:00", 60.5),
        ("1970-01-01T00:01:00Z", 60.0),
        ("0001-01-01T00:00:00Z", -62135596800.0),
        ("", 0.0),
    ],
)
def test_when_it_started(told, moment):
    assert replace(RUNNING, started_at=told).started == pytest.approx(moment)


@pytest.mark.parametrize(
    ("special", "how"),
    [
        ({}, None),
        ({"status": "paused"}, None),
        ({"status": "exited", "exit_code": 1}, "exited with code 1"),
        ({"status": "exited", "exit_code": 137}, "was killed (code 137)"),
        (
            {"status": "exited", "exit_code": 137, "oom_killed": True},
            "was killed because the machine or its memory limit ran out of memory (OOM)",
        ),
        ({"status": "exited", "exit_code": 139}, "exited with code 139 (SIGSEGV)"),
        ({"status": "exited", "exit_code": 255}, "exited with code 255"),
        ({"status": "created"}, "has not been started"),
        ({"status": "created", "error": "no device"}, "has not been started (no device)"),
        ({"status": "restarting", "exit_code": 2}, "exited with code 2, and Docker is restarting it"),
    ],
)
def test_how_a_container_ended(special, how):
    assert how_it_ended(replace(RUNNING, **special)) == how
