"""Compose files read by the Compose program and without it, several together, and those that we ship."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from anvil_mux.cluster.simulated import HOSTS
from anvil_mux.command import Done
from anvil_mux.config import config
from anvil_mux.config.compose import OVERRIDE_NAMES, compose_config, find_files, run_compose
from anvil_mux.config.interpolate import Scope
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load
from tests.config.files import GIB, SERVICE, one, plain, problems, write

SHIPPED = sorted((Path(__file__).resolve().parent.parent.parent / "compose").glob("*.yaml"))


# Reading without the Compose program


def test_yaml_is_read_as_compose_reads_it(tmp_path: Path) -> None:
    text = (
        "services: {a: {x-anvil: {}, command: [on, no, 22:22, 2001-01-01, 0o17, 1_000, true, 1.50, ~, '07']}}"
    )
    words = one(tmp_path, "").service.command
    assert words == ()
    (a,) = plain(tmp_path, text).backends
    assert a.service.command == ("on", "no", "22:22", "2001-01-01", "15", "1000", "true", "1.5", "", "07")


def test_anchors_and_merge_keys_are_read(tmp_path: Path) -> None:
    text = "x-m: &m {image: vllm, x-anvil: {pin: true}}\nservices: {a: {<<: *m}, b: {<<: *m, image: other}}"
    assert [(each.engine, each.pin) for each in plain(tmp_path, text).backends] == [
        ("vllm", True),
        ("openai", True),
    ]


def test_variables_come_from_the_environment_and_from_dot_env(tmp_path: Path) -> None:
    lines = [
        "# c",
        "A=one  # c",
        "export B='t$wo'",
        'C="th\\tree ${A}"',
        "D = $A-${E:-e}",
        "E",
        "F=dot",
        "G=x#y",
    ]
    (tmp_path / ".env").write_text("\n".join(lines))
    text = "services: {a: {x-anvil: {}, command: ['$A', '$B', '$C', '$D', '$F', '$G', '$$A', '$1', 'x$']}}"
    (a,) = plain(tmp_path, text, environ={"F": "environ"}).backends
    expected = ("one", "t$wo", "th\tree one", "one-e", "environ", "x#y", "$A", "$1", "x$")
    assert a.service.command == expected


ENVIRON = {"A": "av", "E": "", "D": "$A"}
FILLED = [
    *(
        ("$A", "av"),
        ("${A}b", "avb"),
        ("$N", ""),
        ("$D", "$A"),
        ("$$A", "$A"),
        ("$$$A", "$av"),
        ("$1 $ x$", "$1 $ x$"),
    ),
    *(("${N:-d}", "d"), ("${E:-d}", "d"), ("${A:-d}", "av"), ("${N-d}", "d"), ("${E-d}", ""), ("${N-}", "")),
    *(("${A:+r}", "r"), ("${E:+r}", ""), ("${N:+r}", ""), ("${E+r}", "r"), ("${N+r}", "")),
    *(("${A:?e}", "av"), ("${E?e}", ""), ("${N:-a:-b?c}", "a:-b?c"), ("${A+b?c:-d}", "b?c:-d")),
    *(
        ("${N:-${M:-z}}y", "zy"),
        ("${N:-${D}x}", "$Ax"),
        ("${A:+r$A}", "rav"),
        ("${N:-$$}", "$"),
        ("${A}}", "av}"),
    ),
]


@pytest.mark.parametrize(("text", "expected"), FILLED)
def test_variables_are_put_in(text: str, expected: str) -> None:
    assert Scope(ENVIRON).fill(text) == expected


@pytest.mark.parametrize(
    "text", ["${E:?e}", "${N:?}", "${N?}", "${A:-${N:?e}}", "${A:x}", "${}", "${ A }", "${a.b}"]
)
def test_variables_that_must_be_set_and_what_is_no_variable_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be set|is no variable"):
        Scope(ENVIRON).fill(text)


def test_a_variable_counts_as_unset_where_nothing_stands_in_for_it() -> None:
    scope = Scope(ENVIRON)
    scope.fill("$N ${M} ${O:-o} ${P+p} $A $E ${A:-$Q}")
    assert list(scope.unset) == ["N", "M", "Q"]


def test_a_bad_dot_env_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text('A="1\n2"\nB="two\nlines\n')
    [found] = problems(tmp_path, SERVICE % "")
    assert found == '.env:3: a quote (") is opened here and not closed'


DOT_ENV = [
    ("V=one  # c", "one"),
    ("export V='t$wo'", "t$wo"),
    ("V='it\\'s'", "it's"),
    ('V="two\nlines"\nW=x', "two\nlines"),
    ("V='two\nlines'", "two\nlines"),
    ('W="x" V=y', "y"),
    ("W='x'V=y", "y"),
    ('V="x" # c\nW=1', "x"),
    ("\ufeffV=bom", "bom"),
    ("V=crlf\r\nW='a\r\nb'\r\n", "crlf"),
    ('V="a\\tb\\"c\\\\d\\$e\\q\\0101"', 'a\tb"c\\d$e\\qA'),
    ("V: yaml", "yaml"),
    ("W=1\nW=2\nV=$W", "2"),
    ("V=x#y", "x#y"),
    ("V=$$x", "$x"),
    ("V=", ""),
    ("V\n", ""),
    ("#V=1\n  V = 2 ", "2"),
    ("V=${W:-z}", "z"),
    ("V.W=1\nV[0]=2\nV=3", "3"),
]


@pytest.mark.parametrize(("text", "expected"), DOT_ENV)
def test_a_dot_env_is_read_as_compose_reads_it(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / ".env").write_text(text, newline="")
    (a,) = plain(tmp_path, "services: {a: {x-anvil: {}, command: ['$V']}}").backends
    assert a.service.command == (expected,)


def test_the_files_of_variables_are_those_that_compose_takes(tmp_path: Path) -> None:
    for name, text in ((".env", "V=dot\nW=dot"), ("one", "V=1\nW=1"), ("two", "W=2")):
        (tmp_path / name).write_text(text)
    environ = {"COMPOSE_ENV_FILES": f"{tmp_path}/one,{tmp_path}/two"}
    (a,) = plain(tmp_path, "services: {a: {x-anvil: {}, command: [$V$W]}}", environ=environ).backends
    assert a.service.command == ("12",)


def test_what_compose_reads_is_not_refused_by_our_reader(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("not for us ' x")
    answer = Done(0, "name: p\nservices: {a: {image: x, x-anvil: {}}}", "")
    found = load([write(tmp_path, SERVICE % "")], compose=lambda argv, environ: answer, environ={})
    assert [each.name for each in found.backends] == ["a"]


def test_a_second_file_needs_compose(tmp_path: Path) -> None:
    files = [write(tmp_path, SERVICE % ""), write(tmp_path, SERVICE % "", "two.yaml")]
    with pytest.raises(ConfigError, match=r"two\.yaml: a second file needs the Docker Compose program"):
        load(files, compose=None, environ={})


def test_files_that_are_not_there_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "x.yaml", tmp_path / "y.yaml"], compose=None)
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == [
        "cannot be read: No such file or directory"
    ] * 2


# Reading through the Compose program


class Compose:
    """Stands in for the program."""

    def __init__(self, answer: Done | None) -> None:
        self.answer = answer
        self.asked: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str], environ: Mapping[str, str]) -> Done | None:
        self.asked.append(argv)
        return self.answer


def test_compose_is_asked_for_yaml_of_all_profiles(tmp_path: Path) -> None:
    assert compose_config([Path("a.yaml"), Path("b.yaml")]) == [
        *("docker", "compose", "--ansi", "never", "-f", "a.yaml", "-f", "b.yaml"),
        *("--profile", "*", "config"),
    ]


def test_what_compose_says_is_the_content_with_dollars_undoubled(tmp_path: Path) -> None:
    compose = Compose(Done(0, "name: p\nservices: {a: {command: [$$HOME], x-anvil: {}}}", ""))
    found = load([write(tmp_path, SERVICE % "")], compose=compose, environ={})
    assert (found.project, found.backends[0].service.command) == ("p", ("$HOME",))


def test_warnings_of_compose_are_kept(tmp_path: Path) -> None:
    err = 'time="x" level=warning msg="The \\"V\\" variable is not set. Defaulting to a blank string."\n'
    compose = Compose(Done(0, "services: {a: {x-anvil: {}}}", err + 'time="x" level=warning msg="other"\n'))
    warnings = load([write(tmp_path, SERVICE % "")], compose=compose, environ={}).warnings
    assert warnings[0].endswith(
        'compose.yaml: docker compose config: The "V" variable is not set. Defaulting to a blank string.'
    )
    assert warnings[1].endswith("docker compose config: other")


def test_what_compose_refuses_is_a_problem(tmp_path: Path) -> None:
    compose = Compose(Done(15, "", 'time="x" level=warning msg="w"\nservices.a is bad\n'))
    with pytest.raises(ConfigError, match=r"compose.yaml: docker compose config: services.a is bad$"):
        load([write(tmp_path, SERVICE % "")], compose=compose, environ={})


def test_without_the_program_the_file_is_read_all_the_same(tmp_path: Path) -> None:
    compose = Compose(None)
    assert load([write(tmp_path, SERVICE % "")], compose=compose, environ={}).backends
    assert len(compose.asked) == 1


@pytest.mark.parametrize("how", ["file", "variable", "environ", "flag"])
def test_the_process_runtime_never_asks_for_compose(tmp_path: Path, how: str) -> None:
    runtime = {"file": "process", "variable": "${R:-process}"}.get(how, "compose")
    file = write(
        tmp_path, f"x-anvil: {{runtime: '{runtime}'}}\nservices: {{a: {{command: x, x-anvil: {{}}}}}}"
    )
    compose = Compose(Done(1, "", "never"))
    environ = {"ANVIL_RUNTIME": "process"} if how == "environ" else {}
    found = load(
        [file], compose=compose, environ=environ, overrides={"runtime": "process"} if how == "flag" else {}
    )
    assert (found.runtime, compose.asked) == ("process", [])


def test_a_missing_program_is_no_answer(tmp_path: Path) -> None:
    assert run_compose(["docker", "compose"], {"PATH": str(tmp_path)}) is None


@pytest.mark.parametrize(
    "err", ["unknown shorthand flag: 'f' in -f", "docker: 'compose' is not a docker command."]
)
def test_docker_without_compose_is_no_answer(tmp_path: Path, err: str) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "{err}" >&2\nexit 125\n')
    docker.chmod(0o755)
    assert run_compose([str(docker), "compose"], {}) is None


# Which file


def test_the_compose_file_is_found_upward_with_its_override(tmp_path: Path) -> None:
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    second = write(tmp_path, "", "docker-compose.yml")
    assert find_files(inner, {}) == (second,)
    first = write(tmp_path, "", "compose.yml")
    for name in OVERRIDE_NAMES[::-1]:
        override = write(tmp_path, "", name)
        assert find_files(inner, {}) == (first, override)


def test_compose_file_names_the_files_in_the_environment_or_in_dot_env(tmp_path: Path) -> None:
    write(tmp_path, "")
    first, second = tmp_path / "sub" / "a.yaml", tmp_path / "b.yaml"
    assert find_files(tmp_path, {"COMPOSE_FILE": f"sub/a.yaml:{second}"}) == (first, second)
    environ = {"COMPOSE_FILE": "sub/a.yaml|b.yaml", "COMPOSE_PATH_SEPARATOR": "|"}
    assert find_files(tmp_path, environ) == (first, second)
    (tmp_path / ".env").write_text("COMPOSE_FILE=b.yaml")
    assert find_files(tmp_path, {}) == (second,)
    assert find_files(tmp_path, {"COMPOSE_FILE": "sub/a.yaml"}) == (first,)
    assert find_files(tmp_path, {"COMPOSE_FILE": ""}) == (tmp_path / "compose.yaml",)


def test_the_files_are_those_that_compose_finds(tmp_path: Path, compose: config.Compose) -> None:
    names = ("compose.yml", "docker-compose.yml", *OVERRIDE_NAMES)
    for name in names:
        write(tmp_path, f"services: {{a: {{image: x, labels: {{'{name}': here}}}}}}", name)
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    for name in ("", *names[2:]):
        if name:
            (tmp_path / name).unlink()
        (tmp_path / "at").write_text(f"cd {tmp_path} && exec docker compose config")
        answer = compose(["sh", str(tmp_path / "at")], environ)
        assert answer
        (taken,) = yaml.safe_load(answer.out)["services"].values()
        assert [*taken["labels"]] == sorted(file.name for file in find_files(tmp_path, {}))


def test_no_compose_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no compose\.yaml here or above; name a compose file"):
        find_files(tmp_path, {})


# The files we ship


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_every_shipped_file_loads_without_a_warning(file: Path) -> None:
    hosts = {name: Machine((Gpu("0", 24 << 30),), address=address) for name, address in HOSTS.items()}
    found = load([file], compose=None, environ={}, hosts=hosts if file.stem == "demo-hosts" else {})
    assert len(found.backends) >= 2
    assert found.warnings == ()


def test_the_shipped_files_show_what_they_say() -> None:
    shipped = {file.stem: load([file], compose=None, environ={}) for file in SHIPPED}
    assert set(shipped) == {
        *("demo", "demo-hosts", "demo-sleep", "llamacpp", "vllm-pair", "sglang"),
        *("tensor-parallel", "prefill-decode"),
    }
    assert shipped["demo"].runtime == "process"
    assert [each.gpus for each in shipped["vllm-pair"].backends] == [("0",), ("0",)]
    assert [each.engine for each in shipped["vllm-pair"].backends] == ["vllm", "vllm"]
    assert [each.gpus for each in shipped["tensor-parallel"].backends] == [("0", "1"), ("0",), ("1",)]
    assert {each.engine for each in shipped["llamacpp"].backends} == {"llamacpp"}
    stages = {each.infer_type: (each.model, each.gpus) for each in shipped["prefill-decode"].backends}
    assert stages == {"prefill": ("qwen3-8b", ("0",)), "decode": ("qwen3-8b", ("1",))}
    assert sum(each.vram or 0 for each in shipped["sglang"].backends) == 23 * GIB


def test_beside_its_engines_anvil_mux_leaves_itself_alone() -> None:
    file = SHIPPED[0].parent.parent / "contrib" / "compose.yaml"
    found = load([file], compose=None, environ={"PWD": "/srv/mux", "DOCKER_GID": "999"})
    assert [each.name for each in found.backends] == ["qwen3-8b", "gemma-3-12b"]
    assert (found.host, found.warnings) == ("127.0.0.1", ())
    with pytest.raises(
        ConfigError, match="the variable DOCKER_GID must be set: the group of Docker's socket"
    ):
        load([file], compose=None, environ={"PWD": "/srv/mux"})


def test_the_container_that_checkpoints_has_what_it_takes() -> None:
    file = SHIPPED[0].parent.parent / "contrib" / "compose-checkpoint.yaml"
    found = load([file], compose=None, environ={"PWD": "/srv/mux"})
    assert [each.name for each in found.backends] == ["qwen3-8b", "gemma-3-12b"]
    assert {each.evict_to for each in found.backends} == {("checkpoint", "stop")}
    assert (found.host, found.warnings) == ("127.0.0.1", ())
    mux = yaml.safe_load(file.read_text())["services"]["anvil-mux"]
    assert (mux["user"], mux["privileged"], mux["pid"]) == ("root", True, "host")
    assert mux["gpus"] == [
        {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "compute", "utility"]}
    ]
    assert mux["command"] == ["serve", file.name]


def has_compose() -> bool:
    if not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def compose() -> config.Compose:
    """The real program; that it was not simply missing is part of what it shows."""
    if not has_compose():
        pytest.skip("needs the Docker Compose program")

    def ask(argv: Sequence[str], environ: Mapping[str, str]) -> Done | None:
        answer = run_compose(argv, environ)
        assert answer is not None
        return answer

    return ask


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_compose_and_the_fallback_read_a_shipped_file_alike(file: Path, compose: config.Compose) -> None:
    through = load([file], compose=compose)
    assert replace(through, resolved_compose="") == load([file], compose=None)


def random_text(random: Random, depth: int = 3) -> str:
    """Literals and expressions; the words of the expressions are made in the same way."""
    text = ""
    for _ in range(random.randrange(4)):
        text += "".join(random.choices(["a", "b", " ", ":", "-", "?", "+", "$$", "\\", '"', "1"], k=2))
        if depth:
            name, operator = random.choice("AEDNM"), random.choice([":-", "-", ":+", "+", "?"])
            word = random_text(random, depth - 1)
            text += random.choice([f"${name}", f"${{{name}}}", f"${{{name}{operator}{word}}}"])
    return text


def test_variables_are_put_in_as_compose_does(tmp_path: Path, compose: config.Compose) -> None:
    random, texts, expected = Random(7), [], []
    for text in (*(text for text, _ in FILLED), *(random_text(random) for _ in range(300))):
        with suppress(ValueError):
            expected.append(Scope(ENVIRON).fill(text))
            texts.append(text)
    file = write(tmp_path, json.dumps({"services": {"s": {"image": "x", "x-anvil": {}, "command": texts}}}))
    environ = {**ENVIRON, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert load([file], compose=compose, environ=environ).backends[0].service.command == tuple(expected)


MANY_FORMS = """
name: ${NAME:-Forms}-x
x-anvil:
  listen: 127.0.0.1:${PORT:-9393}
  policy: {name: debounce, quiet: "${QUIET-3}"}
  gpus: {"0": {vram: 24GiB}, "1": {vram: "${VRAM}"}}
  default_model: m
