"""Hooks are told what happened, as JSON, for so long and no longer; what goes wrong is said once."""

import json
import os
import queue
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from anvil_mux.config.values import HOOKS, Hook
from anvil_mux.scheduler.events import KINDS, Cause, Event
from anvil_mux.telemetry.hooks import HookNotifier, occasion, perform
from anvil_mux.telemetry.journal import Feed, event_as_json

GUARD = 20.0


class Receiver(HTTPServer):
    """A web address that answers ``status`` and keeps what it got."""

    status = 204

    def __init__(self) -> None:
        self.got: queue.Queue[dict[str, Any]] = queue.Queue()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.put(json.loads(body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(GUARD)


@pytest.mark.parametrize(
    ("kind", "cause", "what"),
    [
        ("ready", None, "loaded"),
        ("ready", Cause("adopted"), "loaded"),
        ("ready", Cause("reprieved"), ""),
        ("stopped", None, "unloaded"),
        ("standby", None, "unloaded"),
        ("stopped", Cause("load_failed", detail="exited with code 1"), "failed"),
        ("stopped", Cause("died", detail="was killed by SIGKILL"), "failed"),
        ("stuck", Cause("evict_failed", detail="still runs"), "failed"),
        ("severed", Cause("shutdown"), "severed"),
    ],
)
def test_what_an_event_is_to_a_hook(kind, cause, what):
    assert occasion(event_as_json(Event(1.0, kind, "a", "a", cause=cause), 1001.0)) == what


def test_all_other_events_are_nothing_to_a_hook():
    others = set(KINDS) - {"ready", "stopped", "standby", "stuck", "severed"}
    assert {occasion({"kind": kind, "cause": {"kind": "overdue"}}) for kind in others} == {""}


def test_a_web_address_gets_a_post(receiver):
    assert perform(Hook(url=receiver.url), b'{"event":"loaded"}') == ""
    assert receiver.got.get(timeout=GUARD) == {"event": "loaded"}


def test_a_web_address_that_refuses_is_told_of(receiver):
    receiver.status = 500
    assert perform(Hook(url=receiver.url), b"{}") == "it answered 500"
    receiver.status = 302
    assert perform(Hook(url=receiver.url), b"{}") == "it answered 302"


def test_a_web_address_that_is_not_there_is_told_of(receiver):
    receiver.socket.close()
    assert "ConnectionError" in perform(Hook(url=receiver.url, timeout=1.0), b"{}")


def test_a_command_gets_it_on_its_standard_input(tmp_path):
    file = tmp_path / "it's here"
    assert perform(Hook(run=("sh", "-c", 'cat > "$0"', str(file))), b'{"event":"failed"}') == ""
    assert file.read_text() == '{"event":"failed"}'


def test_a_command_does_not_get_the_keys_of_clients(tmp_path, monkeypatch):
    file = tmp_path / "variables"
    monkeypatch.setenv("ANVIL_API_KEYS", "secret")
    monkeypatch.setenv("OTHER", "1")
    assert perform(Hook(run=("sh", "-c", 'env > "$0"', str(file))), b"{}") == ""
    names = {line.partition("=")[0] for line in file.read_text().splitlines()}
    assert "OTHER" in names
    assert "ANVIL_API_KEYS" not in names


def test_a_command_that_fails_is_told_of_in_its_words():
    assert (
        perform(Hook(run=("sh", "-c", "echo no bus >&2; exit 3")), b"{}") == "it exited with code 3: no bus"
    )
    assert perform(Hook(run=("/nowhere/to/be-found",)), b"{}").startswith("it cannot be run: No such file")


def test_a_command_that_reads_nothing_does_no_harm():
    assert perform(Hook(run=("true",)), b"x" * (1 << 20)) == ""


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    hook = Hook(run=("sh", "-c", 'sleep 1000 > "$0" & wait', str(fifo)), timeout=0.3)
    assert perform(hook, b"{}") == "it was killed after 0.3 s"
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody holds the other end any more
    os.close(reader)


def test_a_command_is_not_waited_for_because_of_what_has_left_its_session(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hook = Hook(run=("sh", "-c", 'setsid cat "$0" &', str(fifo)), timeout=0.3)
    outcomes: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: outcomes.put(perform(hook, b"{}")), daemon=True).start()
    try:
        assert outcomes.get(timeout=GUARD) == "it was killed after 0.3 s"
    finally:
        fifo.write_text("")  # which ends it


@pytest.fixture
def dripping():
    """The address of a server whose answers never end: each is a head that comes byte by byte."""
    ended = threading.Event()

    def drip(connection):
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not ended.wait(0.02):
                connection.sendall(b"x")

    def accept():
        while not ended.is_set():
            threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
        ended.set()


def test_hook_whose_answer_drips_is_bounded(dripping):
    said = []
    notifier = HookNotifier(Hook(on=("loaded",), url=dripping, timeout=0.2), said.append)
    loaded = event_as_json(Event(1.0, "ready", "a", "a", seconds=2.0), 1001.0)
    outcomes = queue.Queue()
    notify = lambda: outcomes.put(notifier.notify([loaded] * 5, 0))  # noqa: E731
    threading.Thread(target=notify, daemon=True).start()
    outcomes.get(timeout=GUARD)
    assert said == [f"hook {dripping} failed: it did not answer within 0.2 s"]
    posts = [each for each in threading.enumerate() if each.name == f"post-{dripping}"]
    assert len(posts) == 1


def test_a_hook_is_told_only_what_it_is_for_and_fails_once_in_words(receiver):
    said: list[str] = []
    notifier = HookNotifier(Hook(on=("loaded",), url=receiver.url), said.append)
    loaded = event_as_json(Event(1.0, "ready", "a", "a", seconds=2.0), 1001.0)
    notifier.notify(
        [loaded, event_as_json(Event(2.0, "stuck", "a", "a", cause=Cause("evict_failed")), 1002.0)], 0
    )
    got = receiver.got.get(timeout=GUARD)
    assert (got["event"], got["model"], got["at"], got["text"]) == (
        "loaded",
        "a",
        1001.0,
        "ready after 2.0 s",
    )
    assert receiver.got.empty()
    receiver.status = 500
    notifier.notify([loaded, loaded], 0)
    receiver.status = 204
    notifier.notify([loaded], 3)
    receiver.status = 500
    notifier.notify([loaded], 0)
    name = f"hook {receiver.url}"
    failed, slow = f"{name} failed: it answered 500", f"{name} is too slow: 3 events were not delivered"
    assert said == [failed, slow, failed]


def test_one_that_rests_more_deeply_is_not_unloaded_again(receiver):
    notifier = HookNotifier(Hook(url=receiver.url), pytest.fail)
    kinds = ("ready", "standby", "standby", "stopped", "ready", "stopped")
    notifier.notify([event_as_json(Event(1.0, kind, "a", "a"), 1.0) for kind in kinds], 0)
    got = [receiver.got.get(timeout=GUARD)["event"] for _ in range(4)]
    assert got == ["loaded", "unloaded", "loaded", "unloaded"]
    assert receiver.got.empty()


@pytest.mark.parametrize(
    ("value", "hooks"),
    [
        ([{"url": "http://x/y"}], (Hook(url="http://x/y"),)),
        ({"run": ["a", "b c"], "on": "failed, severed"}, (Hook(("failed", "severed"), ("a", "b c")),)),
        ([{"run": ["a"], "timeout": "1m"}], (Hook(run=("a",), timeout=60.0),)),
    ],
)
def test_hooks_are_read_as_people_write_them(value, hooks):
    assert HOOKS.read(value) == hooks


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("notify-send", "must be hooks such as"),
        ([{"on": ["failed"]}], "must be hooks such as"),
        ([{"run": ["a"], "url": "http://x"}], "must be hooks such as"),
        ([{"run": "a b"}], r"run: must be a list of words, \[program, argument, ...\], not 'a b'"),
        ([{"run": []}], "run: must be a list of words"),
        ([{"url": "ftp://x"}], "url: must begin with http:// or https://, not 'ftp://x'"),
        ([{"url": "http://x", "on": ["lodaed"]}], "unknown: lodaed; did you mean loaded?"),
        ([{"url": "http://x", "timout": 1}], "timout: unknown key; did you mean timeout?"),
        ([{"url": "http://x", "timeout": "soon"}], "must be seconds"),
        ([{"url": "http://x", "timeout": 0}], "must be more than 0, not 0"),
    ],
)
def test_a_hook_that_cannot_be_meant_is_refused(value, problem):
    with pytest.raises(ValueError, match=problem):
        HOOKS.read(value)


