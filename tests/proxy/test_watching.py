"""What those see who look on through a real server, and what they may do."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.host.seam import GpuUse, Sensors
from anvil_mux.proxy import page
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.telemetry.journal import EVENTS
from tests.fake_engine import GUARD, JSON_OK, SSE_HEAD, RawClient, Rig, chunk, keyring, shows
from tests.telemetry.test_metrics import record

ASK_A, ASK_B = b'{"model":"a"}', b'{"model":"org/b"}'


class Watcher:
    """One client of /events."""

    def __init__(self, client: RawClient, extra: bytes = b"") -> None:
        self.client = client
        client.send(b"GET /events HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (client.host, extra))
        self.head = client.read_until(b"\r\n\r\n")

    def next(self) -> tuple[str, Any]:
        """The next message; comments are passed over."""
        while True:
            lines = self.message().splitlines()
            if lines[0].startswith("event: "):
                return lines[0][7:], json.loads(lines[1].removeprefix("data: "))

    def message(self) -> str:
        text = b""
        while not text.endswith(b"\n\n"):
            size = int(self.client.read_until(b"\r\n"), 16)
            assert size, "the stream ended"
            while len(self.client.buffer) < size + 2:
                assert self.client.more()
            text, self.client.buffer = text + self.client.buffer[:size], self.client.buffer[size + 2 :]
        return self._split(text.decode())

    def _split(self, text: str) -> str:
        """Messages may come together in one chunk."""
        first, _, rest = text.partition("\n\n")
        if rest:
            self.client.buffer = chunk(rest.encode()) + self.client.buffer
        return first

    def until(self, kind: str, so: Callable[[Any], bool] = lambda _: True) -> Any:
        while True:
            name, data = self.next()
            if name == kind and so(data):
                return data


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(page, "PAUSE_SECONDS", 0.0)


def test_the_first_message_is_the_whole_state(rig):
    rig.feed.tell(Event(1.0, "ready", "a", "a", seconds=2.0))
    rig.feed.ended(record(request_id="r1", model="a"))
    watcher = Watcher(rig.client())
    kind, seen = watcher.next()
    assert b"text/event-stream" in watcher.head
    assert kind == "snapshot"
    assert seen["models"]["a"]["state"] == "stopped"
    assert [event["text"] for event in seen["events"]] == ["ready after 2.0 s"]
    assert [request["id"] for request in seen["requests"]] == ["r1"]
    assert seen["queued"] == []


def test_the_state_is_rendered_once_for_all_who_look_within_a_moment(rig, monkeypatch):
    monkeypatch.setattr(page, "PAUSE_SECONDS", 2 * GUARD)
    rendered, state = [], rig.handler.local.probes.state

    def counted(*, brief: bool = False) -> dict[str, Any]:
        rendered.append(brief)
        return state(brief=brief)

    monkeypatch.setattr(rig.handler.local.probes, "state", counted)
    watchers = [Watcher(rig.client()) for _ in range(5)]
    assert [watcher.next()[0] for watcher in watchers] == ["snapshot"] * 5
    assert len(rendered) == 1
    rig.feed.tell(Event(1.0, "ready", "a", "a", seconds=2.0))
    rig.feed.ring()
    for watcher in watchers:
        watcher.until("event")
    assert len(rendered) <= 2


def test_what_happens_is_told_when_it_happens(rig):
    watcher = Watcher(rig.client())
    watcher.next()
    rig.feed.tell(Event(1.0, "deferred", "b", size=2, seconds=float("inf"), cause=Cause("more_awaited")))
    rig.feed.ended(record(request_id="r1", model="a"))
    rig.feed.ring()
    event = watcher.until("event")
    assert (event["kind"], event["seconds"]) == ("deferred", None)
    assert (event["cause"], event["reason"]) == ({"kind": "more_awaited"}, "more requests may come")
    assert watcher.until("requests")["requests"][0]["id"] == "r1"


def test_the_state_is_told_only_when_it_has_changed(rig, monkeypatch):
    monkeypatch.setattr(page, "BEAT_SECONDS", 0.0)
    watcher = Watcher(rig.client())
    assert watcher.message().startswith("event: snapshot")
    assert [watcher.message() for _ in range(3)] == [": nothing new"] * 3
    _, asked = rig.asked(ASK_A)
    busy = watcher.until("state", lambda state: state["leases"] == 1)
    assert busy["models"]["a"]["state"] == "ready"
    asked.send(JSON_OK)
    watcher.until("state", lambda state: state["leases"] == 0)


def test_what_gpus_measure_is_told_now_and_then(rig, monkeypatch):
    monkeypatch.setattr(page, "BEAT_SECONDS", 0.0)
    watcher = Watcher(rig.client())
    assert watcher.message().startswith("event: snapshot")
    rig.handler.local.probes.gpu_uses = lambda: {"0": GpuUse(sensors=Sensors(celsius=61.0))}
    assert [watcher.message() for _ in range(3)] == [": nothing new"] * 3
    monkeypatch.setattr(page, "SENSORS_SECONDS", 0.0)
    hot = watcher.until("state")
    assert hot["gpus"]["0"]["sensors"]["celsius"] == 61


def test_what_ticks_is_no_news():
    lasting = {"leases": 1, "queued": [{"ticket": 3, "model": "a"}], "models": {"a": {"load_seconds": 2.0}}}
    ticking = {
        **lasting,
        "now": 1.0,
        "uptime_seconds": 2.0,
        "queued": [{"ticket": 3, "model": "a", "since": 9.0}],
        "models": {"a": {"load_seconds": 2.0, "idle_seconds": 3.0, "backends": [{"state_seconds": 4.0}]}},
    }
    assert page._lasting(ticking) == {**lasting, "models": {"a": {"load_seconds": 2.0, "backends": [{}]}}}


def test_one_that_reads_slowly_holds_up_nobody_and_is_told_what_it_lost(rig):
    watcher = Watcher(rig.client())
    watcher.next()
    with rig.feed._bell:  # the watcher's thread cannot look meanwhile
        for number in range(EVENTS + 5):
            rig.feed.tell(Event(float(number), "ready", "a", "a"))
    assert watcher.until("lost") == {"events": 5}
    watcher.until("event")


def test_a_watcher_that_leaves_is_noticed(rig):
    watcher = Watcher(rig.client())
    watcher.next()
    watcher.client.leave()
    record = rig.events.record()
    assert (record.status, record.code) == (200, "")  # nothing else ends it


def test_the_stream_ends_before_the_program_waits_for_its_requests(rig):
    watcher = Watcher(rig.client())
    watcher.next()
    drained = threading.Event()
    thread = threading.Thread(target=lambda: rig.server.drain(GUARD) and drained.set())
    thread.start()
    assert watcher.client.read_chunks()[1]
    assert drained.wait(GUARD)
    thread.join()


def test_of_several_keys_none_has_more_than_half_of_the_places_of_those_who_look_on(make_rig, monkeypatch):
    monkeypatch.setattr("anvil_mux.telemetry.journal.WATCHERS", 3)
    lines = "the-one-key models=* state; the-other-key models=* state"
    rig = make_rig(keys=keyring(lines))
    one, other = shows("the-one-key"), shows("the-other-key")
    watcher = rig.client()
    watcher.send(b"GET /models/sse HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (watcher.host, one))
    watcher.read_until(b"data: ")
    for path in (b"/models/sse", b"/events"):
        refused = rig.get(path, extra=one)
        assert (refused.status, refused.code) == (429, "too_many_requests")
    assert Watcher(rig.client(), other).next()[0] == "snapshot"
    watcher.leave()
    rig.events.record(3)  # its place is free before that is noted
    assert Watcher(rig.client(), one).next()[0] == "snapshot"


def test_a_single_key_has_all_places_of_those_who_look_on(make_rig, monkeypatch):
    monkeypatch.setattr("anvil_mux.telemetry.journal.WATCHERS", 2)
    rig = make_rig(keys=keyring("the-only-key"))
    for _ in range(2):
        assert Watcher(rig.client(), shows("the-only-key")).next()[0] == "snapshot"
    assert rig.get(b"/events", extra=shows("the-only-key")).status == 503


def test_a_waiting_request_can_be_taken_out_of_its_line(rig):
    rig.mechanism.gate.clear()
    waiting, other = rig.client(), rig.client()
    waiting.post(ASK_A)
    rig.events.wait("queued")
    other.post(ASK_A)
    ticket = rig.events.wait("queued", 2).ticket
    watcher = Watcher(rig.client())
    _, seen = watcher.next()
    assert [(line["model"], line["ticket"]) for line in seen["queued"]][1] == ("a", ticket)
    boss = rig.client()
    assert boss.ask(b'{"ticket":%d}' % ticket, b"/requests/cancel").status == 200
    refused = other.read()
    assert (refused.status, refused.code) == (503, "cancelled")
    assert refused.header(b"x-should-retry") == b"false"
    rig.mechanism.gate.set()
    rig.engine.next().send(JSON_OK)
    assert waiting.read().status == 200
    assert boss.ask(b'{"ticket":%d}' % ticket, b"/requests/cancel").status == 404


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"ticket":"1"}', b'{"ticket":true}', b"nonsense"])
def test_a_cancel_that_names_no_ticket_is_refused(rig, body):
    assert rig.ask(body, b"/requests/cancel").status == 400


def test_no_other_web_site_may_act_here(rig):
    models = (b"/models/load", b"/models/unload", b"/models/pin", b"/models/unpin")
    for path in (b"/requests/cancel", *models, b"/hosts/drain", b"/hosts/gone"):
        assert rig.ask(b'{"model":"a","ticket":1}', path, b"Origin: http://evil.example\r\n").status == 403


def test_the_engines_log_is_told(rig):
    rig.logs["a"] = ["one", "two", "three"]
    answer = rig.get(b"/logs?model=alias&lines=2")
    told = {"model": "a", "backend": "a", "backends": ["a"], "lines": ["two", "three"]}
    assert answer.json == told
    answer = rig.get(b"/logs?model=b")  # by its service
    assert answer.json["model"] == "org/b"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        (b"", 400),
        (b"?model=x", 404),
        (b"?model=a&lines=0", 400),
        (b"?model=a&lines=z", 400),
        (b"?model=a&lines=-1", 400),
        (b"?model=a&lines=%C2%B2", 400),
        (b"?model=a&lines=" + b"1" * 4500, 400),
        (b"?model=a&backend=b", 400),
    ],
)
def test_a_log_that_cannot_be_told_is_refused(rig, query, status):
    assert rig.get(b"/logs" + query).status == status


def test_browsers_get_the_page_which_may_ask_nobody_else(rig):
    answer = rig.get(b"/", extra=b"Accept: text/html,*/*;q=0.8\r\n")
    policy = answer.header(b"content-security-policy") or b""
    script = answer.body.partition(b"<script>")[2].partition(b"</script>")[0]
    assert answer.status == 200
    assert b"default-src 'none'" in policy
    assert b"'sha256-%b'" % base64.b64encode(hashlib.sha256(script).digest()) in policy
    assert answer.body.count(b"<script") == 1
    assert rig.get(b"/").body.startswith(b"anvil-mux ")


def test_why_says_what_a_request_would_wait_for(rig):
    answer = rig.json(b"/why?model=alias")
    assert (answer["model"], answer["verdict"], answer["seconds"]) == ("a", "waits", 10.0)
    assert answer["sentence"].startswith(
        "alias is another name for a. A request for a waits about 10 s: there is room"
    )
    assert rig.get(b"/why?model=x").status == 404
    for query in (b"", *(b"?model=a&tokens=" + tokens for tokens in (b"%C2%B2", b"1" * 5000, b"%D9%A3"))):
        assert rig.get(b"/why" + query).status == 400


def test_why_and_logs_answer_while_a_reload_takes_effect(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The multiplexer has the new configuration by then, and the requests that came before the old one."""
    first, *others = rig.config.backends
    backends = (replace(first, aliases=("newer",)), *others)
    rig.mux.facts.reconfigure(replace(rig.config, backends=backends), {})
    for name in (b"alias", b"newer"):
        assert rig.json(b"/why?model=" + name)["model"] == "a"
    status = rig.mux.overview.status()
    monkeypatch.setattr(rig.mux.overview, "status", lambda: replace(status, models=()))
    assert rig.get(b"/logs?model=a").status == 404


