"""Processes whose parent is ours, or a program that outlives us."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anvil_mux.host.starter import Child, Detached, OwnChildren, Starter, StarterLost
from tests.host.test_processes import gone, running
from tests.running import seen

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 30.0
ENV = {"PATH": os.environ["PATH"], "GREETING": "h\udce9"}


@pytest.fixture(params=[OwnChildren, Detached])
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    starter: Starter = request.param()
    yield starter
    starter.close()


@pytest.fixture
def detached() -> Iterator[Detached]:
    starter = Detached()
    yield starter
    starter.close()


def start(starter: Starter, folder: Path, script: str) -> Child:
    return starter.start(["sh", "-c", script], cwd=str(folder), env=ENV, log=folder / "log")


def test_a_process_holds_its_claims_until_it_ends(starter: Starter, tmp_path: Path) -> None:
    names = [f"anvil-mux-test/{tmp_path.name}/{os.getpid()}/{each}" for each in "ab"]

    def held() -> list[str]:
        return [name for name in names if f"@{name}\n" in Path("/proc/net/unix").read_text()]

    argv = ["sleep", "1000"]
    child = starter.start(argv, cwd=str(tmp_path), env=ENV, log=tmp_path / "log", claims=names)
    assert held() == names
    starter.close()
    assert held() == names
    os.kill(child.pid, signal.SIGKILL)
    assert seen(held, lambda them: not them) == []
    child.code(PATIENCE)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_it_runs_in_its_folder_with_its_environment_and_prints_to_its_log(starter, tmp_path):
    child = start(starter, tmp_path, 'echo "$PWD $GREETING"; echo bad >&2; cat')
    assert child.code(PATIENCE) == 0
    assert (tmp_path / "log").read_bytes() == f"{tmp_path} ".encode() + b"h\xe9\nbad\n"


def test_its_exit_code_is_told_again_and_again(starter, tmp_path):
    child = start(starter, tmp_path, "exit 3")
    assert [child.code(PATIENCE), child.code()] == [3, 3]
    assert start(starter, tmp_path, "kill -9 $$").code(PATIENCE) == -signal.SIGKILL


def test_one_that_ends_after_it_was_left_is_no_zombie(tmp_path):
    child = start(OwnChildren(), tmp_path, "exec sleep 1000")
    child.leave()
    os.kill(child.pid, signal.SIGKILL)
    assert seen(lambda: not Path(f"/proc/{child.pid}").exists(), bool)


def test_one_that_runs_has_none_and_leads_a_session_of_its_own(starter, tmp_path):
    child = start(starter, tmp_path, "exec sleep 1000")
    assert child.code() is None
    assert os.getsid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGKILL)
    assert child.code(PATIENCE) == -signal.SIGKILL


def test_a_program_that_is_missing_is_an_error_of_the_system(starter, tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-engine"):
        starter.start(["no-such-engine"], cwd=str(tmp_path), env=ENV, log=tmp_path / "log")
    assert start(starter, tmp_path, "exit 4").code(PATIENCE) == 4


def test_one_that_is_left_runs_on(starter, tmp_path):
    child = start(starter, tmp_path, "exec sleep 1000")
    child.leave()
    starter.close()
    assert running(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    gone(child.pid)


def test_detached_ones_are_no_children_of_ours_and_have_one_parent(detached, tmp_path):
    children = [start(detached, tmp_path, "exec sleep 1000") for _ in range(2)]
    [program] = {parent(each.pid) for each in children}
    assert os.getpid() not in (program, parent(program))
    for each in children:
        os.kill(each.pid, signal.SIGKILL)
        assert each.code(PATIENCE) == -signal.SIGKILL


def test_where_the_program_is_lost_processes_run_on_and_another_starts_the_next(detached, tmp_path):
    child = start(detached, tmp_path, "exec sleep 1000")
    program = parent(child.pid)
    os.kill(program, signal.SIGKILL)
    gone(program)
    assert running(child.pid)
    with pytest.raises(StarterLost, match="has ended"):
        start(detached, tmp_path, "true")
    other = start(detached, tmp_path, "exit 5")
    assert other.code(PATIENCE) == 5
    os.kill(child.pid, signal.SIGKILL)
    gone(child.pid)
    assert child.code() is None


BURDENED = """
import json, os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from anvil_mux.host.starter import Detached
os.nice(15)
Path("/proc/self/oom_score_adj").write_text("1000")
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
starter = Detached()
argv, log = ["sh", "-c", {script!r}], Path({folder!r}, "log")
started = [starter.start(argv, cwd={folder!r}, env=os.environ, log=log) for _ in range(2)]
print(json.dumps([each.pid for each in started]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_their_starter_was_burdened_with_is_taken_off_and_its_end_is_not_theirs(tmp_path):
    program = BURDENED.format(root=str(ROOT), script="exec sleep 1000", folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    for pid in json.loads(done.stdout):
        status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert {status[key] for key in ("SigBlk", "SigIgn")} == {"0" * 16}
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "0\n"
        if os.geteuid() == 0:  # others may not make a process nicer than it is
            assert os.getpriority(os.PRIO_PROCESS, pid) == 0
        os.kill(pid, signal.SIGKILL)
        gone(pid)
