"""Several backends of one model, over real sockets, with engines whose bytes the test sends."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.routing.in_flight import EngineLoad, Report
from anvil_mux.scheduler.events import Cause
from tests.fake_engine import GUARD, JSON_OK, SSE_HEAD, Answer, Asked, RawClient, Rig, chunk
from tests.running import serving

DEMO = Path(__file__).resolve().parent.parent.parent / "bin" / "demo-engine"
ASK = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
STREAM = b'{"model":"m","stream":true}'
LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "so it goes " * 2000}]}).encode()
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = fleet("least_prefill_work")
    yield made
    made.close()


def fleet(policy: str, concurrency: int | None = None, **settings: object) -> Rig:
    """Two replicas, a and b, resident."""
    backends = tuple(Backend(name, "m", (gpu,), concurrency=concurrency) for name, gpu in ("a0", "b1"))
    made = Rig(backends=backends, gpus=(Gpu("0"), Gpu("1")), routing=policy, **settings)
    assert made.mux.facts.adopt({"a": made.engine.url, "b": made.other.url}) == []
    return made


def ask(rig: Rig, body: bytes = ASK, extra: bytes = b"") -> RawClient:
    client = rig.client()
    client.post(body, extra=extra)
    return client


def answered(client: RawClient, asked: Asked) -> bytes:
    """The replica that answered, and why."""
    asked.send(JSON_OK)
    answer = client.read()
    assert answer.status == 200
    return answer.header(b"x-anvil-backend") or b""


def test_an_answer_and_the_log_say_which_replica_it_was_and_why(rig):
    client = ask(rig)
    told = answered(client, rig.engine.next())
    assert told.startswith(b"a; least_prefill_work: cache_aware_all_prefills_tokens_num ")
    assert told.endswith(b", num_requests 0; not b (metric)")
    assert rig.events.wait("leased").cause == Cause("routed", detail=told[3:].decode())


def test_a_model_with_one_backend_says_nothing_of_routing():
    with closing(Rig()) as rig:
        assert answered(ask(rig, b'{"model":"a"}'), rig.engine.next()) == b""


def explained(rig: Rig, body: bytes = ASK) -> dict[str, Any]:
    answer = ask_explained(rig, body)
    assert answer.status == 200
    found: dict[str, Any] = json.loads(answer.body)
    return found


def ask_explained(rig: Rig, body: bytes) -> Answer:
    return ask(rig, body, extra=b"X-Anvil-Explain: 1\r\n").read()


def test_a_request_that_asks_for_it_is_told_what_speaks_for_each_replica_and_is_not_sent(rig):
    client = ask(rig, LONG)
    busy = rig.engine.next()
    before = len(rig.events.of("leased"))
    for _ in range(2):  # nothing of it is remembered
        found = explained(rig, LONG)
        a, b = found["stages"]["neutral"]
        assert (a["backend"], a["chosen"], a["removed_by"]) == ("a", False, "metric")
        assert (b["backend"], b["chosen"], b["removed_by"]) == ("b", True, "")
        work = "cache_aware_all_prefills_tokens_num"
        assert a["metrics"]["num_requests"] == 1
        assert b["metrics"][work] == found["request"]["tokens"] < a["metrics"][work]
    assert len(rig.events.of("leased")) == before
    assert rig.other.asked.empty()
    answered(client, busy)


def test_a_replica_that_is_not_resident_is_ruled_out_by_its_state(rig):
    rig.mux.facts.died("a", "killed")
    b, a = explained(rig)["stages"]["neutral"]
    assert (b["backend"], b["chosen"]) == ("b", True)
    assert a == {"backend": "a", "chosen": False, "removed_by": "stopped", "metrics": {}}
    rig.mux.facts.died("b", "killed")
    assert [row["chosen"] for row in explained(rig)["stages"]["neutral"]] == [False, False]


def test_numbers_that_nobody_knows_are_null():
    backends = (Backend("a", "m", ("0",)), Backend("b", "m", ("1",)))
    policy = {"selector": {"metric": {"by": ["predicted_ttft"]}}}
    with closing(Rig(backends=backends, gpus=(), routing="one", routing_policies={"one": policy})) as rig:
        rig.mux.facts.adopt({"a": rig.engine.url, "b": rig.other.url})
        assert explained(rig)["stages"]["neutral"][0]["metrics"] == {"predicted_ttft": None}


def test_a_model_with_one_backend_has_nothing_to_explain():
    with closing(Rig()) as rig:
        assert explained(rig, b'{"model":"a"}')["stages"] == {}
        assert explained(rig, b'{"model":"a"}')["model"] == "a"
        assert json.loads(ask_explained(rig, b'{"model":"x"}').body)["error"]["code"] == "model_not_found"


def test_why_explains_the_choice_for_a_request_of_that_length(rig):
    answer = rig.client().get(b"/why?model=m&tokens=700")
    found = json.loads(answer.body)["stages"]["neutral"]
    assert [row["metrics"]["cache_aware_all_prefills_tokens_num"] for row in found] == [700, 700]
    assert rig.client().get(b"/why?model=m&tokens=-1").status == 400


def test_why_says_so_when_the_policy_would_let_no_replica_take_it():
    small = {
        "filters": [{"metric": {"metric": "prefix_miss_tokens", "threshold": 1000, "in_fallback": True}}],
        "selector": "round_robin",
    }
    with closing(fleet("small", routing_policies={"small": small})) as rig:
        verdicts = {
            tokens: json.loads(rig.client().get(b"/why?model=m&tokens=%d" % tokens).body)["sentence"]
            for tokens in (999, 1000)
        }
        assert verdicts[999].startswith("A request for m is served at once: ")
        refusal = "A request for m is refused: the routing policy lets none of its replicas take it."
        assert verdicts[1000] == refusal


def test_the_command_why_shows_it_as_a_table(rig, capsys):
    url = f"http://127.0.0.1:{rig.address[1]}"
    assert main(["why", "m", "--tokens", "700", "--url", url]) == 0
    sentence, *lines = capsys.readouterr().out.splitlines()
    assert sentence
    assert [line.split() for line in lines] == [
        ["REPLICA", "REMOVED", "BY", "cache_aware_all_prefills_tokens_num", "num_requests"],
        ["a", "chosen", "700", "0"],
        ["b", "metric", "700", "0"],
    ]
    assert main(["why", "m", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines() == [sentence]


def test_what_an_engine_says_of_itself_is_told_with_its_age(capsys):
    with closing(fleet("num_requests", routing_mode="full")) as rig:
        rig.mux.tell(rig.mux.scheduler.observed, "a", EngineLoad(running=3, waiting=1, usage=0.5))
        a, b = explained(rig)["stages"]["neutral"]
        assert b["engine"]["running"] is None
        assert (a["removed_by"], a["metrics"]) == ("metric", {"num_requests": 4})
        backends = json.loads(rig.client().get(b"/healthz").body)["models"]["m"]["backends"]
        for said in a["engine"], backends["a"]["engine"]:
            assert said.pop("age_seconds") >= 0.0
            assert said == {"running": 3, "waiting": 1, "kv_usage": 0.5}
        assert main(["why", "m", "--explain", "--url", f"http://127.0.0.1:{rig.address[1]}"]) == 0
        _, head, *lines = capsys.readouterr().out.splitlines()
        assert head.endswith("ITS ENGINE")
        assert re.search(r"3 run, 1 wait, cache 50.0% full, \S+ s ago$", lines[0])
        assert re.search(r"nothing for \S+ s$", lines[1])


def test_without_the_mode_full_nothing_is_told_of_engines(rig):
    rig.mux.tell(rig.mux.scheduler.observed, "a", EngineLoad(running=3, waiting=1))
    assert "engine" not in explained(rig)["stages"]["neutral"][0]
    backends = json.loads(rig.client().get(b"/healthz").body)["models"]["m"]["backends"]
    assert backends["a"]["engine"] is None


def test_a_request_goes_where_less_is_waiting(rig):
    first, second = ask(rig), rig.engine.next()
    assert answered(ask(rig), rig.other.next())[:1] == b"b"
    assert answered(first, second)[:1] == b"a"


def test_a_conversation_returns_to_the_replica_that_knows_it(rig):
    answered(ask(rig, LONG), rig.engine.next())
    rig.events.wait("released")
    answered(ask(rig), rig.other.next())
    rig.events.wait("released", 2)
    assert b"cache_aware_all_prefills_tokens_num" in answered(ask(rig, LONG), rig.engine.next())


def test_a_session_named_in_a_header_stays():
    with closing(fleet("sticky")) as rig:
        held, waiting = ask(rig, extra=b"X-Session-ID: s\r\n"), rig.engine.next()
        again = ask(rig, extra=b"X-Session-ID: s\r\n")
        assert b"its session's replica" in answered(again, rig.engine.next())
        answered(ask(rig), rig.other.next())
        answered(held, waiting)


def said(cached: int | None) -> bytes:
    """A whole answer of an engine that counted 5,500 tokens of input."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    body = json.dumps({"usage": {"prompt_tokens": 5500, "completion_tokens": 1, **details}}).encode()
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )


def test_what_the_router_thought_cached_is_recorded_where_the_engine_says_what_was(rig):
    foreseen = []
    for number, cached in enumerate((0, 5000, None), 1):
        client = ask(rig, LONG)
        rig.engine.next().send(said(cached))  # it has the beginning of it, so it gets all three
        client.read()
        foreseen.append(rig.events.record(number).foreseen)
    first, second, third = foreseen
    assert (first, third) == (0.0, None)
    assert second == pytest.approx(1.0, abs=0.1)


def test_the_first_byte_of_a_stream_says_that_its_prefill_is_done(rig):
    client = ask(rig, LONG.replace(b'{"model"', b'{"stream":true,"model"', 1))
    streaming = rig.engine.next()
    streaming.send(SSE_HEAD)
    client.read_until(b"\r\n\r\n")
    assert answered(ask(rig), rig.other.next())[:1] == b"b"  # the head alone says nothing
    streaming.send(chunk(b"data: {}\n\n"))
    client.read_until(b"data: {}\n\n\r\n")
    told = answered(ask(rig, LONG), rig.engine.next())
    left = re.search(rb"tokens_num (\d+), num_requests 1;", told)
    assert left is not None
    assert int(left[1]) < 512  # what does not fill a block
    streaming.send(chunk(DONE), chunk(b""))
    assert client.read_chunks() == (DONE, True)


