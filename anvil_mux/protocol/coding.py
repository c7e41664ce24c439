"""Compressed bodies, unpacked within a limit.

Pure. Few clients compress what they send, but those that do cannot be told otherwise: Codex sends zstd. A
body may unpack to a thousand times its size, so no more is unpacked than is allowed, and it must end where
its coding says. zstd is in Python from 3.14 on, and in the extra ``zstd`` for older ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from anvil_mux.errors import BadRequest, TooLarge


class Unpacker(Protocol):
    """The common interface of zlib's and zstd's decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: Any, max_length: int, /) -> bytes: ...


def _find_zstd() -> Callable[[], Unpacker] | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name).ZstdDecompressor  # type: ignore[no-any-return]
        except ImportError:
            continue
    return None


CODINGS: dict[str, Callable[[], Unpacker] | None] = {
    "gzip": lambda: zlib.decompressobj(31),
    "x-gzip": lambda: zlib.decompressobj(31),
    "deflate": zlib.decompressobj,
    "zstd": _find_zstd(),
}


RATIO = 100
"""How many times its size a body may have unpacked; texts have a tenth of that."""
FREE = 1 << 20
"""The size that any body may have unpacked."""


def room(packed: int, limit: int) -> int:
    """The size that a body of ``packed`` bytes may have unpacked, where any may have ``limit``."""
    return min(limit, FREE + RATIO * packed)


def unpacked(body: bytes | bytearray, coding: str, limit: int) -> bytes:
    """Unpack ``body``; BadRequest 415 or 400, or TooLarge above ``limit`` bytes."""
    make = CODINGS.get(coding.strip().lower())
    if make is None:
        needs = " (install anvil-mux[zstd])" if coding.lower() == "zstd" else ""
        known = ", ".join(name for name, made in CODINGS.items() if made and name != "x-gzip")
        advice = f"understood: {known}; or send the body as it is, without this header"
        raise BadRequest(f"Content-Encoding {coding} is not understood{needs}: {advice}", status=415)
    unpacker = make()
    try:
        content = unpacker.decompress(body, limit + 1)
    except Exception as error:  # each library has errors of its own
        raise BadRequest(f"the body is not {coding}: {error}", param="body") from None
    if len(content) > limit:
        raise TooLarge(f"the request's body unpacks to more than {limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise BadRequest(f"the body does not end where its {coding} ends", param="body")
    return content
