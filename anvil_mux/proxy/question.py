"""A question to a model: the body of a request, and the model that it is for.

``Target`` is what its model's name comes to, and ``Question`` that with its head (``RequestContext``) and its
body. Neither is ever altered. Where the model's name stands is the route's to say
(``api.Route.model_in``).

A name that stands for several models (``any_of``) may choose among them by what a request contains: images,
audio, tools, length (``Contents``). A request is read for them only if the name's rules have conditions. Then
its body is read once more, by the parser and within the limits of all bodies; what a client of Ollama asks is
there already, in OpenAI's words.

Engines keep their answers to /v1/responses, each for itself, so that a client can go on from one
(``previous_response_id``), fetch it again or delete it. So a request that refers to an answer is for the
backend that gave it, which ``StoredResponses`` remembers. An engine that was evicted since has lost the
answer, and says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Key
from anvil_mux.config.values import Preset, Rule, When, names_in
from anvil_mux.errors import (
    BadRequest,
    Forbidden,
    LoopDetected,
    Moved,
    MuxError,
    NotFound,
    UnknownModel,
    printable,
)
from anvil_mux.host.engines import ENGINES
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import anthropic, api, foreign, http1, naming, ollama
from anvil_mux.protocol.completions import Translation, parse
from anvil_mux.proxy.access import Access, FallbackChain, Named, RequestContext, is_opened
from anvil_mux.proxy.client import Client, Spool
from anvil_mux.routing import prefix

SWAP = b"x-anvil-swap"
"""The header by which a request says whether it may force a swap: never, or allowed."""
WARM = b"x-anvil-warm"
"""The header by which a client says which model it will ask for next."""
VIA = b"x-anvil-via"
"""The header in which each anvil-mux adds itself to the way of a request, as ID:MODEL."""
MOST_HOPS = 16
"""The most anvil-mux on the way of a request."""
TRANSLATE = {**ollama.TRANSLATE, **anthropic.TRANSLATE}
"""Path -> how a body that is asked for there becomes a question that every engine understands."""
MOST_ANSWERS = 10_000
"""The most answers that are remembered, the newest."""

IMAGES = frozenset(
    ("image", "image_url", "input_image", "computer_screenshot", "video", "video_url", "multimodal_data")
)
"""The types, or keys, of parts that a model must be able to see."""
AUDIO = frozenset(("audio", "audio_url", "input_audio"))
"""The types, or keys, of parts that it must be able to hear."""
_NO_TEXT = IMAGES | AUDIO | {"base64", "file_data"}
"""The types, or keys, of what is no text, however long."""
_CONVERSATION = ("system", "messages", "input", "prompt")
"""The fields of bodies, of all APIs, in which such parts may stand."""

_ANSWER_ID = re.compile(rb'(?<!\\)"id" ?: ?"(resp_[A-Za-z0-9_-]{1,250})"')
_FIRST_EVENT_BYTES = 64 * 1024

QuestionBody = bytes | bytearray | Spool

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Target:
    """The model that a request names, and what follows from that under its configuration."""

    model: str
    unchanged_at: Backend | None
    """The backend that gets their bodies as they are, if any does."""
    preset: str = ""
    """The preset that they name, if they name one."""
    never_swaps: bool = False
    """Whether they may force no swap: what is ready serves them, or nothing does."""
    rules: tuple[Rule, ...] = ()
    """The rules by which their model is chosen, where their name stands for several; once it is, the one that
    chose it."""
    chain: FallbackChain = ()
    """The models that they go to in turn, if the model has fallbacks."""


@dataclass(slots=True)
class Question:
    """A request for a model, its body read."""

    context: RequestContext
    target: Target
    body: QuestionBody
    named: str | None = None
    """The model's name within ``body``, if that need not be changed for every engine."""
    span: tuple[int, int] | None = None
    """The place of that name in a form."""
    stream: bool = False
    """The client asked for a stream into which comments may be written."""
    translation: Translation | None = None
    """The question for its engine, if that does not speak the client's API."""
    owner: str = ""
    """The backend that has an earlier answer which it is about."""
    previous_answer: str = ""
    """The id of the answer that it goes on from, or is about; "" for none."""
    fallbacks: FallbackChain = ()
    """The models that are asked in turn if this one fails, unless a reload has taken them away by then."""
    after: float | None = None
    """Seconds that it may wait before that."""

    def preset_at(self, backend: Backend) -> Preset | None:
        """The preset that it names, as it is at a backend: its own, or what another replica says.

        The backend may be one that came by a reload, while the question waited.
        """
        name = self.target.preset
        if not name:
            return None
        own = next((each for each in backend.presets if each.name == name), None)
        return own or self.context.access.presets[name]

    def known_as(self, backend: Backend) -> str:
        """The model id that the engine of a backend is asked for."""
        preset = self.preset_at(backend)
        return (preset and preset.served_model) or backend.served_model or self.target.model

    @property
    def path(self) -> str:
        """The path that its engine is asked for."""
        return self.translation.path if self.translation else self.context.route.path


