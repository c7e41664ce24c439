"""Scripts at servers in turns, with their warm-up, and beside their simulation: what `anvil-mux replay` runs.

In the warm-up each model is asked alone, so that it is known how fast its engine is. Every model is asked in
turn, those last that are to be loaded when the run begins. So each was loaded, the server knows what swaps
cost (as simulations assume), and what is resident is what the script says. Once it is loaded, and it is known
how many tokens a word of a prompt is, the model is asked again, with a prompt and for an answer about as long
as those of the script: an engine is slower far in an answer, and a short one tells little. The median of
``ASKED`` answers gives its pace. Then it is asked ``AT_ONCE`` times at once, which tells how many answers it
makes at the same time (the others come much later), and how much slower each is for the company of others.
With several rounds each of these figures is the median of what the rounds gave: a machine that does other
work as well is slow at some moments.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean, median
from typing import NamedTuple

from anvil_mux.clock import Clock
from anvil_mux.config.config import Config
from anvil_mux.config.kinds import span
from anvil_mux.lab.engines import TOKENS_PER_SECOND, Batching, EnginePace
from anvil_mux.lab.figures import figures
from anvil_mux.lab.player import (
    MOST,
    PROMPT_TOKENS,
    UNREACHABLE,
    BadScript,
    PlayedAnswer,
    PlayedServer,
    Player,
    PromptWriter,
    Script,
    failure,
    of_trace,
    of_workload,
)
from anvil_mux.lab.report import LiveRun, perceived
from anvil_mux.lab.watching import EventWatch, compare, serving_share
from anvil_mux.lab.workload import ModelNames, Prompt, Trace, Workload

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
    prompt_tokens: int = PROMPT_TOKENS
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
        if isinstance(made, Workload):
            made = made.renamed(self._names)
        models, resident = self._models(made)
        for each in self._servers:
            each.server.check_models(models)
        try:
            self._take_turns(made, models, resident)
        except KeyboardInterrupt:
            self.was_interrupted = True

    def _take_turns(self, made: Workload | Trace, models: Sequence[str], resident: Sequence[str]) -> None:
        began = time.time()
        self._say(self._announcement(made, models))
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

    def _announcement(self, made: Workload | Trace, models: Sequence[str]) -> str:
        """A sentence that says what is about to be sent."""
        how = self._settings
        of = f"{' and '.join(each.server.name for each in self._servers)}, {', '.join(models)}"
        if isinstance(made, Trace):
            count = len(made.alone) + sum(map(len, made.sessions))
            some = f"prompts of {how.sessions} sessions" if how.sessions else f"{count} prompts at most"
            what = f"{made.name}: {some} within {span(made.seconds / how.speed)}"
        else:
            first = max([each.at for each in made.requests], default=0.0) / how.speed
            what = f"{made.name}: {len(made.requests)} requests in {span(first)}"
            what += ", and more by clients that ask again when they are answered" if made.follow else ""
        most = f", at most {how.limit} in all" if how.limit else ""
        times = f", {how.repeat} times" if how.repeat > 1 else ""
        return f"{what}{most}{times}, to {of}; before that each model is loaded and measured"

    def _models(self, made: Workload | Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The models that are asked for, and those to be loaded at the beginning."""
        if isinstance(made, Workload):
            return tuple(made.load_seconds), made.resident
        if not self._names.every:
            raise BadScript(f"{made.name} names no model: say which is to be asked with --model NAME")
        return (self._names.every,), (self._names.every,)

    def _usual(self, made: Workload | Trace) -> dict[str, UsualAnswer]:
        """How long the answers of each model are, as far as a workload says."""
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for each in () if isinstance(made, Trace) else made.requests:
            seconds[each.model].append(each.seconds)
        fast, tokens = self._settings.tokens_per_second, self._settings.prompt_tokens
        return {model: UsualAnswer(fmean(values), fast, tokens) for model, values in seconds.items()}

    def _script(self, made: Workload | Trace, paces: Mapping[str, EnginePace]) -> Script:
        how = self._settings
        if isinstance(made, Trace):
            found = of_trace(
                made,
                self._names.every,
                seed=how.seed,
                sessions=how.sessions,
                speed=how.speed,
                scale=how.token_scale,
            )
        else:
            fast = {model: how.tokens_per_second or pace.tokens_per_second for model, pace in paces.items()}
            found = of_workload(made, fast, speed=how.speed, tokens=how.prompt_tokens)
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
        found = warm_up(partial(self._ask, server), models, resident, usual, rounds=self._settings.warm_up)
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
            self._ask(server, [Prompt(0.0, 1, 1, model=model)])

    def _ask(self, server: WatchedServer, requests: Sequence[Prompt]) -> list[PlayedAnswer]:
        """Send a few requests at once, with prompts of their own, in words in place of tokens."""
        writer = self._writer(f"warm-up {next(self._ids)}", 1, {})
        player = self._player(server, writer)
        answers = player.play(Script("warm-up", (), tuple(requests), lambda: lambda *_: ()))
        if player.was_interrupted:
            raise KeyboardInterrupt
        return answers

    def _player(self, server: WatchedServer, writer: PromptWriter) -> Player:
        def prepare(request: Prompt, number: int, now: Callable[[], float]) -> Callable[[], PlayedAnswer]:
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
        reached = [answer.id for answer in live.answers if answer.code != UNREACHABLE]
        watch.wait_for(reached)
        told = watch.log(began, reached)
        if told.missed:
            self._say(f"note: {live.at} did not tell of {told.missed} requests: too many came at once")
        share = serving_share(told.events, told.begins, watch.gpus, perceived(live.answers).makespan_seconds)
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
        found = compare(
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
            LiveRun(made.name, SIMULATED, live.repeat, (), simulated, serving=share, comparison=found)
        )


