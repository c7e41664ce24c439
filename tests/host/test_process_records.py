"""What tells a later anvil-mux of the processes that an earlier one has started."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import BackendError, ConfigError
from anvil_mux.host import runs
from anvil_mux.host.runs import RunRecord
from anvil_mux.host.seam import HostConfig
from anvil_mux.host.starter import Child, StarterLost
from anvil_mux.state import state_folder
from tests.host.test_processes import (
    FOREVER,
    House,
    command,
    either_parent,
    gone,
    house,
    inhabitants,
    running,
    shell,
)
from tests.running import seen

__all__ = ["house"]


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, ""),
        ({"pin": True, "evict_to": ("freeze", "stop"), "ttl": 3.0}, ""),
        ({"gpus": ("1",)}, "its GPUs changed since it was started"),
        ({"port": 1}, "its port changed since it was started"),
        (
            {"service": {"environment": (("A", "2"), ("B", "1"))}},
            "its environment changed since it was started",
        ),
        ({"service": {"environment": (("B", "1"), ("A", "1"))}}, ""),
        ({"service": {"working_dir": "/"}}, "its environment and folder changed since it was started"),
    ],
)
def test_a_run_is_compared_with_the_description(house, changes, differs):
    described = {"service": {"environment": (("A", "1"), ("B", "1"))}}
    house.runtime(shell(FOREVER)).start(shell(FOREVER, **described))
    later = shell(FOREVER, **{**described, **changes})
    assert house.runtime(later).differs(later) == differs


def test_a_run_whose_description_was_not_written_down_differs(house):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    url = first.start(backend)
    first.close()
    record = json.loads(house.file("a.json").read_text())
    del record["described"]
    house.file("a.json").write_text(json.dumps({**record, "digest": "that of another release"}))
    second = house.runtime(backend)
    assert second.running() == {"a": url}
    assert second.differs(backend) == "its description was not written down when it was started"


def test_a_session_that_has_our_number_by_now_is_left_alone_though_its_leader_has_ended(house):
    backend = shell(FOREVER)
    runtime = house.started(backend)
    with subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!"], start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as leader:
        other = int(leader.stdout.readline())
    ours = house.pid()
    edit(house.file("a.json"), pid=leader.pid, started=1)
    try:
        assert runtime.owner(ours) == "a"
        assert runtime.owner(other) is None
        runtime.stop(backend)
        assert not running(ours)
        assert running(other)
    finally:
        os.kill(other, signal.SIGKILL)


@either_parent
def test_a_new_runtime_adopts_what_runs(house):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    url = first.start(backend)
    first.close()
    second = house.runtime(backend)
    assert second.running() == {"a": url}
    assert second.ended(backend) is None
    assert second.start(backend) == url
    pid = house.pid()
    second.stop(backend)
    assert not running(pid)


ORPHAN = """
import sys
sys.path.insert(0, {root!r})
import os, signal
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.host.processes import ProcessRuntime
backend = Backend(name="a", model="a", service=Service(command=("sh", "-c", {script!r})))
environ = {{**os.environ, "XDG_STATE_HOME": {state!r}}}
ProcessRuntime(Config(backends=(backend,), project="p"), environ=environ).start(backend)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_anvil_mux_loses_no_engine(house):
    root = str(Path(__file__).parent.parent.parent)
    state = str(house.folder / "state")
    program = ORPHAN.format(root=root, script=FOREVER, state=state)
    code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program])
    assert code == -signal.SIGKILL
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    assert list(runtime.running()) == ["a"]
    os.kill(house.pid(), signal.SIGKILL)
    assert house.died() == "a"
    assert runtime.ended(backend) == "ended"


def test_one_whose_start_was_not_told_any_more_is_ended_by_its_mark(house, monkeypatch):
    backend = command("sleep", "1000")
    runtime = house.runtime(backend)
    start = runtime._starter.start

    def lost(*args: Any, **words: Any) -> Child:
        start(*args, **words).leave()
        raise StarterLost("it has ended")

    monkeypatch.setattr(runtime._starter, "start", lost)
    with pytest.raises(BackendError, match="service a: it has ended"):
        runtime.start(backend)
    # A process has no environment for the moment in which it becomes its command.
    started = inhabitants(house.folder)
    assert seen(lambda: {runtime.owner(pid) for pid in started}, {"a"}.__eq__)
    runtime.stop(backend)
    assert inhabitants(house.folder) == []


