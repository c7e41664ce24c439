"""A running anvil-mux, as the commands see it: where it is, what it answers, what it tells.

Whoever serves writes its address into its project's state folder (``announce``), next to the lock that it
holds as long as it lives, so that commands find it without being told: the one that serves the compose file
at hand, or the only one there is.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from anvil_mux.errors import BackendError, MuxError, printable
from anvil_mux.protocol import foreign
from anvil_mux.state import is_served, state_folder, text_of, write_whole

DEFAULT_URL = "http://127.0.0.1:9292"
ASK_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""The longest silence of a stream of events; a comment comes every 15 s."""


class NotRunning(MuxError):
    """No anvil-mux answers at the address."""

    exit_code = 3


# Where it is


class RunningMux(NamedTuple):
    """One that serves on this machine."""

    url: str
    files: tuple[str, ...]
    """The absolute paths of its compose files."""


@contextmanager
def announced(folder: Path, place: RunningMux) -> Iterator[None]:
    """Announce the address in the state ``folder`` of the project, where commands find it, for the body."""
    file = folder / "address"
    try:
        write_whole(file, json.dumps(place._asdict()))
    except OSError:
        pass  # a full disk: commands can still be told the address
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def places(home: Path) -> list[RunningMux]:
    """The anvil-mux whose state folders are under ``home`` and whose locks are held."""
    return [place for place, _ in _served(home)]


def _served(home: Path) -> Iterator[tuple[RunningMux, Path]]:
    """Yield the same, each with its state folder."""
    for file in sorted(home.glob("*/address")):
        try:
            note = foreign.read(file.read_text())
            place = RunningMux(str(note["url"]), tuple(map(str, note["files"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_served(file.parent):
            yield place, file.parent


def choose(found: Sequence[RunningMux], files: Sequence[str | Path]) -> str | None:
    """The one that serves ``files``; without files the only one; None if there is none."""
    wanted = {os.path.abspath(file) for file in files}
    fit = [place for place in found if not wanted or wanted & set(place.files)]
    if len(fit) > 1:
        names = ", ".join(f"{place.url} ({', '.join(place.files)})" for place in fit)
        raise NotRunning(f"several anvil-mux run here; say which with --url: {names}")
    return fit[0].url if fit else None


# What it answers


def ask(
    url: str,
    method: str,
    path: str,
    body: object = None,
    *,
    timeout: float | None = ASK_SECONDS,
    accept: Sequence[int] = (200,),
) -> Any:
    """The JSON that it answers; MuxError with its own words if it refuses."""
    with _response(url, method, path, body, timeout) as response:
        text = response.read()
        return _answer(url, response.status, text, accept)


def query(path: str, **values: str) -> str:
    """A path with a query."""
    return f"{path}?{urlencode(values)}"


def events(url: str, *, key: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The messages from now on, after a snapshot: (kind, data), without an end of their own.

    ``key``: in place of that of ANVIL_API_KEY.
    """
    with _response(url, "GET", "/events", None, SILENT_SECONDS, key=key) as response:
        if response.status != 200:
            _answer(url, response.status, response.read(), ())
        kind = ""
        for line in response:
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, _printable(foreign.read(line[6:]))


@contextmanager
def _response(
    url: str, method: str, path: str, body: object, timeout: float | None, key: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    connect = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(url)
        host, port = parts.hostname if parts.scheme in connect else None, parts.port
    except ValueError:
        host = None
    if not host:
        raise NotRunning(f"{url} is no address of an anvil-mux; it looks like {DEFAULT_URL}")
    connection = connect[parts.scheme](host, port, timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("ANVIL_API_KEY") if key is None else key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        yield connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or error
        is_refused = isinstance(error, ConnectionRefusedError)
        advice = _advice(host, port, is_refused=is_refused)
        raise NotRunning(f"no anvil-mux answers at {url} ({why}); {advice}") from None
    finally:
        connection.close()


def greet(url: str) -> None:
    """Raise NotRunning, soon, if it does not answer: what follows may take any time."""
    with _response(url, "GET", "/livez", None, ASK_SECONDS) as response:
        response.read()


def _advice(host: str, port: int | None, *, is_refused: bool) -> str:
    """Return what to do about an address where nothing answers."""
    for place, folder in _served(state_folder("", os.environ)):
        with suppress(ValueError):
            parts = urlsplit(place.url)
            if (parts.hostname, parts.port) == (host, port):
                return _revive(folder)
    if is_refused:
        return "start one: anvil-mux serve FILE"
    return "a program listens there that does not answer in time, or a network is in between"


def _revive(folder: Path) -> str:
    """Return what to do about an anvil-mux that holds its lock and does not answer."""
    from anvil_mux.host.local import is_process_stopped  # not needed where one answers

    holder = text_of(folder / "lock")
    is_stopped = is_process_stopped(int(holder)) if holder.isdecimal() else None
    if is_stopped is None:
        return f"the project {folder.name} is locked by a process that does not answer: see {folder / 'lock'}"
    begun = f"process {holder} serves the project {folder.name}"
    again = "start it again: its engines run on and are taken over"
    if is_stopped:
        return f"{begun} and is stopped: continue it with kill -CONT {holder}"
    return f"{begun} and does not answer: wait, or end it with kill {holder} (at worst kill -9) and {again}"


def _answer(url: str, status: int, text: bytes, accept: Sequence[int]) -> Any:
    try:
        answer = _printable(foreign.read(text))
    except ValueError:
        raise NotRunning(f"what answers at {url} is no anvil-mux") from None
    if status not in accept:
        error = answer.get("error", {}) if isinstance(answer, dict) else {}
        why = str(error.get("message") or f"{url} answered {status}")
        raise BackendError(f"{why} Commands take it from ANVIL_API_KEY." if status == 401 else why)
    return answer


def _printable(value: Any) -> Any:
    """The same, with texts that a terminal may have: some are an engine's own."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value
