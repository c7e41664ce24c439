"""Threads that anvil-mux cannot live without: when one of them ends, so does the program, to be restarted."""

import signal
from contextlib import suppress
from http.client import HTTPException

import pytest

from tests.cli.demo import compose, state
from tests.running import STOP_TIMEOUT, serve, serving

__all__ = ["state"]

SITE = """
import ctypes, os, signal, threading

def end_thread(*_):
    for thread in threading.enumerate():
        if thread.name == os.environ["THREAD_TO_END"]:
            id, error = ctypes.c_ulong(thread.ident), ctypes.py_object(GeneratorExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(id, error)

signal.signal(signal.SIGUSR1, end_thread)
"""
"""A module that Python imports at its start: on SIGUSR1 a thread ends at its next line."""
CRASHED = 70


@pytest.mark.parametrize("thread", ["pump", "scheduler", "acceptor"])
def test_the_program_ends_with_an_essential_thread_and_its_engines_run_on(state, tmp_path, thread):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environ = {"PYTHONPATH": str(tmp_path), "THREAD_TO_END": thread}
    file = compose(state)
    crashing = serve(file, state=state, environ=environ)
    try:
        assert crashing.chat("a")[0] == 200
        crashing.process.send_signal(signal.SIGUSR1)
        if thread == "scheduler":  # it waits, until there is something to do
            with suppress(OSError, HTTPException):
                crashing.chat("b")
        crashing.tells(f"ended, since its thread {thread} has")
        assert crashing.process.wait(STOP_TIMEOUT) == CRASHED
    finally:
        crashing.stop(signal.SIGKILL)
    with serving(file, state=state) as restarted:
        assert "ready" in restarted.request("GET", "/healthz")[2]
