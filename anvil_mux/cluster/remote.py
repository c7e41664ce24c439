"""A host on another machine behind the seam: what is asked of it crosses to its agent.

Steps are begun there and their ends fetched by a long poll, so a step goes on while the way to the agent is
interrupted, and its end is learned afterwards. Where the agent was started anew meanwhile the step is begun
again, which is what a start or a stop of a service needs then. Steps end at once on a host that is given up.

An agent that was started anew knows nothing: until ``contact`` has claimed and configured it, calls fail as
if it were silent. Requests and the health question go straight to the engines, not through the agent.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from anvil_mux import __version__
from anvil_mux.clock import Clock
from anvil_mux.cluster import frames
from anvil_mux.cluster.channel import AgentSilent, ClusterControl
from anvil_mux.cluster.frames import (
    AgentAnswer,
    AgentCall,
    Node,
    NotConfigured,
    Owner,
    StepState,
    UnknownStep,
)
from anvil_mux.config.config import WAYS, Backend
from anvil_mux.errors import BackendError, ConfigError, LoadError, MuxError
from anvil_mux.host import engines
from anvil_mux.host.seam import (
    LOG_LINES,
    Awake,
    Evicted,
    Found,
    GpusRead,
    HostConfig,
    HostNews,
    Inventory,
    Loaded,
    Occupant,
    url_of,
)

LIMIT_SECONDS = 5.0
"""How long an agent may take over a call that is answered from memory."""
LONG_SECONDS = 75.0
"""How long it may take over one for which Docker is asked."""
POLL_SECONDS = 10.0
"""How long one question for the end of a step waits."""
PATIENCE_SECONDS = 20.0
"""How long the agent may be silent during a step on which an adoption or the program's end waits."""
SETTLE_SECONDS = 15.0
"""How long the steps of before a loss may take to end."""
AGAIN_SECONDS = 0.5
MOST_GPUS = 64
"""How many GPUs a host may say it has: each choice among them is a backend."""
GPU_ID = re.compile(r"[A-Za-z0-9:._-]+")
FACTS = {"version": "anvil-mux", "python": "Python", "ray": "Ray"}
"""The facts about an agent that people are told."""


FOUND: Any = Found
WHY: Any = str | None
"""The types that an adoption and the end of a backend have, which are no classes."""

T = TypeVar("T")


class OtherVersion(MuxError):
    """The agent of a host is of another version of anvil-mux."""


