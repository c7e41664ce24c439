"""Presets and LoRA adapters as names of models: what is read, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from anvil_mux.config import change
from anvil_mux.config.abilities import find_adapters
from anvil_mux.config.config import Backend
from anvil_mux.config.values import Preset
from anvil_mux.proxy.access import presets_of
from tests.config.files import one, plain, problems, table

SERVICES = (
    "services: {{qwen: {{image: vllm/vllm-openai, {0}}}, gemma: {{image: x, x-anvil: {{aliases: [g]}}}}}}"
)


def refused(tmp_path: Path, said: str, more: str = "") -> list[str]:
    """What is wrong with these settings of ``qwen``, beside the model gemma and its alias g."""
    return problems(tmp_path, SERVICES.format(f"x-anvil: {{{said}}}{more}"))


# Presets


def test_presets_are_names_of_their_model(tmp_path: Path) -> None:
    said = "{presets: {think: {set: {top_k: 5}, strip: [seed], system: 'Think.'}, fast: {set: {a: {b: 1}}}}}"
    found = plain(tmp_path, f"services: {{qwen: {{image: x, x-anvil: {said}}}}}")
    assert found.backends[0].presets == (
        Preset("think", ("seed",), (("top_k", "5"),), system="Think."),
        Preset("fast", set=(("a", '{"b": 1}'),)),
    )
    assert found.names == {"qwen": "qwen", "think": "qwen", "fast": "qwen"}


def test_as_a_label_presets_are_json(tmp_path: Path) -> None:
    found = one(
        tmp_path, 'labels: {anvil.presets: \'{"fast": {"set": {"n": 1}}}\', anvil.loras: "sql, chat"}'
    )
    assert [preset.name for preset in found.presets] == ["fast", "sql", "chat"]


def test_a_preset_may_serve_those_who_name_no_model(tmp_path: Path) -> None:
    said = "x-anvil: {default_model: fast}\n"
    services = "services: {a: {image: x, x-anvil: {presets: {fast: {system: Be quick.}}}}}"
    assert plain(tmp_path, said + services).default_model == "fast"


REFUSED = """
presets: [fast]                     -> presets: must hold names and what is set for each, such as {fast: {set:
presets: {fast: {}}                 -> presets.fast: must hold set, default, strip or system; a name without
presets: {fast: {sett: {a: 1}}}     -> presets.fast.sett: unknown key; did you mean set?
presets: {fast: {set: {model: x}}}  -> presets.fast.set: model is not to be changed here
presets: {fast: {strip: [stream]}}  -> presets.fast.strip: stream is not to be changed here
presets: {fast: {set: [a]}}         -> presets.fast.set: must hold fields and their values
presets: {fast: {system: [a]}}      -> presets.fast.system: must be the text of a system message
presets: {gemma: {system: a}}       -> presets.gemma: is the name of gemma already (compose.yaml:1)
presets: {g: {system: a}}           -> presets.g: is an alias of gemma already (compose.yaml:1)
presets: {qwen: {system: a}}        -> presets.qwen: is the name of qwen already (compose.yaml:1)
aliases: [q], presets: {q: {system: a}} -> presets.q: is an alias of qwen already (compose.yaml:1)
loras: [l], presets: {l: {system: a}}   -> loras.l: is a preset of qwen already (compose.yaml:1)
"""


@pytest.mark.parametrize(("said", "problem"), table(REFUSED))
def test_what_cannot_be_a_preset_is_said(tmp_path: Path, said: str, problem: str) -> None:
    (told,) = refused(tmp_path, said)
    assert told.startswith("compose.yaml:1: services.qwen.x-anvil.")
    assert problem in told


def test_two_models_cannot_have_a_preset_of_one_name(tmp_path: Path) -> None:
    each = "image: x, x-anvil: {presets: {fast: {system: a}}}"
    (told,) = problems(tmp_path, f"services:\n  a: {{{each}}}\n  b: {{{each}}}\n")
    assert (
        told == "compose.yaml:3: services.b.x-anvil.presets.fast: is a preset of a already (compose.yaml:2)"
    )


def test_what_one_replica_says_of_presets_holds_for_its_model(tmp_path: Path) -> None:
    said = "{model: m, presets: {fast: {system: a}}}"
    services = f"services: {{a: {{image: x, x-anvil: {said}}}, b: {{image: x, x-anvil: {{model: m}}}}}}"
    found = presets_of(plain(tmp_path, services).backends)
    assert found == {"fast": Preset("fast", system="a")}
    services = services.replace("{model: m}", "{model: m, presets: {fast: {system: b}}}")
    (told,) = problems(tmp_path, services)
    assert told.endswith("services.b.x-anvil.presets.fast: is a preset of m already (compose.yaml:1)")


def test_other_presets_hold_at_once(tmp_path: Path) -> None:
    text = "services: {a: {image: x, x-anvil: {presets: {fast: {system: NOW}}}}}"
    before = plain(tmp_path, text)
    found = change.compare(before, plain(tmp_path, text.replace("NOW", "then")))
    assert (found.kept, found.settings) == (("a",), ("a.presets",))


def test_a_preset_wins_over_its_service() -> None:
    preset = Preset("p", strip=("a",), set=(("b", "2"),), default=(("e", "2"), ("f", "2")))
    put, default = tuple((name, "1") for name in "abde"), tuple((name, "1") for name in "afg")
    assert preset.over(("c",), put, default) == (
        ("c", "a"),
        {"b": "2", "d": "1"},
        {"e": "2", "f": "2", "g": "1"},
    )


# Adapters of vLLM

MODULES = shlex.split(
    """--enable-lora --lora-modules sql=/l/sql '{"name": "chat", "path": "/l/chat"}' --port 1"""
)
LOADS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@pytest.mark.parametrize("wanted", [None, (("sql", ""),), (("sql", "/l/sql"),)])
def test_adapters_of_vllms_command_are_names(wanted: tuple[tuple[str, str], ...] | None) -> None:
    found = find_adapters("vllm", MODULES, {}, wanted)
    assert [(each.name, each.served_model) for each in found.presets] == [("sql", "sql"), ("chat", "chat")]
    assert (found.to_load, found.problems) == ((), ())


def test_an_adapter_with_a_path_is_loaded_into_vllm_once_it_runs() -> None:
    found = find_adapters("vllm", ["--enable-lora"], LOADS, (("sql", "/l/sql"),))
    assert (found.to_load, found.problems) == ((("sql", "/l/sql"),), ())
    assert found.presets == (Preset("sql", served_model="sql", is_adapter=True),)


REFUSED_ADAPTERS = """
    vllm --enable-lora | sql=/l -> environment: {VLLM_ALLOW_RUNTIME_LORA_UPDATING: "1"}
    vllm LOADS --port 1 | sql=/l -> only with --enable-lora in its command
    vllm MODULES | sqll= -> is no adapter of its command; did you mean sql?
    vllm MODULES | sql=/other -> its command has it at /l/sql, not at /other
    openai | sql=/l -> cannot be told to load it: name it alone, loras: [sql]
    sglang | sql= -> engine sglang takes no adapter's name as a model's
    llamacpp --lora /l/sql.gguf | sqll= -> sqll is no adapter of its command; did you mean
    llamacpp | sql=/l/s.gguf -> add --lora /l/s.gguf to its command
"""


@pytest.mark.parametrize(("said", "problem"), table(REFUSED_ADAPTERS))
def test_an_adapter_that_the_engine_cannot_have_is_said(said: str, problem: str) -> None:
    command, _, wanted = said.partition(" | ")
    name, _, path = wanted.partition("=")
    engine, *words = command.split()
    variables = LOADS if "LOADS" in words else {}
    words = MODULES if words == ["MODULES"] else [word for word in words if word != "LOADS"]
    ((where, told),) = find_adapters(engine, words, variables, ((name, path),)).problems
    assert where == (name,)
    assert problem in told


def test_the_problem_of_an_adapter_names_its_key(tmp_path: Path) -> None:
    (told,) = refused(tmp_path, "loras: {sql: /l}", ", command: --enable-lora")
    assert told.startswith(
        "compose.yaml:1: services.qwen.x-anvil.loras.sql: vLLM loads an adapter while it runs"
    )


def test_adapters_of_an_engine_of_which_nothing_is_known_are_believed() -> None:
    found = find_adapters("openai", [], {}, (("sql", ""),))
    assert found.presets == (Preset("sql", served_model="sql", is_adapter=True),)


# Adapters of llama.cpp


def test_llama_server_numbers_its_adapters_by_its_command() -> None:
    words = ["--lora", "/l/a.gguf,/l/b.gguf", "--lora-scaled=/l/c.gguf:0.5", "--cache-ram", "0"]
    found = find_adapters("llamacpp", words, {}, (("b", ""), ("law", "/l/c.gguf")))
    assert [(each.name, scales(each.set)) for each in found.presets] == [
        ("b", [0.0, 1.0, 0.0]),
        ("law", [0.0, 0.0, 0.5]),
    ]
    assert scales(found.put) == [0.0, 0.0, 0.0]
    assert (found.problems, found.caveats) == ((), ())


def scales(put: tuple[tuple[str, str], ...]) -> list[float]:
    """The scales of all adapters, by their number."""
    said = json.loads(dict(put)["lora"])
    assert [each["id"] for each in said] == list(range(len(said)))
    return [each["scale"] for each in said]


@pytest.mark.parametrize(
    ("more", "kept"),
    [("--cache-ram 0", True), ("-cram 0", True), ("--cache-ram=8192", False), ("", False)],
)
def test_llama_server_keeps_prompts_only_where_it_cannot_mistake_their_adapter(
    tmp_path: Path, more: str, kept: bool
) -> None:
    said = f"x-anvil: {{loras: {{law: /l/law.gguf}}}}, command: --port 8080 --lora /l/law.gguf {more}"
    found = plain(tmp_path, f"services: {{a: {{image: llama.cpp, {said}}}}}")
    assert (dict(found.backends[0].set).get("cache_prompt") is None) is kept
    assert any("add --cache-ram 0 to its command" in warning for warning in found.warnings) is not kept
    said = said.replace("x-anvil: {", "x-anvil: {set: {cache_prompt: true}, ")
    found = plain(tmp_path, f"services: {{a: {{image: llama.cpp, {said}}}}}")
    assert dict(found.backends[0].set)["cache_prompt"] == "true"


# Adapters of replicas


def replicas(tmp_path: Path, *commands: str, loras: str = "", more: str = "") -> tuple[Backend, ...]:
    said = f"{{model: m{loras}}}"
    each = [f"  r{n}: {{image: vllm, command: {c}, x-anvil: {said}}}" for n, c in enumerate(commands)]
    return plain(tmp_path, "\n".join(["services:", *each, more])).backends


BOTH = "--enable-lora --lora-modules sql=/l/sql"


def test_adapters_of_all_replicas_are_names(tmp_path: Path) -> None:
    found = replicas(tmp_path, BOTH, BOTH)
    assert [[preset.name for preset in each.presets] for each in found] == [["sql"], ["sql"]]


def test_an_adapter_of_some_replicas_is_no_name(tmp_path: Path) -> None:
    found = replicas(tmp_path, BOTH, "--port 8000")
    assert [each.presets for each in found] == [(), ()]
    (warning,) = [
        each for each in plain(tmp_path, (tmp_path / "compose.yaml").read_text()).warnings if "sql" in each
    ]
    assert "services.r0: its LoRA adapter sql cannot be asked for: not every replica of m has it" in warning


def test_an_adapter_of_a_command_gives_way_to_a_name_of_the_settings(tmp_path: Path) -> None:
    services = f"services: {{a: {{image: vllm, command: {BOTH}, x-anvil: {{aliases: [sql]}}}}}}"
    found = plain(tmp_path, services)
    assert found.backends[0].presets == ()
    assert any("cannot be asked for: that is a name of a" in warning for warning in found.warnings)


def test_an_adapter_that_one_replica_names_is_one_of_all(tmp_path: Path) -> None:
    services = (
        f"services: {{a: {{image: vllm, command: {BOTH}, x-anvil: {{model: m, loras: [sql]}}}}, "
        "b: {image: vllm, x-anvil: {model: m}}}"
    )
    (told,) = problems(tmp_path, services)
    assert told.endswith(
        "services.b.x-anvil.loras: lacks the adapter sql, which a, a replica of the same model, has"
    )
