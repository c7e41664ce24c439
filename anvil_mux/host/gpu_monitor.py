"""Who uses the GPUs, looked at in a thread of its own and answered from memory.

NVML may take long, or hang: ``sight`` never waits for it. It says when it was asked, and for a while after
that the thread looks once a second; when nobody asks any more, it looks now and then, to tell what other
processes hold: that is not to be had for a model.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from anvil_mux.clock import Worker
from anvil_mux.host import gpu
from anvil_mux.host.gpu import Gpus, OtherProcess, Reading

EVERY_SECONDS = 1.0
WATCHED_SECONDS = 60.0
"""How long after a question it goes on to look as often."""
SELDOM_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One GPU, a moment ago; bytes."""

    used: int | None = None
    total: int | None = None
    users: Mapping[str, int | None] = field(default_factory=dict)
    """Service of ours -> what its processes hold here; None where that is not told."""
    others: tuple[OtherProcess, ...] = ()


Sight = Mapping[str, Seen]
"""GPU id, as it is configured -> what was seen of it; without those that cannot be read."""


class GpuMonitor:
    """``owner`` says to which of our services a process of this host belongs; see swap.Runtime.

    ``tell`` learns after every look how many bytes other processes hold, by GPU.
    """

    def __init__(
        self,
        gpus: Iterable[str],
        owner: Callable[[int], str | None],
        probe: Callable[[], Gpus] = gpu.probe,
        now: Callable[[], float] = time.monotonic,
        *,
        tell: Callable[[Mapping[str, int]], object] = lambda held: None,
    ) -> None:
        self._tell = tell
        self._gpus = tuple(gpus)
        self._owner = owner
        self._probe = probe
        self._now = now
        self._asked = now()
        self._rests = False
        self._sight: Sight = {}
        self.worker = Worker("gpu-monitor", self._turn)

    def look_at(self, gpus: Iterable[str]) -> None:
        """From now on these are looked at. Any thread."""
        self._gpus = tuple(gpus)

    def sight(self) -> Sight:
        """What was last seen. Any thread."""
        self._asked = self._now()
        if self._rests:
            self.worker.wake()
        return self._sight

    def look(self) -> None:
        """Looks once."""
        found = self._probe()
        readings = {gpu: found.find(gpu) for gpu in self._gpus}
        self._sight = {gpu: self._seen(reading) for gpu, reading in readings.items() if reading}
        held = {gpu: sum(each.used or 0 for each in seen.others) for gpu, seen in self._sight.items()}
        self._tell({gpu: amount for gpu, amount in held.items() if amount})

    def _turn(self) -> float:
        self.look()
        return SELDOM_SECONDS if self.may_rest() else EVERY_SECONDS

    def may_rest(self) -> bool:
        """Whether nobody has asked for long."""
        # Whoever asks from here on wakes the thread, so that no question is passed over.
        self._rests = True
        self._rests = self._now() - self._asked >= WATCHED_SECONDS
        return self._rests

    def _seen(self, reading: Reading) -> Seen:
        owners = {pid: self._owner(pid) for pid, _ in reading.processes}
        pids: defaultdict[str, list[int]] = defaultdict(list)
        for pid, service in owners.items():
            if service:
                pids[service].append(pid)
        users = {service: reading.used_by(own) for service, own in pids.items()}
        others = gpu.others([reading], lambda pid: owners[pid] is not None)
        return Seen(reading.used, reading.total, users, tuple(others))
