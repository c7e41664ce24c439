"""What systemd is told: a datagram socket stands for it."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anvil_mux.serve.invocation import Notifier
from tests.cli.demo import ROOT, compose, state
from tests.running import serve

__all__ = ["state"]

TIMEOUT = 60.0
WATCHDOG = "1500000"


class Manager:
    """Hears what systemd would."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(TIMEOUT)
        self.socket.bind(address)

    def hears(self) -> dict[str, str]:
        """The next message."""
        lines = self.socket.recv(65536).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hears_of(self, field: str) -> dict[str, str]:
        while field not in (message := self.hears()):
            pass
        return message

    def has_heard_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(65536)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT)
        return False


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    manager = Manager(address)
    with manager.socket:
        yield manager


def test_without_a_manager_nothing_is_told():
    notifier = Notifier({})
    notifier.tell(READY="1")
    assert not notifier.is_heard


def test_each_field_is_a_line(manager, address):
    Notifier({"NOTIFY_SOCKET": address}).tell(READY="1", STATUS="resident: none")
    assert manager.hears() == {"READY": "1", "STATUS": "resident: none"}


def test_an_address_may_have_no_file():
    name = f"anvil-mux-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    with manager.socket:
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).tell(READY="1")
        assert manager.hears() == {"READY": "1"}


def test_a_manager_that_is_gone_does_no_harm(address):
    Notifier({"NOTIFY_SOCKET": address}).tell(READY="1")


def test_engines_and_commands_cannot_speak_in_our_place(address):
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG, "WATCHDOG_PID": "1", "HOME": "/"}
    Notifier(environ)
    assert environ == {"HOME": "/"}


def test_the_status_is_told_when_it_changes_and_life_each_time(manager, address):
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG})
    for status in ("one", "one", "two"):
        notifier.beat(lambda status=status: status)
    assert [manager.hears() for _ in range(3)] == [
        {"WATCHDOG": "1", "STATUS": "one"},
        {"WATCHDOG": "1"},
        {"WATCHDOG": "1", "STATUS": "two"},
    ]


@pytest.mark.parametrize("environ", [{}, {"WATCHDOG_USEC": WATCHDOG, "WATCHDOG_PID": "1"}])
def test_without_a_watchdog_of_ours_only_news_are_told(manager, address, environ):
    notifier = Notifier({"NOTIFY_SOCKET": address, **environ})
    for _ in range(2):
        notifier.beat(lambda: "one")
    assert manager.hears() == {"STATUS": "one"}
    assert manager.has_heard_nothing()


def test_who_does_not_go_well_gives_no_sign_of_life(manager, address):
    Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG}).beat(lambda: "")
    assert manager.has_heard_nothing()


def test_who_hangs_gives_no_sign_of_life_until_it_goes_on(manager, address):
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"})
    lock, looked = threading.Lock(), threading.Event()

    def look() -> str:
        looked.set()
        with lock:
            return "goes"

    worker = notifier.worker(look)
    with lock:
        worker.start()
        assert looked.wait(TIMEOUT)
        assert manager.has_heard_nothing()
    assert manager.hears() == {"WATCHDOG": "1", "STATUS": "goes"}
    assert manager.hears() == {"WATCHDOG": "1"}
    worker.close()
    assert worker.join(TIMEOUT)


def test_a_service_tells_when_it_serves_what_it_does_and_when_it_ends(state, manager, address):
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG}
    running = serve(compose(state), "--on-exit", "stop", state=state, environ=environ)
    assert manager.hears() == {"READY": "1"}
    assert manager.hears_of("STATUS")["STATUS"] == "resident: none; 0 requests running, 0 waiting"
    assert running.chat("a")[0] == 200
    while "resident: a; 0 requests running" not in manager.hears_of("STATUS")["STATUS"]:
        pass
    assert manager.hears_of("WATCHDOG")["WATCHDOG"] == "1"
    running.process.send_signal(signal.SIGHUP)
    assert int(manager.hears_of("RELOADING")["MONOTONIC_USEC"]) > 0
    assert manager.hears_of("READY") == {"READY": "1"}
    running.process.send_signal(signal.SIGTERM)
    ending = manager.hears_of("STOPPING")
    assert int(ending["EXTEND_TIMEOUT_USEC"]) > 30_000_000
    assert running.process.wait(TIMEOUT) == 0
    running.stop()


def test_the_unit_checks_the_file_that_it_serves_before_a_reload():
    unit = (ROOT / "contrib" / "anvil-mux.service").read_text().splitlines()
    said = [line.partition("=") for line in unit]
    (start,) = [value for name, _, value in said if name == "ExecStart"]
    check, reload = [value for name, _, value in said if name == "ExecReload"]
    assert check == start.replace(" serve ", " check ")
    assert reload == "/bin/kill -HUP $MAINPID"
