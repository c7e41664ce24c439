"""Reports on the state of the whole, from memory: probes, lists of models, /why, /logs, usage, captures.

Whatever Docker and the engines are doing, nothing here waits for them but ``/logs``, in the thread of whoever
asks. Each report is a function of the reply that it is written to. Nothing is loaded for any.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

from anvil_mux import __version__
from anvil_mux.clock import count_in, mistakes
from anvil_mux.config.kinds import read_seconds
from anvil_mux.config.values import names_in, words_of
from anvil_mux.errors import BadRequest, CircuitOpen, NotFound, UnknownModel, with_log
from anvil_mux.host.seam import GpuUse, GpuUses
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1, ollama
from anvil_mux.protocol.cards import NOTHING_KNOWN, ModelCard, together
from anvil_mux.protocol.completions import finite, parse
from anvil_mux.proxy.access import RequestContext
from anvil_mux.proxy.operations import OF_ONE, Reloads
from anvil_mux.proxy.question import Contents, chosen_by, first_fit, read_json
from anvil_mux.proxy.reply import JSON, TEXT, Capture, Reply
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.status import ModelState
from anvil_mux.scheduler.waits import WaitEstimate
from anvil_mux.telemetry import healthz
from anvil_mux.telemetry.accesslog import Served

LOG_LINES = 200
MAX_LOG_LINES = 5000
WEEK = "7d"
CAPTURED = (
    *("id", "ended", "key", "path", "model", "backend", "status", "code", "waited", "first_byte", "seconds"),
    *("prompt_tokens", "tokens"),
)
"""The fields of a captured request's record that are shown."""

STREAMS = "streams"
"""The check that tells whether streams go on, which a probe of life looks at too."""

UsageSince = Callable[[float], list[dict[str, Any]]]
"""Unix time -> what was used since then, by key and model."""


# Probes


class Probes:
    """Answers probes. Any thread; ``Local.drain`` alone writes ``draining``."""

    def __init__(
        self,
        mux: Multiplexer,
        metrics: Callable[[str], tuple[str, bytes]],
        checks: Mapping[str, Callable[[], str]],
        gpu_uses: Callable[[], GpuUses],
        reloads: Reloads | None,
        notes: Mapping[str, Callable[[], str]],
    ) -> None:
        self._mux = mux
        self._metrics = metrics
        self.checks = checks
        """Name -> what is wrong with it, from memory; nothing when it is well."""
        self.gpu_uses = gpu_uses
        """The use of the GPUs, from memory."""
        self._reloads = reloads
        self._notes = notes
        """Name -> what is to be known and keeps nobody from using us, from memory."""
        self._started = time.time()
        self.draining = False

    def hello(self, reply: Reply) -> None:
        lines = (f"  {model.model}  {model.offered_state}\n" for model in self._mux.overview.status().models)
        text = f"anvil-mux {__version__}\n\nmodels:\n{''.join(lines)}\nstate: /healthz  metrics: /metrics\n"
        reply.fresh(TEXT, text.encode())

    def livez(self, reply: Reply) -> None:
        problem = self.checks[STREAMS]() if STREAMS in self.checks else ""
        reply.fresh(TEXT, f"{problem or 'ok'}\n".encode(), 503 if problem else 200)

    def readyz(self, reply: Reply) -> None:
        context = reply.context
        unseen = ", ".join(self._mux.overview.unseen)
        adoption = unseen and f"it is not known yet whether these run already: {unseen}"
        problems = {**self._problems(), "adoption": adoption}
        ready = not any(problems.values())
        text = "ok\n" if ready else "not ready\n"
        wants_all = not ready or "verbose" in context.request.query.split("&")
        if wants_all and (context.key.state if context.key else not context.access.hides_keys):
            lines = (f"[{'-' if why else '+'}]{name} {why or 'ok'}\n" for name, why in problems.items())
            notes = (f"[~]{name} {why}\n" for name, why in self._notes_now().items())
            text = "".join([*lines, *notes]) + text
        reply.fresh(TEXT, text.encode(), 200 if ready else 503)

    def healthz(self, reply: Reply) -> None:
        state = self.state(logs=reply.context.reads_logs)
        reply.json(state, status=503 if state["problems"] else 200, indent=1)

    def metrics(self, reply: Reply) -> None:
        accept = reply.context.request.fields.get(b"accept", b"").decode("latin-1")
        content_type, text = self._metrics(accept)
        reply.fresh((b"Content-Type", content_type.encode("ascii")), text)

    def state(self, *, brief: bool = False, logs: bool = False) -> dict[str, Any]:
        """Return the /healthz document; ``brief`` is the variant sent on /events.

        ``logs``: with the last lines of engines that failed, which may contain prompts of clients.
        """
        status = self._mux.overview.status()
        problems = {name: why for name, why in self._problems().items() if why}
        ready = [model.model for model in status.models if model.offered_state == "ready"]
        hosts = {host.host: healthz.host_state(host) for host in status.hosts}
        gpu_uses, external = self.gpu_uses(), self._external_states()
        return {
            "status": "unhealthy" if problems else "ok",
            "version": __version__,
            "uptime_seconds": round(time.time() - self._started, 1),
            "problems": problems,
            "notes": self._notes_now(),
            "paused": healthz.pause_state(status.pause, self._mux.overview.wall),
            "adopting": self._mux.overview.unseen,
            "waiting": status.waiting,
            "leases": status.leases,
            "models": {
                m.model: healthz.model_state(m, brief=brief, logs=logs) | external.get(m.model, {})
                for m in status.models
            },
            "gpus": {gpu.gpu: healthz.gpu_state(gpu, gpu_uses.get(gpu.gpu, GpuUse())) for gpu in status.gpus},
            **({"hosts": hosts} if hosts else {}),
            **({"any_of": self._any_of()} if self._mux.overview.config.any_of else {}),
            "resident": ready[0] if ready else None,
            "registry": [model.model for model in status.models],
            "reload": self._reloads.as_json() if self._reloads else None,
        }

    def _any_of(self) -> dict[str, dict[str, object]]:
        """The names that stand for several models, and the one that would serve a plain request now."""
        names: dict[str, dict[str, object]] = {}
        for name, each in self._mux.overview.config.any_of.items():
            rule = first_fit(each.rules, Contents())
            serves = self._mux.overview.choose(rule.models) if rule else None
            words = each.words if each.has_conditions else f"{each.words}; now {serves}"
            names[name] = {**each.to_json(), "words": words, "serves": serves}
        return names

    def _external_states(self) -> dict[str, dict[str, object]]:
        """Model -> the part of its state that the scheduler does not know; see ``healthz.external_state``."""
        return {
            backend.model: healthz.external_state(backend, self._mux.circuits)
            for backend in self._mux.overview.config.backends
            if backend.url or backend.fallback
        }

    def external_state(self, model: str) -> dict[str, object]:
        """The same of one model."""
        return self._external_states().get(model, {})

    def _problems(self) -> dict[str, str]:
        found = {name: check() for name, check in self.checks.items()}
        found["threads"] = "; ".join(f"{thread}: {mistake}" for thread, mistake in mistakes().items())
        found["accepting"] = "shutting down" if self.draining else ""
        return found

    def _notes_now(self) -> dict[str, str]:
        return {name: why for name, note in self._notes.items() if (why := note())}