# The warm-up

TOKENS = 24
"""The answer that is asked for where nothing says how long they are."""
MOST_SECONDS = 3.0
"""The longest answers that are asked for."""
NEAR = 1.25
"""An answer is long enough if those of the script last at most so many times as long."""
MOST_LONGER = 8
"""How many times as long as the last answer the next one is, at most."""
ASKED, AT_ONCE = 3, 8
TOGETHER = 1.5
"""Answers that take at most so many times as long as the first of them are made at the same time."""
AT_ONCE_PART = 0.05
"""The part of an answer's time within which all of its text came, if it came in one piece."""
WORDS = 32

AskAtOnce = Callable[[Sequence[Prompt]], Sequence[PlayedAnswer]]
"""Sends requests at one moment, and waits for all answers."""


class UsualAnswer(NamedTuple):
    """How long the answers of a model usually are, and its prompts."""

    seconds: float
    tokens_per_second: float | None = None
    """How many tokens a second of them is to be; None: as many as the engine makes."""
    prompt_tokens: int = WORDS


def warm_up(
    ask: AskAtOnce,
    models: Iterable[str],
    resident: Iterable[str],
    usual: Mapping[str, UsualAnswer],
    *,
    rounds: int = 1,
) -> dict[str, EnginePace]:
    """The pace of each model; MuxError if one does not answer. ``rounds``: how often each is loaded."""
    resident = list(resident)
    paces: dict[str, list[EnginePace]] = {}
    lengths: dict[str, int] = {}
    for model in [*resident, *[m for m in models if m not in resident]] * rounds:
        [answer] = _asked(ask, model, WORDS, 1)
        each = answer.prompt_tokens / WORDS if answer.prompt_tokens else 1.0
        expected = usual.get(model)
        words = max(round(expected.prompt_tokens / each), 1) if expected else WORDS
        if model not in lengths:
            lengths[model] = _length(ask, model, words, expected)
        paces.setdefault(model, []).append(_measured(ask, model, words, lengths[model], each))
    for model in resident:
        _asked(ask, model, WORDS, 1)
    return {model: EnginePace(*map(median, zip(*found, strict=True))) for model, found in paces.items()}


def _measured(ask: AskAtOnce, model: str, words: int, tokens: int, tokens_per_word: float) -> EnginePace:
    answers = [answer for _ in range(ASKED) for answer in _asked(ask, model, words, tokens)]
    answer = sorted(answers, key=lambda each: each.ended - each.sent)[ASKED // 2]
    together = _asked(ask, model, words, tokens, AT_ONCE)
    batching = _batching(answer.ended - answer.sent, [each.ended - each.sent for each in together])
    return _pace(answer, tokens_per_word)._replace(**batching._asdict())


def _batching(alone: float, together: Sequence[float]) -> Batching:
    """How an engine makes several answers: seconds of one alone, and of some asked for at one moment."""
    made = [seconds for seconds in together if seconds <= TOGETHER * min(together)]
    slower = max(median(made) / alone - 1, 0.0) if alone > 0 else 0.0
    at_once = len(made) if len(made) < len(together) else math.inf
    return Batching(slower / (len(made) - 1) if len(made) > 1 else 0.0, at_once)


def _length(ask: AskAtOnce, model: str, words: int, usual: UsualAnswer | None) -> int:
    """The tokens of an answer that lasts about as long as those of the script."""
    if usual and usual.tokens_per_second:
        return max(round(usual.seconds * usual.tokens_per_second), 1)
    tokens, enough = TOKENS, min(usual.seconds, MOST_SECONDS) / NEAR if usual else 0.0
    while True:
        [answer] = _asked(ask, model, words, tokens)
        lasted = answer.ended - answer.sent
        if lasted >= enough or answer.tokens < tokens:
            return tokens
        # Short answers make an engine look faster than it is, so the next one is not longer by much.
        tokens = min(math.ceil(tokens * enough * NEAR / lasted), tokens * MOST_LONGER)


def _asked(ask: AskAtOnce, model: str, words: int, output: int, count: int = 1) -> Sequence[PlayedAnswer]:
    answers = ask([Prompt(0.0, words, output, model=model)] * count)
    for answer in answers:
        if error := failure(answer):
            raise error
    return answers


def _pace(answer: PlayedAnswer, tokens_per_word: float) -> EnginePace:
    came_at_once = answer.ended - answer.first < AT_ONCE_PART * (answer.ended - answer.sent)
    first = answer.sent if came_at_once or math.isnan(answer.first) else answer.first
    lasts = answer.ended - first
    fast = (answer.tokens - 1) / lasts if answer.tokens > 1 and lasts > 0 else TOKENS_PER_SECOND
    return EnginePace(first - answer.sent, fast, tokens_per_word)
