"""What each request gets: an answer from memory, an error, or the way to an engine (dispatch.py).

``Handler.serve`` runs in the connection's thread and returns whether another request may follow on it.
Probes, the list of models and the state of the system are answered from memory, whatever Docker and the
engines are doing, and load nothing.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote

from anvil_mux import __version__
from anvil_mux.config.config import Config
from anvil_mux.config.keys import Key, Keyring
from anvil_mux.errors import BadRequest, ClientGone, Forbidden, MuxError, NotFound, Unauthorized, UnknownModel
from anvil_mux.host.gpu_monitor import Seen, Sight
from anvil_mux.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1, ollama
from anvil_mux.protocol.completions import parse
from anvil_mux.protocol.http1 import Field
from anvil_mux.proxy.client import Client
from anvil_mux.proxy.dispatch import Dispatcher
from anvil_mux.proxy.operations import Operations
from anvil_mux.proxy.page import Page
from anvil_mux.proxy.relay import Relay
from anvil_mux.proxy.reloads import Reloads, as_json
from anvil_mux.proxy.reply import JSON, Call, Patience
from anvil_mux.scheduler.status import ModelState
from anvil_mux.telemetry import healthz
from anvil_mux.telemetry.accesslog import Sink
from anvil_mux.telemetry.feed import Feed

OPEN = frozenset(["/api/hello", "/health", "/livez", "/readyz"])
"""Answered without a key: they tell nothing."""
LISTS = re.compile(r"/v1/models(/.*)?|/models|/models/sse|/api/(v0/models|tags|ps|show|version)|/upstream/.*")
"""Answered to every key, as far as its models go."""
STATE = frozenset(["/", "/events", "/healthz", "/metrics", "/why"])
TEXT = (b"Content-Type", b"text/plain; charset=utf-8")

Answer = tuple[int, Field, bytes]
"""Status, Content-Type and body."""

log = logging.getLogger(__name__)


class Handler:
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
        keys: Keyring | None = None,
        reloads: Reloads | None = None,
    ) -> None:
        self._mux = mux
        self._reloads = reloads
        self._take(config, keys)
        self._dispatcher = Dispatcher(
            config,
            mux,
            relay,
            patience or Patience(grace=config.loading_grace),
            hides_keys=len(self._keys) > 0,
        )
        self._router = Operations(mux, self._dispatcher, lambda: self.draining)
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
            "/api/hello": lambda _: (200, TEXT, b"anvil-mux\n"),
            "/api/ps": self._ollama_running,
            "/api/tags": self._ollama_tags,
            "/api/v0/models": self._lmstudio_models,
            "/api/version": lambda _: (200, JSON, ollama.version()),
            "/models": self._models,
            "/readyz": self._readyz,
            "/v1/models": self._models,
            "/v1/models/": self._models,
        }
        self._admin: dict[str, Callable[[Call], None]] = {
            "/api/show": self._ollama_show,
            "/lines/cancel": lambda call: self._page.cancel(call, parse(self._dispatcher.read_json(call))),
            "/models/load": self._router.load,
            "/models/pin": self._router.pin,
            "/models/unload": self._router.unload,
            "/models/unpin": self._router.unpin,
        }
        self._feed = feed or Feed()
        self._page = Page(mux, self._feed, state=self._state, tail=tail)
        self._streams: dict[str, Callable[[Call], None]] = {
            "/events": self._page.events,
            "/logs": self._page.logs,
            "/models/sse": self._router.follow,
            "/why": self._page.why,
        }
        if reloads:
            self._admin["/reload"] = lambda call: self._reload(call, reloads)
        self.draining = False
        self.only_local_hosts = False
        """Bound to loopback: any other Host is a web page whose name was made to mean this machine."""

    def _take(self, config: Config, keys: Keyring | None) -> None:
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._readers = frozenset(origin.encode("ascii") for origin in config.cors)
        self._backends = config.backends
        self._keys = keys or Keyring()  # last: by it requests tell whether what they remember is of now

    def reconfigure(self, config: Config, keys: Keyring) -> None:
        """By these requests are answered from now on, also those of connections that are open already."""
        self._dispatcher.reconfigure(config, Patience(grace=config.loading_grace), hides_keys=len(keys) > 0)
        self._take(config, keys)  # last: with another keyring, what was found for a head is found anew

    def drain(self) -> None:
        """The program ends: from now on every answer is the last of its connection."""
        self.draining = True
        self._feed.close()

    def serve(self, client: Client, request: http1.Request) -> bool:
        """Answers one request; False if the connection must be closed after it."""
        given = request.fields.get(b"x-request-id")
        request_id = next(self._ids) if given is None else api.request_id(given, self._ids.__next__)
        call = Call(client, request, request_id, request.keep_alive and not self.draining)
        try:
            route = request.route if request.judge is self._keys else None
            route = route or self._find_route(call)
            if isinstance(route, api.Route):
                self._dispatcher.infer(call, route)
            else:
                self._answer_here(call)
        except ClientGone as gone:
            call.keep, call.status, call.code = False, gone.status, gone.code
        except Unauthorized as error:
            call.refuse(error, [(b"WWW-Authenticate", b'Basic realm="anvil-mux"')])
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
        call = Call(client, request, next(self._ids), False)
        call.refuse(error, [])
        self._records.add(call.record())

    def _find_route(self, call: Call) -> api.Route | None:
        """Where to forward the request, if anywhere; noted, because it is found in nothing but the head."""
        request, keys = call.request, self._keys  # first: whatever of a reload comes later, it is found anew
        route = api.match(request.method, request.path)
        call.api = route.api if route else api.api_of(request.path)
        self._check_origin(request, loads=route is not None and route.model_in == "query")
        request.key = None
        if keys and request.path not in OPEN and not _is_preflight(request):
            key = request.key = keys.of(request.fields)
            if route is None and not _may(key, request.path):
                raise Forbidden("this API key is for models, not for this")
        request.route, request.judge, request.passages = route, keys, {}
        if request.prepared:
            request.prepared.clear()
        return route

    def _check_origin(self, request: http1.Request, *, loads: bool) -> None:
        """``loads``: a GET that loads a model, as no other does."""
        host = request.fields.get(b"host", b"")
        if (self.only_local_hosts or self._hosts) and not _is_local(host):
            name = host.decode("latin-1")
            if _name_in(name) not in self._hosts:
                text = f"this address does not answer for the host {name!r}; see the setting `hosts`"
                raise BadRequest(text, status=403)
        origin = request.fields.get(b"origin")
        request.reader = origin if origin is not None and origin in self._readers else b""
        acts = loads or request.method not in ("GET", "HEAD", "OPTIONS") or b"upgrade" in request.fields
        if acts and not request.reader and _is_of_another_site(request, host):
            raise BadRequest("requests from other web sites are not accepted", status=403)

    def _answer_here(self, call: Call) -> None:
        method, path = call.request.method, call.request.path
        admin, local = self._admin.get(path), self._local.get(path)
        if local is None and path.startswith("/v1/models/"):
            local = self._model
        if method == "OPTIONS":
            allowed = self._allowed(path)
            call.send_own(204, [(b"Allow", allowed), *_preflight(call.request, allowed)], b"")
        elif method == "POST" and admin:
            admin(call)
        elif method == "GET" and path in self._streams:
            self._streams[path](call)
        elif method == "GET" and path == "/" and b"text/html" in call.request.fields.get(b"accept", b""):
            self._page.page(call)
        elif method in ("GET", "HEAD") and local:
            status, kind, body = local(call.request)
            call.send_own(status, [kind, (b"Cache-Control", b"no-store")], body)
        elif admin or local or path in self._streams:
            allow = self._allowed(path)
            error = BadRequest(f"{path} takes {allow.decode()}, not {method}", status=405)
            call.refuse(error, [(b"Allow", allow)])
        elif path.startswith("/upstream/"):
            self._dispatcher.pass_on(call)
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
        unseen = ", ".join(self._mux.unseen)
        adoption = unseen and f"it is not known yet whether these run already: {unseen}"
        problems = {**self._problems(), "adoption": adoption}
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
            "adopting": self._mux.unseen,
            "waiting": status.waiting,
            "leases": status.leases,
            "models": {model.model: healthz.model_state(model) for model in status.models},
            "gpus": {gpu.gpu: healthz.gpu_state(gpu, sight.get(gpu.gpu, Seen())) for gpu in status.gpus},
            "resident": ready[0] if ready else None,
            "registry": [model.model for model in status.models],
            "reload": self._reloads.told() if self._reloads else None,
        }

    def _reload(self, call: Call, reloads: Reloads) -> None:
        told = json.dumps(as_json(reloads.reload())).encode("ascii")
        call.send_own(200, [JSON, (b"Cache-Control", b"no-store")], told + b"\n")

    def _entry(self, model: ModelState) -> dict[str, object]:
        return api.model_entry(
            model.model,
            created=int(self._started),
            state=model.state,
            aliases=model.aliases,
            failed=bool(model.last_error),
        )

    def _scrape(self, request: http1.Request) -> Answer:
        content_type, text = self._metrics(request.fields.get(b"accept", b"").decode("latin-1"))
        return 200, (b"Content-Type", content_type.encode("ascii")), text

    def _visible(self, request: http1.Request) -> list[ModelState]:
        """The models that the request's key may use."""
        return [
            model for model in self._mux.status().models if self._dispatcher.may_use(request.key, model.model)
        ]

    def _models(self, request: http1.Request) -> Answer:
        return 200, JSON, api.models_list(map(self._entry, self._visible(request)))

    def _lmstudio_models(self, request: http1.Request) -> Answer:
        return 200, JSON, api.lmstudio_list({m.model: m.state for m in self._visible(request)})

    def _model(self, request: http1.Request) -> Answer:
        name = unquote(request.path[len("/v1/models/") :])
        visible = self._visible(request)
        found = next((model for model in visible if name in (model.model, *model.aliases)), None)
        if found is None:
            raise UnknownModel(name, [model.model for model in visible])
        return 200, JSON, json.dumps(self._entry(found)).encode("ascii")

    def _ollama_tags(self, request: http1.Request) -> Answer:
        return 200, JSON, ollama.tags([model.model for model in self._visible(request)], self._started)

    def _ollama_running(self, request: http1.Request) -> Answer:
        resident = [m for m in self._visible(request) if m.state in ("ready", "draining")]
        ttls = {backend.name: backend.ttl for backend in self._backends}
        return 200, JSON, ollama.running({m.model: ttls.get(m.backend) for m in resident}, time.time())

    def _ollama_show(self, call: Call) -> None:
        name = ollama.name_in(parse(self._dispatcher.read_json(call)))
        call.model = self._dispatcher.resolve(call, name)
        call.send_own(200, [JSON], ollama.show(call.model, self._started))


