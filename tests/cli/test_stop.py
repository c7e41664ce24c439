"""`anvil-mux stop`: the engines that an anvil-mux has left running are seen and ended."""

import json
from pathlib import Path

import pytest

from anvil_mux.cli.main import main
from tests.cli.demo import PROJECT, compose, engine_pid, is_alive, state
from tests.running import serving

__all__ = ["state"]


@pytest.fixture
def left(state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compose file of which nobody serves the models any more, and a's engine runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.chdir(state)
    file = compose(state)
    with serving(file, state=state, on_exit="keep") as running:
        assert running.chat("a")[0] == 200
    assert f"`anvil-mux stop --file {file}` ends engines that are kept running" in "\n".join(running.output)
    assert is_alive(engine_pid(state, "a"))
    return file


def test_what_was_left_is_shown_and_ended_by_its_file(left, tmp_path, capsys):
    line = f"left by {PROJECT}: a still runs, and may hold a GPU; `anvil-mux stop --all` ends it\n"
    assert main(["ps", "--url", "127.0.0.1:1"]) == 3
    assert line in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    assert main(["check", str(compose(other, "c", project="other"))]) == 0
    assert f"warning: {line}" in capsys.readouterr().err
    engine = engine_pid(tmp_path, "a")
    assert main(["stop", "--file", str(left)]) == 0
    assert capsys.readouterr().err == f"anvil-mux: {PROJECT}: stopped a\n"
    assert not is_alive(engine)
    assert main(["stop", "--file", str(left)]) == 0
    assert capsys.readouterr().err == "anvil-mux: no engine was left running\n"


def test_all_that_was_left_is_ended_whatever_became_of_its_files(left, tmp_path, capsys):
    engine = engine_pid(tmp_path, "a")
    left.unlink()
    assert main(["stop", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": {PROJECT: ["a"]}}
    assert not is_alive(engine)


def test_an_anvil_mux_that_runs_unloads_its_models_and_its_engines_are_not_left(state, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    file = compose(state)
    with serving(file, state=state) as running:
        assert running.chat("a")[0] == 200
        engine = engine_pid(state, "a")
        assert main(["stop", "--all"]) == 0
        assert "no engine was left running" in capsys.readouterr().err
        assert is_alive(engine)
        assert main(["stop", "--file", str(file)]) == 0
        assert "a: evicted once its requests have ended" in capsys.readouterr().err
        running.tells(r"a: stopped")
    assert not is_alive(engine)


def test_containers_that_cannot_be_asked_for_are_no_engines_that_do_not_run(
    left, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    contained = tmp_path / "anvil-mux" / "contained"
    contained.mkdir()
    (contained / "services").write_text("b")
    engine = engine_pid(tmp_path, "a")
    assert main(["stop", "--all"]) == 1
    seen = capsys.readouterr().err
    assert f"{PROJECT}: stopped a\n" in seen
    assert "contained: Cannot connect to the Docker daemon" in seen
    assert not is_alive(engine)
