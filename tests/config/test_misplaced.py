"""Settings of anvil-mux that stand at the wrong place, and complaints of the Compose program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from anvil_mux.command import Done
from anvil_mux.config import compose_words
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.pages import page_of
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load


def found(folder: Path, text: str, said: str | None = None) -> Diagnostic:
    """The only problem of a file, of which the Compose program says something, or is not asked."""
    (folder / "compose.yaml").write_text(text)

    def compose(argv: Sequence[str], environ: Mapping[str, str]) -> Done:
        return Done(1, "", str(said))

    with pytest.raises(ConfigError) as caught:
        load([folder / "compose.yaml"], environ={}, compose=None if said is None else compose)
    [problem] = caught.value.problems
    assert isinstance(problem, Diagnostic)
    assert problem.place.file == str(folder / "compose.yaml")
    return problem


@pytest.mark.parametrize(
    ("text", "line", "key", "says", "write"),
    [
        (
            "services:\n  a:\n    image: x\n    deploy:\n      x-anvil: {pin: true}\n",
            *(5, "services.a.deploy.x-anvil", "stands below deploy, where nobody reads it"),
            "x-anvil: {pin: true}",
        ),
        (
            "services:\n  x-anvil: {}\n  a: {image: x}\n",
            *(2, "services.x-anvil", "stands among the services, as if it were one", "x-anvil: {}"),
        ),
        (
            "volumes:\n  v:\n    x-anvil: {}\nservices:\n  a: {image: x}\n",
            *(3, "volumes.v.x-anvil", "stands where nobody reads it", "x-anvil: {}"),
        ),
        (
            "services:\n  a:\n    image: x\n    x_anvil: {pin: true}\n",
            *(
                4,
                "services.a.x_anvil",
                "nobody reads this key; did you mean x-anvil?",
                "x-anvil: {pin: true}",
            ),
        ),
        (
            "x-anvl: {}\nservices:\n  a: {image: x, x-anvil: {}}\n",
            *(1, "x-anvl", "nobody reads this key; did you mean x-anvil?", "x-anvil: {}"),
        ),
    ],
)
def test_what_stands_where_nobody_reads_it(
    tmp_path: Path, text: str, line: int, key: str, says: str, write: str
) -> None:
    problem = found(tmp_path, text)
    assert (problem.place.line, ".".join(problem.key), problem.write) == (line, key, write)
    assert says in problem
    assert page_of(problem)


def test_parts_for_services_may_hold_anything(tmp_path: Path) -> None:
    text = "x-anvil-common: &c\n  x-anvil: {pin: true}\nservices:\n  a:\n    <<: *c\n    image: x\n"
    (tmp_path / "compose.yaml").write_text(text)
    [backend] = load([tmp_path / "compose.yaml"], environ={}, compose=None).backends
    assert backend.pin


FILE = """services:
  a:
    image: x:${TAG}
    gpus: 0
    ports: 80
    prots: [81]
    vram: 20GiB
    mem_limit: lots
    depends_on: [bb]
    volumes: ["models:/models"]
    environment:
      - A: b
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: some}]}}}
  b b: {image: x, env_file: some.env}
  b:
    - image: x
    - scale: 1
