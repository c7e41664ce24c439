"""What the sources report of their servers, on llama-servers in containers.

    policies  llmux's report: its profiles of traffic under every policy. Swaps, waits, and the share of time
              in which the GPU serves; and the five questions of docs/metrics.md, asked of a real Prometheus
              (Debian's package, if it is there) that has scraped every second.
    routing   LPWL's report: sessions of a trace, with lengths and pauses that a few cores bear, at three
              replicas with prefix caches, under routing policies in turns. Time to the first token, share of
              the input that was cached, balance; beside it the same traffic in `simulate --routing`, and how
              far the two agree on the order of the policies.
    simulate  How near the simulation of `replay` comes: profiles in turns, each beside its simulation, and
              what of the difference comes of answers and loads that took longer than in the warm-up.

Each run of the first two begins with engines that were just started. The engines compute a tiny model on the
CPU of this machine, so seconds are worth nothing elsewhere; what counts is one policy beside another.

Nothing here passes or fails: a missed target is a finding, not an error.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from anvil_mux.lab.workload import find_trace, read_trace
from anvil_mux.scheduler.policies import POLICIES
from tests.bench import bench_relay
from tests.bench.bench_relay import show
from tests.prometheus.server import PROGRAM, Prometheus
from tests.running import Running, serving

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models"
IMAGE = "anvil-mux-test/llamacpp"
PROJECT = "anvil-bench-live"

PROFILES = ("single", "balanced", "bursty", "dominant", "interleave")
SIMULATED = ("balanced", "dominant")
PACE = ("--tokens-per-second", "400")
"""A tenth of what one core computes of a tiny model, so that a second of service takes a tenth of one."""
LONGER = ("--tokens-per-second", "1500")
"""Longer answers: at those of PACE, `dominant` is where a hundredth of a second makes one swap two."""
ROUTING = ("round_robin", "sticky", "lmetric", "least_prefill_work", "least_delay")
TRACE = "claude_code_le64k"
REPLICAS = 3
SLOTS, CONTEXT = 4, 20_480

QUERIES = re.findall(r"^```promql\n(.*?)^```$", (ROOT / "docs" / "metrics.md").read_text(), re.M | re.S)
QUESTIONS = ("serves", "swaps/s", "wait p95", "failed/s", "phase s/s")

Row = dict[str, Any]


# A server


def engine(name: str, weights: str, slots: int, **settings: object) -> dict[str, Any]:
    """The service of one llama-server."""
    command = f"llama-server -m /m/{weights} --alias {name} --host 0.0.0.0 --port 8080 -t 1"
    command += f" --override-kv llama.context_length=int:{CONTEXT}"
    return {
        "image": IMAGE,
        "profiles": ["llm"],
        "command": [*command.split(), "-c", str(CONTEXT * slots), "-np", str(slots)],
        "ports": ["127.0.0.1::8080"],
        "volumes": [f"{MODELS}:/m:ro"],
        "init": True,
        "x-anvil": settings,
    }


@contextmanager
def server(
    folder: Path, services: Mapping[str, Any], settings: Mapping[str, Any], *flags: str
) -> Iterator[Running]:
    """An anvil-mux before engines that are started for it, and removed after it."""
    file = folder / "compose.yaml"
    document = {"name": PROJECT, "x-anvil": settings, "services": services}
    file.write_text(json.dumps(document))  # JSON is YAML
    try:
        with serving(file, *flags, state=folder) as running:
            yield running
    finally:
        down = ["docker", "compose", "-f", str(file), "--profile", "*", "down", "-t", "1"]
        subprocess.run(down, capture_output=True, check=False)


def anvil_mux(folder: Path, *words: str) -> Any:
    """What a command says as JSON."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "anvil_mux", *words, "--json"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# Policies


def policies(given: argparse.Namespace, folder: Path) -> list[Row]:
    services = {name: engine(name, f"tiny-{n}.gguf", 2, gpus=["0"]) for n, name in enumerate("ab", 1)}
    rows = []
    for policy in given.policies or list(POLICIES):
        settings = {"gpus": ["0"], "policy": policy}
        with ExitStack() as stack:
            mux = stack.enter_context(server(folder, services, settings))
            since = time.monotonic()
            scraper = Prometheus(folder, mux.port) if PROGRAM else None
            if scraper:
                stack.callback(scraper.close)
            for profile in given.profiles:
                rows.append({"policy": policy, **measure_policy(folder, mux, profile, given.repeat)})
                tell(rows[-1])
            if scraper:
                said = asked(scraper, time.monotonic() - since)
                rows.append({"policy": policy, "profile": "(all)", **said})
                tell(rows[-1])
        shutil.rmtree(folder / "data", ignore_errors=True)
    return rows


