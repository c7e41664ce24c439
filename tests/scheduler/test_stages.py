"""Histories of models with several backends: silent ones, and those that take one stage or either."""

from anvil_mux.config.values import Profile
from anvil_mux.errors import LoadError, Overloaded
from anvil_mux.routing.in_flight import EngineLoad
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.events import Cause, Severance
from anvil_mux.scheduler.slot import Ticket
from tests.scheduler.driver import B, Driver, backend

# A replica that says nothing


def silent(*answering):
    """Both replicas were last heard of at 0.0, when four requests came; a has the first and the third."""
    driver = Driver(
        *(backend(name, gpu, model="m") for name, gpu in (("a", "0"), ("b", "1"))),
        routing="load_balance",
        routing_mode="full",
    )
    for name in "ab":
        assert driver.core.adopt(name, 0.0)
    tickets = [driver.request("m", 0.0, work=Work(tokens=1000)) for _ in range(4)]
    assert [ticket.backend for ticket in tickets] == ["a", "b", "a", "b"]
    for number in answering:
        driver.core.in_flight("m").first_byte(tickets[number])
    return driver, tickets


def test_who_waits_at_a_replica_leaves_when_it_turns_stale_and_who_is_answered_stays():
    driver, (first, _, third, _) = silent(0)
    driver.core.in_flight("m").observe("b", EngineLoad(2, 0, None), 60.0)
    driver.core.silent("a", 60.9)
    assert driver.core.state.cut == []
    driver.core.silent("a", 61.0)
    assert driver.core.state.cut == [third]
    assert (first.severed, third.severed) == (None, Severance(Cause("stale", backend="a")))
    assert [e.cause for e in driver.log if e.kind == "released"] == [Cause("stale", backend="a")]
    assert driver.request("m", 61.0).backend == "b"


def test_who_waits_stays_where_no_replica_says_anything():
    driver, _ = silent()
    driver.core.silent("a", 100.0)
    driver.core.silent("b", 100.0)
    assert driver.core.state.cut == []


# The stages of a model: prefill and decode


P, D = (backend(kind, gpu, model="m", infer_type=kind) for kind, gpu in (("prefill", "0"), ("decode", "1")))


def staged(*others):
    """Both stages are resident at 2.0: the first request has brought the second one too."""
    driver = Driver(P, D, *others)
    assert driver.asked("m", 0.0, takes_lease=False) == ["load prefill"]
    assert driver.loaded("prefill", 1.0) == ["load decode"]
    assert driver.loaded("decode", 2.0) == []
    return driver


def test_a_stage_that_died_is_loaded_again_once_its_model_is_asked():
    driver = staged()
    answered = Ticket(8, "m", 2.5, prefill=Ticket(7, "m", 2.5))
    driver.core.request(answered, 2.5)
    driver.core.release(answered.prefill, 2.5)
    assert driver.died("prefill", 3.0, "killed") == []
    assert driver.core.request(Ticket(9, "m", 4.0), 4.0)  # the next step is to be asked for
    assert driver.steps(4.0) == ["load prefill"]
    assert driver.log[-1].cause == Cause("missing_stage")
    assert not driver.core.request(Ticket(10, "m", 5.0), 5.0)
    driver.sound()


def test_who_has_had_work_stays_when_a_stage_could_have_its_place():
    driver = staged(B)
    assert driver.asked("b", 3.0) == ["evict prefill"]
    driver.swaps("prefill", 3.0, "b", 4.0)
    assert driver.asked("m", 5.0) == []
    assert driver.states() == {"prefill": "stopped", "decode": "ready", "b": "ready"}
    driver.sound()


def test_a_stage_that_could_not_be_loaded_cools_down():
    driver = staged()
    driver.core.died("prefill", 3.0, "killed")
    assert driver.asked("m", 4.0) == []
    assert driver.asked("m", 8.0) == ["load prefill"]
    driver.core.load_failed("prefill", 9.0, LoadError("no"))
    for at, steps in ((10.0, []), (18.0, []), (19.0, ["load prefill"])):
        assert driver.asked("m", at) == steps


# Backends that take either stage


SPEED = Profile(
    ttft=((0.0, 0.0), (8192.0, 4000.0)),
    tpot=(
        (1, ((0.0, 10.0), (8192.0, 10.0))),
        (4, ((0.0, 40.0), (8192.0, 40.0))),
        (8, ((0.0, 80.0), (8192.0, 80.0))),
    ),
)
"""Four answers at once keep slo_adaptive's 42.5 ms, a fifth does not."""


