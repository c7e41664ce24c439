"""Another configuration takes effect while requests run."""

from __future__ import annotations

import logging
import os
from functools import partial

from anvil_mux.config.change import Change, compare, within
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError, MuxError
from anvil_mux.host.seam import HostConfig
from anvil_mux.proxy.reloads import LOOK_SECONDS, Watch
from anvil_mux.serve import credentials
from anvil_mux.serve.adoption import Adoption
from anvil_mux.serve.building import Parts, complete
from anvil_mux.telemetry import eventlog

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


def watch_files(parts: Parts, watch: Watch) -> float:
    """Looks for changes once; the seconds until it is to look again."""
    if watch.has_news():
        reload(parts)
    return LOOK_SECONDS


def files(config: Config) -> list[str]:
    """The files that the configuration was read from, as far as they are known here."""
    named = [each for each in credentials.files(config).values() if each]
    return [*config.files, os.path.join(os.path.dirname(config.files[0]), ".env"), *named]


def reconfigure(parts: Parts, adoption: Adoption, config: Config) -> Change:
    """ConfigError: it cannot be used, and nothing has changed. One at a time, in the thread that asks."""
    adoption.is_over.wait()  # else engines of before would be taken for those of the new description
    read, before = complete(config, parts.host), parts.config
    config, change = within(before, read), compare(before, read)
    keys, tls = credentials.checked(config, insecure=parts.options.insecure)
    parts.host.reconfigure(HostConfig.of(config))
    for warning in [each for each in config.warnings if each not in before.warnings]:
        parts.say(f"warning: {warning}")
    parts.config = config
    parts.handler.reconfigure(config, keys)
    parts.server.max_connections = config.max_connections
    parts.server.tls = tls
    parts.metrics.know(config)
    if parts.event_log:
        parts.event_log.head(eventlog.header(config, parts.clock.wall(0.0)))
    added = [backend for backend in config.backends if backend.name in change.added]
    adoption.take_over(added, partial(parts.mux.reconfigure, config))
    return change
