"""The files of weights that an engine will read: where they are on this machine, and their reading ahead.

A word of its command, or the value of a variable, may be a file of weights (GGUF, with all its parts, or
safetensors), the folder of a model, or the name of a repository of Hugging Face, whose copy lies in a mounted
cache. Ollama's manifest lists the files of a model. Only files in folders that the service mounts count, with
links resolved. Where a service names nothing of that sort, nothing is guessed.

The weights of backends that are waited for are read into the page cache before their load begins. While a
policy holds a swap back, leases drain and victims leave their GPUs, the disk is idle; what is read then the
load finds in memory. One thread reads, when nobody else uses the disk. It begins when there is something to
read, and ends when there is not. It reads nothing while any load is under way on this host, no more than the
page cache has room for, and no file that is not on a disk of this machine.

A part is read by ``sendfile`` to /dev/null, which copies nothing: 0.03 s of CPU for a GiB. ``posix_fadvise``
would read no more than one window of the device at a time, and not say when that is there. Whether a page is
there already a read says that may not wait; ``mincore`` answers that only to the owner of a file.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import random
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from anvil_mux import state
from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend
from anvil_mux.config.service import HERE, Mounts, Service, flag_values
from anvil_mux.host.gpus import cache_room
from anvil_mux.protocol import foreign
from anvil_mux.state import open_regular

log = logging.getLogger(__name__)

MOST_FILES = 512
MOST_INDEX = 64 << 20
"""Bytes of a list of files that are read."""
WEIGHTS = (".gguf", ".safetensors")
MODEL_FLAGS = ("-m", "--model", "--model-path", "serve")
"""Words after which a command names its model."""
DOWNLOADS = ("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo")
"""Flags of llama.cpp by which it gets the file that it names."""
SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.gguf$")
"""The end of the name of a GGUF file that is one of several."""
REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
"""ORGANISATION/NAME of Hugging Face, for llama.cpp with the kind of quantization."""
USUAL_QUANTIZATION = "q4_k_m"
"""The one that llama.cpp takes where none is named."""
HUB_VARIABLES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
HUBS = ("", "hub", "huggingface/hub", ".cache/huggingface/hub")
"""The places at which a mounted folder may have the cache of Hugging Face."""
LLAMA_CACHES = ("", "llama.cpp", ".cache/llama.cpp")
STORES = ("", "models", ".ollama/models")
"""The places at which it may have the store of Ollama."""
OLLAMA_NAMES = ("registry.ollama.ai", "library")
"""The parts of a model's name that are left out."""
OLLAMAS = ("model", "projector", "adapter")
"""The kinds of layers that Ollama reads whole."""


def weights_of(backend: Backend, mounted: Mounts = ()) -> list[Path]:
    """Return the files, links resolved, in the order in which they are probably read.

    ``mounted``: what its container really has mounted, which tells where Docker's volumes are.
    """
    service = backend.service
    known = {**dict(service.mounts), **dict(mounted)}
    finder = _Finder(replace(service, mounts=tuple(known.items())))
    found = finder.in_store(backend.served_model or backend.model) if backend.engine == "ollama" else ()
    wanted = dict.fromkeys(finder.inside_mounts([*found, *finder.named()]))
    return list(islice(filter(os.path.isfile, wanted), MOST_FILES))


def missing(backend: Backend) -> list[str]:
    """The paths on this machine of what the command names as its model, and that are not there."""
    service = backend.service
    words = service.command
    if any(flag in words for flag in DOWNLOADS):
        return []
    named = [*(word for word in words if word.endswith(WEIGHTS)), *_models(words)]
    places = dict.fromkeys(service.on_host(word.rpartition("=")[2]) for word in named)
    return [place for place in places if place and not os.path.exists(place)]


def _models(words: Sequence[str]) -> Iterator[str]:
    """The paths that stand where a command names its model."""
    yield from (each for each in flag_values(words, *MODEL_FLAGS) if each.startswith(("/", "./", "../")))


