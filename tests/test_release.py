"""A release is made from what fits together, and stops before it is published."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_commit import git

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-23\n\n### Added\n\n- Something.\n\n## [1.2.2]\n"
)


STAND_IN = """#!/bin/sh
echo "${0##*/} $*" >>"$CALLS"
case "$*" in
    *"pip wheel"*) mkdir -p dist && touch dist/anvil_mux-1.2.3-py3-none-any.whl ;;
    *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/anvil-mux" ;;
    *" -u") echo "${USER_ID:-10001}" ;;
    *--version) echo "${VERSION_TOLD:-anvil-mux 1.2.3 ($(git -C "$CHECKOUT" rev-parse --short HEAD))}" ;;
esac
"""
"""Does as Python, Docker and what was built."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a project of that version, in which the tests fail."""
    root = tmp_path / "checkout"
    files = {
        "anvil_mux/__init__.py": '"""A package."""\n\n__version__ = "1.2.3"\n',
        "CHANGELOG.md": CHANGELOG,
        "bin/test": "#!/bin/sh\necho tests: $*\nexit 1\n",
        "tests/real/docker-engine": "#!/bin/sh\nexit 0\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    for name in ("bin/release", "bin/environment.sh"):
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", "--initial-branch", "main")
    commit(root)
    return root


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "something")


def release(root: Path, *words: str, **environ: str) -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and the problems that were told."""
    # No tag of a test is signed by whoever runs it.
    somebody = {"GIT_COMMITTER_NAME": "somebody", "GIT_COMMITTER_EMAIL": "somebody@example.org"}
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, **somebody, **environ}
    done = subprocess.run(
        [root / "bin" / "release", *words], env=env, cwd="/", capture_output=True, text=True
    )
    return (
        done.returncode,
        done.stdout,
        [line.removeprefix("anvil-mux: ") for line in done.stderr.splitlines()],
    )


def test_a_dry_run_names_each_step_and_what_publishes_and_does_neither(checkout: Path) -> None:
    code, printed, told = release(checkout, "--dry-run", "1.2.3")
    assert (code, told) == (0, [])
    steps = [line.removeprefix("== ") for line in printed.splitlines() if line.startswith("== ")]
    assert steps == [
        "tests: bin/test quick",
        "wheel",
        "wheel, tried",
        "image anvil-mux:1.2.3",
        "image, tried",
        "tag v1.2.3",
    ]
    assert "    git push origin main v1.2.3\n" in printed
    assert git(checkout, "tag") == ""
    assert git(checkout, "status", "--porcelain") == ""


def test_a_failed_step_is_the_last_one(checkout: Path) -> None:
    code, printed, told = release(checkout, "1.2.3")
    assert (code, printed) == (1, "== tests: bin/test quick\ntests: quick\n")
    assert told == ["tests: bin/test quick: failed; there is no tag, and nothing was published"]
    assert git(checkout, "tag") == ""


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("v1.2.3",), ("1.2",), ("--help",)])
def test_without_a_version_it_says_how_it_is_used(checkout: Path, words: tuple[str, ...]) -> None:
    code, printed, told = release(checkout, *words)
    assert (code, printed) == (2, "")
    assert told[0].startswith("Makes a release up to the step before it is published")


def test_all_that_does_not_fit_is_told_at_once(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.2")
    git(checkout, "checkout", "--quiet", "-b", "other")
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- More.\n"))
    code, printed, told = release(checkout, "--dry-run", "1.2.2")
    assert (code, printed) == (1, "")
    assert told == [
        "files are changed or not committed: git status",
        "the branch is not main",
        "the tag v1.2.2 is there already",
        "anvil_mux/__init__.py has another version than 1.2.2",
        "CHANGELOG.md has no entries under [1.2.2]",
        "CHANGELOG.md has entries under [Unreleased], which would be left out",
    ]


def test_a_file_that_git_does_not_know_is_not_released(checkout: Path) -> None:
    (checkout / "anvil_mux" / "new.py").write_text("")
    assert release(checkout, "--dry-run", "1.2.3")[2] == ["files are changed or not committed: git status"]


def test_an_image_that_cannot_be_tried_is_not_released(checkout: Path) -> None:
    (checkout / "tests" / "real" / "docker-engine").write_text("#!/bin/sh\nexit 1\n")
    commit(checkout)
    code, printed, told = release(checkout, "1.2.3")
    assert (code, printed, told) == (1, "", ["no Docker Engine answers, on which the image is tried"])


@pytest.fixture
def stand_ins(checkout: Path, tmp_path: Path) -> dict[str, str]:
    """The environment in which all that a release calls succeeds, and writes down how it was called."""
    (checkout / "bin" / "test").write_text(STAND_IN)
    (checkout / "bin" / "environment.sh").write_text(
        "root=$CHECKOUT\nvenv=${0%/bin/*}/venv\nenvironment() { :; }\n"
        'say() { echo "anvil-mux: $*" >&2; }\ndie() { say "$@"; exit 1; }\n'
    )
    for name in ("checkout/venv/bin/python", "path/docker"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    commit(checkout)
    path = f"{tmp_path / 'path'}:{os.environ['PATH']}"
    return {"PATH": path, "CALLS": str(tmp_path / "calls"), "CHECKOUT": str(checkout)}


def test_a_release_is_tagged_when_all_was_tried(
    checkout: Path, stand_ins: dict[str, str], tmp_path: Path
) -> None:
    code, _, told = release(checkout, "1.2.3", "--network", "host", **stand_ins)
    assert (code, told) == (0, [])
    assert git(checkout, "tag", "--points-at", "HEAD") == "v1.2.3"
    called = (tmp_path / "calls").read_text().splitlines()
    short = git(checkout, "rev-parse", "--short", "HEAD")
    assert called[0] == "test quick"
    assert f"docker build --quiet --build-arg COMMIT={short} --tag anvil-mux:1.2.3 --network host" in "".join(
        called
    )
    demos = [line for line in called if line.endswith("serve --demo --port 0")]
    assert [re.sub(r"^python \S+/try_demo.py (\S+/)?", "", line).split()[0] for line in demos] == [
        "anvil-mux",
        "docker",
    ]
    assert not [line for line in called if "push" in line or "upload" in line]


@pytest.mark.parametrize("wrong", [{"VERSION_TOLD": "anvil-mux 1.2.2 (abc1234)"}, {"USER_ID": "0"}])
def test_what_is_not_what_it_ought_to_be_gets_no_tag(
    checkout: Path, stand_ins: dict[str, str], wrong: dict[str, str]
) -> None:
    code, printed, told = release(checkout, "1.2.3", **stand_ins, **wrong)
    assert (code, len(told)) == (1, 1)
    assert "publish" not in printed
    assert git(checkout, "tag") == ""
