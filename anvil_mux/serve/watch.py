"""One host of the cluster, kept in use: its news, its loss, and its return.

Two witnesses are needed before a host is taken as lost: its agent does not answer, and none of the engines
that serve there answers a question over HTTP. While only the agent is silent control is away: requests go on,
and nothing is begun there. Where no engine serves, an agent that is silent is lost if the way to the others
is open, or after ``ALONE_SECONDS``.

========  ============  ==============================================================================
agent     engines       the host is
========  ============  ==============================================================================
answers   (not asked)   here
silent    one answers   away: leases go on, no swaps
silent    silent        lost: leases are severed, its GPUs go to nobody, nothing is loaded there
back                    here: what runs was adopted, what may not stay was stopped
========  ============  ==============================================================================
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from anvil_mux.clock import Clock, Worker
from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.frames import Unreadable
from anvil_mux.cluster.messages import Fenced
from anvil_mux.cluster.remote import RemoteHost
from anvil_mux.config.config import Backend
from anvil_mux.errors import MuxError
from anvil_mux.host.seam import Awake, Evicted, Unfit
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.serve.adoption import Adoption, side_by_side
from anvil_mux.serve.news import NewsReader

POLL_SECONDS = 2.0
"""How long the agent is asked to wait for news."""
SILENT_SECONDS = 5.0
"""After which an agent that does not answer counts as silent."""
HEALTH_SECONDS = 2.0
"""How long an engine may take to answer the question whether it is there."""
ALONE_SECONDS = 30.0
"""After which a host where no engine serves is lost although no agent is reached."""
PAUSE_SECONDS = 0.5


class HostWatch:
    """Keeps one host in use. ``fenced(why)`` is told that another anvil-mux has it now."""

    def __init__(
        self,
        host: RemoteHost,
        mux: Multiplexer,
        adoption: Adoption,
        news: NewsReader,
        *,
        clock: Clock,
        say: Callable[[str], object],
        fenced: Callable[[str], object],
        is_lost: bool,
    ) -> None:
        self.host = host
        self.news = news
        self._mux = mux
        self._adoption = adoption
        self._clock = clock
        self._say = say
        self._fenced = fenced
        self.state = "lost" if is_lost else "new"
        """``new`` (it is not known what runs there), ``here``, ``away`` or ``lost``; its thread writes it."""
        self.why = ""
        """Why it is not here."""
        self.learned = ""
        """A text with what was learned of the host, which keeps it. Any thread writes it."""
        self._kept = ""
        self._heard = clock.now()
        self._is_sure = False
        """Whether it is the run of the agent that was configured."""
        self._is_unknown = True
        """Whether that run was not asked yet what runs there."""
        self.busy = threading.Lock()
        """Held while it is found out what runs there."""
        self.is_seen = threading.Event()
        """Set once it is known what runs there, or that it is lost."""
        self.worker = Worker(f"host-{host.name}", self.turn)

    def turn(self) -> float:
        """Hear of the host once; the seconds until the next time."""
        try:
            if not self._is_sure:
                self._contact()
        except Fenced as error:
            self._fenced(error.message)
            return ALONE_SECONDS
        except MuxError as error:  # silent, of another version, of another anvil-mux, or without Docker
            return self._missed(error.message)
        try:
            self.news.read(POLL_SECONDS)
            if self.learned != self._kept:
                self._kept = self.learned
                self.host.remember(self._kept)
        except Fenced as error:
            self._fenced(error.message)
            return ALONE_SECONDS
        except (AgentSilent, Unreadable) as error:
            return self._missed(error.message)
        self._heard = self._clock.now()
        return 0.0

    # Heard

    def _contact(self) -> None:
        with self.busy:
            if self.host.contact():
                self.news.begin_anew()
                self._is_unknown = True
            if self._is_unknown or self.state != "here":
                self._take_stock()
            self.state, self.why = "here", ""
            self._is_sure, self._is_unknown = True, False
        self._heard = self._clock.now()
        self.is_seen.set()

    def _take_stock(self) -> None:
        """Find out what runs there, and make it known."""
        backends = [each for each in self._mux.overview.configured() if each.host == self.host.name]
        if self.state == "new":
            self._adoption.begin(self.host.name, backends)
        elif self.state == "lost":
            self._adoption.stop_orphans(self.host.name)
            self._come_back(backends)
        elif self._is_unknown:
            self._find_dead()
        if self.state == "away":
            self._mux.facts.host_away(self.host.name, False)

    def _come_back(self, backends: list[Backend]) -> None:
        running = set(self.host.running())
        there = [backend for backend in backends if backend.name in running]
        found = list(zip(there, side_by_side(self.host.adopt, there), strict=True))
        self._mux.facts.host_back(
            self.host.name,
            {backend.name: what.url for backend, what in found if isinstance(what, Awake)},
            {backend.name: what for backend, what in found if isinstance(what, Evicted)},
        )
        self._adoption.stop_all([(each, what.why) for each, what in found if isinstance(what, Unfit)])

    def _find_dead(self) -> None:
        """Report the engines that ended while nobody saw it."""
        running = set(self.host.running())
        for backend, _ in self._mux.overview.serving(self.host.name):
            if backend.name not in running:
                self._mux.facts.died(backend.name, "ended while its agent was away")

    # Not heard

    def _missed(self, why: str) -> float:
        self._is_sure, self.why = False, why
        if self.state == "lost":
            return PAUSE_SECONDS
        silent = self._clock.now() - self._heard
        if silent < SILENT_SECONDS:
            return PAUSE_SECONDS
        if self._is_any_engine_there():
            if self.state == "here":
                self.state = "away"
                self._mux.facts.host_away(self.host.name, True)
                self._say(f"host {self.host.name}: its engines answer and its agent does not: {why}")
        elif self._mux.overview.serving(self.host.name) or silent >= ALONE_SECONDS or self.host.is_way_open():
            self._lose(why)
        return PAUSE_SECONDS

    def _lose(self, why: str) -> None:
        self.state = "lost"
        self._say(f"host {self.host.name} is lost: {why}")
        self._mux.facts.host_lost(self.host.name)
        self.host.given_up()
        self.is_seen.set()

    def _is_any_engine_there(self) -> bool:
        """Whether one of its engines answers, or has just sent anybody a byte."""
        serving = self._mux.overview.serving(self.host.name)
        since = self._clock.now() - HEALTH_SECONDS
        if any(self._mux.facts.is_heard(backend.name, since) for backend, _ in serving):
            return True
        with ThreadPoolExecutor(len(serving) or 1) as pool:
            return any(pool.map(lambda each: is_there(each[1], HEALTH_SECONDS), serving))


def is_there(address: tuple[str, int], limit: float) -> bool:
    """Whether something answers HTTP at an address within ``limit`` seconds, whatever it says.

    A connection proves nothing: the kernel of a machine that hangs accepts it all the same.
    """
    connection = http.client.HTTPConnection(*address, timeout=limit)
    try:
        connection.request("GET", "/health")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