class Questions:
    """Reads requests for models. Any thread."""

    def __init__(self, mux: Multiplexer, stored: StoredResponses) -> None:
        self._mux = mux
        self._stored = stored

    def read(self, context: RequestContext, client: Client) -> Question:
        """Read body and model of a request. To be closed.

        BadRequest, LoopDetected, NotFound, UnknownModel.
        """
        if VIA in context.request.fields:
            _refuse_loop(context)
        question = self._read(context, client)
        _check_inner_names(question)
        if id := _earlier_answer(question):
            if not self._stored.may_use(id, context):
                raise _no_answer(id)
            question = replace(question, previous_answer=id)
        return self._chosen(question) if question.target.rules else question

    def _chosen(self, question: Question) -> Question:
        """The question for the one of several names that is to serve it, as things are at this moment."""
        context, before = question.context, question.target
        rule = self._of_earlier(question) or before.rules[0]
        if rule.when:
            rule = chosen_by(before.rules, _contents(question))
        name = self._mux.overview.choose(rule.models)
        found = _target(context, context.access.meant[name]._replace(rules=before.rules))
        target = replace(found, never_swaps=before.never_swaps, rules=(rule,))
        return replace(question, target=target)

    def _of_earlier(self, question: Question) -> Rule | None:
        """The model that has the answer which a question goes on from, if it is one of several and resident.

        (What that answer was about, such as an image, does not stand in the question.)
        """
        context = question.context
        if (kept := self._stored.find(question.previous_answer, context)) is None:
            return None
        names = names_in(question.target.rules)
        own = [name for name in names if context.access.meant[name].model == kept.model][:1]
        return Rule(tuple(own)) if own and self._mux.overview.is_ready(kept.model) else None

    def _read(self, context: RequestContext, client: Client) -> Question:
        route, query = context.route, context.request.query
        if query and route.model_in not in ("query", "upstream"):
            naming.model_in_query(query)  # the engine gets its own name there, if there is one
        match route.model_in:
            case "json":
                return _from_json(context, client)
            case "session":
                body = read_json(context, client)
                named, span = [*naming.session_models(body), (None, None)][0]
                _refuse_more_models(context, body)
                return Question(context, target(context, named), body, named, span)
            case "path":
                body = read_json(context, client)
                stream = naming.model_and_stream(body)[1] and route.streams
                _refuse_more_models(context, body)
                named = api.model_in_path(context.request.path)
                found = context.access.find(named, api=context.api, key=context.key)
                return Question(context, _target(context, found), body, stream=stream)
            case "multipart":
                return _from_form(context, client)
            case "query":
                if route.upgrades and not _is_for_websocket(context.request):
                    raise BadRequest(f"{context.request.path} is a websocket", status=426)
                named = naming.model_in_query(context.request.query)
                aim = target(context, named)
                client.read_body(context.request, context.access.config.max_body)
                return Question(context, aim, b"", named)
            case "answer":
                return self._about_answer(context, client)
            case _:
                return self._below_upstream(context, client)

    def _about_answer(self, context: RequestContext, client: Client) -> Question:
        """A request about an earlier answer: for the engine that has it, if that was not evicted since."""
        id = api.answer_in_path(context.request.path)
        kept = self._stored.find(id, context)
        if kept is None or not self._is_there(kept):
            raise _no_answer(id)
        found = _target(context, Named(kept.model))
        return Question(context, found, _read(context, client), owner=kept.backend)

    def _is_there(self, kept: StoredResponse) -> bool:
        """Whether the backend that gave an answer is ready."""
        try:
            backends = self._mux.overview.model(kept.model).backends
        except UnknownModel:
            return False
        return any(b.backend == kept.backend and b.state == "ready" and not b.is_lost for b in backends)

    def _below_upstream(self, context: RequestContext, client: Client) -> Question:
        """A request below /upstream/: for the engine of the model in its path, as it is.

        A GET loads no model, unless somebody opens it: pages ask for their parts without anybody meaning it.
        """
        request, access = context.request, context.access
        for name, path in access.upstream(request.path):
            if not (path or context.shows_pages):
                continue
            try:
                model = resolve(context, name)
            except UnknownModel:
                continue
            if not path:  # below the model alone a page would miss its parts
                raise Moved("The page of its engine is here", f"{quote(request.path, safe='/%')}/")
            if not access.may_use(context.key, model):  # but a preset of it, which the engine does not know
                raise Forbidden(f"this API key may use {name}, but not all of {model}, as /upstream/ does")
            route = api.match(request.method, path.rstrip("/"))
            if route and route.shows_prompts and context.key and not context.key.admin:
                raise Forbidden(f"this API key may not use {path}: that needs a key with `admin`")
            backends = [each for each in access.config.backends if each.model == model]
            if not all(_offers(each, context, path) for each in backends):
                pages = "" if context.shows_pages else "; pages have a port of their own (pages_port)"
                text = f"{request.method} {path} is not offered of the engine of {model}{pages}."
                raise NotFound(text)
            if request.method == "GET" and not (_loads(context) or self._mux.overview.is_ready(model)):
                raise BadRequest(f"{model} is not loaded, and a GET does not load it", status=409)
            upgrades = context.shows_pages and request.method == "GET" and _is_for_websocket(request)
            context = replace(context, route=api.Route("openai", "upstream", path=path, upgrades=upgrades))
            body = _read(context, client)
            if context.key and not (context.key.admin or _knows_one_model(context, backends)):
                _check_names(context, model, path, body)
            return Question(context, _target(context, Named(model)), body)
        raise _no_upstream(context)