def measure_policy(folder: Path, mux: Running, profile: str, repeat: int) -> Row:
    names = ["--profile", profile, "--model", "a=a", "--model", "b=b", *PACE]
    url = ["--url", f"http://127.0.0.1:{mux.port}", "--repeat", str(repeat)]
    runs = [run for run in anvil_mux(folder, "replay", *names, *url) if run["at"] != "simulated"]
    return {
        "profile": profile,
        "swaps": fmean(run["swaps"] for run in runs),
        "wait s": fmean(run["wait_mean_seconds"] for run in runs),
        "p95 s": fmean(run["wait_p95_seconds"] for run in runs),
        "longest s": fmean(run["wait_max_seconds"] for run in runs),
        "serves": fmean(run["serving_ratio"] for run in runs),
        "failed": sum(run["failed"] for run in runs),
    }


def asked(scraper: Prometheus, seconds: float) -> Row:
    """The answers to the five questions over all profiles of a policy, warm-ups and pauses among them."""
    answers = [scraper.ask(query.strip().replace("[5m]", f"[{seconds:.0f}s]")) for query in QUERIES]
    return {
        name: answer.get("", sum(answer.values())) for name, answer in zip(QUESTIONS, answers, strict=True)
    }


# Routing


def routing(given: argparse.Namespace, folder: Path) -> list[Row]:
    trace = cut(folder / "trace.jsonl", given)
    services = {
        f"coder-{n}": engine(
            "coder",
            "tiny-1.gguf",
            SLOTS,
            model="coder",
            gpus=[str(n)],
            kv_tokens=SLOTS * CONTEXT,
            preload=True,
        )
        for n in range(REPLICAS)
    }
    rows: list[Row] = []
    for repetition in range(given.repeat):
        order = given.policies if repetition % 2 == 0 else given.policies[::-1]
        for policy in order:
            settings = {"gpus": [str(n) for n in range(REPLICAS)], "routing": policy}
            with server(folder, services, settings) as mux:
                rows.append(
                    {"policy": policy, "at": "live", **measure_routing(folder, mux, trace, repetition)}
                )
                tell(rows[-1])
    means = [mean([row for row in rows if row["policy"] == policy]) for policy in given.policies]
    both = [*means, *simulated(folder, trace, given)]
    orders = ("ttft ms", "e2e ms", "hit")
    return both + [{"order by": each, "rank correlation": agreement(both, each)} for each in orders]


