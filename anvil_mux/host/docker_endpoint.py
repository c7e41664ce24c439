"""The address of the container engine, and a connection to it.

The address is found as the docker program finds it. ``DOCKER_HOST`` decides, then ``DOCKER_CONTEXT``,
then the context that is in use, then Docker's own socket. Where none of these says anything and Docker's
socket is not there, ``CONTAINER_HOST`` and Podman's sockets are looked at. An engine on another machine is
reached by tcp://, with TLS where ``DOCKER_TLS_VERIFY`` or the context says so, or by ssh://, where
``docker system dial-stdio`` hands our bytes on to the socket there.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from anvil_mux.command import without_keys
from anvil_mux.errors import BackendError

DOCKER_SOCKET = "/var/run/docker.sock"
PODMAN_SOCKET = "/run/podman/podman.sock"
START_IT = "Start dockerd, or set DOCKER_HOST; `docker info` tells whether it answers"


class Unreachable(BackendError):
    """The engine does not answer where it should, or not in time."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How an engine and we prove who we are."""

    folder: str
    """The folder of ca.pem, cert.pem and key.pem, or some of them."""
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        ca, cert, key = (Path(self.folder, f"{name}.pem") for name in ("ca", "cert", "key"))
        context = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert.exists() and key.exists():
            context.load_cert_chain(cert, key)
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an engine."""

    address: str
    """A URL: unix:///var/run/docker.sock, tcp://host:2376 or ssh://user@host."""
    tls: Tls | None = None
    found_by_us: bool = False
    """Whether the docker program would look elsewhere, and has to be told."""
    problem: str = ""
    """Why there is no address."""

    @property
    def path(self) -> str | None:
        """The path of the socket, if the engine is on this machine."""
        return self.address.removeprefix("unix://") if self.address.startswith("unix://") else None


def find_endpoint(env: Mapping[str, str]) -> Endpoint:
    """Find the engine that the docker program talks to in this environment, or Podman where there is none."""
    if host := env.get("DOCKER_HOST"):
        verify, asked = bool(env.get("DOCKER_TLS_VERIFY")), bool(env.get("DOCKER_TLS"))
        tls = Tls(env.get("DOCKER_CERT_PATH") or str(_config_folder(env)), verify)
        return Endpoint(host, tls if verify or asked else None)
    name = env.get("DOCKER_CONTEXT") or _context_in_use(env)
    if name and name != "default":
        return _of_context(name, _config_folder(env) / "contexts")
    if os.path.exists(DOCKER_SOCKET):
        return Endpoint(f"unix://{DOCKER_SOCKET}")
    if host := env.get("CONTAINER_HOST"):
        return Endpoint(host, found_by_us=True)
    for path in (
        f"{env.get('XDG_RUNTIME_DIR') or f'/run/user/{os.getuid()}'}/podman/podman.sock",
        PODMAN_SOCKET,
    ):
        if os.path.exists(path):
            return Endpoint(f"unix://{path}", found_by_us=True)
    return Endpoint(f"unix://{DOCKER_SOCKET}")


def _config_folder(env: Mapping[str, str]) -> Path:
    home = env.get("HOME") or os.path.expanduser("~")
    return Path(env.get("DOCKER_CONFIG") or os.path.join(home, ".docker"))


def _context_in_use(env: Mapping[str, str]) -> str:
    return str(_read_json(_config_folder(env) / "config.json").get("currentContext") or "")


def _of_context(name: str, contexts: Path) -> Endpoint:
    folder = sha256(name.encode()).hexdigest()
    endpoint = _read_json(contexts / "meta" / folder / "meta.json").get("Endpoints", {}).get("docker", {})
    if not endpoint.get("Host"):
        lacks = f"there is no docker context {name}: `docker context ls` lists those there are"
        return Endpoint("", problem=lacks)
    secrets = contexts / "tls" / folder / "docker"
    tls = Tls(str(secrets), not endpoint.get("SkipTLSVerify")) if secrets.is_dir() else None
    return Endpoint(endpoint["Host"], tls)


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


class Connection(http.client.HTTPConnection):
    """One connection to an engine; any thread may end it."""

    def __init__(self, endpoint: Endpoint, timeout: float | None) -> None:
        super().__init__("docker", timeout=timeout)
        self._endpoint = endpoint
        self._wire: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        if self._endpoint.problem:
            raise Unreachable(self._endpoint.problem)
        try:
            self.sock = self._connected()
        except PermissionError as error:
            raise self._unreachable(error, "Add this user to the group docker, or set DOCKER_HOST") from None
        except ssl.SSLError as error:
            raise self._unreachable(error, "DOCKER_CERT_PATH names the folder of its certificates") from None
        except (OSError, ValueError) as error:
            raise self._unreachable(error, START_IT) from None

    def wait_for_ever(self) -> None:
        """Lift the time limit from what is read from now on."""
        if self._wire:
            self._wire.settimeout(None)

    def interrupt(self) -> None:
        """End what another thread reads."""
        if self._wire:
            with suppress(OSError):
                socket.socket.shutdown(self._wire, socket.SHUT_RDWR)

    def end(self) -> None:
        self.interrupt()
        self.close()
        if self._wire:
            self._wire.close()
        if self._child:
            self._child.kill()
            self._child.communicate()

    def complaint(self) -> str:
        """Return what ssh printed last, once the connection is closed from its side."""
        if not self._child:
            return ""
        self.interrupt()
        with suppress(subprocess.TimeoutExpired):
            _, printed = self._child.communicate(timeout=1.0)
            return printed.decode(errors="replace").strip().rpartition("\n")[2]
        return ""

    def _connected(self) -> socket.socket:
        url = urlsplit(self._endpoint.address)
        match url.scheme:
            case "unix":
                wire = self._wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                wire.settimeout(self.timeout)
                wire.connect(self._endpoint.path or "")
                return wire
            case "tcp":
                tls = self._endpoint.tls
                place = (url.hostname or "127.0.0.1", url.port or (2376 if tls else 2375))
                self._wire = socket.create_connection(place, self.timeout)
                self._wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if tls:
                    self._wire = tls.context().wrap_socket(self._wire, server_hostname=url.hostname)
                return self._wire
            case "ssh":
                return self._by_ssh()
        raise ValueError("an address begins with unix://, tcp:// or ssh://")

    def _by_ssh(self) -> socket.socket:
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(self.timeout)
        argv, own = ssh_command(self._endpoint.address), theirs.fileno()
        with theirs:
            self._child = subprocess.Popen(
                argv,
                stdin=own,
                stdout=own,
                stderr=subprocess.PIPE,
                env=without_keys(os.environ),
                start_new_session=True,
            )
        return self._wire

    def _unreachable(self, error: Exception, advice: str) -> Unreachable:
        why = (isinstance(error, OSError) and error.strerror) or error
        return Unreachable(
            f"Cannot connect to the Docker daemon at {self._endpoint.address}: {why}. {advice}"
        )


def ssh_command(address: str) -> list[str]:
    """The command whose input and output are a connection to the engine on another machine."""
    url = urlsplit(address)
    argv = ["ssh", "-o", "ConnectTimeout=30", "-T"]
    argv += ["-l", url.username] if url.username else []
    argv += ["-p", str(url.port)] if url.port else []
    there = ["--host", f"unix://{url.path}"] if url.path.strip("/") else []
    return [*argv, "--", url.hostname or "", "docker", *there, "system", "dial-stdio"]
