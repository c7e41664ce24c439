"""The log of an engine (``GET /logs``), and what a request would wait for now (``GET /why``).

Nothing here waits for an engine or for Docker but ``/logs``, in the thread of whoever asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs

from anvil_mux.clock import count_in
from anvil_mux.errors import BadRequest, CircuitOpen
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol.completions import finite
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.waits import WaitEstimate
from anvil_mux.telemetry import healthz

LOG_LINES = 200
MAX_LOG_LINES = 5000


class Diagnosis:
    """Any thread. ``tail(backend, lines)``: the last lines of an engine's log. ``external_state(model)``: the
    part of a model's state that the scheduler does not know.
    """

    def __init__(
        self,
        mux: Multiplexer,
        tail: Callable[[str, int], Iterable[str]],
        external_state: Callable[[str], Mapping[str, object]],
    ) -> None:
        self._mux = mux
        self._tail = tail
        self._external_state = external_state

    def logs(self, asked: Asked, reply: Reply) -> None:
        """Tell the log of the query's ``backend``, which may stand in the model's place; else of any."""
        name, query = _named(asked)
        lines = count_in(query.get("lines", [str(LOG_LINES)])[-1], MAX_LOG_LINES)
        if not lines:
            raise BadRequest(f"`lines` is a number from 1 to {MAX_LOG_LINES}", param="lines")
        models = {each.model: each for each in self._mux.overview.status().models}
        services = {each.backend: model for model in models.values() for each in model.backends}
        own = name in services and name not in models
        model = services[name] if own else models[self._mux.resolve(name)]
        backend = query.get("backend", [name if own else model.backend])[-1]
        if services.get(backend) is not model:
            raise BadRequest(f"{model.model} has no backend {backend}", param="backend")
        told = {
            "model": model.model,
            "backend": backend,
            "backends": [each.backend for each in model.backends],
        }
        _answer(reply, {**told, "lines": list(self._tail(backend, lines))})

    def why(self, asked: Asked, reply: Reply) -> None:
        name, query = _named(asked)
        choices = asked.access.choices(name, asked.key)
        model = self._mux.resolve(self._mux.overview.choose(choices) if choices else name)
        tokens = count_in(query.get("tokens", ["0"])[-1])
        if tokens is None:
            raise BadRequest("`tokens` is a whole number", param="tokens")
        found = self._mux.overview.wait_estimate(model)
        stages = self._mux.overview.explain(model, Work(tokens=tokens), staged=True)
        if found.verdict == "served" and not all(
            any(row["chosen"] for row in stage) for stage in stages.values()
        ):
            found = found.refused("the routing policy lets none of its replicas take it.")
        state: dict[str, Any] = dict(self._external_state(model))
        if "elsewhere" in state:
            found = self._external(found, state["elsewhere"]["server"])
        told = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in found._asdict().items()
        }
        told["waits_for"] = [healthz.answer(each) for each in found.waits_for]
        hosts = healthz.hosts_of(self._mux.overview.model(model))
        more: dict[str, Any] = {"hosts": hosts} if hosts else {}
        sentence = found.sentence
        if "fallback" in state:
            said, line_end, log = sentence.partition("\n")  # below it are lines of the engine's log
            said = f"{said}{'' if said.endswith('.') else '.'} {healthz.fallback_words(state['fallback'])}"
            sentence = said + line_end + log
        if choices:
            more["any_of"] = list(choices)
            sentence = f"{name} stands for {' or '.join(choices)}. {sentence}"
        elif name != model:
            what = "a preset of" if asked.access.meant(name).preset else "another name for"
            sentence = f"{name} is {what} {model}. {sentence}"
        _answer(reply, {**told, "sentence": sentence, "stages": finite(stages), **more, **state})

    def _external(self, found: WaitEstimate, server: str) -> WaitEstimate:
        """The wait estimate of a model whose server is elsewhere."""
        try:
            self._mux.circuits.check(self._mux.overview.model(found.model).backend)
        except CircuitOpen as error:
            return found.refused(error.message)
        return found._replace(because=f"{server} answers for it.") if found.verdict == "served" else found


def _named(asked: Asked) -> tuple[str, dict[str, list[str]]]:
    """Read the model in the query, and all of the query."""
    query = parse_qs(asked.request.query)
    if "model" not in query:
        raise BadRequest(f"say of which model: {asked.request.path}?model=NAME", param="model")
    return query["model"][-1], query


def _answer(reply: Reply, told: dict[str, Any]) -> None:
    headers = [JSON, (b"Cache-Control", b"no-store")]
    reply.whole(200, headers, json.dumps(told).encode("ascii") + b"\n")
