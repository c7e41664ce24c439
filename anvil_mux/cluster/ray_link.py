"""The link to Ray: the driver, a child process that carries the calls of anvil-mux to the agents of hosts.

Ray ends the process that it runs in when its head is lost, so this is a process of its own, which anvil-mux
starts anew. Calls come as frames on its standard input, and answers leave as frames (channel.py). The first
frame has the number 0 and says whether the cluster was joined, or why not. Another 0 says why the process
ends of itself. Standard error has Ray's own words, for a log file. Nothing else knows Ray but the actor
(``agent.HostActor``), to ask for its own address.

A host is a node with the label ``anvil-host=NAME``. Its agent is a detached actor, placed there by the label,
which Ray itself brings back when its process or its raylet has ended. Only bytes and plain names cross: of
what an agent answers nothing else is taken, since Ray would unpickle it, and run what a host says.

Where Ray would take a minute to fail, or abort, this asks first: whether anything listens at the head,
whether the token is right, and whether the cluster wants one at all, which takes a process that has none.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import anvil_mux
from anvil_mux.clock import Clock, essential, watch_threads
from anvil_mux.cluster import frames
from anvil_mux.cluster.channel import (
    PING_SECONDS,
    PINGS,
    AgentAway,
    AgentGone,
    Calls,
    Carrier,
    Refused,
    SilenceWatch,
)
from anvil_mux.cluster.frames import CallFrame, Node, dump, read_frame

LABEL = "anvil-host"
NAMESPACE = "anvil-mux"
HOW = f"pip install 'anvil-mux[ray]=={anvil_mux.__version__}'"
"""The command that brings Ray where anvil-mux is installed already."""
THERE = f"install {anvil_mux.__version__} there, with the extra ray, as docs/running.md says"

JOIN_SECONDS = 15.0
"""Until the first frame is written, come what may; anvil-mux waits for it a little longer."""
REACH_SECONDS = 3.0
REQUEST_SECONDS = 10
"""Seconds that Ray's own requests to the head may take."""
HELLO_SECONDS = 30.0
"""Until a new agent answers: its process has to start."""
PROBE_SECONDS = 10.0
"""How long the probe may take when all else is known."""
DONE, NOT_JOINED, SILENT, MISTAKE = 0, 1, 3, 4
"""How the process exits: its input ended; it was not let in; no host answers any more; a thread that it needs
has ended by an error."""
OPEN, REFUSED = 10, 11
"""How the probe ends: the cluster answered although it showed no token; it wants one. All else is a crash."""


