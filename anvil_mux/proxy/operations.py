"""llama.cpp's router API: models loaded, unloaded and followed by hand, as Open WebUI and others do it.

``POST /models/pin`` and ``/models/unpin`` are ours: nobody else has them.

``POST /models/load`` says that the load has begun, as llama.cpp does; a load that fails or ends within a
moment says that instead, and ``?wait=true`` waits for the end of any. A load that was asked for goes on when
the client leaves. ``GET /models/sse`` tells every model's status, and then each change of it, until the
client leaves or the program ends; it looks a few times a second, so no request pays for it.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

from anvil_mux.errors import BadRequest, ClientGone, MuxError
from anvil_mux.multiplexer import Multiplexer
from anvil_mux.protocol import api, naming
from anvil_mux.proxy.dispatch import Dispatcher
from anvil_mux.proxy.reply import JSON, Call

LOOK_SECONDS = 0.25
COMMENT_SECONDS = 15.0
"""Between two signs of life to those who follow."""
MOMENT_SECONDS = 0.5
"""How long a load may take to be answered with its end."""

DONE = b'{"success":true}'


class Operations:
    """Answers these routes. Any thread."""

    def __init__(self, mux: Multiplexer, dispatcher: Dispatcher, ending: Callable[[], bool]) -> None:
        self._mux = mux
        self._dispatcher = dispatcher
        self._ending = ending

    def load(self, call: Call) -> None:
        model = self._named(call)
        if "wait=true" in call.request.query.split("&"):
            self._mux.load(model, lambda now: call.stay())
        else:
            self._begin_load(model)
        call.send_own(200, [JSON], DONE)

    def unload(self, call: Call) -> None:
        told = self._mux.unload(self._named(call))
        call.send_own(200, [JSON], DONE if told else b'{"success":true,"resident":false}')

    def pin(self, call: Call) -> None:
        self._mux.pin(self._named(call), True)
        call.send_own(200, [JSON], DONE)

    def unpin(self, call: Call) -> None:
        self._mux.pin(self._named(call), False)
        call.send_own(200, [JSON], DONE)

    def follow(self, call: Call) -> None:
        """The status of every model, and each change, as events."""
        call.begin()
        told: dict[str, object] = {}
        speak_at = time.monotonic() + COMMENT_SECONDS
        left = select.poll()
        left.register(call.client.socket, select.POLLRDHUP)
        while not self._ending():
            now = time.monotonic()
            changed = {
                model: value
                for model, value in self._statuses(call.request.key).items()
                if told.get(model) != value
            }
            events = b"".join(api.status_event(model, value) for model, value in changed.items())
            told |= changed
            if events or now >= speak_at:
                speak_at = now + COMMENT_SECONDS
                call.send_event(events or api.comment("nothing has changed"))
            if left.poll(LOOK_SECONDS * 1000):
                raise ClientGone("The client closed its connection.")
        call.end()

    def _statuses(self, key: object) -> dict[str, dict[str, object]]:
        return {
            model.model: api.model_status(model.state, failed=bool(model.last_error))
            for model in self._mux.status().models
            if self._dispatcher.may_use(key, model.model)
        }

    def _begin_load(self, model: str) -> None:
        """Returns when the load has begun, or has ended already; MuxError if it failed as quickly."""
        failed: list[MuxError] = []

        def load() -> None:
            try:
                self._mux.load(model)
            except MuxError as error:
                failed.append(error)

        thread = threading.Thread(target=load, name=f"load-{model}", daemon=True)
        thread.start()
        thread.join(MOMENT_SECONDS)
        if failed:
            raise failed[0]

    def _named(self, call: Call) -> str:
        name, _ = naming.model_and_stream(self._dispatcher.read_json(call))
        if name is None:
            raise BadRequest("the body must name a `model`", param="model")
        call.model = self._dispatcher.resolve(call, name)
        return call.model
