"""Presets of llama.cpp's router, as its documentation has them, and the compose file that comes of them."""

from pathlib import Path

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Written
from anvil_mux.importing.llamacpp_presets import translate
from anvil_mux.plugins import load

PRESETS = """
version = 1

; for all of them
[*]
c = 8192
n-gpu-layers = 99

[ggml-org/MY-MODEL-GGUF:Q8_0]
chat-template = chatml
n-gpu-layers = 123
jinja = true ; for tools
c = 4096
LLAMA_ARG_CACHE_RAM = 0
; file paths are relative to server's CWD
model-draft = ./models/draft.gguf
; but it's RECOMMENDED to use absolute path
model-draft = /models/draft.gguf

[custom_model]
model = /models/my awesome $model.gguf
"""


def made(folder: Path, text: str, **how: str) -> Written:
    file = folder / "models.ini"
    file.write_text(text)
    return translate(file, **how)


def checked(folder: Path, text: str) -> Config:
    file = folder / "compose.yaml"
    file.write_text(made(folder, text).text())
    return load([file], environ={}, compose=None)


def only(folder: Path, *lines: str) -> Backend:
    [backend] = checked(folder, "\n".join(["[m]", "model = /m.gguf", *lines])).backends
    return backend


def words(backend: Backend) -> list[str]:
    """The words of its llama-server, but for those that each has."""
    return [*backend.service.command[1:-6]]


def notes(folder: Path, *lines: str) -> list[tuple[str, str]]:
    return [(note.about, note.text) for note in made(folder, "\n".join(lines)).notes]


def test_the_example_of_the_documentation(tmp_path):
    cached, custom = checked(tmp_path, PRESETS).backends
    assert cached.model == "ggml-org/MY-MODEL-GGUF:Q8_0"
    assert " ".join(cached.service.command) == (
        "llama-server -hf ggml-org/MY-MODEL-GGUF:Q8_0 -c 4096 --n-gpu-layers 123 --chat-template chatml "
        "--jinja --model-draft /models/draft.gguf --alias ggml-org/MY-MODEL-GGUF:Q8_0 "
        "--host $HOST --port $PORT"
    )
    assert ("LLAMA_ARG_CACHE_RAM", "0") in cached.service.environment
    assert (custom.model, words(custom)) == (
        "custom_model",
        ["-c", "8192", "--n-gpu-layers", "99", "--model", "/models/my awesome $model.gguf"],
    )
    assert cached.engine == custom.engine == "llamacpp"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("jinja = true", ["--jinja"]),
        ("jinja = off", ["--no-jinja"]),
        ("no-mmap = 1", ["--no-mmap"]),
        ("no-mmap = 0", ["--mmap"]),
        ("mlock = enabled", ["--mlock"]),
        ("mlock = false", []),
        ("kvu = on", ["--kv-unified"]),
        ("nkvo = true", ["--no-kv-offload"]),
        ("nocb = false", ["--cont-batching"]),
        ("no-host = true", ["--no-host"]),
        ("no-host = false", []),
        ("fa = on", ["-fa", "on"]),
        ("flash-attn = on", ["--flash-attn", "on"]),
        ("np = 1", ["-np", "1"]),
        ('chat-template-kwargs = {"a": "b = c"}', ["--chat-template-kwargs", '{"a": "b = c"}']),
        ("temp = 0.7 ", ["--temp", "0.7"]),
        ("c = 4096 # tokens", ["-c", "4096"]),
        ("  c = 4096", ["-c", "4096"]),
        ("chat-template =", ["--chat-template", ""]),
        ("jinja = yes", ["--jinja"]),
        ("no-mmap = no", ["--mmap"]),
        ("c = 1\nc = 2", ["-c", "2"]),
    ],
)
def test_a_key_becomes_an_argument(tmp_path, line, expected):
    assert words(only(tmp_path, line)) == ["--model", "/m.gguf", *expected]


def test_what_only_presets_have_becomes_our_settings(tmp_path):
    backend = only(tmp_path, "load-on-startup = true", "alias = small, m", "sleep-idle-seconds = 90")
    assert (backend.preload, backend.aliases, backend.ttl) == (True, ("small",), 90.0)
    assert words(backend) == ["--model", "/m.gguf"]
    assert only(tmp_path, "sleep-idle-seconds = -1").ttl is None  # the default of llama.cpp: it never sleeps


@pytest.mark.parametrize("key", ["m", "hf-repo", "LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO"])
def test_a_model_may_be_named_by_its_argument_or_by_its_variable(tmp_path: Path, key: str) -> None:
    [backend] = checked(tmp_path, f"[m]\n{key} = /m\nLLAMA_ARG_ALIAS = n\n").backends
    assert (backend.model, backend.aliases) == ("m", ("n",))


def test_a_section_that_begins_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    [backend] = checked(tmp_path, "[m]\nmodel = /m.gguf\nc = 1\n[ m ] ; again\nmodel = /n.gguf\n").backends
    assert words(backend) == ["--model", "/n.gguf"]


def test_each_key_that_is_left_out_or_means_something_else_is_noted(tmp_path):
    found = notes(tmp_path, "threads = 4", "[m]", "m = m.gguf", "port = 1", "stop-timeout = 5")
    assert found == [
        ("threads", "is left out: it stands in no section; use [*]."),
        ("m", "is a path from the folder of this file, no longer from that of the router."),
        ("port", "is left out: anvil-mux says it."),
        ("stop-timeout", "is left out: it is about the router alone."),
    ]


def test_a_llama_server_by_another_name_is_one_all_the_same(tmp_path):
    found = made(tmp_path, "[m]\nmodel = /m.gguf", program="/opt/llama.sh")
    assert found.services["m"]["x-anvil"]["engine"] == "llamacpp"


def test_a_preset_without_a_model_is_left_out(tmp_path):
    found = made(tmp_path, "[m]\nmodel = /m.gguf\n[n]\nc = 1\n")
    assert [*found.services] == ["m"]
    assert "n is left out: it says neither model nor hf-repo." in found.text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[m]\nc = 1", "m is left out: it says neither model nor hf-repo."),
        ("", "has no presets"),
        ("[m\nc = 1", "is no file of presets: "),
        ("[m]\n--c = 1\n", "models.ini:2: is no file of presets: '--c = 1' is no `key = value`"),
        ("[m]\nwhat", "is no file of presets: "),
        ("[ ]\nc = 1", "is no file of presets: "),
    ],
)
def test_a_file_without_presets_says_so(tmp_path, text, problem):
    with pytest.raises(ConfigError) as raised:
        made(tmp_path, text)
    assert problem in str(raised.value)
    assert str(tmp_path / "models.ini") in str(raised.value)


@pytest.mark.parametrize("content", [None, b"[m]\nmodel = \xff"])
def test_a_file_that_cannot_be_read_says_so(tmp_path, content):
    file = tmp_path / "models.ini"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"models\.ini: (cannot be read|is not UTF-8)"):
        translate(file)


def test_the_command_prints_a_file_that_check_accepts(tmp_path, capsys):
    file = tmp_path / "models.ini"
    file.write_text(PRESETS)
    assert main(["import", "llamacpp", str(file), "--program", "/opt/llama-server"]) == 0
    printed, said = capsys.readouterr()
    assert "2 models, 0 notes" in said
    compose = tmp_path / "compose.yaml"
    compose.write_text(printed)
    assert {each.service.command[0] for each in load([compose], environ={}, compose=None).backends} == {
        "/opt/llama-server"
    }
