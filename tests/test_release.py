"""A release is made from what fits together, and published by its tag in steps of ``bin/release``."""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import anvil_mux
from tests.test_commit import git

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-23\n\n### Added\n\n- Something.\n\n## [1.2.2]\n"
)


STAND_IN = """#!/bin/sh
echo "${0##*/} $*" >>"$CALLS"
case "$*" in
    *"pip wheel"*) mkdir -p dist && touch dist/anvil_mux-1.2.3-py3-none-any.whl ;;
    *"-m venv"*)
        mkdir -p "$3/bin"
        for each in python anvil-mux cyclonedx-py; do cp "$0" "$3/bin/$each"; done
        ;;
    *Architecture*) echo arm64 ;;
    *RepoDigests*) echo "elsewhere/anvil-mux@$DIGEST" && echo "ghcr.io/me/anvil-mux@$DIGEST" ;;
    *"imagetools inspect"*) printf '{"digest": "%s", "manifests": [{"digest": "sha256:1"}]}' "$DIGEST" ;;
    *"release create"*) cat "$8" >>"$CALLS" ;;
    *" -u") echo "${USER_ID:-10001}" ;;
    *--version) echo "${VERSION_TOLD:-anvil-mux 1.2.3 ($(git -C "$CHECKOUT" rev-parse --short HEAD))}" ;;
esac
"""
"""Does as Python, Docker, GitHub's command and what was built."""

DIGEST = f"sha256:{hashlib.sha256().hexdigest()}"


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


def test_a_dry_run_names_each_step_and_what_publishes_and_does_neither(checkout):
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


def test_a_failed_step_is_the_last_one(checkout):
    code, printed, told = release(checkout, "1.2.3")
    assert (code, printed) == (1, "== tests: bin/test quick\ntests: quick\n")
    assert told == ["tests: bin/test quick: failed; there is no tag, and nothing was published"]
    assert git(checkout, "tag") == ""


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("v1.2.3",), ("1.2",), ("--help",)])
def test_without_a_version_it_says_how_it_is_used(checkout, words):
    code, printed, told = release(checkout, *words)
    assert (code, printed) == (2, "")
    assert told[0].startswith("Makes a release")


def test_all_that_does_not_fit_is_told_at_once(checkout):
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


def test_a_file_that_git_does_not_know_is_not_released(checkout):
    (checkout / "anvil_mux" / "new.py").write_text("")
    assert release(checkout, "--dry-run", "1.2.3")[2] == ["files are changed or not committed: git status"]


def test_an_image_that_cannot_be_tried_is_not_released(checkout):
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
    for name in ("checkout/venv/bin/python", "path/docker", "path/gh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    commit(checkout)
    path = f"{tmp_path / 'path'}:{os.environ['PATH']}"
    return {
        "PATH": path,
        "CALLS": str(tmp_path / "calls"),
        "CHECKOUT": str(checkout),
        "DIGEST": DIGEST,
    }


def test_a_release_is_tagged_when_all_was_tried(checkout, stand_ins, tmp_path):
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
def test_what_is_not_what_it_ought_to_be_gets_no_tag(checkout, stand_ins, wrong):
    code, printed, told = release(checkout, "1.2.3", **stand_ins, **wrong)
    assert (code, len(told)) == (1, 1)
    assert "publish" not in printed
    assert git(checkout, "tag") == ""


def tagged(root: Path) -> None:
    """The commit is tagged, and is what the branch main of origin has."""
    git(root, "tag", "v1.2.3")
    git(root, "update-ref", "refs/remotes/origin/main", "HEAD")


def test_what_is_tagged_has_to_fit_together(checkout):
    git(checkout, "tag", "v1.2.2")
    (checkout / "more").write_text("")
    commit(checkout)
    code, printed, told = release(checkout, "check", "v1.2.2")
    assert (code, printed) == (1, "")
    assert told == [
        "the tag v1.2.2 is not that of this commit",
        "the commit is not on the branch main of origin",
        "anvil_mux/__init__.py has another version than 1.2.2",
        "CHANGELOG.md has no entries under [1.2.2]",
    ]
    tagged(checkout)
    git(checkout, "checkout", "--quiet", "--detach")  # as the workflow has it
    assert release(checkout, "check", "v1.2.3") == (0, "", [])


@pytest.mark.parametrize("words", [("check",), ("check", "1.2.3"), ("wheel", "v1.2"), ("publish", "v1.2.3")])
def test_a_step_without_a_tag_says_how_it_is_used(checkout, words):
    code, printed, told = release(checkout, *words)
    assert (code, printed) == (2, "")
    assert told[0].startswith("Makes a release")


def test_each_step_alone_does_its_part(checkout, stand_ins, tmp_path):
    def calls_of(*words: str) -> tuple[str, list[str]]:
        (tmp_path / "calls").write_text("")
        code, printed, told = release(checkout, *words, **stand_ins)
        assert (code, told) == (0, [])
        return printed, (tmp_path / "calls").read_text().splitlines()

    tagged(checkout)
    _, called = calls_of("wheel", "v1.2.3")
    assert any(line.startswith("python -m pip wheel") for line in called)
    assert re.match(
        r"cyclonedx-py environment .*/dist/anvil-mux-wheel.cdx.json \S+/env/bin/python$", called[-1]
    )
    assert not any(line.startswith("docker") for line in called)

    _, called = calls_of("image", "v1.2.3", "--network", "host")
    assert "--tag anvil-mux:1.2.3 --network host" in "".join(called)
    assert called[-1].endswith("serve --demo --port 0")

    for words in (("push",), ("join", "amd64", "arm64")):
        step, *architectures = words
        printed, called = calls_of(step, "v1.2.3", "ghcr.io/Me/anvil-mux", *architectures)
        assert printed == f"name=ghcr.io/me/anvil-mux\ndigest={DIGEST}\n"
        there = "ghcr.io/me/anvil-mux:1.2.3"
        assert {
            "push": f"docker push --quiet {there}-arm64",
            "join": f"docker buildx imagetools create --tag {there} --tag ghcr.io/me/anvil-mux:latest "
            f"{there}-amd64 {there}-arm64",
        }[step] in called

    (checkout / "dist" / "anvil-mux-image-amd64.spdx.json").write_text("{}")
    calls_of("sums", "v1.2.3")
    sums = (checkout / "dist" / "SHA256SUMS").read_text().splitlines()
    assert f"{hashlib.sha256(b'{}').hexdigest()}  anvil-mux-image-amd64.spdx.json" in sums
    assert len(sums) == 2

    _, called = calls_of("announce", "v1.2.3")
    assert called[0].startswith("gh release create v1.2.3 --verify-tag --title anvil-mux 1.2.3 --notes-file ")
    assert called[0].count(f" {checkout}/dist/") == 3
    assert "- Something." in called


def test_an_image_without_a_digest_is_not_told_to_be_published(checkout, stand_ins):
    for words in (
        ("push", "v1.2.3", "ghcr.io/me/anvil-mux"),
        ("join", "v1.2.3", "ghcr.io/me/anvil-mux", "a"),
    ):
        code, printed, told = release(checkout, *words, **{**stand_ins, "DIGEST": "sha256:short"})
        assert (code, printed) == (1, "")
        assert "no digest of ghcr.io/me/anvil-mux: sha256:short" in told


WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github/workflows").glob("*.yml")
}
JOBS = [(name, key, job) for name, flow in WORKFLOWS.items() for key, job in flow["jobs"].items()]
STEPS = [(name, key, step) for name, key, job in JOBS for step in job.get("steps", ())]
ON = True
"""What YAML reads where a workflow says ``on``."""