def test_the_first_byte_of_a_translated_stream_says_so_too(rig):
    client = rig.client()
    question = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}
    client.post(json.dumps(question).encode(), path=b"/api/chat")
    streaming = rig.engine.next()
    streaming.send(SSE_HEAD)
    event = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    streaming.send(chunk(event))
    client.read_until(b"hi")
    work = explained(rig)["stages"]["neutral"][0]
    assert work["backend"] == "a"
    assert work["metrics"]["num_requests"] == 1
    assert work["metrics"]["cache_aware_all_prefills_tokens_num"] < 100  # the question explained alone
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    streaming.send(chunk(last), b"0\r\n\r\n")
    client.read_until(b'"done":true')


def test_what_an_engine_says_of_tokens_is_learned(rig):
    before = rig.mux.overview.bytes_per_token("m")
    client, body = ask(rig, LONG), b'{"usage":{"prompt_tokens":22000}}'
    rig.engine.next().send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)
    client.read()
    rig.events.wait("released")
    assert rig.mux.overview.bytes_per_token("m") < before


# What becomes of a request when its replica goes


def test_a_request_without_a_byte_moves_when_its_replica_dies(rig):
    rig.mechanism.end = "killed"
    client = ask(rig)
    rig.engine.next().reset()
    assert answered(client, rig.other.next())[:1] == b"b"


def test_an_answer_that_only_we_have_seen_begins_anew_elsewhere(rig):
    rig.mechanism.end = "killed"
    client = ask(rig)
    asked = rig.engine.next()
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")
    asked.reset()
    assert answered(client, rig.other.next())[:1] == b"b"


