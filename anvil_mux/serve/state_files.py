"""The files of a project's state folder: the lock, and what was learned and asked for, for the next start.

The lock is held for as long as the program lives: two on one project would evict each other's engines. The
file ``learned`` has the costs of swaps, the memory of backends and the cards of models; what was learned of a
host of the cluster is kept on that host as well, for an anvil-mux that takes it over. The file ``pause`` is
there while anvil-mux is paused: a pause outlives it. Both are replaced as a whole, so that a program that is
killed leaves the old one. They hold JSON, but lack the suffix, which is that of the records of processes.

The address, by which commands find the program, is announced in the same folder: see remote.py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import Unreadable
from anvil_mux.config.config import Config
from anvil_mux.host.seam import CardRead
from anvil_mux.proxy.operations import KeptPause
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.serve.invocation import CannotServe
from anvil_mux.state import once, state_folder, write_whole

COMMANDS_SECONDS = 60.0
"""How long a start waits for what one that was killed has Docker do."""
VERSION = 2
"""The version of what the file ``learned`` holds."""


# The lock


@contextmanager
def locked(config: Config) -> Iterator[int]:
    """Hold the lock of the project, whose descriptor it is.

    The kernel lets go of it however the program ends, once the commands that it ran have ended too.
    """
    folder = state_folder(config.project, os.environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that can"
        raise CannotServe(f"{folder} cannot be written ({error.strerror}): {advice}") from None
    with lock as file:
        deadline = time.monotonic() + COMMANDS_SECONDS
        while not _lock(file):
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
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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

    def keep(self, pause: KeptPause | None) -> bool:
        """Write down a pause, or that there is none; False if that fails."""
        try:
            if pause is None:
                self._file.unlink(missing_ok=True)
            else:
                write_whole(self._file, json.dumps({"until": pause.until}))
        except OSError as error:
            self._say(f"{self._file} cannot be written, so a restart forgets this: {error.strerror}")
            return False
        return True

    def seconds_left(self) -> float | None:
        """How long the pause of an earlier start lasts still; infinite: until it is resumed; None: none."""
        try:
            until = json.loads(self._file.read_text())["until"]
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