def runs() -> Iterator[tuple[str, str]]:
    return ((name, step["run"]) for name, _, step in STEPS if "run" in step)


def test_the_workflows_run_what_can_be_run_by_hand():
    known = re.findall(r"^#       (\w+) ", (ROOT / "bin" / "release").read_text(), re.M)
    form = re.compile(r'bin/release (\w+) "\$TAG"( "\$REPOSITORY"( [\w ]+)?)?( >>"\$GITHUB_OUTPUT")?')
    assert [run for name, run in runs() if name == "ci"] == [".ci/run"]
    found = [form.fullmatch(run) for name, run in runs() if name == "release"]
    assert [each and each[1] for each in found] == known
    assert [each[4] for each in found if each and each[1] in ("push", "join")] == [' >>"$GITHUB_OUTPUT"'] * 2


def test_the_tests_run_for_what_is_proposed_merged_and_released():
    assert WORKFLOWS["ci"][ON] == {
        "pull_request": None,
        "push": {"branches": ["main"]},
        "workflow_call": None,
    }
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    for name in ("publish-image", "publish-wheel"):
        assert set(jobs[name]["needs"]) == {"tests", "wheel", "image"}


def test_a_tag_that_bin_release_makes_is_released_for_each_architecture():
    flow = WORKFLOWS["release"]
    assert flow[ON] == {"push": {"tags": ["v*"]}}
    assert flow["env"]["TAG"] == "${{ github.ref_name }}"
    made = [each["architecture"] for each in flow["jobs"]["image"]["strategy"]["matrix"]["include"]]
    [joined] = [run for _, run in runs() if run.startswith("bin/release join")]
    assert joined.partition('"$REPOSITORY" ')[2].split()[:-1] == made


def test_no_job_may_do_more_than_it_has_to():
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    attests = {"id-token": "write", "attestations": "write"}
    pushes = {"contents": "read", "packages": "write", **attests}
    assert {key: job["permissions"] for _, key, job in JOBS if "permissions" in job} == {
        "wheel": {"contents": "read", **attests},
        "image": pushes,
        "publish-image": pushes,
        "publish-wheel": {"id-token": "write"},
        "announce": {"contents": "write"},
    }
    texts = "".join(file.read_text() for file in (ROOT / ".github/workflows").glob("*.yml"))
    assert set(re.findall(r"secrets\.\w+", texts)) == {"secrets.GITHUB_TOKEN"}
    for _, _, step in STEPS:
        if "uses" in step:
            assert re.fullmatch(r"[\w/-]+@(v\d+|release/v1)", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_the_version_is_one():
    first = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first
    assert first[1] in ("Unreleased", anvil_mux.__version__)
    assert "\nversion = attr: anvil_mux.__version__\n" in (ROOT / "setup.cfg").read_text()
