"""What is asked of a host on another machine, while its agent comes and goes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from anvil_mux import __version__
from anvil_mux.cluster import messages
from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.cluster.messages import AgentAnswer, Fenced, Owner, StepState, UnknownStep
from anvil_mux.cluster.remote import OtherVersion, RemoteHost
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, ConfigError, LoadError
from anvil_mux.host.seam import Awake, Evicted, HostConfig, Inventory, Loaded

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
        self.answers = {"inventory": lambda: Inventory(address="10.0.0.2")}
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
            raise AgentSilent("no answer")
        if method == "hello":
            said = {"version": self.version, "instance": self.instance, "python": "3.11"}
            return {**said, "epoch": str(self.epoch)}
        asked = messages.read_call(payload)
        assert asked.owner == self.host.owner
        self.calls.append((asked.method, *asked.args))
        try:
            value = self.answers.get(asked.method, lambda *args: None)(*asked.args)
        except AgentSilent:
            raise
        except Exception as error:
            return messages.write(AgentAnswer(self.instance, error=messages.plain_error(error)))
        return messages.write(AgentAnswer(self.instance, value))

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
        return found if found is RUNNING else StepState(True, found)

    return result


def test_a_contact_claims_configures_and_takes_the_inventory_once_for_each_run_of_the_agent():
    made = Script()
    made.host.reconfigure(CONFIG)
    assert made.host.contact()
    assert made.called("claim", "inventory", "reconfigure") == [
        ("claim", "", False),
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
        "anvil_mux.host.visit.answers", lambda backend, url, limit: asked.append((url, limit)) or True
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
