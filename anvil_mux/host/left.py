"""Engines that run on although no anvil-mux serves their project: one has left them there, or was killed.

The state folder of a project notes its services (``adopt.Notes``) and has a record, or room for one, of each
that is a process; the others are containers. That is enough to find and end them, whatever has become of the
compose files.
"""

from __future__ import annotations

from pathlib import Path

from anvil_mux.config.config import Backend
from anvil_mux.errors import MuxError
from anvil_mux.host.adopt import Notes
from anvil_mux.host.local import build_runtime
from anvil_mux.host.runs import RunRecords
from anvil_mux.host.runtime import Runtime
from anvil_mux.host.seam import HostConfig


class LeftEngines:
    """The engines of one project that run, by its state folder; nobody may serve the project meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.project = folder.name
        self.problem = ""
        """Why it is not known of some of them whether they run; "" if it is."""
        self._running: list[tuple[Runtime, Backend]] = []
        noted = Notes(folder).orphans(())
        records = RunRecords(folder)
        processes = [each for each in noted if records.has_room(each.name)]
        containers = [each for each in noted if each not in processes]
        for kind, backends in (("process", processes), ("compose", containers)):
            if backends:
                self._look(kind, backends)

    def _look(self, kind: str, backends: list[Backend]) -> None:
        runtime = build_runtime(HostConfig(tuple(backends), project=self.project, runtime=kind))
        try:
            running = runtime.running()
        except MuxError as error:
            self.problem = error.message
            return
        self._running += [(runtime, each) for each in backends if each.name in running]

    @property
    def names(self) -> list[str]:
        """The names of their backends."""
        return [backend.name for _, backend in self._running]

    def stop(self) -> None:
        """End them; BackendError if one cannot be ended."""
        for runtime, backend in self._running:
            runtime.stop(backend)
