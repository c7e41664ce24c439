"""A program that goes on although nobody takes what it prints: a full disk, a pipe without a reader."""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.demo import PROJECT, compose, engine_pid, is_alive, state, stream
from tests.running import STOP_TIMEOUT, Running, seen

__all__ = ["state"]


def full_pipe() -> tuple[int, int]:
    """A pipe that takes nothing any more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


@pytest.fixture(params=["a full disk", "a pipe that nobody reads", "a pipe whose reader has left"])
def standard_error(request: pytest.FixtureRequest) -> Iterator[int]:
    reader = None
    if request.param == "a full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = full_pipe()
        if "left" in request.param:
            os.close(reader)
            reader = None
    yield writer
    os.close(writer)
    if reader is not None:
        os.close(reader)


def begun(state: Path, standard_error: int, *flags: str, **more: float) -> Running:
    """anvil-mux that serves with this standard error."""
    file = compose(state, **more)
    command = [sys.executable, "-m", "anvil_mux", "serve", str(file), "--port", "0", "--on-exit", "stop"]
    environ = {**os.environ, "XDG_STATE_HOME": str(state)}
    process = subprocess.Popen(
        [*command, *flags],
        env=environ,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=standard_error,
    )
    running = Running(process, command)
    running.wait_until_listening()
    return running


def test_it_reloads_and_ends_in_order(state, standard_error):
    running = begun(state, standard_error, "--drain-timeout", "0", tokens_per_second=20)
    with stream(running, "a", 10_000) as answer:
        pid = engine_pid(state, "a")
        (state / "compose.yaml").write_text("x-anvil: {nonsense: 1}\nservices: {}\n")
        running.process.send_signal(signal.SIGHUP)
        refused = 'anvil_reloads_total{result="failed"} 1.0'
        assert refused in seen(lambda: running.request("GET", "/metrics")[2], lambda text: refused in text)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(http.client.IncompleteRead) as cut:
            answer.read()
        assert b'"code":"severed"' in cut.value.partial.replace(b" ", b"")
        assert running.process.wait(STOP_TIMEOUT) == 0
    assert not is_alive(pid)


@pytest.mark.parametrize("standard_error", ["a full disk", "a pipe that nobody reads"], indirect=True)
def test_the_second_signal_ends_it_at_once(state, standard_error):
    running = begun(state, standard_error, tokens_per_second=20)

    def readiness() -> int | None:
        # A connection on which nothing was asked yet is closed as a drain begins.
        with suppress(ConnectionError):
            return running.process.poll() or running.request("GET", "/readyz")[0]
        return None

    with stream(running, "a", 10_000):
        running.process.send_signal(signal.SIGTERM)
        seen(readiness, lambda code: code == 503)
        assert running.cut_short() == 130


def test_it_serves_without_any_standard_stream(state):
    command = [sys.executable, "-m", "anvil_mux", "serve", str(compose(state)), "--port", "0"]
    close = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command, "--on-exit", "stop"]
    process = subprocess.Popen(close, env={**os.environ, "XDG_STATE_HOME": str(state)})
    place = state / "anvil-mux" / PROJECT / "address"
    assert seen(lambda: place.exists() or process.poll(), bool) is True
    process.terminate()
    assert process.wait(STOP_TIMEOUT) == 0


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(["version"], ""), (["config"], "1"), (["--help"], ""), (["--help"], "1"), (["ps", "--help"], "")],
)
def test_a_command_whose_output_is_full_says_so_without_a_traceback(words, unbuffered, state):
    compose(state)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "anvil_mux", *words],
            cwd=state,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "anvil-mux: error: standard output cannot be written: No space left on device\n"


def test_a_command_without_an_output_ends_well():
    close = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "anvil_mux", "version"]
    done = subprocess.run(close, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_a_shell_left_open_for_reading_is_no_standard_error(state):
    file = compose(state)
    close = ["sh", "-c", f'exec "$@" 2<{file}', "sh", sys.executable, "-m", "anvil_mux", "check", str(file)]
    done = subprocess.run(close, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


def test_ctrl_c_while_the_program_is_being_imported_ends_it_quietly(tmp_path):
    """A module that interrupts us where the commands' imports begin."""
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    started = "import sys, runpy; sys.argv = ['anvil-mux', 'version']; import signal; "
    started += f"sys.path.insert(0, {str(tmp_path)!r}); runpy.run_module('anvil_mux', run_name='__main__')"
    signals = ["env", "--default-signal=INT"]
    done = subprocess.run([*signals, sys.executable, "-c", started], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
