"""What is asked of a host on another machine, while its agent comes and goes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from anvil_mux import __version__
from anvil_mux.cluster import frames
from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.frames import (
    AgentAnswer,
    AgentCall,
    Fenced,
    Node,
    Owner,
    StepState,
    UnknownStep,
    Unreadable,
)
from anvil_mux.cluster.remote import LIMIT_SECONDS, MOST_GPUS, SETTLE_SECONDS, OtherVersion, RemoteHost
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError
from anvil_mux.host.seam import (
    Awake,
    Evicted,
    GpusRead,
    GpuUse,
    HostConfig,
    HostGpu,
    HostNews,
    Inventory,
    Loaded,
)
from tests.cluster.answers import arguments_of

RUNNING = StepState(False)
A = Backend("a", "a", ("0",), host="h")
CONFIG = HostConfig((A,))


class Script:
    """An agent by script, and the way to it: ``answers`` is method -> what it does, next one first."""

    def __init__(self):
        self.instance = "one"
        self.version = __version__
        self.is_silent = False
        self.epoch = 0
        self.calls = []
        self.waited = []
        """The time limits of calls that were not answered."""
        self.answers = {
            "inventory": lambda: Inventory(address="10.0.0.2"),
            "settle": lambda timeout: True,
            "problem": lambda: "",
        }
        self.waits = 0
        self.during_wait = lambda: None
        clock = SimpleNamespace(
            now=lambda: float(self.waits),
            latch=lambda: SimpleNamespace(wait=self.wait),
            spawn=lambda run, name: run(),
        )
        self.host = RemoteHost("h", self, clock)
        self.host.owner = Owner(4, "me")

    def wait(self, seconds):
        self.waits += 1
        self.during_wait()

    def nodes(self):
        if self.is_silent:
            raise AgentSilent("away")
        return []

    def call(self, host, method, payload, timeout):
        assert host == "h"
        if self.is_silent:
            self.waited.append(timeout)
            raise AgentSilent("no answer")
        if method == "hello":
            said = {"version": self.version, "instance": self.instance, "python": "3.11"}
            return frames.dump({**said, "epoch": str(self.epoch)})
        asked = frames.read(AgentCall, payload)
        assert asked.owner == self.host.owner
        args = arguments_of(asked)
        self.calls.append((asked.method, *args))
        try:
            value = self.answers.get(asked.method, lambda *args: None)(*args)
        except AgentSilent:
            raise
        except Exception as error:
            return frames.dump(AgentAnswer(self.instance, error=frames.plain_error(error)))
        return frames.dump(AgentAnswer(self.instance, value))

    def called(self, *methods):
        """The calls of these methods since the last time."""
        found = [call for call in self.calls if call[0] in methods]
        self.calls.clear()
        return found


@pytest.fixture
def agent():
    made = Script()
    made.host.reconfigure(CONFIG)
    made.host.contact()
    made.calls.clear()
    return made


def results(*each):
    left = list(each)

    def result(step, timeout):
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        found = found() if callable(found) else found
        return found if isinstance(found, StepState) else StepState(True, found)

    return result


def test_a_contact_claims_configures_and_takes_the_inventory_once_for_each_run_of_the_agent():
    made = Script()
    made.host.reconfigure(CONFIG)
    assert made.host.contact()
    assert made.called("claim", "settle", "inventory", "reconfigure") == [
        ("claim", "", False),
        ("settle", SETTLE_SECONDS),
        ("inventory",),
        ("reconfigure", CONFIG),
    ]
    assert not made.host.contact()
    assert made.calls == []
    assert made.host.inventory().address == "10.0.0.2"
    made.instance = "two"
    assert made.host.contact()
    assert len(made.called("claim", "reconfigure")) == 2


def test_a_host_is_claimed_with_an_epoch_above_all_that_it_has_seen():
    made = Script()
    made.epoch = 7
    made.host.contact()
    assert made.host.owner == Owner(8, "me")
    made.epoch, made.instance = 8, "two"
    made.host.contact()
    assert made.host.owner == Owner(8, "me"), "it stays the same one when the agent is started anew"


def test_one_that_was_taken_over_does_not_take_the_host_back():
    def claim(*_):
        if made.epoch > made.host.owner.epoch:
            raise Fenced("host h was claimed by project other")

    made = Script()
    made.answers["claim"] = claim
    made.host.contact()
    made.epoch, made.instance = 9, "two"
    with pytest.raises(Fenced):
        made.host.contact()


def test_before_the_first_contact_the_agent_counts_as_silent():
    with pytest.raises(AgentSilent, match="is not ready"):
        Script().host.running()


def test_an_agent_of_another_version_is_refused_with_what_to_do():
    made = Script()
    made.version = "0.0.1"
    with pytest.raises(
        OtherVersion, match=rf"host h has anvil-mux 0\.0\.1, and this is {__version__}: install"
    ):
        made.host.contact()


def test_an_agent_that_was_started_anew_counts_as_silent_until_it_is_contacted(agent):
    agent.answers["running"] = lambda: ["a"]
    assert agent.host.running() == ["a"]
    agent.instance = "two"
    with pytest.raises(AgentSilent, match="restarted"):
        agent.host.running()
    agent.host.contact()
    assert agent.host.running() == ["a"]


def test_a_step_is_begun_and_its_end_awaited(agent):
    agent.answers["result"] = results(RUNNING, RUNNING, Loaded("http://10.0.0.2:1", "stop"))
    assert agent.host.load(A, "stop", 7) == Loaded("http://10.0.0.2:1", "stop")
    assert [call[0] for call in agent.called("begin", "result")] == ["begin", "result", "result", "result"]


def test_the_end_of_a_step_is_learned_though_control_was_away_meanwhile(agent):
    def go_away():
        agent.is_silent = True
        agent.during_wait = come_back
        raise AgentSilent("no answer")

    def come_back():
        agent.is_silent = agent.waits < 3

    agent.answers["result"] = results(RUNNING, go_away, Evicted("stop"))
    assert agent.host.evict(A, "stop") == Evicted("stop")
    begun = agent.called("begin")
    assert len(begun) == 2
    assert begun[0] == begun[1], "the agent knows it by its number, and begins it once"


def test_a_step_is_begun_again_on_an_agent_that_was_started_anew(agent):
    def restart():
        agent.instance = "two"
        return RUNNING

    agent.during_wait = agent.host.contact
    agent.answers["result"] = results(restart, Loaded("http://10.0.0.2:2", "stop"))
    assert agent.host.load(A, "stop", 1).url == "http://10.0.0.2:2"
    assert len(agent.called("begin")) == 2


def test_a_load_that_is_cancelled_while_its_agent_is_away_is_cancelled_on_the_one_that_is_started_anew(agent):
    def go_away():
        agent.instance = "two"
        agent.host.cancel(A, 7)
        return RUNNING

    def cancelled():
        raise Cancelled("the load of a was cancelled")

    agent.during_wait = agent.host.contact
    agent.answers["result"] = results(go_away, RUNNING, cancelled)
    with pytest.raises(Cancelled):
        agent.host.load(A, "stop", 7)
    begun = [call[0] for call in agent.called("begin", "result", "cancel")]
    assert begun == ["begin", "result", "cancel", "begin", "cancel", "result", "cancel", "result"]
    agent.answers["result"] = results(Loaded("http://10.0.0.2:1", "stop"))
    agent.host.load(A, "stop", 8)
    assert agent.called("cancel") == [], "that was another load"


def test_a_step_that_the_agent_forgot_is_begun_again(agent):
    agent.answers["result"] = results(UnknownStep("4.1"), Evicted("stop"))
    assert agent.host.evict(A, "stop") == Evicted("stop")


def test_a_step_ends_when_the_host_is_given_up_also_if_it_is_back_at_once(agent):
    def lose():
        agent.host.given_up()
        agent.host.contact()
        return RUNNING

    agent.answers["result"] = results(lose, Loaded("http://10.0.0.2:1", "stop"))
    with pytest.raises(BackendError, match="the host h was lost"):
        agent.host.load(A, "stop", 1)


def test_an_adoption_does_not_wait_for_an_agent_that_stays_silent(agent):
    agent.answers["result"] = results(RUNNING)
    agent.answers["begin"] = lambda *args: setattr(agent, "is_silent", True)
    with pytest.raises(AgentSilent):
        agent.host.adopt(A)


def test_a_load_that_fails_there_fails_here_with_the_log(agent):
    agent.answers["result"] = results(LoadError("exited with code 1", log=["no such model"]))
    with pytest.raises(LoadError, match="exited with code 1") as failed:
        agent.host.load(A, "stop", 1)
    assert failed.value.log == ("no such model",)


def test_a_configuration_that_the_host_refuses_names_it_and_fails_loads_only(agent):
    def refuse(config):
        raise ConfigError(["image x is not present"])

    agent.answers["reconfigure"] = refuse
    with pytest.raises(ConfigError, match="host h: image x is not present"):
        agent.host.reconfigure(HostConfig((A,), project="other"))
    assert not agent.host.contact()
    with pytest.raises(LoadError, match="image x is not present"):
        agent.host.load(A, "stop", 1)
    agent.answers["result"] = results(Awake("http://10.0.0.2:1"), Evicted("sleep"), Evicted("stop"), None)
    assert agent.host.adopt(A) == Awake("http://10.0.0.2:1")
    assert agent.host.evict(A, "sleep") == Evicted("sleep")
    assert agent.host.demote(A, "sleep", "stop") == Evicted("stop")
    agent.host.stop(A)


def test_a_silent_agent_knows_nothing_of_ends_and_logs(agent):
    agent.is_silent = True
    assert agent.host.ended(A) is None
    assert agent.host.log_tail(A) == []
    assert not agent.host.is_way_open()


def test_what_is_to_be_read_ahead_is_told_to_the_agent_and_its_silence_matters_to_nobody(agent):
    agent.host.read_ahead(["a", "b"])
    assert agent.called("read_ahead") == [("read_ahead", ("a", "b"))]
    agent.is_silent = True
    agent.host.read_ahead([])


def test_the_health_question_goes_to_the_engine_and_not_through_the_agent(agent, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "anvil_mux.host.engines.answers", lambda backend, url, limit: asked.append((url, limit)) or True
    )
    assert agent.host.answers(A, 1.0) is False
    agent.answers["result"] = results(Awake("http://10.0.0.2:9"))
    agent.host.adopt(A)
    agent.is_silent = True
    assert agent.host.answers(A, 1.0)
    assert asked == [("http://10.0.0.2:9", 1.0)]


def test_somebody_who_watches_gpus_is_told_to_the_agent_with_the_next_question_for_news(agent):
    agent.answers["news"] = lambda after, timeout: []
    agent.answers["problem"] = lambda: "Docker does not answer"
    agent.host.watch_gpus()
    assert agent.calls == []
    agent.host.news(0, 2.0)
    agent.host.news(0, 2.0)
    assert [call[0] for call in agent.called("watch_gpus", "news")] == ["watch_gpus", "news", "news"]
    assert agent.host.problem() == "Docker does not answer"


@pytest.mark.parametrize("method", ["running", "orphans", "occupants"])
def test_what_runs_on_a_silent_host_is_not_waited_for(agent, method):
    agent.is_silent = True
    with pytest.raises(AgentSilent):
        getattr(agent.host, method)()
    assert agent.waited == [LIMIT_SECONDS]


def test_a_silent_host_is_configured_later_and_nobody_waits_for_it(agent):
    other = HostConfig((A,), project="other")
    agent.is_silent = True
    with pytest.raises(AgentSilent):
        agent.host.reconfigure(other)
    assert agent.waited == [LIMIT_SECONDS], "not as long as a configuration may take"
    agent.host.is_silent = True
    agent.host.reconfigure(CONFIG)
    agent.host.reconfigure(other)
    assert agent.waited == [LIMIT_SECONDS]
    agent.is_silent = False
    agent.host.contact()
    assert agent.called("reconfigure") == [("reconfigure", other)]
    assert not agent.host.is_silent


def gpus(*ids):
    return Inventory(tuple(HostGpu(id, f"GPU-{id}", "fake", 8) for id in ids), None, "10.0.0.2")


def test_more_gpus_count_at_once_and_fewer_when_they_were_reported_twice(agent):
    def counts_after(*ids):
        agent.answers["inventory"] = lambda: gpus(*ids)
        agent.host.refresh_inventory()
        return [gpu.id for gpu in agent.host.inventory().gpus]

    assert counts_after("0", "1") == ["0", "1"]
    assert counts_after() == ["0", "1"]
    assert counts_after("0", "1") == ["0", "1"], "a reading had failed"
    assert counts_after("0") == ["0", "1"]
    assert counts_after("0") == ["0"]
    assert counts_after("0", "1") == ["0", "1"]


# A host that was taken over


@pytest.mark.parametrize("url", ["http://10.0.0.3:80", "http://127.0.0.1:9292", "http://[::1", "file:///etc"])
def test_an_engine_that_is_said_to_be_elsewhere_than_on_its_host_is_never_asked(agent, url):
    agent.answers["result"] = results(Loaded(url, "stop"), Awake(url))
    with pytest.raises(BackendError, match="is not its own address"):
        agent.host.load(A, "stop", 1)
    with pytest.raises(BackendError, match="is not its own address"):
        agent.host.adopt(A)
    assert agent.host.answers(A, 1.0) is False


def test_the_orphans_of_a_host_are_its_own(agent):
    """On its own machine a host has no name, and it has no say about others."""
    agent.answers["orphans"] = lambda: [Backend("a", "a"), Backend("b", "b", host="other")]
    assert agent.host.orphans() == [Backend("a", "a", host="h"), Backend("b", "b", host="h")]


def test_a_host_speaks_of_its_own_backends_and_gpus_alone(agent):
    lies = Evicted("sleep", {"0": 5, "1": 7, "2": -1}, -3, {"0": -1})
    agent.answers["result"] = results(lies, lies, lies)
    asleep = Evicted("sleep", {"0": 5})
    assert [agent.host.evict(A, "sleep"), agent.host.demote(A, "sleep", "stop"), agent.host.adopt(A)] == [
        asleep
    ] * 3
    agent.answers["result"] = results(Evicted("vanish"))
    with pytest.raises(BackendError, match="knows a way 'vanish'"):
        agent.host.evict(A, "stop")
    agent.answers["result"] = results(Loaded("http://10.0.0.2:1", "magic"))
    with pytest.raises(BackendError, match="knows a way 'magic'"):
        agent.host.load(A, "stop", 1)
    agent.answers["news"] = lambda after, timeout: [HostNews(1, GpusRead({"0": GpuUse(1), "9": GpuUse(2)}))]
    assert agent.host.news(0, 1.0) == [HostNews(1, GpusRead({"0": GpuUse(1)}))]


@pytest.mark.parametrize(
    "told",
    [
        Inventory((HostGpu("0", "a"), HostGpu("0", "b")), address="10.0.0.2"),
        Inventory((HostGpu("0 or 1", "a"),), address="10.0.0.2"),
        Inventory((HostGpu("0", "a", total=-1),), address="10.0.0.2"),
        Inventory(memory=-1, address="10.0.0.2"),
        Inventory(tuple(HostGpu(str(each), "") for each in range(MOST_GPUS + 1)), address="10.0.0.2"),
        Inventory(address="10.0.0.3"),
    ],
)
def test_a_description_that_cannot_be_true_is_refused_and_the_one_before_holds(agent, told):
    agent.host.node = Node("h", "10.0.0.2")
    agent.answers["inventory"] = lambda: told
    with pytest.raises(BackendError, match=r"cannot be true|is in the cluster at 10\.0\.0\.2"):
        agent.host.fetch_inventory()
    assert agent.host.inventory() == Inventory(address="10.0.0.2")


def test_an_answer_of_another_type_is_an_error_and_nothing_else(agent):
    agent.answers |= {"running": lambda: {"a": 1}, "result": results(Awake("http://10.0.0.2:1"))}
    with pytest.raises(Unreadable):
        agent.host.running()
    with pytest.raises(Unreadable):
        agent.host.load(A, "stop", 1)


# Steps of before


def test_whoever_claims_a_host_waits_for_the_steps_of_whoever_had_it(agent):
    agent.instance = "two"
    agent.answers["settle"] = lambda timeout: False
    with pytest.raises(AgentSilent, match="still under way"):
        agent.host.contact()
    with pytest.raises(AgentSilent):
        agent.host.running()
    agent.answers["settle"] = lambda timeout: True
    assert agent.host.contact()


def test_a_step_that_the_agent_does_not_wait_for_is_asked_for_again_after_a_pause(agent):
    agent.answers["result"] = results(lambda: StepState(False, was_awaited=False), RUNNING, Evicted("stop"))
    assert agent.host.evict(A, "stop") == Evicted("stop")
    assert agent.waits == 1


def test_a_host_that_falls_silent_in_a_reload_is_waited_for_once_and_told_later(agent):
    agent.is_silent = True
    more = HostConfig((A, replace(A, name="more")))
    for ask in (lambda: agent.host.reconfigure(more), agent.host.running, agent.host.orphans):
        with pytest.raises(AgentSilent):
            ask()
    agent.host.reconfigure(more)
    assert agent.waited == [LIMIT_SECONDS]
    agent.is_silent = False
    agent.host.contact()
    assert agent.called("reconfigure") == [("reconfigure", more)]
