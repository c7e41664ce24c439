"""When a host of the cluster counts as lost, and how it is back: two witnesses, in a time of its own."""

from types import SimpleNamespace

import pytest

from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.frames import Fenced
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError
from anvil_mux.host.seam import Awake, Evicted, Unfit
from anvil_mux.serve import watches
from anvil_mux.serve.watches import HostWatch

A, B, C = (Backend(name, name, ("0",), host="h") for name in "abc")


class House:
    """A host, its engines and a multiplexer, as far as a watch sees them; ``told`` is what it told them."""

    def __init__(self, monkeypatch, *, is_lost=False):
        self.moment = 100.0
        self.told = []
        self.said = []
        self.runtime_problem = ""
        self.inventories_read = 0
        self.agent_answers = True
        self.way_is_open = True
        self.instance = 1
        self.known_instance = 0
        self.serving = []
        self.loading = []
        self.answering = set()
        self.heard = set()
        self.running = []
        self.leaving = []
        self.ended = set()
        self.stubborn = {}
        self.found = {}
        tell = self._tell
        facts = SimpleNamespace(
            host_lost=tell("lost"),
            host_back=tell("back"),
            died=tell("died"),
            is_heard=lambda name, since: name in self.heard,
        )
        overview = SimpleNamespace(
            config=Config((A, B, C, Backend("external", "e"))),
            serving=lambda host: [(each, (each.name, 1)) for each in self.serving],
            leaving=lambda: list(self.leaving),
            loading=lambda: [each.name for each in self.loading],
        )
        self.host = SimpleNamespace(
            name="h",
            is_silent=False,
            contact=self.contact,
            running=lambda: [each.name for each in self.running],
            adopt=lambda backend: self.found[backend.name],
            ended=lambda backend: "exited with code 1" if backend.name in self.ended else None,
            refresh_inventory=self.refresh_inventory,
            given_up=tell("given up"),
            is_way_open=lambda: self.way_is_open,
            problem=lambda: self.runtime_problem,
            remember=self.remember,
        )
        self.blind = set()
        adoption = SimpleNamespace(
            begin=tell("adopt"),
            tell_occupants=tell("tell occupants"),
            stop_orphans=tell("stop orphans"),
            stop_all=self.stop_all,
            blind=self.blind,
        )
        news = SimpleNamespace(begin_anew=lambda: None, read=self.read)
        monkeypatch.setattr(watches, "is_there", lambda address, limit: address[0] in self.answering)
        self.watch = HostWatch(
            self.host,
            SimpleNamespace(
                facts=facts,
                overview=overview,
                scheduler=SimpleNamespace(host_away="away"),
                tell=lambda what, host, away, why="": self.told.append((what, host, away)),
            ),
            adoption,
            news,
            clock=SimpleNamespace(now=lambda: self.moment),
            say=self.said.append,
            fenced=tell("fenced"),
            is_lost=is_lost,
        )

    def _tell(self, what):
        return lambda *about: self.told.append((what, *about))

    def stop_all(self, pairs):
        self.told.append(("stop", pairs))
        return self.stubborn

    def remember(self, text):
        raise BackendError("/state/agent-h cannot be written: No space left on device")

    def refresh_inventory(self):
        self.inventories_read += 1
        raise BackendError("host h describes itself in a way that cannot be true")

    def contact(self):
        if not self.agent_answers:
            raise AgentSilent("no answer")
        self.host.is_silent = False
        is_new, self.known_instance = self.instance != self.known_instance, self.instance
        return is_new

    def read(self, timeout):
        if not self.agent_answers or self.instance != self.known_instance:
            raise AgentSilent("no answer")

    def turns(self, seconds):
        """Let time pass, with a turn each half second; return what was told meanwhile."""
        self.told.clear()
        until = self.moment + seconds
        while self.moment < until:
            self.watch.turn()
            self.moment += 0.5
        return list(self.told)


@pytest.fixture
def house(monkeypatch):
    made = House(monkeypatch)
    made.turns(1.0)
    made.serving = [A, B]
    made.answering = {"a", "b"}
    return made


