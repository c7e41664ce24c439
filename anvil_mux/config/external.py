"""Services that run elsewhere: the address of a server that somebody else runs, and our key for it.

``url`` is what an SDK of OpenAI's takes as its base URL, so it ends with /v1 as a rule; without a path it
gets one. Such a service has no GPUs, is never loaded or evicted, and Compose never starts it: it stands in
the compose file so that its model is in the same list, with the same settings, as all others.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from anvil_mux.config import settings, shapes
from anvil_mux.config.diagnostic import Diagnostic

EXAMPLE = "https://api.openai.com/v1"
PORTS = {"http": 80, "https": 443}
VERSION = "/v1"

OF_ENGINES = frozenset(
    (
        *("gpus", "gpu_count", "hosts", "most", "vram", "port", "pin", "ttl", "min_residency", "routing"),
        *("kv_tokens", "infer_type", "node", "failure_domain", "profile", "load_timeout", "stop_timeout"),
        *("evict_to", "demote_after", "ram", "preload", "checkpoint_anyway", "drain_timeout", "home"),
        *("home_after", "loras", "prompt_cache", "read_ahead"),
    )
)
"""Settings of engines that we load, which say nothing about a server elsewhere."""
NEED_URL = ("api_key_env", "ca_file")
"""Settings of servers elsewhere alone."""
DIGEST = "elsewhere"
"""The digest of every service elsewhere: what Compose would make of it does not matter."""


class Site(NamedTuple):
    """The parts of a ``url``."""

    secure: bool
    host: str
    port: int
    base: str
    """The path below which it is asked, which stands for /v1; without a slash at its end."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def name(self) -> str:
        """Host and port, as they stand in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == PORTS["https" if self.secure else "http"]
        return host if usual else f"{host}:{self.port}"

    def path(self, route: str) -> str:
        """The path at which it has a route of ours: what is below /v1 here is below ``base`` there."""
        if route.startswith(f"{VERSION}/"):
            return self.base + route[len(VERSION) :]
        return self.base.removesuffix(VERSION) + route


def site(url: str) -> Site:
    """Take a ``url`` apart that ``read_url`` has read."""
    parts = urlsplit(url)
    port = parts.port or PORTS[parts.scheme]
    return Site(parts.scheme == "https", parts.hostname or "", port, parts.path.rstrip("/") or VERSION)


def read_url(value: Any) -> str:
    text: str = settings.TEXT.read(value)
    try:
        parts = urlsplit(text)
        fits = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0 and text.isascii()
    except ValueError:
        fits = False
    if not fits or " " in text:
        said = f"must be an address such as https://api.openai.com/v1, not {settings.show(text)}"
        raise settings.unfit(
            said, f"https://{text}" if re.fullmatch(r"[\w.-]+\.\w+(:\d+)?(/\S*)?", text) else EXAMPLE
        )
    if parts.username is not None or parts.password is not None:
        said = "must hold no key or password: name a variable with api_key_env"
        raise settings.unfit(said, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
    if parts.query or parts.fragment:
        said = "must end with its path, as https://api.openai.com/v1 does"
        raise settings.unfit(said, f"{parts.scheme}://{parts.netloc}{parts.path}")
    path = parts.path.rstrip("/")
    for route in ("/chat/completions", "/completions", "/models"):
        if path.endswith(route):
            said = "must be the base URL of the API, without the route: https://HOST/v1"
            raise settings.unfit(said, f"{parts.scheme}://{parts.netloc}{path.removesuffix(route)}")
    return f"{parts.scheme}://{parts.netloc}{path}"


URL = settings.ValueKind("http(s)://HOST[:PORT][/PATH]", read_url, shapes.text("^https?://"))


def key_of(name: str, variables: Mapping[str, str]) -> str:
    """The key in the variable of that name; ValueError if there is none."""
    key = variables.get(name, "").strip()
    if not key:
        said = f"the variable {name} is not set, here or in .env; it should hold the server's API key"
        raise ValueError(Diagnostic(said, write=f"{name}=... in .env"))
    if any(not "!" <= sign <= "~" for sign in key):
        raise ValueError(f"the variable {name} holds more than a key: space, or what is not ASCII")
    return key


def key_fields(url: str, key: str, path: str) -> dict[str, str]:
    """The header fields that show a server our key; two large providers have words of their own for it."""
    host = site(url).host
    if not key:
        return {}
    if host.endswith((".azure.com", ".azure.us", ".azure.cn")):
        return {"api-key": key}
    if host.endswith("anthropic.com") and path.rpartition("/v1/")[2].startswith(("messages", "models")):
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return {"authorization": f"Bearer {key}"}


def trust(ca_file: str) -> ssl.SSLContext:
    """The certificates that a server must be vouched for by, the system's if no file is named; OSError."""
    context = ssl.create_default_context(cafile=ca_file or None)
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # an answer without its end is not whole
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def caveats(url: str, *, key: str, compose: bool, profiles: tuple[str, ...]) -> Iterator[str]:
    """Warnings of what its owner hardly wants, with remedies. ``compose``: it stands in a Compose project."""
    if compose and not profiles:
        said, write = "a bare `docker compose up` would try to start it", "profiles: [elsewhere]"
        yield Diagnostic(f"{said}; add `{write}`", said=said, write=write, key=("profiles",))
    found = site(url)
    if key and not found.secure and found.host not in ("localhost", "127.0.0.1", "::1"):
        said, secure = (
            f"its key and all prompts go to {found.name} unencrypted",
            url.replace("http:", "https:", 1),
        )
        yield Diagnostic(f"{said}; use https", said=said, write=f"url: {secure}", key=("x-anvil", "url"))