services:
  webui: {image: webui, ports: ["3000:80"]}
  second:
    image: vllm/vllm-openai:v1
    entrypoint: vllm serve
    command: org/m --served-model-name n --api-key $$KEY "two words" ${NOT_SET}
    environment: [A=1, HOME, ALSO_NOT_SET, "D=${DOT}"]
    ports: ["8000:8000", "127.0.0.1:9000-9001:9000-9001"]
    x-anvil: {port: 8000, load_timeout: 1m, vram: "${NO_VRAM:-2GB}"}
    gpus: all
    stop_grace_period: 1m30s
    restart: unless-stopped
  first:
    image: x
    expose: ["1234"]
    labels: [anvil.model=m, anvil.aliases=on, other]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, device_ids: ["1"], capabilities: [gpu]}]}}}
    x-anvil:
  third:
    image: x
    command: [on, "22:22", yes]
    environment: {T: true, N: 1.50, CUDA_VISIBLE_DEVICES: 0}
    devices: ["nvidia.com/gpu=0"]
    x-anvil: {pin: on, vram: 1GiB, aliases: [yes]}
"""


def test_compose_and_the_fallback_read_many_forms_alike(tmp_path: Path, compose: config.Compose) -> None:
    folder = tmp_path / "Some.Folder"
    folder.mkdir()
    (folder / ".env").write_text("DOT='from dot env'\nVRAM=20000MiB # c\n")
    file = write(folder, MANY_FORMS)
    through, without = load([file], compose=compose), load([file], compose=None)
    ours = [each for each in through.warnings if "docker compose config: The" not in each]
    assert sorted(ours) == sorted(each for each in without.warnings if "is not set, so" not in each)
    assert (len(through.warnings), len(without.warnings)) == (5, 5), json.dumps(through.warnings, indent=1)
    for each in config.Config.__dataclass_fields__:
        if each not in ("warnings", "resolved_compose"):
            assert getattr(through, each) == getattr(without, each)
    assert [each.name for each in without.backends] == ["second", "first", "third"]
    assert (without.project, without.port) == ("forms-x", 9393)


@pytest.mark.parametrize(("text", "expected"), DOT_ENV)
def test_compose_reads_the_same_dot_env(
    tmp_path: Path, compose: config.Compose, text: str, expected: str
) -> None:
    (tmp_path / ".env").write_text(text, newline="")
    file = write(tmp_path, "services: {a: {image: x, x-anvil: {}, command: ['$V']}}")
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert load([file], compose=compose, environ=environ).backends[0].service.command == (expected,)


# Several files

BASE = """
include: [{path: [other/included.yaml]}]
x-anvil: {gpus: ["0", "1"], max_wait: 1, policy: {name: debounce, quiet: 2}}
services:
  a: {image: x, x-anvil: {gpus: ["0"], vram: "${SIZE:-1GiB}", pin: true, aliases: [n]}}
  b: {image: x, x-anvil: {gpus: ["0"], pin: true}}
  c: {extends: a, x-anvil: {gpus: ["1"], aliases: []}}
  d: {extends: {file: other/file.yaml, service: "${BASE:-base}"}, x-anvil: {vram: 2GiB, set: {top_k: "$TOP"}}}
  e: {image: x, x-anvil: {pin: true}}
  f: {image: x, x-anvil: {pin: true, ttl: 5}}
