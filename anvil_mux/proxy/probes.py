"""The probes, /healthz and the metrics, from memory: whatever Docker and the engines are doing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from anvil_mux import __version__
from anvil_mux.clock import mistakes
from anvil_mux.config.config import Backend
from anvil_mux.host.seam import Seen, Sight
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol.http1 import Field
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.reloads import Reloads
from anvil_mux.proxy.reply import JSON
from anvil_mux.telemetry import healthz

TEXT = (b"Content-Type", b"text/plain; charset=utf-8")

Answer = tuple[int, Field, bytes]
"""Status, Content-Type and body."""


class Probes:
    """Answers probes. Any thread; the handler alone writes ``draining``."""

    def __init__(
        self,
        mux: Multiplexer,
        metrics: Callable[[str], tuple[str, bytes]],
        checks: Mapping[str, Callable[[], str]],
        sight: Callable[[], Sight],
        reloads: Reloads | None,
        notes: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        self._mux = mux
        self._metrics = metrics
        self.checks = checks
        """Name -> what is wrong with it, from memory; nothing when it is well."""
        self.sight = sight
        """The use of the GPUs, from memory."""
        self._reloads = reloads
        self._notes = notes or {}
        """Name -> what is to be known and keeps nobody from using us, from memory."""
        self._special: tuple[tuple[Backend, ...], dict[str, Backend]] = ((), {})
        """The backends of a configuration, and by model those that are elsewhere or have fallbacks."""
        self._started = time.time()
        self.draining = False

    def hello(self, _: Asked) -> Answer:
        lines = (f"  {model.model}  {model.offered_state}\n" for model in self._mux.overview.status().models)
        text = f"anvil-mux {__version__}\n\nmodels:\n{''.join(lines)}\nstate: /healthz  metrics: /metrics\n"
        return 200, TEXT, text.encode()

    def readyz(self, asked: Asked) -> Answer:
        unseen = ", ".join(self._mux.overview.unseen)
        adoption = unseen and f"it is not known yet whether these run already: {unseen}"
        problems = {**self._problems(), "adoption": adoption}
        ready = not any(problems.values())
        text = "ok\n" if ready else "not ready\n"
        wants_all = not ready or "verbose" in asked.request.query.split("&")
        if wants_all and asked.access.tells_state(asked.key):
            lines = (f"[{'-' if why else '+'}]{name} {why or 'ok'}\n" for name, why in problems.items())
            notes = (f"[~]{name} {why}\n" for name, why in self._notes_now().items())
            text = "".join([*lines, *notes]) + text
        return 200 if ready else 503, TEXT, text.encode()

    def healthz(self, _: Asked) -> Answer:
        state = self.state()
        status = 503 if state["problems"] else 200
        return status, JSON, json.dumps(state, indent=1).encode("ascii") + b"\n"

    def state(self, *, brief: bool = False) -> dict[str, Any]:
        """The state that /healthz tells; ``brief``: as those are told who follow it."""
        status = self._mux.overview.status()
        problems = {name: why for name, why in self._problems().items() if why}
        ready = [model.model for model in status.models if model.offered_state == "ready"]
        hosts = {host.host: healthz.host_state(host) for host in status.hosts}
        sight = self.sight()
        return {
            "status": "unhealthy" if problems else "ok",
            "version": __version__,
            "uptime_seconds": round(time.time() - self._started, 1),
            "problems": problems,
            "notes": self._notes_now(),
            "paused": healthz.pause_state(status.pause, self._mux.overview.wall),
            "adopting": self._mux.overview.unseen,
            "waiting": status.waiting,
            "leases": status.leases,
            "models": {
                m.model: healthz.model_state(m, brief=brief) | self.external_state(m.model)
                for m in status.models
            },
            "gpus": {gpu.gpu: healthz.gpu_state(gpu, sight.get(gpu.gpu, Seen())) for gpu in status.gpus},
            **({"hosts": hosts} if hosts else {}),
            **({"any_of": self._any_of()} if self._mux.overview.any_of() else {}),
            "resident": ready[0] if ready else None,
            "registry": [model.model for model in status.models],
            "reload": self._reloads.told() if self._reloads else None,
        }

    def _any_of(self) -> dict[str, dict[str, object]]:
        """The names that stand for several models, and the one that would serve now."""
        choose = self._mux.overview.choose
        found = self._mux.overview.any_of().items()
        return {name: {**each.to_json(), "serves": choose(each.models)} for name, each in found}

    def external_state(self, model: str) -> dict[str, object]:
        """The part of a model's state that the scheduler does not know; see ``healthz.external_state``."""
        backends = self._mux.overview.configured()
        known, found = self._special
        if known is not backends:
            found = {backend.model: backend for backend in backends if backend.url or backend.fallback}
            self._special = backends, found
        return healthz.external_state(found[model], self._mux.circuits) if model in found else {}

    def _problems(self) -> dict[str, str]:
        found = {name: check() for name, check in self.checks.items()}
        found["threads"] = "; ".join(f"{thread}: {mistake}" for thread, mistake in mistakes().items())
        found["accepting"] = "shutting down" if self.draining else ""
        return found

    def _notes_now(self) -> dict[str, str]:
        return {name: why for name, note in self._notes.items() if (why := note())}

    def scrape(self, asked: Asked) -> Answer:
        content_type, text = self._metrics(asked.request.fields.get(b"accept", b"").decode("latin-1"))
        return 200, (b"Content-Type", content_type.encode("ascii")), text
