"""The compose files that Compose is given: those in force, whatever is on disk by now."""

import stat
from dataclasses import replace

import pytest

from anvil_mux.errors import BackendError
from anvil_mux.host.compose_files import ComposeFiles, original_files
from anvil_mux.host.seam import HostConfig

CONFIG = HostConfig((), project="p", files=("/s/compose.yaml", "/t/more.yaml"))
RESOLVED = replace(CONFIG, resolved_compose="one", compose_variables={"TOKEN": "x"})


def test_a_command_names_the_project_and_its_files(tmp_path):
    words = ["-f", "/s/compose.yaml", "-f", "/t/more.yaml", "-p", "p", "--profile", "*", "config"]
    files = ComposeFiles(CONFIG, tmp_path)
    assert files.command("config") == ["docker", "compose", "--ansi", "never", *words]
    assert [*tmp_path.iterdir()] == []


def test_a_command_is_given_the_files_as_they_were_read(tmp_path):
    folder = tmp_path / "state"
    files = ComposeFiles(replace(RESOLVED, generated_compose="two"), folder)
    resolved, generated = folder / "resolved.yaml", folder / "compose.yaml"
    named = ["-f", str(resolved), "-f", str(generated)]
    place = ["--project-directory", "/s", "--env-file", "/dev/null", "-p", "p", "--profile", "*"]
    assert files.command("create", "a") == [
        *("docker", "compose", "--ansi", "never"),
        *(*named, *place, "create", "a"),
    ]
    assert (resolved.read_text(), generated.read_text()) == ("one", "two")
    assert [stat.S_IMODE(file.stat().st_mode) for file in (folder, resolved)] == [0o700, 0o600]
    assert files.variables == {"TOKEN": "x"}


def test_the_files_change_with_the_configuration_alone(tmp_path):
    files, file = ComposeFiles(RESOLVED, tmp_path), tmp_path / "resolved.yaml"
    files.command("create")
    before = file.stat().st_ino
    files.command("create")
    assert file.stat().st_ino == before, "not written again, so that a full disk is no hindrance"
    files.reconfigure(replace(RESOLVED, resolved_compose="two", compose_variables={}))
    assert (file.read_text(), files.variables) == ("one", {})
    for damage in (lambda: None, file.unlink, lambda: file.write_text("x")):
        damage()
        files.command("create")
        assert file.read_text() == "two"


def test_files_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "state").write_text("in the way")
    files = ComposeFiles(RESOLVED, tmp_path / "state" / "p")
    with pytest.raises(BackendError, match=r"p/resolved.yaml cannot be written: Not a directory"):
        files.command("create")


@pytest.mark.parametrize(
    ("name", "text", "originals"),
    [
        ("resolved.yaml", '{"x-files": ["/s/compose.yaml", 1], "services": {}}', ("/s/compose.yaml",)),
        ("resolved.yaml", "services: {}", ()),
        ("resolved.yaml", '{"x-files": 1}', ()),
        ("compose.yaml", '{"x-files": ["/s/compose.yaml"]}', ()),
        ("resolved.yaml", None, None),
    ],
)
def test_the_files_of_which_a_file_has_the_content_are_known(tmp_path, name, text, originals):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert original_files(str(tmp_path / name)) == originals
