"""The place where services run, as the rest of host/ sees it; containers.py and processes.py are the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Mounts
from anvil_mux.errors import BackendError
from anvil_mux.host.seam import LOG_LINES, HostConfig


class NotBegun(BackendError):
    """The start of a service failed before anything was done: there is nothing to be stopped."""


class Runtime(Protocol):
    """A place where services run: Docker Compose or local processes.

    Every call is bounded in time, may block, is never made under the multiplexer's lock, and maps foreign
    failures to BackendError, or to LoadError where the service's own description is at fault (its image is
    missing, its port is taken). Calls for different backends may come from several threads at once.
    """

    def start(self, backend: Backend) -> str:
        """Start the service (creating it at the first use) and return its base URL.

        One that runs already is left running; it need not answer yet. NotBegun where nothing is known to have
        been done.
        """

    def stop(self, backend: Backend) -> None:
        """Return when it is really gone: grace, then kill. A service that does not run is no error."""

    def kill(self, backend: Backend) -> None:
        """End it at once, without grace."""

    def pause(self, backend: Backend) -> None:
        """Freeze the service: none of its processes runs until ``resume``, ``stop`` or ``kill``."""

    def resume(self, backend: Backend) -> None:
        """Let a frozen service go on; one that is not frozen is no error."""

    def pids(self, backend: Backend) -> list[int]:
        """The ids that its processes have on this host; [] if it does not run."""

    def owner(self, pid: int) -> str | None:
        """The service that a process of this host belongs to, None if to none of ours.

        Told from memory and /proc alone, without Docker.
        """

    def mounts(self, backend: Backend) -> Mounts:
        """The folders of this host that its container has, those of volumes too; () where there is none."""

    def ended(self, backend: Backend) -> str | None:
        """Say for people how it ended ("exited with code 1"); None while it runs or is frozen."""

    def lost_its_port(self, backend: Backend) -> bool:
        """Whether it ended because somebody took the port that was chosen for it, before it could.

        Another start gets another port.
        """

    def running(self) -> dict[str, str]:
        """Service name -> base URL of every service of this project that runs now.

        "" where it runs but cannot be reached: it holds its GPU all the same, so stop it. What is frozen is
        among them. These services are watched from now on.
        """

    def differs(self, backend: Backend) -> str:
        """Say in what the run that is there was started by another description; "" if by this one."""

    def is_frozen(self, backend: Backend) -> bool:
        """Whether it is there and none of its processes runs."""

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """The last lines that the current (or last) run of the service printed; [] if none can be had.

        After a start that failed before there was a run, none: whatever there is, an earlier run printed.
        """

    def follow_log(self, backend: Backend) -> Iterator[str]:
        """Lines as they come, beginning with the last FOLLOWED_LINES, until the service ends."""

    def watch(self, died: Callable[[str], None]) -> None:
        """Blocks until close(); calls ``died(service name)`` soon after a service ended without ``stop``.

        Only services that ``start`` returned or ``running`` listed are reported, each run once, when nothing
        of it runs any more. An engine may die while its load is still being awaited, or just after: this
        call may come before ``load`` has returned or raised.
        """

    def reconfigure(self, config: HostConfig) -> None:
        """Take services as they are described there from now on.

        What runs goes on, and what is served no longer is known until it was stopped. A service whose
        description has changed is made anew by its next ``start``.
        """

    def problem(self) -> str:
        """Why services cannot be started or stopped now, as far as ``watch`` knows; "" if they can."""

    def close(self) -> None:
        """Ends ``watch`` and frees what this object holds; engines run on."""
