"""A stand-in for the Docker Engine and for Compose: containers, and every question in its order.

The engine answers over HTTP at a socket, as Docker does; Compose is the ``run`` of a runtime.
"""

from __future__ import annotations

import io
import json
import queue
import re
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from anvil_mux.command import Done
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service

PATIENCE = 30.0
AWAY = (0, "")
"""The connection is closed without an answer."""
Answer = tuple[int, Any]

A = Backend(name="a", model="a", engine="llamacpp", stop_timeout=3.5, service=Service(image="llama:1"))
B = replace(A, name="b", model="b")


def replica(number: int) -> Backend:
    return replace(A, name=f"s-{number}", service=Service(name="s", number=number, scale=3))


REPLICAS = (replica(1), replica(2), replica(3))
CONFIG = Config(backends=(A, B, *REPLICAS), project="p", files=("/s/compose.yaml", "/s/more.yaml"))
URL = "http://127.0.0.1:40001"


@dataclass
class Docker:
    """Containers by id, and every request and command that was given."""

    path: Path
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    fails: dict[str, list[Answer]] = field(default_factory=dict)
    """Verb -> status and message of its next answers."""
    refuses_create: list[str] = field(default_factory=list)
    """What Compose says instead of making containers."""
    refuses_up: str = ""
    """What Compose says instead of starting a service that another one depends on."""
    on_up: Callable[[str], object] = lambda service: None
    """What becomes of a service that Compose starts."""
    fails_late: bool = False
    """Whether containers are there when Compose says that, without what it puts into them."""
    ignores: set[str] = field(default_factory=set)
    """Verbs that report success and do nothing."""
    images: set[str] = field(default_factory=lambda: {"llama:1"})
    listed_images: Sequence[str] = ()
    """What `docker compose config --images` says."""
    volumes: Sequence[str] = ()
    runtimes: Sequence[str] = ("runc",)
    has_compose: bool = True
    version: str = "1.41"
    podman: bool = False
    said: Mapping[str, object] = field(default_factory=dict)
    """More of what it says of itself."""
    scale: int = 1
    hash: str = ""
    """Compose's hash of each service; "": it cannot say."""
    compose: str = "2.40.3"
    """The release of Compose."""
    on_ping: Callable[[], object] = lambda: None
    """What is done before /_ping is answered."""
    changed: bool = False
    """The description of the services, since their containers were made."""
    logs: Sequence[tuple[int, str]] = ()
    """(1: standard output, 2: standard error; what was printed at once)"""
    since: float = 0.0
    asked: dict[str, str] = field(default_factory=dict)
    """The query of the last request."""
    body: bytes = b""
    """Its body."""
    extracted: list[tuple[str, str, bytes, int, int, int]] = field(default_factory=list)
    """Files that were put into containers: (container, path, content, mode, uid, gid)."""
    kills: Sequence[tuple[str, str, float]] = ()
    """(container, signal, Unix time)"""
    moment: int = 0
    events: queue.Queue[queue.Queue[str]] = field(default_factory=queue.Queue)
    """A queue of lines for each time that events were asked for; "" ends it."""

    # What tests do

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    def add(
        self, id: str, service: str = "a", status: str = "running", number: str = "1", **more: Any
    ) -> str:
        self.moment += 1
        self.containers[id] = {
            "Id": id,
            "State": {"Status": status, "StartedAt": self.now(), "ExitCode": 0, **more},
            "HostConfig": {"NetworkMode": "p_default"},
            "Config": {
                "Labels": {
                    "com.docker.compose.service": service,
                    "com.docker.compose.container-number": number,
                }
            },
            "NetworkSettings": {"Ports": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "40001"}]}},
        }
        return id

    def now(self) -> str:
        return f"2026-11-21T13:00:{self.moment:02}.55644524Z"

    def state(self, id: str) -> dict[str, Any]:
        return self.containers[id]["State"]  # type: ignore[no-any-return]

    def end(self, id: str, code: int = 137) -> None:
        self.state(id).update(Status="exited", ExitCode=code)

    def number(self, id: str) -> int:
        return int(self.containers[id]["Config"]["Labels"]["com.docker.compose.container-number"])

    def service(self, id: str) -> str:
        return _service(self.containers[id])

    def verbs(self) -> list[str]:
        """What was asked since the last call."""
        seen, self.commands = self.commands, []
        return seen

    # Compose

    def run(self, argv: Sequence[str], timeout: float) -> Done:
        assert argv[:2] == ["docker", "compose"]
        assert timeout > 0
        if "version" in argv:
            return Done(0, f"{self.compose}\n") if self.has_compose else Done(1)
        if "--hash" in argv:
            return Done(0, f"{argv[-1]} {self.hash}\n") if self.hash else Done(1)
        if "config" in argv:
            return Done(0, "\n".join(self.listed_images)) if self.listed_images else Done(1)
        if "up" in argv:
            assert argv[argv.index("up") + 1 :][:5] == [
                *("--detach", "--no-deps", "--no-build", "--pull", "never")
            ]
            self.commands.append(f"up {argv[-1]}")
            if self.refuses_up:
                return Done(1, "", self.refuses_up)
            self.on_up(argv[-1])
            return Done(0)
        self.commands.append("create")
        if self.fails_late:
            self.create(argv)
        if self.refuses_create:
            return Done(1, "", self.refuses_create.pop(0))
        self.create(argv)
        return Done(0, "", " Container created")

    def create(self, argv: Sequence[str]) -> None:
        """As Compose: up to the service's scale, each with the number after the last."""
        assert argv[argv.index("create") + 1 :][:3] == ["--no-build", "--pull", "never"]
        service = argv[-1]
        old = [id for id, each in self.containers.items() if _service(each) == service]
        if "--force-recreate" in argv or (self.changed and "--no-recreate" not in argv):
            for id in old:
                del self.containers[id]
            old = []
        last = max([self.number(id) for id in old], default=0)
        for number in range(last + 1, last + 1 + self.scale - len(old)):
            self.add(f"new-{service}-{number}-{self.moment}", service, "created", str(number))

    # The engine

    def answer(self, verb: str, id: str) -> Answer:
        self.commands.append(verb)
        if self.fails.get(verb):
            return self.fails[verb].pop(0)
        if verb in self.ignores:
            return 204, None
        if verb not in ("ps", "image", "info", "volumes", "networks") and id not in self.containers:
            return 404, f"No such container: {id}"
        return getattr(self, f"do_{verb}")(id)  # type: ignore[no-any-return]

    def do_ps(self, _: str) -> Answer:
        words = json.loads(self.asked.get("filters", '{"label": []}'))["label"]
        wanted = [word.rpartition("=")[2] for word in words if ".service=" in word]
        found = [each for each in self.containers.values() if not wanted or _service(each) in wanted]
        listed = [(each, each.get("Published", ())) for each in found]
        return 200, [
            {
                "Id": each["Id"],
                "Labels": each["Config"]["Labels"],
                "Ports": [{"PublicPort": p} for p in ports],
            }
            for each, ports in listed
        ]

    def do_volumes(self, _: str) -> Answer:
        return 200, {"Volumes": [{"Name": name} for name in self.volumes] or None}

    def do_networks(self, _: str) -> Answer:
        return 200, [{"Name": name, "Id": f"id of {name}"} for name in ("bridge", "host", "none")]

    def do_inspect(self, id: str) -> Answer:
        return 200, self.containers[id]

    def do_image(self, name: str) -> Answer:
        return (200, {"Id": f"sha256:{name}"}) if name in self.images else (404, f"no such image: {name}")

    def do_info(self, _: str) -> Answer:
        return 200, {"Runtimes": {name: {} for name in self.runtimes}, **self.said}

    def do_start(self, id: str) -> Answer:
        match self.state(id)["Status"]:
            case "paused":
                return 409, "cannot start a paused container, try unpause instead"
            case "dead" | "removing":
                return 409, "container is marked for removal and cannot be started"
            case "running":
                return 304, None
        self.moment += 1
        self.state(id).update(Status="running", StartedAt=self.now())
        return 204, None

    def do_archive(self, id: str) -> Answer:
        assert self.asked == {"path": "/"}
        with tarfile.open(fileobj=io.BytesIO(self.body)) as archive:
            for each in archive:
                content = archive.extractfile(each)
                assert content is not None
                self.extracted.append((id, each.name, content.read(), each.mode, each.uid, each.gid))
        return 200, None

    def do_stop(self, id: str) -> Answer:
        assert int(self.asked["t"]) >= 0
        self.end(id, 0)
        return 204, None

    def do_kill(self, id: str) -> Answer:
        self.end(id, 137)
        return 204, None

    def do_wait(self, id: str) -> Answer:
        self.end(id, 0)
        return 200, {"StatusCode": 0}

    def killed(self) -> bytes:
        assert json.loads(self.asked["filters"])["event"] == ["kill"]
        events = (
            {"Action": "kill", "Actor": {"ID": id, "Attributes": {"signal": signal}}, "timeNano": when * 1e9}
            for id, signal, when in self.kills
        )
        return "".join(f"{json.dumps(event)}\n" for event in events).encode()

    def do_pause(self, id: str) -> Answer:
        self.state(id).update(Status="paused")
        return 204, None

    def do_unpause(self, id: str) -> Answer:
        self.state(id).update(Status="running")
        return 204, None

    def do_top(self, id: str) -> Answer:
        if self.state(id)["Status"] not in ("running", "paused"):
            return 409, f"container {id} is not running"
        assert self.asked["ps_args"] == ("hpid" if self.podman else "-eo pid")
        return 200, {"Titles": ["PID"], "Processes": [["4711"], ["4712"]]}

    def do_rm(self, id: str) -> Answer:
        del self.containers[id]
        return 204, None

    def do_logs(self, id: str) -> Answer:
        self.since = float(self.asked.get("since", "0"))
        if self.containers[id]["Config"].get("Tty"):
            return 200, "".join(text for _, text in self.logs).encode()
        said = ((which, text.encode()) for which, text in self.logs)
        return 200, b"".join(struct.pack(">BxxxI", which, len(text)) + text for which, text in said)

    # Events

    def next_events(self) -> Events:
        """The next connection that asks for events, once there is one."""
        return Events(self.events.get(timeout=PATIENCE))


