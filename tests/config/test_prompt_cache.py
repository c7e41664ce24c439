"""The setting prompt_cache: what it needs of a service, and what is said where that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from anvil_mux.config.abilities import prompts_folder
from anvil_mux.config.service import Service
from tests.config.files import one, plain, problems, table

SERVES = "image: llama.cpp:server, x-anvil: {prompt_cache: 4GiB}"
SAVES = "--port 8080 -np 2 --slot-save-path /prompts"


def warned(tmp_path: Path, command: str, more: str = "") -> list[str]:
    said = f"{SERVES}, command: {command} --slot-save-path /prompts, volumes: ['./p:/prompts']{more}"
    warnings = plain(tmp_path, f"services: {{chat: {{{said}}}}}").warnings
    return [each for each in warnings if "prompt_cache: " in each]


def test_it_is_one_line_beside_what_the_engine_needs(tmp_path: Path) -> None:
    said = f"{SERVES}, command: -m /m/a.gguf {SAVES}, volumes: ['./p:/prompts', '~/models:/m:ro', big:/data]"
    found = plain(tmp_path, f"services: {{chat: {{{said}}}}}").backends[0]
    assert found.prompt_cache == 4 << 30
    inside = {"/prompts", "/m", "/data"}
    assert set(dict(found.service.mounts)) == inside
    assert found.service.on_host(prompts_folder(found.service)) == str(tmp_path / "p")
    assert found.service.on_host("/m/a.gguf") == str(Path.home() / "models/a.gguf")
    assert found.service.on_host("/data/a.gguf") == ""
    assert found.service.on_host("/etc/passwd") == ""


@pytest.mark.parametrize(
    "volume",
    ["./p:/prompts:rw", "{type: bind, source: ./p, target: /prompts}", "{type: bind, source: ./, target: /}"],
)
def test_a_folder_is_mounted_in_either_form(tmp_path: Path, volume: str) -> None:
    found = plain(
        tmp_path, f"services: {{chat: {{{SERVES}, command: {SAVES}, volumes: [{volume}]}}}}"
    ).backends[0]
    outside = found.service.on_host("/prompts")
    assert outside in (str(tmp_path / "p"), str(tmp_path / "prompts"))


def test_the_deepest_mount_counts() -> None:
    service = Service(mounts=(("/data", "/srv"), ("/data/prompts", ""), ("/data/m", "/models")))
    assert service.on_host("/data/x") == "/srv/x"
    assert service.on_host("/data/m/x") == "/models/x"
    assert service.on_host("/data/prompts/x") == ""


def test_a_process_sees_the_host(tmp_path: Path) -> None:
    command = "[llama-server, -m, models/a.gguf, --slot-save-path, prompts]"
    found = one(tmp_path, f"command: {command}", "x-anvil: {runtime: process}").service
    assert found.on_host("/m/a.gguf") == "/m/a.gguf"
    assert found.on_host("models/a.gguf") == str(tmp_path / "models/a.gguf")


REFUSED = """
    image: vllm/vllm-openai, x-anvil: {prompt_cache: 4GiB} -> engine vllm cannot save prompts
    SERVES -> needs a folder for them: write command: [..., --slot-save-path, /prompts]
    SERVES, command: SAVES -> /prompts is in no folder of the host
    SERVES, command: SAVES, volumes: [big:/prompts] -> /prompts is in no folder of the host
    SERVES, command: --slot-save-path here, volumes: ['.:/app'] -> must be an absolute path, not here
    SERVES, command: SAVES --lora /m/a.gguf, volumes: ['.:/prompts'] -> with which LoRA adapters
    image: llama.cpp, x-anvil: {prompt_cache: 4GiB, evict_to: [sleep]}, command: --slot-save-path /p,
        volumes: ['.:/p'] -> router mode has no slots of its own
    image: llama.cpp, x-anvil: {prompt_cache: plenty} -> must be a size such as 20GiB
"""


@pytest.mark.parametrize(("said", "why"), table(REFUSED))
def test_what_cannot_work_is_refused_with_what_to_write_instead(tmp_path: Path, said: str, why: str) -> None:
    [text] = problems(
        tmp_path, f"services: {{chat: {{{said.replace('SERVES', SERVES).replace('SAVES', SAVES)}}}}}"
    )
    assert "services.chat.x-anvil.prompt_cache: " in text
    assert why in text


@pytest.mark.parametrize(
    "command", ["-np 2", "-np 2 -no-kvu", "--no-cache-idle-slots", "-cram 0", "-np 1 -kvu"]
)
def test_all_slots_keep_their_prompts(tmp_path: Path, command: str) -> None:
    assert warned(tmp_path, command) == []


@pytest.mark.parametrize("command", ["-c 4096", "-np 4 --kv-unified", "-kvu --parallel 2"])
def test_slots_that_share_a_buffer_lose_theirs_while_idle(tmp_path: Path, command: str) -> None:
    [warning] = warned(tmp_path, command)
    assert "add --no-cache-idle-slots to its command" in warning


def test_what_keeps_the_engine_from_saving_is_a_warning(tmp_path: Path) -> None:
    [sees] = warned(tmp_path, "-np 1 --mmproj /m/p.gguf")
    assert "of a model that sees or hears" in sees
    [keeps_none] = warned(tmp_path, "-np 1 --no-cache-prompt")
    assert "take it out" in keeps_none
