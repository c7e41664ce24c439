"""The way from facts to effects: GPU groups are asked for their next steps until nothing changes any more.

Asked are the groups of a fact, and those with which they share something that has changed: the memory of a
host, where it is bounded, or a model with backends in several groups. Of a model only those are asked that it
concerns: where its queue stands, a swap is to load it, it is to be preloaded, too many of it are resident, or
another replica may be worth a load. Steps are numbered here, so that a report of one that is no longer under
way is recognized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.layout import BY_NAME, Exchanged, Layout
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import could_spill, with_room
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.steps import Cancel, Effects, Evict, Step, Ticket, Wait

AFTER_MISTAKE_SECONDS = 1.0
"""When a GPU group is asked again in which something went wrong."""


class _Gathered(NamedTuple):
    """The effects of a fact, while its groups are asked: see ``Effects``."""

    woken: list[Ticket]
    cut: list[Ticket]
    steps: list[Step]
    mistakes: list[Exception]


class _SharedState(NamedTuple):
    """The state that all GPU groups of one model share."""

    queue_group: str
    waits: bool
    ready: int
    is_coming: bool


_UNSEEN = _SharedState("", waits=False, ready=0, is_coming=False)


class Settling:
    """The questions to GPU groups, and all that is remembered from one fact to the next."""

    def __init__(self, layout: Layout, first_step: int) -> None:
        self._layout = layout
        self._moments: dict[GpuGroup, float] = {}
        """When each group is to be asked again without a new fact. One that is missing was never asked."""
        self._numbers = count(first_step)
        self._under_way: dict[str, int] = {}
        """Backend -> the number of its step that has not been reported yet."""
        self._shared: dict[str, _SharedState] = {}
        """Models with backends in several groups, as they were when these were last asked."""
        self._is_closed = False

    # Steps under way

    def ends(self, step: Step) -> bool:
        """Take the report of a step; False if the step is not under way any more."""
        if self._under_way.get(step.backend) != step.number:
            return False
        del self._under_way[step.backend]
        return True

    def forget_steps(self, backends: Iterable[str]) -> None:
        """Take no report of the steps under way on these backends."""
        for name in backends:
            self._under_way.pop(name, None)

    def close(self) -> None:
        """Begin nothing any more."""
        self._is_closed = True

    def exchanged(self, exchange: Exchanged, now: float) -> list[GpuGroup]:
        """Go on after an exchange of groups; returns those that are to be asked."""
        for group in [each for each in self._moments if self._layout.by_name.get(each.name) is not each]:
            del self._moments[group]
        for name in exchange.models:
            self._shared.pop(name, None)
        found = self._layout.waiting_for(exchange)
        for group in found:
            group.begin_anew(now)
        return found

    # Effects

    def due(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked although no fact concerns them."""
        found = [group for group in self._layout.groups if self._moments.get(group, now) <= now]
        for group in found:
            group.changed()  # a cool-down may be over: queues may have a better place there
        return found

    def settle(self, groups: Iterable[GpuGroup], now: float, gone: Iterable[GpuGroup] = ()) -> Effects:
        """Ask these groups what is to be done now, and all that this affects, until nothing changes.

        ``gone``: groups that are not asked any more, in which tickets may have ended.
        """
        found = _Gathered([], [], [], [])
        if self._layout.moved:
            exchange = self._layout.regroup()
            still = [group for group in groups if self._layout.by_name.get(group.name) is group]
            gone, groups = exchange.gone, {*still, *self.exchanged(exchange, now)}
        for group in gone:
            _collect(group, found)
        asked = sorted(groups, key=BY_NAME)
        if self._layout.spread:
            asked = self._with_siblings(asked, now)
        while asked:
            for group in asked:
                try:
                    self._ask(group, now, found)
                except Exception as error:  # what is gathered from others is done all the same
                    found.mistakes.append(error)
                    _collect(group, found)
                    self._moments[group] = now + AFTER_MISTAKE_SECONDS
            asked = self._affected(now) if self._layout.bounded or self._layout.spread else []
        first = min(self._moments.values(), default=FOREVER)
        return Effects(*found, ask_at=min(first, self._layout.pause.until))

    def collected(self, group: GpuGroup) -> Effects:
        """The tickets that ended in a group that need not be asked."""
        found = _Gathered([], [], [], [])
        _collect(group, found)
        return Effects(*found)

    def _affected(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked again since others have changed what they share."""
        found: list[GpuGroup] = []
        for name, memory in self._layout.bounded.items():
            if memory.is_changed:
                there = self._layout.on_host(name)
                found += there
                for group in there if memory.asked() else ():
                    group.changed()  # queues may have a better place there
        if self._layout.spread:
            found += [group for model in self._moved(now) for group in self._concerned(model)]
        return sorted(dict.fromkeys(found), key=BY_NAME)

    def _with_siblings(self, groups: Iterable[GpuGroup], now: float) -> list[GpuGroup]:
        """``groups``, and those that have backends of the same models, as far as it concerns them.

        It does where a queue stands, and where another replica of a busy model may be worth a load.
        """
        moved, layout = self._moved(now), self._layout
        found = dict.fromkeys(groups)
        queues = {layout.of_model[model.name] for model in layout.models.values() if model.queue.tickets}
        for model in dict.fromkeys(each for group in groups for each in group.routed if each.is_spread):
            found.update((group, None) for group in layout.groups_of[model.name] if group in queues)
            found.update(dict.fromkeys(could_spill(layout.groups_of[model.name], model, now)))
        for model in moved:
            found.update(dict.fromkeys(self._concerned(model)))
        return sorted(found, key=BY_NAME)

    def _concerned(self, model: Model) -> Sequence[GpuGroup]:
        """The groups that are to be asked about a model with backends in several."""
        layout = self._layout
        slots = [slot for slot in model.active if slot.coming or model.bounded]
        where = [layout.of_model[model.name], *(layout.of_backend[slot.name] for slot in slots)]
        return where + [group for group in layout.groups_of[model.name] if group.preloads]

    def _moved(self, now: float) -> list[Model]:
        """The models with backends in several groups that are not as they were when these were last asked.

        Where a queue stands is chosen here: anew when the state of one of the groups has changed. A queue for
        which others drain may be better off where a GPU is free.
        """
        layout, changed = self._layout, []
        touched: dict[str, list[GpuGroup]] = {}
        for group in layout.touched:
            for model in group.routed:
                if model.is_spread:
                    touched.setdefault(model.name, []).append(group)
        roomy = set(with_room(layout.touched))
        layout.touched.clear()
        for name, groups in touched.items():
            model, before = layout.models[name], self._shared.get(name, _UNSEEN)
            if model.queue.tickets:
                layout.place_queue(model, now, groups if before.waits else None)
            waits = bool(model.queue.tickets)
            seen = _SharedState(model.queue_group, waits, len(model.ready), model.is_coming)
            drains = seen.waits and seen.is_coming and not roomy.isdisjoint(groups) and not model.is_loading
            if seen != before or drains:
                changed.append(model)
            self._shared[name] = seen
        return changed

    def _ask(self, group: GpuGroup, now: float, found: _Gathered) -> None:
        if group.is_outgrown:
            exchange = self._layout.renew(group)
            [group] = exchange.made
            self.exchanged(exchange, now)
        if self._is_closed:
            _collect(group, found)
            return
        while not isinstance(step := group.next_step(now), Wait):
            _collect(group, found)
            if isinstance(step, Evict):
                found.cut.extend(step.severed)
            found.steps.append(self._numbered(step))
        _collect(group, found)
        self._moments[group] = min(step)

    def _numbered(self, step: Step) -> Step:
        """``step`` with its number: that of the load that it cancels, or one of its own."""
        if not isinstance(step, Cancel):
            self._under_way[step.backend] = next(self._numbers)
        return replace(step, number=self._under_way[step.backend])


def _collect(group: GpuGroup, found: _Gathered) -> None:
    """Take the tickets that ended in a group, and the leases that ended there before their requests."""
    if group.woken:
        found.woken.extend(group.woken)
        group.woken = []
    if group.cut:
        found.cut.extend(group.cut)
        group.cut = []