def test_the_first_contact_takes_over_what_runs(monkeypatch):
    made = House(monkeypatch)
    assert made.turns(1.0) == [("adopt", "h", [A, B, C])]
    assert made.watch.state == "here"
    assert made.watch.is_seen.is_set()


def test_what_could_not_be_seen_to_run_at_the_first_contact_is_taken_over_later(house):
    house.blind.add("h")
    assert house.turns(0.5) == [("adopt", "h", [A, B, C])]
    house.blind.clear()
    assert house.turns(5.0) == []
    assert house.watch.state == "here"


def test_the_inventory_of_a_host_is_read_again_and_one_that_cannot_be_true_is_ignored(house):
    house.inventories_read = 0
    assert house.turns(60.0) == []
    assert house.inventories_read == 6
    assert house.watch.state == "here"


def test_a_host_whose_agent_answers_is_here_whatever_its_engines_do(house):
    house.answering = set()
    assert house.turns(60.0) == []
    assert house.watch.state == "here"


@pytest.mark.parametrize(("answering", "heard"), [({"b"}, set()), (set(), {"a"})])
def test_while_one_engine_answers_or_has_sent_a_byte_control_is_away_and_the_host_is_not_lost(
    house, answering, heard
):
    house.agent_answers, house.answering, house.heard = False, answering, heard
    assert house.turns(60.0) == [("away", "h", True)]
    assert house.watch.state == "away"
    house.answering = house.heard = set()
    assert [what for what, *_ in house.turns(1.0)] == ["lost", "given up"]


def test_a_host_is_lost_when_agent_and_engines_are_silent_and_not_before_five_seconds(house):
    house.agent_answers, house.answering = False, set()
    assert house.turns(4.5) == []
    assert house.turns(60.0) == [("lost", "h", "no answer"), ("given up",)]
    assert house.watch.state == "lost"


@pytest.mark.parametrize(("way_is_open", "seconds"), [(True, 4.5), (False, 29.0)])
def test_a_host_without_engines_is_lost_if_others_are_reached_else_later(house, way_is_open, seconds):
    house.serving, house.agent_answers, house.way_is_open = [], False, way_is_open
    assert house.turns(seconds) == []
    assert ("lost", "h", "no answer") in house.turns(2.0)


def test_a_host_that_only_loads_is_away_until_its_agent_is_back_or_has_been_silent_for_long(house):
    house.serving, house.loading, house.agent_answers = [], [A], False
    assert house.turns(58.0) == [("away", "h", True)]
    house.agent_answers, house.instance = True, 2
    assert house.turns(1.0) == [("away", "h", False)]
    house.agent_answers = False
    assert [what for what, *_ in house.turns(62.0)] == ["away", "lost", "given up"]


def test_a_host_whose_serving_engine_is_silent_is_lost_whatever_it_loads(house):
    house.loading, house.agent_answers, house.answering = [C], False, set()
    assert ("lost", "h", "no answer") in house.turns(6.0)


def test_control_that_is_back_brings_no_engine_to_an_end(house):
    house.agent_answers = False
    house.turns(20.0)
    house.agent_answers = True
    assert house.turns(1.0) == [("away", "h", False)]
    assert house.watch.state == "here"


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_agent_that_was_started_anew_says_which_engines_ended_however_often_it_is_asked(house, is_silent):
    running = house.host.running

    def fail():
        house.host.running = running
        raise AgentSilent("no answer")

    house.instance, house.running, house.host.running = 2, [A], fail if is_silent else running
    assert house.turns(2.0) == [("died", "b", "ended while its agent was away")]


def test_a_lost_host_that_is_back_is_taken_stock_of_before_anything_is_begun(house):
    house.agent_answers, house.answering = False, set()
    house.turns(10.0)
    house.agent_answers, house.instance, house.running = True, 2, [A, B, C]
    asleep = Evicted("sleep", {"0": 5})
    house.found = {"a": Awake("http://h:1"), "b": asleep, "c": Unfit("it answers for another model")}
    assert house.turns(1.0) == [
        ("stop orphans", "h"),
        ("tell occupants", "h"),
        ("stop", [(C, "it answers for another model")]),
        ("back", "h", {"a": "http://h:1", "b": asleep}),
    ]
    assert house.watch.state == "here"


