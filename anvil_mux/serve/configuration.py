"""The configuration as it can be served here: with the keys and certificates that it names, within the limits
of this machine and this process; and the watch over the files that it comes from.
"""

from __future__ import annotations

import os
import resource
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from anvil_mux import state
from anvil_mux.clock import Worker
from anvil_mux.config.config import SETTINGS, Config
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.errors import ConfigError
from anvil_mux.host.local import LocalHost
from anvil_mux.proxy.sockets import build_context

FILES, FILES_WITH_TLS = 2, 4
"""The descriptors of a connection whose request is answered."""
OWN_FILES = 256
"""Descriptors that are not for connections, at most."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at the files."""


# Who may ask


def checked(config: Config, *, insecure: bool) -> tuple[Keyring, ssl.SSLContext | None]:
    """ConfigError if keys or certificates cannot be used, or if too little is asked of other processes."""
    keys, tls = secrets(config)
    if (why := open_address(config, keys)) and not insecure:
        raise ConfigError([why])
    return keys, tls


def secrets(config: Config) -> tuple[Keyring, ssl.SSLContext | None]:
    """Read the keys and certificates in other files; ConfigError names all that is wrong with them."""
    problems: list[str] = []
    keys, tls = Keyring(), None
    try:
        file = Path(config.key_file) if config.key_file else None
        keys = load_keys(file, os.environ).sharing(config.max_queue)
    except ConfigError as error:
        problems += error.problems
    try:
        tls = tls_context(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return keys, tls


def open_address(config: Config, keys: Keyring) -> str:
    """Why it should not be listened there, "" if nothing is against it."""
    try:
        loopback = config.host == "localhost" or ip_address(config.host).is_loopback
    except ValueError:
        loopback = False
    if loopback or keys:
        return ""
    text = (
        f"listen: {config.host} can be reached by others, and there are no API keys: everybody there "
        "could use and swap your models. Give keys (key_file, or ANVIL_API_KEYS), listen on 127.0.0.1, "
        "or say --insecure if that is meant."
    )
    origin = config.origins.get("listen", "")
    said = f"{origin}: {text}" if ":" in origin else text
    return Diagnostic(text, said=said, write="key_file: keys.txt", key=("x-anvil", "listen"))


def tls_context(config: Config) -> ssl.SSLContext | None:
    """The certificate that the configuration names, if any; ConfigError if it does not serve."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        return build_context(config.tls_cert, config.tls_key)
    except OSError as error:
        files = f"{config.tls_cert} and {config.tls_key}"
        text = f"tls_cert: {files} cannot be used: {error.strerror or error}"
        raise ConfigError([Diagnostic(text, key=("x-anvil", "tls_cert"))]) from None


# What this machine says


def complete(config: Config, host: LocalHost, *, in_cluster: bool) -> Config:
    """Complete the configuration by what the machine says, and by the files that are read here.

    Not ``in_cluster``: no other host can be reached, so it is in vain to wake one.
    """
    if not in_cluster:
        config = replace(config, wakes={})
    config = bounded(replace(config, said=_digests(config)), host.own_memory())
    memory = host.inventory().memory
    if config.host_memory is not None or memory is None:
        return config
    return replace(config, host_memory=memory * 9 // 10)  # the rest is the system's


def bounded(config: Config, memory: int) -> Config:
    """The configuration with no more memory for bodies and no more connections than there can be."""
    bodies = max(config.max_bodies or memory // 8, config.max_body)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (files - min(OWN_FILES, files // 4)) // (FILES_WITH_TLS if config.tls_cert else FILES)
    if config.max_connections <= most or files == resource.RLIM_INFINITY:
        return replace(config, max_bodies=bodies)
    warnings = config.warnings
    if config.origins.get("max_connections") != "default":
        said = f"max_connections is {most} instead of {config.max_connections}"
        warnings = (*warnings, f"{said}: this program may open {files} files (ulimit -n)")
    return replace(config, max_bodies=bodies, max_connections=most, warnings=warnings)


# The files that it comes from


def files(config: Config) -> list[str]:
    """The files that the configuration was read from, as far as they are known here."""
    named = [file for file in _named_files(config).values() if file]
    return [*config.files, os.path.join(os.path.dirname(config.files[0]), ".env"), *named]


def _named_files(config: Config) -> dict[str, str | None]:
    """Setting -> the file that it names, if it is set."""
    return {key: getattr(config, key) for key, setting in SETTINGS.items() if setting.is_file}


def _digests(config: Config) -> dict[str, str]:
    """Key of a setting -> a digest of the file that it names, by which a change of the file is known."""
    digests = {}
    for key, file in _named_files(config).items():
        with suppress(OSError):  # told by whoever needs it
            digests[key] = sha256(state.read_bytes(file)).hexdigest() if file else ""
    return digests


Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """Whether any of the files has changed, and been left alone for as long as it took to look again.

    Used by one thread. ``files``: those of the moment; one that is new among them is no change. The worker
    calls ``changed`` after each change.
    """

    def __init__(self, files: Callable[[], Iterable[str]], changed: Callable[[], object]) -> None:
        self._files = files
        self._changed = changed
        self._known = self._last = self._stamps()
        self.worker = Worker("watch-files", self._look, first=LOOK_SECONDS)

    def _look(self) -> float:
        if self.has_news():
            self._changed()
        return LOOK_SECONDS

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
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
