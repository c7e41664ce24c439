"""A model of the replicas' caches, as far as can be told from what was sent to them.

``Prefixes`` is one picture for all replicas of a model: block -> a mask of the replicas that hold it, so that
one walk along a request's blocks says how much each of them has, and stops at the first that nobody has. Each
replica has an order of use of its own and loses what was used longest ago when its capacity is exceeded; of
one request the end goes before the beginning, as a block is worth nothing without those before it.

A block's hash covers all blocks before it, so equal hashes mean equal beginnings. ``read`` makes the blocks
of a request without a tokenizer: of the bytes of what the engine will put into the prompt, in a fixed order.
What else stands in a request, and where, changes nothing; a conversation that is continued begins alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from anvil_mux.protocol import foreign
from anvil_mux.routing.routing import Work

BLOCK_BYTES = 2048
BYTES_PER_TOKEN = 4.0
"""The bytes of a token, until engines' own counts teach better."""
PARTS = ("tools", "functions", "system", "instructions", "messages", "input", "prompt")
"""The parts of a request that get into the prompt, of all APIs."""
SALTS = ("cache_salt", "lora", "lora_path")
"""The fields by which engines keep equal prompts apart."""
_MEDIA_WORDS = (b"base64", b"input_audio", b'"images"', b"multimodal_data")
"""Words of which a request with media in it has one."""
_MEDIA = re.compile(rb'"(?:data:[^",]{0,99};base64,|[A-Za-z0-9+/\\]{4096})[^"]*(?<!\\)"')
"""A string that is an image or a sound in base64: few tokens, however long. JSON may escape its slashes.
A try goes from a quote to the next one, and no farther."""


def read(model: str, body: bytes | bytearray, bytes_per_token: float, session: str = "") -> Work:
    """Read a JSON request as the router sees it; of any other only the length counts."""
    document = foreign.read_object(_without_media(body), of_request=True)
    if document is None:
        return sized(Work(session=session, size=len(body)), bytes_per_token)
    prompt = b"\n".join(_prompt(document))
    blocks = tuple(_chain(_root(model, document), prompt))
    work = Work(blocks=blocks, session=session or _session(document), size=len(prompt))
    return sized(work, bytes_per_token)


def sized(work: Work, bytes_per_token: float) -> Work:
    """The request with its bytes taken for tokens of that length."""
    block_tokens = max(round(BLOCK_BYTES / bytes_per_token), 1)
    return work._replace(tokens=round(work.size / bytes_per_token), block_tokens=block_tokens)


def _prompt(document: dict[str, Any]) -> Iterator[bytes]:
    for part in PARTS:
        value = document.get(part)
        if isinstance(value, str):
            yield value.encode("utf-8", "surrogatepass")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                yield _written(item)
        elif value:
            yield _written(value)


def _written(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return text.encode("utf-8", "surrogatepass")


def _without_media(body: bytes | bytearray) -> bytes | bytearray:
    """A request with a hash in place of each image and sound."""
    if not any(word in body for word in _MEDIA_WORDS):
        return body
    return _MEDIA.sub(lambda found: b'"%b"' % blake2b(found[0], digest_size=16).hexdigest().encode(), body)


def _root(model: str, document: dict[str, Any]) -> bytes:
    salts = [str(document[key]) for key in SALTS if key in document]
    return "\0".join([model, *salts]).encode("utf-8", "surrogatepass")


def _chain(root: bytes, prompt: bytes) -> Iterator[int]:
    """The hashes of the full blocks of ``prompt``, each over all that comes before its end."""
    last = root
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        made = blake2b(last, digest_size=8)
        made.update(prompt[start : start + BLOCK_BYTES])
        last = made.digest()
        yield int.from_bytes(last, "little")


def _session(document: dict[str, Any]) -> str:
    """The conversation of a request, as far as its client says: OpenAI's key, Anthropic's user."""
    found = document.get("prompt_cache_key")
    if found is None and isinstance(document.get("metadata"), dict):
        found = document["metadata"].get("user_id")
    return found[:256] if isinstance(found, str) else ""


class Prefixes:
    """The blocks that each of a model's replicas holds. Not for several threads at once."""

    def __init__(self, replicas: Iterable[str]) -> None:
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        """The bits of replicas that went."""
        self._holders: dict[int, int] = {}
        """Block -> the bits of those that hold it."""
        self._used: dict[str, dict[int, None]] = {}
        """The blocks of each replica, the one used longest ago first."""
        for name in replicas:
            self.join(name)

    def join(self, replica: str) -> None:
        """Keep account of another replica, which holds nothing."""
        self._bits[replica] = self._free.pop() if self._free else 1 << len(self._bits)
        self._used[replica] = {}

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        self.clear(replica)
        self._free.append(self._bits.pop(replica))
        del self._used[replica]

    def __len__(self) -> int:
        return len(self._holders)

    def size(self, replica: str) -> int:
        return len(self._used[replica])

    def hits(self, blocks: Sequence[int], among: Iterable[str]) -> dict[str, int]:
        """How many of ``blocks``, from the first on, each replica holds; without those that hold none."""
        bits = {self._bits[name]: name for name in among}
        mask, found = sum(bits), {}
        for length, block in enumerate(blocks):
            still = mask & self._holders.get(block, 0)
            if still != mask:
                if length:
                    found.update(dict.fromkeys(_names(bits, mask & ~still), length))
                mask = still
                if not mask:
                    return found
        found.update(dict.fromkeys(_names(bits, mask), len(blocks)))
        return found

    def use(self, replica: str, blocks: Sequence[int], capacity: int) -> None:
        """Note that ``blocks`` are sent to ``replica``, whose cache holds ``capacity`` of them."""
        used, holders, bit = self._used[replica], self._holders, self._bits[replica]
        for block in reversed(blocks):
            if block in used:
                del used[block]
            else:
                holders[block] = holders.get(block, 0) | bit
            used[block] = None
        while len(used) > capacity:
            self._drop(replica, next(iter(used)))

    def clear(self, replica: str) -> None:
        """Forget the blocks of a replica that was stopped, put to sleep, or died."""
        for block in list(self._used[replica]):
            self._drop(replica, block)

    def _drop(self, replica: str, block: int) -> None:
        del self._used[replica][block]
        left = self._holders[block] & ~self._bits[replica]
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _names(bits: dict[int, str], mask: int) -> list[str]:
    return [name for bit, name in bits.items() if bit & mask]