def _may(key: Key, path: str) -> bool:
    """Whether ``key`` may ask for something that is answered here."""
    return key.admin or LISTS.fullmatch(path) is not None or (key.state and path in STATE)


def _is_of_another_site(request: http1.Request, host: bytes) -> bool:
    """A browser sends it for a page from elsewhere. For an image there it sends no Origin."""
    origin = request.fields.get(b"origin")
    if origin is not None:
        return origin.partition(b"://")[2] != host
    return request.fields.get(b"sec-fetch-site") in (b"cross-site", b"same-site")


def _is_preflight(request: http1.Request) -> bool:
    """A browser's question, before its page's, from a site whose pages may use this; it shows no key."""
    asks = b"access-control-request-method" in request.fields
    return request.method == "OPTIONS" and bool(request.reader) and asks


def _preflight(request: http1.Request, methods: bytes) -> list[Field]:
    if not _is_preflight(request):
        return []
    wanted = request.fields.get(b"access-control-request-headers", b"")
    headers = [(b"Access-Control-Allow-Headers", wanted)] if wanted else []
    return [(b"Access-Control-Allow-Methods", methods), *headers, (b"Access-Control-Max-Age", b"600")]


def _name_in(host: str) -> str:
    """A Host header without its port."""
    host = host.lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


@lru_cache(maxsize=256)
def _is_local(host: bytes) -> bool:
    """``host`` (with or without a port) can only mean this machine."""
    name = _name_in(host.decode("latin-1"))
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