def shards(file: Path) -> Iterator[Path]:
    """All files of a model that is in several."""
    if not (found := SHARD.search(file.name)):
        yield file
        return
    for number in range(1, int(found[1]) + 1):
        yield file.with_name(f"{file.name[: found.start()]}-{number:05}-of-{found[1]}.gguf")


class _Finder:
    """Looks for the weights of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._environment = dict(service.environment)
        self._is_process = HERE in dict(service.mounts)
        folders = [outside for inside, outside in service.mounts if outside and inside != HERE]
        self._mounted = [Path(os.path.realpath(each)) for each in folders]

    def inside_mounts(self, files: Iterable[Path]) -> Iterator[Path]:
        """The files with links resolved, without those that lead out of what is mounted."""
        for file in files:
            real = Path(os.path.realpath(file))
            if any(each == real or each in real.parents for each in self._mounted):
                yield real

    def named(self) -> Iterator[Path]:
        """The files that a word of the command or the environment leads to."""
        for word in dict.fromkeys(self._words()):
            place = self._service.on_host(word) if len(word) < 4096 else ""
            path = Path(place) if place else None
            if path and word.endswith(WEIGHTS):
                yield from shards(path)
            elif path and os.path.isfile(path / "config.json"):
                yield from _of_model(path)
            elif found := REPOSITORY.fullmatch(word):
                yield from self._of_repository(found[1], found[2], found[3] or "")

    def _words(self) -> Iterator[str]:
        """The words of the command, of a script within it, and the values of variables."""
        for text in (*self._service.command, *self._environment.values()):
            words = [text]
            if " " in text or "\n" in text:
                with suppress(ValueError):
                    words = shlex.split(text)
            for word in words:
                for part in word.rpartition("=")[2].split(","):
                    if part and "\0" not in part:
                        yield part

    # The cache of Hugging Face, and that of llama.cpp

    def _of_repository(self, owner: str, name: str, quantization: str) -> Iterator[Path]:
        for hub in self._folders(HUB_VARIABLES, HUBS):
            if snapshot := self._snapshot(hub / f"models--{owner}--{name}"):
                yield from _of_model(snapshot) or _of_quantization(snapshot.rglob("*.gguf"), quantization)
                return
        for cache in self._folders((("LLAMA_CACHE", ""),), LLAMA_CACHES):
            if cached := _of_quantization(cache.glob(f"{owner}_{name}_*.gguf"), quantization):
                yield from cached
                return

    def _snapshot(self, repository: Path) -> Path | None:
        """The folder with the files of a repository, of the revision that is asked for."""
        revision = next(flag_values(self._service.command, "--revision"), "main")
        with suppress(OSError, ValueError):
            named = state.read_bytes(repository / "refs" / revision, MOST_INDEX).decode().strip()
            revision = named if named.isalnum() else revision
        folder = repository / "snapshots" / revision
        return folder if os.path.isdir(folder) else None

    def _folders(self, variables: Iterable[tuple[str, str]], below: Iterable[str]) -> Iterator[Path]:
        """The folders in which a store may be: where a variable says, in a mounted one, or at home."""
        for name, rest in variables:
            inside = self._environment.get(name)
            if inside and (outside := self._service.on_host(inside)):
                yield Path(outside, rest)
        home = self._environment.get("HOME") or os.path.expanduser("~")
        for folder in [Path(home)] if self._is_process else self._mounted:
            yield from (folder / each for each in below)

    # The store of Ollama

    def in_store(self, model: str) -> list[Path]:
        """The files that the manifest of a model lists."""
        name, _, tag = model.partition(":")
        parts = name.split("/")
        place = (*OLLAMA_NAMES[: max(3 - len(parts), 0)], *parts)
        for store in self._folders((("OLLAMA_MODELS", ""),), STORES):
            manifest = _json(store.joinpath("manifests", *place, tag or "latest"))
            try:
                layers = [(str(each["mediaType"]), str(each["digest"])) for each in manifest["layers"]]
            except (KeyError, TypeError):
                continue
            read = [digest for kind, digest in layers if kind.rpartition(".")[2] in OLLAMAS]
            return [store / "blobs" / each.replace(":", "-") for each in read if "/" not in each]
        return []


def _of_model(folder: Path) -> list[Path]:
    """The weights in the folder of a model: those that its index lists, or all of one kind."""
    for kind in ("safetensors", "bin"):
        for index in sorted(folder.glob(f"*.{kind}.index.json")):
            with suppress(KeyError, TypeError, AttributeError):
                named = sorted({str(each) for each in _json(index)["weight_map"].values()})
                return [folder / each for each in named if ".." not in Path(each).parts]
        found = sorted(folder.glob(f"*.{kind}"))
        # Mistral's repositories have all weights twice.
        if found := [each for each in found if not each.name.startswith("consolidated")] or found:
            return found
    return []


def _of_quantization(files: Iterable[Path], quantization: str) -> list[Path]:
    wanted = (quantization or USUAL_QUANTIZATION).lower()
    return sorted(each for each in files if wanted in each.name.lower())


def _json(file: Path) -> Any:
    """The content of a JSON file; None where there is none."""
    with suppress(OSError):
        return foreign.read_or_none(state.read_bytes(file, MOST_INDEX))
    return None


# Reading ahead

ROOM_SECONDS = 0.25
"""How long it holds how much room there is: to find out takes a millisecond."""

PIECE = 8 << 20
"""Bytes that are read at a time: it takes some milliseconds before a reader is seen to be stopped."""
PROBED = 1 << 20
"""The distance between the pages of a piece that are looked at."""
ON_DISK = frozenset(
    (
        *("bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs", "ntfs3"),
        *("overlay", "reiserfs", "squashfs", "vfat", "xfs"),
    )
)
"""The file systems whose files are on a disk of this machine, and are read by way of the page cache.

