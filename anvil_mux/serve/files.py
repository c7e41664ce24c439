"""The files of one anvil-mux: the keys and certificates that its configuration names, the watch over the
files that it comes from, and those of its project's state folder, which it keeps for the next start.

In the state folder a lock is held for as long as the program lives: two on one project would evict each
other's engines. The file ``learned`` has the costs of swaps, the memory of backends and the cards of models;
what was learned of a host of the cluster is kept on that host as well, for an anvil-mux that takes it over.
The file ``pause`` is there while anvil-mux is paused: a pause outlives it. Both are replaced as a whole, so
that a program that is killed leaves the old one. They hold JSON, but lack the suffix, which is that of the
records of processes.

The address, by which commands find the program, is announced in the same folder: see remote.py.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_DGRAM, gethostname, socket

from anvil_mux import state
from anvil_mux.clock import Worker
from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import Unreadable
from anvil_mux.config.config import SETTINGS, Config
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.config.values import site
from anvil_mux.errors import ConfigError
from anvil_mux.host.seam import CardRead
from anvil_mux.protocol import foreign
from anvil_mux.proxy.connections import build_context
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.serve.invocation import CannotServe
from anvil_mux.state import note_holder, once, open_lock, state_folder, try_lock, write_whole

LOOK_SECONDS = 2.0
"""Seconds between two looks at the files."""
MOST_LOOKS = 5
"""How many looks in a row may find files changed before that is a change, although they still change."""
COMMANDS_SECONDS = 60.0
"""How long a start waits for what one that was killed has Docker do."""
PAGE_OF_URL = "elsewhere.md"
VERSION = 2
"""The version of what the file ``learned`` holds."""


# Keys and certificates


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


def own_address(config: Config) -> Iterator[str]:
    """Yield a warning for each external server that is this anvil-mux: its requests would come back."""
    for backend in config.backends:
        if not backend.url:
            continue
        there = site(backend.url)
        if there.port == config.port and _is_own(there.host, config.host):
            text = f"{backend.model}: url: {backend.url} is the address of this anvil-mux: requests come back"
            yield Diagnostic(
                f"{text}. Name another server, or make it an alias or a preset.", page=PAGE_OF_URL
            )


def _is_own(host: str, listening: str) -> bool:
    """Return whether an anvil-mux that listens at ``listening`` is reached at ``host``; nobody is asked."""
    if host.rstrip(".") == listening:
        return True
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
        bound = ip_address("127.0.0.1" if listening == "localhost" else listening)
    except ValueError:
        return host.lower() == gethostname().lower()
    if not bound.is_unspecified:
        return address == bound
    family = AF_INET6 if address.version == 6 else AF_INET
    with suppress(OSError), socket(family, SOCK_DGRAM) as probe:
        probe.bind((str(address), 0))  # possible for addresses of this machine only
        return True
    return False


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


# The files that a configuration comes from


def files_of(config: Config) -> list[str]:
    """The files that the configuration was read from, as far as they are known here."""
    named = [file for file in _named_files(config).values() if file]
    return [*config.files, os.path.join(os.path.dirname(config.files[0]), ".env"), *named]


def _named_files(config: Config) -> dict[str, str | None]:
    """Setting -> the file that it names, if it is set."""
    return {key: getattr(config, key) for key, setting in SETTINGS.items() if setting.is_file}


def digests(config: Config) -> dict[str, str]:
    """Key of a setting -> a digest of the file that it names, by which a change of the file is known."""
    digests = {}
    for key, file in _named_files(config).items():
        with suppress(OSError):  # told by whoever needs it
            digests[key] = sha256(state.read_bytes(file)).hexdigest() if file else ""
    return digests


Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """Whether any of the files has changed, and been left alone for as long as it took to look again.

    Files that never are left alone have changed after ``MOST_LOOKS``.

    Used by one thread. ``files``: those of the moment; one that is new among them is no change. The worker
    calls ``changed`` after each change.
    """

    def __init__(self, files: Callable[[], Iterable[str]], changed: Callable[[], object]) -> None:
        self._files = files
        self._changed = changed
        self._known = self._last = self._stamps()
        self._looks = 0
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
        self._looks = self._looks + 1 if changed else 0
        if not changed or (self._last != before and self._looks < MOST_LOOKS):
            return False
        self._known, self._looks = self._last, 0
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


# The lock


@contextmanager
def locked(config: Config, environ: Mapping[str, str] = os.environ) -> Iterator[int]:
    """Hold the lock of the project, whose descriptor it is; ``environ`` says where its state folder is.

    The kernel lets go of it however the program ends, once the commands that it ran have ended too.
    """
    folder = state_folder(config.project, environ)
    try:
        descriptor = open_lock(folder)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that can"
        raise CannotServe(f"{folder} cannot be written ({error.strerror}): {advice}") from None
    with os.fdopen(descriptor, "r") as file:
        deadline = time.monotonic() + COMMANDS_SECONDS
        while not try_lock(descriptor):
            file.seek(0)
            holder = file.read()
            if _is_there(holder):
                raise CannotServe(
                    f"another anvil-mux (process {holder}) serves the project {config.project} already, and "
                    "two would evict each other's engines. Stop it, or give this one another `project`."
                )
            if time.monotonic() >= deadline:
                raise CannotServe(
                    f"commands of an anvil-mux that was killed (process {holder or '?'}) still run after "
                    f"{COMMANDS_SECONDS:g} s; is dockerd stuck? `docker ps` tells."
                )
            time.sleep(0.05)
        note_holder(descriptor)
        yield descriptor


def _is_there(holder: str) -> bool:
    """Whether the process that wrote its id still runs."""
    try:
        os.kill(int(holder), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


# What was learned


@dataclass(frozen=True, slots=True)
class Known:
    """The content of the file ``learned``."""

    costs: Sequence[Cost] = ()
    footprints: Sequence[Footprint] = ()
    cards: Sequence[CardRead] = ()

    def of_host(self, host: str, config: Config) -> Known:
        """Return what is known of one host."""
        there = {backend.name for backend in config.backends if backend.host == host}
        return Known(
            [cost for cost in self.costs if cost.host == host],
            [each for each in self.footprints if each.backend in there],
            tuple([each for each in self.cards if each.backend in there]),
        )

    def with_more(self, other: Known) -> Known:
        """Return this, and what only the other knows."""
        costs = {(each.host, each.source, each.target, each.way) for each in self.costs}
        footprints = {(each.backend, each.way) for each in self.footprints}
        cards = {each.backend for each in self.cards}
        return Known(
            [*self.costs, *(c for c in other.costs if (c.host, c.source, c.target, c.way) not in costs)],
            [*self.footprints, *(f for f in other.footprints if (f.backend, f.way) not in footprints)],
            (*self.cards, *(each for each in other.cards if each.backend not in cards)),
        )


def as_text(known: Known) -> str:
    """Write what is known as JSON."""
    return json.dumps({"version": VERSION, **asdict(known)}, indent=1)


def from_text(text: str, config: Config) -> Known:
    """Read what is known of backends that are still served, on the GPUs that they still have.

    Unreadable if it is not as it was written.
    """
    content = frames.parse(text, is_foreign=True)
    if isinstance(content, dict):
        if content.pop("version", None) != VERSION:
            return Known()
        content = {"footprints": [], "cards": [], **content}  # a file may lack them
    known: Known = frames.of(Known, content)
    models = {backend.model for backend in config.backends}
    gpus = {backend.name: set(backend.gpus) for backend in config.backends}
    return Known(
        [cost for cost in known.costs if cost.target in models and cost.seconds >= 0.0],
        [each for each in known.footprints if each.backend in gpus and _is_sound(each, gpus[each.backend])],
        tuple([replace(each, card=each.card.sound()) for each in known.cards if each.backend in gpus]),
    )


def _is_sound(footprint: Footprint, gpus: set[str]) -> bool:
    held, residual = footprint.held, footprint.residual
    amounts = [*held.values(), *residual.values(), footprint.host_bytes]
    return held.keys() == residual.keys() <= gpus and all(amount >= 0 for amount in amounts)


def recalled(texts: Mapping[str, str], config: Config) -> Known:
    """Read what hosts of the cluster have kept, by the host's name; what cannot be read is left out."""
    found = Known()
    for host, text in texts.items():
        with suppress(Unreadable):
            found = found.with_more(from_text(text, config).of_host(host, config))
    return found