class RemoteHost:
    """One host of the cluster, see ``seam.Host``. Any thread, but ``contact`` for one at a time."""

    def __init__(self, name: str, control: ClusterControl, clock: Clock) -> None:
        self.name = name
        self.node = Node(name)
        """The machine that it is in the cluster, as that knows it; it may be there no more."""
        self.owner = Owner(0, "")
        """The owner that it is claimed for; its epoch is that of this host."""
        self.is_silent = False
        """Whether its agent did not answer when it was last heard of; the next contact ends that."""
        self.takeover = False
        """Whether it is claimed although another anvil-mux has it."""
        self._is_ours = False
        self._control = control
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # The lock guards what follows; whoever reads one of them needs it not.
        self._inventory = self._last_inventory = Inventory(address="")
        self._instance = ""
        """The run of the agent that was claimed and configured; "": none."""
        self._wanted: HostConfig | None = None
        self._in_effect: HostConfig | None = None
        """The configuration that this run of the agent has."""
        self._losses = 0
        """How often the host was given up: steps begun before end."""
        self._urls: dict[str, str] = {}
        self._cancelled: dict[str, int] = {}  # backend -> the last of its loads that was cancelled
        self._problem = ""
        self._is_watched = False
        self.machine = ""
        """The id of the machine that its agent is on; "": not known."""
        self.versions: dict[str, str] = {}
        """The facts that the agent told of itself last."""
        self.round_trip_seconds: float | None = None
        """How long the last call took that is answered from memory."""

    # The agent

    def hello(self, limit: float = LIMIT_SECONDS) -> dict[str, str]:
        """Return what the agent says of itself; AgentSilent, or OtherVersion with what to do."""
        begun = self._clock.now()
        answer = self._control.call(self.name, "hello", "", limit)
        found = frames.read(dict[str, str], answer, is_foreign=True)
        self.round_trip_seconds = self._clock.now() - begun
        if (version := found.get("version")) != __version__:
            raise OtherVersion(
                f"host {self.name} has anvil-mux {version}, and this is {__version__}: install the same on "
                "both, then restart Ray there"
            )
        self.machine = found.get("machine", "")
        self.versions = {FACTS[name]: text for name, text in found.items() if name in FACTS}
        return found

    def claim(self) -> None:
        """Make the host ours; Claimed if another anvil-mux has it, Fenced if one has taken it from us."""
        if not self._is_ours:  # greater than whoever had it before; from then on nobody may be greater
            epoch = frames.read(int, self.hello().get("epoch", "0"), is_foreign=True)
            self.owner = self.owner._replace(epoch=max(self.owner.epoch, epoch + 1))
        self._call(NoneType, "claim", self.owner.name, self.takeover)
        self._is_ours = True

    def contact(self) -> bool:
        """Claim and configure this run of the agent if it is new; whether it is. AgentSilent, Fenced."""
        instance = self.hello().get("instance", "")
        self.is_silent = False
        is_new = instance != self._instance
        if is_new:
            self.claim()
            # Whoever had it, ourselves too, may have steps under way: what is begun beside them is lost.
            if not self._call(bool, "settle", SETTLE_SECONDS, timeout=SETTLE_SECONDS + LIMIT_SECONDS):
                raise AgentSilent(f"steps that were begun on host {self.name} are still under way")
            self.fetch_inventory()
            with self._lock:
                self._in_effect, self._instance = None, instance
        with suppress(ConfigError):  # loads say so
            self._configure()
        return is_new

    def fetch_inventory(self) -> None:
        """Ask for the inventory as it is now; AgentSilent, or BackendError if it cannot be true."""
        found = self._ask_inventory()
        with self._lock:
            self._inventory = self._last_inventory = found

    def refresh_inventory(self) -> None:
        """Ask for the inventory again, as ``fetch_inventory`` does.

        Fewer GPUs than before count once they were reported twice in a row: a reading may fail.
        """
        found = self._ask_inventory()
        with self._lock:
            before, self._last_inventory = self._last_inventory, found
            lost = {gpu.id for gpu in self._inventory.gpus} - {gpu.id for gpu in found.gpus}
            if not lost or found == before:
                self._inventory = found

    def _ask_inventory(self) -> Inventory:
        found = self._call(Inventory, "inventory")
        ids = {gpu.id for gpu in found.gpus if GPU_ID.fullmatch(gpu.id) and (gpu.total or 0) >= 0}
        if len(ids) != len(found.gpus) or len(ids) > MOST_GPUS or (found.memory or 0) < 0:
            raise BackendError(f"host {self.name} describes itself in a way that cannot be true")
        if self.node.address not in ("", found.address):
            raise BackendError(
                f"host {self.name} is in the cluster at {self.node.address}, and its agent says that it is at"
                f" {found.address}: restart Ray there"
            )
        return found

    def is_way_open(self) -> bool:
        """Whether the cluster is reached, so that a silent agent is silent itself."""
        try:
            self._control.nodes()
        except AgentSilent:
            return False
        return True

    def given_up(self) -> None:
        """End the steps under way: the host is taken as lost."""
        with self._lock:
            self._losses += 1
            self._instance = ""

    def release(self) -> None:
        """Let another anvil-mux have the host."""
        self._call(NoneType, "release")

    def report(self) -> dict[str, Any]:
        """Return what is told of it to people: what it is and has, and how long its agent takes."""
        found = self._inventory
        return {
            "versions": self.versions,
            "round_trip_seconds": self.round_trip_seconds,
            "address": found.address,
            "gpus": [{"id": gpu.id, "name": gpu.name, "total": gpu.total} for gpu in found.gpus],
            "memory": found.memory,
        }

    def lacks(self, config: HostConfig) -> list[str]:
        """Say what the host lacks for a configuration, which it is not given; AgentSilent."""
        return self._call(list[str], "lacks", config, timeout=LONG_SECONDS)

    def remember(self, text: str) -> None:
        """Keep a text on the host, for ``recall``."""
        self._ask(NoneType, "remember", text)

    def recall(self) -> str:
        """Return the text that was kept there last, "" if none was."""
        return self._call(str, "recall")

    # The seam

    def inventory(self) -> Inventory:
        return self._inventory

    def reconfigure(self, config: HostConfig) -> None:
        """Take services as they are described there, now or at the next contact with the agent.

        ConfigError if the host cannot take them; AgentSilent, soon, if its agent does not answer.
        """
        with self._lock:
            self._wanted = config
        if self._instance and not self.is_silent:
            self._greet()
            self._configure()

    def running(self) -> list[str]:
        return self._ask_long(list[str], "running")

    def orphans(self) -> list[Backend]:
        orphans = self._ask_long(list[Backend], "orphans")
        return [replace(orphan, host=self.name) for orphan in orphans]  # there each is on its own host

    def occupants(self) -> list[Occupant]:
        return self._ask_long(list[Occupant], "occupants")

    def adopt(self, backend: Backend) -> Found:
        found: Found = self._step(FOUND, "adopt", backend, patience=PATIENCE_SECONDS)
        match found:
            case Awake(url):
                self._urls[backend.name] = self._own(url)
            case Evicted():
                found = self._likely(backend, found)
        return found

    def load(self, backend: Backend, level: str, number: int) -> Loaded:
        def cancel_if_told() -> None:  # an agent that was away then, or was started anew, has not heard of it
            if self._cancelled.get(backend.name) == number:
                self._ask(NoneType, "cancel", backend, number)

        try:
            loaded = self._step(Loaded, "load", backend, level, number, before=cancel_if_told)
        except ConfigError as error:
            raise LoadError(error.message) from None
        self._refuse_unknown(loaded.level)
        self._urls[backend.name] = self._own(loaded.url)
        return loaded

    def cancel(self, backend: Backend, number: int) -> None:
        self._cancelled[backend.name] = number

        def cancel() -> None:
            with suppress(MuxError):  # the load tells it again
                self._ask(NoneType, "cancel", backend, number)

        self._clock.spawn(cancel, f"cancel-{backend.name}")

    def read_ahead(self, backends: Sequence[str]) -> None:
        with suppress(MuxError):  # it would only have been sooner
            self._ask(NoneType, "read_ahead", tuple(backends))

    def evict(self, backend: Backend, level: str) -> Evicted:
        return self._likely(backend, self._step(Evicted, "evict", backend, level))

    def demote(self, backend: Backend, before: str, level: str) -> Evicted:
        return self._likely(backend, self._step(Evicted, "demote", backend, before, level))

    def stop(self, backend: Backend) -> None:
        self._step(NoneType, "stop", backend, patience=PATIENCE_SECONDS)

    def ended(self, backend: Backend) -> str | None:
        why: str | None = None
        with suppress(AgentSilent):
            why = self._ask(WHY, "ended", backend)
        return why

    def answers(self, backend: Backend, limit: float) -> bool | None:
        url = self._urls.get(backend.name)
        return engines.answers(backend, url, limit) if url else False

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        with suppress(AgentSilent):
            return self._ask(list[str], "log_tail", backend, lines)
        return []

    def news(self, after: int, timeout: float) -> list[HostNews]:
        if self._is_watched:
            self._is_watched = False
            self._ask(NoneType, "watch_gpus")
        begun = self._clock.now()
        self._problem = self._ask(str, "problem")
        self.round_trip_seconds = self._clock.now() - begun
        found = self._ask(list[HostNews], "news", after, timeout, timeout=timeout + LIMIT_SECONDS)
        return [self._own_gpus(each) for each in found]

    def watch_gpus(self) -> None:
        self._is_watched = True

    def problem(self) -> str:
        return self._problem

    def close(self) -> None:
        self.given_up()

    # What a host says is about itself, and about its own engines and GPUs

    def _own(self, url: str) -> str:
        """Return the URL of an engine; BackendError if it is not at the host's address."""
        with suppress(ValueError):
            if urlsplit(url).hostname == urlsplit(url_of(self._inventory.address, 1)).hostname:
                return url
        raise BackendError(f"host {self.name} says that an engine is at {url}, which is not its own address")

    def _refuse_unknown(self, level: str) -> None:
        if level not in WAYS:
            raise BackendError(f"host {self.name} knows a way {level!r:.40}, and we do not")

    def _own_gpus(self, news: HostNews) -> HostNews:
        """Return news without GPUs that no backend there has."""
        if not isinstance(news.what, GpusRead):
            return news
        used = {gpu for backend in (self._wanted or HostConfig(())).backends for gpu in backend.gpus}
        gpu_uses = {id: use for id, use in news.what.gpu_uses.items() if id in used}
        return news._replace(what=GpusRead(gpu_uses))

    def _likely(self, backend: Backend, evicted: Evicted) -> Evicted:
        """Return what a backend holds of its own GPUs; BackendError if it left in no way that there is."""
        self._refuse_unknown(evicted.level)
        residual, freed = (
            {gpu: amount for gpu, amount in amounts.items() if gpu in backend.gpus and amount >= 0}
            for amounts in (evicted.residual, evicted.freed)
        )
        return replace(evicted, residual=residual, freed=freed, host_bytes=max(evicted.host_bytes, 0))

    # Calls

    def _call(self, kind: type[T], method: str, *args: object, timeout: float = LIMIT_SECONDS) -> T:
        """Call whichever run of the agent there is; ``kind``: the type of what it returns."""
        return _value(kind, self._exchange(method, args, timeout))

    def _ask(self, kind: type[T], method: str, *args: object, timeout: float = LIMIT_SECONDS) -> T:
        """Call the run of the agent that was claimed; another one, or none, counts as silent."""
        if not (instance := self._instance):
            raise AgentSilent(f"the agent of host {self.name} is not ready")
        answer = self._exchange(method, args, timeout)
        if answer.instance != instance:
            raise AgentSilent(f"the agent of host {self.name} was restarted")
        return _value(kind, answer)

    def _ask_long(self, kind: type[T], method: str) -> T:
        """Call a method that may take long; AgentSilent, soon, if the agent does not answer at all."""
        if self._instance:
            self._greet()
        return self._ask(kind, method, timeout=LONG_SECONDS)

    def _greet(self) -> None:
        """Raise AgentSilent, soon, if the agent does not answer: what follows may take long.

        One that has not answered is not waited for again before the next contact.
        """
        if self.is_silent:
            raise AgentSilent(f"the agent of host {self.name} does not answer")
        try:
            self._control.call(self.name, "hello", "", LIMIT_SECONDS)
        except AgentSilent:
            self.is_silent = True
            raise

    def _exchange(self, method: str, args: tuple[object, ...], timeout: float) -> AgentAnswer:
        sent = frames.dump(AgentCall(self.owner, method, args))
        answer = self._control.call(self.name, "call", sent, timeout)
        return frames.read(AgentAnswer, answer, is_foreign=True)

    def _configure(self) -> None:
        with self._lock:
            wanted = self._wanted
            if wanted is None or wanted == self._in_effect:
                return
        try:
            self._ask(NoneType, "reconfigure", wanted, timeout=LONG_SECONDS)
        except ConfigError as error:
            raise ConfigError([f"host {self.name}: {problem}" for problem in error.problems]) from None
        with self._lock:
            self._in_effect = wanted

    def _step(
        self,
        kind: type[T],
        method: str,
        *args: object,
        patience: float | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> T:
        """Have a step performed, and return how it ended; BackendError once the host is given up.

        ``kind``: the type of what it returns. AgentSilent if the agent is silent for longer than ``patience``
        seconds. ``before`` is called before each question for its end.
        """
        step, losses = next(self._numbers), self._losses
        heard = self._clock.now()
        limit = POLL_SECONDS + LIMIT_SECONDS

        def ask() -> StepState:
            before()
            return self._ask(StepState, "result", step, POLL_SECONDS, timeout=limit)

        pause = partial(self._unless_lost, losses, lambda: self._clock.latch().wait(AGAIN_SECONDS))
        # What the host cannot take keeps nothing that runs there from being adopted, evicted or stopped.
        ignored = () if method == "load" else (ConfigError,)
        while True:
            try:
                with suppress(*ignored):
                    self._configure()
                self._ask(NoneType, "begin", step, method, args)
                while not (state := self._unless_lost(losses, ask)).done:
                    heard = self._clock.now()
                    if not state.was_awaited:
                        pause()
                return frames.of(kind, state.value)
            except (AgentSilent, UnknownStep, NotConfigured) as error:
                if patience is not None and self._clock.now() - heard > patience:
                    raise AgentSilent(error.message) from None
            pause()

    def _unless_lost(self, losses: int, do: Callable[[], T]) -> T:
        """Do something on the host; BackendError if it was given up before or meanwhile."""
        if losses == self._losses:
            found = do()
            if losses == self._losses:
                return found
        raise BackendError(f"the host {self.name} was lost")


def _value(kind: type[T], answer: AgentAnswer) -> T:
    if answer.error:
        raise frames.error_of(answer.error)
    return frames.of(kind, answer.value)
