"""What goes in at one end of the journal is counted and written at the other."""

import json
import math
import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.events import KINDS, Cause, Event
from anvil_mux.telemetry import accesslog
from anvil_mux.telemetry import journal as journal_room
from anvil_mux.telemetry.accesslog import human_line, json_line
from anvil_mux.telemetry.journal import (
    _OF_REQUESTS,
    NORMAL,
    QUIET,
    VERBOSE,
    FeedPosition,
    Journal,
    _level,
    story,
)
from anvil_mux.telemetry.metrics import Metrics
from tests.telemetry.test_metrics import nothing, record, value

CONFIG = Config((Backend("a", "a"),))


class Desk:
    """A journal whose access log is a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "access.log"
        self.metrics = Metrics(CONFIG, nothing)
        self.descriptor = os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.journals: list[Journal] = []

    def open(self, **settings: object) -> Journal:
        settings = {"access": self.descriptor, "wall": float, **settings}
        journal = Journal(self.metrics, **settings)
        self.journals.append(journal)
        return journal

    def lines(self) -> list[str]:
        return self.file.read_text().splitlines()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(journal_room, "FLUSH_SECONDS", 60.0)
    made = Desk(tmp_path)
    yield made
    for journal in made.journals:
        journal.close()
    os.close(made.descriptor)


def test_a_flush_returns_when_everything_before_it_is_counted_and_written(desk):
    journal = desk.open()
    for number in range(100):
        journal.add(record(request_id=f"r{number}"))
    journal.flush()
    assert [line.split()[-1] for line in desk.lines()] == [f"r{number}" for number in range(100)]
    assert value(desk.metrics, "anvil_queue_wait_seconds_count", model="a") == 100


def test_closing_writes_what_is_left(desk):
    journal = desk.open()
    journal.add(record())
    journal.close()
    assert len(desk.lines()) == 1


def test_nothing_is_lost_between_many_threads(desk):
    journal = desk.open()

    def add() -> None:
        for number in range(250):
            journal.add(record(request_id=f"{threading.get_ident()}-{number}"))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert len(desk.lines()) == 1000


def test_lines_in_json_are_json_whatever_a_client_sent(desk):
    journal = desk.open(form="json")
    journal.add(record(path='/x"\n{', model="\x1b[31m", status=404, code="not_found", backend=""))
    journal.flush()
    (line,) = map(json.loads, desk.lines())
    assert (line["path"], line["status"], line["code"]) == ('/x"\n{', 404, "not_found")


def test_a_client_cannot_forge_a_line_of_the_access_log(desk):
    journal = desk.open()
    journal.add(record(path="/x\n2026 200 GET /admin"))
    journal.flush()
    assert len(desk.lines()) == 1


def test_a_probe_is_no_news_while_all_is_well(desk):
    journal = desk.open()
    journal.add(record(path="/healthz", model="", backend="", route="/healthz", is_quiet=True))
    journal.add(record(path="/healthz", model="", backend="", is_quiet=True, status=503))
    journal.flush()
    (line,) = desk.lines()
    assert " 503 POST /healthz " in line
    assert value(desk.metrics, "anvil_requests_total", model="unknown", route="/healthz", code="200") == 1


def test_phases_are_counted_and_not_told(desk, capfd):
    journal = desk.open(verbosity=VERBOSE)
    journal.note_phase(CONFIG.backends[0], "verify", 1.5)
    journal.flush()
    counted = value(desk.metrics, "anvil_swap_phase_seconds_sum", model="a", phase="verify")
    assert (counted, capfd.readouterr().err) == (1.5, "")


def test_events_are_told_in_the_order_in_which_they_came(desk, capfd):
    journal = desk.open(access=2)
    journal.add(Event(1.0, "draining", "a", "a", 0, 2, 30.0, Cause("oldest_first", waiting=1), "b"))
    journal.add(record(request_id="between"))
    journal.add(Event(31.0, "evicting", "a", "a", 0, 1, 30.0, Cause("oldest_first", waiting=1)))
    journal.add(Event(32.0, "stopped", "a", "a"))
    journal.add(Event(33.0, "ready", "a", "a", seconds=12.34))
    journal.flush()
    told = [line.partition(" ")[2] for line in capfd.readouterr().err.splitlines()]
    assert told[0] == "a: draining for b (1 waiting, oldest first); waits up to 30 s for 2 requests"
    endless = Event(1.0, "draining", "a", "a", 0, 2, math.inf, Cause("overdue"), "b")
    assert story(endless) == "draining for b (overdue); waits as long as it takes for 2 requests"
    assert told[1].endswith("between")
    assert told[2:] == ["a: evicting, 1 request severed after 30.0 s", "a: stopped", "a: ready after 12.3 s"]


def test_an_event_names_the_service_where_that_is_not_the_model(desk, capfd):
    journal = desk.open()
    journal.add(Event(1.0, "stopped", "coder", "coder-2", cause=Cause("died", detail="killed")))
    journal.flush()
    assert capfd.readouterr().err.endswith(" coder (coder-2): died: killed\n")


def test_a_failed_load_is_told_with_the_last_lines_of_its_engine(desk, capfd):
    tails = {"a": ["CUDA out of memory", "bye"]}
    journal = desk.open(tail=tails.__getitem__)
    journal.add(Event(1.0, "stopped", "a", "a", cause=Cause("load_failed", detail="exited with code 1")))
    journal.flush()
    told = capfd.readouterr().err
    assert "a: load failed: exited with code 1\n" in told
    assert "  | CUDA out of memory\n  | bye\n" in told


def test_an_event_in_json_names_its_kind_and_leaves_out_what_is_empty(desk, capfd):
    journal = desk.open(form="json", tail=lambda _: ["bye"])
    journal.add(Event(0.0, "stuck", "a", "a", cause=Cause("evict_failed", detail="still runs")))
    journal.flush()
    assert json.loads(capfd.readouterr().err) == {
        "ts": "1970-01-01T00:00:00.000Z",
        "level": "error",
        "event": "stuck",
        "model": "a",
        "service": "a",
        "cause": {"kind": "evict_failed", "detail": "still runs"},
        "reason": "still runs",
        "engine_log": ["bye"],
    }


def test_quiet_tells_only_what_is_wrong(desk, capfd):
    journal = desk.open(verbosity=QUIET)
    journal.add(Event(1.0, "ready", "a", "a", seconds=1.0))
    journal.add(Event(1.0, "stopped", "a", "a", cause=Cause("died", detail="exited with code 139")))
    journal.add(Event(1.0, "stuck", "a", "a", cause=Cause("evict_failed", detail="still runs")))
    journal.add(Event(1.0, "reloaded", "", cause=Cause("reconfigured", detail="added b")))
    journal.add(Event(1.0, "reload_failed", "", cause=Cause("bad_configuration", detail="no {such} key")))
    journal.flush()
    told = [line.partition(" ")[2] for line in capfd.readouterr().err.splitlines()]
    assert told[0] == "a: died: exited with code 139"
    assert len(told) == 3
    assert "still runs" in told[1]
    assert told[2] == "anvil-mux: configuration refused, nothing has changed: no {such} key"


def test_only_verbose_tells_what_single_requests_go_through(desk, capfd):
    for verbosity, told in ((NORMAL, False), (VERBOSE, True)):
        journal = desk.open(verbosity=verbosity)
        assert journal.tells_leases is told
        for kind in ("queued", "leased", "released"):
            journal.observe(Event(1.0, kind, "a", "a", 7))
        journal.observe(Event(2.0, "ready", "a", "a", seconds=1.0))
        journal.flush()
        said = capfd.readouterr().err
        assert ("leased #7" in said) is told
        assert "ready after" in said


def test_who_looks_on_is_not_told_of_every_request_even_if_the_log_is(desk):
    journal = desk.open(verbosity=VERBOSE)
    for kind in ("queued", "leased", "ready", "released", "severed"):
        journal.observe(Event(1.0, kind, "a", "a", 7))
    journal.flush()
    assert [event.kind for event in journal.feed.news(FeedPosition()).events] == ["ready", "severed"]


def test_no_event_is_dropped_that_is_counted_or_told_without_asking():
    needless = {
        kind for kind in KINDS if kind not in Metrics._FOLDS and _level(Event(0, kind, "a")) == VERBOSE
    }
    assert needless == _OF_REQUESTS


def test_a_full_disk_does_not_end_the_journal(desk):
    with open("/dev/full", "wb", buffering=0) as full:
        journal = desk.open(access=full.fileno())
        journal.add(record())
        journal.flush()
        journal.add(record())
        journal.flush()
    assert value(desk.metrics, "anvil_queue_wait_seconds_count", model="a") == 2


def test_the_last_words_of_an_engine_steer_no_terminal(desk, capfd):
    journal = desk.open(tail=lambda _: ["\x1b[2J\x1b]0;owned\x07out of memory\x07"])
    journal.observe(Event(1.0, "stopped", "a", "a", cause=Cause("load_failed", detail="why")))
    journal.flush()
    shown = capfd.readouterr().err
    assert "out of memory" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_a_pipe_that_nobody_reads_holds_nothing_up_and_lines_come_again_once_somebody_does(desk, monkeypatch):
    monkeypatch.setattr(accesslog, "PATIENCE_SECONDS", 0.01)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    journal = desk.open(access=writer)
    for _ in range(1000):
        journal.add(record())
    journal.flush()
    assert not journal._entries
    assert not journal._lines
    while len(os.read(reader, 4096)) == 4096 and select.select([reader], [], [], 0)[0]:
        pass
    journal.add(record(request_id="heard"))
    journal.flush()
    assert os.read(reader, 4096).endswith(b" heard\n")
    journal.close()
    os.close(reader)
    os.close(writer)


def test_an_entry_that_cannot_be_told_does_not_end_the_journal(desk, capfd):
    def broken(_: str) -> list[str]:
        raise OSError("no log")

    journal = desk.open(tail=broken)
    journal.add(Event(1.0, "stopped", "a", "a", cause=Cause("died", detail="x")))
    journal.add(record())
    journal.flush()
    assert len(desk.lines()) == 1
    assert "no log" in capfd.readouterr().err


SHORT = Cause("host_memory_short")


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("demoting", {"cause": SHORT, "way": "stop"}, "stopped from standby: host memory is short"),
        (
            "demoting",
            {"cause": SHORT, "way": "sleep:2"},
            "demoted to sleep:2: host memory is short",
        ),
        ("standby", {"way": "sleep"}, "standby (sleep)"),
        (
            "standby",
            {"way": "sleep", "cause": Cause("evict_failed", detail="still runs")},
            "standby (sleep), and could not be stopped: still runs",
        ),
        ("evicting", {"cause": Cause("oldest_first", waiting=1)}, "evicting"),
        (
            "evicting",
            {"cause": Cause("standby_full", way="sleep")},
            "evicting: no room for standby level sleep",
        ),
        (
            "severed",
            {"ticket": 7, "cause": Cause("evicted", "b"), "target": "b", "seconds": 5.0},
            "severed #7: a was evicted for b before this request ended, after a drain of 5.0 s",
        ),
        ("failed", {"cause": Cause("error", detail="load_failed")}, "failed #0 load_failed"),
        ("pinned", {}, "pinned: not evicted for other models once it is loaded"),
        ("unpinned", {}, "unpinned: may be evicted for other models again"),
        ("ready", {"cause": Cause("reprieved")}, "stays loaded: it no longer has to make room"),
    ],
)
def test_an_event_is_told_in_words(kind, more, said):
    assert story(Event(1.0, kind, "a", **more)) == said


@pytest.mark.parametrize(("backend", "shown"), [("a-1", " a@a-1 "), ("", " a ")])
def test_the_access_log_names_the_model_also_where_no_engine_answered(backend, shown):
    assert shown in human_line(record(model="a", backend=backend))


def test_the_access_log_names_the_preset():
    named = record(model="a", backend="a-1", preset='a-"fast"')
    assert ' a-"fast"@a-1 ' in human_line(named)
    said = json.loads(json_line(named))
    assert (said["model"], said["preset"]) == ("a", 'a-"fast"')
    assert "preset" not in json.loads(json_line(record(model="a")))


def test_weights_that_were_read_ahead_are_counted(desk):
    journal = desk.open()
    for size in (1000, 24):
        journal.note_read_ahead(CONFIG.backends[0], size, 0.5)
    journal.flush()
    assert value(desk.metrics, "anvil_read_ahead_bytes_total", model="a") == 1024
    assert value(desk.metrics, "anvil_read_ahead_seconds_total", model="a") == 1.0
