"""What swaps take between real llama-server containers, measured by the command."""

import csv
import json

from anvil_mux.cli.main import main


def test_swaps_of_containers_are_measured_and_none_is_left_running(
    llamacpp_compose, tmp_path, monkeypatch, capsys
):
    stack = llamacpp_compose(tmp_path, models=2)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", stack.engine.host)
    table = tmp_path / "swaps.csv"
    with stack.watched() as seen:
        words = ["bench", "swap", "--json", str(stack.file), "--repeat", "2", "--csv", str(table)]
        assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    found = [(row["backend"], row["replaces"], row["way"], row["swaps"]) for row in rows]
    assert found == [("model-1", "model-2", "stop", 2), ("model-2", "model-1", "stop", 2)]
    for row in rows:
        assert row["phases"].pop("drain") == 0, "nobody was served: the eviction begins with the swap"
        assert min(row["total_seconds"], row["by_hand_seconds"], *row["phases"].values()) > 0
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 4
    assert seen.most == 1, seen.crowded
    assert stack.up() == set()