"""
OVER = """
x-anvil:
  gpus: ["1", "0", "2"]
  policy: eager
  max_queue: 2
services:
  a: {command: y, x-anvil: {gpus: ["1"], pin: }}
  b: {x-anvil: !override {gpus: ["1"]}}
  e: {x-anvil: !reset null}
  f: {x-anvil: {ttl: !reset 0}}
  included: {x-anvil: {vram: 3GiB}}
"""
OTHER = """services:
  base: {extends: root, x-anvil: {gpus: ["1"], vram: 1GiB}}
  root: {image: x, x-anvil: {gpus: ["0"], aliases: ["$WHERE"]}}
"""
INCLUDED = """
x-anvil: {policy: nobody-reads-this}
services: {included: {image: x, x-anvil: {gpus: ["1"], aliases: ["$INCLUDED"]}}}
"""


@pytest.fixture
def laid(tmp_path: Path) -> list[Path]:
    """Two files, one of which extends a third and one of which includes a fourth."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".env").write_text("INCLUDED=by-its-own\nWHERE=not-here")
    (tmp_path / ".env").write_text("WHERE=first\nTOP='$literal'")
    write(tmp_path / "other", OTHER, "file.yaml")
    write(tmp_path / "other", INCLUDED, "included.yaml")
    return [write(tmp_path, BASE), write(tmp_path, OVER, "over.yaml")]