def main(argv: list[str] | None = None) -> int:
    """Run until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m anvil_mux.cluster.ray_link")
    parser.add_argument("address", help="the head of the cluster, HOST:PORT")
    parser.add_argument("--insecure", action="store_true", help="also a cluster that wants no token")
    parser.add_argument(
        "--probe", action="store_true", help="exit with 11 if the cluster wants a token, with 10 if not"
    )
    options = parser.parse_args(argv)
    if options.probe:
        return probe(options.address)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for anvil-mux, which needs its hosts to drain
    calls = Calls(take_output())
    unanswered = threading.Timer(JOIN_SECONDS, give_up, (calls, options.address))
    unanswered.daemon = True
    unanswered.start()
    try:
        cluster, version = join(options.address, insecure=options.insecure)
    except Refused as error:
        unanswered.cancel()
        calls.write(0, False, str(error))
        return NOT_JOINED
    unanswered.cancel()
    calls.write(0, True, dump({"ray": version}))
    watch = SilenceWatch()
    watch_threads(lambda name: os._exit(MISTAKE))
    clock = Clock()
    clock.spawn(essential("deadlines", partial(calls.expire, watch.failed)), "deadlines")
    clock.spawn(essential("silence", partial(end_when_silent, watch, calls)), "silence")
    carrier = Carrier(cluster, calls, watch)
    while (call := read_frame(sys.stdin.buffer, CallFrame)) is not None:
        carrier.begin(call)
    return DONE


def take_output() -> BinaryIO:
    """Return standard output, and let whoever prints from now on print to nowhere: Ray does."""
    output = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return output


def give_up(calls: Calls, address: str) -> None:
    """End a process in which Ray does not return."""
    late = f"the cluster at {address} did not answer in {JOIN_SECONDS:g} s"
    why = "does the head hang, or use TLS where this machine does not (RAY_USE_TLS)?"
    calls.write(0, False, f"{late}: {why}")
    os._exit(NOT_JOINED)


def end_when_silent(watch: SilenceWatch, calls: Calls) -> None:
    """End when no host answers: what this process knows of the cluster is stale then."""
    watch.wait()
    calls.write(0, False, f"no host has answered for {PINGS * PING_SECONDS:g} s")
    os._exit(SILENT)


# Being let in


def join(address: str, *, insecure: bool) -> tuple[RayCluster, str]:
    """Return the cluster at an address, and the version of Ray there; Refused with what to do."""
    refuse_unless_listening(address)
    prober = prepare(address, insecure=insecure)
    try:
        import ray
    except ImportError as error:
        raise Refused(f"Ray cannot be imported ({error}): {HOW}") from None
    try:
        take_bytes_alone()
        cluster = RayCluster(address)
        if prober is not None:
            refuse_unless_closed(address, prober)
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Refused:
        raise
    except Exception as error:
        raise Refused(why_not_joined(address, error)) from None
    return cluster, str(ray.__version__)


def refuse_unless_closed(address: str, probe: subprocess.Popen[bytes]) -> None:
    """Refuse a cluster unless its probe was refused, because it showed no token."""
    try:
        status = probe.wait(PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        probe.kill()
        status = probe.wait()
    if status == OPEN:
        raise Refused(
            f"the cluster at {address} is open, so whoever reaches it can run programs there. Start"
            " Ray with RAY_AUTH_MODE=token on all machines (docs/cluster.md), or allow --insecure-cluster"
        )
    if status != REFUSED:
        raise Refused(
            f"it cannot be told whether the cluster at {address} wants a token: the process that asked it"
            f" without one ended with status {status}; try again, or allow --insecure-cluster"
        )


def take_bytes_alone() -> None:
    """Have Ray make bytes of what agents answer, and text of their errors, instead of unpickling them.

    An answer says of itself what it is, and a host may answer anything.
    """
    from ray._private.ray_constants import OBJECT_METADATA_TYPE_RAW
    from ray._private.serialization import SerializationContext
    from ray.exceptions import CrossLanguageError, RayError, RaySystemError

    make, load = SerializationContext._deserialize_object, RayError.from_ray_exception
    assert callable(make)
    assert callable(load)

    def plain(context: Any, data: Any, metadata: bytes | None, *more: Any) -> Any:
        kind = (metadata or b"").split(b",")[0]
        if kind == OBJECT_METADATA_TYPE_RAW or kind.isdigit():  # bytes, or an error by its number
            return make(context, data, metadata, *more)
        return RaySystemError("its answer is not bytes: is it of another version of anvil-mux?")

    SerializationContext._deserialize_object = plain
    RayError.from_ray_exception = staticmethod(CrossLanguageError)  # the error by its text


def text_of(answer: object) -> str:
    """Return the text that an agent's answer is."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else ""


def refuse_unless_listening(address: str) -> None:
    """Refuse an address at which nothing listens; Ray would ask it for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except ValueError:
        raise Refused(f"`{address}` is no address of a cluster: HOST:PORT, as in 10.0.0.1:6379") from None
    except OSError as error:
        raise Refused(
            f"nothing answers at {address} ({error.strerror or error}): is that the head, does Ray run there"
            f" (`ray start --head --port={port}`), and does a firewall let this machine through?"
        ) from None


def prepare(address: str, *, insecure: bool) -> subprocess.Popen[bytes] | None:
    """Set what Ray reads when it is imported; return the probe, unless the cluster may be an open one."""
    os.environ["RAY_gcs_server_request_timeout_seconds"] = str(REQUEST_SECONDS)  # noqa: SIM112
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Only bytes and names cross, so a patch of Python more or less does not matter here.
    os.environ.setdefault("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    if has_token():
        os.environ["RAY_AUTH_MODE"] = "token"
    elif insecure:
        os.environ["RAY_AUTH_MODE"] = "disabled"
    else:
        # With the mode on and no token Ray aborts.
        raise Refused(
            "this machine has no token for the cluster: copy ~/.ray/auth_token from the head"
            " (made there by `ray get-auth-token --generate`), or name its file in RAY_AUTH_TOKEN_PATH"
        )
    return None if insecure else start_probe(address)


def has_token() -> bool:
    """Whether Ray finds a token where it looks for one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return bool(path.read_text().strip())
    except OSError:
        return False