@dataclass
class Events:
    """One connection on which a test tells of ends."""

    lines: queue.Queue[str]

    def tell(self, *ids: str, code: int | None = None, event: str = "die", service: str = "") -> None:
        """Tell an event of these containers; ``service``: the one whose labels the event has."""
        for id in ids:
            more = {} if code is None else {"exitCode": str(code)}
            if service:
                more |= {"com.docker.compose.project": "p", "com.docker.compose.service": service}
            actor = {"ID": id, "Attributes": more}
            if event == "disconnect":
                actor = {"ID": "a network", "Attributes": {"container": id}}
            self.lines.put(json.dumps({"Action": event, "Actor": actor}))

    def close(self) -> None:
        self.lines.put("")


def _service(container: dict[str, Any]) -> str:
    return container["Config"]["Labels"]["com.docker.compose.service"]  # type: ignore[no-any-return]


PATHS = (
    ("GET", r"/containers/json", "ps"),
    ("GET", r"/containers/([^/]+)/json", "inspect"),
    ("GET", r"/images/(.+)/json", "image"),
    ("GET", r"/info", "info"),
    ("GET", r"/volumes", "volumes"),
    ("GET", r"/networks", "networks"),
    ("DELETE", r"/containers/([^/]+)", "rm"),
    ("GET", r"/containers/([^/]+)/(top|logs)", ""),
    ("PUT", r"/containers/([^/]+)/(archive)", ""),
    ("POST", r"/containers/([^/]+)/(start|stop|kill|pause|unpause|wait)", ""),
)


