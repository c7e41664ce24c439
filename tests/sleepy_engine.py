"""A stand-in for engines that sleep, with their manners and their faults, and for the GPUs they sit on.

``SleepyEngine`` speaks the control routes of vLLM, SGLang, Ollama or llama.cpp over real HTTP, holds memory
in a ``Ledger`` and gives it back as those do. What went wrong with the real ones is a word in ``faults``.
``House`` is the runtime that starts and ends such engines. Nothing here sleeps: what hangs waits for its end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host.gpus import Gpus, Reading
from anvil_mux.host.seam import HostGpu

GIB = 1 << 30
GUARD = 30.0
CONTEXT = GIB // 2
"""What a CUDA context holds while the engine sleeps."""

FAULTS = {
    "sleep answers 500",
    "sleep frees nothing",
    "sleep hangs",
    "sleep dies",
    "wake answers 500",
    "wake hangs",
    "wake is partial",
    "wake dies",
    "status is nonsense",
    "answers nothing",
    "answers an error",
    "makes embeddings",
    "hears speech",
    "ignores abort",
    "has no sleep routes",
    "refuses to stop",
    "worker survives stop",
    "worker survives kill",
    "refuses to be killed",
}


class Ledger:
    """Which process holds what on which GPU, and what NVML says of it."""

    def __init__(
        self, total: int = 24 * GIB, gpus: tuple[str, ...] = ("0",), *, processes: bool = True
    ) -> None:
        self._total = total
        self._gpus = gpus
        self._processes = processes
        self._lock = threading.Lock()
        self._held: dict[int, dict[str, int]] = {}
        self.readings = 0
        self.most = 0
        """The most that one GPU ever held."""

    def hold(self, pid: int, gpus: tuple[str, ...], amount: int) -> None:
        with self._lock:
            self._held[pid] = dict.fromkeys(gpus, amount)
            self.most = max(self.most, *map(self._used, self._gpus))

    def used(self, gpu: str = "0") -> int:
        with self._lock:
            return self._used(gpu)

    def used_by(self, pid: int, gpu: str) -> int:
        with self._lock:
            return self._held.get(pid, {}).get(gpu, 0)

    def _used(self, gpu: str) -> int:
        return sum(held.get(gpu, 0) for held in self._held.values())

    def probe(self, pids: Collection[int] | None = None) -> Gpus:
        with self._lock:
            self.readings += 1
            return Gpus(tuple(self._reading(gpu) for gpu in self._gpus))

    def _reading(self, gpu: str) -> Reading:
        held = {pid: each[gpu] for pid, each in self._held.items() if each.get(gpu)}
        processes = tuple(held.items()) if self._processes else ()
        return Reading(HostGpu(gpu, f"GPU-{gpu}", total=self._total), sum(held.values()), processes)


class SleepyEngine:
    """One engine: ``kind`` is that of config.Backend.engine."""

    def __init__(
        self, kind: str, model: str, ledger: Ledger, pid: int, gpus: tuple[str, ...], faults: set[str]
    ) -> None:
        assert faults <= FAULTS, faults - FAULTS
        self.kind, self.model, self.faults = kind, model, faults
        self.pid = pid
        self.asked: list[str] = []
        self.adapters: dict[str, str] = {}
        """LoRA adapters that it was told to load, by name."""
        self.how: str | None = None
        """How it ended."""
        self.busy = 0
        """Requests that run inside."""
        self.asleep: set[str] = {"weights"} if kind in ("ollama", "llamacpp") else set()
        """What it has given back: weights, kv_cache."""
        self.garbage = False
        """Its weights are not those of its model."""
        self.may_sleep: threading.Event | None = None
        """The gate of a slow first sleep."""
        self._ledger, self.gpus = ledger, gpus
        self._over = threading.Event()
        self._account()
        self.url = self.open()

    def open(self) -> str:
        """Where it can be reached from now on."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.engine = self
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def end(self, how: str, *, worker_survives: bool = False) -> None:
        if self.how is None:
            self.how = how
            self.close()
        if not worker_survives:
            self._ledger.hold(self.pid, self.gpus, 0)

    def _account(self) -> None:
        parts = {"weights": 10 * GIB, "kv_cache": 8 * GIB}
        held = sum(amount for part, amount in parts.items() if part not in self.asleep)
        self._ledger.hold(self.pid, self.gpus, CONTEXT + held)

    def hang(self) -> None:
        assert self._over.wait(GUARD), "nobody ended an engine that hangs"
        raise ConnectionResetError

    def die(self) -> None:
        threading.Thread(target=self.end, args=("exited with code 1",), daemon=True).start()
        self.hang()

    # What it is asked; an answer is a status and a body

    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, object]:
        self.asked.append(f"{method} {target}")
        url = urlsplit(target)
        if url.path in ("/health", "/"):
            return 200, {}
        if url.path == "/v1/models":
            return 200, {"data": [{"id": name} for name in (self.model, *self.adapters)]}
        if url.path == "/v1/load_lora_adapter":
            return self._load_adapter(body)
        if url.path == "/v1/chat/completions":
            if "makes embeddings" in self.faults:
                return 400, {"error": {"message": f'"{self.model}" does not support chat'}}
            if "hears speech" in self.faults:
                return 404, {"detail": "Not Found"}
            return self._complete(body)
        if url.path == "/v1/embeddings" and "makes embeddings" in self.faults:
            status, answer = self._complete(body)
            return (200, {"data": [{"embedding": [0.5]}]}) if "choices" in answer else (status, answer)
        if "has no sleep routes" in self.faults:
            return 404, {}
        manners: Callable[[str, dict[str, list[str]], dict[str, Any]], tuple[int, object]]
        manners = getattr(self, f"_{self.kind}")
        return manners(f"{method} {url.path}", parse_qs(url.query), body)

    def _load_adapter(self, body: dict[str, Any]) -> tuple[int, object]:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not path.startswith("/adapters/"):
            return 404, {"error": {"message": f"Loading lora {name} failed: No adapter found for {path}"}}
        self.adapters[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.get("model") != self.model:
            return 404, {"error": f"no such model: {body.get('model')}"}
        if "answers nothing" in self.faults:
            self.hang()
        if "answers an error" in self.faults:
            return 200, {"error": {"message": "CUDA error: an illegal memory access was encountered"}}
        if self.kind in ("ollama", "llamacpp"):
            self._take(set())
        if self.asleep:
            self.hang()
        return 200, {"choices": [{"message": {"content": "!!!!" if self.garbage else "Hello"}}]}

    def _give(self, parts: set[str]) -> None:
        """Gives memory back, or does what it does instead."""
        if "sleep hangs" in self.faults:
            self.hang()
        if "sleep dies" in self.faults:
            self.die()
        if self.may_sleep:
            assert self.may_sleep.wait(GUARD)
        self.asleep = parts
        if "sleep frees nothing" not in self.faults:
            self._account()

    def _take(self, still_asleep: set[str]) -> None:
        if "wake hangs" in self.faults:
            self.hang()
        if "wake dies" in self.faults:
            self.die()
        if "wake is partial" in self.faults:
            still_asleep = still_asleep | {"kv_cache"}
        self.asleep = still_asleep
        self._account()

    def _vllm(self, what: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, object]:
        match what:
            case "POST /sleep":
                if "sleep answers 500" in self.faults:
                    return 500, {"error": "CUDA error"}
                self.garbage = query.get("level") == ["2"]
                self._give({"weights", "kv_cache"})
                return 200, None
            case "POST /wake_up":
                if "wake answers 500" in self.faults:
                    return 500, {"error": "CUDA out of memory"}
                tags = set(query.get("tags", ["weights", "kv_cache"]))
                if not tags <= self.asleep:
                    self.die()
                self._take(self.asleep - tags)
                return 200, None
            case "POST /collective_rpc":
                if body.get("method") != "reload_weights":
                    return 400, {}
                self.garbage = "weights" in self.asleep
                return 200, {"results": [None]}
            case "POST /reset_prefix_cache":
                return 200, None
            case "GET /is_sleeping":
                asleep: object = "perhaps" if "status is nonsense" in self.faults else bool(self.asleep)
                return 200, {"is_sleeping": asleep}
        return 404, {}

    def _sglang(self, what: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, object]:
        match what:
            case "GET /v1/loads":
                load = {"dp_rank": 0, "num_running_reqs": self.busy, "num_waiting_reqs": 0}
                return 200, {"loads": [load]}
            case "POST /abort_request":
                if body.get("abort_all") and "ignores abort" not in self.faults:
                    self.busy = 0
                return 200, None
            case "POST /release_memory_occupation" | "POST /resume_memory_occupation":
                return self._occupy(what, set(body["tags"]))
            case "POST /flush_cache":
                return 200, None
        return 404, {}

    def _occupy(self, what: str, tags: set[str]) -> tuple[int, object]:
        release = what == "POST /release_memory_occupation"
        if (self.busy or self.asleep & tags) if release else not tags <= self.asleep:
            self.die()  # an assertion, or a KeyError, ends its scheduler
        if f"{'sleep' if release else 'wake'} answers 500" in self.faults:
            return 500, {}
        if release:
            self._give(tags)
        else:
            self._take(self.asleep - tags)
        return 200, None

    def _ollama(self, what: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, object]:
        match what:
            case "POST /api/generate":
                if body.get("keep_alive") == 0:
                    self._give({"weights", "kv_cache"})
                    return 200, {"done_reason": "unload"}
                if "wake answers 500" in self.faults:
                    return 500, {}
                if "makes embeddings" in self.faults:
                    return 400, {"error": f'"{self.model}" does not support generate'}
                self._take(set())
                return 200, {"done_reason": "load"}
            case "POST /api/embed" if body.get("input") == "":
                self._take(set())
                return 200, {"model": self.model, "embeddings": []}
            case "GET /api/ps":
                loaded = [] if self.asleep else [{"name": f"{self.model}:latest"}]
                return 200, {"models": loaded}
        return 404, {}

    def _llamacpp(self, what: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, object]:
        match what:
            case "POST /models/unload":
                self._give({"weights", "kv_cache"})
                return 200, {"success": True}
            case "POST /models/load":
                if "wake answers 500" in self.faults:
                    return 500, {}
                self._take(set())
                return 200, {"success": True}
            case "GET /models":
                value = "unloaded" if self.asleep else "loaded"
                return 200, {"data": [{"id": self.model, "status": {"value": value}}]}
        return 404, {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    engine: SleepyEngine

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up, or an engine that ended."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: _Server

    def answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.engine.answer(self.command, self.path, json.loads(raw or b"{}"))
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = answer

    def log_message(self, *args: object) -> None:
        """Says nothing."""


class House:
    """A runtime whose services are sleepy engines."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.engines: dict[str, SleepyEngine] = {}
        self.faults: dict[str, set[str]] = {}
        """Service -> what is wrong with its next run."""
        self.calls: list[str] = []
        self.frozen: set[str] = set()
        self._pids = count(100_000_000)  # no real process has such an id

    def start(self, backend: Backend) -> str:
        self.calls.append(f"start {backend.name}")
        engine = self.engines.get(backend.name)
        if engine is None or engine.how is not None:
            engine = SleepyEngine(
                backend.engine,
                backend.served_model or backend.model,
                self.ledger,
                next(self._pids),
                backend.gpus,
                self.faults.pop(backend.name, set()),
            )
            self.engines[backend.name] = engine
        return engine.url

    def stop(self, backend: Backend) -> None:
        self._end(backend, "stop", "refuses to stop", "worker survives stop")

    def kill(self, backend: Backend) -> None:
        self._end(backend, "kill", "refuses to be killed", "worker survives kill")

    def _end(self, backend: Backend, how: str, refuses: str, survives: str) -> None:
        self.calls.append(f"{how} {backend.name}")
        engine = self.engines.get(backend.name)
        if engine is None:
            return
        if refuses in engine.faults:
            raise BackendError(f"service {backend.name} still runs after {how}")
        engine.end("exited with code 0", worker_survives=survives in engine.faults)

    def pause(self, backend: Backend) -> None:
        self.calls.append(f"pause {backend.name}")
        self.frozen.add(backend.name)

    def resume(self, backend: Backend) -> None:
        self.calls.append(f"resume {backend.name}")
        self.frozen.discard(backend.name)

    def lost_its_port(self, backend: Backend) -> bool:
        return False

    def differs(self, backend: Backend) -> str:
        return ""

    def ping(self) -> str:
        return ""

    def is_frozen(self, backend: Backend) -> bool:
        return backend.name in self.frozen

    def pids(self, backend: Backend) -> list[int]:
        engine = self.engines.get(backend.name)
        return [] if engine is None else [engine.pid]

    def owner(self, pid: int) -> str | None:
        return next((name for name, engine in self.engines.items() if engine.pid == pid), None)

    def ended(self, backend: Backend) -> str | None:
        engine = self.engines.get(backend.name)
        return "does not run" if engine is None else engine.how

    def running(self) -> dict[str, str]:
        return {name: engine.url for name, engine in self.engines.items() if engine.how is None}

    def log_tail(self, backend: Backend, lines: int = 20) -> list[str]:
        return []

    def follow_log(self, backend: Backend) -> Iterator[str]:
        return iter(())

    def watch(self, died: Callable[[str], None]) -> None:
        """Nothing is reported."""

    def problem(self) -> str:
        return ""

    def close(self) -> None:
        for engine in self.engines.values():
            engine.end("closed")
