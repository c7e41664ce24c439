#!/usr/bin/env python3
"""A stand-in for an inference engine: no GPU, no weights, nothing but Python's standard library.

    bin/demo-engine --model NAME --load-seconds 3 --tokens-per-second 40 [--port PORT]

bin/demo-engine is a link to this file, which runs by itself, under any Python from 3.10 on.

It listens at once and is ready after its load time, as GET /health tells. It then speaks the OpenAI API
(chat, completions, embeddings, models) and Anthropic's messages, streaming and not. Its answers name the
model, so one sees who answered; with max_tokens they are exactly that long.

With --enable-sleep-mode, and VLLM_SERVER_DEV_MODE=1 in its environment, it sleeps and wakes as vLLM does: it
is healthy all the while, and requests that come while it sleeps hang until it is woken.
"""

import argparse
import base64
import hashlib
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

DIMENSIONS = 8
CONTEXT = 4096
"""The length of context that it claims to have."""
MOST_BYTES = 64 << 20


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class DemoEngine(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        address: tuple[str, int],
        model: str,
        load_seconds: float,
        tokens_per_second: float,
        wake_seconds: float | None,
    ) -> None:
        super().__init__(address, DemoHandler)
        self.model = model
        self.wake_seconds = wake_seconds
        self.asleep: set[str] = set()
        self.has_weights = True
        self.is_awake = threading.Event()
        self.is_awake.set()
        self.pause = 1 / tokens_per_second
        self.ready_at = time.monotonic() + load_seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # A client that leaves is no error.
            super().handle_error(request, client_address)


class DemoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "demo-engine"
    server: DemoEngine

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self.answer(GETS)

    def do_POST(self) -> None:
        self.answer(POSTS)

    def answer(self, routes: dict[str, Any]) -> None:
        try:
            raw = self.read_body()
            path = self.path.partition("?")[0]
            if path in SLEEP_ROUTES and self.server.wake_seconds is None:
                raise Refusal(404, "not_found", "it was not started with sleep mode")
            if path not in routes:
                raise Refusal(404, "not_found", f"no route {self.command} {path}")
            left = self.server.ready_at - time.monotonic()
            if left > 0:
                raise Refusal(503, "loading", f"{self.server.model} is loading, {left:.1f} s to go")
            if path not in AWAKE_OR_NOT:
                self.server.is_awake.wait()
            routes[path](self, *([self.parse(raw)] if self.command == "POST" else []))
        except Refusal as refusal:
            error = {"message": refusal.message, "type": "invalid_request_error", "code": refusal.code}
            if self.path.startswith("/v1/messages"):
                error = {"type": refusal.code, "message": refusal.message}
                self.send(refusal.status, {"type": "error", "error": error})
            else:
                self.send(refusal.status, {"error": {**error, "param": None}})

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(self.read_chunks())
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            self.close_connection = True
            raise Refusal(413, "too_large", f"Content-Length {length} is not accepted")
        return self.rfile.read(int(length))

    def read_chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def parse(self, raw: bytes) -> dict[str, Any]:
        try:
            body = json.loads(raw or b"{}")
        except ValueError as error:
            raise Refusal(400, "bad_json", f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refusal(400, "bad_json", "the body must be a JSON object")
        if body.get("model", self.server.model) != self.server.model:
            raise Refusal(404, "model_not_found", f"this is {self.server.model}, not {body['model']}")
        return body

    def send(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.write(status, raw, "Content-Type: application/json", f"Content-Length: {len(raw)}")

    def write(self, status: int, raw: bytes, *headers: str) -> None:
        """Head and first bytes in one write, so that they leave in one packet."""
        lines = [f"HTTP/1.1 {status} {self.responses[status][0]}", "Server: demo-engine", *headers]
        if self.close_connection:
            lines.append("Connection: close")
        if self.path != "/health":
            self.log_request(status)
        self.wfile.write("\r\n".join([*lines, "", ""]).encode() + raw)

    def stream(self, events: Iterator[str]) -> None:
        chunks = (f"{len(event.encode()):x}\r\n{event}\r\n".encode() for event in events)
        self.write(200, next(chunks), "Content-Type: text/event-stream", "Transfer-Encoding: chunked")
        for chunk in chunks:
            self.wfile.write(chunk)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        say(f"{self.server.model}: {self.requestline} {args[1]}")

    # Routes

    def health(self) -> None:
        self.send(200, {"status": "ok"})

    def models(self) -> None:
        model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "anvil-mux"}
        self.send(200, {"object": "list", "data": [{**model, "max_model_len": CONTEXT}]})

    # Sleep

    def sleep(self, body: dict[str, Any]) -> None:
        level = self.query().get("level", ["1"])[0]
        self.server.is_awake.clear()
        self.server.asleep = {"weights", "kv_cache"}
        self.server.has_weights = level != "2"
        self.send_nothing()

    def wake_up(self, body: dict[str, Any]) -> None:
        tags = set(self.query().get("tags", ["weights", "kv_cache"]))
        if not tags <= self.server.asleep:
            raise Refusal(500, "internal_error", f"{', '.join(sorted(tags))}: not asleep")
        time.sleep((self.server.wake_seconds or 0.0) * len(tags) / 2)
        self.server.asleep -= tags
        if not self.server.asleep:
            self.server.is_awake.set()
        self.send_nothing()

    def is_sleeping(self) -> None:
        self.send(200, {"is_sleeping": bool(self.server.asleep)})

    def collective_rpc(self, body: dict[str, Any]) -> None:
        reloads = body.get("method") == "reload_weights"
        self.server.has_weights = reloads and "weights" not in self.server.asleep
        self.send(200, {"results": [None]})

    def reset_prefix_cache(self, body: dict[str, Any]) -> None:
        self.send_nothing()

    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.path.partition("?")[2])

    def send_nothing(self) -> None:
        self.write(200, b"", "Content-Length: 0")

    # Models

    def chat(self, body: dict[str, Any]) -> None:
        def choice(text: str, finish: str | None, streamed: bool) -> dict[str, Any]:
            message = {"content": text} if streamed else {"role": "assistant", "content": text}
            return {"index": 0, "delta" if streamed else "message": message, "finish_reason": finish}

        self.complete(body, "chat.completion", said(body), choice)

    def completions(self, body: dict[str, Any]) -> None:
        def choice(text: str, finish: str | None, streamed: bool) -> dict[str, Any]:
            return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}

        self.complete(body, "text_completion", text_of(body.get("prompt")), choice)

    def complete(self, body: dict[str, Any], kind: str, prompt: str, choice: Any) -> None:
        words, finish = self.compose(prompt, limit(body, "max_completion_tokens", "max_tokens"))
        head = {"id": f"demo-{time.time_ns():x}", "created": int(time.time()), "model": self.server.model}
        counts = len(prompt.split()), len(words)
        usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
        if not body.get("stream"):
            text = "".join(self.paced(words))
            choices = [choice(text, finish, False)]
            self.send(200, {**head, "object": kind, "choices": choices, "usage": usage})
            return
        head["object"] = f"{kind}.chunk" if kind == "chat.completion" else kind
        options = body.get("stream_options")
        wants_usage = isinstance(options, dict) and options.get("include_usage")

        def events() -> Iterator[str]:
            if kind == "chat.completion":
                role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield data({**head, "choices": [role]})
            for word in self.paced(words):
                yield data({**head, "choices": [choice(word, None, True)]})
            yield data({**head, "choices": [choice("", finish, True)]})
            if wants_usage:
                yield data({**head, "choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        self.stream(events())

    def messages(self, body: dict[str, Any]) -> None:
        prompt = said(body)
        words, finish = self.compose(prompt, limit(body, "max_tokens"))
        stop = "max_tokens" if finish == "length" else "end_turn"
        usage = {"input_tokens": len(prompt.split()), "output_tokens": 0}
        head = {"id": f"msg_demo{time.time_ns():x}", "type": "message", "role": "assistant"}
        message = {**head, "model": self.server.model, "stop_sequence": None}
        if not body.get("stream"):
            content = [{"type": "text", "text": "".join(self.paced(words))}]
            usage["output_tokens"] = len(words)
            self.send(200, {**message, "content": content, "stop_reason": stop, "usage": usage})
            return

        def events() -> Iterator[str]:
            start: dict[str, Any] = {**message, "content": [], "stop_reason": None, "usage": usage}
            yield event("message_start", message=start)
            yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            for word in self.paced(words):
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
            yield event("content_block_stop", index=0)
            delta = {"stop_reason": stop, "stop_sequence": None}
            yield event("message_delta", delta=delta, usage={"output_tokens": len(words)})
            yield event("message_stop")

        self.stream(events())

    def embeddings(self, body: dict[str, Any]) -> None:
        given = body.get("input")
        texts: list[Any] = given if isinstance(given, list) else [given]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise Refusal(400, "bad_input", "input must be a text or a list of texts")
        pack = body.get("encoding_format") == "base64"
        found = [
            {"object": "embedding", "index": index, "embedding": embedding(text, pack)}
            for index, text in enumerate(texts)
        ]
        count = sum(len(text.split()) for text in texts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        self.send(200, {"object": "list", "data": found, "model": self.server.model, "usage": usage})

    # Words

    def compose(self, prompt: str, most: int | None) -> tuple[list[str], str]:
        """The tokens of an answer, and why it ends: by itself, or at the length asked for."""
        text = f"This is {self.server.model}. "
        text += f"You said: {prompt[:200].strip()}" if prompt.strip() else "You said nothing."
        words = [word + " " for word in text.split()] if self.server.has_weights else ["!!!!"]
        words[-1] = words[-1].rstrip()
        if most is None or most == len(words):
            return words, "stop"
        more = (f" {number}" for number in itertools.count(1))
        return list(itertools.islice(itertools.chain(words, more), most)), "length"

    def paced(self, words: list[str]) -> Iterator[str]:
        begun = time.monotonic()
        for count, word in enumerate(words, 1):
            left = begun + count * self.server.pause - time.monotonic()
            if left > 0:
                time.sleep(left)
            yield word


GETS = {
    "/health": DemoHandler.health,
    "/v1/models": DemoHandler.models,
    "/is_sleeping": DemoHandler.is_sleeping,
}
POSTS = {
    "/sleep": DemoHandler.sleep,
    "/wake_up": DemoHandler.wake_up,
    "/collective_rpc": DemoHandler.collective_rpc,
    "/reset_prefix_cache": DemoHandler.reset_prefix_cache,
    "/v1/chat/completions": DemoHandler.chat,
    "/v1/completions": DemoHandler.completions,
    "/v1/embeddings": DemoHandler.embeddings,
    "/v1/messages": DemoHandler.messages,
}
SLEEP_ROUTES = {"/is_sleeping", "/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache"}
AWAKE_OR_NOT = SLEEP_ROUTES | {"/health", "/v1/models"}


def said(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise Refusal(400, "invalid_request_error", "messages must be a list of messages")
    return text_of(messages[-1].get("content")) if messages else ""


def text_of(content: Any) -> str:
    """A text, the text parts of a list, or nothing."""
    if isinstance(content, list):
        return " ".join(text_of(part.get("text") if isinstance(part, dict) else part) for part in content)
    return content if isinstance(content, str) else ""


def limit(body: dict[str, Any], *keys: str) -> int | None:
    most = next((body[key] for key in keys if body.get(key) is not None), None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise Refusal(400, "invalid_request_error", f"{keys[-1]} must be a whole number of at least 1")
    return most


def embedding(text: str, pack: bool) -> list[float] | str:
    raw = hashlib.blake2b(text.encode(), digest_size=2 * DIMENSIONS).digest()
    vector = [value / 32768 for value in struct.unpack(f"<{DIMENSIONS}h", raw)]
    return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *vector)).decode() if pack else vector


def data(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def event(kind: str, **body: Any) -> str:
    return f"event: {kind}\n{data({'type': kind, **body})}"


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


def say(text: str) -> None:
    with suppress(OSError):  # a disk that is full costs the line
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="the only model id it answers to")
    parser.add_argument("--load-seconds", type=seconds, default=1.0)
    parser.add_argument("--tokens-per-second", type=seconds, default=40.0)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--wake-seconds", type=seconds, default=0.3)
    parser.add_argument("--host", default="127.0.0.1")
    port = os.environ.get("PORT") or "8000"
    parser.add_argument("--port", type=int, default=port, help="default: $PORT, or 8000")
    given = parser.parse_args()
    if not given.tokens_per_second:
        parser.error("--tokens-per-second must be more than 0")
    # SystemExit out of serve_forever; streams that still run are cut, as an engine's are.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    address = (given.host, given.port)
    sleeps = given.enable_sleep_mode and os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    wake = given.wake_seconds if sleeps else None
    with DemoEngine(address, given.model, given.load_seconds, given.tokens_per_second, wake) as engine:
        where = f"http://{given.host}:{engine.server_port}"
        say(f"{given.model}: listens on {where}, ready in {given.load_seconds:g} s")
        engine.serve_forever()


if __name__ == "__main__":
    main()