class Server(ThreadingUnixStreamServer):
    daemon_threads = True
    docker: Docker


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def handle_any(self) -> None:
        docker, url = self.server.docker, urlsplit(self.path)
        if url.path == "/_ping":
            docker.on_ping()
            return self.reply(200, b"OK")
        prefix = f"/v{docker.version}"
        if not url.path.startswith(prefix + "/"):
            return self.reply(400, {"message": "client version is too new"})
        docker.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        docker.asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == f"{prefix}/events" and "until" in docker.asked:
            return self.reply(200, docker.killed())
        if url.path == f"{prefix}/events":
            return self.tell_events()
        for method, pattern, verb in PATHS:
            found = re.fullmatch(prefix + pattern, url.path)
            if found and method == self.command:
                named = found.groups()
                status, said = docker.answer(verb or named[1], named[0] if named else "")
                return self.reply(status, {"message": said} if status >= 300 and said else said)
        raise AssertionError(f"{self.command} {self.path}")

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def reply(self, status: int, said: Any) -> None:
        docker, self.close_connection = self.server.docker, True
        if status == 0:
            return
        body = said if isinstance(said, bytes) else b"" if said is None else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Api-Version", docker.version)
        if docker.podman:
            self.send_header("Libpod-Api-Version", "4.3.1")
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        with suppress(BrokenPipeError):  # of a ping the head is enough
            self.end_headers()
            self.wfile.write(body)

    def tell_events(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines: queue.Queue[str] = queue.Queue()
        self.server.docker.events.put(lines)
        with suppress(BrokenPipeError):  # nobody listens any more
            while line := lines.get(timeout=PATIENCE):
                self.wfile.write(f"{len(line) + 1:x}\r\n{line}\n\r\n".encode())
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(docker: Docker) -> Iterator[None]:
    """The engine answers at its socket."""
    with Server(str(docker.path), Handler) as server:
        server.docker = docker
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(PATIENCE)
