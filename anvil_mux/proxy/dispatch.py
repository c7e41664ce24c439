"""One request for a model: which one that is, its lease, and another lease where the first came to nothing.

``Dispatcher.infer`` reads the body, finds the model's name, leases a backend and has the request delivered to
its engine (forward.py). Four things may come between:

* The model is not resident. The thread waits in the line and looks at its client a few times a second
  (``Waiting.tend``). A stream is begun after a grace, with comment lines as keep-alive; from then on every
  failure is an event in the stream. Any other request is silent until shortly before its client gives up.
* The engine ends before a byte, or nothing could be sent to it. The request tries once more on a new lease.
  Where the model has other replicas, a request of which the client has seen nothing moves to one of them
  also if its engine was evicted, or ended within what only we had read. Any other failure is its own.
* Its model has backends for prefill and for decode. Both are leased together: the one computes the prompt,
  then the other is asked what the client asked. What goes wrong before, the client has not seen.
* The answer breaks off: the engine died, was silent for too long, or was evicted when the drain ended. The
  client gets an error event of its API and then the connection is cut, never a clean end.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

from anvil_mux.config.config import EITHER, Backend, Config
from anvil_mux.config.keys import Key
from anvil_mux.errors import (
    BadRequest,
    MuxError,
    NotFound,
    Severed,
    UnknownModel,
)
from anvil_mux.host.engine import find_engine
from anvil_mux.multiplexer import NO_USAGE, Multiplexer
from anvil_mux.protocol import api, coding, http1, naming, ollama, stages
from anvil_mux.protocol.api import written
from anvil_mux.protocol.completions import finite, parse
from anvil_mux.proxy import stored_responses
from anvil_mux.proxy.forward import TRANSLATE, Body, Forwarder
from anvil_mux.proxy.relay import Failed, Relay, Unreachable
from anvil_mux.proxy.reply import JSON, Call, Patience, Waiting
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import StoredResponses
from anvil_mux.routing import prefix
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.group import MOST_CRASHES

SESSION = b"x-session-id"
"""The header by which a client says which conversation a request belongs to."""
EXPLAIN = b"x-anvil-explain"
"""The header of a request that is not to be sent on: where it would go, and why, is the answer."""


@dataclass(frozen=True, slots=True)
class _Passage:
    """What requests with one head that name one model come to, until the configuration changes."""

    model: str
    key: Key | None
    """Whose they are."""
    limited: Key | None
    """The same key, if it may have so many requests at once and no more."""
    replicas: int
    explains: bool
    """They are not to be sent on; where they would go is the answer."""
    loads: bool
    """Their model is loaded for them, if it is not."""
    unchanged_at: Backend | None
    """The backend that gets their bodies as they are, if any does."""


class Dispatcher:
    """Sends requests to engines. Any thread."""

    def __init__(
        self, config: Config, mux: Multiplexer, relay: Relay, patience: Patience, *, hides_keys: bool = False
    ) -> None:
        self._mux = mux
        self._answers = StoredResponses()
        self._forwarder = Forwarder(mux, relay, self._answers)
        self.reconfigure(config, patience, hides_keys=hides_keys)

    def reconfigure(self, config: Config, patience: Patience, *, hides_keys: bool) -> None:
        """By this requests are answered from now on. Each field is replaced as a whole."""
        self._config = config
        self._patience = patience
        names: dict[str, set[str]] = {}
        for name, model in config.names.items():
            names.setdefault(model, set()).add(name)
        self._names, self._models = names, config.names
        kinds = {(backend.model, backend.infer_type) for backend in config.backends}
        self._replicas = Counter(backend.model for backend in config.backends)
        self._staged = {model for model, kind in kinds if kind in ("prefill", EITHER)}
        """Models of which a request may be served in two stages."""
        self._forwarder.reconfigure(config, hides_keys=hides_keys)

    def infer(self, call: Call, route: api.Route) -> None:
        """Answers ``call`` from the engine of the model that it names."""
        call.route, call.api = route, route.api
        match route.model_in:
            case "json":
                body = self.read_json(call)
                if route.translated == "always":
                    self._infer_translated(call, body)
                else:
                    name, stream = naming.model_and_stream(body)
                    call.stream = stream and route.streams
                    self._send_on(call, name, body)
            case "session":
                body = self.read_json(call)
                name, span = naming.session_model(body)
                self._send_on(call, name, body, span)
            case "path":
                body = self.read_json(call)
                call.stream = naming.model_and_stream(body)[1] and route.streams
                model = self.resolve(call, api.model_in_path(call.request.path))
                self._send(call, self._passage(call, model), None, body)
            case "multipart":
                self._infer_from_form(call)
            case "query":
                self._infer_from_query(call)
            case "answer":
                self._ask_of_answer(call)
            case "upstream":
                self._send(call, self._passage(call, call.model), None, self._read(call))

    def pass_on(self, call: Call) -> None:
        """A request below /upstream/: for the engine of the model in its path, as it is.

        A GET loads no model: pages ask for their parts without anybody meaning it.
        """
        request = call.request
        for name, path in api.upstream(request.path):
            try:
                call.model = self.resolve(call, name)
            except UnknownModel:
                continue
            if not self._may_ask(call.model, request.method, path):
                raise NotFound(f"{request.method} {path} is not offered of the engine of {call.model}.")
            if request.method == "GET" and not self._is_loaded(call.model):
                raise BadRequest(f"{call.model} is not loaded, and a GET does not load it", status=409)
            return self.infer(call, api.Route("openai", "upstream", path=path))
        unknown: UnknownModel | None = None
        for name in api.upstream_names(request.path):
            try:
                self.resolve(call, name)
            except UnknownModel as error:
                unknown = unknown or error
            else:  # the path is at fault
                unknown = None
                break
        raise unknown or NotFound(f"{request.path} names no model and path: /upstream/MODEL/PATH.")

    def _is_loaded(self, model: str) -> bool:
        return any(seen.model == model and seen.state == "ready" for seen in self._mux.status().models)

    def _ask_of_answer(self, call: Call) -> None:
        """A request about an earlier answer: for the engine that has it, if that was not evict since."""
        id = api.answer_in_path(call.request.path)
        kept = self._answers.find(id, call.request.key)
        ready = [
            (model.model, backend.backend)
            for model in self._mux.status().models
            for backend in model.backends
            if backend.state == "ready"
        ]
        if kept is None or (kept.model, kept.backend) not in ready:
            raise NotFound(f"There is no answer {id}: it was never given, or its engine was evicted since.")
        call.work = Work(owner=kept.backend)
        self._send(call, self._passage(call, kept.model), None, self._read(call))

    def _may_ask(self, model: str, method: str, path: str) -> bool:
        backends = [backend for backend in self._config.backends if backend.model == model]
        return all(_offers(backend, method, path) for backend in backends)

    def _infer_translated(self, call: Call, body: bytes | bytearray) -> None:
        asked = call.translation = TRANSLATE[call.route.path](parse(body))
        call.stream = asked.stream and bool(asked.path)
        if asked.path or not asked.unloads:
            self._send_on(call, asked.model, body)
        else:
            call.model = self.resolve(call, asked.model)
            call.send_own(200, [JSON], asked.answer.whole(b"", time.time()))
        key = call.request.key
        if asked.unloads and (not isinstance(key, Key) or key.admin):
            self._mux.unload_idle(call.model)

    def read_json(self, call: Call) -> bytes | bytearray:
        """The body of a route that takes JSON."""
        request = call.request
        body = call.client.read_body(request, self._config.max_body)
        if b"content-encoding" in request.fields:
            body = self._unpacked(request, body)
        kind = request.fields.get(b"content-type", b"")
        if kind != b"application/json" and naming.media(kind, body) != "json":
            raise BadRequest("this route takes a JSON body (Content-Type: application/json)", status=415)
        return body

    def _read(self, call: Call) -> bytes | bytearray:
        """The body of any kind, in memory."""
        return self._unpacked(call.request, call.client.read_body(call.request, self._config.max_body))

    def _unpacked(self, request: http1.Request, body: bytes | bytearray) -> bytes | bytearray:
        packed = _coding(request)
        return coding.unpacked(body, packed, self._config.max_body) if packed else body

    def _infer_from_query(self, call: Call) -> None:
        request = call.request
        if call.route.upgrades and request.fields.get(b"upgrade", b"").lower() != b"websocket":
            raise BadRequest(f"{request.path} is a websocket", status=426)
        self._send_on(call, naming.model_in_query(request.query), b"")

    def _infer_from_form(self, call: Call) -> None:
        request, route = call.request, call.route
        kind = request.fields.get(b"content-type", b"")
        if _coding(request):
            raise BadRequest("a form must be sent as it is, without Content-Encoding", status=415)
        if naming.media(kind, b"") != "multipart":
            raise BadRequest("this route takes a form (Content-Type: multipart/form-data)", status=415)
        scanner = naming.MultipartModelScanner(naming.boundary(kind))
        with Spool() as spool:
            spool.fill(call.client.read_pieces(request, self._config.max_upload), scanner.feed)
            scanner.finish()
            call.stream = scanner.stream and route.streams
            self._send_on(call, scanner.model, spool, scanner.span)

    def _send_on(
        self, call: Call, named: str | None, body: Body, span: tuple[int, int] | None = None
    ) -> None:
        """``named``: the model's name within ``body``."""
        passages = call.request.passages
        passage = passages.get(named)
        if passage is None:
            passage = passages[named] = self._passage(call, self.resolve(call, named), named)
        self._send(call, passage, named, body, span)

    def _passage(self, call: Call, model: str, named: str | None = None) -> _Passage:
        shown, replicas = call.request.key, self._replicas[model]
        key = shown if isinstance(shown, Key) else None
        backend = next((each for each in self._config.backends if each.model == model), None)
        unchanged = (
            backend is not None
            and replicas == 1
            and (call.route.model_in, call.route.translated) == ("json", "")
            and named == (backend.served_model or model)
            and not (backend.strip or backend.set)
        )
        return _Passage(
            model,
            key=key,
            limited=key if key and key.requests is not None else None,
            replicas=replicas,
            explains=EXPLAIN in call.request.fields,
            loads=naming.may_load(call.request.query),
            unchanged_at=backend if unchanged else None,
        )

    def _send(
        self,
        call: Call,
        passage: _Passage,
        named: str | None,
        body: Body,
        span: tuple[int, int] | None = None,
    ) -> None:
        """``named``: the model's name within ``body``, if that need not be changed for every engine."""
        call.model = passage.model
        if not passage.loads and not self._is_loaded(call.model):
            raise BadRequest(f"{call.model} is not loaded, and autoload=false does not load it")
        if passage.limited:
            with self._mux.counted(passage.limited):
                return self._send_anywhere(call, passage, named, body, span)
        return self._send_anywhere(call, passage, named, body, span)

    def _send_anywhere(
        self, call: Call, passage: _Passage, named: str | None, body: Body, span: tuple[int, int] | None
    ) -> None:
        """To one backend of its model, and if that cannot be reached to another."""
        retries = passage.replicas
        if retries > 1:
            call.work = self._work(call, body)._replace(owner=self._owner(call, body))
        if passage.explains:
            return self._explain(call)
        asked = call.translation
        while True:
            try:
                return self._try(call, passage, named, body, span)
            except Unreachable:
                if not retries and len(call.crashes) < MOST_CRASHES:
                    raise
                retries -= 1
                call.translation = asked or call.translation  # without what a first stage may have added

    def _owner(self, call: Call, body: Body) -> str:
        """The replica that has the answer which a question refers to."""
        if call.route.beat != "responses" or isinstance(body, Spool):
            return call.work.owner
        kept = self._answers.find(stored_responses.previous(body), call.request.key)
        return kept.backend if kept else ""

    def _explain(self, call: Call) -> None:
        """Says which replica would get the request, and why, and sends it to none."""
        work = call.work
        about = {"tokens": work.tokens, "blocks": len(work.blocks), "session": work.session}
        stages = self._mux.explain(call.model, work, staged=self._in_stages(call))
        told = finite({"model": call.model, "request": about, "stages": stages})
        call.send_own(200, [JSON], written(told) + b"\n")

    def _in_stages(self, call: Call) -> bool:
        return call.model in self._staged and _stages(call)

    def _work(self, call: Call, body: Body) -> Work:
        """What the choice among replicas goes by."""
        session = call.request.fields.get(SESSION, b"").decode("ascii", "replace")[:256]
        per_token = self._mux.bytes_per_token(call.model)
        if isinstance(body, Spool):
            work = Work(tokens=round(len(body) / per_token), session=session)
        else:
            work = prefix.read(call.model, body, per_token, session)
        return work._replace(stream=call.stream)

    def resolve(self, call: Call, named: str | None) -> str:
        """The model that a client's name stands for, or that serves those who name none."""
        name = named or self._config.default_model
        if name is None:
            raise BadRequest("the request must name a `model`", param="model")
        key, model = call.request.key, self._models.get(name)
        if model is None and call.api == "ollama":
            model = self._models.get(name.removesuffix(ollama.LATEST))
        if model is None or not self.may_use(key, model):
            raise UnknownModel(name, [known for known in self._names if self.may_use(key, known)])
        return model

    def may_use(self, key: object, model: str) -> bool:
        """``key``: of a request; None where nobody is asked for one. Nobody uses one that is about to go."""
        names = self._names.get(model)
        if names is None:
            return False
        return not isinstance(key, Key) or key.models is None or not key.models.isdisjoint(names)

    def _try(
        self, call: Call, passage: _Passage, named: str | None, body: Body, span: tuple[int, int] | None
    ) -> None:
        staged = bool(self._staged) and self._in_stages(call)
        tend = partial(self._tend, call)
        asked = time.monotonic()
        try:
            lease = self._mux.lease(
                call.model, tend, call.work, key=passage.key, staged=staged, crashes=call.crashes
            )
        except MuxError:
            call.waited += time.monotonic() - asked
            raise
        whole = False
        try:  # as `with lease` does, in half the time
            call.waited += lease.waited
            backend = lease.backend
            call.backend = backend.name
            call.routed = f"{backend.name}; {lease.why}" if lease.why else ""
            call.foreseen = lease.foreseen if lease.why else None
            if lease.prefill:
                call.routed += f"; prefill by {lease.prefill.backend.name}"
                body = self._forwarder.prefill(call, lease.prefill, body)
            try:
                if backend is passage.unchanged_at:
                    self._forwarder.forward(call, lease, len(body), body)
                else:
                    self._forwarder.ask(call, lease, named, body, span)
                whole = not call.code
            except (Failed, Severed) as error:
                raise self._forwarder.judged(call, lease, error) from None
        finally:
            lease.release(whole=whole, usage=api.tokens_said(call.said)[1:] if lease.is_routed else NO_USAGE)

    def _tend(self, call: Call, now: float) -> None:
        if call.waiting is None:
            call.waiting = Waiting(call, self._patience, self._mux)
        call.waiting.tend(now)


def _stages(call: Call) -> bool:
    """Whether it can be served in two stages."""
    return call.path in stages.PATHS and call.route.model_in != "upstream"


def _offers(backend: Backend, method: str, path: str) -> bool:
    """``path`` may be asked for below /upstream/; what steers the engine never."""
    engine = find_engine(backend.engine)
    if engine.steers(path) or method not in ("GET", "POST"):
        return False
    route = api.match(method, path)
    if route and route.translated != "always" and not route.upgrades:
        return True
    listed = any(path == each or (each[-1] == "/" and path.startswith(each)) for each in backend.upstream)
    return listed or (method == "GET" and path in engine.shown)


def _coding(request: http1.Request) -> str:
    """How the body is compressed; empty for a plain one."""
    named = request.fields.get(b"content-encoding", b"identity").decode("latin-1").strip()
    return "" if named.lower() == "identity" else named or "(empty)"
