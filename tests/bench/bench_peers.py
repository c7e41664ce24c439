"""Swaps and waits beside other programs that swap: the same llama-servers, models and clients.

    adaptive, eager, ...  anvil-mux under that policy, with engines as processes
    router                llama.cpp's own: a llama-server that starts others (--models-preset, --models-max 1)
    by-hand               a script that stops one llama-server, starts the other and asks it; of `swap` alone

    swap        one client asks a and b in turn for short answers: seconds from the end of an answer to the
                first token of the next
    stream      a streams what would take 48 s at the pace of short answers (it takes longer, as its context
                grows), and 2 s after its beginning b is asked for: is the stream finished, how long does b
                wait, and how long beyond the end of the stream?
    4+4 ...     so many clients of a, of b (and of c), who stream answers of about 2 s and ask again as soon
                as they have one, for 60 s

A wait lasts until the first token; requests that wait when the time is over are followed to their ends.
RMS is the root of the mean square of the waits: long ones weigh more, and it cannot be lowered by serving
one side alone. "answers" are whole ones within the time, "least/most" is how many of them the worst served
client has beside the best served one, "unserved" in how many rounds a client had none. What failed or ended
early is broken. "swaps" are counted by clients: how often the model of the answers changes.

The models are random weights, a mixture of experts, so that they load slowly beside how fast they answer, as
real ones do; llama-server reads them from the page cache into its own memory (--load-mode none) and computes
on one CPU. How many tokens 2 s are is measured before the first round, for the larger side of clients. Each
run begins with a program that was just started, and asks each model once. The programs take turns within
each round; what counts are medians over the rounds.

It needs root (for chroot), or a llama-server of this machine. Nothing here passes or fails.
"""

import argparse
import csv
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from anvil_mux import commit
from anvil_mux.clock import Clock
from anvil_mux.lab.figures import fairness, mean, quantile, root_mean_square
from anvil_mux.lab.player import PlayedAnswer, PlayedServer, Player, Prepare, failure, of_workload
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import Prompt, Sessions, Tireless, Workload
from anvil_mux.scheduler.policies import POLICIES
from tests.bench.bench_live import names, table, tell
from tests.bench.bench_relay import cpu_name, free_port
from tests.real import tiny_model
from tests.running import seen, serving

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
ROUTER, BY_HAND = "router", "by-hand"
RELAYS = ("adaptive", "eager", ROUTER, BY_HAND)
SWAP, STREAM = "swap", "stream"
SCENARIOS = (SWAP, STREAM, "4+4", "8+1", "3+3+3")
MODELS = "abcdefgh"

SIZE = tiny_model.Size(1024, 1, 16, 4, 1024, context=32768, experts=16)
OPTIONS = {"ctx-size": "16384", "parallel": "8", "kv-unified": "true", "threads": "1", "load-mode": "none"}
"""What each llama-server gets, whoever starts it, as a preset of llama.cpp's router has it."""
SWAPS, SHORT_SECONDS, ASKED_AFTER = 8, 0.2, 2.0
CALIBRATED = 1.0
"""Seconds of the answers by which the pace is measured."""
GIVE_UP = 300.0
"""Seconds beyond the time of a run after which a client leaves that has no byte: its server hangs."""
STOP_SECONDS = 30.0

Row = dict[str, Any]


# Engines


@dataclass(frozen=True)
class Engine:
    """A llama-server that is started as a process of this machine."""

    command: tuple[str, ...]
    folder: Path
    """Where its files are."""
    there: str
    """The same folder, as it sees it."""

    def serve(self, model: str, host: str, port: str) -> list[str]:
        flags = [word for name, value in OPTIONS.items() for word in (f"--{name}", value) if word != "true"]
        weights = f"{self.there}/{model}.gguf"
        return [*self.command, "--model", weights, "--alias", model, "--host", host, "--port", port, *flags]

    def route(self, models: Sequence[str], port: int) -> list[str]:
        """The command of llama.cpp's router, whose preset it writes."""
        sections = {"*": OPTIONS, **{model: {"model": f"{self.there}/{model}.gguf"} for model in models}}
        lines = ["version = 1"]
        for name, options in sections.items():
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in options.items())]
        (self.folder / "models.ini").write_text("\n".join(lines) + "\n")
        preset = ["--models-preset", f"{self.there}/models.ini", "--models-max", "1"]
        return [*self.command, *preset, "--host", "127.0.0.1", "--port", str(port)]

    @property
    def version(self) -> str:
        done = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=True)
        return (done.stdout + done.stderr).splitlines()[0].removeprefix("version: ")


