"""The store by which several anvil-mux know of each other's requests at replicas that they share.

Each of them (an *owner*) publishes again and again what it has at every replica and what the engines said
last, and reads what all others published (``Sharing``, one thread). What an owner published is forgotten
``EXPIRES_SECONDS`` later: whoever has died weighs on nobody for longer. How old a report is, the store says;
the clocks of the machines need not agree.

``RedisStore`` is in Redis (the extra ``[redis]``): a key with an expiry for each owner, and a set of the
owners. tests/serve/test_store.py is the contract of every store. While a store does not answer, requests are
routed by what is known here, as without one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

from anvil_mux.clock import Worker
from anvil_mux.routing.in_flight import EngineLoad, Report

EVERY_SECONDS = 0.25
EXPIRES_SECONDS = 5.0
TIMEOUT = 2.0

Reports = dict[str, Report]
"""Backend -> what one owner says of it."""


class StoreError(Exception):
    """The store does not answer, or cannot be used at all."""


class Store(Protocol):
    def publish(self, owner: str, reports: Reports) -> None:
        """Publish reports in place of those that ``owner`` published before."""

    def others(self, owner: str) -> list[Reports]:
        """The last reports of each of the others, with their age as it is now."""

    def close(self) -> None: ...


class RedisStore:
    """A store in Redis, below keys of the ``project``. For one thread."""

    def __init__(self, url: str, project: str) -> None:
        try:
            import redis
        except ImportError:
            raise StoreError("a store in Redis needs: pip install 'anvil-mux[redis]'") from None
        self._failure = redis.RedisError
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, decode_responses=True
            )
        except ValueError as error:
            raise StoreError(f"{error}") from None
        self._prefix = f"anvil-mux:1:{quote(project)}"
        self._owners = f"{self._prefix}:owners"

    def publish(self, owner: str, reports: Reports) -> None:
        try:
            with self._redis.pipeline() as batch:
                batch.set(self._key(owner), written(reports), px=round(EXPIRES_SECONDS * 1000))
                batch.sadd(self._owners, owner)
                batch.execute()
        except self._failure as error:
            raise StoreError(str(error)) from None

    def others(self, owner: str) -> list[Reports]:
        try:
            return self._read([each for each in self._redis.smembers(self._owners) if each != owner])
        except self._failure as error:
            raise StoreError(str(error)) from None

    def _read(self, owners: list[str]) -> list[Reports]:
        with self._redis.pipeline() as batch:
            for each in owners:
                batch.get(self._key(each))
                batch.pttl(self._key(each))
            answers = batch.execute() if owners else []
        found, gone = [], []
        for each, text, left in zip(owners, answers[::2], answers[1::2], strict=True):
            if text is None or left < 0:
                gone.append(each)
            else:
                found.append(_older(read(text), EXPIRES_SECONDS - left / 1000))
        if gone:
            self._redis.srem(self._owners, *gone)
        return found

    def _key(self, owner: str) -> str:
        return f"{self._prefix}:{owner}"

    def close(self) -> None:
        self._redis.close()


def written(reports: Reports) -> str:
    return json.dumps(reports, separators=(",", ":"))


def read(text: str) -> Reports:
    """The reports in ``text``; none if it is not as we write it."""
    try:
        return {backend: _report(*values) for backend, values in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return {}


def _report(
    requests: Any, waiting: Any, prefill: Any, decode: Any, tokens: Any, load: Any, age: Any
) -> Report:
    said = None if load is None else _load(*load)
    return Report(
        num_requests=int(requests),
        num_waiting_requests=int(waiting),
        prefill_tokens=int(prefill),
        decode_tokens=int(decode),
        num_tokens=int(tokens),
        load=said,
        age_seconds=float(age),
    )


def _load(running: Any, waiting: Any, usage: Any) -> EngineLoad:
    return EngineLoad(
        int(running), None if waiting is None else int(waiting), None if usage is None else float(usage)
    )


def _older(reports: Reports, seconds: float) -> Reports:
    return {name: each._replace(age_seconds=each.age_seconds + seconds) for name, each in reports.items()}


class Sharing:
    """Publishes what ``mine`` says, and tells ``heard`` what others published, again and again."""

    def __init__(
        self,
        store: Store,
        mine: Callable[[], Reports],
        heard: Callable[[Mapping[str, list[Report]]], object],
        say: Callable[[str], object],
        every: float = EVERY_SECONDS,
    ) -> None:
        self._store = store
        self._mine = mine
        self._heard = heard
        self._say = say
        self._every = every
        self._owner = secrets.token_hex(8)
        self._fails = False
        self.worker = Worker("sharing", self.once, last=store.close)

    def once(self) -> float:
        """Publishes and reads once; the seconds until the next time."""
        told: dict[str, list[Report]] = {}
        try:
            self._store.publish(self._owner, self._mine())
            for reports in self._store.others(self._owner):
                for backend, report in reports.items():
                    told.setdefault(backend, []).append(report)
        except StoreError as error:
            if not self._fails:
                self._say(f"the routing store does not answer ({error}): own counts are used until it does")
            self._fails = True
        else:
            if self._fails:
                self._say("the routing store answers again")
            self._fails = False
        self._heard(told)
        return self._every
