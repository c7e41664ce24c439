"""kill -9 at random moments under load, round after round, and what has to hold after each restart.

A round is a life under load that is killed at a moment drawn at random, perhaps before it listens or while it
takes over what the one before it left, and a second life that is looked at closely and killed in turn. All
along, somebody else than anvil-mux samples which engines run.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.running import Running

CLIENTS = 4
PATIENCE = 120.0
STARTS = 3.0
RETRY_SECONDS = 0.01
"""Of a client whose connection was refused: nobody listens, or not yet."""


@dataclass
class Rounds:
    """What is killed, what it stands on, and what was seen."""

    begin: Callable[..., Running]
    """Starts anvil-mux with the flags that it is given, and does not wait for it."""
    up: Callable[[], Mapping[str, object]]
    """The engines that are awake, as the machine has them: model -> something that each run has anew."""
    frozen: Callable[[], Mapping[str, object]]
    """The engines that are frozen, in the same way."""
    state: Path
    """The project's state folder."""
    models: Sequence[str]
    draw: random.Random
    longest: float = 2.0
    """Seconds after which a life under load is killed at the latest: some starts of the machine at hand."""
    crashes: int = 0
    listening: int = 0
    """Lives under load that were killed when they listened already."""
    adopted: int = 0
    """Engines that a restart took over."""
    answered: int = 0
    """Whole answers that clients had meanwhile."""
    flaws: list[str] = field(default_factory=list)

    def run(self, count: int) -> None:
        for number in range(count):
            self._crash()
            for flaw in self._restart():
                self.flaws.append(f"round {number}: {flaw}")

    @property
    def seen(self) -> str:
        return (
            f"{self.crashes} crashes under load ({self.listening} of them while it listened), then restarts "
            f"that took over {self.adopted} engines; {self.answered} whole answers, {len(self.flaws)} flaws"
        )

    def _crash(self) -> None:
        """A life under load, up to a random moment."""
        port = free_port()
        running = self.begin("--port", str(port))
        with self._load(port):
            threading.Event().wait(self.draw.uniform(0.0, self.longest))
            running.stop(signal.SIGKILL)
        self.crashes += 1
        self.listening += any("serves http" in line for line in running.output)

    @contextmanager
    def _load(self, port: int) -> Iterator[None]:
        over = threading.Event()
        seeds = [self.draw.random() for _ in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._ask_on, port, random.Random(seed), over) for seed in seeds]
            try:
                yield
            finally:
                over.set()
            self.answered += sum(client.result(PATIENCE) for client in clients)

    def _ask_on(self, port: int, draw: random.Random, over: threading.Event) -> int:
        """One client, until it is over: how many whole answers it had."""
        answered = 0
        while not over.is_set():
            try:
                answered += _stream(port, draw.choice(self.models), draw.randrange(1, 40)).endswith(
                    b"data: [DONE]\n\n"
                )
            except (OSError, http.client.HTTPException):
                over.wait(RETRY_SECONDS)
        return answered

    def _restart(self) -> list[str]:
        """The life after the crash; what is wrong with it."""
        since = time.monotonic()
        running = self.begin("--port", "0")
        try:
            running.wait_until_listening()
            running.wait_until_adopted()
            self.longest = STARTS * (time.monotonic() - since)
            return [*self._wrongly_adopted(running), *self._unserved(running), *self._broken(running)]
        finally:
            running.stop(signal.SIGKILL)

    def _wrongly_adopted(self, running: Running) -> list[str]:
        runs, frozen = dict(self.up()), dict(self.frozen())
        states = {name: about["state"] for name, about in running.get("/healthz")["models"].items()}
        resident = {name for name, state in states.items() if state == "ready"}
        standby = {name for name, state in states.items() if state == "standby"}
        self.adopted += len(resident | standby)
        flaws = []
        others = set(states.values()) - {"ready", "standby", "stopped"}
        if (set(runs), set(frozen)) != (resident, standby) or len(resident) > 1 or others:
            flaws.append(f"it says {states}, and there run {runs}, and frozen {frozen}")
        for name in resident:
            flaws += _flaws_of_answer(running, name)
        if (dict(self.up()), dict(self.frozen())) != (runs, frozen):
            flaws.append(f"{runs} became {self.up()} when asked, and frozen {frozen} became {self.frozen()}")
        return flaws

    def _unserved(self, running: Running) -> list[str]:
        """Every model is served, and leaves no other awake; who was frozen is not started anew."""
        flaws = []
        frozen = dict(self.frozen())
        for model in self.draw.sample(self.models, len(self.models)):
            flaws += _flaws_of_answer(running, model)
            if set(self.up()) != {model}:
                flaws.append(f"{model} answered, and there run {self.up()}")
            if frozen.get(model, self.up().get(model)) != self.up().get(model):
                flaws.append(f"{model} was frozen as {frozen[model]} and runs as {self.up()}")
        return flaws

    def _broken(self, running: Running) -> list[str]:
        """State files that are not whole, and complaints of the program."""
        flaws = [line for line in running.output if "cannot" in line or "Traceback" in line]
        for file in self.state.iterdir():
            if file.suffix == ".json" or file.name in ("learned", "address"):
                try:
                    json.loads(file.read_text())
                except ValueError as error:
                    flaws.append(f"{file.name}: {error}")
        if set((self.state / "services").read_text().split()) != set(self.models):
            flaws.append(f"services: {(self.state / 'services').read_text()}")
        return flaws


def engines(folder: Path, program: str = "bin/demo-engine") -> dict[int, str]:
    """The engines with this state folder that run, whoever knows of them: session -> model."""
    mark = f"XDG_STATE_HOME={folder}".encode()
    found = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            if b"--model" not in words or program.encode() not in b" ".join(words):
                continue
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found[os.getsid(int(entry))] = words[words.index(b"--model") + 1].decode()
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flaws_of_answer(running: Running, model: str) -> list[str]:
    status, _, text = running.chat(model, max_tokens=3)
    answer: Any = json.loads(text)
    return [] if (status, answer.get("model")) == (200, model) else [f"{model}: {status} {text}"]


def _stream(port: int, model: str, tokens: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    messages = [{"role": "user", "content": "Say hello."}]
    body = {"model": model, "stream": True, "max_tokens": tokens, "messages": messages}
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse().read()
    finally:
        connection.close()
