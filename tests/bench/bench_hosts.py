"""What another host costs: a swap there beside a swap here, and requests with a cluster beside without one.

A cluster of real raylets runs in a network of its own on this machine (tests/cluster/rig.py), so what is
measured is the control plane: the multiplexer, the child process, Ray, the agent. Engines are the stub that
costs nothing (stub_engine.c). Of each pair the halves take turns in one run, and what counts are medians.

    swap        two models that evict each other on the own host, and two on another: one request to each in
                turn, so each is a swap (drain, stop, start, answer). Added: the difference of the medians.
    requests    requests/s over 16 keep-alive connections (load.c) to a model that is resident on the own
                host: through an anvil-mux with --cluster, and through one without

Needs root, Ray and a C compiler. Nothing here passes or fails: a missed target is a finding, not an error.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.bench_relay import BenchError, build  # noqa: E402
from tests.cluster import rig  # noqa: E402
from tests.cluster.site import PORT, Site  # noqa: E402

ALONE = PORT + 1
"""The port of the anvil-mux without a cluster."""
TARGET_MS = 20.0


def service(stub, model, **settings):
    return {"command": [str(stub), "--model", model], "x-anvil": {"model": model, "gpus": ["0"], **settings}}


def content(stub, name, *, cluster):
    services = {model: service(stub, model) for model in ("here-1", "here-2")}
    if cluster:
        services |= {model: service(stub, model, hosts=["gpu-a"]) for model in ("there-1", "there-2")}
    top = {"runtime": "process", "policy": "eager", "on_exit": "stop", "gpus": ["0"]}
    if cluster:
        top["machines"] = {"gpu-a": {"gpus": ["0"]}}
    return {"name": name, "x-anvil": top, "services": services}


def swap_ms(site, model):
    begun = time.perf_counter()
    status, _, answer = site.complete(model)
    if status != 200:
        raise BenchError(f"{model}: {answer}")
    return (time.perf_counter() - begun) * 1000.0


def measure_swaps(site, repeat):
    """Return milliseconds of swaps here and there, in turns."""
    found = {"here": [], "there": []}
    for number in range(repeat + 1):
        for where in ("here", "there") if number % 2 else ("there", "here"):
            for model in (f"{where}-1", f"{where}-2"):
                took = swap_ms(site, model)
                if number:  # the first round makes folders and fills caches
                    found[where].append(took)
    return found


def requests_per_second(site, load, port, seconds):
    where = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--path",
        "/v1/chat/completions",
        "--model",
        "here-1",
    ]
    done = site.head.run([str(load), "rps", "--connections", "16", "--seconds", str(seconds), *where])
    if done.returncode:
        raise BenchError(done.stdout)
    return json.loads(done.stdout)["rps"]


def run(options):
    stub, load = build("stub_engine.c"), build("load.c", "-lm")
    with rig.Cluster() as cluster, tempfile.TemporaryDirectory(prefix="bench-hosts-") as folder:
        for name in ("head", "gpu-a", "gpu-b"):
            cluster.add(name)
        cluster.wait()
        site = Site(cluster, Path(folder), content(stub, "bench-hosts", cluster=True))
        site.mux = site.begin(words=["--access-log", "off"])
        site.becomes("gpu-a", "here")
        swaps = measure_swaps(site, options.repeat)
        alone = Site(cluster, Path(tempfile.mkdtemp(dir=folder)), content(stub, "bench-alone", cluster=False))
        alone.mux = alone.begin_alone(ALONE, "--access-log", "off", state=Path(folder) / "alone")
        rates = {"with": [], "without": []}
        for port in (PORT, ALONE):
            site.complete("here-1", port)
        for number in range(options.repeat // 4 + 1):
            for which in ("with", "without") if number % 2 else ("without", "with"):
                port = PORT if which == "with" else ALONE
                rates[which].append(requests_per_second(site, load, port, options.seconds))
        for each in (alone, site):
            each.mux.process.terminate()
            each.mux.process.wait(60)
    return swaps, rates


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=20, help="swaps of each kind (default 20)")
    parser.add_argument("--seconds", type=int, default=2, help="of each measure of requests (default 2)")
    options = parser.parse_args()
    if why := rig.why_not():
        raise SystemExit(f"bench hosts: {why}")
    try:
        swaps, rates = run(options)
    except BenchError as error:
        raise SystemExit(f"bench hosts: {error}") from None
    here, there = (statistics.median(swaps[where]) for where in ("here", "there"))
    print(f"swap on the own host      {here:8.1f} ms   (median of {len(swaps['here'])})")
    print(f"swap on another host      {there:8.1f} ms   (median of {len(swaps['there'])})")
    print(f"added                     {there - here:8.1f} ms   (target: under {TARGET_MS:g} ms)")
    with_it, without = (statistics.median(rates[which]) for which in ("with", "without"))
    print(
        f"requests/s with a cluster {with_it:8.0f}      without {without:.0f}: ratio {with_it / without:.3f}"
    )


if __name__ == "__main__":
    main()
