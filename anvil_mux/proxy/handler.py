"""One request from its head to its record: who may ask, a local answer or one from an engine, the error.

``Handler.serve`` runs in the connection's thread and returns whether another request may follow on it. One
request has three objects: what was asked (``RequestContext``, and with a body ``Question``), the writer of
its answer (``Reply``), and its record for the log (``Served``).
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from dataclasses import replace

from anvil_mux.config.config import Config
from anvil_mux.config.keys import Keyring
from anvil_mux.errors import ClientGone, MuxError, Unauthorized
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.proxy.access import ANY_KEY, Access, challenge
from anvil_mux.proxy.client import Client, Spool
from anvil_mux.proxy.dispatch import Dispatcher, Patience
from anvil_mux.proxy.exchange import Relay
from anvil_mux.proxy.local import PAGES, Local
from anvil_mux.proxy.question import Questions, StoredResponses, heed_hint
from anvil_mux.proxy.reply import Capture, Reply
from anvil_mux.telemetry.accesslog import Served, Sink

NO_REQUEST = http1.Request(
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
    """Answers requests. Any thread."""

    def __init__(
        self,
        config: Config,
        keys: Keyring,
        mux: Multiplexer,
        relay: Relay,
        local: Local,
        *,
        records: Sink,
        only_local_hosts: bool,
        patience: Patience | None = None,
    ) -> None:
        """``only_local_hosts``: bound to loopback, so that any other Host is a web page named to mean this
        machine."""
        self._mux = mux
        self._records = records
        self._ids = map((secrets.token_hex(5) + "-%x").__mod__, itertools.count(1))
        self._access = Access(config, keys, only_local_hosts=only_local_hosts)
        self.local = local
        stored = StoredResponses()
        self._questions = Questions(mux, stored)
        self._dispatcher = Dispatcher(mux, relay, stored, patience)

    def reconfigure(self, config: Config, keys: Keyring) -> None:
        """Answer requests by this from now on, also those of connections that are open already."""
        before = self._access
        if keys is not before.keys:
            before.keys.give_way(keys)
        self._access = Access(config, keys, only_local_hosts=before.only_local_hosts)
        self.local.captures.resize(config.capture)

    def serve(self, client: Client, request: http1.Request) -> bool:
        """Answers one request; False if the connection must be closed after it."""
        given = request.fields.get(b"x-request-id")
        id = next(self._ids) if given is None else api.request_id(given, self._ids.__next__)
        access = self._access
        context = access.context(id, time.monotonic(), request, at_pages=client.at_pages)
        record = Served(id, client.address, request.method, request.path)
        reply = Reply(client, context, record, keep=request.keep_alive and not self.local.probes.draining)
        row = None
        if context.route is api.NO_ROUTE:
            row = PAGES if client.at_pages else self.local.find(request.method, request.path)
            record.route = row.route
        try:
            if key := access.check(context, row.right if row else ANY_KEY):
                context = reply.context = replace(context, key=key)
            if row:
                heed_hint(self._mux, context)
                self.local.answer(row, reply)
            elif key and key.requests is not None:
                with self._mux.counts.under_way(key):
                    self._ask_engine(reply)
            else:
                self._ask_engine(reply)
        except ClientGone as gone:
            reply.left(gone)
        except Unauthorized as error:
            reply.refuse(error, [(b"WWW-Authenticate", b'%b realm="anvil-mux"' % challenge(request))])
        except MuxError as error:
            reply.refuse(error)
        except Exception:
            log.exception("request %s failed", id)
            reply.refuse(MuxError("Internal error in anvil-mux; its log says more."))
        self._end(reply)
        return reply.keep

    def _ask_engine(self, reply: Reply) -> None:
        context, record = reply.context, reply.record
        question = self._questions.read(context, reply.client)
        record.model, record.preset = question.target.model, question.target.preset
        record.stream = question.stream
        if context.access.config.capture:
            reply.capture = Capture(question.body)
        try:
            self._dispatcher.answer(question, reply)
        finally:
            if isinstance(question.body, Spool):
                question.body.close()

    def refuse_bad_head(self, client: Client, error: MuxError) -> None:
        """Answers something that could not be read as a request."""
        id = next(self._ids)
        context = self._access.context(id, time.monotonic(), NO_REQUEST)
        reply = Reply(client, context, Served(id, client.address, "-", ""), keep=False)
        reply.refuse(error)
        self._end(reply)

    def _end(self, reply: Reply) -> None:
        """Hand the record on, which is whole now."""
        context, record = reply.context, reply.record
        record.ended, record.seconds = time.time(), time.monotonic() - context.since
        if context.key:
            record.key = context.key.name
        record.said = record.said[-api.USAGE_BYTES :]
        if not record.said:
            record.foreseen = None
        if reply.capture:
            self.local.captures.keep(reply.capture, context.request, record)
        self._records.add(record)
