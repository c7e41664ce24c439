"""LoRA adapters that an engine is told to load once it runs: vLLM's, which its process forgets when it ends.

An engine that was only asleep, checkpointed or frozen has them still.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import requests

from anvil_mux.config.config import Backend
from anvil_mux.errors import LoadError
from anvil_mux.host.engine_client import EngineClient, has_error

ROUTE = "/v1/load_lora_adapter"


def load_adapters(
    backend: Backend,
    url: str,
    *,
    deadline: float,
    check_cancelled: Callable[[], object] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Have the engine load those of its adapters that it lacks; LoadError says which it did not, and why.

    ``check_cancelled`` is called a few times a second, and what it raises ends that.
    """
    if not backend.loras:
        return
    with EngineClient(backend, url, now, deadline, check_cancelled) as client:
        try:
            there = client.model_ids()
            for name, path in backend.loras:
                if name not in there:
                    _load(client, name, path)
        except requests.RequestException as error:
            raise LoadError(f"{backend.name} could not be given its LoRA adapters: {error}") from error


def _load(client: EngineClient, name: str, path: str) -> None:
    asked = {"lora_name": name, "lora_path": path}
    status, answer = client.ask("POST", ROUTE, asked, client.deadline - client.now())
    if status >= 300 or has_error(answer):
        said = answer[:300].decode("utf-8", "replace")
        raise LoadError(
            f"{client.backend.name} did not load the LoRA adapter {name} from {path}: "
            f"POST {ROUTE} answers {status}: {said}"
        )