# Models, in the words of each API


class Lists:
    """Lists the models that a key may use. Any thread."""

    def __init__(self, mux: Multiplexer) -> None:
        self._mux = mux
        self._started = time.time()

    def models(self, reply: Reply) -> None:
        entries = [self._entry(each, reply.context) for each in self._offered(reply.context)]
        reply.fresh(JSON, api.models_list(entries))

    def model(self, reply: Reply) -> None:
        """One model; with no name behind the slash, all of them."""
        context = reply.context
        name = unquote(context.request.path[len(OF_ONE) :])
        if not name:
            return self.models(reply)
        meant = context.access.find(name, api=context.api, key=context.key)
        wanted = name if meant.rules else meant.preset or meant.model
        for each in self._offered(context):
            if each.name == wanted:
                return reply.fresh(JSON, json.dumps(self._entry(each, context)).encode("ascii"))
        raise UnknownModel(name)  # a reload has just taken it away

    def lmstudio_models(self, reply: Reply) -> None:
        states = {each.name: (each.state, each.card) for each in self._offered(reply.context)}
        reply.fresh(JSON, api.lmstudio_list(states))

    def ollama_tags(self, reply: Reply) -> None:
        model_cards = {each.name: each.card for each in self._offered(reply.context)}
        reply.fresh(JSON, ollama.tags(model_cards, self._started))

    def ollama_running(self, reply: Reply) -> None:
        running = {
            each.name: (_stays(each.model), each.card)
            for each in self._offered(reply.context)
            if each.model and not each.preset and each.state in ("ready", "draining")
        }
        reply.fresh(JSON, ollama.running(running, time.time()))

    def ollama_show(self, reply: Reply) -> None:
        context = reply.context
        name = ollama.name_in(parse(read_json(context, reply.client)))
        model = reply.record.model = context.access.find(name, api=context.api, key=context.key).model
        card = self._mux.overview.card(model)
        reply.whole(200, [JSON], ollama.show(model, self._started, card))

    def _offered(self, context: RequestContext) -> list[Offered]:
        """The models that the request's key may use, after each its presets; then the names for several."""
        access, key, cards = context.access, context.key, self._mux.overview.cards()
        models = {model.model: model for model in self._mux.overview.status().models}
        offered = [
            Offered(preset or name, model.offered_state, cards.get(name, NOTHING_KNOWN), model, preset)
            for name, model in models.items()
            for preset in ("", *model.presets)
            if access.may_use(key, name, preset)
        ]
        for name in access.config.any_of:
            meant = [access.meant[each].model for each in names_in(access.rules(name, key))]
            states = [models[each].offered_state for each in meant if each in models]
            if states:
                card = together([cards[each] for each in meant if each in cards])
                offered.append(Offered(name, "ready" if "ready" in states else states[0], card))
        return offered

    def _entry(self, offered: Offered, context: RequestContext) -> dict[str, object]:
        model, preset = offered.model, offered.preset
        return api.model_entry(
            offered.name,
            created=int(self._started),
            state=offered.state,
            aliases=model.aliases if model and not preset else (),
            failed=model is not None and bool(model.last_error),
            parent=model.model if model and preset else "",
            card=offered.card,
            anthropic=b"anthropic-version" in context.request.fields,
        )


