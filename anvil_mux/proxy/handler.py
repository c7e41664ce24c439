"""One request from its head to its record: who may ask, a local answer or one from an engine, the error.

``Handler.serve`` runs in the connection's thread and returns whether another request may follow on it. One
request has three objects: what was asked (``asked``), the writer of its answer (``reply``), and its record
for the log.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from anvil_mux.config.config import Config
from anvil_mux.config.keys import Keyring
from anvil_mux.errors import ClientGone, MuxError, Unauthorized
from anvil_mux.host.seam import Sight
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.proxy.access import Access, challenge
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.capture import Capture
from anvil_mux.proxy.captures import Captures
from anvil_mux.proxy.client import Client
from anvil_mux.proxy.dispatch import Dispatcher
from anvil_mux.proxy.local import Local
from anvil_mux.proxy.operations import HostReports, Keep
from anvil_mux.proxy.page import Page
from anvil_mux.proxy.probes import Probes
from anvil_mux.proxy.questions import Questions
from anvil_mux.proxy.relay import Relay
from anvil_mux.proxy.reloads import Reloads
from anvil_mux.proxy.reply import Reply
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import StoredResponses
from anvil_mux.proxy.usage import UsageSince
from anvil_mux.proxy.waiting import Patience
from anvil_mux.telemetry.accesslog import Served, Sink
from anvil_mux.telemetry.feed import Feed

UNREAD = http1.Request(
    method="-",
    target=b"",
    path="",
    query="",
    version=(1, 1),
    headers=[],
    fields={},
    keep_alive=False,
    chunked=False,
    expect_continue=False,
    passing=[],
    length=None,
)
"""Stands for what could not be read as a request."""

log = logging.getLogger(__name__)


class Handler:
    """Answers requests, in any thread; the server alone writes ``only_local_hosts`` and calls ``drain``."""

    def __init__(
        self,
        config: Config,
        mux: Multiplexer,
        relay: Relay,
        records: Sink,
        *,
        metrics: Callable[[str], tuple[str, bytes]],
        checks: Mapping[str, Callable[[], str]] | None = None,
        patience: Patience | None = None,
        feed: Feed | None = None,
        tail: Callable[[str, int], Iterable[str]] = lambda backend, lines: (),
        sight: Callable[[], Sight] = dict,
        keys: Keyring | None = None,
        reloads: Reloads | None = None,
        notes: Mapping[str, Callable[[], str]] | None = None,
        hosts: HostReports = list,
        keep_pause: Keep = lambda pause: False,
        usage: UsageSince = lambda since: [],
    ) -> None:
        self._mux = mux
        self._records = records
        self._ids = map((secrets.token_hex(5) + "-%x").__mod__, itertools.count(1))
        self._access = Access(config, keys or Keyring(), only_local_hosts=False)
        self._feed = feed or Feed()
        self._captures = Captures(config.capture)
        stored = StoredResponses()
        self._questions = Questions(mux, stored)
        self._dispatcher = Dispatcher(mux, relay, stored, patience)
        self.probes = Probes(mux, metrics, checks or {}, sight=sight, reloads=reloads, notes=notes or {})
        page = Page(
            mux, self._feed, lambda: {**self.probes.state(brief=True), "capture": self._captures.most}
        )
        self.local = Local(
            mux,
            self.probes,
            page,
            tail,
            reloads=reloads,
            reports=hosts,
            keep_pause=keep_pause,
            usage=usage,
            captures=self._captures,
            feed=self._feed,
        )

    @property
    def only_local_hosts(self) -> bool:
        """Whether it is bound to loopback: any other Host is a web page named to mean this machine."""
        return self._access.only_local_hosts

    @only_local_hosts.setter
    def only_local_hosts(self, only: bool) -> None:
        self._access = Access(self._access.config, self._access.keys, only_local_hosts=only)

    def reconfigure(self, config: Config, keys: Keyring) -> None:
        """Answer requests by this from now on, also those of connections that are open already."""
        if keys is not self._access.keys:
            self._access.keys.give_way(keys)
        self._access = Access(config, keys, only_local_hosts=self.only_local_hosts)
        self._captures.resize(config.capture)

    def drain(self) -> None:
        """Make every answer from now on the last of its connection, since the program ends."""
        self.probes.draining = True
        self._feed.close()

    def serve(self, client: Client, request: http1.Request) -> bool:
        """Answers one request; False if the connection must be closed after it."""
        given = request.fields.get(b"x-request-id")
        id = next(self._ids) if given is None else api.request_id(given, self._ids.__next__)
        access = self._access
        asked = Asked(id, time.monotonic(), request, access, *access.route(request))
        reply = Reply(client, asked, keep=request.keep_alive and not self.probes.draining)
        record = Served(id, client.address, request.method, request.path)
        try:
            if key := access.check(request, asked.route, asked.reader):
                asked = reply.asked = replace(asked, key=key)
            if asked.route is api.NO_ROUTE:
                self.local.answer(asked, reply, record)
            elif asked.key and asked.key.requests is not None:
                with self._mux.counts.under_way(asked.key):
                    self._ask_engine(asked, reply, record)
            else:
                self._ask_engine(asked, reply, record)
        except ClientGone as gone:
            reply.left(gone)
        except Unauthorized as error:
            reply.refuse(error, [(b"WWW-Authenticate", b'%b realm="anvil-mux"' % challenge(request))])
        except MuxError as error:
            reply.refuse(error)
        except Exception:
            log.exception("request %s failed", id)
            reply.refuse(MuxError("Internal error in anvil-mux; its log says more."))
        self._record(record, asked, reply)
        return reply.keep

    def _ask_engine(self, asked: Asked, reply: Reply, record: Served) -> None:
        question = self._questions.read(asked, reply.client)
        record.model, record.preset = question.target.model, question.target.preset
        record.stream = question.stream
        if asked.access.config.capture:
            reply.capture = Capture()
            reply.capture.asked(question.body)
        try:
            self._dispatcher.answer(question, reply, record)
        finally:
            if isinstance(question.body, Spool):
                question.body.close()

    def refuse_unread(self, client: Client, error: MuxError) -> None:
        """Answers something that could not be read as a request."""
        asked = Asked(next(self._ids), time.monotonic(), UNREAD, self._access, *self._access.route(UNREAD))
        reply = Reply(client, asked, keep=False)
        reply.refuse(error)
        self._record(Served(asked.id, client.address, "-", ""), asked, reply)

    def _record(self, record: Served, asked: Asked, reply: Reply) -> None:
        record.ended, record.seconds = time.time(), time.monotonic() - asked.since
        record.status, record.code, record.sent = reply.status, reply.code, reply.sent
        if asked.key:
            record.key = asked.key.name
        record.said = record.said[-api.USAGE_BYTES :]
        if not record.said:
            record.foreseen = None
        if reply.capture:
            self._captures.keep(reply.capture, asked.request, record)
        self._records.add(record)
