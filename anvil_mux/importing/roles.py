"""The roles of the services in a compose file that knows nothing of anvil-mux: which of them serve models?

A service is recognised by its image, by the image that its Dockerfile starts from, or by its program.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from anvil_mux import state
from anvil_mux.config import service


class KnownServer(NamedTuple):
    """A program with OpenAI's API that is no engine family of its own here."""

    pattern: str
    port: int
    about: str
    word_is_model: bool = False
    """Whether the first word of its command is the model that it serves."""


SERVERS = (
    KnownServer(r"text-generation-inference", 80, "Text Generation Inference"),
    KnownServer(r"text-embeddings-inference", 80, "Text Embeddings Inference"),
    KnownServer(r"(^|/)local-?ai$", 8080, "LocalAI", word_is_model=True),
    KnownServer(r"lmdeploy", 23333, "LMDeploy"),
    KnownServer(r"aphrodite", 2242, "Aphrodite"),
    KnownServer(r"michaelf34/infinity", 7997, "Infinity"),
    KnownServer(r"mistral\.?rs", 80, "mistral.rs"),
    KnownServer(r"koboldcpp", 5001, "KoboldCpp"),
    KnownServer(r"xinference", 9997, "Xinference"),
    KnownServer(r"text-generation-webui", 5000, "Text Generation Web UI"),
    KnownServer(r"speaches|faster-whisper-server", 8000, "Speaches"),
    KnownServer(r"llamafile", 8080, "llamafile"),
    KnownServer(r"nvcr\.io/nim/", 8000, "NVIDIA NIM"),
)
NO_ENGINES: tuple[tuple[str, str], ...] = (
    (r"open-?web-?ui", "Open WebUI is a client"),
    (
        r"web-?ui$|-ui$|hollama|lobe-?chat|librechat|anything-?llm|big-agi",
        "its image is a web interface: point it at anvil-mux if it asks models",
    ),
    (
        r"litellm|one-api|new-api|router|gateway|proxy",
        "it forwards requests: point it at anvil-mux if it asks models",
    ),
    (r"nvcr\.io/.*(ocr|-elements|-structure)", "it does not have OpenAI's API"),
    (r"exporter|metrics", "it monitors an engine"),
    (r"opea/(llm|embedding|reranking)-", "it forwards requests"),
    (r"llama-swap", "it swaps models itself: see `anvil-mux import llama-swap`"),
    (r"docker/model-runner", "it swaps models itself"),
)
"""Pattern in the image's repository -> why the service is no engine, though it may have an engine's name."""
PULLS = re.compile(r"\bollama['\"]?[ ,]+['\"]?(?:pull|run|create)\b|/api/pull\b")
PULLED = re.compile(
    r"\bollama (?:pull|run) +([\w./:-]+)"
    r"|/api/pull\b(?:(?!/api/pull).)*?\"(?:name|model)\\?\" *: *\\?\"([^\"\\]+)"
)
SERVES = re.compile(r"\bserve\b")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
BEFORE_PROGRAMS = (";", "&&", "||", "|", "&", "do", "then", "else", "exec", "-c", "-lc")
SHELL_WORDS = (*BEFORE_PROGRAMS, "until", "while", "done", "if", "fi", "!")
HELPERS = {"apk", "apt-get", "cat", "curl", "date", "echo", "exit", "mkdir", "pip", "printf", "ray", "set"}
HELPERS |= {"sleep", "tail", "true", "wget"}
"""Programs that serve no models, whatever image they run in."""
FLAGS = (
    ("--gpu-memory-utilization", "vllm"),
    ("--mem-fraction-static", "sglang"),
    ("--n-gpu-layers", "llamacpp"),
    ("-ngl", "llamacpp"),
)
"""A flag that only one engine family has."""


@dataclass(frozen=True, slots=True)
class Role:
    """The part that a service has."""

    why: str
    """How that is known."""
    engine: str = ""
    """The engine family; "" if it serves no models."""
    port: int = 0
    """The port on which such an engine listens by default."""
    words: tuple[str, ...] = ()
    """The command, and what a shell runs in it."""
    pulls: tuple[str, ...] = ()
    """The models that it has Ollama fetch."""
    downloads: bool = False
    """Whether it only downloads models."""
    word_is_model: bool = False
    """Whether the first word of its command is the model that it serves."""


def find_role(described: service.RawService, folder: Path) -> Role:
    """Find the role of a service; ``folder`` is the one that its paths begin at."""
    image = str(described.get("image") or "")
    words = _unfolded(service.argv(described))
    origins = [(f"image {image}", _repository(image))]
    if built := built_from(described, folder):
        origins.append((f"built from {built}", _repository(built)))
    for _, repository in origins:
        if why := next((why for pattern, why in NO_ENGINES if re.search(pattern, repository)), ""):
            return Role(why, words=words)
    if _pulls(origins[0][1], described, words):
        return Role("it downloads models and exits", words=words, pulls=_pulled(words), downloads=True)
    if (scripted := _scripted(words)) and scripted <= HELPERS:
        return Role(f"its command only runs {', '.join(sorted(scripted))}", words=words)
    for how, repository in origins:
        if found := _by_image(how, repository, words):
            return found
    return _by_command(words) or Role(_unknown(image, described, folder), words=words)


