"""What each request gets: an answer from memory, an error, or the way to an engine (inference.py).

``Gateway.serve`` runs in the connection's thread and returns whether another request may follow on it.
Probes, the list of models and the state of the system are answered from memory, whatever Docker and the
engines are doing, and load nothing.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote

from anvil_mux import __version__, api, http1
from anvil_mux.accesslog import Sink
from anvil_mux.client import Client
from anvil_mux.config import Config
from anvil_mux.console import Console
from anvil_mux.errors import BadRequest, ClientGone, MuxError, NotFound
from anvil_mux.feed import Feed
from anvil_mux.gpu import Stranger
from anvil_mux.http1 import Field
from anvil_mux.inference import JSON, Call, Inference, Patience
from anvil_mux.lookout import Seen, Sight
from anvil_mux.multiplexer import BackendState, Deferral, GpuState, ModelState, Multiplexer
from anvil_mux.progress import Progress
from anvil_mux.relay import Relay

TEXT = (b"Content-Type", b"text/plain; charset=utf-8")

Answer = tuple[int, Field, bytes]
"""Status, Content-Type and body."""

log = logging.getLogger(__name__)


class Gateway:
    """Answers requests. Any thread; the server alone writes ``only_local_hosts`` and calls ``drain``."""

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
    ) -> None:
        self._mux = mux
        self._inference = Inference(config, mux, relay, patience or Patience(grace=config.loading_grace))
        self._records = records
        self._metrics = metrics
        self._sight = sight
        """What the GPUs hold, from memory."""
        self._checks = checks or {}
        """name -> what is wrong with it, from memory; nothing when it is well."""
        self._ids = map((secrets.token_hex(5) + "-%x").__mod__, itertools.count(1))
        self._started = time.time()
        self._local: dict[str, Callable[[http1.Request], Answer]] = {
            "/": self._hello,
            "/health": lambda _: (200, TEXT, b"OK\n"),
            "/healthz": self._healthz,
            "/livez": lambda _: (200, TEXT, b"ok\n"),
            "/metrics": self._scrape,
            "/models": self._models,
            "/readyz": self._readyz,
            "/v1/models": self._models,
        }
        self._admin: dict[str, Callable[[Call], None]] = {
            "/lines/cancel": lambda call: self._console.cancel(call, self._asked(call)),
            "/models/load": self._load,
            "/models/unload": self._unload,
        }
        self._feed = feed or Feed()
        self._console = Console(mux, self._feed, state=self._state, tail=tail)
        self._streams: dict[str, Callable[[Call], None]] = {
            "/events": self._console.events,
            "/logs": self._console.logs,
            "/why": self._console.why,
        }
        self.draining = False
        self.only_local_hosts = False
        """Bound to loopback: any other Host is a web page whose name was made to mean this machine."""

    def drain(self) -> None:
        """The program ends: from now on every answer is the last of its connection."""
        self.draining = True
        self._feed.close()

    def serve(self, client: Client, request: http1.Request) -> bool:
        """Answers one request; False if the connection must be closed after it."""
        given = request.fields.get(b"x-request-id")
        request_id = next(self._ids) if given is None else api.request_id(given, self._ids.__next__)
        call = Call(client, request, request_id, keep=request.keep_alive and not self.draining)
        try:
            route = request.route or self._find_route(call)
            if isinstance(route, api.Route):
                self._inference.infer(call, route)
            else:
                self._answer_here(call)
        except ClientGone as gone:
            call.keep, call.status, call.code = False, gone.status, gone.code
        except MuxError as error:
            call.refuse(error, [])
        except Exception:
            log.exception("request %s failed", request_id)
            call.refuse(MuxError("anvil-mux made a mistake; its log says more."), [])
        self._records.add(call.record())
        return call.keep

    def refuse_unread(self, client: Client, error: MuxError) -> None:
        """Answers something that could not be read as a request."""
        request = http1.Request("-", b"", "", "", (1, 1), [], {}, False, None, False, False)
        call = Call(client, request, next(self._ids), keep=False)
        call.refuse(error, [])
        self._records.add(call.record())

    def _find_route(self, call: Call) -> api.Route | None:
        """Where to forward the request, if anywhere; noted, because it is found in nothing but the head."""
        request = call.request
        route = api.match(request.method, request.path)
        call.api = route.api if route else api.api_of(request.path)
        self._check_origin(request)
        request.route = route
        return route

    def _check_origin(self, request: http1.Request) -> None:
        host = request.fields.get(b"host", b"")
        if self.only_local_hosts and not _is_local(host):
            name = host.decode("latin-1")
            raise BadRequest(
                f"this address answers only for localhost, not for the host {name!r}", status=403
            )
        origin = request.fields.get(b"origin")
        if origin is not None and request.method == "POST" and origin.partition(b"://")[2] != host:
            raise BadRequest("requests from other web sites are not accepted", status=403)

    def _answer_here(self, call: Call) -> None:
        method, path = call.request.method, call.request.path
        admin, local = self._admin.get(path), self._local.get(path)
        if local is None and path.startswith("/v1/models/"):
            local = self._model
        if method == "OPTIONS":
            call.send_own(204, [(b"Allow", self._allowed(path))], b"")
        elif method == "POST" and admin:
            admin(call)
        elif method == "GET" and path in self._streams:
            self._streams[path](call)
        elif method == "GET" and path == "/" and b"text/html" in call.request.fields.get(b"accept", b""):
            self._console.page(call)
        elif method in ("GET", "HEAD") and local:
            status, kind, body = local(call.request)
            call.send_own(status, [kind, (b"Cache-Control", b"no-store")], body)
        elif admin or local or path in self._streams:
            allow = self._allowed(path)
            error = BadRequest(f"{path} takes {allow.decode()}, not {method}", status=405)
            call.refuse(error, [(b"Allow", allow)])
        else:
            call.refuse(*api.no_route(method, path))

    def _allowed(self, path: str) -> bytes:
        allowed = [method for method in ("GET", "POST") if api.match(method, path)]
        if path in self._local or path.startswith("/v1/models/"):
            allowed += ["GET", "HEAD"]
        if path in self._streams:
            allowed.append("GET")
        if path in self._admin:
            allowed.append("POST")
        if not allowed:
            raise NotFound(f"There is no route {path}.")
        return ", ".join([*allowed, "OPTIONS"]).encode("ascii")

    # From memory

    def _hello(self, _: http1.Request) -> Answer:
        lines = (f"  {model.model}  {model.state}\n" for model in self._mux.status().models)
        text = f"anvil-mux {__version__}\n\nmodels:\n{''.join(lines)}\nstate: /healthz  metrics: /metrics\n"
        return 200, TEXT, text.encode()

    def _problems(self) -> dict[str, str]:
        found = {name: check() for name, check in self._checks.items()}
        found["accepting"] = "shutting down" if self.draining else ""
        return found

    def _readyz(self, request: http1.Request) -> Answer:
        problems = self._problems()
        ready = not any(problems.values())
        text = "ok\n" if ready else "not ready\n"
        if not ready or "verbose" in request.query.split("&"):
            lines = (f"[{'-' if why else '+'}]{name} {why or 'ok'}\n" for name, why in problems.items())
            text = "".join(lines) + text
        return 200 if ready else 503, TEXT, text.encode()

    def _healthz(self, _: http1.Request) -> Answer:
        state = self._state()
        status = 503 if state["problems"] else 200
        return status, JSON, json.dumps(state, indent=1).encode("ascii") + b"\n"

    def _state(self) -> dict[str, Any]:
        status = self._mux.status()
        problems = {name: why for name, why in self._problems().items() if why}
        ready = [model.model for model in status.models if model.state == "ready"]
        sight = self._sight()
        return {
            "status": "unhealthy" if problems else "ok",
            "version": __version__,
            "uptime_seconds": round(time.time() - self._started, 1),
            "problems": problems,
            "waiting": status.waiting,
            "leases": status.leases,
            "models": {model.model: _model_state(model) for model in status.models},
            "gpus": {gpu.gpu: _gpu_state(gpu, sight.get(gpu.gpu, Seen())) for gpu in status.gpus},
            "resident": ready[0] if ready else None,
            "registry": [model.model for model in status.models],
        }

    def _entry(self, model: ModelState) -> dict[str, object]:
        return api.model_entry(
            model.model, created=int(self._started), state=model.state, aliases=model.aliases
        )

    def _scrape(self, request: http1.Request) -> Answer:
        content_type, text = self._metrics(request.fields.get(b"accept", b"").decode("latin-1"))
        return 200, (b"Content-Type", content_type.encode("ascii")), text

    def _models(self, _: http1.Request) -> Answer:
        return 200, JSON, api.models_list(map(self._entry, self._mux.status().models))

    def _model(self, request: http1.Request) -> Answer:
        wanted = self._mux.resolve(unquote(request.path[len("/v1/models/") :]))
        found = next(model for model in self._mux.status().models if model.model == wanted)
        return 200, JSON, json.dumps(self._entry(found)).encode("ascii")

    # Loading and unloading by hand

    def _load(self, call: Call) -> None:
        self._mux.load(self._named(call), lambda now: call.stay())
        call.send_own(200, [JSON], b'{"success":true}')

    def _unload(self, call: Call) -> None:
        self._mux.unload(self._named(call))
        call.send_own(200, [JSON], b'{"success":true}')

    def _asked(self, call: Call) -> dict[str, Any]:
        try:
            asked = json.loads(self._inference.read_json(call))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}", param="body") from None
        if not isinstance(asked, dict):
            raise BadRequest("the body must be a JSON object", param="body")
        return asked

    def _named(self, call: Call) -> str:
        name, _ = api.model_and_stream(self._inference.read_json(call))
        if name is None:
            raise BadRequest("the body must name a `model`", param="model")
        call.model = self._mux.resolve(name)
        return call.model


def _model_state(model: ModelState) -> dict[str, object]:
    return {
        "state": model.state,
        "backend": model.backend,
        "gpus": list(model.gpus),
        "waiting": model.waiting,
        "oldest_wait_seconds": _rounded(model.oldest_wait),
        "leases": model.leases,
        "draining": _draining(model),
        "deferred": _deferral(model.deferred) if model.deferred else None,
        "last_error": model.last_error or None,
        "load_seconds": model.load_seconds,
        "progress": _progress(model.progress),
        "backends": {backend.backend: _backend_state(backend) for backend in model.backends},
    }


def _progress(progress: Progress | None) -> dict[str, object] | None:
    if progress is None:
        return None
    fraction, left, stage = progress
    return {
        "fraction": None if fraction is None else round(fraction, 2),
        "seconds_left": None if left is None else round(left, 1),
        "stage": stage,
        "words": progress.words,
    }


def _draining(model: ModelState) -> dict[str, object] | None:
    if model.draining_target is None:
        return None
    left = _rounded(model.drain_seconds_left)
    return {"target": model.draining_target or None, "leases": model.leases, "seconds_left": left}


def _deferral(deferral: Deferral) -> dict[str, object]:
    return {"seconds_left": _rounded(deferral.seconds_left), "reason": deferral.reason}


def _backend_state(backend: BackendState) -> dict[str, object]:
    return {
        "state": backend.state,
        "state_seconds": _rounded(backend.state_seconds),
        "gpus": list(backend.gpus),
        "leases": backend.leases,
        "rests": backend.rests or None,
        "idle_seconds": _rounded(backend.idle_seconds),
        "load_seconds": backend.load_seconds,
        "retry_seconds": _rounded(backend.retry_seconds),
        "error": backend.error or None,
        "log": list(backend.log),
    }


def _rounded(seconds: float | None) -> float | None:
    """JSON knows no infinity: without an end is null, like unknown."""
    return None if seconds is None or math.isinf(seconds) else round(seconds, 1)


def _gpu_state(gpu: GpuState, seen: Seen) -> dict[str, object]:
    draining = {
        "target": gpu.draining_target or None,
        "leases": gpu.draining_leases,
        "seconds_left": round(gpu.drain_seconds_left, 1),
    }
    return {
        "resident": gpu.residents[0] if gpu.residents else None,
        "residents": list(gpu.residents),
        "state": gpu.state,
        "draining": draining if gpu.state == "draining" else None,
        "used": seen.used,
        "total": gpu.total if seen.total is None else seen.total,
        "reserve": gpu.reserve,
        "users": dict(seen.users),
        "strangers": [_stranger(each) for each in seen.strangers],
        "residuals": dict(gpu.residuals),
        "reserved_for": list(gpu.reserved_for),
    }


def _stranger(stranger: Stranger) -> dict[str, object]:
    return {
        "pid": stranger.pid,
        "name": stranger.command,
        "bytes": stranger.used,
        "container": stranger.container or None,
    }


@lru_cache(maxsize=256)
def _is_local(host: bytes) -> bool:
    """``host`` (with or without a port) can only mean this machine."""
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
