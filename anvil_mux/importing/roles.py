"""The roles of the services in a compose file that knows nothing of anvil-mux: which serve which models?

A service is recognised by its image, by the image that its Dockerfile starts from, or by its program. The
name of its model stands in its command or its variables, and what that name tells of the weights' size is a
hint for people, never a setting.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        return _by_family(how, engine, words)
    for server in SERVERS:
        if re.search(server.pattern, repository):
            why = f"{how}: {server.about}, with OpenAI's API"
            return Role(why, "openai", server.port, words, word_is_model=server.word_is_model)
    return None


def _by_command(words: tuple[str, ...]) -> Role | None:
    engine = next((found for found in map(_engine_of, _programs(words)) if found != "openai"), "")
    if engine:
        return _by_family(f"its command runs {engine}", engine, words)
    if words and re.fullmatch(r"python[\d.]*|\S+\.py", PurePosixPath(words[0]).name):
        return None  # a program of its own, which may take the same flags
    for flag, family in FLAGS:
        if any(word.partition("=")[0] == flag for word in words):
            return _by_family(f"its command has {flag}, a flag of {family}", family, words)
    return None


def _by_family(why: str, engine: str, words: tuple[str, ...]) -> Role:
    return Role(why, engine, service.USUAL_PORTS[engine], words)


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


# Models

MODEL_VARIABLES = (
    "NIM_SERVED_MODEL_NAME",
    "SERVED_MODEL_NAME",
    "MODEL_ID",
    "HF_MODEL_ID",
    "MODEL_NAME",
    "MODEL",
)
LIKE_THEM = re.compile(r"\w+_MODEL(_NAME|_ID|_PATH)?")
"""Other variables, which name the model if the value looks like one: VLLM_MODEL."""
NIM = re.compile(r"nvcr\.io/nim/([\w.-]+/[\w.-]+)")
"""The image of a NIM, which calls its model as the image is called."""
BEFORE_MODELS = ("trtllm-serve", "serve", "api_server")
"""Words of a command that may stand before the model."""
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""The end of the name of a file that is one of several."""
ROUTER_FLAGS = ("--models-preset", "--models-dir")
MODEL_FLAGS = ("--model", "--model-path", "--model-id", "-m")
FILE_FLAGS = ("-m", "--model")
REPOSITORY_FLAGS = ("-hf", "-hfr", "--hf-repo")
SHARE_FLAGS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
"""Engine -> the flag that says which share of each GPU's memory it takes."""
FOLDERS = {"models", "model", "data", "app", "weights", "current_model", ""}
"""Names of folders that say nothing of the model in them."""


def models(
    described: service.RawService, role: Role, variables: Mapping[str, str], pulled: Sequence[str]
) -> Iterator[str]:
    """Yield the names of an engine's model, as far as its command and its variables say.

    ``pulled``: the models that other services have Ollama fetch.
    """
    words = role.words
    if role.engine == "ollama":
        yield from pulled
        return
    if role.engine == "llamacpp":
        yield from _models_of_llamacpp(words, variables)
        return
    image = described.get("image")
    key = "entrypoint" if described.get("entrypoint") or not image else "command"
    found = service.served_model({"image": image, key: [*words]}, role.engine)
    named = [each for each in found if not re.fullmatch(rf"-.*|python[\d.]*|{'|'.join(SHELLS)}", each)]
    if not named and role.engine == "openai":
        named = flags(words, "--model-id", "--model", "--model-path")[:1]
    if not named and role.engine in ("openai", "trtllm"):
        named = [*_after_serve(words)]
    if not named and role.word_is_model:
        named = [each for each in words if not each.startswith(("-", "http"))][:1]
    yield from named or [*_by_variables(variables), *NIM.findall(str(image or ""))][:1]


def more_models(role: Role) -> list[str]:
    """The other models of a server that was given several."""
    return flags(role.words, "--model-id")[1:] if role.engine == "openai" else []


def shown_name(model: str, other: str) -> str:
    """A name for clients: the last part of a path, or ``other`` where that says nothing."""
    if not is_path(model):
        return model
    last = PurePosixPath(model).name
    return other if last.lower() in FOLDERS else last


def _after_serve(words: Sequence[str]) -> Iterator[str]:
    """The word behind `trtllm-serve [serve]` or `lmdeploy serve api_server`."""
    at = max((at for at, word in enumerate(words) if word in BEFORE_MODELS), default=len(words))
    yield from (word for word in words[at + 1 : at + 2] if word and not word.startswith("-"))


def _by_variables(variables: Mapping[str, str]) -> Iterator[str]:
    yield from (variables[name] for name in MODEL_VARIABLES if variables.get(name))
    for name, value in variables.items():
        if LIKE_THEM.fullmatch(name) and re.fullmatch(r"/\S+|[\w.-]+/[\w.-]+", value):
            yield value


