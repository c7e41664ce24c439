"""Commands and web addresses that are told when something happens to a model.

A hook is told of a model that was ``loaded`` or ``unloaded``, of one that ``failed`` (to load, to stop, or by
dying) and of requests that were ``severed``: as one JSON object, on standard input or as the body of a POST.
Each hook follows the feed in a thread of its own and waits for one telling before the next, for at most its
``timeout``, so a slow one delays nobody but itself; what it missed by that is said, and so are its failures,
once until it succeeds again. When the program ends, a command gets a moment, and is then killed with all its
children: nothing of it outlives us.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

from anvil_mux.clock import Worker
from anvil_mux.command import without_keys
from anvil_mux.config.values import Hook
from anvil_mux.telemetry.journal import Feed, FeedPosition, event_as_json

MOST_REPEATED = 200
"""Characters of what a command says that are repeated."""


def occasion(event: Mapping[str, Any]) -> str:
    """The occasion of an event; "" for none."""
    kind, cause = event["kind"], event["cause"]
    if kind in ("severed", "stuck"):
        return "severed" if kind == "severed" else "failed"
    if kind == "ready":
        return "" if cause and cause["kind"] == "reprieved" else "loaded"
    if kind == "standby" or (kind == "stopped" and not cause):
        return "unloaded"
    return "failed" if kind == "stopped" else ""


Delivery = subprocess.Popen[bytes] | Future[str]
"""The process of a command, or the request that is sent to an address."""


def perform(hook: Hook, message: bytes, started: Callable[[Delivery], object] = lambda delivery: None) -> str:
    """Send a message to a hook; return what went wrong, or "". ``started`` is called with the delivery."""
    return _post(hook, message, started) if hook.url else _run(hook, message, started)


def _post(hook: Hook, message: bytes, started: Callable[[Delivery], object]) -> str:
    """Send a message to an address, within the hook's ``timeout`` in all.

    The time-out of a socket begins again with each byte, so an answer that drips would never end: the thread
    that waits for it is left behind.
    """
    delivery = Future[str]()
    started(delivery)

    def send() -> None:
        try:
            delivery.set_result(_sent(hook, message))
        except BaseException as error:
            delivery.set_exception(error)

    try:
        threading.Thread(target=send, name=f"post-{hook.name}", daemon=True).start()
    except RuntimeError as error:  # no more threads
        delivery.set_result("")
        return f"it cannot be sent: {error}"
    try:
        return delivery.result(hook.timeout)
    except FutureTimeout:
        return f"it did not answer within {hook.timeout:g} s"


def _sent(hook: Hook, message: bytes) -> str:
    """Send a message to an address; return what went wrong, or ""."""
    import requests  # takes longer to import than most commands take

    try:
        with requests.post(
            hook.url,
            message,
            headers={"Content-Type": "application/json"},
            timeout=hook.timeout,
            allow_redirects=False,
            stream=True,  # the answer's body is not read
        ) as answer:
            return "" if answer.status_code < 300 else f"it answered {answer.status_code}"
    except requests.RequestException as error:
        return f"{type(error).__name__}: {error}"


def _run(hook: Hook, message: bytes, started: Callable[[Delivery], object]) -> str:
    try:
        child = subprocess.Popen(
            hook.run,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=without_keys(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    started(child)
    with child:
        try:
            _, said = child.communicate(message, hook.timeout)
        except subprocess.TimeoutExpired:
            # What it began in a session of its own lives on, and may never close what it inherited.
            _kill(child)
            return f"it was killed after {hook.timeout:g} s"
    last = said.decode("utf-8", "replace").strip()[-MOST_REPEATED:]
    return "" if child.returncode == 0 else f"it exited with code {child.returncode}: {last}"


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it has ended, and all of its session
        os.killpg(child.pid, signal.SIGKILL)


class HookNotifier:
    """The events for one hook, one after another. Used by one thread, but for ``close``."""

    def __init__(self, hook: Hook, complain: Callable[[str], object]) -> None:
        self._hook = hook
        self._complain = complain
        self._fails = False
        self._worker: Worker | None = None
        self._child: subprocess.Popen[bytes] | None = None
        """The process of the command that was run last."""
        self._request: Future[str] | None = None
        """The request that was sent last; it may have been left behind unanswered."""
        self._is_closed = False
        self._gone: set[str] = set()
        """Backends that were reported as unloaded; one that is demoted then is no news."""

    def worker(self, name: str, feed: Feed, wall: Callable[[float], float]) -> Worker:
        """The thread that tells what comes in ``feed``, until that is closed."""
        place = FeedPosition()

        def turn() -> float | None:
            nonlocal place
            news = feed.news(place, None)
            place = news.place
            self.notify([event_as_json(event, wall(event.at)) for event in news.events], news.missed)
            return None if feed.closed else 0.0

        self._worker = Worker(name, turn, last=turn)  # what came after the feed was closed
        return self._worker

    def close(self, seconds: float) -> None:
        """End its thread, whose feed is closed, once it has told what has happened until now.

        A command that runs after these seconds is killed, and no other one is started. Any thread.
        """
        if self._worker is None:
            return
        self._worker.close()
        if self._worker.join(seconds):
            return
        self._is_closed = True  # before the look at the child, as ``_note`` does it the other way round
        if child := self._child:
            self._kill_running(child)

    def _note(self, delivery: Delivery) -> None:
        if isinstance(delivery, Future):
            self._request = delivery
            return
        self._child = delivery
        if self._is_closed:
            self._kill_running(delivery)

    @staticmethod
    def _kill_running(child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            _kill(child)

    def notify(self, events: Iterable[Mapping[str, Any]], missed: int) -> None:
        """Tells of those events that the hook is for."""
        if missed:
            self._complain(f"hook {self._hook.name} is too slow: {missed} events were not delivered")
        for event in events:
            what = self._news(event)
            if what in self._hook.on and not self._is_closed:
                wrong = self._perform(json.dumps({"event": what, **event}).encode())
                if wrong and not self._fails:
                    self._complain(f"hook {self._hook.name} failed: {wrong}")
                self._fails = bool(wrong)

    def _perform(self, message: bytes) -> str:
        """Send a message; return what went wrong, or "". One answer that never ends has one thread."""
        if self._request is not None and wait([self._request], self._hook.timeout).not_done:
            return "it has not ended its answer to the event before"
        return perform(self._hook, message, self._note)

    def _news(self, event: Mapping[str, Any]) -> str:
        what, backend = occasion(event), event["backend"]
        if what == "unloaded":
            if backend in self._gone:
                return ""
            self._gone.add(backend)
        elif what:
            self._gone.discard(backend)
        return what
