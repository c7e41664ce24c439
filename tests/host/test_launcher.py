"""The parent of an engine: its log, and the signals and ends of the engine."""

import os
import signal
from pathlib import Path

from anvil_mux.host.launcher import BoundedLog
from anvil_mux.host.starter import OwnChildren
from tests.host.test_processes import PATIENCE, gone, running

ENV = {"PATH": os.environ["PATH"]}


def start(folder, script):
    return OwnChildren().start(["sh", "-c", script], cwd=str(folder), env=ENV, log=folder / "log")


def test_a_log_that_is_flooded_is_bounded_after_each_write(tmp_path):
    with open(tmp_path / "log", "ab+") as file:
        log = BoundedLog(file.fileno(), 1000, 100)
        for number in range(1000):
            log.write(f"{number}\n".encode())
            assert os.fstat(file.fileno()).st_size <= 1000
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [str(number) for number in range(1000 - len(lines), 1000)]


def test_what_a_full_disk_does_not_take_is_dropped_and_counted(tmp_path):
    with open("/dev/full", "ab") as file, open(tmp_path / "log", "ab+") as room:
        log = BoundedLog(file.fileno())
        log.write(b"lost\n")
        log.write(b"lost again\n")
        os.dup2(room.fileno(), file.fileno())
        log.write(b"kept\n")
        log.write(b"kept too\n")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [
        "",
        "[anvil-mux: 16 bytes of this log were dropped, the disk was full]",
        "kept",
        "kept too",
    ]


def test_an_engine_survives_a_log_that_cannot_be_written():
    seq = ["sh", "-c", "seq 100000 || exit 3"]
    child = OwnChildren().start(seq, cwd="/", env=ENV, log=Path("/dev/full"))
    assert child.code(PATIENCE) == 0


def test_workers_have_their_grace_though_the_shell_that_started_them_ends_at_once(tmp_path):
    os.mkfifo(tmp_path / "gate")
    worker = "trap 'read line < gate; echo bye; exit' TERM; echo $$ > gate; while :; do sleep 0.01; done"
    child = start(tmp_path, f'sh -c "{worker.replace("$", chr(92) + "$")}" & wait')
    pid = int((tmp_path / "gate").read_text())
    os.killpg(child.pid, signal.SIGTERM)
    (tmp_path / "gate").write_text("go\n")
    assert child.code(PATIENCE) == -signal.SIGTERM
    assert not running(pid)
    assert "bye\n" in (tmp_path / "log").read_text()


def test_an_engine_ends_with_a_launcher_that_is_killed(tmp_path):
    os.mkfifo(tmp_path / "gate")
    child = start(tmp_path, "echo $$ > gate; exec sleep 1000")
    pid = int((tmp_path / "gate").read_text())
    os.kill(child.pid, signal.SIGKILL)
    gone(pid)
    assert child.code(PATIENCE) == -signal.SIGKILL