class Killed(BaseException):
    """Stands for an end of the program that lets it do nothing more."""


@either_parent
def test_an_engine_is_known_even_if_anvil_mux_is_killed_while_it_starts_it(house, monkeypatch):
    backend = command("sleep", "1000")
    first = house.runtime(backend)
    write = first._records.write

    def killed_once_it_runs(name: str, record: RunRecord) -> None:
        if record.pid:
            raise Killed
        write(name, record)

    monkeypatch.setattr(first._records, "write", killed_once_it_runs)
    with pytest.raises(Killed):
        first.start(backend)
    started = set(inhabitants(house.folder))
    second = house.runtime(backend)
    # A process has no environment for the moment in which it becomes its command.
    assert seen(lambda: {second.owner(pid) for pid in started}, {"a"}.__eq__)
    assert second.start(backend) == second.running()["a"]
    assert set(inhabitants(house.folder)) == started
    second.stop(backend)
    assert inhabitants(house.folder) == []


def test_workers_that_outlived_their_engine_while_nobody_looked_are_there_to_be_stopped(house):
    gate = house.gate()
    backend = shell(f"sleep 1000 & echo $! > {gate}; wait")
    first = house.started(backend)
    worker = int(gate.read_text())
    first.close()
    os.kill(house.pid(), signal.SIGKILL)
    gone(house.pid())
    second = house.runtime(backend)
    assert second.running() == {"a": ""}
    second.stop(backend)
    assert not running(worker)
    assert second.running() == {}


def test_workers_end_with_their_engine_while_nobody_looked(house):
    gate, end = house.gate(), house.gate("end")
    backend = shell(f"sleep 1000 & echo $! > {gate}; read line < {end}; exit 1")
    first = house.started(backend)
    worker = int(gate.read_text())
    first.close()
    end.write_text("end\n")
    gone(house.pid())
    assert not running(worker)
    assert house.runtime(backend).running() == {}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes", [{"started": 1, "mark": "another", "state": "", "output": ""}, {"boot": "another"}]
)
def test_a_other_process_with_our_process_id_is_left_alone(house, changes):
    backend = shell(f"{FOREVER} >/dev/null")  # nobody else prints to our log
    first = house.started(backend)
    pid = house.pid()
    first.close()
    record = house.file("a.json").read_text()
    edit(house.file("a.json"), **changes)
    second = house.runtime(backend)
    assert second.running() == {}
    assert second.owner(pid) is None
    second.stop(backend)
    assert running(pid)
    house.file("a.json").write_text(record)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}'])
def test_a_broken_record_is_no_record(house, text):
    backend = shell(FOREVER)
    house.file("").mkdir(parents=True)
    house.file("a.json").write_text(text)
    runtime = house.runtime(backend)
    assert runtime.running() == {}
    assert runtime.start(backend).startswith("http://127.0.0.1:")


@either_parent
def test_a_record_that_cannot_be_written_leaves_nothing_running(house):
    backend = shell(FOREVER)
    house.file("a.spare").mkdir(parents=True)
    with pytest.raises(BackendError, match="service a: cannot write its record"):
        house.runtime(backend).start(backend)
    assert inhabitants(house.folder) == []


