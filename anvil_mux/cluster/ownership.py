"""The anvil-mux that a host belongs to, kept in the state folder of the host's agent.

The greatest owner that has claimed the host is remembered also across runs of the agent, so that one that was
taken over stays fenced. A lock of the kernel sees to it that of two agents of one name, such as one that is
ending and one that is starting, only one changes anything; commands that an agent had begun hold it too.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

from anvil_mux.cluster.frames import Claimed, Fenced, Owner
from anvil_mux.errors import BackendError
from anvil_mux.state import write_whole


class Ownership:
    """The owner of one host. Not safe for threads: the agent calls it under its lock."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._lock: int | None = None
        self._is_given_up = False
        self._owner: Owner | None = None
        with suppress(BackendError):  # whoever wants to change anything reads it again, and is told
            self._owner = self._read()

    @property
    def owner(self) -> Owner | None:
        """The owner; None: nobody has claimed the host, or its owner has given it up."""
        return None if self._is_given_up else self._owner

    @property
    def epoch(self) -> int:
        """The greatest epoch that the host was ever claimed with; 0: none."""
        return self._owner.epoch if self._owner else 0

    def claim(self, owner: Owner, takeover: bool) -> bool:
        """Make it the host's owner; return whether it is another than before.

        Claimed, if another one has the host and it is no takeover; Fenced, if a greater one has had it.
        """
        self.hold()
        before = self._owner
        if self.owner and self.owner.id != owner.id and not takeover:
            raise Claimed(f"host {self._host} belongs to {_named(self.owner)}; --takeover takes it over")
        if before and owner[:2] < before[:2]:
            raise Fenced(f"host {self._host} was claimed by {_named(before)}, in epoch {before.epoch}")
        self._write(owner, is_given_up=False)
        return before is None or before[:2] != owner[:2]

    def give_up(self, owner: Owner) -> None:
        """Let anybody claim the host who is greater."""
        self.check(owner)
        self._write(owner, is_given_up=True)

    def check(self, owner: Owner) -> None:
        """Raise Fenced unless the host belongs to this owner."""
        self.hold()
        if self.owner is None:
            raise Fenced(f"host {self._host} belongs to nobody: it has to be claimed")
        if self.owner[:2] != owner[:2]:
            raise Fenced(f"host {self._host} belongs to {_named(self.owner)}, in epoch {self.owner.epoch}")

    def hold(self) -> int:
        """Return the descriptor of the lock of this agent's name; BackendError while others hold it."""
        if self._lock is not None:
            return self._lock
        file = self._folder / "lock"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendError(f"{file} of host {self._host} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise BackendError(
                f"another agent of host {self._host}, or a command that it began, still runs there"
            ) from None
        try:
            self._owner = self._read()  # another agent may have written it since
        except BackendError:
            os.close(lock)
            raise
        self._lock = lock
        return lock

    def close(self) -> None:
        """Let another agent of this name have the host."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self) -> Owner | None:
        """Read the owner; BackendError where it cannot be told who that is: it may still be there."""
        try:
            found = json.loads(self._file.read_text())
            owner = Owner(int(found["epoch"]), str(found["id"]), str(found["name"]))
            self._is_given_up = bool(found["given_up"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BackendError(
                f"{self._file} cannot be read ({type(error).__name__}: {error}), so it is not known to whom"
                f" host {self._host} belongs: remove that file there if no other anvil-mux has the host"
            ) from None
        return owner

    def _write(self, owner: Owner, *, is_given_up: bool) -> None:
        try:
            write_whole(self._file, json.dumps({**owner._asdict(), "given_up": is_given_up}), is_durable=True)
        except OSError as error:
            raise BackendError(f"{self._file} cannot be written: {error.strerror}") from None
        self._owner, self._is_given_up = owner, is_given_up

    @property
    def _file(self) -> Path:
        return self._folder / "owner"


def _named(owner: Owner) -> str:
    return owner.name or f"the anvil-mux {owner.id}"
