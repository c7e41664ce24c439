"""An event log gives back what was written, and each file can be read without those before it."""

import errno
import gzip
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu, Wake
from anvil_mux.config.service import Service
from anvil_mux.lab.checker import check
from anvil_mux.lab.recording import workload_of
from anvil_mux.lab.simulate import simulate
from anvil_mux.lab.workload import Workload
from anvil_mux.scheduler.events import KINDS, Cause, Event
from anvil_mux.telemetry import eventlog
from anvil_mux.telemetry.eventlog import (
    BadLog,
    EventLog,
    Rotation,
    Situation,
    config_of,
    header,
    read,
)
from tests.cli.demo import PROJECT, compose, stream
from tests.cli.demo import run as run_serve
from tests.lab.test_simulate import LAYOUTS, world
from tests.running import serving
from tests.seeds import seeds

AB = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))), policy="eager")


@contextmanager
def appending(file: Path, config: Config = AB, began: float = 1000.0) -> Iterator[EventLog]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    log = EventLog(descriptor, header(config, began))
    try:
        yield log
    finally:
        log.close()
        os.close(descriptor)


def written(file: Path, events: list[Event], config: Config = AB, began: float = 1000.0) -> Path:
    with appending(file, config, began) as log:
        for event in events:
            log.append(event)
    return file


def simulated(workload: Workload, config: Config) -> list[Event]:
    follow = workload.follow and workload.follow()
    engines = workload.engines(config)
    return simulate(config, workload.requests, engines, resident=workload.resident, follow=follow)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


# Writing and reading


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_is_what_was_written(file, layout):
    config, trace, engines = world(layout, "debounce", 3)
    events = simulate(config, trace, engines)
    [run] = read(written(file, events, config))
    assert run.events == events
    assert config_of(run.header) == config
    assert run.header["began"] == 1000.0


def test_every_field_of_an_event_survives(file):
    odd = [
        Event(
            0.1 + 0.2,
            "deferred",
            'org/"b"\n',
            "",
            7,
            2,
            inf,
            Cause("policy_text", detail="it's not \u2713 yet"),
        ),
        Event(
            1e6 + 1e-6,
            "draining",
            "a",
            "a",
            0,
            2,
            30.0,
            Cause("slice_over", residents=("a", "c"), waiting=1),
            "b",
        ),
        Event(1e7, "severed", "a", "a", 1, 1, 1e-9, Cause("shutdown")),
        Event(1e7, "stopped", "a", "a", cause=Cause("died_early", seconds=0.1 + 0.2, detail="\ud83d")),
        Event(1e7, "queued", "a", "", 3, 1, bound=0.1 + 0.2),
        Event(1e7, "queued", "b", "", 4, 1, bound=0.0),
    ]
    assert read(written(file, odd))[0].events == odd
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_line_holds_only_what_is_not_empty(file):
    written(file, [Event(0.0, "queued", "a", ticket=1, size=1), Event(1.5, "deferred", "a", seconds=inf)])
    assert file.read_text().splitlines()[1:] == [
        '{"at":0.0,"kind":"queued","model":"a","ticket":1,"size":1}',
        '{"at":1.5,"kind":"deferred","model":"a","seconds":null}',
    ]


def test_the_header_tells_what_is_on_other_hosts():
    there = Backend("m.h.0", "m", ("0",), host="h", most=1)
    wakes = {"h": Wake(run=("plug", "s3cret"), timeout=30.0)}
    told = Config((there,), gpus=(Gpu("0", 24, host="h"),), memory_of_hosts={"h": 9}, wakes=wakes)
    read_back = eventlog.config_of(json.loads(json.dumps(eventlog.header(told, 0.0))))
    assert (read_back.backends, read_back.gpus) == (told.backends, told.gpus)
    assert read_back.memory_of("h") == 9
    assert read_back.wakes == {"h": Wake(timeout=30.0)}


def test_the_header_tells_everything_that_events_depend_on_and_no_secret():
    secret = Service(environment=(("HF_TOKEN", "s3cret"),), command=("serve", "s3cret"))
    backends = (
        Backend("a", "m", ("0", "1"), vram=7, pin=True, evict_to=("sleep", "stop"), service=secret),
        Backend("b", "m", ("0",), aliases=("mm",)),
    )
    told = Config(
        backends,
        gpus=(Gpu("0", vram=24, reserve=1),),
        project="p",
        policy="debounce",
        policy_settings={"quiet": 2.0},
        drain_timeout=1.0,
        queue_timeout=2.0,
        max_wait=3.0,
        max_queue=4,
    )
    text = json.dumps(header(told, 5.0))
    assert "s3cret" not in text
    without = tuple(replace(backend, service=Service()) for backend in backends)
    assert config_of(json.loads(text)) == replace(told, backends=without)


