"""The waits of requests: that of one that would come now, the loads that queues wait for, how far these are.

Pure functions over a GPU group's state. ``wait_estimate`` is what a request would meet, in words, with how
long and why. Nothing is guessed that the GPU group would not do: the policy is asked as if one more request
waited; the queue that it would begin stands in its snapshot, and nowhere else. The weights of a load that a
queue waits for may be read before it begins.

How far a load is follows from what loads took before, and from what the engine says in its log. A log speaks
of one stage of the load, so it can only make the whole longer than what was learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import span
from anvil_mux.scheduler.admission import (
    RunningAnswer,
    answers,
    bound,
    nearest,
    refusal,
    too_late,
)
from anvil_mux.scheduler.events import sentence
from anvil_mux.scheduler.group import contests, snapshot
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER, Decision, Stay, SwapTo, ask
from anvil_mux.scheduler.slot import HOLDING, IS_PAUSED, LOADING, Slot
from anvil_mux.scheduler.state import (
    GroupState,
    Plan,
    SwapInProgress,
    cost_of,
    drain_of,
    drain_seconds,
    plan,
    waiting,
)

UNLOADING = ("ollama", "llamacpp")
"""The engines that forget their weights when they sleep, and read them again."""
NEARLY = 0.99
"""The fraction that is shown of a load that takes longer than it ever did."""


class WaitEstimate(NamedTuple):
    """The answer for one model."""

    model: str
    verdict: str
    """One of served, waits and refused."""
    seconds: float | None
    """Seconds that it would wait, as far as is known; None: that is not known."""
    at_most: float | None
    """The same if all that has a bound takes as long as it may; None: it has none."""
    because: str
    waits_for: tuple[RunningAnswer, ...] = ()
    """The answers that it waits for, the longest first."""

    @property
    def sentence(self) -> str:
        return f"A request for {self.model} {self._fate()}: {self.because}"

    def refused(self, because: str) -> WaitEstimate:
        return WaitEstimate(self.model, "refused", None, None, because)

    def _fate(self) -> str:
        if self.verdict != "waits":
            return {"served": "is served at once", "refused": "is refused"}[self.verdict]
        about = "" if self.seconds is None else f" about {span(self.seconds)}"
        more = self.at_most is not None and (self.seconds is None or self.at_most > self.seconds + 1)
        most = f" at most {span(self.at_most)}" if more and self.at_most is not None else ""
        return f"waits{about}{',' if about and most else ''}{most}"


def wait_estimate(state: GroupState, model: Model, now: float, far: Progress | None = None) -> WaitEstimate:
    """Estimate the wait for a model whose queue stands in this GPU group.

    ``far``: how far its load is, if there is one.
    """
    ready = [slot for slot in model.slots if slot.serves]
    if ready:
        busy = sum(len(slot.holders) for slot in ready)
        if not model.takes():
            text = f"it is resident{_on(ready)}, but runs as many requests as it may ({busy})"
            return _waits(model.name, f"{text}; {len(model.queue)} wait before this one")
        return WaitEstimate(model.name, "served", 0.0, 0.0, f"it is resident{_on(ready)}, {_serving(busy)}.")
    if error := refusal(state, model, now) or too_late(state, model, now):
        return WaitEstimate(model.name, "refused", None, None, error.message)
    pause = state.host.pause
    if pause.is_on:
        left = pause.until - now
        when = f"for {span(left)} more" if left < FOREVER else "until it is resumed by hand"
        return _waits(model.name, f"{IS_PAUSED} {when}; then it may be loaded", left)
    for each in state.groups_of(model):
        for swap in each.swaps:
            if swap.target and swap.target.model == model.name and not swap.cancel:
                return _coming(each, swap, swap.target, now, far)
    if not model.queue:
        state = nearest(state.groups_of(model), model, now)
    return _of_silent_host(state, model) or _next_swap(state, model, now)


def _of_silent_host(state: GroupState, model: Model) -> WaitEstimate | None:
    """Estimate the wait for a model whose host does not answer; None if it does."""
    host = state.host
    if host.is_lost:
        asleep = f"its host {host.name} is not there, and is woken for it"
        return _waits(model.name, f"{asleep}; that may take {span(host.wake_timeout or 0.0)}")
    if host.is_away:
        where = f"host {host.name}" if host.name else "own host"
        away = f"its {where} cannot be controlled ({host.why or 'the reason is not known'})"
        return _waits(model.name, f"{away}, and nothing is loaded or evicted there until it can")
    return None


def _waits(
    model: str,
    because: str,
    seconds: float = FOREVER,
    at_most: float = FOREVER,
    waits_for: tuple[RunningAnswer, ...] = (),
) -> WaitEstimate:
    """The estimate of a wait; infinite ``seconds`` are not known, and an infinite ``at_most`` is no bound."""
    about, most = (each if each < FOREVER else None for each in (seconds, at_most))
    return WaitEstimate(model, "waits", about, most, f"{because}.", waits_for=waits_for)


def _coming(
    state: GroupState, swap: SwapInProgress, target: Slot, now: float, far: Progress | None
) -> WaitEstimate:
    """A swap to it is under way."""
    model, cost = target.model, cost_of(state, swap, target)
    if target.state == "loading":
        since, left = now - target.since, far.seconds_left if far else None
        is_known = state.costs.knows(model, cost.way, target.host.name)
        before = f"loads have taken {span(cost.load_seconds)}" if is_known else "it was never loaded before"
        so_far = f" ({far.words})" if far and far.words else ""
        limit = max(target.backend.load_timeout - since, left or 0.0)
        text = f"it has been loading for {span(since)}{so_far}; {before}"
        return _waits(model, text, FOREVER if left is None else left, limit)
    names = _names(victim.model for victim in swap.victims)
    drain = _drain(state, swap.victims, now)
    if drain.answers:
        text = f"it waits for {names} to make room; {drain.words}"
        return _waits(model, text, drain.seconds + cost.seconds, cost.seconds + drain.most, drain.answers)
    text = f"it waits for {names} to be evicted, then it is loaded" if names else "its load begins"
    return _waits(model, text, cost.seconds)


class _DrainEstimate(NamedTuple):
    """The drain of some victims, as far as it is known."""

    answers: tuple[RunningAnswer, ...] = ()
    seconds: float = 0.0
    """How long it will take yet; infinite: that is not known."""
    most: float = 0.0
    words: str = ""


def _drain(state: GroupState, leaving: Sequence[Slot], now: float) -> _DrainEstimate:
    busy = [slot for slot in leaving if slot.holders]
    if not busy:
        return _DrainEstimate()
    most = max(*[state.drain_left(slot, now) for slot in busy], 0.0)
    longest = f"for at most {span(most)}" if most < FOREVER else "for as long as it takes"
    running = answers(busy, now)
    words = f"{_running(sum(len(slot.holders) for slot in busy))}, {longest} ({running[0].words})"
    known = all(_is_usual(state, slot, now) for slot in busy)
    left = drain_seconds(state, busy, now) if known else FOREVER
    return _DrainEstimate(running, left, most, words)


def _is_usual(state: GroupState, slot: Slot, now: float) -> bool:
    """Whether no answer of a backend has run for longer than those of its model do on average."""
    return now - min(slot.holders.values()) <= state.models[slot.model].demand.service_seconds


def _next_swap(state: GroupState, model: Model, now: float) -> WaitEstimate:
    """No swap to it is under way, and the next one would be here."""
    queue = model.queue
    most = queue.bound if queue else bound(state, model, now).seconds
    late = max((queue.overdue_at if queue else max(now, queue.left) + most) - now, 0.0)
    models = waiting(state)
    if not queue and not model.is_coming and not (model.limited and model.ready):
        models.append(model)
    busy, staying = state.busy_gpus(), state.staying(now)
    found = {each.name: plan(state, each, busy, now, staying) for each in models}
    plans = {name: each for name, each in found.items() if each}
    if model.name not in plans:
        return _blocked(state, model, late, now)
    together, here = next(each for each in contests(state, plans) if model.name in each.plans)
    decision = ask(state.policy, snapshot(state, now, together, most=most, here=here))
    return _planned(state, plans[model.name], decision, late, now)


def _planned(state: GroupState, found: Plan, decision: Decision, late: float, now: float) -> WaitEstimate:
    """A swap to it could begin; the policy says when, in ``late`` seconds at the latest."""
    target, victims, _, cost = found
    model, drain = target.model, _drain(state, victims, now)
    names = _names(victim.model for victim in victims)
    is_known = state.costs.knows(model, target.level, target.host.name)
    takes = f"then its load takes {span(cost.load_seconds)}" + ("" if is_known else " (a guess)")
    about, most, reason = FOREVER, cost.seconds + drain.most, sentence(decision.cause)
    if isinstance(decision, SwapTo) and decision.model == model:
        about = drain.seconds + cost.seconds
        text = f"{names} will be evicted now" if victims else "there is room"
        text += f" ({reason})"
        text += f"; {drain.words}" if drain.words else ""
        return _waits(model, f"{text}; {takes}", about, most, drain.answers)
    if isinstance(decision, Stay):
        left = decision.until - now
        about = min(left, late) + cost.seconds if left < FOREVER else FOREVER
        longest = f"about {span(left)} more" if left < late else f"at most {span(late)}"
        text = f"{names or 'what is resident'} may stay for {longest} ({reason})"
    else:
        text = f"{decision.model} comes first ({reason}), for at most {span(late)}"
    return _waits(model, f"{text}; {takes}", about, late + most, drain.answers)


def _blocked(state: GroupState, model: Model, late: float, now: float) -> WaitEstimate:
    """No swap to it could begin now; it is overdue in ``late`` seconds."""
    here = state.own(model)
    wanted = {gpu for slot in here for gpu in slot.holds}
    others = [slot for slot in state.slots.values() if slot.state in HOLDING and wanted & slot.holds.keys()]
    leaving = [slot for slot in here if slot.model == model.name and slot.state in HOLDING]
    moving = [slot for slot in others if slot.state != "ready"]
    drain = _DrainEstimate()
    lacks = [lack for slot in here if (lack := state.placement.others_before(slot))]
    if lacks and not leaving and len(lacks) == len(model.slots):
        return _waits(model.name, f"{lacks[0]}; it is refused in {span(late)} if that stays so")
    if leaving:
        drained = drain_of(leaving[0], state.swaps_of(model), now)
        goal = f" for {drained.target}" if drained and drained.target else ""
        text = f"it is being evicted{goal}, and can be loaded again after that"
        drain = _drain(state, leaving, now)
    elif moving:
        text = f"its GPUs are not free: {_names(f'{slot.model} is {slot.state}' for slot in moving)}"
        drain = _drain(state, moving, now)
    else:
        stays = max([slot.stays_until - now for slot in others], default=0.0)
        names = _names(slot.model for slot in others) or "what is resident"
        text = f"{names} may stay for {span(max(stays, 0.0))} more (min_residency)"
    if drain.words:
        text = f"{text}; {drain.words}"
    turn = "then it is its turn" if drain.most == FOREVER else f"its turn comes in {span(late)} at the latest"
    return _waits(model.name, f"{text}; {turn}", waits_for=drain.answers)


def _names(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _on(slots: Sequence[Slot]) -> str:
    gpus = sorted({gpu for slot in slots for gpu in slot.holds})
    return f" on GPU {', '.join(gpus)}" if gpus else ""


def _serving(count: int) -> str:
    return "and idle" if not count else f"with {count} request{'' if count == 1 else 's'} in flight"


def _running(count: int) -> str:
    return "1 request still runs there" if count == 1 else f"{count} requests still run there"


# The load that a queue waits for


class ComingLoad(NamedTuple):
    """A load that requests wait for and that has not begun; of two the lesser one probably begins first."""

    rank: tuple[bool, int, float, str]
    """Whether its swap has not begun, its priority (less first), the beginning of its queue, and its name."""
    backend: Backend


def coming_load(state: GroupState, model: Model, now: float) -> ComingLoad | None:
    """The load that the queue of ``model`` waits for; ``state``: of the GPU group in which it stands.

    None where it waits for no load, or for one that has begun or reads nothing from disk.
    """
    if model.ready or model.is_loading:
        return None
    targets = [
        swap.target for swap in state.swaps_of(model) if swap.target and swap.target.model == model.name
    ]
    slot = next(iter(targets or state.loadable(model, now)), None)
    if slot is None or not _reads_weights(slot):
        return None
    first = next(iter(model.queue.tickets))
    return ComingLoad((not targets, -model.priority, first.since, slot.name), slot.backend)


def _reads_weights(slot: Slot) -> bool:
    """Whether its load reads its weights from disk."""
    if slot.state in LOADING or not slot.backend.read_ahead:
        return False
    asleep = slot.level == "sleep" and slot.backend.engine in UNLOADING
    return asleep or slot.level in ("stop", "sleep-2")


# How far a load is


class Progress(NamedTuple):
    """How far a load is, as far as is known, or as an engine's log says of one stage of it."""

    stage: str = ""
    fraction: float | None = None
    seconds_left: float | None = None

    @property
    def words(self) -> str:
        """A text for people: ``42%, 35 s left, reading weights``."""
        done = "" if self.fraction is None else f"{self.fraction:.0%}"
        left = "" if self.seconds_left is None else f"{self.seconds_left:.0f} s left"
        return ", ".join(filter(None, (done, left, self.stage)))


def progress(elapsed: float, expected: float | None, log: Progress | None) -> Progress:
    """How far a load is that has taken ``elapsed`` and was ``expected`` to take so long, and its ``log``."""
    log = log or Progress()
    if expected is None:
        return log
    left = max(expected - elapsed, log.seconds_left or 0.0)
    if left <= 0.0:
        return Progress(log.stage, NEARLY)
    return Progress(log.stage, min(elapsed / (elapsed + left), NEARLY), left)
