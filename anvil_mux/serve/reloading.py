"""Another configuration takes effect while requests run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping

from anvil_mux.clock import Worker
from anvil_mux.config.change import Change, compare, within
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError, MuxError
from anvil_mux.host.seam import Evicted
from anvil_mux.serve import credentials
from anvil_mux.serve.building import Parts, complete
from anvil_mux.telemetry import eventlog

LOOK_SECONDS = 2.0
"""Seconds between two looks at the files."""

Stamp = tuple[int, int, int] | None

log = logging.getLogger(__name__)


def reload(parts: Parts) -> None:
    """Reload without anybody waiting for it: events tell what came of it, and every problem is printed."""
    try:
        parts.reloads.reload()
    except ConfigError as error:
        for problem in error.problems:
            parts.say(problem)
    except MuxError:
        pass  # the program ends
    except Exception:  # a mistake of ours must not end what runs
        log.exception("the reload failed")


def files(config: Config) -> list[str]:
    """The files that the configuration was read from, as far as they are known here."""
    named = [each for each in credentials.files(config).values() if each]
    return [*config.files, os.path.join(os.path.dirname(config.files[0]), ".env"), *named]


def reconfigure(parts: Parts, config: Config) -> Change:
    """Put a configuration into effect; ConfigError if it cannot be used, and nothing has changed.

    One at a time, in the thread that asks.
    """
    parts.adoption.is_over.wait()  # else engines of before would be taken for those of the new description
    read, before = complete(config, parts.hosts.local), parts.config
    config, change = within(before, read), compare(before, read)
    keys, tls = credentials.checked(config, insecure=parts.options.insecure)
    parts.hosts.take(config)

    def take_effect(running: Mapping[str, str], standby: Mapping[str, Evicted]) -> list[str]:
        """Let those know it first who hear of what follows; requests mean it once its models are there."""
        parts.metrics.know(config)
        if parts.event_log:
            parts.event_log.head(eventlog.header(config, parts.clock.wall(0.0)))
        refused = parts.mux.facts.reconfigure(config, running, standby)
        parts.config = config
        parts.handler.reconfigure(config, keys)
        parts.server.max_connections = config.max_connections
        parts.server.bodies.most = config.max_bodies or 0
        parts.server.tls = tls
        parts.elsewhere.take(config)
        return refused

    # What runs on a host that is not here is found when it is.
    added = [each for each in config.backends if each.name in change.added and parts.hosts.is_here(each.host)]
    try:
        with parts.hosts.busy(each.host for each in added):
            parts.adoption.take_over(added, take_effect)
    except MuxError:  # a host was lost meanwhile
        if parts.config is before:
            parts.hosts.take(before)
        raise
    for warning in [each for each in config.warnings if each not in before.warnings]:
        parts.say(f"warning: {warning}")
    for host in parts.hosts.missing():
        parts.mux.facts.host_lost(host)
    parts.look_at_rights()
    return change


class Watch:
    """Whether any of the files has changed, and been left alone for as long as it took to look again.

    Used by one thread. ``files``: those of the moment; one that is new among them is no change.
    """

    def __init__(self, files: Callable[[], Iterable[str]]) -> None:
        self._files = files
        self._known = self._last = self._stamps()

    def worker(self, reload: Callable[[], object]) -> Worker:
        """Make the thread that looks, and reloads after a change."""

        def look() -> float:
            if self.has_news():
                reload()
            return LOOK_SECONDS

        return Worker("watch-files", look, first=LOOK_SECONDS)

    def has_news(self) -> bool:
        """Return True once for each change."""
        before, self._last = self._last, self._stamps()
        self._known = {**self._last, **self._known}
        changed = any(self._known[file] != stamp for file, stamp in self._last.items())
        if not changed or self._last != before:
            return False
        self._known = self._last
        return True

    def _stamps(self) -> dict[str, Stamp]:
        return {file: _stamp(file) for file in self._files()}


def _stamp(file: str) -> Stamp:
    """Return what changes with the file; None where there is no such file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
