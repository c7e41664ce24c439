"""The use of the GPUs, looked at in a thread of its own.

A driver may take long, or hang: nobody waits for it. While somebody watches, and for a while after that, the
thread looks once a second; else it looks now and then, to tell what other processes hold: that is not to be
had for a model.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from anvil_mux.clock import Worker
from anvil_mux.host import gpu
from anvil_mux.host.reading import Gpus, Reading
from anvil_mux.host.seam import Seen, Sight

EVERY_SECONDS = 1.0
WATCHED_SECONDS = 60.0
"""Seconds for which it goes on to look as often after somebody watched."""
SELDOM_SECONDS = 10.0


class GpuMonitor:
    """Looks at GPUs again and again; ``tell`` learns what was seen.

    ``owner`` says to which of our services a process of this host belongs; see runtime.Runtime.
    """

    def __init__(
        self,
        gpus: Iterable[str],
        owner: Callable[[int], str | None],
        tell: Callable[[Sight], object],
        probe: Callable[[], Gpus] = gpu.look,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._gpus = tuple(gpus)
        self._owner = owner
        self._probe = probe
        self._now = now
        self._watched = now()
        self._is_slow = False
        self.worker = Worker("gpu-monitor", self._turn)

    def look_at(self, gpus: Iterable[str]) -> None:
        """Look at these GPUs from now on. Any thread."""
        self._gpus = tuple(gpus)

    def watch(self) -> None:
        """Look more often for a while, since somebody watches. Any thread; never blocks."""
        self._watched = self._now()
        if self._is_slow:
            self.worker.wake()

    def look(self) -> None:
        """Looks once."""
        found = self._probe()
        readings = {gpu: found.find(gpu) for gpu in self._gpus}
        self._tell({gpu: self._seen(reading) for gpu, reading in readings.items() if reading})

    def _turn(self) -> float:
        self.look()
        return SELDOM_SECONDS if self.may_slow_down() else EVERY_SECONDS

    def may_slow_down(self) -> bool:
        """Whether nobody has watched for long."""
        # Whoever watches from here on wakes the thread, so that nobody is passed over.
        self._is_slow = True
        self._is_slow = self._now() - self._watched >= WATCHED_SECONDS
        return self._is_slow

    def _seen(self, reading: Reading) -> Seen:
        owners = {pid: self._owner(pid) for pid, _ in reading.processes}
        pids: defaultdict[str, list[int]] = defaultdict(list)
        for pid, service in owners.items():
            if service:
                pids[service].append(pid)
        users = {service: reading.used_by(own) for service, own in pids.items()}
        others = gpu.others([reading], lambda pid: owners[pid] is not None)
        return Seen(reading.used, reading.total, users, tuple(others), reading.sensors)
