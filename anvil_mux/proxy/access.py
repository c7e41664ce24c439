"""The rights of requests under one configuration: hosts, origins, API keys and the models of each.

``context`` finds what a head asks for and never refuses, so that a refusal has the shape of the API that was
asked; ``check`` refuses. Both look at nothing but the head and the configuration, so what they find holds for
every request with the same head.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal, NamedTuple
from urllib.parse import quote

from anvil_mux.config.config import EITHER, Backend, Config, models_by_name
from anvil_mux.config.keys import Key, Keyring
from anvil_mux.config.values import Preset, Rule, names_in
from anvil_mux.errors import BadRequest, Forbidden, Moved, UnknownModel
from anvil_mux.protocol import api, http1, ollama
from anvil_mux.protocol.http1 import Field

Right = Literal["none", "any key", "state", "admin"]
"""The right that an API key needs for a route of our own."""
NO_KEY: Right = "none"
"""The right for routes that tell that the program lives, and whether it is ready: none."""
ANY_KEY: Right = "any key"
"""The right for routes that tell every key of its models."""
STATE: Right = "state"
ADMIN: Right = "admin"
UPSTREAM = api.Route("openai", "upstream")
"""The route below /upstream/: for the engine of a model, as it is."""


MAX_ORIGIN = 200
"""Characters of an origin that an error repeats."""


class Named(NamedTuple):
    """The meaning of a client's name: a model, or several of which any is to serve."""

    model: str
    preset: str = ""
    """The preset of it that is meant, if one is."""
    rules: tuple[Rule, ...] = ()
    """The rules by which another may be meant instead; (): there is no choice."""
    swaps: bool = True
    """Whether one of their models is loaded if none is resident."""


@dataclass(slots=True)
class RequestContext:
    """A request's head, and what was found in nothing but that, under one configuration. Never altered.

    (Frozen ones take three times as long to make, and to read a tuple's field twice as long as a slot.)
    """

    id: str
    since: float
    """When its head had been read."""
    request: http1.Request
    access: Access
    """The configuration that it came under; it holds until the request's end."""
    route: api.Route
    """``api.NO_ROUTE`` for what is answered here."""
    api: str
    """The API in whose shapes it is answered."""
    reader: bytes
    """The origin of another site's page that may read the answer."""
    key: Key | None = None
    """The key that it shows; None where nobody is asked for one."""
    shows_pages: bool = False
    """Whether what engines answer may be a page whose scripts run at the address that was asked."""

    @property
    def shares(self) -> bool:
        """Whether there are other keys than its own."""
        return len(self.access.keys) > 1

    @property
    def reads_logs(self) -> bool:
        """Whether the client may read engines' logs, which contain prompts of other clients."""
        return self.key.admin if self.key else not self.access.hides_keys

    @property
    def may_go_on(self) -> bool:
        """Whether a reload has left its key as it was: what has no end of its own ends otherwise."""
        return self.access.keys.admits(self.key)


class FallbackStep(NamedTuple):
    """A model that a request is sent to, if those before it could not serve it."""

    model: str
    after: float | None
    """Seconds that it may wait there before the next model is tried; None: as long as any request."""


FallbackChain = tuple[FallbackStep, ...]
"""The models that a request is sent to, in order: the one that it asked for, and its fallbacks."""