@pytest.mark.parametrize("sent", [b"", SSE_HEAD], ids=["nothing", "head"])
def test_a_stream_without_content_moves_and_its_client_sees_one_answer(rig, sent):
    rig.mechanism.end = "killed"
    client = ask(rig, STREAM)
    asked = rig.engine.next()
    asked.send(sent)
    if sent:
        client.read_until(b"\r\n\r\n")
    asked.reset()
    rig.other.next().send(SSE_HEAD, chunk(b"data: 1\n\n" + DONE), chunk(b""))
    if not sent:
        assert b"200 OK" in client.read_until(b"\r\n\r\n")
    assert client.read_chunks() == (b"data: 1\n\n" + DONE, True)


def test_a_stream_that_has_begun_breaks_off_with_an_error(rig):
    rig.mechanism.end = "killed"
    client = ask(rig, STREAM)
    asked = rig.engine.next()
    asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
    client.read_until(b"data: 1\n\n\r\n")
    asked.reset()
    body, clean = client.read_chunks()
    assert b"broke off" in body
    assert not clean
    assert rig.other.asked.empty()


def test_a_request_without_a_byte_moves_when_its_replica_is_put_out(rig):
    first = ask(rig)
    rig.engine.next()
    elsewhere = ask(rig, LONG)
    held = rig.other.next()
    rig.mux.facts.unanswering("a", residency=rig.mux.scheduler.layout.slot("a").residency)
    for asked in (held, rig.other.next()):
        asked.send(JSON_OK)
    assert [client.read().status for client in (first, elsewhere)] == [200] * 2
    rig.events.wait("released", 2)


def test_a_connection_that_a_replica_closes_is_the_failure_of_its_request_alone(rig):
    first = ask(rig)
    asked = rig.engine.next()
    elsewhere = ask(rig, LONG)
    held = rig.other.next()
    third = ask(rig)
    rig.engine.next().reset()
    assert third.read().status == 502
    for each in (asked, held):
        each.send(JSON_OK)
    assert [client.read().status for client in (first, elsewhere)] == [200] * 2
    assert rig.events.of("draining") == []


def test_a_stream_that_waits_is_taken_back_when_another_replica_is_idle(rig):
    """Two at each; those at b end, and the second one at a moves, unseen by its client."""
    clients, asked = [], []
    for engine in (rig.engine, rig.other) * 2:
        clients.append(ask(rig, STREAM))
        asked.append(engine.next())
    for each in (asked[1], asked[3]):
        each.send(SSE_HEAD, chunk(b"data: b\n\n" + DONE), chunk(b""))
    rig.other.next().send(SSE_HEAD, chunk(b"data: moved\n\n" + DONE), chunk(b""))
    assert asked[2].was_left()
    asked[0].send(SSE_HEAD, chunk(b"data: a\n\n" + DONE), chunk(b""))
    for client, word in zip(clients, (b"a", b"b", b"moved", b"b"), strict=True):
        client.read_until(b"\r\n\r\n")
        assert client.read_chunks() == (b"data: %b\n\n" % word + DONE, True)


@pytest.mark.parametrize("body", [ASK, STREAM])
def test_a_request_without_a_byte_moves_when_its_replica_turns_stale(body):
    with closing(fleet("load_balance", routing_mode="full")) as rig:
        client = ask(rig, body)
        asked = rig.engine.next()
        rig.mux.tell(rig.mux.scheduler.silent, "a")
        rig.mux.facts.hear({"a": [Report(load=EngineLoad(1, 0, None), age_seconds=61.0)]})
        rig.mux.tell(rig.mux.scheduler.silent, "a")
        rig.other.next().send(JSON_OK)
        assert asked.was_left()
        assert (client.read().header(b"x-anvil-backend") or b"").startswith(b"b; load_balance: ")


def test_a_request_under_which_two_replicas_end_is_refused_and_the_next_one_is_served(rig):
    rig.mechanism.end = "exited with code 139"
    client = ask(rig)
    rig.engine.next().reset()
    rig.other.next().reset()
    refused = client.read()
    assert (refused.status, refused.header(b"x-should-retry")) == (502, b"false")
    error = json.loads(refused.body)["error"]
    assert error["code"] == "engine_crashed"
    assert "b exited with code 139" in error["message"]
    reloaded = ask(rig)
    assert answered(reloaded, rig.engine.next())[:1] == b"a"


