"""Real engines measured: the commands ``replay``, ``profile`` and ``bench swap``.

``replay`` sends traffic to a running server, beside another one, and beside its simulation; ``profile``
measures how fast an engine is, and ``bench swap`` how long swaps take.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from anvil_mux.cli.arguments import (
    add_clients,
    add_files,
    add_json,
    address,
    argument,
    clients,
    configuration,
    read_positive,
    read_sizes,
    reader,
    running_at,
    subcommand,
    with_scheme,
)
from anvil_mux.cli.output import (
    FAILED,
    INTERRUPTED,
    Columns,
    complain,
    opened,
    print_columns,
    print_json,
    print_table,
    progress,
    say,
)
from anvil_mux.errors import ConfigError, MuxError

if TYPE_CHECKING:
    from anvil_mux.config.config import Config
    from anvil_mux.lab.player import PlayedServer
    from anvil_mux.lab.replay import Replay
    from anvil_mux.lab.report import LiveRun
    from anvil_mux.lab.workload import Trace, Workload

# replay

TTFT_AXIS = "time to the first token (s)"


def add_replay(command: argparse.ArgumentParser) -> None:
    add = partial(argument, command)
    add(
        "--profile NAME[,NAME]",
        "a profile of generated traffic, as in `simulate`",
        type=reader("lab.study:choose_profiles"),
        default=(),
    )
    add_clients(command)
    add(
        "--trace FILE",
        "a workload file or prompt trace, or the name of a bundled one; may be repeated",
        action="append",
        default=[],
    )
    add("--log EVENTS", "replay the clients of an event log (`serve --event-log`)")
    add("--url", "the server to send to; by default ANVIL_URL, or the anvil-mux that runs here")
    add("--against URL", "a second server to compare with, measured in turns with the first")
    add(
        "--model [A=]B",
        "the server's name for model A of the traffic; without A=, for every model",
        action="append",
        default=[],
    )
    add("--key-env NAME", "the variable that holds the server's API key (default ANVIL_API_KEY)")
    add("--against-key-env NAME", "the variable that holds the API key of --against")
    add("--repeat N", "how often to run it (default 1)", type=read_positive, default=1)
    add("--speed F", "play the traffic F times as fast", type=_factor, default=1.0)
    add("--limit N", "send at most N requests", type=read_positive)
    add("--seed N", "the seed for random traffic and prompts (default 0)", type=int, default=0)
    add("--sessions N", "play N sessions of a prompt trace", type=read_positive)
    add("--token-scale F", "multiply the token counts of a prompt trace by this", type=_factor, default=1.0)
    add(
        "--prompt-tokens N",
        "prompt length of requests whose workload does not give it (default 32)",
        type=read_positive,
        default=32,
    )
    add(
        "--tokens-per-second N",
        "how many tokens correspond to a second of service; by default as measured in the warm-up",
        type=_factor,
    )
    add("--chat", "use /v1/chat/completions instead of /v1/completions", action="store_true")
    add("--most N", "the most requests at once (default 512)", type=read_positive, default=512)
    add(
        "--warm-up N",
        "load and measure each model N times before the run (default 1); 0: not at all",
        type=_count,
        default=1,
    )
    add(
        "--simulate COMPOSE",
        "also simulate the same traffic, with this compose file or that of the anvil-mux that runs here",
        nargs="?",
        const="",
    )
    add("--csv FILE", "write every request to a CSV file")
    add("--plot FILE", "plot the resident models, queues and waits (needs matplotlib)")
    add_json(command)
    command.epilog = (
        "The first table has the columns of `simulate`, as reported by the server if it is an anvil-mux; "
        "SERVING is the share of the time in which its GPUs were not being swapped. The second shows what "
        "clients saw, in seconds: TTFT is the time to the first token, E2E to the last, TPOT-MS the "
        "milliseconds for each further token, LATE how much too late a request was sent at most because this "
        "machine was busy. RATIO divides the second server by the first. Exit code 1: nothing was answered."
    )


def _count(text: str) -> int:
    return 0 if text == "0" else read_positive(text)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def replay(given: argparse.Namespace) -> int:
    from anvil_mux.lab import plot
    from anvil_mux.lab.player import failure
    from anvil_mux.lab.replay import Replay, ReplaySettings, WatchedServer
    from anvil_mux.lab.workload import ModelNames

    if not (given.profile or given.trace or given.log):
        given.refuse("say what to send: --profile NAME, --trace FILE or --log EVENTS")
    traffic = list(_traffic(given))
    servers = [_server(given, given.url, given.key_env, "--url")]
    if given.against:
        servers.append(_server(given, given.against, given.against_key_env, "--against"))
    names = [each.name for each in fields(ReplaySettings)]
    settings = ReplaySettings(**{name: getattr(given, name) for name in names})
    config = _config(given, servers[0].url)
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(opened(given.csv)) if given.csv else None
        if given.plot:
            plot.check_file(given.plot)
        watched = [WatchedServer(server, say) for server in servers]
        replay = Replay(watched, settings, ModelNames.parse(given.model), config, say=say, progress=progress)
        problem = _play(replay, traffic)
        _report(given, replay, config, file)
    if problem:
        raise problem
    if replay.was_interrupted:
        return INTERRUPTED
    errors = [failure(answer) for run in replay.runs for answer in run.answers]
    if all(errors):
        first = f": {errors[0].message}" if errors and errors[0] else ""
        return complain(f"nothing was answered{first}", FAILED)
    return 0


def _play(replay: Replay, traffic: Iterable[Workload | Trace]) -> MuxError | None:
    """Play all of the traffic; what ends that early, once there are figures to be shown."""
    try:
        for made in traffic:
            if not replay.was_interrupted:
                replay.play(made)
    except MuxError as error:
        if not replay.runs:
            raise
        return error
    return None


def _traffic(given: argparse.Namespace) -> Iterator[Workload | Trace]:
    from anvil_mux.lab import player, recording, workload

    known = {**workload.PROFILES, "clients": clients(given).workload}
    for name in given.profile:
        yield known[name](given.seed)
    for name in given.trace:
        yield player.find_traffic(name)
    if given.log:
        log = recording.read(given.log, None, say)
        yield recording.workload_of(log.runs, log.name)


def _server(given: argparse.Namespace, url: str | None, key_env: str | None, flag: str) -> PlayedServer:
    from anvil_mux.lab.player import CHAT, COMPLETIONS, PlayedServer

    if key_env and key_env not in os.environ:
        given.refuse(f"{key_env} is not set; it should hold the API key of the server of {flag}")
    key = os.environ[key_env] if key_env else os.environ.get("ANVIL_API_KEY", "") if flag == "--url" else ""
    at = with_scheme(url) if url else address(given)
    return PlayedServer(at, key, CHAT if given.chat else COMPLETIONS)


def _config(given: argparse.Namespace, url: str) -> Config | None:
    """The configuration that is simulated: of the file given, or of the anvil-mux that serves here."""
    if given.simulate:
        return configuration([given.simulate])
    here = running_at(url)
    if here and all(Path(file).exists() for file in here.files):
        return configuration(here.files)
    if given.simulate is not None:
        given.refuse(
            "no anvil-mux serves here at this address: name its compose file with --simulate COMPOSE"
        )
    return None


def _report(given: argparse.Namespace, replay: Replay, config: Config | None, file: TextIO | None) -> None:
    from anvil_mux.lab import report

    if file:
        report.write_answers_csv(replay.runs, file)
    if given.plot:
        _draw(given.plot, replay.runs, config)
    if given.json:
        print_json([run.row() for run in replay.runs])
        return
    if replay.runs:
        print_table(report.REPLAY_HEAD, report.replay_table(replay.runs))
        print()
        print_table(report.CLIENTS_HEAD, report.clients_table(replay.runs))
    for run in replay.runs:
        if run.comparison:
            print("", *run.comparison.sentences(), sep="\n")


def _draw(path: str, runs: Iterable[LiveRun], config: Config | None) -> None:
    """Draw the first run at each server; without a configuration only the times to the first token."""
    from anvil_mux.config.values import DEFAULT_ROUTING
    from anvil_mux.lab import plot, report

    first = [run for run in runs if run.repeat == 0]
    drawn = [
        (f"{run.script}, {run.at}", run.told.events, config, run.told.begins)
        for run in first
        if run.told and config
    ]
    if drawn:
        plot.draw(drawn, path)
    elif panels := report.replay_panels(first):
        with plot.picture(path) as figure:
            plot.draw_dots(panels, DEFAULT_ROUTING, TTFT_AXIS, figure)


# profile


def add_profile(command: argparse.ArgumentParser) -> None:
    argument(command, "-o --output FILE", "the file to write; by default standard output")
    argument(command, "--repeat N", "requests for each figure (default 3)", type=int, default=3)
    for name, what in (
        ("prompts", "prompt lengths to measure, in tokens"),
        ("batches", "numbers of concurrent requests to measure"),
        ("lengths", "lengths of the concurrent requests, in tokens"),
    ):
        argument(command, f"--{name} N,N", what, type=read_sizes)


def profile(given: argparse.Namespace) -> int:
    from anvil_mux.lab import profiler
    from anvil_mux.lab.player import PlayedServer

    server = PlayedServer(address(given), os.environ.get("ANVIL_API_KEY", ""))
    engine = profiler.Profiler(server, given.model)
    found = profiler.measure(
        engine,
        say,
        prompts=given.prompts or profiler.PROMPTS,
        batches=given.batches or profiler.BATCHES,
        lengths=given.lengths or profiler.LENGTHS,
        repeat=max(given.repeat, 1),
    )
    if given.output:
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say(f"written to {given.output}; use it: x-anvil: {{profile: {given.output}}}")
    else:
        print_json(found)
    return 0


# bench


def add_bench(parser: argparse.ArgumentParser) -> None:
    about = "Measure how long swaps take, and how much of that is anvil-mux's overhead"
    command = subcommand(parser.add_subparsers(metavar="WHAT", required=True), "swap", about)
    add = partial(argument, command)
    add_files(command)
    add("--repeat N", "measure each swap N times (default 5)", type=read_positive, default=5)
    add(
        "--burst N",
        "also measure N requests that wait for a swap, compared with N that are sent directly",
        type=read_positive,
        default=0,
    )
    add(
        "--also FILE",
        "also measure the services of another compose file (a separate project); may be repeated",
        action="append",
        default=[],
    )
    add("--csv FILE", "write every swap to a CSV file, with its phases and its engine")
    add("--plot FILE", "plot the phases, one panel for each engine (needs matplotlib)")
    add_json(command)
    command.epilog = (
        "Swaps all pairs of backends in the file that do not fit side by side, with each of their standby "
        "levels, alternating between anvil-mux and the same steps by hand. Running engines of the project "
        "are stopped first, and nothing is left running. Times are medians in seconds, from the end of the "
        "last request to the first byte of the next answer. OVERHEAD is how much longer a swap took than by "
        "hand; half of the swaps are within HALF-WITHIN, the machine's noise. COLD/BACK is the time of a "
        "cold start divided by that of coming back from standby. GIB is the GPU memory that was loaded "
        "again, BUS what the GPU's link could carry in a second. A burst is measured from the moment the "
        "model is ready until all requests are answered; DIRECT is the same number of requests sent at once "
        "to a freshly started engine, each on its own connection. Exit code 1: something could not be "
        "measured."
    )


def bench(given: argparse.Namespace) -> int:
    from anvil_mux.lab import swap_figures, swaps

    configs = [configuration(given.files), *(configuration([file]) for file in given.also)]
    names = [backend.name for config in configs for backend in config.backends]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"{', '.join(twice)}: in more than one file; give each service a name of its own"])
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(opened(given.csv)) if given.csv else None
        figure = None
        if given.plot:
            from anvil_mux.lab import plot

            figure = outputs.enter_context(plot.picture(given.plot))
        found = swaps.measure_all(configs, given.repeat, say, burst=given.burst)
        rows, burst_rows = swap_figures.figures(found.swaps), swap_figures.burst_figures(found.bursts)
        if file:
            swap_figures.write_csv(found.swaps, file)
        if figure and rows:
            plot.draw_phases(swap_figures.bars(rows, found.unmeasured), swap_figures.names(rows), figure)
    if given.json:
        asked = [each.to_json() for each in found.unmeasured if each.named]
        print_json([*map(asdict, rows), *map(asdict, burst_rows), *asked])
    else:
        tables: list[tuple[Columns[Any], Sequence[object]]] = [
            (swap_figures.columns(rows), rows),
            (swap_figures.BURSTS, burst_rows),
            (swap_figures.UNMEASURED, found.unmeasured),
        ]
        for columns, lines in tables:
            if lines:
                print_columns(columns, lines)
    code = max([complain(f"not measured: {why}", FAILED) for why in found.failed], default=0)
    return INTERRUPTED if found.was_interrupted else code
