"""The model of a request: its body is read, and the model's name found there or in its head.

Where the name stands is the route's to say (``api.Route.model_in``).
"""

from __future__ import annotations

from dataclasses import replace

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Key
from anvil_mux.errors import BadRequest, Forbidden, NotFound, UnknownModel
from anvil_mux.host.engines import find_engine
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import anthropic, api, coding, http1, naming, ollama
from anvil_mux.protocol.completions import parse
from anvil_mux.proxy.access import Access, Named
from anvil_mux.proxy.asked import Asked, Question, Target
from anvil_mux.proxy.client import Client
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import StoredResponses

SESSIONS = "/v1/realtime/"
"""How the paths begin at which a session is described, which may name a model within."""
EXPLAIN = b"x-anvil-explain"
"""The header of a request that is not to be sent on: where it would go, and why, is the answer."""
SWAP = b"x-anvil-swap"
"""The header by which a request says whether it may force a swap: never, or allowed."""
TRANSLATE = {**ollama.TRANSLATE, **anthropic.TRANSLATE}
"""Path -> how a body that is asked for there becomes a question that every engine understands."""


class Questions:
    """Reads requests for models. Any thread."""

    def __init__(self, mux: Multiplexer, stored: StoredResponses) -> None:
        self._mux = mux
        self._stored = stored

    def read(self, asked: Asked, client: Client) -> Question:
        """Read body and model of ``asked``; BadRequest, NotFound, UnknownModel. To be closed."""
        question = self._read(asked, client)
        return self._chosen(question) if question.target.choices else question

    def _chosen(self, question: Question) -> Question:
        """The question for the one of several names that is to serve it, as things are at this moment."""
        asked, before = question.asked, question.target
        name = self._mux.overview.choose(before.choices)
        found = _target(asked, asked.access.meant(name)._replace(choices=before.choices))
        return replace(question, target=replace(found, never_swaps=before.never_swaps))

    def _read(self, asked: Asked, client: Client) -> Question:
        route, query = asked.route, asked.request.query
        if query and route.model_in not in ("query", "upstream"):
            naming.model_in_query(query)  # the engine gets its own name there, if there is one
        match route.model_in:
            case "json":
                return _from_json(asked, client)
            case "session":
                body = read_json(asked, client)
                named, span = [*naming.session_models(body), (None, None)][0]
                aim = target(asked, named)
                _check_session(asked, aim, named, body)
                return Question(asked, aim, body, named, span)
            case "path":
                body = read_json(asked, client)
                stream = naming.model_and_stream(body)[1] and route.streams
                named = api.model_in_path(asked.request.path)
                found = asked.access.find(named, api=asked.api, key=asked.key)
                return Question(asked, _target(asked, found), body, stream=stream)
            case "multipart":
                return _from_form(asked, client)
            case "query":
                if route.upgrades and asked.request.fields.get(b"upgrade", b"").lower() != b"websocket":
                    raise BadRequest(f"{asked.request.path} is a websocket", status=426)
                named = naming.model_in_query(asked.request.query)
                aim = target(asked, named)
                client.read_body(asked.request, asked.access.config.max_body)
                return Question(asked, aim, b"", named)
            case "answer":
                return self._about_answer(asked, client)
            case _:
                return self._below_upstream(asked, client)

    def _about_answer(self, asked: Asked, client: Client) -> Question:
        """A request about an earlier answer: for the engine that has it, if that was not evicted since."""
        id = api.answer_in_path(asked.request.path)
        kept = self._stored.find(id, asked.key)
        if kept is None or (kept.model, kept.backend) not in self._ready():
            raise NotFound(f"There is no answer {id}: it was never given, or its engine was evicted since.")
        found = _target(asked, Named(kept.model))
        return Question(asked, found, _read(asked, client), owner=kept.backend)

    def _ready(self) -> list[tuple[str, str]]:
        return [
            (model.model, backend.backend)
            for model in self._mux.overview.status().models
            for backend in model.backends
            if backend.state == "ready" and not backend.is_lost
        ]

    def _below_upstream(self, asked: Asked, client: Client) -> Question:
        """A request below /upstream/: for the engine of the model in its path, as it is.

        A GET loads no model: pages ask for their parts without anybody meaning it.
        """
        request, access = asked.request, asked.access
        for name, path in api.upstream(request.path):
            if not access.knows(name):
                continue
            try:
                model = resolve(asked, name)
            except UnknownModel:
                continue
            if not access.may_use(asked.key, model):  # but a preset of it, which the engine does not know
                raise Forbidden(f"this API key may use {name}, but not all of {model}, as /upstream/ does")
            if not _may_ask(asked, model, path):
                raise NotFound(f"{request.method} {path} is not offered of the engine of {model}.")
            if request.method == "GET" and not self._mux.overview.is_ready(model):
                raise BadRequest(f"{model} is not loaded, and a GET does not load it", status=409)
            asked = replace(asked, route=api.Route("openai", "upstream", path=path))
            body = _read(asked, client)
            if asked.key and not asked.key.admin:
                _check_names(asked, model, path, body)
            return Question(asked, _target(asked, Named(model)), body)
        raise _no_upstream(asked)


