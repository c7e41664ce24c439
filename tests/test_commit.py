"""The commit that a build or a checkout tells of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anvil_mux import WRITTEN, commit

ROOT = Path(__file__).resolve().parent.parent


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout with one commit and a tag."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("one\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")
    return package


def test_a_checkout_tells_its_commit_and_whether_files_were_changed(package):
    short = git(package, "rev-parse", "--short", "HEAD")
    assert commit(package) == short
    (package / "module.py").write_text("two\n")
    assert commit(package) == f"{short}-dirty"


def test_what_a_build_has_written_comes_first(package):
    (package / WRITTEN).write_text("abc1234\n")
    assert commit(package) == "abc1234"


def test_the_repository_that_a_package_lies_deep_in_is_not_asked(package):
    installed = package / "lib" / "package"
    installed.mkdir(parents=True)
    assert commit(installed) == ""


def test_without_git_it_is_not_known(package, monkeypatch):
    monkeypatch.setenv("PATH", str(package))
    assert commit(package) == ""


def test_a_source_archive_notes_its_commit_and_hands_it_to_its_wheel(tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(ROOT), str(clone))
    # As it is here, so that what is tried is not the last commit's.
    for name in ("setup.py", "setup.cfg", "anvil_mux/__init__.py"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    env = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats", "gztar", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=clone, env=env, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(unpacked)], check=True)
    (source,) = unpacked.iterdir()
    known = (source / "anvil_mux" / WRITTEN).read_text().strip()
    assert known.startswith(git(clone, "rev-parse", "--short", "HEAD"))
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True)
    assert (tmp_path / "built" / "anvil_mux" / WRITTEN).read_text().strip() == known
    assert (tmp_path / "built" / "anvil_mux" / "demo.yaml").is_file()
