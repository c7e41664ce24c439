"""The conversation with the CUDA driver, held with stand-ins for its library and for its program."""

import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from anvil_mux.errors import BackendError
from anvil_mux.host.cuda_driver import Driver, Limits
from tests.fake_cuda import build_library, write_program
from tests.running import seen

PID = 5_000_001  # more than Linux gives to any process
NOWHERE = "libnowhere.so.1"


@pytest.fixture
def connect() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def make(library: object, program: object = "no-such-program", **limits: float) -> Driver:
        drivers.append(Driver(Limits(**limits), library=str(library), program=str(program)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


@pytest.fixture(params=["library", "program"])
def driver(request: pytest.FixtureRequest, connect: Callable[..., Driver], tmp_path: Path) -> Driver:
    if request.param == "library":
        return connect(request.getfixturevalue("libcuda"))
    return connect(NOWHERE, write_program(tmp_path))


# The same by library and by program


def test_a_process_that_uses_cuda_goes_to_host_memory_and_back(driver, cuda):
    cuda.process(PID)
    assert [driver.uses_cuda(pid) for pid in (PID, PID + 1)] == [True, False]
    states = [driver.state(PID)]
    for action in ("lock", "checkpoint", "restore", "unlock"):
        driver.act(action, PID)
        states.append(driver.state(PID))
    assert states == ["running", "locked", "checkpointed", "locked", "running"]
    assert cuda.calls()[0] == f"lock {PID} 10000"  # which does not wait for ever


def test_a_refusal_is_told_and_the_conversation_goes_on(driver, cuda):
    cuda.process(PID)
    with pytest.raises(BackendError, match=rf"checkpoint of process {PID}: .*[Ii][Ll][Ll][Ee][Gg][Aa][Ll]"):
        driver.act("checkpoint", PID)
    assert driver.state(PID) == "running"


# The library


def test_the_library_is_preferred(connect, libcuda, cuda, tmp_path):
    assert connect(libcuda, write_program(tmp_path)).tool() == "library"


def test_a_library_without_the_calls_gives_way_to_the_program(connect, libcuda, cuda, tmp_path):
    old, program = build_library(tmp_path, old=True), write_program(tmp_path)
    assert connect(old, program).tool() == "program"
    with pytest.raises(BackendError, match=r"libold.so has no cuCheckpointProcessLock \(driver 570"):
        connect(old).tool()


def test_the_drivers_errors_have_its_names(connect, libcuda, cuda):
    cuda.process(PID)
    driver = connect(libcuda)
    cuda.fault(PID, "lock", "600")
    with pytest.raises(BackendError, match=r"cuCheckpointProcessLock: CUDA_ERROR_NOT_READY \(600\)"):
        driver.act("lock", PID)
    cuda.fault(PID, "lock", "12345")
    with pytest.raises(BackendError, match="cuCheckpointProcessLock: error 12345"):
        driver.act("lock", PID)


def test_states_of_later_drivers_are_told_as_they_are(connect, libcuda, cuda):
    driver = connect(libcuda)
    cuda.process(PID, "restoring")
    assert driver.state(PID) == "restoring"
    (cuda.folder / str(PID)).write_text("9")
    assert driver.state(PID) == "state 9"


def test_a_driver_without_a_gpu_cannot_be_used(connect, libcuda, cuda):
    (cuda.folder / "init.fault").write_text("100")
    with pytest.raises(BackendError, match="cannot be used: cuInit: error 100"):
        connect(libcuda).tool()


@pytest.mark.parametrize(
    ("action", "limit"),
    [("lock", 0.21), ("checkpoint", 0.3), ("restore", 0.3), ("unlock", 0.2), ("state", 0.2)],
)
def test_a_call_that_hangs_is_given_up_and_the_conversation_begins_anew(
    connect, libcuda, cuda, action, limit
):
    driver = connect(libcuda, lock=0.01, move=0.3, question=0.2)
    cuda.process(PID)
    cuda.fault(PID, action, "hang")
    with pytest.raises(BackendError, match=rf"did not answer within {limit} s \({action} of process {PID}\)"):
        driver.state(PID) if action == "state" else driver.act(action, PID)
    cuda.mend(PID, action)
    driver._limits = Limits()
    assert driver.state(PID) == "running"


def test_every_gpu_is_visible_to_the_driver(connect, libcuda, cuda, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    driver = connect(libcuda)
    driver.tool()
    assert driver._child is not None
    environ = Path(f"/proc/{driver._child.pid}/environ").read_bytes()
    assert b"FAKE_CUDA=" in environ
    assert b"CUDA_VISIBLE_DEVICES" not in environ


# The program


def test_without_library_and_program_the_reason_names_both(connect):
    with pytest.raises(BackendError, match=rf"{NOWHERE}.*and there is no program no-such-program in PATH"):
        connect(NOWHERE).tool()


def test_a_program_that_hangs_goes_with_its_caller(connect, cuda, tmp_path):
    program = tmp_path / "cuda-checkpoint"
    pause = f'"{sys.executable}" -c "import signal; signal.pause()"'
    program.write_text(f'#!/bin/sh\necho $$ >"$FAKE_CUDA/hanging"\nexec {pause}\n')
    program.chmod(0o755)
    driver = connect(NOWHERE, program, question=2.0)
    with pytest.raises(BackendError, match="did not answer within 2 s"):
        driver.state(PID)
    with suppress(ProcessLookupError):
        hanging = os.pidfd_open(int((cuda.folder / "hanging").read_text()))
        ended, _, _ = select.select([hanging], [], [], 10)
        if not ended:
            signal.pidfd_send_signal(hanging, signal.SIGKILL)
        os.close(hanging)
        assert ended


# The child


def test_a_child_that_breaks_off_says_why(connect, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 1\n")
    broken.chmod(0o755)
    driver = connect(NOWHERE)
    driver._command[0] = str(broken)
    with pytest.raises(BackendError, match=r"broke off \(start\): out of memory"):
        driver.tool()


def test_a_child_that_cannot_be_started_is_told(connect, tmp_path):
    driver = connect(NOWHERE)
    driver._command[0] = str(tmp_path / "no-python")
    with pytest.raises(BackendError, match=r"cannot be started: .*no-python"):
        driver.tool()


def test_a_program_with_many_open_files_may_ask(driver, cuda):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with ExitStack() as opened:
            for _ in range(1100):  # select() ends at 1024
                opened.enter_context(open("/dev/null"))
            assert driver.tool() in ("library", "program")
    finally:
        driver.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_of_a_conversation_is_left(driver, cuda):
    with driver:
        driver.tool()
        assert driver._child is not None
        child = Path("/proc", str(driver._child.pid))
        assert child.exists()
    assert not child.exists()
    driver.close()


def test_a_child_that_the_driver_holds_beyond_its_kill_is_no_zombie_afterwards(driver, monkeypatch):
    with driver:
        driver.tool()
        child = driver._child
        assert child is not None
        end, stand_in = child.wait, threading.Event()

        def wait(timeout: float | None = None) -> int:
            if timeout is not None:  # as if the kernel did not let go of it
                raise subprocess.TimeoutExpired("driver", timeout)
            stand_in.set()
            return end()

        monkeypatch.setattr(child, "wait", wait)
    assert seen(lambda: not Path("/proc", str(child.pid)).exists(), bool)
    assert stand_in.is_set()