def test_each_setting_is_that_of_the_last_file_that_has_it(laid: list[Path], compose: config.Compose) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    found = load(laid, compose=compose, environ=environ)
    assert [each.name for each in found.backends] == ["a", "b", "c", "d", "f", "included"]
    a, b, c, d, f, included = found.backends
    assert [gpu.id for gpu in found.gpus] == ["1", "0", "2"]
    assert (found.max_wait, found.max_queue, found.policy) == (1.0, 2, "eager")
    assert (a.gpus, a.vram, a.pin, a.aliases, a.service.command) == (("1",), GIB, False, ("n",), ("y",))
    assert (b.gpus, b.pin) == (("1",), False)
    assert (c.gpus, c.vram, c.pin) == (("1",), GIB, True)
    assert (d.gpus, d.vram, d.aliases, d.set) == (("1",), 2 * GIB, ("first",), (("top_k", '"$literal"'),))
    assert (f.pin, f.ttl) == (True, None)
    assert (included.gpus, included.vram, included.aliases) == (("1",), 3 * GIB, ("by-its-own",))


def test_a_setting_is_named_by_the_file_whose_value_counts(laid: list[Path], compose: config.Compose) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "SIZE": "huge", "TOP": "1"}
    laid[1].write_text(OVER.replace("max_queue: 2", "max_queue: x"))
    (laid[0].parent / "other" / "file.yaml").write_text(OTHER.replace('["$WHERE"]', "[{}]"))
    with pytest.raises(ConfigError) as caught:
        load(laid, compose=compose, environ=environ)
    said = [str(problem).removeprefix(f"{laid[0].parent}/") for problem in caught.value.problems]
    assert [" ".join(each.split(": ")[:2]) for each in said] == [
        "over.yaml:5 x-anvil.max_queue",
        "compose.yaml:5 services.a.x-anvil.vram",
        "compose.yaml:5 services.c.x-anvil.vram",
        "other/file.yaml:3 services.d.x-anvil.aliases",
    ]