def test_a_replica_that_fails_takes_those_on_its_node_out_with_it():
    policy = {"filters": ["schedulability", {"failover": {"domain": "node"}}], "selector": "round_robin"}
    backends = (
        Backend("a", "m", ("0",), node="one", failure_domain="left"),
        Backend("b", "m", ("1",), node="two", failure_domain="left"),
        Backend("c", "m", ("2",), node="one", preload=True),
    )
    with closing(Rig(backends=backends, gpus=(), routing="one", routing_policies={"one": policy})) as rig:
        rig.mux.facts.adopt({"a": rig.engine.url, "b": rig.other.url})
        rig.events.wait("stuck")  # nobody knows how to load c
        for _ in range(2):
            told = answered(ask(rig), rig.other.next())
            assert told == b"b; one: its turn; not a (failover), c (schedulability)"


def test_a_policy_that_lets_nobody_take_more_is_an_overload():
    policy = {
        "filters": [{"metric": {"metric": "num_requests", "threshold": 1, "in_fallback": True}}],
        "selector": "round_robin",
    }
    backends = (Backend("a", "m", ("0",)), Backend("b", "m", ("1",)))
    with closing(Rig(backends=backends, gpus=(), routing="one", routing_policies={"one": policy})) as rig:
        rig.mux.facts.adopt({"a": rig.engine.url, "b": rig.other.url})
        clients, asked = [], []
        for engine in (rig.engine, rig.other):
            clients.append(ask(rig))
            asked.append(engine.next())
        refused = ask(rig).read()
        assert refused.status == 503
        assert b"overloaded" in refused.body
        assert [answered(*pair)[:1] for pair in zip(clients, asked, strict=True)] == [b"a", b"b"]


# A real anvil-mux before three demo engines


def three(folder: Path) -> Path:
    command = [str(DEMO), "--model", "m", "--load-seconds", "0", "--tokens-per-second", "20"]
    services = {
        name: {"command": command, "image": "none", "x-anvil": {"model": "m", "gpus": [], "preload": True}}
        for name in ("r0", "r1", "r2")
    }
    file = folder / "compose.yaml"
    top = {"runtime": "process", "routing": {"mode": "full"}}
    file.write_text(yaml.safe_dump({"name": "three", "x-anvil": top, "services": services}))
    return file


def test_an_engine_that_is_killed_under_load_loses_no_request_that_had_not_begun(tmp_path):
    """Thirty answers in one piece at three replicas, one of which is killed among them."""
    state = tmp_path / "state"
    with serving(three(tmp_path), state=state) as mux, ThreadPoolExecutor(30) as pool:
        seen: set[str] = set()
        until(lambda: seen.add(served_by(mux.chat("m", max_tokens=1)[1])) or len(seen) == 3)
        asked = [pool.submit(mux.chat, "m", max_tokens=20) for _ in range(30)]
        until(lambda: mux.get("/healthz")["models"]["m"]["leases"] == 30)
        about = json.loads((state / "anvil-mux" / "three" / "r1.json").read_text())
        os.kill(about["pid"], signal.SIGKILL)
        answers = [each.result(GUARD * 3) for each in asked]
    assert [status for status, _, _ in answers] == [200] * 30
    assert {served_by(headers) for _, headers, _ in answers} >= {"r0", "r2"}


def served_by(headers: Mapping[str, str]) -> str:
    return headers["x-anvil-backend"].partition(";")[0]


def until(true: Callable[[], bool]) -> None:
    """Waits, asking again and again."""
    pause = threading.Event()
    for _ in range(int(GUARD / 0.05)):
        if true():
            return
        pause.wait(0.05)
    raise AssertionError("it never came true")


def test_the_logs_of_replicas_are_told_apart(rig, capsys):
    rig.logs |= {"a": ["of a"], "b": ["of b"]}
    url = "http://{}:{}".format(*rig.address)
    assert main(["logs", "m", "--url", url]) == 0
    shown = capsys.readouterr()
    assert shown.out == "of a\nof b\n"
    assert shown.err == "anvil-mux: ==> a\nanvil-mux: ==> b\n"
    assert main(["logs", "b", "--url", url]) == 0
    assert capsys.readouterr().out == "of b\n"
