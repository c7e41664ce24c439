"""A request as it was asked: its head (``Asked``), and with a body for a model (``Question``). Never altered.

(Frozen dataclasses take three times as long to make, and to read a tuple's field twice as long as a slot.)
"""

from __future__ import annotations

from dataclasses import dataclass

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Key
from anvil_mux.config.values import Preset
from anvil_mux.protocol import api, http1
from anvil_mux.protocol.completions import Translation
from anvil_mux.proxy.access import Access, FallbackChain
from anvil_mux.proxy.spool import Spool

AskedBody = bytes | bytearray | Spool


@dataclass(slots=True)
class Asked:
    """A request's head, and what was found in nothing but that."""

    id: str
    since: float
    """When its head had been read."""
    request: http1.Request
    access: Access
    """The configuration that it came under; it holds until the request's end."""
    route: api.Route
    """``api.NO_ROUTE`` for what is answered here."""
    api: str
    """The API in whose shapes it is answered."""
    reader: bytes
    """The origin of another site's page that may read the answer."""
    key: Key | None = None
    """The key that it shows; None where nobody is asked for one."""

    @property
    def shares(self) -> bool:
        """Whether there are other keys than its own."""
        return len(self.access.keys) > 1

    @property
    def may_go_on(self) -> bool:
        """Whether a reload has left its key as it was: what has no end of its own ends otherwise."""
        return self.access.keys.admits(self.key)


@dataclass(slots=True)
class Target:
    """The model that a request names, and what follows from that under its configuration."""

    model: str
    replicas: int
    explains: bool
    """Whether they are not sent on, but answered with where they would go."""
    loads: bool
    """Whether their model is loaded for them, if it is not."""
    unchanged_at: Backend | None
    """The backend that gets their bodies as they are, if any does."""
    preset: str = ""
    """The preset that they name, if they name one."""
    never_swaps: bool = False
    """Whether they may force no swap: what is ready serves them, or nothing does."""
    choices: tuple[str, ...] = ()
    """The models of which any serves them, in order of preference, where their name stands for several."""
    external: str = ""
    """The model's only backend, if that is a server elsewhere."""
    chain: FallbackChain = ()
    """The models that they go to in turn, if the model has fallbacks."""


@dataclass(slots=True)
class Question:
    """A request for a model, its body read."""

    asked: Asked
    target: Target
    body: AskedBody
    named: str | None = None
    """The model's name within ``body``, if that need not be changed for every engine."""
    span: tuple[int, int] | None = None
    """The place of that name in a form."""
    stream: bool = False
    """The client asked for a stream into which comments may be written."""
    translation: Translation | None = None
    """The question for its engine, if that does not speak the client's API."""
    owner: str = ""
    """The backend that has an earlier answer which it is about."""
    falls_back: bool = False
    """Whether another model is asked if this one fails."""
    after: float | None = None
    """Seconds that it may wait before that."""

    def preset_at(self, backend: Backend) -> Preset | None:
        """The preset that it names, as it is at a backend."""
        name = self.target.preset
        return self.asked.access.presets.get((backend.name, name)) if name else None

    def known_as(self, backend: Backend) -> str:
        """The model id that the engine of a backend is asked for."""
        preset = self.preset_at(backend)
        return (preset and preset.served_model) or backend.served_model or self.target.model

    @property
    def path(self) -> str:
        """The path that its engine is asked for."""
        return self.translation.path if self.translation else self.asked.route.path
