"""What shells are told knows every command and its options."""

import os
import shutil
import subprocess

import pytest

from anvil_mux.cli import main as cli
from tests.cli.demo import mux  # noqa: F401 (a fixture)

GUARD = 60.0


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(text: str, *words: str, path: str = os.environ["PATH"]) -> list[str]:
    """What bash offers for the last of ``words``."""
    given = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _anvil_mux; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f"{text}\n{ask}"], capture_output=True, text=True, timeout=GUARD, env={"PATH": path}
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_and_options(capsys):
    text = script("bash", capsys)
    assert set(complete(text, "anvil-mux", "")) == set(cli.COMMANDS)
    assert complete(text, "anvil-mux", "ev") == ["events"]
    assert complete(text, "anvil-mux", "serve", "--event") == ["--event-log", "--event-log-size"]
    assert complete(text, "anvil-mux", "serve", "comp") == []  # the shell offers files


def test_bash_completes_the_models_of_a_running_anvil_mux(
    mux,  # noqa: F811
    tmp_path,
    capsys,
):
    assert cli.main(["completion", "--models", "--url", f"http://127.0.0.1:{mux.port}"]) == 0
    assert capsys.readouterr().out == "a\nb\n"
    program = tmp_path / "anvil-mux"
    program.write_text("#!/bin/sh\necho a; echo b\n")
    program.chmod(0o755)
    text = script("bash", capsys)
    assert complete(text, "anvil-mux", "why", "", path=f"{tmp_path}:{os.environ['PATH']}") == ["a", "b"]
    assert complete(text, "anvil-mux", "why", "--j") == ["--json"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_they_can_read(shell, capsys):
    text = script(shell, capsys)
    assert all(command in text for command in cli.COMMANDS)
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, timeout=GUARD)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_shell_must_be_named(capsys):
    with pytest.raises(SystemExit):
        cli.main(["completion"])
    assert "say for which shell: bash, zsh, fish" in capsys.readouterr().err