@pytest.fixture
def full_disk(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A disk on which files can be made and no room can be had, once it is full."""
    full, write = [False], os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if full[0] and offset + len(data) > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(runs.os, "pwrite", pwrite)
    yield full
    full[0] = False


def test_a_disk_that_is_full_since_it_serves_keeps_nobody_from_being_swapped(house, full_disk):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    runtime = house.runtime(first, second)
    assert seen(lambda: [house.file(f"{name}.spare").exists() for name in "ab"], all) == [True, True]
    full_disk[0] = True
    for backend in (first, second, first, second):
        assert runtime.start(backend)
        assert runtime.running().keys() == {backend.name}
        runtime.stop(backend)
    assert runtime.problem() == ""


def test_a_service_that_is_new_on_a_full_disk_has_the_room_of_the_one_that_is_stopped_for_it(
    house, full_disk
):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    before = house.started(first)
    before.close()
    full_disk[0] = True
    runtime = house.runtime(first, second)
    assert runtime.running().keys() == {"a"}
    for old, new in ((first, second), (second, first), (first, second)):
        runtime.stop(old)
        assert runtime.start(new)
        assert runtime.running().keys() == {new.name}
    assert runtime.problem() == ""


def test_a_service_that_is_new_on_a_full_disk_takes_no_room_from_one_that_runs(house, full_disk):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    runtime = house.started(first)
    runtime.pause(first)
    full_disk[0] = True
    with pytest.raises(BackendError, match="cannot write its record"):
        runtime.start(second)
    runtime.resume(first)
    assert runtime.running().keys() == {"a"}


def test_where_no_record_can_be_written_that_is_a_problem_and_a_reload_is_refused(house, full_disk):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    full_disk[0] = True
    runtime = house.runtime(first)
    with pytest.raises(BackendError, match="cannot write its record"):
        runtime.start(first)
    assert runtime.problem().endswith("cannot be written: No space left on device")
    with pytest.raises(ConfigError, match="service b: cannot write its record"):
        runtime.reconfigure(HostConfig.of(Config((second,), runtime="process")))
    full_disk[0] = False
    assert runtime.start(first)
    assert runtime.problem() == ""
    runtime.stop(first)


def test_records_and_logs_are_kept_in_the_state_folder(tmp_path):
    assert state_folder("p", {"XDG_STATE_HOME": "/s"}) == Path("/s/anvil-mux/p")
    assert state_folder("p", {}) == Path.home() / ".local/state/anvil-mux/p"


# What the machine itself tells where records are lost


def _truncate(file):
    file.write_text(file.read_text()[:20])


def _replace_by_folder(file):
    file.unlink()
    file.mkdir()


DAMAGES = {
    "folder removed": lambda file: shutil.rmtree(file.parent),
    "removed": Path.unlink,
    "truncated": _truncate,
    "empty": lambda file: file.write_text(""),
    "random bytes": lambda file: file.write_bytes(bytes(range(256)) * 16),
    "zeros": lambda file: file.write_bytes(bytes(4096)),
    "without a mark": lambda file: file.write_text('{"pid": 1, "started": 1, "boot": "x", "url": "u"}'),
    "a list": lambda file: file.write_text("[]"),
    "odd types": lambda file: file.write_text(
        '{"pid": "x", "started": null, "boot": 1, "url": 5, "mark": []}'
    ),
    "a folder": _replace_by_folder,
}


def test_process_is_known_by_its_mark_as_soon_as_it_was_started():
    for number in range(100):
        run = RunRecord(0, 0, "", "", mark=f"mark-{number}")
        environ = {**os.environ, runs.MARK: run.mark}
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environ) as process:
            known = run.members([process.pid])
            process.stdin.close()
        assert known == {process.pid}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_same_runtime", [True, False], ids=["serving", "a later start"])
def test_an_engine_whose_record_is_lost_is_known_and_ended(house, damage, is_same_runtime):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    url = runtime.start(backend)
    pid = house.pid()
    DAMAGES[damage](house.file("a.json"))
    if not is_same_runtime:
        runtime.close()
        runtime = house.runtime(backend)
    assert runtime.running() == {"a": url}
    assert runtime.differs(backend) == ""
    assert runtime.owner(pid) == "a"
    runtime.stop(backend)
    assert not running(pid)
    assert runtime.running() == {}


def test_an_engine_that_has_lost_its_environment_too_is_known_by_its_launcher(house):
    backend = command("env", "-i", "sleep", "1000")
    first = house.started(backend)
    pid = house.pid()
    url = first.running()["a"]
    first.close()
    house.file("a.json").unlink()
    second = house.runtime(backend)
    assert second.running() == {"a": url}
    second.stop(backend)
    assert not running(pid)


@pytest.mark.parametrize("changed", ["home", "project"])
def test_an_engine_of_the_same_description_is_taken_over_from_another_state_folder(house, changed):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    url = first.start(backend)
    pid = house.pid()
    first.close()
    state = "other" if changed == "home" else "state"
    project = "p" if changed == "home" else "q"
    second = house.runtime(backend, state=state, project=project)
    assert second.running() == {"a": url}
    assert second.owner(pid) == "a"
    assert not house.file("a.json").exists()
    second.stop(backend)
    assert not running(pid)


def test_an_engine_of_another_description_or_one_that_is_served_is_not_taken_over(house):
    backend = shell(FOREVER)
    house.started(backend)
    other = replace(backend, gpus=("1",))
    assert house.runtime(other, project="q").running() == {}
    with open(house.file("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert house.runtime(backend, project="q").running() == {}