"""
DEVICES = "deploy.resources.reservations.devices"


@pytest.mark.parametrize(
    ("said", "line", "key", "says", "write"),
    [
        (
            "validating /c.yaml: services.a.gpus must be a string",
            *(4, "services.a.gpus", "must be `all` or a list of"),
            "gpus: [{driver: nvidia, device_ids: ['0']}]",
        ),
        (
            "validating /c.yaml: services.a.ports must be a list",
            *(5, "services.a.ports", "must be a list", "ports: [80]"),
        ),
        (
            "validating /c.yaml: services.a Additional property prots is not allowed",
            *(6, "services.a.prots", "Compose knows no such key; did you mean ports?", "ports: [81]"),
        ),
        (
            "validating /c.yaml: services.a additional properties 'prots' not allowed",
            *(6, "services.a.prots", "Compose knows no such key; did you mean ports?", "ports: [81]"),
        ),
        (
            "validating /c.yaml: services.a Additional property vram is not allowed",
            *(7, "services.a.vram", "it goes into x-anvil", "x-anvil: {vram: 20GiB}"),
        ),
        (
            "decoding failed due to the following error(s):\n\n"
            "error decoding 'services[a].mem_limit': invalid size: 'lots'",
            *(8, "services.a.mem_limit", "invalid size: 'lots'", "mem_limit: 16gb"),
        ),
        (
            f"error decoding 'services[a].{DEVICES}[0].count': invalid value \"some\"",
            *(13, f"services.a.{DEVICES}.0.count", 'invalid value "some"', "count: all"),
        ),
        (
            f"validating /c.yaml: services.a.{DEVICES}.0 capabilities is required",
            *(13, f"services.a.{DEVICES}.0", "needs capabilities", "capabilities: [gpu]"),
        ),
        (
            'service "a" depends on undefined service "bb": invalid compose project',
            *(9, "services.a.depends_on", "there is no service bb; did you mean b b?", "depends_on: [b b]"),
        ),
        (
            'service "a" refers to undefined volume models: invalid compose project',
            *(
                10,
                "services.a.volumes",
                "the volume models, which is not at the top",
                "volumes: {models: {}}",
            ),
        ),
        (
            "services.a.environment.[0]: unexpected type map[string]interface {}",
            *(12, "services.a.environment.0", "must be text: NAME=value", ""),
        ),
        (
            'service "a" has neither an image nor a build context specified: invalid compose project',
            *(
                3,
                "services.a.image",
                "its image is x:${TAG}, and the variable TAG is not set",
                "TAG=... in .env",
            ),
        ),
        (
            'service "b" has neither an image nor a build context specified: invalid compose project',
            *(15, "services.b.image", "needs `image: scratch` and `profiles`", "image: ..."),
        ),
        (
            "error while interpolating services.a.image: required variable TAG is missing a value: which",
            *(3, "services.a.image", "the variable TAG must be set: which", "TAG=... in .env"),
        ),
        (
            "env file /x/some.env not found: stat /x/some.env: no such file or directory",
            *(14, "services.b b.env_file", "the file /x/some.env is not there"),
            "env_file: [{path: some.env, required: false}]",
        ),
        (
            "invalid spec: :/models: empty section between colons",
            *(10, "services.a.volumes", "with nothing on one side of a colon: is a variable not set?", ""),
        ),
        ("empty compose file", *(1, "", "the file: is empty", "services: ...")),
        (
            "validating /c.yaml: services Additional property b b is not allowed",
            *(14, "services.b b", "is no name of a service", "b-b: ..."),
        ),
        (
            "services.b must be a mapping",
            *(15, "services.b", "without dashes before its keys", "b: {image: x, scale: 1}"),
        ),
        (
            "validating /c.yaml: (root) Additional property servces is not allowed",
            *(1, "servces", "Compose knows no such key; did you mean services?", "services: null"),
        ),
    ],
)
def test_complaints_of_compose_have_a_line_and_what_to_write(
    tmp_path: Path, said: str, line: int, key: str, says: str, write: str
) -> None:
    problem = found(tmp_path, FILE, said)
    assert (problem.place.line, ".".join(problem.key), problem.write) == (line, key, write)
    assert says in problem


def test_who_turns_restarts_off_by_false_reads_what_compose_calls_it(tmp_path: Path) -> None:
    text = "services:\n  a: {image: x, restart: false}\n"
    assert found(tmp_path, text, "services.a.restart must be a string").write == 'restart: "no"'


def test_a_complaint_that_is_not_known_keeps_its_words(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(FILE)
    with pytest.raises(ConfigError, match=r"compose.yaml: docker compose config: it is Monday$"):
        load([tmp_path / "compose.yaml"], environ={}, compose=lambda *_: Done(1, "", "it is Monday\n"))


@pytest.mark.parametrize("name", ["imge", "an image of mine"])
def test_compose_says_of_a_key_that_it_is_not_allowed(name: str) -> None:
    for said in (
        f"services.a additional properties '{name}' not allowed",
        f"x: (root) Additional property {name} is not allowed",
    ):
        found = compose_words.NOT_ALLOWED.search(said)
        assert found
        assert found["name"] == name
