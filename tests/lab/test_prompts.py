"""Recorded prompts: reading them, drawing from them, and the traces that are shipped."""

import json
import lzma
import re
from pathlib import Path

import pytest

from anvil_mux.lab.workload import SHIPPED_AS, SHIPPED_TRACES, BadWorkload, Prompt, find_trace, read_trace

HEADER = {"trace": "small", "block_tokens": 10, "seconds": 100}
README = (SHIPPED_TRACES / "README.md").read_text()
FILES = sorted(SHIPPED_TRACES.glob(SHIPPED_AS))


def written(tmp_path: Path, *lines: object, header: object = HEADER) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    return file


def test_a_request_is_its_moment_its_lengths_and_its_blocks(tmp_path):
    trace = read_trace(written(tmp_path, {"at": 1.5, "in": 45, "out": 7, "blocks": "1-3,9"}))
    assert (trace.name, trace.block_tokens, trace.seconds) == ("small", 10, 100.0)
    assert trace.draw(0) == [Prompt(1.5, 45, 7, (1, 2, 3, 9))]


def test_sessions_begin_at_drawn_moments_and_keep_their_pauses(tmp_path):
    turns = [{"session": 1, "at": at, "in": 5, "out": 1} for at in (0, 30)]
    trace = read_trace(written(tmp_path, *turns))
    begins = set()
    for seed in range(20):
        drawn = trace.draw(seed)
        begins.add(drawn[0].at)
        assert 0 <= drawn[0].at < 100
        pauses = [prompt.at - drawn[0].at for prompt in drawn]
        assert pauses == pytest.approx([0, 30] if drawn[0].at < 70 else [0])
    assert len(begins) == 20


def test_the_same_seed_draws_the_same_and_another_one_does_not():
    trace = read_trace(find_trace("claude_code_le64k"))
    assert trace.draw(3, 40) == trace.draw(3, 40)
    assert trace.draw(3, 40) != trace.draw(4, 40)
    assert len({prompt.session for prompt in trace.draw(3, 40)}) == 40


def test_no_more_sessions_are_drawn_than_there_are():
    with pytest.raises(BadWorkload, match="claude_code_le64k has 92 sessions, not 93"):
        read_trace(find_trace("claude_code_le64k")).draw(0, 93)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ([], "must be one JSON object"),
        ({"in": 5, "out": 1}, "at must be seconds, a number of at least 0, not null"),
        ({"at": -1, "in": 5, "out": 1}, "at must be seconds, a number of at least 0, not -1"),
        ({"at": 0, "in": 0, "out": 1}, "in: must be a whole number of at least 1, not 0"),
        ({"at": 0, "in": 5, "out": 1.5}, "out: must be a whole number of at least 1, not 1.5"),
        ({"at": 0, "in": 5, "out": 1, "blocks": "x"}, 'blocks: must be ranges like "1-12,40", not "x"'),
        ({"at": 0, "in": 15, "out": 1, "blocks": "1-2"}, "2 blocks of 10 tokens are more than 15 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    file = written(tmp_path, {"at": 0, "in": 5, "out": 1}, line)
    with pytest.raises(BadWorkload, match=re.escape(f"{file}:3: ") + ".*" + re.escape(problem)):
        read_trace(file)


def test_a_file_without_header_or_without_requests_is_no_trace(tmp_path):
    with pytest.raises(BadWorkload, match=":1: must be the header"):
        read_trace(written(tmp_path, header={"at": 0}))
    with pytest.raises(BadWorkload, match="holds no request"):
        read_trace(written(tmp_path))
    with pytest.raises(BadWorkload, match="shipped traces: claude_code_le131k, claude_code_le64k, mooncake"):
        find_trace("nothing")


def test_the_shipped_traces_are_what_they_are_called():
    small, large, chat = (
        read_trace(find_trace(name))
        for name in ("claude_code_le64k", "claude_code_le131k", "mooncake_conversation_600s")
    )
    assert (len(small.sessions), len(large.sessions), len(chat.sessions)) == (92, 313, 0)
    assert max(prompt.tokens for session in small.sessions for prompt in session) <= 65_536
    assert max(prompt.tokens for session in large.sessions for prompt in session) <= 131_072
    assert len(chat.alone) == 1750


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_a_file_is_small_and_says_where_it_comes_from_and_under_which_licence(file):
    header = json.loads(lzma.decompress(file.read_bytes()).partition(b"\n")[0])
    assert file.stat().st_size < 100_000
    assert file == find_trace(header["trace"])
    assert header["licence"] == "Apache-2.0"
    assert re.search(r"https://github\.com/\S+, commit [0-9a-f]{7}", header["source"])
    assert f"`{header['trace']}`" in README