def target(asked: Asked, named: str | None) -> Target:
    """The target of a request that names ``named``."""
    return _target(asked, asked.access.find(named, api=asked.api, key=asked.key), named)


def retarget(question: Question, model: str) -> Target:
    """The target of a question that another model than the one in it is to answer.

    A preset that its name stands for is left out: it is another model's. It may force a swap if it could.
    """
    found = _target(question.asked, Named(model), question.named)
    return replace(found, never_swaps=question.target.never_swaps)


def _target(asked: Asked, found: Named, named: str | None = None) -> Target:
    access, key, route = asked.access, asked.key, asked.route
    model = found.model
    backend = access.only.get(model)
    unchanged = (
        named is not None
        and access.unchanged.get(model) == named
        and route.model_in == "json"
        and not (route.translated or found.preset)
    )
    return Target(
        model,
        replicas=access.replicas[model],
        explains=EXPLAIN in asked.request.fields,
        loads=naming.may_load(asked.request.query),
        unchanged_at=backend if unchanged else None,
        preset=found.preset,
        never_swaps=_never_swaps(asked.request) or not (found.swaps and (key is None or key.swaps)),
        choices=found.choices,
        external=backend.name if backend and backend.url else "",
        chain=access.chain(key, model, found.choices),
    )


def _never_swaps(request: http1.Request) -> bool:
    """Whether the header of a request says that it may force no swap."""
    said = request.fields.get(SWAP)
    if said is None:
        return False
    if said not in (b"never", b"allowed"):
        raise BadRequest("X-Anvil-Swap must be never or allowed", param="X-Anvil-Swap")
    return said == b"never"


def resolve(asked: Asked, named: str | None) -> str:
    """The one model that a client's name stands for; BadRequest if it stands for several."""
    return asked.access.find_one(named, api=asked.api, key=asked.key)


def _from_json(asked: Asked, client: Client) -> Question:
    route, body = asked.route, read_json(asked, client)
    if route.translated == "always":
        translation = TRANSLATE[route.path](parse(body))
        stream = translation.stream and bool(translation.path)
        found, named = target(asked, translation.model), translation.model
        return Question(asked, found, body, named, stream=stream, translation=translation)
    named, stream = naming.model_and_stream(body)
    if asked.access.has_external and asked.key and not asked.key.admin:
        naming.refuse_more_models(body)
    aim = target(asked, named)
    if route.path.startswith(SESSIONS):
        _check_session(asked, aim, named, body)
    return Question(asked, aim, body, named, stream=stream and route.streams)


def _from_form(asked: Asked, client: Client) -> Question:
    kind = asked.request.fields.get(b"content-type", b"")
    if _coding(asked.request):
        raise BadRequest("a form must be sent as it is, without Content-Encoding", status=415)
    if kind.partition(b";")[0].strip().lower() == naming.URLENCODED:
        body = client.read_body(asked.request, naming.MAX_JSON_PARSED)
        if not naming.is_urlencoded(kind, body):
            raise BadRequest("this route takes a form, not JSON", status=415)
        named, wants_stream = naming.in_urlencoded(body)
        return Question(asked, target(asked, named), body, named, stream=wants_stream and asked.route.streams)
    if naming.media(kind, b"") != "multipart":
        raise BadRequest("this route takes a form (Content-Type: multipart/form-data)", status=415)
    scanner = naming.MultipartModelScanner(naming.boundary(kind))
    spool = Spool()
    try:
        spool.fill(client.read_pieces(asked.request, asked.access.config.max_upload), scanner.feed)
        scanner.finish()
        found = target(asked, scanner.model)
    except BaseException:
        spool.close()
        raise
    stream = scanner.stream and asked.route.streams
    return Question(asked, found, spool, scanner.model, scanner.span, stream=stream)


def read_json(asked: Asked, client: Client) -> bytes | bytearray:
    """The body of a route that takes JSON."""
    request = asked.request
    body = client.read_body(request, asked.access.config.max_body)
    if b"content-encoding" in request.fields:
        body = _unpacked(asked, client, body)
    kind = request.fields.get(b"content-type", b"")
    if kind != b"application/json" and naming.media(kind, body) != "json":
        raise BadRequest("this route takes a JSON body (Content-Type: application/json)", status=415)
    return body


