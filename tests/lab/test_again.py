"""An event log that a running anvil-mux has written is played against the same one."""

from collections import Counter
from pathlib import Path

from anvil_mux.cli.main import main
from tests.cli.demo import compose
from tests.lab.again import REQUESTS, SESSION, check, recorded, sent
from tests.running import serving

PACE = 40


def test_the_clients_of_a_log_come_again(tmp_path, capsys):
    workload, log = tmp_path / "w.jsonl", tmp_path / "events.jsonl"
    workload.write_text(SESSION)
    file = compose(tmp_path, tokens_per_second=PACE)
    with serving(file, "--event-log", str(log), state=tmp_path) as mux:
        words = ["--url", f"http://127.0.0.1:{mux.port}", "--tokens-per-second", str(PACE), "--warm-up", "0"]

        def play(name: str, *traffic: str) -> Path:
            table = tmp_path / name
            assert main(["replay", *traffic, *words, "--csv", str(table)]) == 0
            return table

        first = sent(play("first.csv", "--trace", str(workload)))
        day = recorded(mux, log, REQUESTS)
        # What the first run wrote; the second one is written behind it.
        again = sent(play("again.csv", "--log", str(log)))
        both = recorded(mux, log, 2 * REQUESTS)
    assert [int(row["tokens"]) for row in first] == [10, 20, 4, 12, 8]
    check(first, day, again, PACE)
    # The stand-in makes no token before its time, so what is played again is as long as it was, or longer.
    assert all(int(row["tokens"]) >= int(before["tokens"]) for row, before in zip(again, first, strict=True))
    assert Counter(each.model for each in both.requests) == {"a": 4, "b": 6}
    assert "events.jsonl" in capsys.readouterr().out
