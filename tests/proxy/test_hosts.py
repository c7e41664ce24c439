"""What clients see of hosts that are lost, over real sockets."""

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.proxy.dispatch import Patience
from anvil_mux.scheduler.events import Event
from tests.fake_engine import JSON_OK, SSE_HEAD, Rig, chunk
from tests.proxy.test_watching import Watcher
from tests.running import seen

HERE, THERE = Backend("b", "m", ("0",)), Backend("a", "m", ("0",), host="h1")
ALONE = Backend("a", "m", ("0",), host="h1")
ASK, STREAM = b'{"model":"m"}', b'{"model":"m","stream":true}'


def resident(rig: Rig, *backends: str) -> None:
    engines = {"a": rig.engine, "b": rig.other}
    assert rig.mux.facts.adopt({name: engines[name].url for name in backends}) == []


def test_a_model_on_a_lost_host_is_offered_to_nobody(make_rig):
    rig = make_rig(backends=(ALONE,))
    resident(rig, "a")
    rig.engine.answer = lambda _: JSON_OK
    client = rig.client()

    def offered() -> tuple[object, object, object]:
        listed = client.json(b"/v1/models")["data"][0]["status"]["value"]
        health = client.json(b"/healthz")
        return listed, health["resident"], health["hosts"]["h1"]["lost"]

    assert offered() == ("loaded", "m", False)
    rig.mux.facts.host_lost("h1")
    assert offered() == ("unloaded", None, True)
    refused = client.ask(ASK)
    error = refused.error
    assert (refused.status, error["code"]) == (503, "host_unavailable")
    assert "h1 has been lost for" in error["message"]
    assert refused.header(b"retry-after")
    rig.mux.facts.host_back("h1", {"a": rig.engine.url})
    assert offered() == ("loaded", "m", False)
    assert client.ask(ASK).status == 200


def test_where_there_is_one_host_none_is_named(rig):
    assert b"host" not in rig.get(b"/healthz").body


def candidates(*hosts: str) -> list[Backend]:
    """Two backends of a model on each host."""
    return [Backend(f"m.{host}.{gpu}", "m", (gpu,), host=host) for host in hosts for gpu in "01"]


def test_those_who_look_on_are_told_of_the_backends_that_matter(make_rig):
    rig = make_rig(backends=candidates("h1", "h2", "h3"))
    rig.mux.facts.adopt({"m.h2.1": rig.engine.url})
    rig.feed.tell(Event(0.0, "ready", "m", "m.h2.1"))
    _, told = Watcher(rig.client()).next()
    assert told["models"]["m"]["candidates"] == {"backends": 6, "hosts": 3}
    assert told["models"]["m"]["backends"].keys() == {"m.h2.1"}
    assert [event["host"] for event in told["events"]] == ["h2"]
    assert len(rig.json(b"/healthz")["models"]["m"]["backends"]) == 6


def test_of_a_few_backends_on_one_host_all_are_told(make_rig):
    rig = make_rig(backends=[Backend(f"m.{gpu}", "m", (gpu,)) for gpu in "01234567"])
    _, told = Watcher(rig.client()).next()
    assert "candidates" not in told["models"]["m"]
    assert len(told["models"]["m"]["backends"]) == 8


def test_why_names_the_hosts_and_says_which_are_left_out(make_rig):
    rig = make_rig(backends=candidates("", "h1", "h2", "h3"))
    rig.mux.facts.adopt({"m.h1.0": rig.engine.url})
    rig.mux.facts.host_lost("h1", "the head is down")
    rig.mux.tell(rig.mux.scheduler.host_drained, "h2", drained=True)
    rig.mux.tell(rig.mux.scheduler.host_away, "h2", away=True, why="Docker does not answer")
    rig.mux.tell(rig.mux.scheduler.host_away, "h3", away=True, why="its disk is full")
    told = {each.pop("host"): each for each in rig.json(b"/why?model=m")["hosts"]}
    assert told["local"] == {"states": {"stopped": 2}, "left_out": None}
    assert told["h1"]["states"] == {"ready": 1, "stopped": 1}
    assert told["h1"]["left_out"] == "lost for 0 s: the head is down"
    away = "away: Docker does not answer; its engines go on serving"
    assert told["h2"]["left_out"] == f"drained by hand; {away}"
    assert told["h3"]["left_out"] == "away: its disk is full; its engines go on serving"
    rig.mux.tell(rig.mux.scheduler.host_away, "", away=True, why="Docker does not answer")
    told = {each.pop("host"): each for each in rig.json(b"/why?model=m")["hosts"]}
    assert told["local"]["left_out"] == away
    stages = rig.json(b"/why?model=m")["stages"]
    removed = {row["backend"]: row["removed_by"] for row in stages["neutral"]}
    assert (removed["m.h1.0"], removed["m.h2.0"]) == ("host_lost", "stopped")