def test_what_only_compose_can_read_is_merged_as_compose_does(tmp_path: Path) -> None:
    there = "extends: {file: 'https://host/base.yaml', service: b}"
    file = write(tmp_path, f"services: {{a: {{{there}, x-anvil: {{pin: true}}}}}}")
    answer = Done(0, "services: {a: {image: x, x-anvil: {pin: true, ttl: 5}}}", "")
    (a,) = load([file], compose=lambda argv, environ: answer, environ={}).backends
    assert (a.pin, a.ttl) == (True, 5.0)


def test_a_setting_of_several_files_that_cannot_be_filled_in_is_an_error(tmp_path: Path) -> None:
    first = write(tmp_path, SERVICE % "", "one.yaml")
    second = write(tmp_path, "services: {a: {x-anvil: {model: '${A:-{}}'}}}", "two.yaml")
    answer = Done(0, SERVICE % "", "")
    with pytest.raises(
        ConfigError, match=r"two\.yaml:1: services\.a\.x-anvil\.model: .* has braces in braces"
    ):
        load([first, second], compose=lambda argv, environ: answer, environ={})


def test_files_of_processes_are_laid_over_each_other_without_compose(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "x-anvil: {runtime: process}\n"
        "services: {a: {command: x, environment: {A: 1, B: 1}, x-anvil: {ttl: 1}}}",
    )
    second = write(
        tmp_path,
        "services: {a: {environment: [B=2, CUDA_VISIBLE_DEVICES=], x-anvil: {gpus: []}}}",
        "two.yaml",
    )
    (a,) = load([first, second], compose=None, environ={}).backends
    variables = (("A", "1"), ("B", "2"), ("CUDA_VISIBLE_DEVICES", ""))
    assert (a.service.command, a.service.environment, a.ttl) == (("x",), variables, 1.0)
