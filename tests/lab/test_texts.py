"""Prompts have the recorded lengths, and share what the trace says they share."""

from anvil_mux.lab.player import PromptWriter
from anvil_mux.lab.workload import Prompt

ASKED = Prompt(0.0, 100, 1, model="m")


def words(text: str) -> list[str]:
    return text.split()


def test_a_prompt_has_as_many_words_as_its_tokens_are():
    assert len(words(PromptWriter("s", 16, {}).write(ASKED, 0))) == 100
    assert len(words(PromptWriter("s", 16, {"m": 2.5}).write(ASKED, 0))) == 40
    assert len(PromptWriter("s", 16, {}).write(ASKED, 0)) == 4 * 100


def test_two_prompts_share_nothing_without_blocks():
    writer = PromptWriter("s", 16, {})
    assert writer.write(ASKED, 0) == writer.write(ASKED, 0)
    assert words(writer.write(ASKED, 0))[:20] != words(writer.write(ASKED, 1))[:20]
    assert writer.write(ASKED, 0) != PromptWriter("other", 16, {}).write(ASKED, 0)


def test_equal_blocks_are_equal_text_and_no_more():
    writer = PromptWriter("s", 16, {"m": 1.5})
    grown = [
        words(writer.write(ASKED._replace(blocks=blocks), number))
        for number, blocks in enumerate([(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9)])
    ]
    assert [len(each) for each in grown] == [67, 67, 67]
    assert grown[0][:32] == grown[1][:32]
    assert grown[0][:21] == grown[2][:21]
    assert grown[0][21:32] != grown[2][21:32]
    assert grown[0][32:] != grown[1][32:]