def is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~"))


def about_vram(role: Role, model: str) -> str:
    """Return what the name of the model says of the GPU memory it takes; "" if it says nothing."""
    words = role.words
    given = flags(words, *REPOSITORY_FLAGS, *MODEL_FLAGS)
    given += service.models_given({"image": "-", "command": [*words]})
    named = next((each for each in (*given, model) if re.search(r"\d[bBmM]\b", each)), model)
    more = " ".join(flags(words, "--quantization", "-q", "--quantize", "--dtype"))
    size = weights_of(named, role.engine, more)
    if size is None:
        return ""
    text = f"judging by the name, the weights take about {size:.1f} GiB, and the context comes on top"
    if flag := SHARE_FLAGS.get(role.engine):
        share = next(iter(flags(words, flag)), "")
        first = "" if share else f"add {flag} to its command, and "
        return (
            f"{text}; but this engine takes {share or 'most'} of each GPU whatever the model needs: if "
            f"others may be loaded beside it, {first}write that share of the GPU's memory as its vram, such "
            "as x-anvil: {vram: 12GiB}"
        )
    return f"{text}; once it has run, check suggests a vram, so that models can share the GPU"


def _models_of_llamacpp(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    aliases = [
        name
        for name in service.served_model({"command": [*words]}, "llamacpp")
        if not name.startswith("-")  # the next flag, where a variable is not set
    ]
    if aliases or variables.get("LLAMA_ARG_ALIAS"):
        yield from aliases or (variables["LLAMA_ARG_ALIAS"],)
        return
    files = [*flags(words, *FILE_FLAGS), variables.get("LLAMA_ARG_MODEL", "")]
    known = [file for file in files if file and not file.endswith("/")]
    names = [PART.sub("", PurePosixPath(file).name.removesuffix(".gguf")) for file in known]
    names = [name for name in names if name.lower() not in FOLDERS]
    given = [*flags(words, *REPOSITORY_FLAGS), variables.get("LLAMA_ARG_HF_REPO", "")]
    names += [re.sub(r"-GGUF\b", "", each.rpartition("/")[2], flags=re.I) for each in given if each]
    yield from names[:1]


def unnamed(role: Role) -> str:
    """Say what to write where the files do not tell the model's name."""
    if role.engine == "ollama":
        return "the name of the model in Ollama, such as llama3.2; one service for each model"
    if role.engine == "llamacpp" and flags(role.words, *ROUTER_FLAGS):
        return "write the name of one of the models that this llama-server has; one service for each model"
    return "the file does not say which model it serves: write the name that clients send"


# Weights

GIB = 1 << 30
MIXED = re.compile(r"(?<!\d)(\d+)x(\d+(?:\.\d+)?)b(?![a-z0-9])", re.I)
BILLIONS = re.compile(r"(?<![a-z0-9.])(?:[eE])?(\d+(?:\.\d+)?)b(?![a-z0-9])", re.I)
MILLIONS = re.compile(r"(?<![a-z0-9.])(\d+)m(?![a-z0-9])", re.I)
BITS: tuple[tuple[str, float], ...] = (
    (r"(?<![a-z0-9])i?q([2-6])_", 0.0),
    (r"(?<![a-z0-9])q8(_0)?(?![a-z0-9])", 8.5),
    (r"awq|gptq|int4|w4a16|4bit|nf4|mxfp4|nvfp4|bnb|(?<![a-z0-9])q4(?![a-z0-9])", 4.5),
    (r"fp8|int8|w8a8|8bit", 8.5),
    (r"f32|fp32", 32.0),
    (r"(?<![a-z])(b?f16|fp16)", 16.0),
    (r"gpt-oss", 4.5),
    (r"(?<![a-z0-9])gguf", 4.8),
)
"""Pattern in a model's name -> bits for each weight; 0: the number in it, and 0.8 for scales."""
USUAL = {"ollama": 4.8, "llamacpp": 4.8}
"""Engine -> bits for each weight where the name does not say; others keep 16."""


def weights_of(model: str, engine: str, more: str = "") -> float | None:
    """Return the size of the weights in GiB; None where the name does not say how many there are.

    ``more``: what else says how they are stored, such as ``--quantization awq``.
    """
    if mixed := MIXED.search(model):
        billions = int(mixed[1]) * float(mixed[2])
    elif found := BILLIONS.search(model):
        billions = float(found[1])
    elif small := MILLIONS.search(model):
        billions = int(small[1]) / 1000
    else:
        return None
    return billions * 1e9 * _bits(f"{model} {more}", engine) / 8 / GIB


def _bits(text: str, engine: str) -> float:
    for pattern, bits in BITS:
        if found := re.search(pattern, text, re.I):
            return bits or int(found[1]) + 0.8
    return USUAL.get(engine, 16.0)
