"""The waking of hosts that sleep: while requests wait for one it is woken, by packet or command, and awaited.

It is woken once when the first request begins to wait, and again now and then while one does, since packets
get lost. A host that is not there within its time, or whose command fails, is reported to the scheduler as
one that does not wake: the requests fail, and it is left alone for a while.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from functools import partial

from anvil_mux import command
from anvil_mux.clock import Clock
from anvil_mux.config.kinds import span
from anvil_mux.config.machines import Wake
from anvil_mux.multiplexer.multiplexer import Multiplexer

AGAIN_SECONDS = 15.0
"""Seconds after which a host that is still awaited is woken again."""
DISCARD_PORT = 9
"""The UDP port to which such packets are sent; network cards do not look at it."""

Send = Callable[[bytes, str], object]
"""Sends a packet to an address; OSError."""


class Waker:
    """Wakes hosts. ``look`` is for one thread; commands run in threads of their own."""

    def __init__(self, mux: Multiplexer, clock: Clock, say: Callable[[str], object], send: Send) -> None:
        self._mux = mux
        self._clock = clock
        self._say = say
        self._send = send
        # Other threads read it, so it is replaced as a whole and never altered.
        self._since: Mapping[str, float] = {}
        """Host that is awaited -> since when."""
        self._woken: dict[str, float] = {}
        """Host -> when it was woken last, of those that are awaited."""

    def is_waking(self, host: str) -> bool:
        return host in self._since

    def look(self, wakes: Mapping[str, Wake]) -> None:
        """Wake the hosts for which requests wait, and give up those that have had their time."""
        now = self._clock.now()
        awaited = self._mux.overview.hosts_to_wake() if wakes else ()
        wanted = {host: wakes[host] for host in awaited if host in wakes}
        self._since = {host: self._since.get(host, now) for host in wanted}
        self._woken = {host: at for host, at in self._woken.items() if host in wanted}
        for host, wake in wanted.items():
            if now - self._since[host] >= wake.timeout:
                self._give_up(host, f"it is not there {span(wake.timeout)} after it was woken")
            elif now - self._woken.get(host, -AGAIN_SECONDS) >= AGAIN_SECONDS:
                if host not in self._woken:
                    self._say(f"host {host} is woken: requests wait for it")
                self._woken[host] = now
                self._wake(host, wake)

    def _wake(self, host: str, wake: Wake) -> None:
        if wake.run:
            self._clock.spawn(partial(self._run, host, wake), f"wake-{host}")
            return
        try:
            self._send(magic_packet(wake.mac), wake.broadcast)
        except OSError as error:
            self._give_up(host, f"no packet can be sent to {wake.broadcast}: {error.strerror or error}")

    def _run(self, host: str, wake: Wake) -> None:
        """Run the command; the life of its thread."""
        try:
            done = command.run(wake.run, min(wake.timeout, AGAIN_SECONDS), env=os.environ)
        except OSError as error:
            self._give_up(host, f"{wake.run[0]} cannot be run: {error.strerror}")
        except subprocess.TimeoutExpired:
            pass  # what it has begun may still wake the host
        else:
            if done.code:
                self._give_up(host, f"{wake.run[0]} failed: {done.last_line}")

    def _give_up(self, host: str, why: str) -> None:
        self._say(f"host {host} does not wake: {why}")
        self._mux.tell(self._mux.scheduler.host_unwoken, host, why=why)


def magic_packet(mac: str) -> bytes:
    """The packet for which the network card of a machine that sleeps listens."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def broadcast(packet: bytes, address: str) -> None:
    """Send a packet to all who listen at an address; OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(packet, (address, DISCARD_PORT))