def cut(file: Path, given: argparse.Namespace) -> Path:
    """A trace of a few sessions, with all lengths and moments divided."""
    whole = read_trace(find_trace(TRACE))
    drawn = whole.draw(given.seed, given.sessions)
    block = whole.block_tokens // given.shorter
    header = {"trace": "cut", "block_tokens": block, "seconds": whole.seconds / given.faster + 1}
    lines = [
        {
            "at": round(each.at / given.faster, 3),
            "in": max(each.tokens // given.shorter, 1),
            "out": max(each.output // given.shorter, 1),
            "blocks": ",".join(map(str, each.blocks)),
        }
        for each in drawn
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return file


def measure_routing(folder: Path, mux: Running, trace: Path, seed: int) -> Row:
    url = ["--url", f"http://127.0.0.1:{mux.port}", "--seed", str(seed)]
    [run] = anvil_mux(folder, "replay", "--trace", str(trace), "--model", "coder", *url)
    seen = run["clients"]
    return {
        "requests": seen["requests"],
        "failed": seen["failed"],
        "hit": seen["cache_hit_ratio"],
        "ttft ms": seen["ttft"]["mean"] * 1e3,
        "ttft p95 ms": seen["ttft"]["p95"] * 1e3,
        "e2e ms": seen["e2e"]["mean"] * 1e3,
        "balance": seen["request_balance"],
    }


def mean(rows: Sequence[Row]) -> Row:
    """The means of what was measured of one policy."""
    numbers = {key: [row[key] for row in rows] for key, value in rows[0].items() if isinstance(value, float)}
    return {**rows[0], **{key: fmean(values) for key, values in numbers.items()}}


def simulated(folder: Path, trace: Path, given: argparse.Namespace) -> list[Row]:
    """The same traffic in virtual time, on replicas that are as fast as one was measured to be."""
    profile = folder / "profile.json"
    services = {"coder": engine("coder", "tiny-1.gguf", SLOTS, gpus=["0"], preload=True)}
    with server(folder, services, {"gpus": ["0"]}) as mux:
        lengths = ["--prompts", "256,2048,8192", "--batches", "1,4", "--lengths", "256,4096"]
        asked = ["profile", "coder", "--url", f"http://127.0.0.1:{mux.port}", *lengths]
        profile.write_text(json.dumps(anvil_mux(folder, *asked)))
    policies = ["--policy", ",".join(given.policies), "--replicas", str(REPLICAS)]
    fast = ["--engine-profile", str(profile), "--engine", f"kv_tokens={SLOTS * CONTEXT}"]
    runs = anvil_mux(folder, "simulate", "--routing", "--trace", str(trace), *policies, *fast)
    return [
        {
            "policy": run["policy"],
            "at": "simulated",
            "requests": run["requests"],
            "hit": run["cache_hit_ratio"],
            "ttft ms": run["ttft_mean_ms"],
            "e2e ms": run["e2e_mean_ms"],
            "balance": run["request_balance"],
        }
        for run in runs
    ]


def agreement(rows: Sequence[Row], figure: str) -> float:
    """How far two orders of the policies agree, from -1 to 1 (Spearman's rank correlation)."""
    ranks = []
    for at in ("live", "simulated"):
        order = sorted([row for row in rows if row["at"] == at], key=lambda row: row[figure])
        ranks.append({row["policy"]: rank for rank, row in enumerate(order)})
    count, (live, virtual) = len(ranks[0]), ranks
    apart = sum((live[policy] - virtual[policy]) ** 2 for policy in live)
    return 1 - 6 * apart / (count * (count**2 - 1))


# Measured beside simulated


def simulate(given: argparse.Namespace, folder: Path) -> list[Row]:
    services = {name: engine(name, f"tiny-{n}.gguf", 2, gpus=["0"]) for n, name in enumerate("ab", 1)}
    rows: list[Row] = []
    with server(folder, services, {"gpus": ["0"]}) as mux:
        for name in services:
            mux.chat(name, max_tokens=1)  # The first load makes a container, and takes longer for that.
        for repetition in range(given.repeat):
            for profile in given.profiles if repetition % 2 == 0 else given.profiles[::-1]:
                rows.append(measure_beside_simulation(folder, mux, profile))
                tell(rows[-1])
    return rows + [summary([row for row in rows if row["profile"] == each]) for each in given.profiles]


def measure_beside_simulation(folder: Path, mux: Running, profile: str) -> Row:
    words = ["--profile", profile, "--model", "a=a", "--model", "b=b", *LONGER, "--warm-up", "3"]
    measured, virtual = anvil_mux(folder, "replay", *words, "--url", f"http://127.0.0.1:{mux.port}")
    difference = virtual["difference"]
    took = {
        f"{what} s{when}": difference[f"{what}_seconds"][key]
        for what in ("answer", "load")
        for when, key in ((", warm-up", "expected"), ("", "seen"))
    }
    return {
        "profile": profile,
        "load average": os.getloadavg()[0],
        "failed": measured["failed"],
        "swaps": measured["swaps"],
        "simulated swaps": virtual["swaps"],
        "wait s": measured["wait_mean_seconds"],
        "simulated wait s": virtual["wait_mean_seconds"],
        "difference %": 100 * difference["ratio"],
        "of answers s": difference["of_answers_seconds"],
        "of swaps s": difference["of_swaps_seconds"],
        "of others s": difference["of_others_seconds"],
        **took,
    }


def summary(rows: Sequence[Row]) -> Row:
    """How near the runs of one profile came: the median, the worst, and that of the mean of all."""
    waits = [fmean(row[key] for row in rows) for key in ("wait s", "simulated wait s")]
    apart = sorted([row["difference %"] for row in rows], key=abs)
    return {
        "profile": rows[0]["profile"],
        "runs": len(rows),
        "median difference %": apart[len(apart) // 2],
        "worst difference %": apart[-1],
        "difference of the means %": 100 * (waits[0] / waits[1] - 1),
    }


# Output


def tell(row: Row) -> None:
    print(" ".join(f"{key}={show(value)}" for key, value in row.items()), file=sys.stderr, flush=True)


def table(rows: Sequence[Row]) -> str:
    """Rows of Markdown; those with other columns follow in a table of their own."""
    groups = groupby(rows, key=lambda row: [*row])
    return "\n\n".join(
        bench_relay.table(head, [[show(value) for value in row.values()] for row in group])
        for head, group in groups
    )


def names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("policies", "routing", "simulate"))
    parser.add_argument("--policies", type=names, metavar="NAME,..", help="by default those of the source")
    parser.add_argument("--profiles", type=names, metavar="NAME,..", help="by default those of the source")
    parser.add_argument("--repeat", type=int, metavar="N", help="how often (1; of simulate: 3)")
    parser.add_argument("--sessions", type=int, default=12, metavar="N", help="of the trace (12)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which sessions, and when (0)")
    parser.add_argument("--shorter", type=int, default=4, metavar="N", help="divide lengths by it (4)")
    parser.add_argument("--faster", type=float, default=15.0, metavar="F", help="divide moments by it (15)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.profiles = given.profiles or (SIMULATED if given.what == "simulate" else PROFILES)
    given.repeat = given.repeat or (3 if given.what == "simulate" else 1)
    with tempfile.TemporaryDirectory(prefix="bench-live-") as folder:
        if given.what == "policies":
            rows = policies(given, Path(folder))
        elif given.what == "simulate":
            rows = simulate(given, Path(folder))
        else:
            given.policies = given.policies or list(ROUTING)
            rows = routing(given, Path(folder))
    print(json.dumps(rows, indent=1) if given.json else table(rows))


if __name__ == "__main__":
    main()
