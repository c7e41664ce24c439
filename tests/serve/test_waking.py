"""The waking of hosts: the packet, how often it is sent, commands, and the end of patience."""

import socket
from types import SimpleNamespace

import pytest

from anvil_mux.config.machines import Wake
from anvil_mux.serve import hosts
from anvil_mux.serve.hosts import AGAIN_SECONDS, Waker, broadcast, magic_packet

MAC = "aa:bb:cc:dd:ee:ff"
WAKES = {"h": Wake(mac=MAC, broadcast="10.0.0.255", timeout=40.0)}


class House:
    """A waker, a clock that stands still, the hosts for which requests wait, and what came of it."""

    def __init__(self, fails: OSError | None = None) -> None:
        self.now, self.wanted, self.fails = 0.0, ["h"], fails
        self.sent: list[tuple[float, str]] = []
        self.unwoken: list[tuple[str, str]] = []
        self.printed: list[str] = []
        clock = SimpleNamespace(now=lambda: self.now, spawn=lambda task, name: task())
        mux = SimpleNamespace(
            overview=SimpleNamespace(hosts_to_wake=lambda: self.wanted),
            scheduler=SimpleNamespace(host_unwoken=None),
            tell=lambda fact, host, why: self.unwoken.append((host, why)),
        )
        self.waker = Waker(mux, clock, self.printed.append, self._send)

    def _send(self, packet: bytes, address: str) -> None:
        if self.fails:
            raise self.fails
        assert packet == magic_packet(MAC)
        self.sent.append((self.now, address))

    def look(self, at: float, wakes: dict[str, Wake] = WAKES) -> None:
        self.now = at
        self.waker.turn(wakes)


def test_the_packet_is_that_for_which_network_cards_listen():
    assert magic_packet(MAC) == b"\xff" * 6 + b"\xaa\xbb\xcc\xdd\xee\xff" * 16


def test_it_is_sent_to_the_address(monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.settimeout(10.0)
        monkeypatch.setattr(hosts, "DISCARD_PORT", card.getsockname()[1])
        broadcast(magic_packet(MAC), "127.0.0.1")
        assert card.recv(4096) == magic_packet(MAC)


def test_a_host_is_woken_when_requests_wait_and_again_now_and_then():
    house = House()
    for at in range(int(2 * AGAIN_SECONDS) + 1):
        house.look(float(at))
    assert house.sent == [
        (0.0, "10.0.0.255"),
        (AGAIN_SECONDS, "10.0.0.255"),
        (2 * AGAIN_SECONDS, "10.0.0.255"),
    ]
    assert house.printed == ["host h is woken: requests wait for it"]
    assert house.waker.is_waking("h")


def test_once_nobody_waits_it_is_left_alone_and_a_later_wait_begins_anew():
    house = House()
    house.look(0.0)
    house.wanted = []
    house.look(1.0)
    assert not house.waker.is_waking("h")
    house.wanted = ["h"]
    house.look(2.0)
    house.look(41.0)
    assert [at for at, _ in house.sent] == [0.0, 2.0, 41.0]
    assert house.unwoken == []


def test_one_that_is_not_there_in_time_is_given_up():
    house = House()
    house.look(0.0)
    house.look(40.0)
    assert house.unwoken == [("h", "it is not there 40 s after it was woken")]
    assert house.printed[-1] == "host h does not wake: it is not there 40 s after it was woken"


def test_what_cannot_be_sent_is_said():
    house = House(OSError(101, "Network is unreachable"))
    house.look(0.0)
    assert house.unwoken == [("h", "no packet can be sent to 10.0.0.255: Network is unreachable")]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (("true",), None),
        (("sh", "-c", "echo no such plug >&2; exit 3"), "sh failed: no such plug"),
        (("no-such-program",), "no-such-program cannot be run: No such file or directory"),
    ],
)
def test_a_command_wakes_it_and_says_why_not(run, why):
    house = House()
    house.look(0.0, {"h": Wake(run=run)})
    assert house.unwoken == ([("h", why)] if why else [])


def test_a_host_that_cannot_be_woken_is_not():
    house = House()
    house.look(0.0, {})
    assert (house.sent, house.unwoken) == ([], [])
