"""The models that a key may use, in the words of each API. From memory; nothing is loaded."""

from __future__ import annotations

import json
import math
import time
from itertools import starmap
from urllib.parse import unquote

from anvil_mux.errors import UnknownModel
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, ollama
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.probes import Answer
from anvil_mux.proxy.reply import JSON
from anvil_mux.scheduler.status import ModelState

OF_ONE = "/v1/models/"


class Lists:
    """Answers the routes that list models. Any thread."""

    def __init__(self, mux: Multiplexer) -> None:
        self._mux = mux
        self._started = time.time()

    def models(self, asked: Asked) -> Answer:
        entries = starmap(self._entry, self._offered(asked))
        return 200, JSON, api.models_list([*entries, *self._choices(asked)])

    def model(self, asked: Asked) -> Answer:
        name = unquote(asked.request.path[len(OF_ONE) :])
        offered = self._offered(asked)
        for model, preset in offered:
            if name == preset or (not preset and name in (model.model, *model.aliases)):
                return 200, JSON, json.dumps(self._entry(model, preset)).encode("ascii")
        choices = {str(entry["id"]): entry for entry in self._choices(asked)}
        if name in choices:
            return 200, JSON, json.dumps(choices[name]).encode("ascii")
        raise UnknownModel(name, [*(preset or model.model for model, preset in offered), *choices])

    def lmstudio_models(self, asked: Asked) -> Answer:
        states = {preset or model.model: model.offered_state for model, preset in self._offered(asked)}
        return 200, JSON, api.lmstudio_list(states | self._states(asked))

    def ollama_tags(self, asked: Asked) -> Answer:
        names = [preset or model.model for model, preset in self._offered(asked)]
        names += self._states(asked)
        return 200, JSON, ollama.tags(names, self._started)

    def ollama_running(self, asked: Asked) -> Answer:
        resident = [m for m in self._visible(asked) if m.offered_state in ("ready", "draining")]
        return 200, JSON, ollama.running({m.model: _stays(m) for m in resident}, time.time())

    def ollama_show(self, model: str) -> bytes:
        return ollama.show(model, self._started)

    def _offered(self, asked: Asked) -> list[tuple[ModelState, str]]:
        """The models that the request's key may use, and after each its presets; "": the model itself."""
        access, key = asked.access, asked.key
        return [
            (model, preset)
            for model in self._mux.overview.status().models
            for preset in ("", *model.presets)
            if access.may_use(key, model.model, preset)
        ]

    def _visible(self, asked: Asked) -> list[ModelState]:
        """The models that the request's key may use."""
        return [
            model
            for model in self._mux.overview.status().models
            if asked.access.may_use(asked.key, model.model)
        ]

    def _states(self, asked: Asked) -> dict[str, str]:
        """The names that stand for several models, and the state of the one that would serve now."""
        access, found = asked.access, dict[str, str]()
        any_of = access.config.any_of
        states = {m.model: m.offered_state for m in self._mux.overview.status().models} if any_of else {}
        for name in any_of:
            models = [access.meant(each).model for each in access.choices(name, asked.key)]
            own = [states[model] for model in models if model in states]
            if own:
                found[name] = "ready" if "ready" in own else own[0]
        return found

    def _choices(self, asked: Asked) -> list[dict[str, object]]:
        """The entries of the names that stand for several models."""
        created = int(self._started)
        states = self._states(asked)
        return [api.model_entry(name, created=created, state=state) for name, state in states.items()]

    def _entry(self, model: ModelState, preset: str) -> dict[str, object]:
        return api.model_entry(
            preset or model.model,
            created=int(self._started),
            state=model.offered_state,
            aliases=() if preset else model.aliases,
            failed=bool(model.last_error),
            parent=model.model if preset else "",
        )


def _stays(model: ModelState) -> float:
    """The seconds for which a resident model stays if nobody uses it from now on."""
    resident = next(each for each in model.backends if each.backend == model.backend)
    left = resident.ttl if resident.unload_seconds is None else resident.unload_seconds
    return math.inf if left is None else left
