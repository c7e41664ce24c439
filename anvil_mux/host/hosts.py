"""Several hosts behind the calls that name a backend: each call goes to the backend's own host."""

from __future__ import annotations

from collections.abc import Mapping

from anvil_mux.config.config import Backend
from anvil_mux.host.external import ExternalServer
from anvil_mux.host.seam import LOG_LINES, Evicted, Found, Host, Loaded


class Hosts:
    """All hosts of one anvil-mux, by name; "" is the one that it runs on. The calls are those of ``Host``.

    A backend whose server somebody else runs is on none of them.
    """

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.by_name = hosts
        self._external = ExternalServer()

    def _of(self, backend: Backend) -> Host | ExternalServer:
        return self._external if backend.url else self.by_name[backend.host]

    def __getitem__(self, name: str) -> Host:
        return self.by_name[name]

    def adopt(self, backend: Backend) -> Found:
        return self._of(backend).adopt(backend)

    def load(self, backend: Backend, how: str, number: int) -> Loaded:
        return self._of(backend).load(backend, how, number)

    def cancel(self, backend: Backend, number: int) -> None:
        self._of(backend).cancel(backend, number)

    def evict(self, backend: Backend, how: str) -> Evicted:
        return self._of(backend).evict(backend, how)

    def demote(self, backend: Backend, how: str, to: str) -> Evicted:
        return self._of(backend).demote(backend, how, to)

    def stop(self, backend: Backend) -> None:
        self._of(backend).stop(backend)

    def ended(self, backend: Backend) -> str | None:
        return self._of(backend).ended(backend)

    def answers(self, backend: Backend, limit: float) -> bool | None:
        return self._of(backend).answers(backend, limit)

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        return self._of(backend).log_tail(backend, lines)


AnyHost = Host | Hosts
"""The one that performs steps on backends: their only host, or all hosts."""