class Offered(NamedTuple):
    """One name in the lists."""

    name: str
    state: str
    """The state of its model; of several, that of the one that would serve now."""
    card: ModelCard
    """The card of its model; of several, what holds for each."""
    model: ModelState | None = None
    """The one model that it stands for, if it does."""
    preset: str = ""
    """The preset of it that is meant; "": the model itself."""


def _stays(model: ModelState) -> float:
    """The seconds for which a resident model stays if nobody uses it from now on."""
    resident = next(each for each in model.backends if each.backend == model.backend)
    left = resident.ttl if resident.unload_seconds is None else resident.unload_seconds
    return math.inf if left is None else left


# The log of an engine, and what a request would wait for now


class Diagnosis:
    """Any thread. ``tail(backend, lines)``: the last lines of an engine's log."""

    def __init__(self, mux: Multiplexer, tail: Callable[[str, int], Iterable[str]], probes: Probes) -> None:
        self._mux = mux
        self._tail = tail
        self._probes = probes

    def logs(self, reply: Reply) -> None:
        """The log of the query's ``backend``, which may stand in the model's place; else of any."""
        name, query = _named(reply.context)
        lines = count_in(query.get("lines", [str(LOG_LINES)])[-1], MAX_LOG_LINES)
        if not lines:
            raise BadRequest(f"`lines` is a number from 1 to {MAX_LOG_LINES}", param="lines")
        models = {each.model: each for each in self._mux.overview.status().models}
        services = {each.backend: model for model in models.values() for each in model.backends}
        own = name in services and name not in models
        meant = "" if own else self._mux.resolve(reply.context.access.configured(name))
        model = services[name] if own else models.get(meant)
        if model is None:
            raise UnknownModel(meant)  # a reload has just brought it
        backend = query.get("backend", [name if own else model.backend])[-1]
        if services.get(backend) is not model:
            raise BadRequest(f"{model.model} has no backend {backend}", param="backend")
        backends = [each.backend for each in model.backends]
        log = list(self._tail(backend, lines))
        reply.json({"model": model.model, "backend": backend, "backends": backends, "lines": log})

    def why(self, reply: Reply) -> None:
        access = reply.context.access
        name, query = _named(reply.context)
        name = access.configured(name)
        tokens = count_in(query.get("tokens", ["0"])[-1])
        if tokens is None:
            raise BadRequest("`tokens` is a whole number", param="tokens")
        rules = access.rules(name, reply.context.key)
        rule = chosen_by(rules, _contents(query, tokens)) if rules else None
        chosen = self._mux.overview.choose(rule.models) if rule else name
        meant = access.meant.get(chosen)  # a reload may have added the name, or taken it away, by now
        model = meant.model if meant else self._mux.resolve(chosen)
        found = self._mux.overview.wait_estimate(model)
        stages = self._mux.overview.explain(model, Work(tokens=tokens), staged=True)
        if found.verdict == "served" and not all(
            any(row["chosen"] for row in stage) for stage in stages.values()
        ):
            found = found.refused("the routing policy lets none of its replicas take it.")
        state: dict[str, Any] = dict(self._probes.external_state(model))
        if "elsewhere" in state:
            found = self._external(found, state["elsewhere"]["server"])
        estimate = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in found._asdict().items()
        }
        estimate["waits_for"] = [healthz.answer(each) for each in found.waits_for]
        overview = self._mux.overview
        hosts = healthz.hosts_of(overview.model(model), overview.own_host_problem())
        more: dict[str, Any] = {"hosts": hosts} if hosts else {}
        sentence = found.sentence
        for words in self._mux.overview.paused_by_hand(model):
            if words not in sentence:
                stop = "" if sentence.endswith(".") else "."
                sentence = f"{sentence}{stop} {words}"
        if "fallback" in state:
            stop = "" if sentence.endswith(".") else "."
            sentence = f"{sentence}{stop} {healthz.fallback_words(state['fallback'])}"
        if rule:
            more |= {"any_of": list(names_in(rules)), "chosen": chosen, "when": dict(rule.when)}
            why = f" ({rule.conditions})" if rule.when else ""
            here = f" For this request that is {chosen}{why}." if len(rules) > 1 else ""
            sentence = f"{name} stands for {words_of(rules)}.{here} {sentence}"
        elif meant and name != model:
            what = "a preset of" if meant.preset else "another name for"
            sentence = f"{name} is {what} {model}. {sentence}"
        if found.verdict == "refused" and reply.context.reads_logs:
            backends = self._mux.overview.model(model).backends
            sentence = with_log(sentence, next((each.log for each in backends if each.log), ()))
        reply.json({**estimate, "sentence": sentence, "stages": finite(stages), **more, **state})

    def _external(self, found: WaitEstimate, server: str) -> WaitEstimate:
        """The wait estimate of a model whose server is elsewhere."""
        try:
            self._mux.circuits.check(self._mux.overview.model(found.model).backend)
        except CircuitOpen as error:
            return found.refused(error.message)
        return found._replace(because=f"{server} answers for it.") if found.verdict == "served" else found