def _by_image(how: str, repository: str, words: tuple[str, ...]) -> Role | None:
    if not repository:
        return None
    if (engine := service.engine({"image": repository})) != "openai":
        return Role(how, engine, service.USUAL_PORTS[engine], words)
    for server in SERVERS:
        if re.search(server.pattern, repository):
            why = f"{how}: {server.about}, with OpenAI's API"
            return Role(why, "openai", server.port, words, word_is_model=server.word_is_model)
    return None


def _by_command(words: tuple[str, ...]) -> Role | None:
    engine = next((found for found in map(_engine_of, _programs(words)) if found != "openai"), "")
    if engine:
        return Role(f"its command runs {engine}", engine, service.USUAL_PORTS[engine], words)
    if words and re.fullmatch(r"python[\d.]*|\S+\.py", PurePosixPath(words[0]).name):
        return None  # a program of its own, which may take the same flags
    for flag, family in FLAGS:
        if any(word.partition("=")[0] == flag for word in words):
            return Role(
                f"its command has {flag}, a flag of {family}", family, service.USUAL_PORTS[family], words
            )
    return None


def built_from(described: service.RawService, folder: Path) -> str:
    """The image that the service's Dockerfile starts its last stage from; "" if that is not known."""
    file = _dockerfile(described, folder)
    if file is None:
        return ""
    try:
        text = file if isinstance(file, str) else state.read_text(file, errors="replace")
    except (OSError, ValueError):
        return ""
    stages = re.findall(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", text, re.I | re.M)
    names = {name.lower(): image for image, name in stages if name}
    image = stages[-1][0] if stages else ""
    seen: set[str] = set()
    while image.lower() in names and image.lower() not in seen:
        seen.add(image.lower())
        image = names[image.lower()]
    return "" if "$" in image else image


def _dockerfile(described: service.RawService, folder: Path) -> Path | str | None:
    """The Dockerfile, or its text where that stands in the service; None: it is not built."""
    build = described.get("build")
    if not build:
        return None
    about = build if isinstance(build, Mapping) else {"context": build}
    if inline := about.get("dockerfile_inline"):
        return str(inline)
    return folder / str(about.get("context") or ".") / str(about.get("dockerfile") or "Dockerfile")


def flags(words: Collection[str], *names: str) -> list[str]:
    """The values of these flags, but for those that are empty or the next flag (a variable is not set)."""
    found = [value for name in names for value in service.flag_values([*words], name)]
    return [value for value in found if value and not value.startswith("-")]


def _repository(image: str) -> str:
    return re.sub(r":[^/]*$", "", image.partition("@")[0]).lower()


def _unfolded(words: Collection[str]) -> tuple[str, ...]:
    """The words with a script for a shell taken apart."""
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if re.fullmatch(r"-\w*c", before) and any(PurePosixPath(each).name in SHELLS for each in found):
            try:
                script = re.sub(r";|\n", " ; ", word.replace("\\\n", " "))
                found += shlex.split(script)
                continue
            except ValueError:
                pass
        found.append(word)
    return tuple(found)


def _programs(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The words from each place on where a program may begin."""
    starts = [0, *(at + 1 for at, word in enumerate(words) if word in BEFORE_PROGRAMS)]
    return [words[at:] for at in starts if at < len(words)]


def _scripted(words: tuple[str, ...]) -> set[str]:
    """The names of the programs in a script for a shell; none if there is no script, or it serves."""
    if not {PurePosixPath(word).name for word in words[:1]} & {*SHELLS} or SERVES.search(" ".join(words)):
        return set()
    found = set()
    for program in _programs(words):
        named = (word for word in program if word not in SHELL_WORDS and not re.match(r"\w+=", word))
        found.add(PurePosixPath(next(named, "")).name)
    return found - {"", *SHELLS}


def _engine_of(words: tuple[str, ...]) -> str:
    return service.engine({"command": [*words]})


def _pulled(words: tuple[str, ...]) -> tuple[str, ...]:
    """The models that the command has Ollama fetch."""
    found = tuple(first or second for first, second in PULLED.findall(" ".join(words)))
    return (words[1], *found) if words[:1] in (("pull",), ("run",)) and len(words) > 1 else found


def _pulls(repository: str, described: service.RawService, words: tuple[str, ...]) -> bool:
    """Whether the service only has Ollama fetch models."""
    text = " ".join(words)
    alone = "ollama" in repository and not described.get("entrypoint")
    if alone and words[:1] in (("pull",), ("run",), ("create",)):
        return True
    return bool(PULLS.search(text)) and not SERVES.search(text)


def _unknown(image: str, described: service.RawService, folder: Path) -> str:
    if image:
        return f"image {image} is not a known engine"
    file = _dockerfile(described, folder)
    if isinstance(file, Path) and not file.is_file():
        return f"it is built from {file.name}, which is not here, and its command names no engine"
    if file is not None:
        return "it is built here, and neither its Dockerfile nor its command names an engine"
    if "image" in described:
        return "its image is a variable that is not set"
    return "it has no image"