class Access:
    """One configuration, as requests meet it. Never altered, but for ``lacking``: another takes its place."""

    def __init__(self, config: Config, keys: Keyring, *, only_local_hosts: bool, instance: str = "") -> None:
        """``only_local_hosts``: bound to loopback, so that any other Host is a web page whose name was made
        to mean this machine. ``instance``: the id of this anvil-mux in the way of requests."""
        self.instance = instance
        self.config = config
        self.keys = keys
        self.hides_keys = len(keys) > 0
        """Clients' keys are ours, so that engines get their own instead."""
        self.only_local_hosts = only_local_hosts
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._readers = frozenset(origin.encode("ascii") for origin in config.cors)
        self.presets = presets_of(config.backends)
        self.meant = {
            name: Named(model, name if name in self.presets else "") for name, model in config.names.items()
        }
        """Name of a model, or of a preset -> its meaning."""
        patterns = [alias for each in config.backends for alias in each.aliases if "*" in alias]
        self._patterns = sorted(dict.fromkeys(patterns), key=len, reverse=True)
        """The aliases that stand for many names, the longest first."""
        self.changes_prompt = frozenset(p.name for p in self.presets.values() if p.system or p.is_adapter)
        """The presets whose prompts an engine caches apart from those of their model."""
        self._names: dict[str, set[str]] = {}
        """Model -> its names, but for those of presets."""
        for name, meant in self.meant.items():
            names = self._names.setdefault(meant.model, set())
            if not meant.preset:
                names.add(name)
        self.replicas: Mapping[str, int] = Counter(backend.model for backend in config.backends)
        self.only = {each.model: each for each in config.backends if self.replicas[each.model] == 1}
        """Model -> its backend, where it has but one."""
        self.unchanged = {
            model: each.served_model or model for model, each in self.only.items() if not each.is_rewriting
        }
        """Model -> the name with which a body goes to its only backend as it is, if any does."""
        self.staged = frozenset(b.model for b in config.backends if b.infer_type in ("prefill", EITHER))
        """Models of which a request may be served in two stages."""
        self.has_external = any(backend.url for backend in config.backends)
        """Whether a request may reach a server that has more models than the configuration says."""
        self._chains = chains(config.backends)
        self.lacking: set[tuple[str, str]] = set()
        """The (backend, path) of routes that engines turned out not to have. Changed by atomic operations."""

    def context(
        self,
        id: str,
        since: float,
        request: http1.Request,
        *,
        at_pages: bool = False,
        key: Key | None = None,
    ) -> RequestContext:
        """The meaning of a request's head. ``at_pages``: it came to the port that is for pages of engines.
        ``key``: the one that it shows, once that was checked.

        A script could read at another port what the status page keeps of a key, and use it. Where there are
        no keys it may do no more than any program on the machine.
        """
        path = request.path
        route = None if at_pages else api.match(request.method, path)
        if route is None and path.startswith("/upstream/") and request.method != "OPTIONS":
            route = UPSTREAM
        origin = request.fields.get(b"origin")
        reader = origin if origin is not None and origin in self._readers else b""
        return RequestContext(
            *(id, since, request, self),
            route=route or api.NO_ROUTE,
            api=route.api if route else api.api_of(path),
            reader=reader,
            key=key,
            shows_pages=at_pages or not self.hides_keys,
        )

    def check(self, context: RequestContext, needed: Right) -> Key | None:
        """The key that a request shows, if anybody is asked for one; BadRequest, Unauthorized, Forbidden."""
        request, route, reader = context.request, context.route, context.reader
        self._check_origin(request, route, reader)
        if route is UPSTREAM and not context.shows_pages and self.config.pages_port and is_opened(request):
            raise Moved("Pages of engines have a port of their own", self._at_pages(request))
        if not self.hides_keys:
            return None
        if needed == NO_KEY or is_page(request) or is_preflight(request, reader):
            return self.keys.find(request.fields)
        key = self.keys.of(request.fields)
        if not (key.admin or needed == ANY_KEY or (needed == STATE and key.state)):
            raise Forbidden(f"this API key may not use {request.path}: that needs a key with `{needed}`")
        return key

    def _at_pages(self, request: http1.Request) -> str:
        """The address of a request at the port that is for pages of engines."""
        host = re.sub(r":[0-9]+$", "", request.fields.get(b"host", b"").decode("latin-1"))
        site = f"{'https' if self.config.tls_cert else 'http'}://{quote(host, safe='[]:.')}"
        return f"{site}:{self.config.pages_port}{quote(request.path, safe='/%')}"

    def _check_origin(self, request: http1.Request, route: api.Route, reader: bytes) -> None:
        host = request.fields.get(b"host", b"")
        if (self.only_local_hosts or self._hosts) and not _is_local(host):
            name = host.decode("latin-1")
            if _name_in(name) not in self._hosts:
                text = f"this address does not answer for the host {name!r}; see the setting `allowed_hosts`"
                raise BadRequest(text, status=403)
        acts = (
            route.model_in == "query"  # a GET that loads a model, as no other does
            or request.method not in ("GET", "HEAD", "OPTIONS")
            or b"upgrade" in request.fields
        )
        if acts and not reader and _is_of_another_site(request, host):
            raise BadRequest(_why_refused(request.fields.get(b"origin")), status=403)

    # Models

    def may_use(self, key: Key | None, model: str, preset: str = "") -> bool:
        """Whether ``key`` may use a model, or a preset of it ("": none); None: no key is asked for.

        Who may use a model may use its presets. Nobody uses a model that is about to go.
        """
        names = self._names.get(model)
        if names is None:
            return False
        if key is None or key.models is None:
            return True
        return (preset != "" and preset in key.models) or not key.models.isdisjoint(names)

    def may_reach(self, key: Key | None, model: str) -> bool:
        """Return whether ``key`` may use a model by any name, also by a preset or a name for several."""
        if key is None or key.models is None:
            return key is None or self.may_use(key, model)
        names = set(self.names(key))
        names.update(each for name in self.config.any_of for each in names_in(self.rules(name, key)))
        return any(name in self.meant and self.meant[name].model == model for name in names)

    def chain(self, key: Key | None, model: str, rules: Iterable[Rule]) -> FallbackChain:
        """The models that its requests go to in turn, those that ``key`` may use; () without a fallback.

        ``rules``: those of the name that a request gave, by which the key may use their models.
        """
        chain = self._chains.get(model)
        if not chain:
            return ()
        if key is not None and key.models is not None:
            own, *rest = chain
            also = names_in(rules)
            usable = [step for step in rest if step.model in also or self.may_use(key, step.model)]
            chain = (own, *usable)
        return chain if len(chain) > 1 else ()

    def find(self, named: str | None, *, api: str, key: Key | None) -> Named:
        """The meaning of a client's name, or of none: ``default_model`` serves those."""
        name = named or self.config.default_model
        if name is None:
            raise BadRequest("the request must name a `model`", param="model")
        for each in self._configured(name, api):
            if found := self.meant.get(each):
                if self.may_use(key, found.model, found.preset):
                    return found
            elif rules := self.rules(each, key):
                return self.meant[rules[0].models[0]]._replace(
                    rules=rules, swaps=self.config.any_of[each].swaps
                )
        if not named:  # the key may not learn of the `default_model`
            raise BadRequest("the request must name a `model`", param="model")
        raise UnknownModel(named, self.names(key))

    def names(self, key: Key | None, *, but: str = "") -> list[str]:
        """The names, of whatever kind, that a key may use, but for those of one model."""
        meant = [(name, each) for name, each in self.meant.items() if each.model != but]
        known = [name for name, each in meant if self.may_use(key, each.model, each.preset)]
        return known + [name for name in self.config.any_of if self.rules(name, key)]

    def configured(self, name: str) -> str:
        """The configured name, of whatever kind, that a client's name stands for; itself if there is none."""
        return next(iter(self._configured(name, "")), name)

    def _configured(self, name: str, api: str) -> list[str]:
        """The configured names that a client's name may be, or else the longest alias that it fits."""
        spelled = (name, name.removesuffix(ollama.LATEST)) if api == "ollama" else (name,)
        exact = [each for each in spelled if self._is_configured(each)]
        return exact or [alias for alias in self._patterns if _fits(name, alias)][:1]

    def upstream(self, path: str) -> list[tuple[str, str]]:
        """The ways to read /upstream/MODEL/PATH as a model, whoever may use it, and a path, the longest model
        first.

        An alias that is a pattern fits the rest of the path as well, so there the likeliest way is meant.
        """
        ways = [*api.upstream(path)]
        configured = [way for way in ways if self._is_configured(way[0])]
        return configured or api.likeliest(way for way in ways if self._configured(way[0], ""))

    def _is_configured(self, name: str) -> bool:
        return name in self.meant or name in self.config.any_of

    def find_one(self, named: str | None, *, api: str, key: Key | None) -> str:
        """The one model that a client's name stands for; BadRequest if it stands for several."""
        found = self.find(named, api=api, key=key)
        if found.rules:
            text = f"{named or self.config.default_model} stands for several models: name one of them"
            raise BadRequest(f"{text} ({', '.join(names_in(found.rules))})", param="model")
        return found.model

    def rules(self, name: str, key: Key | None) -> tuple[Rule, ...]:
        """The rules of a name of ``any_of``, with those of their models that ``key`` may use; () for none.

        A key that names the name may use all of them by it.
        """
        found = self.config.any_of.get(name)
        if found is None or key is None or key.models is None or name in key.models:
            return found.rules if found else ()
        usable = [
            Rule(tuple([each for each in models if self.may_use(key, *self.meant[each][:2])]), when)
            for models, when in found.rules
        ]
        return tuple([rule for rule in usable if rule.models])

    def usable(self, key: Key | None) -> list[str]:
        """The models, then the presets, then the names for several, that a key may use."""
        models = [model for model in self._names if self.may_use(key, model)]
        presets = [meant for meant in self.meant.values() if meant.preset]
        models += [each.preset for each in presets if self.may_use(key, each.model, each.preset)]
        return models + [name for name in self.config.any_of if self.rules(name, key)]