def hops(context: RequestContext) -> list[str]:
    """Return the anvil-mux that a request has passed, the first one first, each as ID:MODEL."""
    way = context.request.fields.get(VIA, b"").decode("latin-1")
    return [hop.strip() for hop in way.split(",") if hop.strip()]


def _refuse_loop(context: RequestContext) -> None:
    """Raise LoopDetected if a request was here before, or has passed too many others."""
    way, own = hops(context), context.access.instance
    has_returned = any(hop.partition(":")[0] == own for hop in way)
    if not has_returned and len(way) < MOST_HOPS:
        return
    places = []
    for hop in way[:MOST_HOPS]:
        id, _, model = hop.partition(":")
        places.append(printable(f"{unquote(model)[:100]} {'here' if id == own else f'at {id[:16]}'}"))
    what = "has been here before" if has_returned else f"has passed {len(way)} anvil-mux"
    text = f"This request {what}: {' -> '.join(places)} -> here."
    raise LoopDetected(f"{text} A url or a fallback leads back to this anvil-mux: change it.")


def target(context: RequestContext, named: str | None) -> Target:
    """The target of a request that names ``named``."""
    return _target(context, context.access.find(named, api=context.api, key=context.key), named)


def retarget(question: Question, model: str) -> Target:
    """The target of a question that another model than the one in it is to answer.

    A preset that its name stands for is left out: it is another model's. It may force a swap if it could.
    """
    found = _target(question.context, Named(model), question.named)
    return replace(found, never_swaps=question.target.never_swaps)


def _target(context: RequestContext, found: Named, named: str | None = None) -> Target:
    access, key, route = context.access, context.key, context.route
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
        unchanged_at=backend if unchanged else None,
        preset=found.preset,
        never_swaps=_never_swaps(context.request) or not (found.swaps and (key is None or key.swaps)),
        rules=found.rules,
        chain=access.chain(key, model, found.rules),
    )


