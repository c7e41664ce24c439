"""Prompts that outlive a swap, with an engine that has slots and files as llama-server has them."""

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.errors import Cancelled
from anvil_mux.host import prompts
from anvil_mux.host.levels import Swapper
from anvil_mux.host.prompts import PromptCache
from anvil_mux.host.seam import Evicted, Loaded
from tests.host.test_swap import Notes

MIB = 1 << 20
LATER = 1e12
"""A Unix time after every change of a file."""


@dataclass
class Engine:
    """A llama-server with two slots; a prompt is a text, and a token takes a byte of its file."""

    folder: Path
    model: str = "/m/model.gguf"
    version: str = "b1"
    slots: list[str] = field(default_factory=lambda: ["", ""])
    used: set[int] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)
    refuses: dict[str, int] = field(default_factory=dict)
    tells_slots: bool = True
    url: str = ""

    def ask(self, slot: int, prompt: str) -> None:
        self.slots[slot] = prompt
        self.used.add(slot)

    def anew(self) -> None:
        """Start it again, without its prompts."""
        self.slots, self.used = ["", ""], set()
        self.seen.clear()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.seen.append(path)
        if path in self.refuses:
            return self.refuses[path], {"error": "no"}
        if path in ("/health", "/v1/models"):
            return 200, {"data": [{"id": "m"}]}
        if path == "/props":
            return 200, {"build_info": self.version, "model_path": self.model, "total_slots": len(self.slots)}
        if path == "/slots":
            told = [self._slot(number) for number in range(len(self.slots))]
            return (200, told) if self.tells_slots else (501, {})
        found = re.fullmatch(r"/slots/(\d)\?action=(\w+)", path)
        assert found
        return getattr(self, found[2])(int(found[1]), self.folder / body["filename"])

    def _slot(self, number: int) -> dict[str, Any]:
        more = {"id_task": 7, "n_prompt_tokens": len(self.slots[number])} if number in self.used else {}
        return {"id": number, **more}

    def save(self, slot: int, file: Path) -> tuple[int, Any]:
        file.write_text(self.slots[slot])
        return 200, {"n_saved": len(self.slots[slot]), "n_written": len(self.slots[slot])}

    def restore(self, slot: int, file: Path) -> tuple[int, Any]:
        self.slots[slot] = file.read_text()
        return 200, {"n_restored": len(self.slots[slot])}

    def erase(self, slot: int, file: Path) -> tuple[int, Any]:
        self.slots[slot] = ""
        return 200, {}

    def asked(self, action: str) -> list[str]:
        return [path for path in self.seen if action in path]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "prompts")

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            read = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = made.answer(self.command, self.path, json.loads(read or b"{}"))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """Connections end as the tests want it."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.gguf").write_text("weights")
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    command = ("llama-server", "-m", "/m/model.gguf", "--alias", "m", "--slot-save-path", "/prompts")
    mounts = (("/m", str(tmp_path / "m")), ("/prompts", str(tmp_path / "prompts")))
    service = Service(command=command, mounts=mounts)
    return Backend("a", "m", engine="llamacpp", prompt_cache=MIB, service=service, load_timeout=20.0)


class Cache(PromptCache):
    """A prompt cache that notes what it tells, and takes all files for old."""

    def __init__(self, state: Path) -> None:
        self.told: list[tuple[str, list[int]]] = []
        super().__init__(wall=lambda: LATER, kept=self._note, state=state)

    def _note(self, backend: str, prompts: Any) -> None:
        self.told.append((backend, [each.tokens for each in prompts]))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    (tmp_path / "state").mkdir()
    return Cache(tmp_path / "state")


def load(cache: PromptCache, backend: Backend, engine: Engine) -> list[str]:
    """Start the engine anew and restore its prompts; what its slots hold then."""
    engine.anew()
    cache.restore(backend, engine.url, cache.prepare(backend))
    return engine.slots


def swapped(cache: PromptCache, backend: Backend, engine: Engine, *prompts: str) -> list[str]:
    """Load, ask for the prompts, save and load again; what the slots hold then."""
    load(cache, backend, engine)
    for slot, prompt in enumerate(prompts):
        engine.ask(slot, prompt)
    cache.save(backend, engine.url)
    return load(cache, backend, engine)


def files(engine: Engine) -> list[str]:
    """The names of files of prompts; of those that were finished without tokens and digest."""
    names = [name for name in os.listdir(engine.folder) if name.endswith((".prompt", ".trying"))]
    return sorted(re.sub(r"\.\d+\.[0-9a-f]{32}(?=\.)", "", name) for name in names)


def only_file(engine: Engine) -> Path:
    [file] = engine.folder.glob("a.*.prompt")
    return file


@pytest.mark.parametrize("tells_slots", [True, False])
def test_each_prompt_is_back_in_its_slot(engine, backend, cache, tells_slots):
    engine.tells_slots = tells_slots  # else all are saved
    assert swapped(cache, backend, engine, "alpha", "beta") == ["alpha", "beta"]
    assert cache.told == [("a", []), ("a", [5, 4]), ("a", [5, 4])]
    assert oct(engine.folder.stat().st_mode & 0o777) == "0o700"


def test_an_empty_slot_has_no_file(engine, backend, cache):
    assert swapped(cache, backend, engine, "", "beta") == ["", "beta"]
    assert files(engine) == ["a.1.prompt"]


def test_what_was_not_used_since_is_not_written_again(engine, backend, cache):
    swapped(cache, backend, engine, "alpha", "beta")
    engine.ask(1, "gamma ray")
    cache.save(backend, engine.url)
    assert engine.asked("save") == ["/slots/1?action=save"]
    assert load(cache, backend, engine) == ["alpha", "gamma ray"]


def change_model(engine: Engine, backend: Backend) -> Backend:
    (engine.folder.parent / "m" / "model.gguf").write_text("other weights")
    return backend


def touch_model(engine: Engine, backend: Backend) -> Backend:
    os.utime(engine.folder.parent / "m" / "model.gguf", (1, 1))
    return backend


def upgrade(engine: Engine, backend: Backend) -> Backend:
    engine.version = "b2"
    return backend


def ask_otherwise(engine: Engine, backend: Backend) -> Backend:
    command = (*backend.service.command, "--rope-scale", "2")
    return replace(backend, service=replace(backend.service, command=command))


@pytest.mark.parametrize("differ", [change_model, touch_model, upgrade, ask_otherwise])
def test_prompts_of_anything_else_are_removed_and_never_read(differ, engine, backend, cache):
    swapped(cache, backend, engine, "alpha", "beta")
    assert load(cache, differ(engine, backend), engine) == ["", ""]
    assert (engine.asked("restore"), files(engine)) == ([], [])


def cut_short(file: Path) -> None:
    file.write_text(file.read_text()[:2])


def exchange(file: Path) -> None:
    file.unlink()
    file.write_text("delta")


def give_to_another_slot(file: Path) -> None:
    file.rename(file.with_name(file.name.replace("a.0.", "a.1.")))


def claim_more_tokens(file: Path) -> None:
    file.rename(file.with_name(file.name.replace("a.0.5.", "a.0.9.")))


def take_digest_away(file: Path) -> None:
    file.rename(file.with_name("a.0.prompt"))


@pytest.mark.parametrize(
    "harm", [cut_short, exchange, give_to_another_slot, claim_more_tokens, take_digest_away]
)
def test_a_file_that_is_not_as_it_was_written_is_removed_and_the_load_succeeds(harm, engine, backend, cache):
    swapped(cache, backend, engine, "alpha")
    harm(only_file(engine))
    assert load(cache, backend, engine) == ["", ""]
    assert (engine.asked("restore"), files(engine)) == ([], [])


def test_files_of_other_backends_are_left_alone(engine, backend, cache):
    engine.folder.mkdir()
    others = [engine.folder / name for name in ("b.0.prompt", "a.b.0.prompt", "a.txt")]
    for other in others:
        other.write_text("x")
    (engine.folder / "a.5.prompt").write_text("left over")
    load(cache, backend, engine)
    assert files(engine) == ["a.b.0.prompt", "b.0.prompt"]
    assert all(other.exists() for other in others)


def test_a_link_in_its_folder_is_not_followed(engine, backend, cache, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("alpha")
    engine.folder.mkdir()
    (engine.folder / "a.1.prompt").symlink_to(secret)
    swapped(cache, backend, engine, "alpha")
    assert secret.read_text() == "alpha"
    written = only_file(engine)
    os.utime(secret, ns=(1, written.stat().st_mtime_ns))
    written.unlink()
    written.symlink_to(secret)
    assert load(cache, backend, engine) == ["", ""]
    assert (secret.read_text(), engine.asked("restore"), files(engine)) == ("alpha", [], [])


@pytest.mark.parametrize("below", ["", "inner"])
def test_a_link_in_place_of_its_folder_leads_nowhere(below, engine, backend, cache, tmp_path):
    other = tmp_path / "other"
    (other / below).mkdir(parents=True)
    theirs = other / below / "a.0.prompt"
    theirs.write_text("of somebody else")
    # The engine has the folder around it as well.
    command = tuple([f"/prompts/{below}" if word == "/prompts" else word for word in backend.service.command])
    mounts = (*backend.service.mounts, ("/around", str(tmp_path / "around")))
    mounts = tuple([(k, str(tmp_path / "around" / "prompts") if k == "/prompts" else v) for k, v in mounts])
    (tmp_path / "around").mkdir()
    (tmp_path / "around" / "prompts").symlink_to(other)
    backend = replace(backend, service=replace(backend.service, command=command, mounts=mounts))
    assert load(cache, backend, engine) == ["", ""]
    assert theirs.read_text() == "of somebody else"


def test_a_prompt_that_the_engine_refuses_is_removed_and_one_that_is_restored_in_part_erased(
    engine, backend, cache, monkeypatch
):
    swapped(cache, backend, engine, "alpha", "beta")
    engine.refuses["/slots/0?action=restore"] = 400
    assert load(cache, backend, engine) == ["", "beta"]
    assert files(engine) == ["a.1.prompt"]
    monkeypatch.setattr(engine, "restore", lambda slot, file: (200, {"n_restored": 3}))
    assert load(cache, backend, engine) == ["", ""]
    assert (engine.asked("erase"), files(engine)) == (["/slots/1?action=erase"], [])


def test_a_prompt_of_which_no_length_is_said_is_not_kept(engine, backend, cache, monkeypatch):
    def save(slot: int, file: Path) -> tuple[int, Any]:
        file.write_text("alpha")
        return 200, {"n_saved": -5, "n_written": 5}

    monkeypatch.setattr(engine, "save", save)
    assert swapped(cache, backend, engine, "alpha") == ["", ""]
    assert files(engine) == []


def test_what_the_engine_ended_over_is_not_tried_again(engine, backend, cache, monkeypatch):
    swapped(cache, backend, engine, "alpha")

    def end(slot: int, file: Path) -> Any:
        raise ConnectionAbortedError

    with monkeypatch.context() as patched:
        patched.setattr(engine, "restore", end)
        load(cache, backend, engine)
    assert load(cache, backend, engine) == ["", ""]
    assert files(engine) == []


def test_an_engine_of_an_earlier_start_has_its_prompts_saved(engine, backend, cache, tmp_path):
    load(cache, backend, engine)
    engine.ask(0, "alpha")
    Cache(tmp_path / "state").save(backend, engine.url)
    assert load(cache, backend, engine) == ["alpha", ""]


def test_a_load_that_is_cancelled_keeps_them(engine, backend, cache, monkeypatch):
    swapped(cache, backend, engine, "alpha")
    engine.anew()
    cancelled = threading.Event()

    def cancel() -> None:
        cancelled.set()
        raise Cancelled("not wanted any more")

    def hang(slot: int, file: Path) -> Any:
        cancelled.wait(60)
        return 200, {}

    with monkeypatch.context() as patched:
        patched.setattr(engine, "restore", hang)
        with pytest.raises(Cancelled):
            cache.restore(backend, engine.url, LATER, cancel)
    assert load(cache, backend, engine) == ["alpha", ""]


def test_a_model_that_changes_while_it_is_loaded_has_no_prompts_kept(engine, backend, tmp_path):
    assert swapped(PromptCache(wall=lambda: 1.0, state=tmp_path), backend, engine, "alpha") == ["", ""]
    assert files(engine) == []


def test_a_model_that_changed_while_it_served_has_no_prompts_kept(engine, backend, cache):
    load(cache, backend, engine)
    engine.ask(0, "alpha")
    change_model(engine, backend)
    cache.save(backend, engine.url)
    assert (engine.asked("save"), files(engine)) == ([], [])


def test_a_model_file_that_cannot_be_seen_has_no_prompts_kept(engine, backend, cache, caplog):
    engine.model = "/in-the-image/model.gguf"
    assert swapped(cache, backend, engine, "alpha") == ["", ""]
    assert "is in no folder of this machine" in caplog.text


def test_all_parts_of_a_model_count(engine, backend, cache):
    parts = [engine.folder.parent / "m" / f"x-{number:05}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_text("weights")
    engine.model = "/m/x-00001-of-00002.gguf"
    assert swapped(cache, backend, engine, "alpha") == ["alpha", ""]
    parts[1].write_text("other weights")
    assert load(cache, backend, engine) == ["", ""]


# Disk space


def test_the_longest_prompts_are_kept_first(engine, backend, cache):
    assert swapped(cache, replace(backend, prompt_cache=8), engine, "alpha", "a longer") == ["", "a longer"]
    assert files(engine) == ["a.1.prompt"]


def test_what_was_used_longest_ago_makes_room_and_what_can_never_fit_is_not_written(engine, backend, cache):
    little = replace(backend, prompt_cache=10)
    swapped(cache, little, engine, "alpha", "beta")
    for prompt, saves, kept in (
        ("much too long for it", 0, ["alpha", ""]),
        ("gamma", 1, ["alpha", "gamma"]),
        ("gamma ray", 1, ["", "gamma ray"]),
    ):
        engine.ask(1, prompt)
        cache.save(little, engine.url)
        assert len(engine.asked("save")) == saves
        assert load(cache, little, engine) == kept


# Within a swap


@pytest.fixture
def runtime(engine: Engine) -> Notes:
    return Notes(engine.url)


def test_a_swap_saves_before_the_stop_and_restores_before_the_first_request(engine, backend, cache, runtime):
    phases: list[str] = []
    swapper = Swapper(runtime, prompts=cache, report=lambda backend, phase, seconds: phases.append(phase))
    swapper.load(backend)
    engine.ask(0, "alpha")
    swapper.evict(backend)
    engine.anew()
    assert swapper.load(backend) == Loaded(engine.url, "stop")
    assert engine.slots == ["alpha", ""]
    loading = ["load", "ready", "restore"]
    assert phases == [*loading, "save", "evict", "verify", *loading]


def test_an_eviction_succeeds_whatever_becomes_of_the_prompts(engine, backend, cache, runtime, caplog):
    swapper = Swapper(runtime, prompts=cache)
    swapper.load(backend)
    engine.ask(0, "alpha")
    engine.ask(1, "beta")
    engine.refuses["/slots/1?action=save"] = 500
    assert swapper.evict(backend) == Evicted("stop")
    assert "POST /slots/1?action=save answers 500" in caplog.text
    assert (runtime.calls[-1], files(engine)) == ("stop", ["a.0.prompt"])


def test_an_engine_without_prompt_cache_is_asked_nothing(engine, backend, cache, runtime):
    swapper = Swapper(runtime, prompts=cache)
    plain = replace(backend, prompt_cache=None)
    swapper.load(plain)
    swapper.evict(plain)
    assert engine.seen == [
        "/health",
        "/v1/models",
        "/props",
        "/slots",
    ]  # whether it works for somebody who left
    assert not engine.folder.exists()


def test_one_that_is_frozen_is_thawed_for_it_before_it_is_stopped(engine, backend, cache, runtime):
    swapper = Swapper(runtime, prompts=cache)
    frozen = replace(backend, evict_to=("freeze", "stop"))
    swapper.load(frozen)
    engine.ask(0, "alpha")
    swapper.evict(frozen, "freeze")
    assert files(engine) == []
    swapper.demote(frozen, "freeze", "stop")
    assert runtime.calls == ["start", "pause", "resume", "stop"]
    assert files(engine) == ["a.0.prompt"]


def test_an_engine_that_ends_over_its_prompts_is_started_without_them(
    engine, backend, cache, runtime, monkeypatch
):
    swapper = Swapper(runtime, prompts=cache)
    swapped(cache, backend, engine, "alpha")

    def end(slot: int, file: Path) -> Any:
        runtime.how = "exited with code 139"
        raise ConnectionAbortedError

    def start(backend: Backend) -> str:
        runtime.how = None
        return engine.url

    monkeypatch.setattr(engine, "restore", end)
    monkeypatch.setattr(runtime, "start", start)
    engine.anew()
    assert swapper.load(backend) == Loaded(engine.url, "stop")
    assert files(engine) == []


def test_a_save_ends_in_time(engine, backend, cache, monkeypatch):
    load(cache, backend, engine)
    engine.ask(0, "alpha")
    gate = threading.Event()

    def hang(slot: int, file: Path) -> Any:
        gate.wait(60)
        return 200, {}

    monkeypatch.setattr(engine, "save", hang)
    monkeypatch.setattr(prompts, "SAVE_SECONDS", 0.3)
    cache.save(backend, engine.url)
    gate.set()
    assert files(engine) == []
    assert cache.told[-1] == ("a", [])