def _read(asked: Asked, client: Client) -> bytes | bytearray:
    """The body of any kind, in memory."""
    return _unpacked(asked, client, client.read_body(asked.request, asked.access.config.max_body))


def _unpacked(asked: Asked, client: Client, body: bytes | bytearray) -> bytes | bytearray:
    packed = _coding(asked.request)
    if not packed:
        return body
    most = coding.room(len(body), asked.access.config.max_body)
    client.hold(most)
    content = coding.unpacked(body, packed, most)
    client.hold(len(content) - most)
    return content


def _coding(request: http1.Request) -> str:
    """How the body is compressed; empty for a plain one."""
    named = request.fields.get(b"content-encoding", b"identity").decode("latin-1").strip()
    return "" if named.lower() == "identity" else named or "(empty)"


def _may_ask(asked: Asked, model: str, path: str) -> bool:
    backends = [backend for backend in asked.access.config.backends if backend.model == model]
    return all(_offers(backend, asked.request.method, path) for backend in backends)


def _offers(backend: Backend, method: str, path: str) -> bool:
    """Whether ``path`` may be asked for below /upstream/; what steers the engine never may."""
    engine = find_engine(backend.engine)
    if engine.steers(path) or method not in ("GET", "POST"):
        return False
    route = api.match(method, path)
    if route and route.translated != "always" and not route.upgrades:
        return True
    listed = any(path == each or (each[-1] == "/" and path.startswith(each)) for each in backend.upstream)
    return listed or (method == "GET" and path in engine.shown)


def _check_names(asked: Asked, model: str, path: str, body: bytes | bytearray) -> None:
    """Check that path, query and body name nothing of the server of ``model`` but what the key may use there;
    UnknownModel.

    A server elsewhere, and some engines, have more models than the configuration says.
    """
    there = names_there(asked.access, asked.key, model)
    names = [_name_in_path(path), naming.model_in_query(asked.request.query)]
    for name in (*names, *_names_in_body(asked, path, body)):
        if name is not None and name not in there:
            raise UnknownModel(name, there)


def _check_session(asked: Asked, aim: Target, named: str | None, body: bytes | bytearray) -> None:
    """Check that a session at a server elsewhere names, beside its model, only what the key may use there;
    UnknownModel.
    """
    key, backends = asked.key, asked.access.config.backends
    models = {aim.model, *aim.choices, *(step.model for step in aim.chain)}
    if key is None or key.admin or not any(each.url and each.model in models for each in backends):
        return
    there = names_there(asked.access, key, aim.model)
    names = [name for name, _ in naming.session_models(body)]
    if named in names:
        names.remove(named)
    for name in names:
        if name not in there:
            raise UnknownModel(name, there)


def names_there(access: Access, key: Key | None, model: str) -> set[str]:
    """The models that the server of a model knows and ``key`` may use, by the server's names."""
    backends = access.config.backends
    sites = {(each.url, each.api_key_env) for each in backends if each.model == model and each.url}
    names: set[str] = set()
    for each in backends:
        if each.model == model or ((each.url, each.api_key_env) in sites and access.may_use(key, each.model)):
            names.add(each.served_model or each.model)
            names |= {preset.served_model for preset in each.presets if preset.served_model}
    return names


def _name_in_path(path: str) -> str | None:
    route = api.match("POST", path)
    return api.model_in_path(path) if route and route.model_in == "path" else None


def _names_in_body(asked: Asked, path: str, body: bytes | bytearray) -> list[str | None]:
    """The models in a body of any kind that may have one; BadRequest for one that cannot be read for that."""
    kind = asked.request.fields.get(b"content-type", b"")
    if not body:
        return []
    if kind.lower().startswith(b"multipart/"):
        scanner = naming.MultipartModelScanner(naming.boundary(kind))
        scanner.feed(bytes(body))
        scanner.finish()
        return [scanner.model]
    if naming.is_urlencoded(kind, body):
        return [naming.in_urlencoded(body)[0]]
    if api.api_of(path) == "ollama":
        return [ollama.name_in(parse(body))]
    naming.refuse_more_models(body)
    route = api.match("POST", path)
    if route and route.path.startswith(SESSIONS):
        return [name for name, _ in naming.session_models(body)]
    return [naming.model_and_stream(body)[0]]


def _no_upstream(asked: Asked) -> UnknownModel | NotFound:
    """Why a path below /upstream/ leads nowhere: its model, or else the rest of it."""
    unknown: UnknownModel | None = None
    for name in api.upstream_names(asked.request.path):
        try:
            resolve(asked, name)
        except UnknownModel as error:
            unknown = unknown or error
        else:
            unknown = None
            break
    return unknown or NotFound(f"{asked.request.path} names no model and path: /upstream/MODEL/PATH.")
