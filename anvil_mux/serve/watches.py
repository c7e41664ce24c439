"""The watches over hosts: what is heard of each, whether it is lost, and how it is back.

The own host is always there: its news are read, and handed to whom they concern. While its container engine
does not answer it counts as away: no swap begins, and what would need one fails with the reason.

A host of the cluster may be lost. Two witnesses are needed before a host is taken as lost: its agent does not
answer, and none of the engines that serve there answers a question over HTTP. While only the agent is silent
control is away: requests go on, and nothing is begun there. Where no engine serves, an agent that is silent
is lost if the way to the others is open, or after ``ALONE_SECONDS``. A load goes on without its agent, and is
waited for again when that is back: where only an engine is being loaded the host is lost after
``LOADING_SECONDS``.

========  ============  ==============================================================================
agent     engines       the host is
========  ============  ==============================================================================
answers   (not asked)   here
silent    one answers   away: leases go on, no swaps
silent    silent        lost: leases are severed, its GPUs go to nobody, nothing is loaded there
back                    here: what runs was adopted, what may not stay was stopped
========  ============  ==============================================================================

A host that joins the cluster, or comes back with other GPUs, is a reason to read the configuration again:
which backends there are follows from the file and from the hosts.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from anvil_mux.clock import Clock, Worker, side_by_side
from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.frames import Fenced, Unreadable
from anvil_mux.cluster.remote import RemoteHost
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import gpu_name
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.seam import (
    PHASES,
    AnyNews,
    CardRead,
    GpusRead,
    GpuUses,
    Host,
    HostGpu,
    LoadStage,
    PhaseTook,
    PromptsKept,
    ServiceEnded,
    ServicePaused,
    ServiceStarted,
    Unfit,
    WeightsRead,
)
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.events import Cause, sentence
from anvil_mux.scheduler.status import KeptPrompts
from anvil_mux.scheduler.waits import Progress
from anvil_mux.serve.files import Known, as_text
from anvil_mux.serve.hosts import Adoption, ConfiguredHosts, Waker, broadcast, take_stock

CONTROL_SECONDS = 2.0
"""Seconds between two pings of the container engine of the own host."""
NEWS_SECONDS = 2.0
"""How long the own host is asked to wait for news, before it is seen to again."""
POLL_SECONDS = 2.0
"""How long the agent is asked to wait for news."""
SILENT_SECONDS = 5.0
"""After which an agent that does not answer counts as silent."""
HEALTH_SECONDS = 2.0
"""How long an engine may take to answer the question whether it is there."""
ALONE_SECONDS = 30.0
"""After which a host where no engine serves is lost although no agent is reached."""
INVENTORY_SECONDS = 10.0
"""Seconds between two questions to a host which GPUs it has."""
LOADING_SECONDS = 60.0
"""The same for a host where an engine is being loaded: until Ray was started again there."""
PAUSE_SECONDS = 0.5
LOOK_SECONDS = 2.0
"""Seconds between two looks which hosts there are."""
SEEN_SECONDS = 15.0
"""How long a start waits until it is known what runs on the hosts of the cluster."""


NOT_THERE = "it is not in the cluster"


class HostWatches:
    """The watches over all hosts of one program, and the thread that sees which there are in the cluster.

    ``changed`` is called when other hosts, or other GPUs, are there.
    """

    def __init__(
        self,
        hosts: ConfiguredHosts,
        mux: Multiplexer,
        adoption: Adoption,
        clock: Clock,
        *,
        took: Callable[[Backend, str, float], object],
        read_ahead: Callable[[Backend, int, float], object],
        say: Callable[[str], object],
        fenced: Callable[[str], object],
        changed: Callable[[], object],
    ) -> None:
        self._hosts = hosts
        self._mux = mux
        self._adoption = adoption
        self._cluster = hosts.cluster
        self._clock = clock
        self._say = say
        self._changed = changed
        self._silence = ""
        """Why the cluster did not answer when it was asked last; "": it answered."""
        self._problems: dict[str, str] = {}
        """Why hosts cannot be used, as it was told last."""
        self._control_due = 0.0
        self._own_gpus: tuple[HostGpu, ...] | None = None
        """The GPUs of the own host, as they were at the last check."""
        self._learned: tuple[Known, int, Config | None] = Known(), 0, None

        def started(backend: Backend) -> None:
            clock.spawn(partial(adoption.take_over, backend), f"adopt-{backend.name}")

        self._news = NewsReader("", hosts.local, mux, took, read_ahead, started=started)

        def watch(host: RemoteHost, *, is_lost: bool) -> HostWatch:
            news = NewsReader(host.name, host, mux, took, read_ahead, started=started)
            return HostWatch(host, mux, adoption, news, clock=clock, say=say, fenced=fenced, is_lost=is_lost)

        self._watch = watch
        # Other threads go through these, so they are replaced as a whole and never altered.
        self.by_host: Mapping[str, HostWatch] = {}
        """The watches of hosts of the cluster that were ever there."""
        if self._cluster:
            self.by_host = {name: watch(self._cluster.host(name), is_lost=False) for name in hosts.nodes}
        self._waker = Waker(mux, clock, say, broadcast)
        self._own_worker = Worker("news", self._hear)
        self._membership = Worker("cluster", self._look, first=LOOK_SECONDS)

    def start(self) -> None:
        self._own_worker.start()
        for each in self.by_host.values():
            each.worker.start()
        if self._cluster:
            self._tell_problems(self._cluster.problems)
            self._membership.start()

    def await_seen(self) -> None:
        """Return once it is known what runs on each host that was there at the start, within a bound."""
        deadline = self._clock.now() + SEEN_SECONDS
        for each in self.by_host.values():
            each.is_seen.wait(max(deadline - self._clock.now(), 0.0))

    def close(self) -> None:
        """End the threads."""
        self._own_worker.close()
        self._membership.close()
        for each in self.by_host.values():
            each.worker.close()

    def remember(self, known: Known, config: Config) -> None:
        """Have each host keep what was learned there. One thread at a time.

        It is asked ten times a second while requests come, and the texts of many models take long to write.
        Of watches there are only ever more.
        """
        learned = known, len(self.by_host), config
        if learned != self._learned:
            self._learned = learned
            for host, watch in self.by_host.items():
                watch.learned = as_text(known.of_host(host, config))

    def _hear(self) -> float:
        """Hear of the own host once, and take over what could not be seen to run there before."""
        if "" in self._adoption.blind:
            self._adoption.begin("", self._mux.overview.config.backends)
        else:
            self._check_control()
        self._check_gpus()
        return self._news.read()

    def _check_gpus(self) -> None:
        """Have the configuration read again once the own host has other GPUs than before."""
        before, self._own_gpus = self._own_gpus, self._hosts.local.inventory().gpus
        if before is not None and self._own_gpus != before:
            self._changed()

    def _check_control(self) -> None:
        """Begin nothing on the own host while the container engine does not answer; its engines serve on."""
        now = self._clock.now()
        if now >= self._control_due:
            why = self._hosts.local.ping()
            self._control_due = self._clock.now() + CONTROL_SECONDS
            self._mux.tell(self._mux.scheduler.host_away, "", away=bool(why), why=why)

    # Which hosts there are

    def _look(self) -> float:
        """Look which hosts there are, and wake those for which requests wait."""
        assert self._cluster
        self._waker.turn(self._hosts.config.wakes)
        try:
            is_changed = self._cluster.refresh()
        except AgentSilent as error:
            is_new, self._silence = not self._silence, error.message
            if is_new:
                self._say(self._cluster_problem())
            return LOOK_SECONDS
        if self._silence:
            self._say("the cluster can be controlled again")
        self._silence = ""
        self._tell_problems(self._cluster.problems)
        for name in self._cluster.nodes:
            if name not in self.by_host:
                is_known = self._hosts.join(name)
                joined = self._watch(self._cluster.host(name), is_lost=is_known)
                self.by_host = {**self.by_host, name: joined}
                joined.worker.start()
        if is_changed:
            self._changed()
        return LOOK_SECONDS

    def _tell_problems(self, problems: Mapping[str, str]) -> None:
        """Say of hosts that were never in use why they cannot be, once."""
        for name, why in problems.items():
            if name not in self.by_host and why != self._problems.get(name):
                self._say(f"host {name} cannot be used: {why}")
        self._problems = dict(problems)

    # How they are

    def missing(self) -> dict[str, str]:
        """Return the hosts that backends are on and that are not there, and why."""
        here, problems = self._hosts.nodes, self._cluster.problems if self._cluster else {}
        missing = [name for name in self._hosts.others if name not in here and name not in self.by_host]
        return {name: problems.get(name, NOT_THERE) for name in missing}

    def is_here(self, host: str) -> bool:
        """Whether it can be asked now what runs on a host."""
        return not host or (host in self.by_host and self.by_host[host].state == "here")

    def busy(self, hosts: Iterable[str]) -> ExitStack:
        """A context in which it is not just being found out what runs on these hosts."""
        stack = ExitStack()
        for host in dict.fromkeys(hosts):
            if watch := self.by_host.get(host):
                stack.enter_context(watch.busy)
        return stack

    def gpu_uses(self) -> GpuUses:
        """The use of all GPUs, by name."""
        gpu_uses = dict(self._news.gpu_uses())
        for each in self.by_host.values():
            gpu_uses |= each.news.gpu_uses()
        return gpu_uses

    def problem(self) -> str:
        """Why the cluster or a host of it cannot be controlled now, "" if they can. Never blocks."""
        problems = self._cluster_problem(), *[each.problem() for each in self.by_host.values()]
        return "; ".join(filter(None, problems))

    def _cluster_problem(self) -> str:
        if not self._silence:
            return ""
        limits = "no host can join or return, and nothing is swapped on hosts whose agents do not answer"
        return f"the cluster cannot be controlled ({self._silence}): requests go on, but {limits}"

    def round_trips(self) -> dict[str, float]:
        """Seconds that the agents of the hosts that are here took to answer last."""
        here = [each.host for each in self.by_host.values() if each.state == "here"]
        return {host.name: host.round_trip_seconds for host in here if host.round_trip_seconds is not None}

    def reports(self) -> list[dict[str, Any]]:
        """Return the part of GET /hosts that the scheduler does not know."""
        own = self._hosts.local.inventory().gpus
        gpus = [{"id": gpu.id, "name": gpu.name, "total": gpu.total} for gpu in own]
        reports: list[dict[str, Any]] = [{"host": "local", "state": "here", "gpus": gpus}]
        if self._cluster:
            hosts, problems = self._cluster.hosts, self._cluster.problems
            for name in dict.fromkeys((*hosts, *problems)):
                about = hosts[name].report() if name in hosts else {}
                reports.append({"host": name, **self._state(name, problems.get(name, "")), **about})
        return reports

    def _state(self, name: str, problem: str) -> dict[str, str]:
        """Return the state of a host of the cluster, and why it is not here."""
        if self._waker.is_waking(name):
            return {"state": "waking", "why": "requests wait for it"}
        if watch := self.by_host.get(name):
            return {"state": watch.state, "why": watch.why or problem or watch.host.problem()}
        return {"state": "unusable", "why": problem} if problem else {"state": "absent"}


class HostWatch:
    """Keeps one host of the cluster in use. ``fenced(why)`` is told that another anvil-mux has it now."""

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
        self._said = ""
        self._heard = self._read_at = clock.now()
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
            if not self._is_sure or self.host.is_silent:
                self._contact()
            elif self.host.name in self._adoption.blind:
                with self.busy:
                    self._take_stock()
            self.news.read(POLL_SECONDS)
            self._refresh_inventory()
            self._keep_learned()
        except Fenced as error:
            self._fenced(error.message)
            return ALONE_SECONDS
        except MuxError as error:  # silent, of another version, of another anvil-mux, or without Docker
            if self._is_sure and not isinstance(error, (AgentSilent, Unreadable)):
                self._say_once(error.message)
            return self._missed(error)
        self._heard = self._clock.now()
        return 0.0

    def problem(self) -> str:
        """Why the host is not in use, or why no service can be started there; "" if it can. Never blocks."""
        if self.state in ("away", "lost"):
            return f"{self.host.name} is {self.state}: {self.why}"
        name, backends = self.host.name, self._mux.overview.config.backends
        is_used = any(backend.host == name for backend in backends)
        text = self.host.problem() if is_used else ""
        return f"{name}: {text}" if text else ""

    def _say_once(self, text: str) -> None:
        """Report what the agent cannot do, unless it was the last report."""
        if text != self._said:
            self._said = text
            self._say(f"host {self.host.name}: {text}")

    # Heard

    def _keep_learned(self) -> None:
        """Have the host keep what was learned of it; on a full disk, that is tried with the next text."""
        if self.learned == self._kept:
            return
        self._kept = self.learned
        try:
            self.host.remember(self._kept)
        except BackendError as error:
            self._say_once(error.message)

    def _refresh_inventory(self) -> None:
        """Ask the host now and then which GPUs it has."""
        now = self._clock.now()
        if now - self._read_at >= INVENTORY_SECONDS:
            self._read_at = now
            with suppress(BackendError):  # the last one that could be true counts
                self.host.refresh_inventory()

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
        name, facts, overview = self.host.name, self._mux.facts, self._mux.overview
        backends = [each for each in overview.config.backends if each.host == name]
        leaving = {each.name: each for each in overview.leaving() if each.host == name}
        if self.state == "new" or (self.state == "here" and name in self._adoption.blind):
            self._adoption.begin(name, backends)
        elif self.state == "lost":
            running = set(self.host.running())
            self._adoption.stop_orphans(name)
            with suppress(BackendError):  # a load there says so
                self._adoption.tell_occupants(name)
            there = [each for each in backends if each.name in running and each.name not in leaving]
            stock = take_stock(self.host, there)
            remaining = self._adoption.stop_all(stock.unfit)
            # An agent that was started anew does not list backends that the configuration has no longer.
            still_running = [each for each in leaving.values() if self.host.ended(each) is None]
            remaining |= {each.name: Unfit(sentence(Cause("removed"))) for each in still_running}
            facts.host_back(name, {**stock.fit, **remaining})  # every other backend holds nothing
        elif self._is_unknown:
            running = set(self.host.running())
            for backend, _ in overview.serving(name):
                is_leaving = backend.name in leaving and self.host.ended(backend) is None
                if backend.name not in running and not is_leaving:  # it ended while nobody saw it
                    facts.died(backend.name, "ended while its agent was away")
        if self.state == "away":
            self._mux.tell(self._mux.scheduler.host_away, name, away=False)

    # Not heard

    def _missed(self, error: MuxError) -> float:
        """Judge a host whose agent was not heard, or reports that it cannot be used."""
        is_new_reason, self.why = self.why != error.message, error.message
        self._is_sure = False
        is_silent = isinstance(error, AgentSilent)
        self.host.is_silent = True
        if is_new_reason and self.state == "lost":
            self._mux.facts.host_lost(self.host.name, self.why)
        elif is_new_reason and self.state == "away":
            self._mux.tell(self._mux.scheduler.host_away, self.host.name, away=True, why=self.why)
        if self.state == "lost":
            return PAUSE_SECONDS
        silent = self._clock.now() - self._heard
        if silent < SILENT_SECONDS:
            return PAUSE_SECONDS
        agent = "its agent does not answer" if is_silent else "its agent cannot be used"
        if self._is_any_engine_there():
            self._go_away(f"its engines answer, and {agent}: {self.why}")
        elif silent < LOADING_SECONDS and self._only_loads():  # a load outlives its agent
            self._go_away(f"a load is under way there, and {agent}: {self.why}")
        elif self._mux.overview.serving(self.host.name) or silent >= ALONE_SECONDS or self.host.is_way_open():
            self._lose(self.why)
        return PAUSE_SECONDS

    def _go_away(self, why: str) -> None:
        """Begin nothing on the host for now."""
        if self.state == "here":
            self.state = "away"
            self._mux.tell(self._mux.scheduler.host_away, self.host.name, away=True, why=self.why)
            self._say(f"host {self.host.name}: {why}")

    def _lose(self, why: str) -> None:
        self.state = "lost"
        self._say(f"host {self.host.name} is lost: {why}")
        self._mux.facts.host_lost(self.host.name, why)
        self.host.given_up()
        self.is_seen.set()

    def _only_loads(self) -> bool:
        """Whether a backend is being loaded there, and none serves, of which a silence would tell more."""
        overview, name = self._mux.overview, self.host.name
        loading = set(overview.loading())
        loads = any(each.name in loading and each.host == name for each in overview.config.backends)
        return loads and not overview.serving(name)

    def _is_any_engine_there(self) -> bool:
        """Whether one of its engines answers, or has just sent anybody a byte."""
        serving = self._mux.overview.serving(self.host.name)
        since = self._clock.now() - HEALTH_SECONDS
        if any(self._mux.facts.is_heard(backend.name, since) for backend, _ in serving):
            return True
        return any(side_by_side(lambda each: is_there(each[1], HEALTH_SECONDS), serving))


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


class NewsReader:
    """Reads the news of one host; one thread.

    ``took(backend, phase, seconds)`` learns what steps took, ``read_ahead(backend, size, seconds)`` what was
    read before loads.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        mux: Multiplexer,
        took: Callable[[Backend, str, float], object],
        read_ahead: Callable[[Backend, int, float], object],
        started: Callable[[Backend], object],
    ) -> None:
        """``started(backend)``: takes over an engine that somebody else has started; it must not block."""
        self._name = name
        self._host = host
        self._mux = mux
        self._took = took
        self._read_ahead = read_ahead
        self._started = started
        self._gpu_uses: GpuUses = {}
        self._last = 0
        """The number of the last that was handed on."""

    def gpu_uses(self) -> GpuUses:
        """The use of its GPUs, by their names, as last seen; it is looked at more often now. Any thread."""
        self._host.watch_gpus()
        return self._gpu_uses

    def begin_anew(self) -> None:
        """Begin with the first news there is: what is told by now begins to count anew."""
        self._last, self._gpu_uses = 0, {}

    def read(self, timeout: float = NEWS_SECONDS) -> float:
        """Hand on the news that come within ``timeout`` seconds; the seconds until the next call is due."""
        for news in self._host.news(self._last, timeout):
            self._last = news.number
            if isinstance(news.what, GpusRead):
                self._take_gpu_uses(news.what.gpu_uses)
            elif (found := self._mux.overview.backend(news.what.backend)) and found.host == self._name:
                self._hand_on(news.what, found)
        return 0.0

    def _hand_on(self, what: AnyNews, backend: Backend) -> None:
        overview, name = self._mux.overview, backend.name
        match what:
            case ServiceEnded(_, why, lines, load):
                self._mux.facts.died(name, why, lines, load=load)
            case ServiceStarted():
                self._started(backend)
            case ServicePaused(_, container):
                self._mux.tell(self._mux.scheduler.service_paused, name, container)
            case LoadStage(_, stage, fraction, seconds_left):
                overview.report(name, Progress(stage, fraction, seconds_left))
            case PromptsKept(_, prompts, tokens, size):
                overview.note_prompts(name, KeptPrompts(prompts, tokens, size))
            case CardRead():
                overview.note_card(what)
            case PhaseTook(_, phase, seconds) if phase in PHASES:
                self._took(backend, phase, seconds)
            case WeightsRead(_, size, seconds):
                self._read_ahead(backend, size, seconds)

    def _take_gpu_uses(self, gpu_uses: GpuUses) -> None:
        self._gpu_uses = {gpu_name(self._name, id): use for id, use in gpu_uses.items()}
        held = {id: sum(each.used or 0 for each in use.others) for id, use in gpu_uses.items()}
        others = {id: n for id, n in held.items() if n > 0}
        self._mux.tell(self._mux.scheduler.memory_seen, others, host=self._name)
        if self._mux.overview.config.yield_above is not None:  # who plays does not want to wait 10 s
            self._host.watch_gpus()
