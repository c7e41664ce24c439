"""The name of the model that an engine serves, and what that name tells of its size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from anvil_mux.config import service
from anvil_mux.importing.roles import SHELLS, Role, flags
from anvil_mux.importing.weights import weights_of

MODEL_VARIABLES = ("SERVED_MODEL_NAME", "MODEL_ID", "HF_MODEL_ID", "MODEL_NAME", "MODEL")
MODEL_FLAGS = ("--model", "--model-path", "--model-id", "-m")
FILE_FLAGS = ("-m", "--model")
REPOSITORY_FLAGS = ("-hf", "-hfr", "--hf-repo")
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
    if not named and "LocalAI" in role.why:
        named = [each for each in words if not each.startswith(("-", "http"))][:1]
    yield from named or [variables[name] for name in MODEL_VARIABLES if variables.get(name)][:1]


def shown_name(model: str, other: str) -> str:
    """A name for clients: the last part of a path, or ``other`` where that says nothing."""
    if not is_path(model):
        return model
    last = PurePosixPath(model).name
    return other if last.lower() in FOLDERS else last


def is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~"))


def about_vram(role: Role, model: str) -> str:
    """Return what the name of the model says of the GPU memory it takes; "" if it says nothing."""
    words = role.words
    given = flags(words, *REPOSITORY_FLAGS, *MODEL_FLAGS)
    named = next((each for each in (*given, model) if re.search(r"\d[bBmM]\b", each)), model)
    more = " ".join(flags(words, "--quantization", "-q", "--quantize", "--dtype"))
    size = weights_of(named, role.engine, more)
    if size is None:
        return ""
    text = f"judging by the name, the weights take about {size:.1f} GiB, and the context comes on top"
    if role.engine in ("vllm", "sglang"):
        share = next(iter(flags(words, "--gpu-memory-utilization", "--mem-fraction-static")), "most")
        return f"{text}; but this engine takes {share} of each GPU whatever the model needs: declare that"
    return f"{text}; once it has run, check suggests a vram, so that models can share the GPU"


def _models_of_llamacpp(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    aliases = service.served_model({"command": [*words]}, "llamacpp")
    if aliases or variables.get("LLAMA_ARG_ALIAS"):
        yield from aliases or (variables["LLAMA_ARG_ALIAS"],)
        return
    files = [*flags(words, *FILE_FLAGS), variables.get("LLAMA_ARG_MODEL", "")]
    known = [file for file in files if file and not file.endswith("/")]
    names = [PurePosixPath(file).name.removesuffix(".gguf") for file in known]
    given = [*flags(words, *REPOSITORY_FLAGS), variables.get("LLAMA_ARG_HF_REPO", "")]
    names += [re.sub(r"-GGUF\b", "", each.rpartition("/")[2], flags=re.I) for each in given if each]
    yield from names[:1]


def unnamed(engine: str) -> str:
    """Say what to write where the files do not tell the model's name."""
    if engine == "ollama":
        return "the name of the model in Ollama, such as llama3.2; one service for each model"
    return "the file does not say which model it serves: write the name that clients send"