def test_a_feed_may_be_followed_for_a_hook(receiver):
    feed = Feed()
    notifier = HookNotifier(Hook(url=receiver.url), pytest.fail)
    worker = notifier.worker("hook", feed, wall=lambda moment: moment)
    worker.start()
    feed.tell(Event(1.0, "ready", "a", "a"))
    feed.tell(Event(2.0, "stopped", "a", "a"))
    feed.ring()
    assert [receiver.got.get(timeout=GUARD)["event"] for _ in range(2)] == ["loaded", "unloaded"]
    feed.close()
    worker.close()
    assert worker.join(GUARD)


def test_a_hook_hears_of_what_happens_while_the_program_ends(receiver):
    feed = Feed()
    notifier = HookNotifier(Hook(url=receiver.url), pytest.fail)
    notifier.worker("hook", feed, wall=lambda moment: moment).start()
    feed.close()
    feed.tell(Event(1.0, "severed", "a", "a", cause=Cause("shutdown")))
    notifier.close(GUARD)
    assert receiver.got.get_nowait()["event"] == "severed"


def test_a_command_that_hangs_ends_with_the_program(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hook = Hook(run=("sh", "-c", 'sleep 1000 > "$0" & wait', str(fifo)), timeout=1000.0)
    feed, said = Feed(), []
    notifier = HookNotifier(hook, said.append)
    worker = notifier.worker("hook", feed, wall=lambda moment: moment)
    worker.start()
    feed.tell(Event(1.0, "ready", "a", "a"))
    feed.tell(Event(2.0, "stopped", "a", "a"))
    feed.ring()
    with fifo.open("rb") as reader:  # once the command runs
        feed.close()
        notifier.close(0.0)
        assert reader.read() == b"", "all of it is killed, and no other command is started"
    assert worker.join(GUARD)
