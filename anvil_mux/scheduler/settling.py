"""The way from facts to effects: GPU groups are asked for their next steps until nothing changes any more.

Asked are the groups of a fact, and those with which they share something that has changed: the memory of a
host, where it is bounded, or a model with backends in several groups. Steps are numbered here, so that a
report of one that is no longer under way is recognized.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.layout import BY_NAME, Layout
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.steps import Cancel, Effects, Evict, Step, Ticket, Wait


class _Gathered(NamedTuple):
    """The effects of a fact, while its groups are asked: see ``Effects``."""

    woken: list[Ticket]
    cut: list[Ticket]
    steps: list[Step]


class _SharedState(NamedTuple):
    """The state that all GPU groups of one model share."""

    version: int
    home: str
    waits: bool
    ready: int
    is_coming: bool


_UNSEEN = _SharedState(-1, "", waits=False, ready=0, is_coming=False)


class Settling:
    """The questions to GPU groups, and all that is remembered from one fact to the next."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ask_at: dict[GpuGroup, float] = {}
        """When each group is asked again without a new fact."""
        self._numbers = count(1)
        self._under_way: dict[str, int] = {}
        """Backend -> the number of its step that has not been reported yet."""
        self._memory_changes: dict[str, int] = {}
        """Host -> how often its memory had changed when its groups were last asked."""
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

    def begin_anew(self) -> None:
        """Forget what was kept of groups: there are others now."""
        self._ask_at.clear()
        self._shared.clear()

    # Effects

    def due(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked although no fact concerns them."""
        return [group for group in self._layout.groups if self._ask_at.get(group, -FOREVER) <= now]

    def settle(self, groups: Iterable[GpuGroup], now: float, gone: Iterable[GpuGroup] = ()) -> Effects:
        """Ask these groups what is to be done now, and all that this affects, until nothing changes.

        ``gone``: groups that are not asked any more, in which tickets may have ended.
        """
        found = _Gathered([], [], [])
        if self._layout.has_moved:
            gone, groups = self._layout.regroup(), self._layout.groups
            self.begin_anew()
            for group in groups:
                group.admission.resume(now)
        for group in gone:
            _collect(group, found)
        asked = sorted(groups, key=BY_NAME)
        if self._layout.spread:
            asked = self._with_siblings(asked, now)
        while asked:
            for group in asked:
                self._ask(group, now, found)
            asked = self._affected(now) if self._layout.bounded or self._layout.spread else []
        return Effects(*found, ask_at=min(self._ask_at.values(), default=FOREVER))

    def collected(self, group: GpuGroup) -> Effects:
        """The tickets that ended in a group that need not be asked."""
        found = _Gathered([], [], [])
        _collect(group, found)
        return Effects(*found)

    def _affected(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked again since others have changed what they share."""
        hosts = set()
        for name, memory in self._layout.bounded.items():
            if memory.changes != self._memory_changes.get(name, 0):
                self._memory_changes[name] = memory.changes
                hosts.add(name)
        found = [group for group in self._layout.groups if group.host.name in hosts] if hosts else []
        if self._layout.spread:
            found += [group for name in self._moved(now) for group in self._layout.groups_of[name]]
        return sorted(dict.fromkeys(found), key=BY_NAME)

    def _with_siblings(self, groups: Iterable[GpuGroup], now: float) -> list[GpuGroup]:
        """``groups``, and those that have backends of the same models."""
        moved, groups_of = self._moved(now), self._layout.groups_of
        models = [name for group in groups for name in group.state.models if len(groups_of[name]) > 1]
        found = [*groups, *(group for name in (*models, *moved) for group in groups_of[name])]
        return sorted(dict.fromkeys(found), key=BY_NAME)

    def _moved(self, now: float) -> list[str]:
        """The models with backends in several groups that are not as they were when these were last asked.

        Where a queue stands is chosen here: anew when the state of one of the groups has changed.
        """
        layout, changed = self._layout, []
        for name in layout.spread:
            model, before = layout.models[name], self._shared.get(name, _UNSEEN)
            version = sum([state.version for state in layout.states[name]])
            if model.queue.tickets and version != before.version:
                layout.place_queue(model, now)
            seen = _SharedState(
                version, model.home, bool(model.queue.tickets), len(model.ready), model.is_coming
            )
            if seen[1:] != before[1:]:
                changed.append(name)
            self._shared[name] = seen
        return changed

    def _ask(self, group: GpuGroup, now: float, found: _Gathered) -> None:
        if group.is_outgrown:
            self._ask_at.pop(group, None)
            self._shared.clear()
            group = self._layout.renew(group, now)
        if self._is_closed:
            _collect(group, found)
            return
        while not isinstance(step := group.next_step(now), Wait):
            _collect(group, found)
            if isinstance(step, Evict):
                found.cut.extend(step.severed)
            found.steps.append(self._numbered(step))
        _collect(group, found)
        self._ask_at[group] = step.until

    def _numbered(self, step: Step) -> Step:
        """``step`` with its number: that of the load that it cancels, or one of its own."""
        if not isinstance(step, Cancel):
            self._under_way[step.backend] = next(self._numbers)
        return replace(step, number=self._under_way[step.backend])


def _collect(group: GpuGroup, found: _Gathered) -> None:
    """Take the tickets that ended in a group, and those that it took back."""
    state = group.state
    if state.settled:
        found.woken.extend(state.settled)
        state.settled = []
    if state.taken_back:
        found.cut.extend(state.taken_back)
        state.taken_back = []