def test_why_names_no_host_where_there_is_one(rig):
    assert "hosts" not in rig.json(b"/why?model=a")


# Requests that a lost host had


def test_one_whose_client_has_seen_nothing_is_answered_by_another_host(make_rig):
    rig = make_rig(backends=(THERE, HERE))
    resident(rig, "a")
    client, _ = rig.asked(ASK)
    resident(rig, "b")
    rig.other.answer = lambda _: JSON_OK
    rig.mux.facts.host_lost("h1")
    assert client.read().status == 200
    assert (rig.events.record().backend, rig.events.record().code) == ("b", "")
    assert [event.cause.host for event in rig.events.of("severed")] == ["h1"]


@pytest.mark.parametrize("body", [ASK, STREAM])
def test_it_waits_for_a_load_where_no_other_is_resident(make_rig, body):
    rig = make_rig(backends=(THERE, HERE))
    resident(rig, "a")
    rig.other.answer = lambda _: JSON_OK
    client, _ = rig.asked(body)
    rig.mux.facts.host_lost("h1")
    assert client.read().status == 200
    assert rig.events.record().backend == "b"
    assert [event.backend for event in rig.events.of("loading")] == ["b"]


def test_it_is_told_that_its_host_is_lost_where_there_is_no_other(make_rig):
    rig = make_rig(backends=(ALONE,))
    resident(rig, "a")
    client, _ = rig.asked(ASK)
    rig.mux.facts.host_lost("h1")
    answer = client.read()
    error = answer.error
    assert (answer.status, error["code"]) == (503, "host_unavailable")
    assert "h1 has been lost for" in error["message"]


def test_an_answer_that_has_begun_ends_with_an_error_that_names_the_host(make_rig):
    rig = make_rig(backends=(THERE, HERE))
    resident(rig, "a")
    client, asked = rig.asked(STREAM)
    asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
    client.read_until(b"data: 1\n\n\r\n")
    rig.mux.facts.host_lost("h1")
    said = client.rest()
    assert b"m ran on the host h1, which was lost before this request ended" in said
    assert not said.endswith(b"0\r\n\r\n")
    assert rig.events.record().code == "severed"
    assert rig.events.of("loading") == []


def test_a_stream_that_we_began_while_its_model_was_loading_goes_on_elsewhere(make_rig):
    """It was sent comment lines of ours, and nothing of an engine."""
    rig = make_rig(backends=(THERE, HERE), patience=Patience(grace=0.0, comment_every=0.0))
    rig.mechanism.gate.clear()
    rig.other.answer = lambda _: SSE_HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    client = rig.client()
    client.post(STREAM)
    client.read_until(b"anvil-mux loading m")
    resident(rig, "a")
    rig.engine.next()
    rig.mux.facts.host_lost("h1")
    rig.mechanism.gate.set()
    client.read_until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert (rig.events.record().backend, rig.events.record().code) == ("b", "")


def test_of_one_that_failed_while_its_host_was_not_lost_yet_nothing_more_is_waited_for(make_rig):
    """Its engine's connection ends, and nobody knows why; then its host is lost."""
    rig = make_rig(backends=(THERE, HERE))
    rig.mechanism.well = None
    resident(rig, "a")
    rig.other.answer = lambda _: JSON_OK
    client, asked = rig.asked(ASK)
    asked.close()
    seen(lambda: rig.mux.facts.doubts._open, lambda doubts: "a" in doubts)
    rig.mux.facts.host_lost("h1")
    assert client.read().status == 200
    assert rig.mux.facts.doubts._open == {}
