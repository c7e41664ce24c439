"""A stand-in engine, run as a program: it answers every route of every engine, and what it is told to answer.

Only the model ``vllm`` has Anthropic's routes, so that for others they are translated.

``python -m tests.values.engine MODEL FOLDER``: a file in FOLDER, named by a path (``name_of``), holds what is
answered there in place of what an engine would say. With ``stream`` in the question an answer is one event.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

_CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
_USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}
_TIMINGS = {"cache_n": 1, "prompt_n": 6, "prompt_ms": 10.5, "predicted_n": 3, "predicted_ms": 20.5}
_SAID = {"role": "assistant", "content": "hello", "reasoning_content": "hm", "tool_calls": [_CALL]}


def answers(model: str) -> dict[str, Any]:
    """Path -> what an engine says there; ``stream`` before a path: the events of a stream."""
    ends = {"finish_reason": "stop", "stop_reason": None, "index": 0}
    chat = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "usage": _USAGE,
        "timings": _TIMINGS,
    }
    return {
        "/v1/chat/completions": {**chat, "choices": [{**ends, "message": _SAID}]},
        "stream/v1/chat/completions": {**chat, "choices": [{**ends, "delta": _SAID}]},
        "/v1/completions": {**chat, "choices": [{**ends, "text": "hello"}]},
        "stream/v1/completions": {**chat, "choices": [{**ends, "text": "hello"}]},
        "/v1/embeddings": {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}],
            "model": model,
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        },
        "/v1/responses": {"id": "resp_1", "object": "response", "status": "completed", "usage": _USAGE},
        "stream/v1/responses": {"type": "response.completed", "response": {"id": "resp_1", "usage": _USAGE}},
        "/v1/models": {
            "object": "list",
            "data": [
                {
                    "id": model,
                    "object": "model",
                    "created": 1,
                    "max_model_len": 4096,
                    "meta": {"n_ctx": 4096},
                    "architecture": {"input_modalities": ["text"]},
                }
            ],
        },
        "/v1/model": {"id": model},
        "/models": {"data": [{"id": model, "status": {"value": "loaded", "failed": False}}]},
        "/props": {
            "build_info": "b1",
            "model_path": "/nothing.gguf",
            "total_slots": 2,
            "n_ctx": 4096,
            "default_generation_settings": {"n_ctx": 2048},
            "modalities": {"vision": False, "audio": True},
            "chat_template_caps": {"supports_tools": True, "supports_preserve_reasoning": True},
        },
        "/model_info": {"is_generation": False, "has_image_understanding": True},
        "/api/show": {"model_info": {"a.context_length": 4096}, "capabilities": ["completion", "tools"]},
        "/slots": [{"id": 0, "id_task": 3, "is_processing": False, "n_prompt_tokens": 5, "n_ctx": 4096}],
        "/tokenize": {"tokens": [1, 2, 3], "count": 3},
        "/apply-template": {"prompt": "hello"},
        "/is_sleeping": {"is_sleeping": False},
        "/v1/loads": {"loads": [{"num_reqs": 0, "num_running_reqs": 0}]},
        "/api/ps": {"models": [{"name": model, "size": 1, "size_vram": 1}]},
        "/api/tags": {"models": [{"name": model}]},
        "/api/generate": {"model": model, "response": "", "done": True},
        "/metrics": "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n",
    }


def name_of(path: str) -> str:
    return quote(path, safe="")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path in ("/sleep", "/api/generate", "/wake_up"):
            self.server.asleep = path == "/sleep" or b'"keep_alive": 0' in body
        stream = path.startswith("/v1/") and (b'"stream": true' in body or b'"stream":true' in body)
        name = f"stream{path}" if stream else path
        said = self._said(name)
        self.send_response(404 if path.startswith("/v1/messages") and self.server.model != "vllm" else 200)
        if stream:
            events = f"data: {said}\n\n" if said else ""
            end = "" if path == "/v1/responses" else "data: [DONE]\n\n"
            self._send("text/event-stream", events + end)
        else:
            self._send("application/json", said)

    do_POST = do_GET

    def _said(self, name: str) -> str:
        try:
            return (self.server.folder / name_of(name)).read_text("utf-8", "surrogatepass")
        except OSError:
            pass
        if name == "/is_sleeping":
            return json.dumps({"is_sleeping": self.server.asleep})
        if name == "/api/ps" and self.server.asleep:
            return '{"models": []}'
        said = self.server.answers.get(name, {})
        return said if isinstance(said, str) else json.dumps(said)

    def _send(self, kind: str, said: str) -> None:
        data = said.encode("utf-8", "surrogatepass")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *about: object) -> None:
        pass


class Engine(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, model: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", int(os.environ["PORT"])), Handler)
        self.model = model
        self.answers = answers(model)
        self.folder = folder
        self.asleep = False

    def handle_error(self, *about: object) -> None:
        pass


if __name__ == "__main__":
    Engine(sys.argv[1], Path(sys.argv[2])).serve_forever()