def test_an_unfit_engine_that_cannot_be_stopped_keeps_its_gpus_on_a_host_that_is_back(house):
    house.agent_answers, house.answering = False, set()
    house.turns(10.0)
    house.agent_answers, house.running = True, [A]
    house.found = {"a": Unfit("it does not answer")}
    house.stubborn = {"a": Unfit("it does not answer")}
    assert house.turns(1.0)[-1] == ("back", "h", {"a": Unfit("it does not answer")})


def test_what_a_reload_removed_from_a_lost_host_keeps_its_gpus_until_it_is_stopped(house):
    house.agent_answers, house.answering = False, set()
    house.turns(10.0)
    house.agent_answers, house.instance = True, 2
    house.leaving, house.ended = [B, C], {"c"}
    assert house.turns(1.0)[-1] == (
        "back",
        "h",
        {"b": Unfit("removed from the configuration")},
    )


def test_what_a_reload_removed_runs_on_though_a_new_agent_does_not_list_it(house):
    house.instance, house.leaving, house.ended = 2, [A, B], {"b"}
    assert house.turns(1.0) == [("died", "b", "ended while its agent was away")]


def test_a_host_that_was_not_there_at_the_start_comes_like_one_that_was_lost(monkeypatch):
    made = House(monkeypatch, is_lost=True)
    assert made.turns(1.0) == [
        ("stop orphans", "h"),
        ("tell occupants", "h"),
        ("stop", []),
        ("back", "h", {}),
    ]


def test_a_host_that_another_anvil_mux_has_taken_is_not_used_any_more(house):
    def refuse():
        raise Fenced("project lab on beta has it")

    house.instance, house.host.contact = 2, refuse
    assert house.turns(1.0)[0] == ("fenced", "project lab on beta has it")


def test_an_agent_that_fails_otherwise_is_reported_once_and_is_no_loss(house):
    def fail(timeout):
        raise BackendError("Docker does not answer")

    house.watch.news.read = fail
    assert house.turns(60.0) == []
    assert house.watch.state == "here"
    assert house.said == ["host h: Docker does not answer"]


def test_a_full_disk_of_a_host_that_keeps_what_was_learned_is_reported_once(house):
    for text in ("what loads cost", "what loads cost by now"):
        house.watch.learned = text
        assert house.turns(1.0) == []
    assert house.watch.state == "here"
    assert house.said == ["host h: /state/agent-h cannot be written: No space left on device"]


def test_why_no_service_can_be_started_on_a_host_is_its_problem(house):
    assert house.watch.problem() == ""
    house.runtime_problem = "services cannot be started: the disk of /state is full (0 MiB are free)"
    assert house.watch.problem() == f"h: {house.runtime_problem}"
    house.agent_answers, house.answering = False, set()
    house.turns(10.0)
    assert house.watch.problem() == "h is lost: no answer"


def test_the_reason_why_a_host_is_lost_is_the_last_one(house):
    def refuse():
        raise BackendError("/state/agent-h/owner cannot be written: No space left on device")

    house.agent_answers, house.answering = False, set()
    house.turns(10.0)
    house.host.contact = refuse
    assert house.turns(10.0) == [
        ("lost", "h", "/state/agent-h/owner cannot be written: No space left on device")
    ]


def test_an_agent_that_cannot_write_is_not_reported_as_silent(house):
    def refuse():
        raise BackendError("/state/agent-h/owner cannot be written: No space left on device")

    house.instance, house.host.contact = 2, refuse
    assert house.turns(10.0) == [("away", "h", True)]
    assert house.said == [
        "host h: its engines answer, and its agent cannot be used: "
        "/state/agent-h/owner cannot be written: No space left on device"
    ]