def engine_of(program: str | None) -> Engine:
    """The llama-server of this path, or that of Debian's packages in a root file system of its own."""
    if program:
        folder = CACHE / "peers"
        folder.mkdir(parents=True, exist_ok=True)
        return Engine((program,), folder, str(folder))
    script = str(ROOT / "tests" / "real" / "llamacpp-image")
    root = Path(
        subprocess.run([script, "root"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    )
    (root / "m").mkdir(exist_ok=True)
    return Engine(("chroot", str(root), "/usr/bin/llama-server"), root / "m", "/m")


def write_models(engine: Engine, models: Sequence[str], mib: int) -> None:
    """The models, where they are missing or were made of another size."""
    size = replace(SIZE, blocks=max(round((mib << 20) / SIZE.block_bytes), 1))
    for seed, model in enumerate(models, 1):
        made = CACHE / "models" / f"experts-{size.blocks}-{seed}.gguf"
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            tiny_model.write(seed, made, size)
        linked = engine.folder / f"{model}.gguf"
        linked.unlink(missing_ok=True)
        linked.hardlink_to(made)


@contextmanager
def started(command: Sequence[str], port: int) -> Iterator[None]:
    """A program that answers on its port when the block begins, and has ended when it is over."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if not seen(partial(_is_up, process, port), bool):
            raise SystemExit(f"bench peers: {' '.join(command)} does not answer on port {port}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(process: subprocess.Popen[bytes], port: int) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"bench peers: it ended with {process.returncode}: {process.args!r}")
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        return bool(answer.status == 200)
    return False


# The programs that swap


def through(url: str) -> Prepare:
    """What sends requests to a server."""
    server = PlayedServer(url)
    return lambda request, number, now: server.prepare(
        request, number, f"Tell me story {number}.", f"peers-{number}", now
    )


@contextmanager
def relay(name: str, engine: Engine, models: Sequence[str], folder: Path) -> Iterator[Prepare]:
    """A program that was just started, as what sends requests to it."""
    if name == ROUTER:
        with started(engine.route(models, port := free_port()), port):
            yield through(f"http://127.0.0.1:{port}")
    elif name == BY_HAND:
        hand = Hand(engine)
        try:
            yield hand.prepare
        finally:
            hand.stop()
    else:
        services = {
            model: {"command": engine.serve(model, "$$HOST", "$$PORT"), "x-anvil": {"gpus": ["0"]}}
            for model in models
        }
        settings = {"runtime": "process", "gpus": ["0"], "policy": name}
        file = folder / "compose.yaml"
        file.write_text(json.dumps({"name": "anvil-peers", "x-anvil": settings, "services": services}))
        with serving(file, state=folder) as running:
            yield through(f"http://127.0.0.1:{running.port}")


class Hand:
    """Someone who stops one llama-server and starts another, for one client."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = ""
        self._port = 0
        self.stop: Callable[[], object] = lambda: None

    def prepare(self, request: Prompt, number: int, now: Callable[[], float]) -> Callable[[], PlayedAnswer]:
        def ask() -> PlayedAnswer:
            if self._model != request.model:
                self.stop()
                self._start(request.model)
            return through(f"http://127.0.0.1:{self._port}")(request, number, now)()

        return ask

    def _start(self, model: str) -> None:
        self._model, self._port = model, free_port()
        server = started(self._engine.serve(model, "127.0.0.1", str(self._port)), self._port)
        server.__enter__()
        self.stop = lambda: server.__exit__(None, None, None)


# The clients


def sides_of(scenario: str) -> list[int]:
    """How many clients each model has; ValueError if that is no scenario of clients."""
    return [int(count) for count in scenario.split("+")]


def traffic(scenario: str, given: argparse.Namespace) -> Workload:
    """The requests of a scenario."""
    if scenario == SWAP:
        turns = [
            Arrival(0.0, MODELS[n % 2], SHORT_SECONDS, GIVE_UP, sender="one") for n in range(1, SWAPS + 2)
        ]
        return _workload(scenario, 2, turns[:1], lambda: Sessions({"one": turns[1:]}))
    if scenario == STREAM:
        patience = given.long + GIVE_UP
        long = Arrival(0.0, "a", given.long, patience)
        return _workload(scenario, 2, [long, Arrival(ASKED_AFTER, "b", given.answer, patience)])
    clients = [
        Arrival(0.0, model, given.answer, given.seconds + GIVE_UP, sender=f"{model}{n}")
        for model, count in zip(MODELS, sides_of(scenario), strict=False)
        for n in range(count)
    ]
    return _workload(scenario, len(sides_of(scenario)), clients, lambda: Tireless(given.seconds))


def _workload(name: str, models: int, requests: Sequence[Arrival], follow: Any = None) -> Workload:
    loads = dict.fromkeys(MODELS[:models], 1.0)
    return Workload(name, loads, tuple(requests), follow, resident=("a",))


def warm(prepare: Prepare, made: Workload) -> None:
    """Each model once, so that what swaps cost is known; last the one that is loaded when clients come."""
    rest = [model for model in made.load_seconds if model not in made.resident]
    for number, model in enumerate([*rest, *made.resident]):
        answer = prepare(Prompt(0.0, 1, 4, model=model, patience=GIVE_UP), -1 - number, time.monotonic)()
        if error := failure(answer):
            raise error


def play(made: Workload, pace: float, prepare: Prepare, clock: Clock) -> list[PlayedAnswer]:
    """The answers to a scenario; ``pace``: the tokens of a second of service."""
    script = of_workload(made, dict.fromkeys(made.load_seconds, pace))
    return Player(prepare, clock).play(script)


def paces(engine: Engine, counts: Sequence[int]) -> dict[int, float]:
    """Tokens per second of an answer, by how many are made at once."""
    found: dict[int, float] = {}
    with started(engine.serve("a", "127.0.0.1", str(port := free_port())), port):
        prepare = through(f"http://127.0.0.1:{port}")
        for count in counts:
            pace = 8.0 / CALIBRATED  # the first answers only say how long the next ones have to be
            for _ in range(3):
                asked = tuple([Arrival(0.0, "a", CALIBRATED)] * count)
                answers = play(Workload("pace", {"a": 1.0}, asked), pace, prepare, Clock())
                lasted = statistics.median(answer.ended - answer.sent for answer in answers)
                pace = max(answer.tokens for answer in answers) / lasted
            found[count] = pace
    return found


# Figures


def measured(scenario: str, made: Workload, answers: Sequence[PlayedAnswer], seconds: float) -> Row:
    """What the clients of one run saw."""
    if scenario == SWAP:
        return swap_figures(answers)
    if scenario == STREAM:
        return stream_figures(answers)
    return client_figures([str(each.sender) for each in made.requests], answers, seconds)


def swap_figures(answers: Sequence[PlayedAnswer]) -> Row:
    """Of one client that asked two models in turn."""
    took = [after.first - before.ended for before, after in pairwise(answers) if not math.isnan(after.first)]
    return {
        "swap s": statistics.median(took) if took else math.nan,
        "longest s": max(took, default=math.nan),
        "broken": _broken(answers),
    }


def stream_figures(answers: Sequence[PlayedAnswer]) -> Row:
    """Of a long stream of a, and of b, which was asked for meanwhile."""
    [long] = [each for each in answers if each.model == "a"]
    [other] = [each for each in answers if each.model == "b"]
    return {
        "finished": long.status == 200,
        "stream s": long.ended - long.due,
        "b waited s": other.first - other.due,
        "b after the stream s": other.first - long.ended,
        "broken": _broken(answers),
    }


def client_figures(clients: Sequence[str], answers: Sequence[PlayedAnswer], seconds: float) -> Row:
    """Of clients that asked again and again for so many seconds."""
    begun = sorted([each for each in answers if not math.isnan(each.first)], key=lambda each: each.first)
    waits = sorted([each.first - each.due for each in begun])
    whole = Counter([each.session for each in answers if each.status == 200 and each.ended <= seconds])
    counts = [whole[client] for client in clients]
    return {
        "answers": sum(counts),
        "mean s": mean(waits, math.nan),
        "RMS s": root_mean_square(waits),
        "P50 s": quantile(waits, 0.5),
        "P95 s": quantile(waits, 0.95),
        "longest s": max(waits, default=math.nan),
        "least/most": fairness(counts) or 0.0,
        "unserved": counts.count(0) > 0,
        "broken": _broken(answers),
        "swaps": sum(a.model != b.model for a, b in pairwise(begun)),
    }


def _broken(answers: Sequence[PlayedAnswer]) -> int:
    return sum(each.status != 200 for each in answers)


def medians(runs: Sequence[Row]) -> Row:
    """One row of the rounds of one program in one scenario; what broke is counted in all of them."""
    row: Row = {}
    for key, value in runs[0].items():
        values = [run[key] for run in runs]
        if key == "broken":
            row[key] = sum(values)
        elif isinstance(value, bool):
            row[key] = f"{sum(values)} of {len(values)}"
        elif isinstance(value, (int, float)):
            row[key] = float(statistics.median(values))
        else:
            row[key] = value
        if key == "longest s":
            row["worst s"] = max(values)
    return row


# Runs


def run_all(given: argparse.Namespace, engine: Engine, pace: Mapping[int, float]) -> list[Row]:
    runs: list[Row] = []
    for repetition in range(given.rounds):
        for scenario in given.only:
            takers = [name for name in given.through if scenario == SWAP or name != BY_HAND]
            for name in takers if repetition % 2 == 0 else takers[::-1]:
                made = traffic(scenario, given)
                with (
                    tempfile.TemporaryDirectory(prefix="bench-peers-") as folder,
                    relay(name, engine, tuple(made.load_seconds), Path(folder)) as prepare,
                ):
                    warm(prepare, made)
                    answers = play(made, pace[_at_once(scenario)], prepare, Clock())
                row = {"scenario": scenario, "through": name}
                runs.append({**row, **measured(scenario, made, answers, given.seconds)})
                tell({"round": repetition + 1, **runs[-1], "load average": os.getloadavg()[0]})
    return runs


def _at_once(scenario: str) -> int:
    """How many answers are made at the same time."""
    return 1 if scenario in (SWAP, STREAM) else max(sides_of(scenario))


def summary(runs: Sequence[Row]) -> list[Row]:
    """The medians of each program in each scenario, in the order in which they were first measured."""
    kinds = dict.fromkeys((run["scenario"], run["through"]) for run in runs)
    return [medians([run for run in runs if (run["scenario"], run["through"]) == kind]) for kind in kinds]


def about(given: argparse.Namespace, engine: Engine, pace: Mapping[int, float], load: float) -> str:
    """How it was measured, in a sentence or two."""
    weights = (engine.folder / "a.gguf").stat().st_size >> 20
    tokens = ", ".join(f"{each * given.answer:.0f} for {count} at once" for count, each in pace.items())
    facts = [
        f"llama.cpp {engine.version}",
        f"anvil-mux {commit() or '?'}",
        f"Python {platform.python_version()}",
        f"models of {weights} MiB",
        f"tokens in {given.answer:g} s: {tokens}",
        f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after",
    ]
    machine = f"{os.cpu_count()} CPUs, {cpu_name()}"
    words = f"`bin/bench peers {given.words}`" if given.words else "`bin/bench peers`"
    when = time.strftime("%Y-%m-%d")
    return f"Medians of {given.rounds} rounds ({when}, {words}, {machine}; {'; '.join(facts)}):\n"


def scenarios(text: str) -> list[str]:
    for name in names(text):
        if name not in (SWAP, STREAM):
            sides = sides_of(name)
            if not 2 <= len(sides) <= len(MODELS) or min(sides) < 1:
                raise ValueError(name)
    return names(text)


def relays(text: str) -> list[str]:
    for name in names(text):
        if name not in (ROUTER, BY_HAND, *POLICIES):
            raise ValueError(name)
    return names(text)


def options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(3)")
    parser.add_argument("--only", type=scenarios, default=list(SCENARIOS), metavar="SCENARIO,..")
    parser.add_argument("--through", type=relays, default=list(RELAYS), metavar="PROGRAM,..")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="for which clients ask (60)")
    parser.add_argument("--answer", type=float, default=2.0, metavar="S", help="how long answers take (2)")
    parser.add_argument(
        "--long",
        type=float,
        default=48.0,
        metavar="S",
        help="how long the stream is, at the pace of short answers (48)",
    )
    parser.add_argument("--mib", type=int, default=1200, metavar="N", help="how large models are (1200)")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="of this machine, instead of Debian's")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write each run")
    parser.add_argument("--json", action="store_true", help="each run and the medians")
    given = parser.parse_args(words)
    given.words = " ".join(words)
    return given


def main() -> None:
    given = options(sys.argv[1:])
    load = os.getloadavg()[0]
    engine = engine_of(given.llama_server)
    needed = max([2, *(len(sides_of(each)) for each in given.only if each not in (SWAP, STREAM))])
    write_models(engine, MODELS[:needed], given.mib)
    pace = paces(engine, sorted({_at_once(scenario) for scenario in given.only}))
    runs = run_all(given, engine, pace)
    if given.csv:
        with given.csv.open("w", newline="") as file:
            columns = dict.fromkeys(key for run in runs for key in run)
            writer = csv.DictWriter(file, [*columns])
            writer.writeheader()
            writer.writerows(runs)
    text = about(given, engine, pace, load)
    if given.json:
        print(json.dumps({"about": text, "runs": runs, "medians": summary(runs)}, indent=1))
    else:
        print(text, table(summary(runs)), sep="\n")


if __name__ == "__main__":
    main()