class Either:
    """Backends of one model that take either stage, all resident, and the requests that they have."""

    def __init__(self, count, **settings):
        settings = {
            "model": "m",
            "infer_type": "either",
            "profile": SPEED,
            "routing": "slo_adaptive",
            **settings,
        }
        self.driver = Driver(*[backend(f"e{number}", f"{number}", **settings) for number in range(count)])
        for name in self.driver.core.slots:
            self.driver.core.adopt(name, 0.0)

    def ask(self):
        """A request whose prompt is computed before the next one comes; its ticket and who did what."""
        first = Ticket(next(self.driver.ids), "m", 1.0, work=Work(tokens=1000, infer_type="prefill"))
        ticket = Ticket(next(self.driver.ids), "m", 1.0, work=Work(tokens=1000), prefill=first)
        self.driver.core.request(ticket, 1.0)
        if first.backend:
            self.driver.core.release(first, 1.0)
        return ticket, (first.backend, ticket.backend)


def test_answers_gather_at_one_backend_until_it_is_full_and_prompts_go_to_the_others():
    engines = Either(3)
    found = [engines.ask() for _ in range(5)]
    assert [roles for _, roles in found] == [
        *[("e1", "e0"), ("e2", "e0"), ("e1", "e0"), ("e2", "e0")],
        ("e2", "e1"),  # a fifth answer would be too much for e0
    ]
    engines.driver.core.release(found[4][0], 1.0)
    engines.driver.core.release(found[0][0], 1.0)
    assert [engines.ask()[1] for _ in range(2)] == [("e1", "e0"), ("e1", "e2")]
    engines.driver.sound()


def test_a_request_is_refused_if_every_backend_would_be_disturbed_in_its_answers():
    engines = Either(2)
    assert [engines.ask()[1] for _ in range(4)] == [("e1", "e0")] * 4
    ticket, roles = engines.ask()
    assert roles == (None, None)
    assert isinstance(ticket.error, Overloaded)
    engines.driver.sound()


def test_the_only_backend_that_is_left_does_all_of_a_request():
    engines = Either(2)
    engines.driver.core.died("e1", 1.0, "killed")
    ticket, roles = engines.ask()
    assert roles == (None, "e0")
    assert ticket.work.infer_type == "neutral"
    assert ticket.choice.reason.startswith("predicted_ttft ")


def test_the_only_backend_that_has_a_place_does_all_of_a_request():
    engines = Either(2, concurrency=1)
    assert [engines.ask()[1] for _ in range(2)] == [("e1", "e0"), (None, "e1")]
    ticket, roles = engines.ask()
    assert (roles, ticket.error) == ((None, None), None)
    assert list(engines.driver.core.queues["m"]) == [ticket]


def told(engines):
    """Stage -> what is told of each backend if a request's stages are explained."""
    model = engines.driver.core.state.models["m"]
    found = model.replicas.explain(model.ready, Work(tokens=1000), 1.0, staged=True)
    return {stage: {row["backend"]: row["removed_by"] for row in rows} for stage, rows in found.items()}


def test_what_is_told_of_the_stages_is_what_a_request_would_get():
    engines = Either(2)
    assert told(engines) == {
        "prefill": {"e0": "decode", "e1": ""},
        "decode": {"e0": "", "e1": "adaptive_decode"},
    }
    assert engines.ask()[1] == ("e1", "e0")
    engines.driver.core.died("e1", 1.0, "killed")
    assert told(engines) == {"neutral": {"e0": "", "e1": "stopped"}}


def test_of_two_the_one_with_a_place_is_told_to_do_all_of_a_request():
    engines = Either(2, concurrency=1)
    assert engines.ask()[1] == ("e1", "e0")
    assert told(engines) == {"neutral": {"e0": "full", "e1": ""}}
    assert engines.ask()[1] == (None, "e1")


def test_one_that_died_is_loaded_again_once_its_model_is_asked_so_that_there_are_two():
    engines = Either(3)
    core = engines.driver.core
    core.died("e1", 1.0, "killed")
    core.request(Ticket(90, "m", 1.0), 1.0)
    assert engines.driver.steps(1.0) == []  # two are left
    core.died("e0", 1.0, "killed")
    assert core.request(Ticket(91, "m", 2.0), 2.0)
    assert engines.driver.steps(2.0) == ["load e1"]
    assert engines.driver.log[-1].cause == Cause("missing_stage")
    core.request(Ticket(92, "m", 3.0), 3.0)
    assert engines.driver.steps(3.0) == []
    engines.driver.sound()


def test_one_that_died_is_loaded_again_also_if_the_other_may_take_no_more():
    engines = Either(2)
    for _ in range(4):
        engines.ask()
    engines.driver.core.died("e1", 1.0, "killed")
    ticket = Ticket(90, "m", 2.0, work=Work(tokens=1000))
    assert engines.driver.core.request(ticket, 2.0)
    assert isinstance(ticket.error, Overloaded)
    assert engines.driver.steps(2.0) == ["load e1"]
