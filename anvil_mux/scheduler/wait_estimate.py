"""The wait estimate: what a request for a model would wait for if it came now, how long, and why.

Pure: the answer of ``snapshot.awaited``, in words. Nothing is guessed that the GPU group would not do: the
policy is asked as if the request had come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from anvil_mux.scheduler.causes import sentence
from anvil_mux.scheduler.drains import RunningAnswer, answers, seconds_left
from anvil_mux.scheduler.hosts import PAUSED, Pause
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER, Stay, SwapTo
from anvil_mux.scheduler.progress import Progress, span
from anvil_mux.scheduler.slot import HOLDING, Slot
from anvil_mux.scheduler.snapshot import Awaited, awaited
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.swap import drains


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
            text = f"{text}; {len(model.queue)} wait before this one."
            return WaitEstimate(model.name, "waits", None, None, text)
        return WaitEstimate(model.name, "served", 0.0, 0.0, f"it is resident{_on(ready)}, {_serving(busy)}.")
    found = awaited(state, model, now)
    if found.refusal:
        return WaitEstimate(model.name, "refused", None, None, found.refusal.message)
    if state.host.pause.is_on:
        return _paused(state.host.pause, model.name, now)
    if found.target and found.state:
        if found.decision:
            return _planned(found.state, model.name, found, now)
        return _coming(found.state, found.target, found, now, far)
    return _blocked(state, model, found, now)


def _paused(pause: Pause, model: str, now: float) -> WaitEstimate:
    """Nothing is loaded before the end of the pause."""
    left = pause.until - now if pause.until < FOREVER else None
    when = f"for {span(left)} more" if left is not None else "until it is resumed by hand"
    return WaitEstimate(model, "waits", left, None, f"{PAUSED} {when}; then it may be loaded.")


def _coming(
    state: GroupState, target: Slot, found: Awaited, now: float, far: Progress | None
) -> WaitEstimate:
    """A swap to it is under way."""
    model, cost = target.model, found.cost
    if target.state == "loading":
        since, left = now - target.since, far.seconds_left if far else None
        told = (
            f"loads have taken {span(cost.load_seconds)}"
            if found.loaded_before
            else "it was never loaded before"
        )
        so_far = f" ({far.words})" if far and far.words else ""
        limit = max(target.backend.load_timeout - since, left or 0.0)
        return WaitEstimate(
            model, "waits", left, limit, f"it has been loading for {span(since)}{so_far}; {told}."
        )
    names = _names(victim.model for victim in found.victims)
    drain = _drain(state, found.victims, now)
    if drain.answers:
        text = f"it waits for {names} to make room; {drain.words}"
        about, most = _added(drain.seconds, cost.seconds), _bounded(cost.seconds + drain.most)
        return WaitEstimate(model, "waits", about, most, f"{text}.", waits_for=drain.answers)
    text = f"it waits for {names} to be evicted, then it is loaded" if names else "its load begins"
    return WaitEstimate(model, "waits", cost.seconds, None, f"{text}.")


class _Drain(NamedTuple):
    """The drain of some victims, as far as it is known."""

    answers: tuple[RunningAnswer, ...]
    seconds: float | None
    """How long it will take yet; None: that is not known."""
    most: float
    words: str


def _drain(state: GroupState, leaving: Sequence[Slot], now: float) -> _Drain:
    busy = [slot for slot in leaving if slot.holders]
    if not busy:
        return _Drain((), 0.0, 0.0, "")
    ends = [
        slot.drain_until - now if slot.state == "draining" else slot.backend.drain_timeout for slot in busy
    ]
    most = max(*ends, 0.0)
    longest = f"for at most {span(most)}" if most < FOREVER else "for as long as it takes"
    running = answers(busy, now)
    words = f"{_running(sum(len(slot.holders) for slot in busy))}, {longest} ({running[0].words})"
    known = all(_is_usual(state, slot, now) for slot in busy)
    left = max([seconds_left(state, slot, now) for slot in busy]) if known else None
    return _Drain(running, left, most, words)


def _is_usual(state: GroupState, slot: Slot, now: float) -> bool:
    """Whether no answer of a backend has run for longer than those of its model do on average."""
    usual = state.models[slot.model].demand.service_seconds
    return usual is not None and now - min(slot.holders.values()) <= usual


def _added(seconds: float | None, more: float) -> float | None:
    return None if seconds is None else seconds + more


def _bounded(seconds: float) -> float | None:
    return seconds if seconds < FOREVER else None


def _planned(state: GroupState, model: str, found: Awaited, now: float) -> WaitEstimate:
    """A swap to it could begin; the policy says when."""
    victims, cost = found.victims, found.cost
    drain = _drain(state, victims, now)
    names = _names(victim.model for victim in victims)
    takes = f"then its load takes {span(cost.load_seconds)}" + ("" if found.loaded_before else " (a guess)")
    late = max(found.overdue_at - now, 0.0)
    about, most = None, cost.seconds + drain.most
    if isinstance(found.decision, SwapTo) and found.decision.model == model:
        about = _added(drain.seconds, cost.seconds)
        text = f"{names} will be evicted now" if victims else "there is room"
        text += f" ({sentence(found.decision.cause)})"
        text += f"; {drain.words}" if drain.words else ""
        return WaitEstimate(
            model, "waits", about, _bounded(most), f"{text}; {takes}.", waits_for=drain.answers
        )
    if isinstance(found.decision, Stay):
        until = min(found.decision.until, found.overdue_at)
        about = until - now + cost.seconds if found.decision.until < FOREVER else None
        reason = sentence(found.decision.cause)
        longest = f"about {span(until - now)} more" if until < found.overdue_at else f"at most {span(late)}"
        text = f"{names or 'what is resident'} may stay for {longest} ({reason})"
    else:
        other = found.decision.model if found.decision else ""
        reason = sentence(found.decision.cause) if found.decision else ""
        text = f"{other} comes first ({reason}), for at most {span(late)}"
    return WaitEstimate(
        model, "waits", about, _bounded(late + most), f"{text}; {takes}.", waits_for=drain.answers
    )


def _blocked(state: GroupState, model: Model, found: Awaited, now: float) -> WaitEstimate:
    """No swap to it could begin now."""
    wanted = {gpu for slot in model.slots for gpu in slot.holds}
    others = [slot for slot in state.slots.values() if slot.state in HOLDING and wanted & slot.holds.keys()]
    leaving = [slot for slot in model.slots if slot.state in HOLDING]
    moving = [slot for slot in others if slot.state != "ready"]
    drain = _drain(state, (), now)
    late = max(found.overdue_at - now, 0.0)
    lacks = [lack for slot in model.slots if (lack := state.placement.others_before(slot))]
    if lacks and not leaving and len(lacks) == len(model.slots):
        text = f"{lacks[0]}; it is refused in {span(late)} if that stays so."
        return WaitEstimate(model.name, "waits", None, None, text)
    if leaving:
        goal, _ = drains(state.swaps).get(leaving[0].name, ("", now))
        text = f"it is being evicted{f' for {goal}' if goal else ''}, and can be loaded again after that"
        drain = _drain(state, leaving, now)
    elif moving:
        text = f"its GPUs are not free: {_names(f'{slot.model} is {slot.state}' for slot in moving)}"
        drain = _drain(state, moving, now)
    else:
        stays = max([slot.loaded + slot.backend.min_residency - now for slot in others], default=0.0)
        names = _names(slot.model for slot in others) or "what is resident"
        text = f"{names} may stay for {span(max(stays, 0.0))} more (min_residency)"
    if drain.words:
        text = f"{text}; {drain.words}"
    turn = "then it is its turn" if drain.most == FOREVER else f"its turn comes in {span(late)} at the latest"
    return WaitEstimate(model.name, "waits", None, None, f"{text}; {turn}.", waits_for=drain.answers)


def _names(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _on(slots: Sequence[Slot]) -> str:
    gpus = sorted({gpu for slot in slots for gpu in slot.holds})
    return f" on GPU {', '.join(gpus)}" if gpus else ""


def _serving(count: int) -> str:
    return "and idle" if not count else f"with {count} request{'' if count == 1 else 's'} in flight"


def _running(count: int) -> str:
    return "1 request still runs there" if count == 1 else f"{count} requests still run there"