def _fits(name: str, pattern: str) -> bool:
    """Whether a name is that of a pattern, in which * stands for any characters, and nothing else for any."""
    literal = pattern.replace("[", "[[]").replace("?", "[?]")
    return fnmatchcase(name, literal)


def is_page(request: http1.Request) -> bool:
    """Whether a browser opens the status page, which holds no state: its script asks for that, with a key."""
    return request.path == "/" and is_opened(request)


def is_opened(request: http1.Request) -> bool:
    """Whether somebody opens an address in a browser, by hand or by a link."""
    return request.method == "GET" and b"text/html" in request.fields.get(b"accept", b"")


def challenge(request: http1.Request) -> bytes:
    """Return the scheme that a refused request is asked for.

    Browsers show a window of their own for Basic. The status page asks in its own words instead, and says so
    by a field that scripts use for that.
    """
    return b"Bearer" if b"x-requested-with" in request.fields else b"Basic"


def _is_of_another_site(request: http1.Request, host: bytes) -> bool:
    """Whether a browser sends it for a page from elsewhere. For an image there it sends no Origin."""
    origin = request.fields.get(b"origin")
    if origin is not None:
        return origin.partition(b"://")[2] != host
    return request.fields.get(b"sec-fetch-site") in (b"cross-site", b"same-site")


