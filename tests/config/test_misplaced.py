"""Settings of anvil-mux that stand at the wrong place, and complaints of the Compose program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from anvil_mux.command import Done
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.config.reading import page_of, unknown_key
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


MISPLACED = [
    ("services:\n  a:\n    image: x\n    deploy:\n      x-anvil: {pin: true}\n", 5,
     "services.a.deploy.x-anvil", "stands below deploy, where nobody reads it", "x-anvil: {pin: true}"),
    ("services:\n  x-anvil: {}\n  a: {image: x}\n", 2, "services.x-anvil",
     "stands among the services, as if it were one", "x-anvil: {}"),
    ("volumes:\n  v:\n    x-anvil: {}\nservices:\n  a: {image: x}\n", 3, "volumes.v.x-anvil",
     "stands where nobody reads it", "x-anvil: {}"),
    ("services:\n  a:\n    image: x\n    x_anvil: {pin: true}\n", 4, "services.a.x_anvil",
     "nobody reads this key; did you mean x-anvil?", "x-anvil: {pin: true}"),
    ("x-anvl: {}\nservices:\n  a: {image: x, x-anvil: {}}\n", 1, "x-anvl",
     "nobody reads this key; did you mean x-anvil?", "x-anvil: {}"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "key", "says", "write"), MISPLACED)
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


# What the Compose program refuses

REFUSED = "validating /c.yaml: services.a Additional property prots is not allowed"


def refused(folder: Path, said: str, *texts: str) -> list[str]:
    """The problems of files that the Compose program refuses with these words."""
    files = [folder / f"{number}.yaml" for number, _ in enumerate(texts)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(files, environ={}, compose=lambda *_: Done(15, "", said))
    return caught.value.problems


def test_what_compose_says_of_a_file_is_shown_in_its_words(tmp_path: Path) -> None:
    said = "decoding failed due to the following error(s):\n\nerror decoding 'services[a].mem_limit': lots"
    problem = found(tmp_path, "services: {a: {mem_limit: lots, x-anvil: {}}}", said)
    assert problem == f"{tmp_path}/compose.yaml: docker compose config: {' '.join(said.split())}"


def test_of_several_files_all_are_named_since_compose_does_not_always_say_which(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, "it is Monday", "services: {a: {image: x}}", "services: {a: {image: y}}")
    assert problem == f"{tmp_path}/0.yaml and 1.yaml: docker compose config: it is Monday"


def test_warnings_before_a_refusal_are_shown_as_they_may_be_its_reason(tmp_path: Path) -> None:
    said = 'time="x" level=warning msg="The \\"T\\" variable is not set. Defaulting to a blank string."\n'
    said += 'service "a" has neither an image nor a build context specified'
    first, second = refused(tmp_path, said, "services: {a: {image: $T, x-anvil: {}}}")
    assert first.endswith('The "T" variable is not set. Defaulting to a blank string.')
    assert second.endswith("has neither an image nor a build context specified")


@pytest.mark.parametrize(
    ("key", "value", "says", "write"),
    [
        ("prots", "[81]", "unknown key; did you mean ports?", "ports: [81]"),
        ("vram", "20GiB", "is a setting of anvil-mux: it goes into x-anvil", "x-anvil: {vram: 20GiB}"),
    ],
)
def test_a_key_that_is_misspelt_or_ours_has_its_line_beside_what_compose_says(
    tmp_path: Path, key: str, value: str, says: str, write: str
) -> None:
    text = f"services:\n  a:\n    image: x\n    healthcheck: {{}}\n    {key}: {value}\n    x-anvil: {{}}\n"
    said, problem = refused(tmp_path, REFUSED, text)
    assert said.endswith(REFUSED)
    assert isinstance(problem, Diagnostic)
    assert problem == f"{tmp_path}/0.yaml:5: services.a.{key}: {says}"
    assert (problem.write, ".".join(problem.key)) == (write, f"services.a.{key}")


def test_keys_that_compose_alone_knows_are_not_taken_for_misspelt_ones() -> None:
    for key in (
        "cpus",
        "cpuset",
        "cap_add",
        "develop",
        "domainname",
        "post_start",
        "provider",
        "userns_mode",
    ):
        assert unknown_key(key, "x") is None


def test_a_process_is_told_of_keys_that_have_no_effect_on_it(tmp_path: Path) -> None:
    text = (
        "x-anvil: {runtime: process}\nservices:\n  a:\n    command: x --port 8080\n    x-anvil: {gpus: []}\n"
    )
    (tmp_path / "compose.yaml").write_text(f"{text}    mem_limit: 1g\n    x-mine: 1\n")
    [warning] = load([tmp_path / "compose.yaml"], environ={}).warnings
    assert warning == f"{tmp_path}/compose.yaml:6: service a: `mem_limit` has no effect on a local process"
