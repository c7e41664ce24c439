"""GPUs whose memory tests hold and release; an instance is called like ``gpu.probe``."""

from __future__ import annotations

from dataclasses import replace

from anvil_mux.host.gpus import Gpus, Reading
from anvil_mux.host.seam import HostGpu


class FakeGpus:
    """One GPU for each amount of memory; calls may come from several threads.

    ``facts`` are set on every reading (``mig=True``), ``why_none`` makes all GPUs vanish, ``asked`` counts
    the probes.
    """

    def __init__(self, *totals: int, driver: str = "580.95.05", **facts: bool) -> None:
        self.driver = driver
        self.facts: dict[str, bool] = {"mig": False, "mps": False, "persistence": True, **facts}
        self.why_none: str | None = None
        self.asked = 0
        self._totals = totals
        self._held: dict[tuple[int, int], int | None] = {}

    def __call__(self) -> Gpus:
        self.asked += 1
        if self.why_none is not None:
            return Gpus(why_none=self.why_none)
        return Gpus(tuple(map(self._read, range(len(self._totals)))), driver=self.driver)

    def hold(self, pid: int, gpu: int, used: int | None) -> None:
        """From now on this process holds so much of the GPU; None: an amount that NVML does not tell."""
        self._held = {**self._held, (pid, gpu): used}

    def release(self, *pids: int) -> None:
        self._held = {key: used for key, used in self._held.items() if key[0] not in pids}

    def _read(self, index: int) -> Reading:
        held = {pid: used for (pid, gpu), used in self._held.items() if gpu == index}
        reading = Reading(
            HostGpu(str(index), f"GPU-{index:08x}", "fake", self._totals[index]),
            used=sum(used or 0 for used in held.values()),
            processes=tuple(held.items()),
        )
        return replace(reading, **self.facts)
