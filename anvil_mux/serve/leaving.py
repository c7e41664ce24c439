"""The engines at the program's end run on or are stopped, as ``on_exit`` says.

One that is still loading is stopped in any case: no later start could tell how far it is.
"""

from __future__ import annotations

from anvil_mux.errors import MuxError
from anvil_mux.serve.building import Parts


def leave_engines(parts: Parts) -> None:
    """Stop what is not to run on, and tell what does."""
    config, overview = parts.config, parts.mux.overview
    running = _running(parts)
    leaving, loading = {backend.name: backend for backend in overview.leaving()}, overview.loading()
    unfit = [(backend, "the configuration has changed") for backend in leaving.values()]
    here = [each for each in config.backends if each.name not in leaving and parts.hosts.is_here(each.host)]
    unfit += [(backend, "it was still loading") for backend in here if backend.name in loading]
    left = [backend for backend in here if backend.name in running and backend.name not in loading]
    if config.on_exit == "stop":
        unfit += [(backend, "on_exit: stop") for backend in left]
        left = []
    parts.adoption.stop_all(unfit)
    names = ", ".join(backend.name for backend in left)
    parts.say(f"stopped; kept running for the next start (on_exit: keep): {names}" if left else "stopped")


def _running(parts: Parts) -> set[str]:
    """The backends that run, on all hosts that can be asked."""
    found: set[str] = set()
    used = {backend.host for backend in parts.config.backends if not backend.url}
    used.update(backend.host for backend in parts.mux.overview.leaving() if not backend.url)
    for name in filter(parts.hosts.is_here, used.intersection(parts.hosts.all.by_name)):
        try:
            found.update(parts.hosts.all[name].running())
        except MuxError as error:
            parts.say(f"cannot see what runs{f' on {name}' if name else ''}: {error.message}")
    return found
