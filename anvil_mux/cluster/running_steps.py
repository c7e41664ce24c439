"""The steps that were begun on a host, and how they ended.

A step goes on whatever becomes of who began it, and what came of it is kept until its owner is another, so
that nothing is lost where an answer did not arrive. Of steps that are over the last ``MOST`` are kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from anvil_mux.cluster.messages import Owner, StepState, UnknownStep
from anvil_mux.errors import BackendError, MuxError

log = logging.getLogger(__name__)

MOST = 1000


@dataclass(slots=True)
class RunningStep:
    """A step; what came of it is guarded by the lock of the ``RunningSteps``."""

    owner: Owner
    backend: str
    """The backend's name."""
    run: Callable[[], object]
    cancel: Callable[[], None]
    """Called where nobody waits for it any more."""
    is_done: bool = False
    value: object = None
    error: Exception | None = None


class RunningSteps:
    """All steps of one agent; its methods are called under the lock of ``changed``, which ``begin`` frees."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._steps: dict[tuple[int, str, int], RunningStep] = {}  # epoch, id, number

    def begin(self, number: int, step: RunningStep) -> None:
        """Begin a step in a thread of its own; once only, however often it is asked for."""
        key = (*step.owner[:2], number)
        if key in self._steps:
            return
        if any(
            other.backend == step.backend and other.owner[:2] != step.owner[:2] for other in self._under_way()
        ):
            raise BackendError(f"{step.backend}: a step of the owner before is still under way")
        self._steps[key] = step
        self._forget()
        thread = threading.Thread(target=self._perform, args=(step,), name=f"begun-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._end(step, error=BackendError(f"no thread can be started: {error}"))

    def result(self, owner: Owner, number: int, timeout: float) -> StepState:
        """Wait so long for a step's end; raise its error. UnknownStep if it was never begun here."""
        step = self._steps.get((*owner[:2], number))
        if step is None:
            raise UnknownStep(f"step {number} is not known here")
        self._changed.wait_for(lambda: step.is_done, timeout)
        if step.error:
            raise step.error.copy() if isinstance(step.error, MuxError) else step.error
        return StepState(step.is_done, step.value)

    def settle(self, timeout: float) -> bool:
        """Cancel the loads under way, and wait so long for the end of all steps; return whether all ended."""
        for step in self._under_way():
            step.cancel()
        return self._changed.wait_for(lambda: not self._under_way(), timeout)

    def forget_all(self) -> None:
        """Forget what came of steps, since their owner is another now; those under way go on."""
        self._steps = {key: step for key, step in self._steps.items() if not step.is_done}

    def _under_way(self) -> list[RunningStep]:
        return [each for each in self._steps.values() if not each.is_done]

    def _forget(self) -> None:
        over = [key for key, step in self._steps.items() if step.is_done]
        for key in over[: max(len(over) - MOST, 0)]:
            del self._steps[key]

    def _perform(self, step: RunningStep) -> None:
        value, failed = None, None
        try:
            value = step.run()
        except Exception as error:
            failed = error
        with self._changed:
            self._end(step, value, failed)

    def _end(self, step: RunningStep, value: object = None, error: Exception | None = None) -> None:
        step.is_done, step.value, step.error = True, value, error
        self._changed.notify_all()
