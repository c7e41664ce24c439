"""Notices to systemd, where it started us: ready, stopping, how it goes, and that we do not hang.

The protocol is a datagram of lines to the socket that NOTIFY_SOCKET names, see sd_notify(3). The variables
are taken out of the environment, so that no engine and no command speaks in our place.

The thread ``notify`` looks before each sign of life: it takes the way that requests take, so whatever holds
them up holds it up. systemd, which then hears nothing for its WatchdogSec, starts the program anew, and that
takes the engines over.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress

from anvil_mux.clock import Worker

EVERY_SECONDS = 5.0
"""Seconds between two looks, if the watchdog does not want them more often."""
SEND_SECONDS = 1.0


class Notifier:
    """Tells systemd, or nobody if that did not start us. Any thread."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds, process = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = 0.0
        if microseconds.isdecimal() and process in ("", str(os.getpid())):
            self._watchdog = int(microseconds) / 1e6
        self._status = ""

    @property
    def is_heard(self) -> bool:
        return bool(self._address)

    def tell(self, **fields: str) -> None:
        if not self._address:
            return
        message = "".join(f"{name}={value}\n" for name, value in fields.items())
        # Not worth an end of our own: systemd draws its conclusions from silence.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_SECONDS)
            sender.sendto(message.encode(), self._address)

    def worker(self, look: Callable[[], str]) -> Worker:
        """The thread that tells it; ``look`` says in a line how it goes, or "" if it does not go well."""
        return Worker("notify", lambda: self.beat(look))

    def beat(self, look: Callable[[], str]) -> float:
        """Tells it once; after how many seconds it is to be told again."""
        status = look()
        fields = {"WATCHDOG": "1"} if self._watchdog and status else {}
        if status not in ("", self._status):
            fields["STATUS"] = self._status = status
        if fields:
            self.tell(**fields)
        return min(EVERY_SECONDS, self._watchdog / 3) if self._watchdog else EVERY_SECONDS