def start_probe(address: str) -> subprocess.Popen[bytes]:
    """Start a process that knocks without a token: a process of Ray's has one, or has none."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    return subprocess.Popen(
        [sys.executable, "-m", "anvil_mux.cluster.ray_link", address, "--probe"],
        env={**environ, "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def probe(address: str) -> int:
    """Return whether the cluster wants a token, as the exit status of a process that has none."""
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=address)
    except AuthenticationError:
        return REFUSED
    return OPEN


def why_not_joined(address: str, error: Exception) -> str:
    """Return an error of Ray's in words that say what to do."""
    from ray.exceptions import AuthenticationError

    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if isinstance(error, AuthenticationError):
        return (
            f"the cluster at {address} refuses the token of this machine: copy ~/.ray/auth_token from the"
            " head, or name its file in RAY_AUTH_TOKEN_PATH"
        )
    if "Version mismatch" in text:
        found = [" ".join(each) for each in re.findall(r"(Ray|Python): ([\w.+]+)", text)]
        theirs, ours = " and ".join(found[:2]), " and ".join(found[2:4])
        return (
            f"the cluster at {address} has {theirs}, and this machine {ours}: all machines need the same"
            " version of Ray and the same minor version of Python"
        )
    if "node to connect" in text:
        return (
            "no raylet of the cluster runs on this machine, and anvil-mux needs one beside it:"
            f" `ray start --address={address} --num-cpus=0 --num-gpus=0` (docs/cluster.md)"
        )
    return f"cannot join the cluster at {address}: {text}"


# The cluster


class RayAgent:
    """The agent of a host, in an actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    def ask(self, call: CallFrame, then: Callable[[str | Exception], None]) -> None:
        """Begin a call, which ends in one of Ray's threads."""
        args = [call.text.encode()] if call.method == "call" else []
        future = getattr(self._actor, call.method).remote(*args).future()
        future.add_done_callback(lambda done: then(self._result(done)))

    def _result(self, done: Any) -> str | Exception:
        error = done.exception()
        return text_of(done.result()) if error is None else refusal(self._name, error)


class RayCluster:
    """A cluster of Ray that this process has joined."""

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient

        self._address = address
        # Not ray.nodes(): it aborts the process when the head has come back without its memory.
        self._head = GcsClient(address=address)

    def nodes(self) -> list[Node]:
        """Return the hosts that are, or were, in the cluster."""
        return [report(name, nodes) for name, nodes in self._known().items()]

    def open(self, name: str) -> RayAgent:
        """Return the agent of a host, in our version; Refused where that cannot be."""
        import ray

        refuse_unless_alive(name, self._known().get(name, []))
        try:
            actor, theirs = self._greet(name)
            if numbers(theirs) < numbers(anvil_mux.__version__):
                # It may have run since before an upgrade. Engines run on without it.
                ray.kill(actor, no_restart=True)
                actor, theirs = self._greet(name)
        except Exception as error:
            raise refusal(name, error) from None
        if theirs != anvil_mux.__version__:
            raise Refused(
                f"{name} has anvil-mux {theirs}, and this machine {anvil_mux.__version__}:"
                " install the same version on both"
            )
        return RayAgent(name, actor)

    def _greet(self, name: str) -> tuple[Any, str]:
        import ray

        actor = actor_of(name)
        hello = text_of(ray.get(actor.hello.remote(), timeout=HELLO_SECONDS))
        return actor, frames.read(dict[str, str], hello, is_foreign=True)["version"]

    def _known(self) -> dict[str, list[RayNode]]:
        try:
            nodes = self._head.get_all_node_info(timeout=REQUEST_SECONDS).values()
        except Exception as error:
            if "WrongClusterID" in str(error):
                raise Refused(
                    "the head restarted without its state; the other machines follow within a minute"
                ) from None
            raise Refused(f"the head at {self._address} does not answer: {lines(error)[0]}") from None
        return named(
            RayNode(
                node.node_manager_address,
                {key: value for key, value in node.labels.items() if not key.startswith("ray.io/")},
                node.state == node.ALIVE,
                node.start_time_ms,
            )
            for node in nodes
        )


