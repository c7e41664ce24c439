"""The relay's cost, measured beside nginx's and beside no relay at all.

One engine that costs nothing (stub_engine.c) and one load generator that checks every byte (load.c) are built
on the spot. Every repetition of a scenario measures direct, nginx and anvil-mux one after the other, in an
order that turns, so that what else the machine does meets them alike. Each relay has a stub of its own. What
counts are medians over the repetitions, and of these the ratios: absolute figures differ between machines.

    ns1 ns16 ns64   1, 16, 64 keep-alive connections, answers of about 400 bytes: requests/s, latency
    nc16            16 connections at once, a new one for each request: requests/s, latency from connect() on
    p256 ... p2000  256, 1,000, 2,000 streams, begun within a second, with an event each 20 ms for 10 s: share
                    of the events that came in time, their delay, time to first byte, the relay's CPU seconds
                    and memory
    idle10000       10,000 connections, each after one request: the memory and threads of the relay that they
                    cost, and how quickly one more request is answered meanwhile
    admit500        500 requests that wait for one load: from its end until half of them, 99 % and the last
                    have their leases, in this process, with the real Multiplexer; each gives its lease back
                    at once, and once more with all of them held

"Added" is a relay's median less the direct one. CPU is user + system time of the relay's own processes over
the run, memory their largest resident set in it (VmHWM, reset before each run), in units of 10^6 bytes. nginx
runs with its access log on, anvil-mux with access log, metrics and leases. "CPU elsewhere" is what neither
the relay, nor its stub, nor the load generator used; a run is called disturbed where that is over 5 % of the
machine, and is worth little.

Nothing here passes or fails: a missed target is a finding, not an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from anvil_mux.host.seam import Loaded

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "bench"

DIRECT, NGINX, MUX, UNPINNED = "direct", "nginx", "anvil-mux", "anvil-mux --no-pin"
LITELLM = "LiteLLM"
LITELLM_RELEASE = "litellm[proxy]==1.108.7"
CHAT = "/v1/chat/completions"
MODEL = "stub"
START_SECONDS = 60.0
SAMPLE_SECONDS = 0.25
DISTURBED = 0.05
"""The share of the machine that others may have before a run is called disturbed."""
QUIET_SECONDS = 0.5
REST_SECONDS = 0.3
"""Between two runs, so that the one before has closed its connections."""
SPARE_SECONDS = 12.0
"""After which the relay has ended threads that it does not need any more."""
WAITING = 500

Run = dict[str, Any]
Runs = dict[str, dict[str, list[Run]]]
"""scenario -> relay -> its repetitions"""


@dataclass(frozen=True)
class Scenario:
    """One kind of load."""

    connections: int
    streams: bool = False
    requests: int = 0
    """Requests on each connection; 0: without end."""

    def arguments(self, quick: bool) -> list[str]:
        if not self.streams:
            lasts = ["--seconds", "1" if quick else "3", "--requests", f"{self.requests}"]
            return ["rps", "--connections", f"{self.connections}", *lasts]
        events = "150" if quick else "500"
        return ["streams", "--connections", f"{self.connections}", "--events", events, "--interval-ms", "20"]


SCENARIOS = {
    "ns1": Scenario(1),
    "ns16": Scenario(16),
    "ns64": Scenario(64),
    "nc16": Scenario(16, requests=1),
    "p256": Scenario(256, streams=True),
    "p1000": Scenario(1000, streams=True),
    "p2000": Scenario(2000, streams=True),
}
IDLE = "idle10000"
IDLE_CONNECTIONS = 10_000
ADMISSION = "admit500"
UNPINNED_IN = "ns16"
"""The one scenario in which anvil-mux is also measured with --no-pin."""


@dataclass(frozen=True)
class Relay:
    """Where to send the load, and whose CPU and memory to read meanwhile."""

    name: str
    host: str
    port: int
    path: str = CHAT
    pids: tuple[int, ...] = ()
    rewrites: bool = False
    """Whether it writes answers anew instead of handing them on."""

    def takes_part(self, scenario: str) -> bool:
        if self.rewrites and SCENARIOS[scenario].streams:
            return False
        return self.name != UNPINNED or scenario == UNPINNED_IN


class BenchError(Exception):
    """The benchmark cannot be run here; the message says what to do."""


# Programs


def build(source: str, *libraries: str) -> Path:
    """The program made from ``source``, made anew when that has changed."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError("needs a C compiler; on Debian and Ubuntu: apt-get install gcc libc6-dev")
    code, program = HERE / source, CACHE / source.removesuffix(".c")
    if not program.exists() or program.stat().st_mtime < code.stat().st_mtime:
        CACHE.mkdir(parents=True, exist_ok=True)
        made = program.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *flags, "-o", str(made), str(code), *libraries], check=True)
        made.replace(program)
    return program