def test_a_compressed_log_that_is_damaged_is_an_error_and_no_crash(tmp_path):
    packed = tmp_path / "events.jsonl.gz"
    whole = gzip.compress(b'{"anvil_mux": "1"}\n' * 100)
    packed.write_bytes(whole[:10] + b"\xff" + whole[11:])  # no such block type
    with pytest.raises(BadLog, match=r"events\.jsonl\.gz"):
        read(packed)


def test_each_start_of_the_program_is_a_run(file):
    written(file, [Event(1.0, "queued", "a", ticket=1)], began=10.0)
    written(file, [Event(0.5, "queued", "b", ticket=1)], began=500.0)
    first, second = read(file)
    assert (first.header["began"], [event.model for event in first.events]) == (10.0, ["a"])
    assert (second.header["began"], [event.model for event in second.events]) == (500.0, ["b"])


def test_a_compressed_log_is_read_as_well(file, tmp_path):
    written(file, [Event(1.0, "queued", "a", ticket=1)])
    packed = tmp_path / "events.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert read(packed) == read(file)


def test_nothing_is_lost_between_many_threads(file):
    with appending(file) as log:

        def append(thread: int) -> None:
            for ticket in range(1000):
                log.append(Event(1.0, "queued", f"m{thread}", ticket=ticket))

        threads = [threading.Thread(target=append, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = read(file)[0].events
    for n in range(4):
        assert [event.ticket for event in events if event.model == f"m{n}"] == list(range(1000))


# What is broken


def test_half_a_line_at_the_end_is_passed_over_with_a_warning(file):
    written(file, [Event(1.0, "queued", "a", ticket=1), Event(2.0, "gone", "a", ticket=1)])
    os.truncate(file, file.stat().st_size - 9)
    warnings: list[str] = []
    [run] = read(file, warnings.append)
    assert [event.kind for event in run.events] == ["queued"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{file}:3: ")


def test_a_program_that_was_killed_spoils_only_its_own_last_line(file):
    written(file, [Event(1.0, "queued", "a", ticket=1), Event(2.0, "gone", "a", ticket=1)])
    os.truncate(file, file.stat().st_size - 9)
    written(file, [Event(0.5, "queued", "b", ticket=1)])
    warnings: list[str] = []
    first, second = read(file, warnings.append)
    assert [event.kind for event in first.events] == ["queued"]
    assert [event.model for event in second.events] == ["b"]
    assert len(warnings) == 1
    assert "killed" in warnings[0]


HEAD = json.dumps(header(AB, 0.0))
FINE = '{"at":1,"kind":"queued","model":"a"}'


@pytest.mark.parametrize(
    ("lines", "where", "why"),
    [
        ([FINE], 1, "snapshot"),
        ([HEAD, '{"at":1,"ki', FINE], 2, "no line of an event log"),
        ([HEAD, "17", FINE], 2, "no line of an event log"),
        ([HEAD, '{"at":1,"kind":"flown","model":"a"}'], 2, "unknown kind of event 'flown'"),
        ([HEAD, FINE, '{"at":1,"kind":"queued"}'], 3, "model"),
        ([HEAD, '{"at":"1","kind":"queued","model":"a"}'], 2, "no event"),
        ([HEAD, '{"at":1,"kind":"queued","model":"a","colour":1}'], 2, "colour"),
        ([HEAD, '{"at":1,"kind":"queued","model":["a"]}'], 2, "model: this is no str: ['a']"),
        ([HEAD, '{"at":1,"kind":"queued","model":"a","ticket":{}}'], 2, "ticket: this is no int"),
        ([HEAD, '{"at":1,"kind":"queued","model":"a","size":true}'], 2, "size: this is no int: True"),
        ([HEAD, '{"at":NaN,"kind":"queued","model":"a"}'], 2, "at: this is no moment: nan"),
        ([HEAD, f'{{"at":1,"kind":"queued","model":"a","size":1{"0" * 400}}}'], 2, "too great a number"),
        ([HEAD, '{"at":1,"kind":"stopped","model":"a","cause":"died"}'], 2, "no event"),
        (
            [HEAD, '{"at":1,"kind":"stopped","model":"a","cause":{"kind":["died"]}}'],
            2,
            "kind: this is no str",
        ),
        (
            [HEAD, '{"at":1,"kind":"stopped","model":"a","cause":{"kind":"slice","residents":1}}'],
            2,
            "no event",
        ),
        (['{"kind":"snapshot"}'], 1, "began"),
        (['{"kind":"snapshot","began":1,"backends":["a"]}'], 1, "says no configuration: "),
        (['{"kind":"snapshot","began":1,"backends":[{"name":"a"}]}'], 1, "says no configuration: "),
        (
            ['{"kind":"snapshot","began":1,"backends":[{"name":"a","model":1}]}'],
            1,
            "model: this is no str: 1",
        ),
        ([HEAD[:-1] + ',"queue_timeout":"long"}'], 1, "queue_timeout: this is no float: 'long'"),
        ([HEAD[:-1] + ',"wakes":["h"]}'], 1, "says no configuration: "),
        (
            [HEAD[:-1] + ',"state":{"at":1,"backends":{"a":{"model":"a","leases":[1]}},"queues":{}}}'],
            1,
            "leases: ",
        ),
        ([HEAD[:-1] + ',"state":{"at":1}}'], 1, "backends"),
        ([HEAD[:-1] + ',"state":[1]}'], 1, "state"),
        ([HEAD[:-1] + ',"state":{"at":1,"backends":{"a":{"colour":1}},"queues":{}}}'], 1, "colour"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(file, lines, where, why):
    file.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(BadLog) as caught:
        read(file)
    assert caught.value.message.startswith(f"{file}:{where}: ")
    assert why in caught.value.message


def test_a_file_that_is_not_there_or_no_archive_is_an_error_with_its_name(file):
    with pytest.raises(BadLog, match=r"events\.jsonl: No such file"):
        read(file)
    file.write_bytes(gzip.compress(HEAD.encode())[:-12])
    with pytest.raises(BadLog, match=r"events\.jsonl: "):
        read(file)


class Disk:
    """Stands in for ``os.write``: has room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""
        self.refused = threading.Event()

    def write(self, descriptor: int, data: bytearray, patience: float) -> int:
        if not self.room:
            self.refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.content += taken
        return len(taken)


def disk_log(disk: Disk, monkeypatch: pytest.MonkeyPatch, complain: list[str]) -> EventLog:
    monkeypatch.setattr(eventlog, "write_some", disk.write)
    return EventLog(-1, header(AB, 0.0), complain.append)


def test_a_disk_that_was_full_for_a_while_costs_nothing(file, monkeypatch):
    events = [Event(float(n), "queued", "a", ticket=n) for n in range(100)]
    complaints: list[str] = []
    disk = Disk(room=len(HEAD) + 20)  # full in the middle of a line
    log = disk_log(disk, monkeypatch, complaints)
    for event in events[:50]:
        log.append(event)
    assert disk.refused.wait(60)
    disk.room = 1 << 20
    for event in events[50:]:
        log.append(event)
    log.close()
    file.write_bytes(disk.content)
    assert read(file)[0].events == events
    assert complaints == ["the event log cannot be written (No space left on device); serving goes on"]


def test_a_pipe_that_nobody_reads_is_complained_of_and_holds_up_no_end(monkeypatch):
    monkeypatch.setattr(eventlog, "PATIENCE_SECONDS", 0.01)
    reader, writer = os.pipe()
    complaints: list[str] = []
    log = EventLog(writer, header(AB, 0.0), complaints.append)
    for ticket in range(10_000):
        log.append(Event(1.0, "queued", "a", ticket=ticket))
    log.close()
    assert complaints == ["the event log cannot be written (nobody reads it); serving goes on"]
    os.close(reader)
    os.close(writer)


def test_the_end_is_written_too_if_the_disk_has_room_again(file, monkeypatch):
    disk = Disk(room=0)
    log = disk_log(disk, monkeypatch, [])
    for ticket in (1, 2):
        assert disk.refused.wait(60)
        disk.refused.clear()
        log.append(Event(1.0, "queued", "a", ticket=ticket))
    assert disk.refused.wait(60)
    disk.room = 1 << 20
    log.close()
    file.write_bytes(disk.content)
    assert [event.ticket for event in read(file)[0].events] == [1, 2]


def test_what_a_full_disk_has_cost_is_told_where_it_is_missing(file, monkeypatch):
    monkeypatch.setattr(eventlog, "KEEP_BYTES", 0)
    complaints: list[str] = []
    disk = Disk(room=10)
    log = disk_log(disk, monkeypatch, complaints)
    for ticket in (1, 2, 3):
        assert disk.refused.wait(60)
        disk.refused.clear()
        log.append(Event(1.0, "queued", "a", ticket=ticket))
    assert disk.refused.wait(60)
    disk.room = 1 << 20
    log.append(Event(2.0, "gone", "a", ticket=1))
    log.close()
    file.write_bytes(disk.content)
    warnings: list[str] = []
    [run] = read(file, warnings.append)
    assert [event.kind for event in run.events] == ["gone"]
    assert warnings == [f"{file}:2: 3 events are missing here, because the disk was full"]
    assert len(complaints) == 1


def test_a_run_that_is_to_begin_while_the_disk_is_full_begins_later(file, monkeypatch):
    disk = Disk(room=len(HEAD) + 20)
    log = disk_log(disk, monkeypatch, [])
    log.head(header(AB, 0.0))
    for at, kind in ((1.0, "deferred"), (2.0, "reloaded"), (3.0, "deferred"), (4.0, "deferred")):
        log.append(Event(at, kind, "a"))
    assert disk.refused.wait(60)
    disk.room = 1 << 20
    log.append(Event(5.0, "deferred", "a"))
    log.close()
    file.write_bytes(disk.content)
    first, second = read(file)
    assert [event.at for event in (*first.events, *second.events)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert second.begins["at"] >= 4.0


# Files that are set aside


@pytest.mark.seeds
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", seeds(2, of=4))
def test_a_new_file_can_be_read_without_the_old_wherever_it_begins(layout, seed):
    config, requests, engines = world(layout, "adaptive", seed)
    log = simulate(config, requests, engines)
    situation = Situation()
    for number, event in enumerate(log):
        situation.read(event)
        begins = json.loads(json.dumps(situation.to_json()))
        rest = log[number + 1 :]
        assert check(rest, config, begins=begins) == [], f"begun after event {number}: {event}"
        assert Situation.parse(begins).to_json() == situation.to_json()


def test_a_new_file_knows_what_the_old_ones_tell_of_loads_that_failed():
    """Else a load before the end of the cool-down would be no flaw in it."""
    before = [Event(0.0, "queued", "a", ticket=1, size=1), Event(0.0, "loading", "a", "a")]
    before += [
        Event(1.0, "stopped", "a", "a", cause=Cause("load_failed")),
        Event(1.0, "failed", "a", ticket=1, seconds=1.0),
    ]
    after = [Event(2.0, "queued", "a", ticket=2, size=1), Event(2.0, "loading", "a", "a")]
    wrong = ["2.000000 loading a: before its cool-down ended"]
    assert check([*before, *after], AB) == wrong
    assert check(after, AB, begins=led_to(before)) == wrong
    assert check(after, AB) == []


def led_to(events: Sequence[Event]) -> Mapping[str, Any]:
    situation = Situation()
    for event in events:
        situation.read(event)
    told: Mapping[str, Any] = json.loads(json.dumps(situation.to_json()))
    return told


BUSY = [
    Event(0.0, "queued", "a", ticket=1, size=1),
    Event(0.0, "loading", "a", "a", cause=Cause("overdue")),
    Event(4.0, "ready", "a", "a", seconds=4.0),
    Event(4.0, "leased", "a", "a", 1, 1, 4.0),
    Event(5.0, "leased", "a", "a", 2, 2),
    Event(5.0, "queued", "b", ticket=3, size=1, bound=20.0),
    Event(6.0, "queued", "b", "b", ticket=4, size=2),
    Event(7.0, "released", "a", "a", 1, 1),
    Event(7.0, "standby", "c", "c", way="sleep"),
    Event(7.0, "unpinned", "a"),
    Event(7.0, "pinned", "c"),
    Event(8.0, "draining", "a", "a", seconds=30.0, target="b"),
]


def test_the_situation_is_told_as_data():
    assert led_to(BUSY) == {
        "at": 8.0,
        "backends": {
            "a": {
                "model": "a",
                "state": "draining",
                "since": 8.0,
                "target": "b",
                "limit": 30.0,
                "leases": {"2": 5.0},
                "loaded": 4.0,
                "answered": 7.0,
            },
            "c": {"model": "c", "state": "standby", "since": 7.0, "level": "sleep"},
        },
        "queues": {
            "a": {"unready": 8.0},
            "b": {"bound": 20.0, "tickets": {"3": 5.0, "4": 6.0}, "only": {"4": "b"}},
        },
        "begun": [],
        "pins": {"a": False, "c": True},
        "paused": False,
    }
    assert led_to([*BUSY, Event(9.0, "evicting", "a", "a")])["begun"] == ["b"]


def test_a_run_begins_after_a_reload_as_soon_as_those_that_leave_have_left(file, monkeypatch):
    monkeypatch.setattr(eventlog, "GATHER_SECONDS", 0.0)
    with appending(file) as log:
        log.append(Event(1.0, "ready", "a", "a", seconds=1.0))
        log.append(Event(1.0, "ready", "b", "b", seconds=1.0))
        log.head(header(replace(AB, backends=AB.backends[1:]), 77.0))
        steps = [
            Event(2.0, "reloaded", ""),
            Event(2.0, "draining", "a", "a"),
            Event(2.0, "evicting", "a", "a"),
            Event(3.0, "stopped", "a", "a"),
            Event(4.0, "leased", "b", "b", 1, 1),
        ]
        for event in steps:
            log.append(event)
            while f'"at":{event.at},"kind":"{event.kind}"' not in file.read_text():
                os.sched_yield()
    first, second = read(file)
    assert first.events[2:] == steps[:-1]
    assert [backend["name"] for backend in second.header["backends"]] == ["b"]
    assert (second.header["began"], second.begins["at"]) == (1000.0, 3.0)
    assert second.begins["backends"].keys() == {"b"}
    assert second.events == steps[-1:]


def test_a_run_begins_once_what_a_reload_has_changed_has_stopped_and_not_between_its_load_and_its_drain(
    file, monkeypatch
):
    monkeypatch.setattr(eventlog, "GATHER_SECONDS", 0.0)
    renamed = replace(AB, backends=(replace(AB.backends[0], model="c"), *AB.backends[1:]))
    with appending(file) as log:
        log.append(Event(1.0, "loading", "a", "a"))
        log.head(header(renamed, 77.0), ["a", "b"])
        steps = [
            Event(2.0, "reloaded", ""),
            Event(3.0, "ready", "a", "a", seconds=2.0),
            Event(3.0, "draining", "a", "a", cause=Cause("changed")),
            Event(3.0, "evicting", "a", "a"),
            Event(4.0, "stopped", "a", "a"),
            Event(5.0, "loading", "c", "a"),
            Event(6.0, "ready", "c", "a", seconds=1.0),
        ]
        for event in steps:
            log.append(event)
            while f'"at":{event.at},"kind":"{event.kind}"' not in file.read_text():
                os.sched_yield()
    first, second = read(file)
    assert first.events[1:] == steps[:5]
    assert second.begins["at"] == 4.0
    assert led_to([*first.events, *second.events])["backends"]["a"]["model"] == "c"


@pytest.mark.parametrize("runs", [False, True])
def test_cool_down_of_what_a_reload_has_changed_is_not_that_of_the_next_run(file, monkeypatch, runs):
    monkeypatch.setattr(eventlog, "GATHER_SECONDS", 0.0)
    failed = Event(1.0, "stopped", "a", "a", cause=Cause("load_failed", detail="no"))
    begins = [Event(0.0, "loading", "a", "a"), failed, Event(1.5, "queued", "a", "", 1, 1)]
    ends = [Event(2.0, "reloaded", ""), Event(3.0, "queued", "b", "", 2, 1)]
    if runs:
        begins = [Event(0.0, "loading", "a", "a")]
        ends[1:1] = [failed._replace(at=2.5)]
    with appending(file) as log:
        log.head(header(AB, 77.0), ["a"])
        for event in (*begins, *ends, Event(4.0, "loading", "a", "a")):
            log.append(event)
            while f'"at":{event.at},"kind":"{event.kind}"' not in file.read_text():
                os.sched_yield()
    _, second = read(file)
    assert "a" not in second.begins["backends"]


def test_a_file_that_is_large_enough_is_set_aside(file):
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    log = EventLog(descriptor, header(AB, 1000.0), pytest.fail, Rotation(str(file), 3000, kept=2))
    for number in range(4 * eventlog.GROUP):
        log.append(Event(float(number), "ready", "a", "a", seconds=1.0))
    log.close()
    os.close(descriptor)
    files = [file, Path(f"{file}.1"), Path(f"{file}.2")]
    assert sorted(file.parent.iterdir()) == files
    found = [read(each)[0] for each in reversed(files)]
    assert {run.header["began"] for run in found} == {1000.0}
    assert all(run.begins["backends"]["a"]["state"] == "ready" for run in found)
    moments = [event.at for run in found for event in run.events]
    assert all(run.events[0].at == run.begins["at"] + 1 for run in found if run.events)
    assert moments == [float(n) for n in range(4 * eventlog.GROUP - len(moments), 4 * eventlog.GROUP)]
    assert len(moments) > eventlog.GROUP


def test_a_file_that_cannot_be_set_aside_grows_on(file):
    said: list[str] = []
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    log = EventLog(descriptor, header(AB, 1000.0), said.append, Rotation(str(file.parent / "gone"), 100))
    for number in range(2 * eventlog.GROUP):
        log.append(Event(float(number), "ready", "a", "a"))
    log.close()
    os.close(descriptor)
    assert len(read(file)[0].events) == 2 * eventlog.GROUP
    assert said == ["the event log cannot be set aside (No such file or directory), so it keeps growing"]


# A running program


def test_a_running_program_writes_all_that_happens(tmp_path):
    file, log = compose(tmp_path), tmp_path / "events.jsonl"
    flags = ("--event-log", str(log), "--policy", "eager")
    with serving(file, *flags, state=tmp_path, on_exit="keep") as running:
        for model in ("a", "b", "b"):
            assert running.chat(model)[0] == 200
        for what in ("pin", "unpin"):
            assert running.request("POST", f"/models/{what}", {"model": "b"})[0] == 200
        for what in ("pause", "resume"):
            assert running.request("POST", f"/{what}", {})[0] == 200
    with serving(file, *flags, "--drain-timeout", "0", state=tmp_path) as running:
        assert running.chat("b")[0] == 200
        with stream(running, "b", 100_000):
            running.stop()
    runs = read(log)
    assert runs[1].events[-1].kind == "severed"
    assert [run.header["project"] for run in runs] == [PROJECT] * 2
    for run in runs:
        assert check(run.events, config_of(run.header), 5.0, run.begins) == []
    kinds = [event.kind for event in runs[0].events]
    unseen = {"gone", "failed", "severed", "standby", "demoting", "stuck", "deferred", "cancelling"}
    of_hosts = {kind for kind in KINDS if kind.startswith("host_")}
    assert {*kinds} == KINDS.keys() - unseen - of_hosts - {"reloaded", "reload_failed", "plugin_failed"}
    assert [kinds.count(kind) for kind in ("leased", "released", "loading")] == [3, 3, 2]
    learned = workload_of(runs)
    assert [request.model for request in learned.requests] == ["a", "b", "b", "b", "b"]
    assert learned.requests[-1].seconds > 0
    assert set(learned.load_seconds) == {"a", "b"}
    assert check(simulated(learned, learned.config()), learned.config()) == []


def test_a_running_program_sets_its_log_aside(tmp_path):
    file, log = compose(tmp_path), tmp_path / "events.jsonl"
    with serving(file, "--event-log", str(log), "--event-log-size", "3KiB", state=tmp_path) as running:
        for _ in range(20):
            assert running.chat("a")[0] == 200
    for each in (log, Path(f"{log}.1")):
        [run] = read(each)
        assert each != log or run.begins["backends"]["a"]["state"] == "ready"
        assert check(run.events, config_of(run.header), 5.0, run.begins) == []


def test_an_event_log_that_cannot_be_opened_prevents_serving(tmp_path):
    done = run_serve(compose(tmp_path), "--event-log", str(tmp_path / "no" / "log"), state=tmp_path)
    assert done.returncode == 1
    assert "cannot write the event log" in done.stderr
    assert "No such file" in done.stderr
