"""Where an engine is looked for, and how it is reached."""

import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from anvil_mux.host import docker_api
from anvil_mux.host.docker_api import (
    Connection,
    ContainerEngine,
    Endpoint,
    Tls,
    Unreachable,
    find_endpoint,
    ssh_command,
)
from tests.host.docker_stand_in import PATIENCE, Docker


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the sockets that this machine may have is looked at."""
    monkeypatch.setattr(docker_api, "DOCKER_SOCKET", str(tmp_path / "default.sock"))
    monkeypatch.setattr(docker_api, "PODMAN_SOCKET", str(tmp_path / "podman.sock"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".docker").mkdir()
    return tmp_path


def environ(home: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), **more}


def make_context(config: Path, name: str, *, tls: bool = False, **about: object) -> Path:
    folder = sha256(name.encode()).hexdigest()
    meta, secrets = config / "contexts" / "meta" / folder, config / "contexts" / "tls" / folder / "docker"
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": about}}))
    if tls:
        secrets.mkdir(parents=True)
    return secrets


def test_the_default_is_dockers_own_socket(home):
    assert find_endpoint(environ(home)) == Endpoint(f"unix://{docker_api.DOCKER_SOCKET}")


def test_docker_host_is_asked_first(home):
    env = environ(home, DOCKER_HOST="tcp://gpu:2375", DOCKER_CONTEXT="other", CONTAINER_HOST="unix:///p")
    assert find_endpoint(env) == Endpoint("tcp://gpu:2375")


@pytest.mark.parametrize(
    ("asked", "tls"),
    [
        ({"DOCKER_TLS_VERIFY": "1"}, Tls("HOME/.docker")),
        ({"DOCKER_TLS": "1", "DOCKER_CERT_PATH": "/certs"}, Tls("/certs", verify=False)),
        ({"DOCKER_TLS_VERIFY": "1", "DOCKER_CONFIG": "/config"}, Tls("/config")),
        ({"DOCKER_CERT_PATH": "/certs"}, None),
    ],
)
def test_tls_is_as_the_environment_says(home, asked, tls):
    found = find_endpoint(environ(home, DOCKER_HOST="tcp://gpu:2376", **asked)).tls
    assert found == (tls and Tls(tls.folder.replace("HOME", str(home)), tls.verify))


def test_the_context_that_is_in_use_is_followed(home):
    make_context(home / ".docker", "rootless", Host="unix:///run/user/1/docker.sock")
    make_context(home / ".docker", "other", Host="ssh://me@gpu")
    (home / ".docker" / "config.json").write_text('{"currentContext": "rootless"}')
    assert find_endpoint(environ(home)) == Endpoint("unix:///run/user/1/docker.sock")
    assert find_endpoint(environ(home, DOCKER_CONTEXT="other")) == Endpoint("ssh://me@gpu")
    default = Endpoint(f"unix://{docker_api.DOCKER_SOCKET}")
    assert find_endpoint(environ(home, DOCKER_CONTEXT="default")) == default


def test_a_context_brings_its_certificates(tmp_path):
    secrets = make_context(tmp_path, "safe", tls=True, Host="tcp://gpu:2376")
    blind = make_context(tmp_path, "blind", tls=True, Host="tcp://gpu:2376", SkipTLSVerify=True)
    env = {"DOCKER_CONFIG": str(tmp_path)}
    assert find_endpoint({**env, "DOCKER_CONTEXT": "safe"}).tls == Tls(str(secrets))
    assert find_endpoint({**env, "DOCKER_CONTEXT": "blind"}).tls == Tls(str(blind), verify=False)


def test_a_context_that_is_not_there_is_named_when_the_engine_is_asked(home):
    with pytest.raises(Unreachable, match="there is no docker context typo: `docker context ls` lists"):
        ContainerEngine(find_endpoint(environ(home, DOCKER_CONTEXT="typo"))).ping()


def test_podman_is_found_where_docker_is_not(home):
    system, rootless = home / "podman.sock", home / "run" / "podman" / "podman.sock"
    system.touch()
    assert find_endpoint(environ(home)) == Endpoint(f"unix://{system}", found_by_us=True)
    rootless.parent.mkdir(parents=True)
    rootless.touch()
    assert find_endpoint(environ(home)) == Endpoint(f"unix://{rootless}", found_by_us=True)
    named = environ(home, CONTAINER_HOST="unix:///elsewhere")
    assert find_endpoint(named) == Endpoint("unix:///elsewhere", found_by_us=True)
    Path(docker_api.DOCKER_SOCKET).touch()
    assert find_endpoint(named) == Endpoint(f"unix://{docker_api.DOCKER_SOCKET}")


# Reaching it


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("npipe:////./pipe/docker", "an address begins with unix://, tcp:// or ssh://"),
        ("tcp://127.0.0.1:1", "Connection refused"),
        ("tcp://127.0.0.1:one", "Port could not be cast"),
    ],
)
def test_what_cannot_be_reached_says_why_and_what_to_do(address, why):
    with pytest.raises(
        Unreachable, match=f"Cannot connect to the Docker daemon at {address}: {why}.*or set DOCKER_HOST"
    ):
        ContainerEngine(Endpoint(address)).ping()


def test_a_socket_that_others_own_names_the_group(docker, monkeypatch):
    def refuse(_: Connection) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Connection, "_connected", refuse)
    with pytest.raises(Unreachable, match=r"Permission denied\. Add this user to the group docker"):
        ContainerEngine(Endpoint(docker.host)).ping()


@contextmanager
def relayed(docker: Docker, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A TCP port whose connections reach the stand-in."""

    def serve(client: socket.socket) -> None:
        try:
            client = context.wrap_socket(client, server_side=True) if context else client
        except OSError:
            return
        with client, socket.socket(socket.AF_UNIX) as engine:
            engine.connect(str(docker.path))
            engine.sendall(client.recv(65536))
            while piece := engine.recv(65536):
                client.sendall(piece)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            serve(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_an_engine_is_reached_by_tcp(docker):
    docker.add("c1")
    with relayed(docker) as port:
        assert ContainerEngine(Endpoint(f"tcp://127.0.0.1:{port}")).containers("p") == [("c1", "a")]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, cert.pem and key.pem, all of one certificate that signs itself."""
    folder = tmp_path_factory.mktemp("certificates")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "ca.pem").write_bytes((folder / "cert.pem").read_bytes())
    return folder


def test_an_engine_behind_tls_is_reached_with_the_certificates_of_both(docker, certificates):
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    server.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    docker.add("c1")
    with relayed(docker, server) as port:
        address = f"tcp://127.0.0.1:{port}"
        for tls in (Tls(str(certificates)), Tls(str(certificates), verify=False)):
            assert ContainerEngine(Endpoint(address, tls)).containers("p") == [("c1", "a")]


def test_an_engine_that_is_another_behind_tls_is_not_asked(docker, certificates, tmp_path):
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    refused = pytest.raises(Unreachable, match=r"(?i)certificate.*DOCKER_CERT_PATH names the folder")
    with relayed(docker, server) as port, refused:
        ContainerEngine(Endpoint(f"tcp://127.0.0.1:{port}", Tls(str(tmp_path)))).ping()
    assert docker.commands == []


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("ssh://gpu", ["--", "gpu", "docker", "system", "dial-stdio"]),
        (
            "ssh://me@gpu:22022",
            ["-l", "me", "-p", "22022", "--", "gpu", "docker", "system", "dial-stdio"],
        ),
        (
            "ssh://gpu/run/d.sock",
            ["--", "gpu", "docker", "--host", "unix:///run/d.sock", "system", "dial-stdio"],
        ),
    ],
)
def test_the_command_that_reaches_an_engine_by_ssh(address, command):
    assert ssh_command(address) == ["ssh", "-o", "ConnectTimeout=30", "-T", *command]


RELAY = """#!/usr/bin/env python3
import os, socket, sys, threading
engine = socket.socket(socket.AF_UNIX)
engine.connect(os.environ["STAND_IN"])
def there():
    while piece := os.read(0, 65536):
        engine.sendall(piece)
threading.Thread(target=there, daemon=True).start()
while piece := engine.recv(65536):
    os.write(1, piece)
"""


def ssh_program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ssh").write_text(text)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_engine_is_reached_by_ssh(docker, tmp_path, monkeypatch):
    ssh_program(tmp_path, RELAY, monkeypatch)
    monkeypatch.setenv("STAND_IN", str(docker.path))
    docker.add("c1")
    engine = ContainerEngine(Endpoint("ssh://gpu"))
    assert engine.containers("p") == [("c1", "a")]
    with engine.events(0.0) as events:
        into = docker.next_events()
        into.tell("c1", code=1)
        lines = iter(events)
        assert "c1" in next(lines)
        events.interrupt()
        assert list(lines) == []
    into.close()


def test_what_ssh_says_is_told(docker, tmp_path, monkeypatch):
    ssh_program(
        tmp_path, "#!/bin/sh\necho hello >&2; echo gpu: Host key verification failed. >&2", monkeypatch
    )
    with pytest.raises(Unreachable, match="did not answer GET /_ping: gpu: Host key verification failed"):
        ContainerEngine(Endpoint("ssh://gpu")).ping()


def test_a_machine_without_ssh_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable, match="Cannot connect to the Docker daemon at ssh://gpu: No such file"):
        ContainerEngine(Endpoint("ssh://gpu")).ping()
