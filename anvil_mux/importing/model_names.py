"""The name of the model that an engine serves, and what that name tells of its size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from anvil_mux.config import service
from anvil_mux.importing.roles import SHELLS, Role, flags
from anvil_mux.importing.weights import weights_of

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