def _is_for_websocket(request: http1.Request) -> bool:
    return request.fields.get(b"upgrade", b"").lower() == b"websocket"


def _never_swaps(request: http1.Request) -> bool:
    """Whether the header of a request says that it may force no swap."""
    value = request.fields.get(SWAP)
    if value is None:
        return False
    if value not in (b"never", b"allowed"):
        raise BadRequest("X-Anvil-Swap must be never or allowed", param="X-Anvil-Swap")
    return value == b"never"


def resolve(context: RequestContext, named: str | None) -> str:
    """The one model that a client's name stands for; BadRequest if it stands for several."""
    return context.access.find_one(named, api=context.api, key=context.key)


def hint(mux: Multiplexer, context: RequestContext, named: str) -> str:
    """Have the model preloaded for which a client's name stands, if nobody is in the way, and return it.

    MuxError if its key may not use it, or may have nothing loaded.
    """
    found = context.access.find(named, api=context.api, key=context.key)
    if not found.swaps or not (context.key is None or context.key.swaps):
        raise Forbidden(f"nothing is loaded for {named} at the word of this client (swap: never)")
    if found.rules:
        # What the request will contain is not known yet.
        rule = first_fit(found.rules, Contents())
        name = mux.overview.choose(rule.models) if rule else resolve(context, named)
        found = context.access.meant[name]
    mux.tell(mux.scheduler.hinted, found.model)
    return found.model


def heed_hint(mux: Multiplexer, context: RequestContext) -> None:
    """Heed the hint in the header of a request, if there is one. No request fails for its hint.

    Where there are keys, what is told to everybody is no reason to load a model for whoever asks it.
    """
    named = context.request.fields.get(WARM)
    if named is None or (context.key is None and context.access.hides_keys):
        return
    try:
        hint(mux, context, named.decode("utf-8", "replace"))
    except MuxError as error:
        log.debug("request %s: X-Anvil-Warm is ignored: %s", context.id, error.message)


def _from_json(context: RequestContext, client: Client) -> Question:
    route, body = context.route, read_json(context, client)
    if route.translated == "always":
        translation = TRANSLATE[route.path](parse(body))
        stream = translation.stream and bool(translation.path)
        found, named = target(context, translation.model), translation.model
        return Question(context, found, body, named, stream=stream, translation=translation)
    named, stream = naming.model_and_stream(body)
    _refuse_more_models(context, body)
    return Question(context, target(context, named), body, named, stream=stream and route.streams)


def _refuse_more_models(context: RequestContext, body: bytes | bytearray) -> None:
    """Refuse a body that may name more models, where it may reach a server elsewhere by a key for some."""
    if context.access.has_external and context.key and not context.key.admin:
        naming.refuse_more_models(body)


def _refuse_more_fields(context: RequestContext, field: str) -> None:
    """Refuse a form with a field that may name more models, as ``_refuse_more_models`` does a body."""
    if field and context.access.has_external and context.key and not context.key.admin:
        raise naming.more_models_in(field)


def _from_form(context: RequestContext, client: Client) -> Question:
    kind = context.request.fields.get(b"content-type", b"")
    if _coding(context.request):
        raise BadRequest("a form must be sent as it is, without Content-Encoding", status=415)
    if kind.partition(b";")[0].strip().lower() == naming.URLENCODED:
        body = client.read_body(context.request, naming.MAX_JSON_PARSED)
        if not naming.is_urlencoded(kind, body):
            raise BadRequest("this route takes a form, not JSON", status=415)
        named, wants_stream = naming.in_urlencoded(body)
        _refuse_more_fields(context, naming.more_in_urlencoded(body))
        return Question(
            context, target(context, named), body, named, stream=wants_stream and context.route.streams
        )
    if naming.media(kind, b"") != "multipart":
        raise BadRequest("this route takes a form (Content-Type: multipart/form-data)", status=415)
    scanner = naming.MultipartModelScanner(naming.boundary(kind))
    spool = Spool()
    try:
        spool.fill(client.read_pieces(context.request, context.access.config.max_upload), scanner.feed)
        scanner.finish()
        _refuse_more_fields(context, scanner.more)
        found = target(context, scanner.model)
    except BaseException:
        spool.close()
        raise
    stream = scanner.stream and context.route.streams
    return Question(context, found, spool, scanner.model, scanner.span, stream=stream)