def find_nginx() -> str:
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise BenchError("needs nginx; on Debian and Ubuntu: apt-get install nginx-light")
    return found


def find_litellm() -> str:
    """Return LiteLLM's command; the first time, make the environment that has it."""
    folder = CACHE / "litellm"
    command, stamp = folder / "bin" / "litellm", folder / "installed"
    if not stamp.exists() or stamp.read_text() != LITELLM_RELEASE:
        print(f"installing {LITELLM_RELEASE} (the first time only)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = ["install", "-qq", "--disable-pip-version-check", LITELLM_RELEASE]
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", *install], check=True)
        stamp.write_text(LITELLM_RELEASE)
    return str(command)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Bench:
    """The programs that run while the benchmark does, and the folder they write to."""

    stack: ExitStack
    stub: Path = field(default_factory=lambda: build("stub_engine.c"))
    load: Path = field(default_factory=lambda: build("load.c", "-lm"))

    def __post_init__(self) -> None:
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-relay-")))

    def direct(self) -> Relay:
        return Relay(DIRECT, "127.0.0.1", self._start_stub())

    def nginx(self) -> Relay:
        port, config = free_port(), self.folder / "nginx.conf"
        holes = {
            "folder": str(self.folder),
            "port": str(port),
            "engine": str(self._start_stub()),
            "user": "user root;" if os.geteuid() == 0 else "",
        }
        text = (HERE / "nginx.conf.in").read_text()
        config.write_text(re.sub(r"@(\w+)@", lambda hole: holes[hole[1]], text))
        error_log = str(self.folder / "nginx-error.log")
        master = self._start(
            NGINX, [find_nginx(), "-e", error_log, "-p", str(self.folder), "-c", str(config)]
        )
        self._await(Relay(NGINX, "127.0.0.1", port), master)
        return Relay(NGINX, "127.0.0.1", port, pids=(master.pid, *children(master.pid)))

    def mux(self, name: str) -> Relay:
        """anvil-mux as its users start it, with the stub as its one model."""
        program = ROOT / "bin" / "anvil-mux"
        port, engine = free_port(), free_port()
        project = "bench-unpinned" if name == UNPINNED else "bench"
        file = self.folder / f"{project}.yaml"
        command = [str(self.stub), "--port", str(engine), "--model", MODEL]
        service = {"command": command, "x-anvil": {"model": MODEL, "gpus": ["0"], "port": engine}}
        document = {
            "name": project,
            "x-anvil": {"runtime": "process", "on_exit": "stop"},
            "services": {MODEL: service},
        }
        file.write_text(json.dumps(document))  # JSON is YAML
        log = ["--access-log", str(file.with_suffix(".access.log"))]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        pin = ["--no-pin"] if name == UNPINNED else []
        process = self._start(name, [str(program), "serve", str(file), *address, *log, *pin])
        relay = Relay(name, "127.0.0.1", port, pids=(process.pid,))
        self._await(relay, process)
        return relay

    def litellm(self) -> Relay:
        port, config = free_port(), self.folder / "litellm.json"
        engine = {
            "model": f"openai/{MODEL}",
            "api_base": f"http://127.0.0.1:{self._start_stub()}/v1",
            "api_key": "none",
        }
        document = {
            "model_list": [{"model_name": MODEL, "litellm_params": engine}],
            # Without keys, as the others are.
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        config.write_text(json.dumps(document))  # JSON is YAML
        command = [find_litellm(), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        process = self._start(LITELLM, command)
        relay = Relay(LITELLM, "127.0.0.1", port, pids=(process.pid,), rewrites=True)
        self._await(relay, process)
        return relay

    def _start_stub(self) -> int:
        port = free_port()
        stub = self._start("stub_engine", [str(self.stub), "--port", str(port), "--model", MODEL])
        self._await(Relay("stub_engine", "127.0.0.1", port), stub)
        return port

    def _start(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program that ends with the benchmark; its output goes to a file."""
        # What anvil-mux remembers of its engines goes with the folder.
        env = {**os.environ, "XDG_STATE_HOME": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)}
        with self._output(name).open("ab") as output:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        self.stack.callback(end, process)
        return process

    def _output(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '')}.out"

    def _await(self, relay: Relay, process: subprocess.Popen[bytes]) -> None:
        """Returns once the relay answers; tells what it wrote if it does not."""
        try:
            await_answer(relay, lambda: process.poll() is None)
        except BenchError as error:
            said = self._output(relay.name).read_text(errors="replace")[-2000:]
            raise BenchError(f"{error}\n{said}") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program of ours and those of its children that would outlive it."""
    engines = children(process.pid)
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in engines:
        if executable(pid) == str(CACHE / "stub_engine"):
            os.kill(pid, signal.SIGTERM)


def children(pid: int) -> tuple[int, ...]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return tuple(int(word) for task in tasks for word in (task / "children").read_text().split())
    except OSError:
        return ()


def executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def await_answer(relay: Relay, alive: Callable[[], bool] = lambda: True) -> None:
    """Returns when a chat request is answered through the relay (which may have to load the model first)."""
    url = f"http://{relay.host}:{relay.port}{relay.path}"
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + START_SECONDS
    while True:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=START_SECONDS):
                return
        except urllib.error.HTTPError as error:
            why = f"{error} {error.read(500).decode(errors='replace')}"
        except OSError as error:
            why = str(error)
        if time.monotonic() > until or not alive():
            raise BenchError(f"{relay.name} does not answer at {url}: {why}")
        time.sleep(0.1)


# One run


def measure(load: Path, relay: Relay, scenario: Scenario, quick: bool) -> Run:
    """What the load generator saw through the relay, and what that cost the relay."""
    where = ["--host", relay.host, "--port", str(relay.port), "--path", relay.path, "--model", MODEL]
    where += ["--rewritten", str(int(relay.rewrites))]
    reset_peaks(relay.pids)
    ours = (*relay.pids, *stubs())
    begun, own, sampled = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    before, elsewhere = cpu_seconds(relay.pids), busy_seconds() - cpu_seconds(ours)
    with subprocess.Popen([str(load), *scenario.arguments(quick), *where], stdout=subprocess.PIPE) as process:
        while True:
            sampled = max(sampled, memory(relay.pids, "VmRSS"))
            try:
                output, _ = process.communicate(timeout=SAMPLE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
    if process.returncode:
        raise BenchError(f"the load generator failed with {relay.name} (exit status {process.returncode})")
    elsewhere = busy_seconds() - cpu_seconds(ours) - elsewhere - since(own)
    elsewhere /= (time.monotonic() - begun) * (os.cpu_count() or 1)
    seen = json.loads(output)
    run = summary_of_streams(seen) if scenario.streams else summary_of_requests(seen)
    if relay.pids:
        run["cpu_seconds"] = round(cpu_seconds(relay.pids) - before, 2)
        run["rss_mb"] = sampled
        run["peak_mb"] = memory(relay.pids, "VmHWM")
    return {**run, "elsewhere": round(max(elsewhere, 0.0), 3), "load": seen}


def summary_of_requests(seen: Run) -> Run:
    latency = seen["latency_us"]
    return {
        "rps": seen["rps"],
        "p50_us": latency["p50"],
        "p99_us": latency["p99"],
        "errors": seen["errors"],
    }


def summary_of_streams(seen: Run) -> Run:
    return {
        "share": seen["events_in_time"] / seen["events_expected"],
        "delay_p50_ms": seen["delay_ms"]["p50"],
        "delay_p99_ms": seen["delay_ms"]["p99"],
        "first_byte_p50_ms": seen["first_byte_ms"]["p50"],
        "first_byte_p99_ms": seen["first_byte_ms"]["p99"],
        "unfinished": seen["streams_unfinished"],
        "errors": seen["errors"],
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """What all CPUs together have done, for whomever, and what the host gave to other guests."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def await_quiet(patience: float) -> None:
    """Returns when nobody else uses the machine much, after ``patience`` seconds in any case."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        begun, before = time.monotonic(), busy_seconds()
        time.sleep(QUIET_SECONDS)
        if busy_seconds() - before < DISTURBED * (time.monotonic() - begun) * (os.cpu_count() or 1):
            return


def since(before: resource.struct_rusage) -> float:
    """CPU seconds of our children that have ended since: the load generator's."""
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now.ru_utime - before.ru_utime + now.ru_stime - before.ru_stime


def stubs() -> tuple[int, ...]:
    """Our engines; their CPU is neither the relay's nor a disturbance."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return tuple(pid for pid in pids if executable(pid) == str(CACHE / "stub_engine"))


def memory(pids: Sequence[int], row: str) -> float:
    """Sum of a row of /proc/PID/status, in 10^6 bytes."""
    total = 0
    for pid in pids:
        found = re.search(rf"^{row}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return round(total / 1e6, 1)


def reset_peaks(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:
            pass  # Somebody else's process: its peak is then that of its life.


# Idle connections


def measure_idle(relay: Relay) -> Run:
    """The memory and the threads that idle connections cost, and an answer's time beside them."""
    before, threads = memory(relay.pids, "VmRSS"), count_threads(relay.pids)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((relay.host, relay.port)))
            for _ in range(IDLE_CONNECTIONS)
        ]
        answered = [ask(connection) for connection in connections]
        time.sleep(SPARE_SECONDS)
        added = memory(relay.pids, "VmRSS") - before, count_threads(relay.pids) - threads
        again = sorted(ask(connection) for connection in connections[: 2 * IDLE_CONNECTIONS // 100])
        return {
            "p50_us": again[len(again) // 2] * 1e6,
            "p99_us": again[len(again) * 99 // 100] * 1e6,
            "added_mb": round(added[0], 1),
            "added_threads": added[1],
            "errors": answered.count(math.inf) + again.count(math.inf),
        }


def ask(connection: socket.socket) -> float:
    """The seconds until an answer without a model is there; infinite: it is none."""
    begun = time.monotonic()
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = connection.recv(65536)
    return time.monotonic() - begun if answer.startswith(b"HTTP/1.1 200 ") else math.inf


def count_threads(pids: Sequence[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)


# Admission


class GatedLoad:
    """A mechanism whose load ends when the gate opens; see multiplexer.Mechanism."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.ended_at = 0.0

    def load(self, backend: object, how: str, cancelled: object) -> Loaded:
        from anvil_mux.host.seam import Loaded

        self.gate.wait()
        self.ended_at = time.monotonic()
        return Loaded("http://127.0.0.1:9", how)

    def evict(self, backend: object, how: str) -> NoReturn:
        raise AssertionError("there is nothing to evict")

    def ended(self, backend: object) -> str | None:
        return None


def measure_admission() -> Run:
    """The same twice: with requests that end as soon as they begin, and with ones that outlast it all."""
    brief, held = admit(hold=False), admit(hold=True)
    return {
        "half_seconds": rank(brief, 0.5),
        "most_seconds": rank(brief, 0.99),
        "seconds": rank(brief, 1.0),
        "held_seconds": rank(held, 1.0),
        "errors": 2 * WAITING - len(brief) - len(held),
    }


def rank(seconds: Sequence[float], share: float) -> float | None:
    """The time within which that share of ``WAITING`` had come; None if they never did."""
    place = math.ceil(share * WAITING)
    return sorted(seconds)[place - 1] if len(seconds) >= place else None


def admit(*, hold: bool) -> list[float]:
    """Return the seconds from the load's end until each waiting request had its lease."""
    from anvil_mux.config.config import Backend, Config
    from anvil_mux.config.machines import Gpu
    from anvil_mux.multiplexer.multiplexer import Multiplexer

    mechanism, admitted, over = GatedLoad(), [], threading.Event()
    config = Config(backends=(Backend(MODEL, MODEL, gpus=("0",)),), gpus=(Gpu("0"),))
    mux = Multiplexer(config, mechanism, log=lambda event: None)

    def request() -> None:
        with mux.lease(MODEL, tend=lambda now: None):
            admitted.append(time.monotonic())
            if hold:
                over.wait(START_SECONDS)
        over.wait(START_SECONDS)  # as a connection's thread lives on; its end is no part of an admission

    mux.start()
    threads = [threading.Thread(target=request, daemon=True) for _ in range(WAITING)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + START_SECONDS
    while mux.overview.status().waiting < WAITING and time.monotonic() < until:
        time.sleep(0.01)
    mechanism.gate.set()
    while len(admitted) < WAITING and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    mux.close()
    return [moment - mechanism.ended_at for moment in admitted]


# All runs


def measure_all(
    load: Path, relays: Sequence[Relay], names: Sequence[str], options: argparse.Namespace
) -> Runs:
    runs: Runs = {}
    for name in names:
        if name == ADMISSION:
            runs[name] = {MUX: []}
            for repetition in range(options.repeat):
                runs[name][MUX].append(tell(name, repetition, options.repeat, MUX, measure_admission()))
            continue
        if name == IDLE:
            runs[name] = {
                relay.name: [
                    tell(name, each, options.repeat, relay.name, measure_idle(relay))
                    for each in range(options.repeat)
                ]
                for relay in relays
                if relay.name == MUX
            }
            continue
        taking_part = [relay for relay in relays if relay.takes_part(name)]
        runs[name] = {relay.name: [] for relay in taking_part}
        for repetition in range(options.repeat):
            for relay in turned(taking_part, repetition):
                await_quiet(options.patience)
                run = measure(load, relay, SCENARIOS[name], options.quick)
                runs[name][relay.name].append(tell(name, repetition, options.repeat, relay.name, run))
                time.sleep(REST_SECONDS)
    return runs


def turned(relays: Sequence[Relay], by: int) -> Iterator[Relay]:
    for place in range(len(relays)):
        yield relays[(place + by) % len(relays)]


def tell(scenario: str, repetition: int, of: int, relay: str, run: Run) -> Run:
    figures = ", ".join(f"{key} {show(value)}" for key, value in run.items() if key != "load")
    print(f"{scenario} {repetition + 1}/{of} {relay}: {figures}", file=sys.stderr, flush=True)
    return run


def medians_of(runs: Runs) -> dict[str, dict[str, Run]]:
    """scenario -> relay -> figure -> its median; of errors and unfinished streams the sum."""
    return {
        scenario: {relay: _medians(repetitions) for relay, repetitions in relays.items()}
        for scenario, relays in runs.items()
    }


def _medians(repetitions: list[Run]) -> Run:
    result = {}
    for key in repetitions[0]:
        values = [run[key] for run in repetitions if run[key] is not None]
        if key in ("errors", "unfinished"):
            result[key] = sum(values)
        elif key != "load":
            result[key] = statistics.median(values) if values else None
    return result


# Targets


@dataclass(frozen=True)
class Target:
    """What a figure of the relay's should be. ``kind``: how it is set against nginx's, if it is."""

    scenario: str
    figure: str
    limit: float
    kind: str = "itself"
    """itself | ratio | added ratio | more"""
    at_most: bool = True

    def __str__(self) -> str:
        against = {
            "itself": "",
            "ratio": ", x nginx's",
            "added ratio": " added, x nginx's",
            "more": " more than nginx's",
        }
        return f"{self.scenario}: {LABELS[self.figure]}{against[self.kind]}"

    def measured(self, medians: dict[str, dict[str, Run]], relay: str) -> float | None:
        """None where there is nothing to measure it by."""
        row = medians.get(self.scenario, {})
        mine, nginx, direct = (row.get(name, {}).get(self.figure) for name in (relay, NGINX, DIRECT))
        if mine is None or (self.kind != "itself" and nginx is None):
            return None
        match self.kind:
            case "ratio":
                return mine / nginx if nginx else None
            case "added ratio":
                return (mine - direct) / (nginx - direct) if nginx > direct else None
            case "more":
                return mine - nginx
            case _:
                return mine

    def verdict(self, measured: float | None) -> str:
        if measured is None:
            return "not measured"
        return "ok" if (measured <= self.limit if self.at_most else measured >= self.limit) else "MISSED"


LABELS = {
    "rps": "requests/s",
    "p50_us": "p50 us",
    "p99_us": "p99 us",
    "share": "share of events in time",
    "delay_p50_ms": "delay p50 ms",
    "delay_p99_ms": "delay p99 ms",
    "first_byte_p50_ms": "first byte p50 ms",
    "first_byte_p99_ms": "first byte p99 ms",
    "cpu_seconds": "CPU s",
    "rss_mb": "resident MB",
    "peak_mb": "peak resident MB",
    "unfinished": "unfinished streams",
    "errors": "errors",
    "elsewhere": "CPU elsewhere, share",
    "added_mb": "MB more",
    "added_threads": "threads more",
    "half_seconds": "seconds to half of the leases",
    "most_seconds": "to 99 % of them",
    "seconds": "seconds to the last lease",
    "held_seconds": "same with leases held",
}

TARGETS = (
    Target("ns1", "p50_us", 3.0, "added ratio"),
    Target("ns16", "rps", 0.3, "ratio", at_most=False),
    Target("p256", "cpu_seconds", 1.6, "ratio"),
    Target("p256", "delay_p99_ms", 1.0, "more"),
    Target("p256", "peak_mb", 80),
    Target("p1000", "share", 0.98, at_most=False),
    Target("p1000", "delay_p99_ms", 80),
    Target("p1000", "cpu_seconds", 1.3, "ratio"),
    Target("p1000", "peak_mb", 150),
    Target("p1000", "first_byte_p50_ms", 20),
    Target("p1000", "first_byte_p99_ms", 3.0, "ratio"),
    Target(IDLE, "added_mb", 200),
    Target(IDLE, "added_threads", 4),
    Target(ADMISSION, "seconds", 0.02),
    *(Target(name, "errors", 0) for name in (*SCENARIOS, IDLE, ADMISSION)),
)


def judged(medians: dict[str, dict[str, Run]], others: Sequence[str]) -> list[Run]:
    rows = []
    for target in TARGETS:
        if target.scenario not in medians:
            continue
        measured = target.measured(medians, MUX)
        rows.append(
            {
                "target": str(target),
                "limit": f"{'<=' if target.at_most else '>='} {target.limit:g}",
                "measured": measured,
                "verdict": target.verdict(measured),
                **{other: target.measured(medians, other) for other in others},
            }
        )
    return rows


# Output


def show(value: object) -> str:
    if value is None or value != value:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def scenario_table(scenario: str, relays: dict[str, Run]) -> str:
    figures = [figure for figure in LABELS if any(figure in run for run in relays.values())]
    direct = relays.get(DIRECT)
    rows = []
    for relay, run in relays.items():
        cells = [show(run.get(figure)) for figure in figures]
        if direct and relay != DIRECT:
            cells = [cell + added(figure, run, direct) for cell, figure in zip(cells, figures, strict=True)]
        rows.append([relay, *cells])
    return table([scenario, *(LABELS[figure] for figure in figures)], rows)


def added(figure: str, run: Run, direct: Run) -> str:
    if not figure.endswith(("_us", "_ms")) or None in (run[figure], direct[figure]):
        return ""
    return f" ({run[figure] - direct[figure]:+.4g})"


def print_report(report: Run) -> None:
    for scenario, relays in report["medians"].items():
        print(scenario_table(scenario, relays), end="\n\n")
    if report["targets"]:
        others = report["others"]
        head = ["target", "limit", "measured", "verdict", *others]
        rows = [[show(row[key]) for key in head] for row in report["targets"]]
        print(table(head, rows), end="\n\n")
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))


def machine(options: argparse.Namespace, runs: Runs) -> Run:
    shares = [
        run["elsewhere"]
        for relays in runs.values()
        for each in relays.values()
        for run in each
        if "load" in run
    ]
    nginx = subprocess.run([find_nginx(), "-v"], capture_output=True, text=True, check=True).stderr
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "nginx": nginx.strip().rpartition("/")[2],
        "repetitions": options.repeat,
        "quick": options.quick,
        "disturbed runs": f"{sum(share > DISTURBED for share in shares)} of {len(shares)}",
    }


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


# Command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-relay",
        description=(__doc__ or "").partition("\n")[0],
        epilog="A relay given with --target needs an engine like ours behind it: "
        f"{CACHE / 'stub_engine'} --port N --model {MODEL} (built at the first run; health route /health).",
    )
    names = (*SCENARIOS, IDLE, ADMISSION)
    parser.add_argument(
        "--json", action="store_true", help="print every run, the medians and the verdicts as JSON"
    )
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help="repetitions (default 5, with --quick 2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter runs: to see that all works, not to quote"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="before each run wait up to S s for a quiet machine",
    )
    parser.add_argument("--only", type=chosen(names), default=names, metavar="NAME,..", help=", ".join(names))
    parser.add_argument(
        "--without",
        type=chosen((NGINX, MUX, UNPINNED)),
        default=(),
        metavar="NAME,..",
        help="leave out relays",
    )
    parser.add_argument(
        "--litellm", action="store_true", help=f"also {LITELLM_RELEASE}, which the first run installs"
    )
    parser.add_argument(
        "--target", action="append", type=pair, default=[], metavar="NAME=URL", help="another relay"
    )
    parser.add_argument(
        "--target-pid",
        action="append",
        type=pair,
        default=[],
        metavar="NAME=PID",
        help="its process, for CPU and memory",
    )
    options = parser.parse_args()
    options.repeat = options.repeat or (2 if options.quick else 5)
    unknown = {name for name, _ in options.target_pid} - {name for name, _ in options.target}
    if unknown:
        parser.error(f"--target-pid for {', '.join(sorted(unknown))}, which no --target names")
    return options


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def chosen(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def choose(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if wrong := set(names) - set(known):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(wrong))}; known: {', '.join(known)}"
            )
        return names

    return choose


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def other_relays(options: argparse.Namespace) -> Iterator[Relay]:
    for name, url in options.target:
        parts = urlsplit(url)
        host = socket.gethostbyname(parts.hostname or "127.0.0.1")
        path = parts.path.rstrip("/").removesuffix("/v1") + CHAT
        pids = tuple(int(pid) for owner, pid in options.target_pid if owner == name)
        yield Relay(name, host, parts.port or 80, path, pids)


def start_relays(bench: Bench, options: argparse.Namespace) -> list[Relay]:
    relays = [bench.direct()]
    if NGINX not in options.without:
        relays.append(bench.nginx())
    for name in (MUX, UNPINNED):
        if name not in options.without and (name == MUX or UNPINNED_IN in options.only):
            relays.append(bench.mux(name))
    if options.litellm:
        relays.append(bench.litellm())
    for relay in other_relays(options):
        await_answer(relay)
        relays.append(relay)
    return relays


def run(options: argparse.Namespace) -> Run:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    find_nginx()
    with ExitStack() as stack:
        bench = Bench(stack)
        relays = start_relays(bench, options) if set(options.only) - {ADMISSION} else []
        runs = measure_all(bench.load, relays, options.only, options)
    medians = medians_of(runs)
    others = [name for name, _ in options.target]
    targets = judged(medians, others)
    return {
        "machine": machine(options, runs),
        "scenarios": {name: asdict(scenario) for name, scenario in SCENARIOS.items() if name in options.only},
        "runs": runs,
        "medians": medians,
        "others": others,
        "targets": targets,
    }


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        report = run(options)
    except BenchError as error:
        sys.exit(f"bench-relay: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
