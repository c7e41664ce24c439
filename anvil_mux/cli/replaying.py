"""The command ``replay``: traffic against a running server, beside another one, and beside its simulation."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anvil_mux.cli import asking
from anvil_mux.cli.arguments import add_json, configuration, read_positive, read_value
from anvil_mux.cli.output import FAILED, INTERRUPTED, complain, opened, print_json, print_table, progress, say

if TYPE_CHECKING:
    from anvil_mux.config.config import Config
    from anvil_mux.replay.compared import Comparison
    from anvil_mux.replay.pace import EnginePace
    from anvil_mux.replay.report import LiveRun
    from anvil_mux.replay.script import PlayedRequest, Script, ServerNames
    from anvil_mux.replay.sending import PlayedAnswer, PlayedServer
    from anvil_mux.replay.watching import EventWatch
    from anvil_mux.sim.prompts import Trace
    from anvil_mux.sim.workload import Workload

SIMULATED = "simulated"
TTFT_AXIS = "time to the first token (s)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--profile",
        type=_profiles,
        default=(),
        metavar="NAME[,NAME]",
        help="traffic made to order, as in `simulate`",
    )
    add(
        "--trace",
        action="append",
        default=[],
        metavar="FILE",
        help="a workload file or a trace of prompts, or the name of one that is shipped; may be repeated",
    )
    add("--log", metavar="EVENTS", help="the clients of an event log, as `serve --event-log` writes it")
    add("--url", help="the server; by default ANVIL_URL, the anvil-mux that serves here")
    add("--against", metavar="URL", help="another server, asked in turns with the first")
    add(
        "--model",
        action="append",
        default=[],
        metavar="[A=]B",
        help="what the server calls the model A of the traffic; without A=: all of them, or that of a trace "
        "of prompts",
    )
    add("--key-env", metavar="NAME", help="the variable with the server's key (default ANVIL_API_KEY)")
    add("--against-key-env", metavar="NAME", help="the variable with the key of --against")
    add("--repeat", type=read_positive, default=1, metavar="N", help="how often (default 1)")
    add("--speed", type=_factor, default=1.0, metavar="F", help="divide all moments and pauses by this")
    add("--limit", type=read_positive, metavar="N", help="send so many requests at most")
    add("--seed", type=int, default=0, metavar="N", help="draw what is random, and prompts, by this (0)")
    add("--sessions", type=read_positive, metavar="N", help="so many sessions of a trace of prompts")
    add(
        "--token-scale",
        type=_factor,
        default=1.0,
        metavar="F",
        help="multiply the lengths of a trace of prompts",
    )
    add(
        "--prompt-tokens",
        type=read_positive,
        default=32,
        metavar="N",
        help="the input of requests whose workload does not tell it (32)",
    )
    add(
        "--tokens-per-second",
        type=_factor,
        metavar="N",
        help="how many tokens a second of service is; by default as fast as the engine was in the warm-up",
    )
    add("--chat", action="store_true", help="ask /v1/chat/completions in place of /v1/completions")
    add(
        "--most",
        type=read_positive,
        default=512,
        metavar="N",
        help="requests under way at once, at most (512)",
    )
    add("--no-warm-up", action="store_true", help="do not ask each model alone before")
    add(
        "--simulate",
        nargs="?",
        const="",
        metavar="COMPOSE",
        help="beside it the simulation of the same traffic under this compose file; by default that of an "
        "anvil-mux that serves here",
    )
    add("--csv", metavar="FILE", help="write every request to a file")
    add("--plot", metavar="FILE", help="draw who was resident, the queues and the waits (needs matplotlib)")
    add_json(command)
    command.set_defaults(refuse=command.error)
    command.epilog = (
        "The first table is that of `simulate`, as the server tells it (an anvil-mux does); SERVING is the "
        "part of the time in which its GPUs were not being swapped. The second is what clients saw, in "
        "seconds: TTFT to the first token, E2E to the last, TPOT-MS milliseconds for each further token, "
        "LATE by how much a request was sent too late at most, since this machine was busy; RATIO is the "
        "second server over the first. Exit code 1: nothing was answered."
    )


def _profiles(names: str) -> tuple[str, ...]:
    from anvil_mux.sim import study

    return read_value(study.choose_profiles, names)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def run(given: argparse.Namespace) -> int:
    from anvil_mux.sim import plot

    if not (given.profile or given.trace or given.log):
        given.refuse("say what to send: --profile NAME, --trace FILE or --log EVENTS")
    traffic = list(_traffic(given))
    servers = [_server(given, given.url, given.key_env, "--url")]
    if given.against:
        servers.append(_server(given, given.against, given.against_key_env, "--against"))
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(opened(given.csv)) if given.csv else None
        if given.plot:
            plot.check_file(given.plot)
        replay = _Replay(given, [_Watched(server) for server in servers])
        for made in traffic:
            replay.play(made)
            if replay.was_interrupted:
                break
        replay.report(file)
    if replay.was_interrupted:
        return INTERRUPTED
    if not any(answer.status == 200 for one in replay.runs for answer in one.answers):
        return complain("nothing was answered", FAILED)
    return 0


def _traffic(given: argparse.Namespace) -> Iterator[Workload | Trace]:
    from anvil_mux.replay import script
    from anvil_mux.sim import replay, study, workload

    for name in given.profile:
        yield workload.PROFILES[name](given.seed)
    for name in given.trace:
        yield script.find(name)
    if given.log:
        recording = study.read_log(given.log, None, say)
        yield replay.replay(recording.runs, recording.name)


def _server(given: argparse.Namespace, url: str | None, key_env: str | None, flag: str) -> PlayedServer:
    from anvil_mux.replay.sending import CHAT, COMPLETIONS, PlayedServer

    if key_env and key_env not in os.environ:
        given.refuse(f"{key_env} is not set; it is to hold the key of the server of {flag}")
    key = os.environ[key_env] if key_env else os.environ.get("ANVIL_API_KEY", "") if flag == "--url" else ""
    address = asking.with_scheme(url) if url else asking.address(given)
    return PlayedServer(address, key, CHAT if given.chat else COMPLETIONS)


def _names(given: argparse.Namespace) -> ServerNames:
    from anvil_mux.replay.script import ServerNames

    pairs = [said.rpartition("=") for said in given.model]
    return ServerNames(
        {name: there for name, _, there in pairs if name},
        next((there for name, _, there in pairs if not name), ""),
    )


class _Watched:
    """A server, and what it tells of itself."""

    def __init__(self, server: PlayedServer) -> None:
        from anvil_mux.replay.watching import EventWatch

        self.server = server
        self.watch: EventWatch | None = EventWatch(server.url, server.key)
        if why := self.watch.start():
            say(f"note: {server.name} does not tell of its swaps and queues: {why}")
            self.watch = None


class _Replay:
    """All runs of one command."""

    def __init__(self, given: argparse.Namespace, sites: Sequence[_Watched]) -> None:
        self._given = given
        self._sites = sites
        self._names = _names(given)
        self._ids = count(1)
        self._mark = f"replay-{os.getpid()}-{time.time_ns() & 0xFFFFFFFF:x}"
        self._config = _config(given, sites[0])
        self.runs: list[LiveRun] = []
        self.drawn: list[Any] = []
        self.comparisons: list[Comparison] = []
        self.was_interrupted = False

    def play(self, made: Workload | Trace) -> None:
        """Play one workload or trace at each server in turns, in the other order each time."""
        models, resident = self._models(made)
        for site in self._sites:
            site.server.check_models(models)
        began = time.time()
        try:
            paces = [self._warm_up(site, models, resident) for site in self._sites]
        except KeyboardInterrupt:
            self.was_interrupted = True
            return
        script = self._script(made, paces[0])
        for repeat in range(self._given.repeat):
            places = list(zip(self._sites, paces, strict=True))
            for site, pace in reversed(places) if repeat % 2 else places:
                if repeat or site is not self._sites[0]:
                    self._settle(site, resident)
                self._run(site, script, pace, repeat, began)
                if self.was_interrupted:
                    return

    def _models(self, made: Workload | Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The models that are asked for, and those to be loaded at the beginning."""
        from anvil_mux.replay import script
        from anvil_mux.sim.prompts import Trace

        if isinstance(made, Trace):
            if not self._names.every:
                self._given.refuse(f"{made.name} names no model: say which is to be asked with --model NAME")
            return (self._names.every,), (self._names.every,)
        resident = tuple(dict.fromkeys(self._names.name(model) for model in made.resident))
        return script.models_of(made, self._names), resident

    def _script(self, made: Workload | Trace, paces: Mapping[str, EnginePace]) -> Script:
        from anvil_mux.replay import script
        from anvil_mux.sim.prompts import Trace

        given = self._given
        if isinstance(made, Trace):
            found = script.of_trace(
                made,
                self._names.every,
                seed=given.seed,
                sessions=given.sessions,
                speed=given.speed,
                scale=given.token_scale,
            )
        else:
            fast = {model: given.tokens_per_second or pace.tokens_per_second for model, pace in paces.items()}
            found = script.of_workload(made, self._names, fast, speed=given.speed, tokens=given.prompt_tokens)
        return found.limited(given.limit) if given.limit else found

    # One run

    def _warm_up(
        self, site: _Watched, models: Sequence[str], resident: Sequence[str]
    ) -> dict[str, EnginePace]:
        from anvil_mux.replay import pace

        if self._given.no_warm_up:
            return {model: pace.EnginePace() for model in models}
        say(f"warm-up: each model of {site.server.name} is asked alone")
        found = pace.warm_up(lambda request: self._ask(site, request), models, resident)
        for model, fast in found.items():
            say(f"{model}: {fast.tokens_per_second:.1f} tokens/s, the first after {fast.first_seconds:.3f} s")
        return found

    def _settle(self, site: _Watched, resident: Sequence[str]) -> None:
        """Have those models loaded that are to be when a run begins."""
        for model in () if self._given.no_warm_up else resident:
            from anvil_mux.replay.script import PlayedRequest

            self._ask(site, PlayedRequest(0.0, model, 1, 1))

    def _ask(self, site: _Watched, request: PlayedRequest) -> PlayedAnswer:
        number = next(self._ids)
        text = self._writer("warm-up", 1, {}).write(request, number)
        began = time.monotonic()
        ask = site.server.prepare(request, number, text, self._id(number), lambda: time.monotonic() - began)
        return ask()

    def _id(self, number: int) -> str:
        return f"{self._mark}-{number}"

    def _writer(self, name: str, block_tokens: int, words: Mapping[str, float]) -> Any:
        from anvil_mux.replay.texts import PromptWriter

        return PromptWriter(f"{self._given.seed} {self._mark} {name}", block_tokens, words)

    def _run(
        self, site: _Watched, script: Script, paces: Mapping[str, EnginePace], repeat: int, warm: float
    ) -> None:
        from anvil_mux.clock import Clock
        from anvil_mux.replay.player import Player
        from anvil_mux.replay.report import LiveRun

        words = {model: pace.tokens_per_word for model, pace in paces.items()}
        writer = self._writer(f"{repeat}", script.block_tokens, words)

        def prepare(
            request: PlayedRequest, number: int, now: Callable[[], float]
        ) -> Callable[[], PlayedAnswer]:
            id = self._id(next(self._ids))
            return site.server.prepare(request, number, writer.write(request, number), id, now)

        player, tell = Player(prepare, Clock(), most=self._given.most), progress()
        began = time.time()
        answers = player.play(
            script,
            lambda done, under_way, seconds: tell(
                f"{script.name} at {site.server.name}: {done} answered, {under_way} under way, "
                f"{seconds:.0f} s"
            ),
        )
        self.was_interrupted = player.was_interrupted
        live = LiveRun(script.name, site.server.name, repeat, answers)
        self.runs.append(self._told(site, live, began) if site.watch else live)
        self._compare(site, script, paces, began=began, warm=warm)

    def _told(self, site: _Watched, live: LiveRun, began: float) -> LiveRun:
        """The run with what the server tells of it."""
        from dataclasses import replace

        from anvil_mux.replay.watching import serving_share
        from anvil_mux.sim.figures import figures

        assert site.watch
        ids = [answer.id for answer in live.answers]
        site.watch.wait_for([answer.id for answer in live.answers if answer.status])
        told = site.watch.log(began, ids)
        if told.missed:
            say(f"note: {site.server.name} did not tell of {told.missed} requests: too many came at once")
        lasted = live.perceived.makespan_seconds
        share = serving_share(told.events, told.begins, site.watch.gpus, lasted)
        return replace(live, figures=figures(told.events, begins=told.begins), serving=share, told=told)

    # Beside the simulation

    def _compare(
        self, site: _Watched, script: Script, paces: Mapping[str, EnginePace], *, began: float, warm: float
    ) -> None:
        from anvil_mux.replay import compared
        from anvil_mux.replay.report import LiveRun
        from anvil_mux.replay.watching import serving_share

        live = self.runs[-1]
        if site is not self._sites[0] or self._config is None or not live.told or self.was_interrupted:
            return
        assert site.watch
        found = compared.compare(
            script,
            self._config,
            paces=paces,
            expected=site.watch.swap_times(warm, began),
            seen=site.watch.swap_times(began),
            told=live.told,
            answers=live.answers,
        )
        self.comparisons.append(found)
        simulated = found.simulated.figures
        gpus = {backend.name: backend.gpus for backend in self._config.backends}
        share = serving_share(found.simulated.log, live.told.begins, gpus, simulated.makespan_seconds)
        self.runs.append(LiveRun(script.name, SIMULATED, live.repeat, (), figures=simulated, serving=share))

    # Telling it

    def report(self, file: Any) -> None:
        from anvil_mux.replay import report

        if file:
            report.write_csv(self.runs, file)
        if self._given.plot:
            self._draw()
        if self._given.json:
            print_json([run.row() for run in self.runs])
            return
        if self.runs:
            print_table(report.HEAD, report.table(self.runs))
            print()
            print_table(report.CLIENTS_HEAD, report.clients_table(self.runs))
        for comparison in self.comparisons:
            print()
            for sentence in comparison.sentences():
                print(sentence)

    def _draw(self) -> None:
        from anvil_mux.config.config import DEFAULT_ROUTING
        from anvil_mux.replay import report
        from anvil_mux.sim import plot

        told = [run for run in self.runs if run.told and run.repeat == 0]
        if self._config and told:
            drawn = [
                (f"{r.script}, {r.at}", r.told.events, self._config, r.told.begins) for r in told if r.told
            ]
            plot.draw(drawn, self._given.plot)
        elif panels := report.dots(self.runs):
            with plot.picture(self._given.plot) as figure:
                plot.draw_dots(panels, DEFAULT_ROUTING, TTFT_AXIS, figure)


def _config(given: argparse.Namespace, site: _Watched) -> Config | None:
    """The configuration that is simulated: of the file given, or of the anvil-mux that serves here."""
    from anvil_mux.serve import remote
    from anvil_mux.state import state_folder

    if given.simulate:
        return configuration([given.simulate])
    here = next((p for p in remote.places(state_folder("", os.environ)) if p.url == site.server.url), None)
    if here and all(Path(file).exists() for file in here.files):
        return configuration(here.files)
    if given.simulate is not None:
        given.refuse(
            "no anvil-mux serves here at this address: name its compose file with --simulate COMPOSE"
        )
    return None