class LearnedFile:
    """The file ``learned`` in ``folder``. Used by one thread at a time; ``complain`` is told once.

    If it cannot be read, that is said and forgotten: everything in it can be learned again.
    """

    def __init__(self, folder: Path, complain: Callable[[str], object]) -> None:
        self._file = folder / "learned"
        self._complain = once(complain)
        self._saved = Known()

    def read(self, config: Config) -> Known:
        """Read what is known of backends that are still served, on the GPUs that they still have."""
        try:
            self._saved = from_text(self._file.read_text(), config)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, Unreadable) as error:
            self._complain(
                f"{self._file} cannot be read, so the costs of swaps are learned from scratch: {error}"
            )
        return self._saved

    def save(self, known: Known) -> None:
        """Write what has changed since it was read or saved."""
        if known == self._saved:
            return
        self._saved = known
        try:
            write_whole(self._file, as_text(known))
        except OSError as error:
            self._complain(
                f"{self._file} cannot be written, so the learned costs of swaps will be lost: {error}"
            )


# What was asked for


class PauseFile:
    """The file ``pause`` in ``folder``. Used by one thread at a time; ``say`` is told what goes wrong.

    One that cannot be read counts as a pause without an end: whoever has been lent the GPUs keeps them until
    somebody says otherwise.
    """

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self._file = folder / "pause"
        self._say = say

    def keep(self, until: float | None) -> bool:
        """Write down when a pause ends (infinite: when it is resumed), or that there is none; False if that
        fails."""
        try:
            if until is None:
                self._file.unlink(missing_ok=True)
            else:
                write_whole(self._file, json.dumps({"until": None if math.isinf(until) else until}))
        except OSError as error:
            self._say(f"{self._file} cannot be written, so a restart forgets this: {error.strerror}")
            return False
        return True

    def seconds_left(self) -> float | None:
        """How long the pause of an earlier start lasts still; infinite: until it is resumed; None: none."""
        try:
            until = foreign.read(self._file.read_text())["until"]
            left = math.inf if until is None else float(until) - time.time()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._say(f"{self._file} cannot be read, so anvil-mux stays paused until it is resumed: {error}")
            return math.inf
        if left > 0:
            return left
        self.keep(None)
        return None