def read_json(context: RequestContext, client: Client) -> bytes | bytearray:
    """The body of a route that takes JSON."""
    body = _read(context, client)
    kind = context.request.fields.get(b"content-type", b"")
    if kind != b"application/json" and naming.media(kind, body) != "json":
        raise BadRequest("this route takes a JSON body (Content-Type: application/json)", status=415)
    return body


def _read(context: RequestContext, client: Client) -> bytes | bytearray:
    """The body of any kind, in memory, unpacked."""
    most = context.access.config.max_body
    body, packed = client.read_body(context.request, most), _coding(context.request)
    if not packed:
        return body
    most = foreign.unpacked_size(len(body), most)
    client.hold(most)
    content = foreign.unpacked(body, packed, most)
    client.hold(len(content) - most)
    return content


def _coding(request: http1.Request) -> str:
    """How the body is compressed; empty for a plain one."""
    if b"content-encoding" not in request.fields:
        return ""
    named = request.fields[b"content-encoding"].decode("latin-1").strip()
    return "" if named.lower() == "identity" else named or "(empty)"


def _offers(backend: Backend, context: RequestContext, path: str) -> bool:
    """Whether ``path`` may be asked for below /upstream/; what steers the engine never may.

    A page may read whatever else its engine has.
    """
    engine, method = ENGINES[backend.engine], context.request.method
    if engine.steers(path):
        return False
    if context.shows_pages and not backend.url and (method == "GET" or (method, path) in engine.acts_of_page):
        return True
    if method not in ("GET", "POST"):
        return False
    route = api.match(method, path)
    if route and route.translated != "always" and not route.upgrades:
        return True
    listed = any(path == each or (each[-1] == "/" and path.startswith(each)) for each in backend.upstream)
    return listed or (method == "GET" and path in engine.shown)


def _loads(context: RequestContext) -> bool:
    """Whether a GET loads its model: somebody opens a page, and no other site has them do so."""
    site = context.request.fields.get(b"sec-fetch-site")
    return context.shows_pages and is_opened(context.request) and site in (b"none", b"same-origin")


def _knows_one_model(context: RequestContext, backends: Sequence[Backend]) -> bool:
    """Whether a page is of an engine that has but one model, which answers to any name, as its file's."""
    one = all(ENGINES[each.engine].names_file and not each.served_model for each in backends)
    return context.shows_pages and one


def _check_names(context: RequestContext, model: str, path: str, body: bytes | bytearray) -> None:
    """Check that path, query and body name nothing of the server of ``model`` but what the key may use there.

    A server elsewhere, and some engines, have more models than the configuration says.
    """
    kind, route = context.request.fields.get(b"content-type", b""), api.match("POST", path)
    names = [naming.model_in_query(context.request.query)]
    if route and route.model_in == "path":
        names.append(api.model_in_path(path))
    if not body:
        pass
    elif kind.lower().startswith(b"multipart/"):
        scanner = naming.MultipartModelScanner(naming.boundary(kind))
        scanner.feed(bytes(body))
        scanner.finish()
        names.append(scanner.model)
        if scanner.more:
            raise naming.more_models_in(scanner.more)
    elif naming.is_urlencoded(kind, body):
        names.append(naming.in_urlencoded(body)[0])
        if more := naming.more_in_urlencoded(body):
            raise naming.more_models_in(more)
    elif api.api_of(path) == "ollama":
        names += [ollama.name_in(parse(body)), *naming.inner_models(body)]
    else:
        naming.refuse_more_models(body)
        names += [naming.model_and_stream(body)[0], *naming.inner_models(body)]
    _check_names_there(context, model, names)


