"""The runs of one command: scripts at servers in turns, with their warm-up, and beside their simulation."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean

from anvil_mux.clock import Clock
from anvil_mux.config.config import Config
from anvil_mux.lab import compared, pace, script
from anvil_mux.lab.figures import figures
from anvil_mux.lab.pace import EnginePace, UsualAnswer
from anvil_mux.lab.player import MOST, Player
from anvil_mux.lab.prompts import Trace
from anvil_mux.lab.report import LiveRun
from anvil_mux.lab.script import BadScript, PlayedRequest, Script
from anvil_mux.lab.sending import PlayedAnswer, PlayedServer
from anvil_mux.lab.texts import PromptWriter
from anvil_mux.lab.watching import EventWatch, serving_share
from anvil_mux.lab.workload import ModelNames, Workload

SIMULATED = "simulated"


@dataclass(frozen=True)
class ReplaySettings:
    """How traffic is played."""

    repeat: int = 1
    seed: int = 0
    speed: float = 1.0
    """The divisor of all moments and pauses."""
    limit: int | None = None
    """The most requests of a run."""
    sessions: int | None = None
    """How many of a trace of prompts; None: all."""
    token_scale: float = 1.0
    """The factor of the lengths of a trace of prompts."""
    prompt_tokens: int = script.PROMPT_TOKENS
    tokens_per_second: float | None = None
    """How many tokens a second of service is; None: as fast as the engine was in the warm-up."""
    most: int = MOST
    """The most requests under way at once."""
    warm_up: int = 1
    """How often each model is loaded before, to be asked alone; 0: not at all."""


class WatchedServer:
    """A server that is asked, and what it tells of itself."""

    def __init__(self, server: PlayedServer, say: Callable[[str], object]) -> None:
        self.server = server
        self.watch: EventWatch | None = EventWatch(server.url, server.key)
        if why := self.watch.start():
            say(f"note: {server.name} does not tell of its swaps and queues: {why}")
            self.watch = None


class Replay:
    """The runs so far. ``config``: what is simulated beside those at the first server."""

    def __init__(
        self,
        servers: Sequence[WatchedServer],
        settings: ReplaySettings,
        names: ModelNames,
        config: Config | None = None,
        *,
        say: Callable[[str], object],
        progress: Callable[[], Callable[[str], object]] = lambda: lambda _: None,
    ) -> None:
        self._servers = servers
        self._settings = settings
        self._names = names
        self._config = config
        self._say = say
        self._progress = progress
        self._ids = count(1)
        self._mark = f"replay-{os.getpid()}-{time.time_ns() & 0xFFFFFFFF:x}"
        self.runs: list[LiveRun] = []
        self.was_interrupted = False

    def play(self, made: Workload | Trace) -> None:
        """Play one workload or trace at each server in turns, in the other order each time."""
        models, resident = self._models(made)
        for each in self._servers:
            each.server.check_models(models)
        try:
            self._take_turns(made, models, resident)
        except KeyboardInterrupt:
            self.was_interrupted = True

    def _take_turns(self, made: Workload | Trace, models: Sequence[str], resident: Sequence[str]) -> None:
        began = time.time()
        usual = self._usual(made)
        paces = [self._warm_up(each, models, resident, usual) for each in self._servers]
        played = self._script(made, paces[0])
        places = list(zip(self._servers, paces, strict=True))
        for repeat in range(self._settings.repeat):
            for server, fast in reversed(places) if repeat % 2 else places:
                if repeat or server is not self._servers[0]:
                    self._settle(server, resident)
                self._run(server, played, fast, repeat, began)
                if self.was_interrupted:
                    return

    def _models(self, made: Workload | Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The models that are asked for, and those to be loaded at the beginning."""
        if isinstance(made, Trace):
            if not self._names.every:
                raise BadScript(f"{made.name} names no model: say which is to be asked with --model NAME")
            return (self._names.every,), (self._names.every,)
        resident = tuple(dict.fromkeys(self._names.name(model) for model in made.resident))
        return script.models_of(made, self._names), resident

    def _usual(self, made: Workload | Trace) -> dict[str, UsualAnswer]:
        """How long the answers of each model are, as far as a workload says."""
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for each in () if isinstance(made, Trace) else made.requests:
            seconds[self._names.name(each.model)].append(each.seconds)
        fast, tokens = self._settings.tokens_per_second, self._settings.prompt_tokens
        return {model: UsualAnswer(fmean(values), fast, tokens) for model, values in seconds.items()}

    def _script(self, made: Workload | Trace, paces: Mapping[str, EnginePace]) -> Script:
        how = self._settings
        if isinstance(made, Trace):
            found = script.of_trace(
                made,
                self._names.every,
                seed=how.seed,
                sessions=how.sessions,
                speed=how.speed,
                scale=how.token_scale,
            )
        else:
            fast = {model: how.tokens_per_second or pace.tokens_per_second for model, pace in paces.items()}
            found = script.of_workload(made, self._names, fast, speed=how.speed, tokens=how.prompt_tokens)
        return found.limited(how.limit) if how.limit else found

    # One run

    def _warm_up(
        self,
        server: WatchedServer,
        models: Sequence[str],
        resident: Sequence[str],
        usual: Mapping[str, UsualAnswer],
    ) -> dict[str, EnginePace]:
        if not self._settings.warm_up:
            return {model: EnginePace() for model in models}
        self._say(f"warm-up: each model of {server.server.name} is asked alone")
        found = pace.warm_up(
            partial(self._ask, server), models, resident, usual, rounds=self._settings.warm_up
        )
        for model, each in found.items():
            self._say(
                f"{model}: {each.tokens_per_second:.1f} tokens/s, the first after "
                f"{each.first_seconds:.3f} s, {each.slower_each:.0%} slower for each other answer at a time"
                + (f", {each.at_once:.0f} at a time" if each.at_once < math.inf else "")
            )
        return found

    def _settle(self, server: WatchedServer, resident: Sequence[str]) -> None:
        """Have those models loaded that are to be when a run begins."""
        for model in resident if self._settings.warm_up else ():
            self._ask(server, [PlayedRequest(0.0, model, 1, 1)])

    def _ask(self, server: WatchedServer, requests: Sequence[PlayedRequest]) -> list[PlayedAnswer]:
        """Send a few requests at once, with prompts of their own, in words in place of tokens."""
        writer = self._writer(f"warm-up {next(self._ids)}", 1, {})
        player = self._player(server, writer)
        answers = player.play(Script("warm-up", (), (), tuple(requests), lambda: lambda *_: ()))
        if player.was_interrupted:
            raise KeyboardInterrupt
        return answers

    def _player(self, server: WatchedServer, writer: PromptWriter) -> Player:
        def prepare(
            request: PlayedRequest, number: int, now: Callable[[], float]
        ) -> Callable[[], PlayedAnswer]:
            id, text = f"{self._mark}-{next(self._ids)}", writer.write(request, number)
            return server.server.prepare(request, number, text, id=id, now=now)

        return Player(prepare, Clock(), most=self._settings.most)

    def _writer(self, name: str, block_tokens: int, words: Mapping[str, float]) -> PromptWriter:
        return PromptWriter(f"{self._settings.seed} {self._mark} {name}", block_tokens, words)

    def _run(
        self, server: WatchedServer, made: Script, paces: Mapping[str, EnginePace], repeat: int, warm: float
    ) -> None:
        """Play a script once; ``warm``: when the warm-up began, as Unix time."""
        words = {model: each.tokens_per_word for model, each in paces.items()}
        writer = self._writer(str(repeat), made.block_tokens, words)

        player, tell, began = self._player(server, writer), self._progress(), time.time()
        where = f"{made.name} at {server.server.name}"
        answers = player.play(
            made,
            lambda done, under_way, seconds: tell(
                f"{where}: {done} answered, {under_way} under way, {seconds:.0f} s"
            ),
        )
        self.was_interrupted = player.was_interrupted
        live = LiveRun(made.name, server.server.name, repeat, answers, clients=made.clients)
        if not server.watch:
            self.runs.append(live)
            return
        live = self._told(server.watch, live, began)
        self.runs.append(live)
        is_compared = made.has_seconds and server is self._servers[0] and not self.was_interrupted
        if self._config and is_compared:
            self._compare(server.watch, made, paces, live, began=began, warm=warm)

    def _told(self, watch: EventWatch, live: LiveRun, began: float) -> LiveRun:
        """The run with what the server tells of it."""
        watch.wait_for([answer.id for answer in live.answers if answer.status])
        told = watch.log(began, [answer.id for answer in live.answers])
        if told.missed:
            self._say(f"note: {live.at} did not tell of {told.missed} requests: too many came at once")
        share = serving_share(told.events, told.begins, watch.gpus, live.perceived.makespan_seconds)
        return replace(live, figures=figures(told.events, begins=told.begins), serving=share, told=told)

    def _compare(
        self,
        watch: EventWatch,
        made: Script,
        paces: Mapping[str, EnginePace],
        live: LiveRun,
        *,
        began: float,
        warm: float,
    ) -> None:
        """Hold a run against its simulation."""
        assert self._config
        assert live.told
        found = compared.compare(
            made,
            self._config,
            paces=paces,
            expected=watch.swap_times(warm, began),
            seen=watch.swap_times(began),
            told=live.told,
            answers=live.answers,
        )
        simulated = found.simulated.figures
        gpus = {backend.name: backend.gpus for backend in self._config.backends}
        share = serving_share(found.simulated.log, live.told.begins, gpus, simulated.makespan_seconds)
        self.runs.append(
            LiveRun(
                made.name,
                SIMULATED,
                live.repeat,
                (),
                figures=simulated,
                serving=share,
                comparison=found,
            )
        )