Files of a tmpfs are in memory. What a network may do to others, and for how long a cached page of a network's
file is believed, cannot be judged from here.
"""
ESCAPED = re.compile(r"\\([0-7]{3})")
"""A space in a list of mounts, or something else that would end a word."""
IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""Machine -> the number of its system call ioprio_set."""
ONE_THREAD, IDLE_CLASS = 1, 3 << 13
"""IOPRIO_WHO_PROCESS, which means a thread, and the class of those that read when nobody else does."""


def is_on_disk(file: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether an absolute path, with links resolved, is of a file on a disk of this machine."""
    places = {file, *file.parents}
    kind, depth = "", -1
    with suppress(OSError, ValueError):
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            place = Path(ESCAPED.sub(lambda found: chr(int(found[1], 8)), before.split()[4]))
            if place in places and len(place.parts) >= depth:  # of two on one place the later is seen
                kind, depth = after.split()[0], len(place.parts)
    return kind in ON_DISK


class ReadAhead:
    """Reads weights ahead, as ordered. Any thread; only ``weights`` and ``tell`` are called in its own.

    ``weights`` finds a backend's files. ``tell`` learns its name, the bytes that were read ahead for it, and
    the seconds that took. ``room``: bytes that the page cache has room for.
    """

    def __init__(
        self,
        weights: Callable[[Backend], Sequence[Path]],
        tell: Callable[[str, int, float], object],
        *,
        room: Callable[[], int] = cache_room,
        on_disk: Callable[[Path], bool] = is_on_disk,
        clock: Clock | None = None,
    ) -> None:
        self._weights = weights
        self._tell = tell
        self._room = room
        self._on_disk = on_disk
        self._clock = clock or Clock()
        self._seen_room, self._seen_at = 0, -math.inf  # of its thread alone
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._wanted: dict[str, Backend] = {}
        """The backends that are waited for, in the order in which they are read."""
        self._held: dict[str, int] = {}
        """The backends among them that were dealt with, and how large their files are."""
        self._loads = 0
        """The loads under way."""
        self._is_reading = False
        """Whether there is a thread."""

    def order(self, backends: Sequence[Backend]) -> None:
        """Read the weights of these ahead, in this order, and those of no others. Never blocks."""
        with self._lock:
            self._wanted = {each.name: each for each in backends}
            self._held = {name: size for name, size in self._held.items() if name in self._wanted}
        self._begin()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """A context in which nothing is read, since an engine reads its own weights."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
            self._begin()

    def _begin(self) -> None:
        """Start the thread if there is something to read and it is not there."""
        with self._lock:
            if self._is_reading or self._next() is None:
                return
            self._is_reading = True
        try:
            self._clock.spawn(self._run, "read-weights")
        except RuntimeError:  # no thread can be started
            with self._lock:
                self._is_reading = False

    def _next(self) -> Backend | None:
        """The backend to be read next. Under the lock."""
        left = (backend for name, backend in self._wanted.items() if name not in self._held)
        return None if self._loads else next(left, None)

    def _run(self) -> None:
        step_back()
        while True:
            with self._lock:
                backend = self._next()
                if backend is None:
                    self._is_reading = False
                    return
            size = 0
            try:
                size = self._read(backend)
            except Exception:
                log.exception("%s: a mistake while its weights were read ahead", backend.name)
            with self._lock:
                if self._goes_on(backend):
                    self._held[backend.name] = size

    def _goes_on(self, backend: Backend) -> bool:
        """Whether a backend is still to be read. Under the lock."""
        return not self._loads and self._wanted.get(backend.name) is backend

    def _read(self, backend: Backend) -> int:
        """Read what is not in the page cache of a backend's files; return how large the files are."""
        begun, read, size = time.monotonic(), 0, 0
        for path in filter(self._on_disk, self._weights(backend)):
            if not self._may_read(backend, size):
                break
            try:
                with CachedFile(path) as file:
                    for offset, length in file.missing():
                        if not self._may_read(backend, size + offset + length):
                            break
                        file.bring_in(offset, length)
                        read += length
                    size += file.size
            except OSError as error:
                log.info("%s: %s is not read ahead: %s", backend.name, path, error)
        if read:
            self._tell(backend.name, read, time.monotonic() - begun)
        return size

    def _may_read(self, backend: Backend, size: int) -> bool:
        """Whether to go on; ``size``: of what of its files will be in the page cache then."""
        with self._lock:
            held = sum(self._held.values())
            goes_on = self._goes_on(backend)
        if goes_on and time.monotonic() >= self._seen_at + ROOM_SECONDS:
            self._seen_room, self._seen_at = self._room(), time.monotonic()
        return goes_on and held + size <= self._seen_room


# The page cache


class CachedFile:
    """An open file, of which parts are brought into the page cache. OSError where that is not possible."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)
        self._looked_at = os.fdopen(open_regular(path), "rb", buffering=0)
        # A look at a page that is not there has it read, and no more than that page of such a file.
        os.posix_fadvise(self._looked_at.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.size = os.fstat(self._file.fileno()).st_size
        self._first = random.randrange(PROBED)  # so that another look is at other pages

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._looked_at.close()

    def missing(self) -> list[tuple[int, int]]:
        """The pieces (offset, length) that are not wholly there."""
        pieces = [(offset, min(PIECE, self.size - offset)) for offset in range(0, self.size, PIECE)]
        return [piece for piece in pieces if not self.is_there(*piece)]

    def is_there(self, offset: int, length: int) -> bool:
        """Whether a part is in the page cache, judged by some of its pages."""
        looked_at, end, page = self._looked_at.fileno(), offset + length, bytearray(1)
        probed = [*range(offset + self._first, end, PROBED), end - 1]
        try:
            return all(os.preadv(looked_at, [page], each, os.RWF_NOWAIT) for each in probed)
        except BlockingIOError:
            return False

    def bring_in(self, offset: int, length: int) -> None:
        """Return once a part is in the page cache."""
        file, end = self._file.fileno(), offset + length
        with open(os.devnull, "wb", buffering=0) as sink:
            while offset < end and (read := os.sendfile(sink.fileno(), file, offset, end - offset)):
                offset += read


def step_back() -> None:
    """Have this thread read from disks when nobody else does, where the machine knows of such a thing.

    For the CPU it stays as it is: others would wait for an interpreter whose holder is not let run.
    """
    if number := IOPRIO_SET.get(platform.machine()):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).syscall(number, ONE_THREAD, 0, IDLE_CLASS)