def _check_inner_names(question: Question) -> None:
    """Check what the body of a request names beside its model: models of a server elsewhere, adapters.

    Tools and sessions may have models of their own. A server elsewhere has more models than the configuration
    says, so each must be one that the key may use there. Who may use one preset may choose no other adapter.
    """
    context, aim, body = question.context, question.target, question.body
    key, access = context.key, context.access
    if key is None or key.admin or isinstance(body, Spool) or not naming.is_object(body):
        return
    if not aim.rules and not access.may_use(key, aim.model) and (field := naming.adapter_field(body)):
        raise Forbidden(f"this API key may use {aim.preset}, but not all of {aim.model}: leave out `{field}`")
    models = {aim.model, *names_in(aim.rules), *(step.model for step in aim.chain)}
    elsewhere = {each.model for each in access.config.backends if each.url and each.model in models}
    if not elsewhere or context.route.model_in == "upstream":
        return
    names: list[str | None] = [*naming.inner_models(body)]
    if context.route.model_in == "session":
        names.append(naming.model_and_stream(body)[0])
        if question.named in names:  # the session's own
            names.remove(question.named)
    for model in sorted(elsewhere):
        _check_names_there(context, model, names)


def _check_names_there(context: RequestContext, model: str, names: Iterable[str | None]) -> None:
    """UnknownModel if there is one that the server of ``model`` does not know, or the key may not use."""
    there = names_there(context.access, context.key, model)
    for name in names:
        if name is not None and name not in there:
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


def _no_upstream(context: RequestContext) -> UnknownModel | NotFound:
    """Why a path below /upstream/ leads nowhere: its model, or else the rest of it."""
    unknown: UnknownModel | None = None
    for name in api.upstream_names(context.request.path):
        try:
            resolve(context, name)
        except UnknownModel as error:
            unknown = unknown or error
        else:
            unknown = None
            break
    return unknown or NotFound(f"{context.request.path} names no model and path: /upstream/MODEL/PATH.")


# Its contents


class Contents(NamedTuple):
    """The contents of one request; its fields are what the conditions of rules are about.

    APIs differ in where a part of a message stands and in what it is called. So any object in a conversation,
    or in what a tool gave back, counts by its ``type`` and by its keys.
    """

    images: bool = False
    audio: bool = False
    tools: bool = False
    tokens: int = 0
    """The tokens of its prompt, about."""


def _contents(question: Question) -> Contents:
    route, body = question.context.route, question.body
    if question.translation:
        return json_contents(question.translation.question)
    if route.model_in == "multipart":
        return form_contents(route)
    if isinstance(body, Spool) or route.model_in not in ("json", "path"):
        return Contents()
    return json_contents(parse(body))


def json_contents(body: Mapping[str, Any]) -> Contents:
    """The contents of a JSON body."""
    kinds = frozenset(kind for part in _parts(body) for kind in _kinds(part))
    return Contents(
        images=not IMAGES.isdisjoint(kinds),
        audio=not AUDIO.isdisjoint(kinds),
        tools=bool(body.get("tools") or body.get("functions")),
        tokens=_tokens(body),
    )


def form_contents(route: api.Route) -> Contents:
    """The contents of a form, by where it is sent: its file is an image to change, or sound to write down."""
    return Contents(images="/images/" in route.path, audio="/audio/" in route.path)


def chosen_by(rules: Sequence[Rule], contents: Contents) -> Rule:
    """The rule that chooses for a request; BadRequest if none does."""
    rule = first_fit(rules, contents)
    if rule is None:
        needed = "; or ".join(rule.conditions for rule in rules)
        raise BadRequest(f"no model of this name takes such a request: it would need {needed}", param="model")
    return rule


def first_fit(rules: Sequence[Rule], contents: Contents) -> Rule | None:
    """The first rule whose conditions all hold."""
    return next((rule for rule in rules if _hold(rule.when, contents)), None)