class RayNode(NamedTuple):
    """A machine of the cluster, in one life of its raylet."""

    address: str
    labels: dict[str, str]
    alive: bool
    since: int


def named(nodes: Iterable[RayNode]) -> dict[str, list[RayNode]]:
    """Return the nodes that are hosts, by their names, each name's from the oldest on."""
    found: dict[str, list[RayNode]] = {}
    for node in sorted(nodes, key=lambda node: node.since):
        if name := node.labels.get(LABEL):
            found.setdefault(name, []).append(node)
    return found


def report(name: str, nodes: list[RayNode]) -> Node:
    """Return what is told of a host."""
    node = ([node for node in nodes if node.alive] or nodes)[-1]
    return Node(name, node.address, tuple(sorted(node.labels.items())), clash(name, nodes), node.alive)


def clash(name: str, nodes: Iterable[RayNode]) -> str:
    """Return the problem of a name that several machines have; a machine that came back is one."""
    addresses = sorted({node.address for node in nodes if node.alive})
    if len(addresses) < 2:
        return ""
    return (
        f"{len(addresses)} machines are called {name} ({', '.join(addresses)}): give each a name of its own"
        f" (`ray start --labels={LABEL}=NAME`)"
    )


def refuse_unless_alive(name: str, nodes: list[RayNode]) -> None:
    """Refuse a name unless one machine has it."""
    if problem := clash(name, nodes):
        raise Refused(problem)
    if not any(node.alive for node in nodes):
        what = "has left" if nodes else "is not in"
        raise Refused(f"{name} {what} the cluster: no raylet runs with the label {LABEL}={name}")


def actor_of(name: str) -> Any:
    """Return the actor of a host, which Ray makes if there is none."""
    import ray

    from anvil_mux.cluster.agent import HostActor

    # An actor that needs nothing is placed by way of any node, also of one that has just died, which the head
    # does not see for 13 s. One that needs a byte of memory is placed by way of our own.
    # A raylet kills the children of a worker that ended unless it is told not to; engines are to live on.
    environ = {"RAY_kill_child_processes_on_worker_exit": "false"}
    return (
        ray.remote(HostActor)
        .options(
            name=f"{LABEL}-{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            label_selector={LABEL: name},
            num_cpus=0,
            memory=1,
            max_restarts=-1,
            max_concurrency=64,
            enable_task_events=False,
            runtime_env={"env_vars": environ},
        )
        .remote(name)
    )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


# Errors


def refusal(name: str, error: Exception) -> Refused:
    """Return an error of an actor as one of ours, without Ray's traces."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        CrossLanguageError,
        GetTimeoutError,
    )

    text = str(error)
    if "No module named 'anvil_mux" in text:
        return AgentGone(f"the Python that runs Ray on {name} lacks anvil-mux: {THERE}")
    match error:
        case ActorUnavailableError():
            return AgentAway(f"the agent of {name} does not run at the moment; Ray starts it again")
        case ActorDiedError():
            return AgentGone(f"the agent of {name} has ended: {lines(error)[0]}")
        case GetTimeoutError():
            return AgentAway(f"the agent of {name} did not answer in {HELLO_SECONDS:g} s")
        case CrossLanguageError():
            return AgentGone(f"the agent of {name} failed: {lines(error)[-1]}")
    return AgentAway(f"the agent of {name}: {type(error).__name__}: {lines(error)[0]}")


def lines(error: object) -> list[str]:
    """Return the lines of an error; the last one of a trace says what went wrong."""
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


if __name__ == "__main__":
    # Not by way of Ray's own end, which waits for what may be gone.
    os._exit(main())