def running(rig: Rig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rig.json(b"/requests/running")["requests"]
    return found


def test_requests_that_run_or_wait_are_listed(rig):
    first, asked = rig.asked(ASK_A, extra=b"X-Request-ID: the-first\r\n")
    [shown] = running(rig)
    assert (shown["id"], shown["model"], shown["backend"], shown["state"]) == (
        "the-first",
        "a",
        "a",
        "running",
    )
    rig.mechanism.gate.clear()
    rig.client().post(b'{"model":"org/b"}', extra=b"X-Request-ID: the-second\r\n")
    rig.events.wait("queued", 2)
    assert [(each["id"], each["state"]) for each in running(rig)] == [
        ("the-first", "running"),
        ("the-second", "waiting"),
    ]
    asked.send(JSON_OK)
    assert first.read().status == 200


def test_a_request_that_runs_is_cancelled_by_its_id_and_its_engine_hears_of_it(rig):
    client, boss = rig.client(), rig.client()
    client.post(ASK_A, extra=b"X-Request-ID: unwanted\r\n")
    asked = rig.engine.next()
    assert boss.ask(b'{"id":"unwanted"}', b"/requests/cancel").status == 200
    refused = client.read()
    error = refused.error
    assert (refused.status, error["code"]) == (503, "cancelled")
    assert error["message"] == "This request for a was cancelled by hand."
    assert asked.was_left()
    rig.events.wait("released")
    assert running(rig) == []
    assert boss.ask(b'{"id":"unwanted"}', b"/requests/cancel").status == 404


def test_a_stream_that_is_cancelled_ends_with_an_error_and_no_other_replica_goes_on(rig):
    client, boss = rig.client(), rig.client()
    client.post(b'{"model":"a","stream":true}', extra=b"X-Request-ID: unwanted\r\n")
    asked = rig.engine.next()
    asked.send(SSE_HEAD, chunk(b"data: {}\n\n"))
    client.read_until(b"data: {}")
    assert boss.ask(b'{"id":"unwanted"}', b"/requests/cancel").status == 200
    assert b'"code":"cancelled"' in client.rest()
    assert asked.was_left()