def _why_refused(origin: bytes | None) -> str:
    """Return why a request of another site's page is refused."""
    if origin in (None, b"null"):
        return "requests from other web sites are not accepted"
    name = repr(origin[:MAX_ORIGIN].decode("latin-1"))
    return (
        f"requests from the origin {name} are not accepted; add it to the setting `cors` if it may use this"
    )


def is_preflight(request: http1.Request, reader: bytes) -> bool:
    """Whether a browser asks for a page of a site that may use this; such a question shows no key."""
    asks = b"access-control-request-method" in request.fields
    return request.method == "OPTIONS" and bool(reader) and asks


def preflight(request: http1.Request, reader: bytes, methods: bytes) -> list[Field]:
    """Return the fields that answer a preflight; none for another request."""
    if not is_preflight(request, reader):
        return []
    wanted = request.fields.get(b"access-control-request-headers", b"")
    headers = [(b"Access-Control-Allow-Headers", wanted)] if wanted else []
    return [(b"Access-Control-Allow-Methods", methods), *headers, (b"Access-Control-Max-Age", b"600")]


def presets_of(backends: Sequence[Backend]) -> dict[str, Preset]:
    """Name -> preset, as the first replica has it that says what it is; each name is one model's."""
    return {each.name: each for backend in reversed(backends) for each in reversed(backend.presets)}


def chains(backends: Sequence[Backend]) -> Mapping[str, FallbackChain]:
    """Model -> where its requests go, of models that have fallbacks; what leads back is left out."""
    names = models_by_name(backends)
    own = {each.model: (each.fallback, each.fallback_after) for each in backends if each.fallback}

    def follow(model: str, after: float | None, way: tuple[str, ...]) -> Iterator[FallbackStep]:
        """A model and what follows it; ``after``: the time of the one that it is a fallback of."""
        fallback, its_own = own.get(model, ((), None))
        after = after if its_own is None else its_own
        yield FallbackStep(model, after)
        for other in filter(None, map(names.get, fallback)):
            if other not in (*way, model):
                yield from follow(other, after, (*way, model))

    found = {}
    for model in own:
        first: dict[str, FallbackStep] = {}
        for step in follow(model, None, ()):
            first.setdefault(step.model, step)
        *steps, last = first.values()
        found[model] = (*steps, FallbackStep(last.model, None))
    return {model: chain for model, chain in found.items() if len(chain) > 1}


def _name_in(host: str) -> str:
    """A Host header without its port."""
    host = host.lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


@lru_cache(64)
def _is_local(host: bytes) -> bool:
    """``host`` (with or without a port) can only mean this machine."""
    name = _name_in(host.decode("latin-1"))
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
