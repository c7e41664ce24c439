"""The models that a key may use, in the words of each API. From memory; nothing is loaded."""

from __future__ import annotations

import json
import time
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
        return 200, JSON, api.models_list(map(self._entry, self._visible(asked)))

    def model(self, asked: Asked) -> Answer:
        name = unquote(asked.request.path[len(OF_ONE) :])
        visible = self._visible(asked)
        found = next((model for model in visible if name in (model.model, *model.aliases)), None)
        if found is None:
            raise UnknownModel(name, [model.model for model in visible])
        return 200, JSON, json.dumps(self._entry(found)).encode("ascii")

    def lmstudio_models(self, asked: Asked) -> Answer:
        return 200, JSON, api.lmstudio_list({m.model: m.offered_state for m in self._visible(asked)})

    def ollama_tags(self, asked: Asked) -> Answer:
        return 200, JSON, ollama.tags([model.model for model in self._visible(asked)], self._started)

    def ollama_running(self, asked: Asked) -> Answer:
        resident = [m for m in self._visible(asked) if m.offered_state in ("ready", "draining")]
        ttls = {backend.name: backend.ttl for backend in asked.access.config.backends}
        return 200, JSON, ollama.running({m.model: ttls.get(m.backend) for m in resident}, time.time())

    def ollama_show(self, model: str) -> bytes:
        return ollama.show(model, self._started)

    def _visible(self, asked: Asked) -> list[ModelState]:
        """The models that the request's key may use."""
        return [
            model
            for model in self._mux.overview.status().models
            if asked.access.may_use(asked.key, model.model)
        ]

    def _entry(self, model: ModelState) -> dict[str, object]:
        return api.model_entry(
            model.model,
            created=int(self._started),
            state=model.offered_state,
            aliases=model.aliases,
            failed=bool(model.last_error),
        )
