"""An engine that is asked in the events of OpenAI's realtime API, over a socket of PyPI's `websockets`.

    python tests/realtime_engine.py PORT MODEL

It knows its model by the name MODEL only.
"""

from __future__ import annotations

import json
import os
import sys
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

PORT, MODEL = int(sys.argv[1]), sys.argv[2]


def look(connection: ServerConnection, request: Request) -> Response | None:
    url = urlsplit(request.path)
    if url.path != "/v1/realtime":
        return connection.respond(HTTPStatus.OK, json.dumps({"data": [{"id": MODEL}]}))
    if parse_qs(url.query).get("model") != [MODEL]:
        return connection.respond(HTTPStatus.NOT_FOUND, f"no such model: {url.query}\n")
    return None


def talk(connection: ServerConnection) -> None:
    def say(kind: str, **about: object) -> None:
        connection.send(json.dumps({"type": kind, "event_id": "e", **about}))

    say("session.created", session={"type": "realtime", "model": MODEL})
    said = ""
    try:
        for message in connection:
            event = json.loads(message)
            match event["type"]:
                case "conversation.item.create":
                    said = event["item"]["content"][0]["text"]
                case "response.create":
                    about = {"response_id": "r", "item_id": "i", "output_index": 0, "content_index": 0}
                    for word in said.split():
                        say("response.output_text.delta", delta=f"{word} ", **about)
                    say("response.done", response={"id": "r", "status": "completed"})
                case "input_audio_buffer.append":
                    say("input_audio_buffer.speech_started", audio_start_ms=len(event["audio"]), item_id="i")
                case "response.cancel":
                    os._exit(1)  # as an engine that runs out of memory
    except ConnectionClosed:
        pass
    print("closed with", connection.close_code, connection.close_reason, flush=True)


with serve(talk, "127.0.0.1", PORT, process_request=look, max_size=None) as server:
    server.serve_forever()