def _hold(when: When, contents: Contents) -> bool:
    return all(
        contents.tokens > wanted if name == "tokens_over" else getattr(contents, name) == wanted
        for name, wanted in when
    )


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The objects in a conversation: messages, the parts of their content, and of what tools gave back."""
    left: list[Any] = [body.get(field) for field in _CONVERSATION]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            yield each
            left += each.get("content"), each.get("output")


def _tokens(body: Mapping[str, Any]) -> int:
    """The tokens of a prompt, about: nobody knows without the tokenizer of the model that is still to be
    chosen.

    Its bytes are taken for tokens as routing does at first, and each value has one more for what stands
    around it. Images, audio and files have no more than that.
    """
    size, values = 0, 0
    left: list[Any] = [body[part] for part in prefix.PARTS if part in body]
    while left:
        each = left.pop()
        values += 1
        if isinstance(each, str):
            size += len(each.encode("utf-8", "surrogatepass"))
        elif isinstance(each, list):
            left += each
        elif isinstance(each, dict) and _NO_TEXT.isdisjoint(_kinds(each)):
            size += sum(map(len, each))
            left += each.values()
    return round(size / prefix.BYTES_PER_TOKEN) + values


def _kinds(part: Mapping[str, Any]) -> Iterator[str]:
    """The words that say what a part is: some clients leave out its type, where a key says as much."""
    yield from [key for key, value in part.items() if value]
    if isinstance(kind := part.get("type"), str):
        yield kind


# Answers that engines keep


class StoredResponse(NamedTuple):
    """The model and backend that gave an answer, and the digest of the API key that asked for it."""

    model: str
    backend: str
    digest: bytes | None


class StoredResponses:
    """The answers that are remembered, each of the key that asked for it first. Any thread.

    A key is known by its digest: a reload may change its rights, which are checked when it uses an answer.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[str, StoredResponse] = {}

    def keep(self, id: str, model: str, backend: str, key: Key | None) -> None:
        """Remember an answer, unless its id is that of another key's: engines may repeat ids."""
        response = StoredResponse(model, backend, key.digest if key else None)
        with self._lock:
            known = self._kept.get(id)
            if known is not None and known.digest != response.digest:
                return
            self._kept[id] = response
            if len(self._kept) > MOST_ANSWERS:
                del self._kept[next(iter(self._kept))]

    def find(self, id: str, context: RequestContext) -> StoredResponse | None:
        """Return the answer of that id, if the key of a request asked for it and may still use its model."""
        with self._lock:
            kept = self._kept.get(id)
        return kept if kept and _may_continue(kept, context) else None

    def may_use(self, id: str, context: RequestContext) -> bool:
        """Return whether a request may refer to the answer of that id.

        An engine may keep answers that were forgotten here (by a restart, say), and does not know keys. So an
        unknown id is let through only for those who may read engines' logs as well.
        """
        with self._lock:
            kept = self._kept.get(id)
        if kept is None:
            return context.key is None or context.key.admin
        return _may_continue(kept, context)


def _may_continue(kept: StoredResponse, context: RequestContext) -> bool:
    """Return whether an answer belongs to the key of a request, and the key may use its model."""
    key = context.key
    return kept.digest == (key and key.digest) and context.access.may_reach(key, kept.model)


def engine_route(context: RequestContext) -> api.Route:
    """Return the route that the engine is asked for: for a path below /upstream/ that of its rest."""
    route = context.route
    if route.model_in == "upstream":
        return api.match(context.request.method, route.path) or api.NO_ROUTE
    return route


def _earlier_answer(question: Question) -> str:
    """The id of the answer that a question goes on from, or is about, also below /upstream/; "" for none."""
    route, body = engine_route(question.context), question.body
    if route.model_in == "answer":
        return api.answer_in_path(route.path)
    if not route.path.startswith(api.RESPONSES) or isinstance(body, Spool):
        return ""
    return naming.string_of(body, "previous_response_id")


def _no_answer(id: str) -> NotFound:
    return NotFound(f"Response {id} not found: its id is unknown here, or its model was unloaded since.")


def answer_id(answer: bytes) -> str:
    """The id of an answer that begins like this; "" if it is not in it."""
    found = _ANSWER_ID.search(answer)
    return found[1].decode("ascii") if found else ""


def has_answer_id(events: bytes) -> bool:
    """Whether the id has come, or is not to be waited for: it stands in a stream's first event, if anywhere.

    ``events`` may be chunked: the last chunk and the end of an event in CRLF look alike.
    """
    ended = b"\n\n" in events or b"\r\n\r\n" in events
    return ended or len(events) > _FIRST_EVENT_BYTES or _ANSWER_ID.search(events) is not None