def _contents(query: Mapping[str, Sequence[str]], tokens: int) -> Contents:
    """The contents of the request that the query is about: ``with=images,tools``."""
    parts = set(",".join(query.get("with", ())).split(",")) - {""}
    if unknown := parts - {"images", "audio", "tools"}:
        raise BadRequest(f"`with` names images, audio or tools, not {unknown.pop()}", param="with")
    return Contents(images="images" in parts, audio="audio" in parts, tools="tools" in parts, tokens=tokens)


def _named(context: RequestContext) -> tuple[str, dict[str, list[str]]]:
    """Read the model in the query, and all of the query."""
    query = parse_qs(context.request.query)
    if "model" not in query:
        raise BadRequest(f"say of which model: {context.request.path}?model=NAME", param="model")
    return query["model"][-1], query


# Usage

_DAYS = re.compile(r"([0-9]{1,3})d")


def report_usage(usage: UsageSince, reply: Reply) -> None:
    """Answer ``GET /usage?since=7d``: what each API key has used of each model."""
    since = time.time() - seconds_back(parse_qs(reply.context.request.query).get("since", [WEEK])[0])
    reply.json({"since": round(since), "usage": usage(since)}, indent=1)


def seconds_back(text: str) -> float:
    """Read how far back is asked for: days, or a time as settings have it."""
    if days := _DAYS.fullmatch(text):
        return int(days[1]) * 86400.0
    try:
        return min(read_seconds(text), 1000 * 86400.0)
    except ValueError:
        raise BadRequest(f"`since` must be a time such as 12h or 7d, not {text!r}", param="since") from None


# Requests


class Captures:
    """The last requests that were captured, as many as are wanted: ``capture: 50``. Any thread.

    Bodies are kept in memory only, the first bytes of each, and are gone with the program, or with a reload
    that says ``capture: 0``.
    """

    def __init__(self, most: int) -> None:
        # Guards what stands below it; held for microseconds.
        self._lock = threading.Lock()
        self._kept: deque[tuple[Served, dict[str, object]]] = deque(maxlen=most)

    @property
    def most(self) -> int:
        """How many are kept."""
        return self._kept.maxlen or 0

    def resize(self, most: int) -> None:
        """Keep so many from now on, and no more of those that are here."""
        with self._lock:
            if most != self._kept.maxlen:
                self._kept = deque(self._kept, most)

    def keep(self, capture: Capture, request: http1.Request, record: Served) -> None:
        bodies = capture.as_json(request)
        with self._lock:
            self._kept.append((record, bodies))

    def requests(self, reply: Reply) -> None:
        """Answer ``GET /requests`` with a list of all that are kept, or with the one of ``?id=``."""
        with self._lock:
            kept = list(self._kept)
        id = parse_qs(reply.context.request.query).get("id", [""])[0]
        if id:
            reply.json(self._one(kept, id), indent=1)
        else:
            requests = [_about(record) for record, _ in kept]
            reply.json({"capture": self.most, "requests": requests}, indent=1)

    def _one(self, kept: Sequence[tuple[Served, dict[str, object]]], id: str) -> dict[str, object]:
        for record, bodies in reversed(kept):  # a client may use an id twice
            if record.request_id == id:
                return {**_about(record), **bodies}
        most = self.most
        how = f"the last {most} are" if most else "none is; `capture: 50` in x-anvil keeps the last 50"
        raise NotFound(f"No request {id} is kept: {how}.")


def _about(record: Served) -> dict[str, object]:
    fields = record.as_json()
    return {name: fields[name] for name in CAPTURED}
