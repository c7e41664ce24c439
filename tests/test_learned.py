"""What swaps cost is known after a restart, and nothing that happens to the file stops the program."""

import json

import pytest

from anvil_mux.config import Backend, Config
from anvil_mux.costs import Cost
from anvil_mux.learned import Learned
from tests.running import serving
from tests.test_cli import compose

AB = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))))
TO_B = Cost("a", "b", "stop", 0.5, 9.0, 3)
TO_A = Cost("b", "a", "stop", 1.5, 3.0, 1)


def forbidden(text):
    pytest.fail(f"nothing is wrong, but it says {text}")


def test_what_was_saved_is_read_by_the_next_start(tmp_path):
    Learned(tmp_path, forbidden).save([TO_B, TO_A])
    assert Learned(tmp_path, forbidden).read(AB) == [TO_B, TO_A]


def test_nothing_is_known_before_the_first_swap(tmp_path):
    assert list(Learned(tmp_path, forbidden).read(AB)) == []


def test_models_that_are_served_no_longer_are_forgotten(tmp_path):
    Learned(tmp_path, forbidden).save([TO_B, Cost("a", "gone", "stop", 0.0, 1.0, 1)])
    assert Learned(tmp_path, forbidden).read(AB) == [TO_B]


def test_what_has_not_changed_is_not_written_again(tmp_path):
    learned = Learned(tmp_path, forbidden)
    learned.save([TO_B])
    (tmp_path / "learned").unlink()
    learned.save([TO_B])
    assert not (tmp_path / "learned").exists()
    learned.save([TO_B, TO_A])
    assert (tmp_path / "learned").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 1}', '{"version": 1, "costs": [{"source": "a"}]}', "\0\xff"],
)
def test_a_file_that_cannot_be_read_is_said_once_and_replaced(tmp_path, content):
    (tmp_path / "learned").write_text(content)
    said = []
    learned = Learned(tmp_path, said.append)
    assert list(learned.read(AB)) == []
    learned.save([TO_B])
    assert [text for text in said if "learned anew" in text] == said != []
    assert Learned(tmp_path, forbidden).read(AB) == [TO_B]


def test_a_file_of_another_version_is_passed_over(tmp_path):
    (tmp_path / "learned").write_text('{"version": 99, "costs": "otherwise"}')
    assert list(Learned(tmp_path, forbidden).read(AB)) == []


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    said = []
    learned = Learned(tmp_path / "missing", said.append)
    learned.save([TO_B])
    learned.save([TO_A])
    assert len(said) == 1


def test_a_running_program_keeps_what_its_swaps_cost(tmp_path):
    with serving(compose(tmp_path), "--policy", "eager", state=tmp_path) as running:
        for model in "aba":
            assert running.chat(model)[0] == 200
    [kept] = tmp_path.rglob("learned")
    costs = {(cost["source"], cost["target"]): cost for cost in json.loads(kept.read_text())["costs"]}
    assert costs.keys() == {("", "a"), ("a", "b"), ("b", "a")}
    assert all(cost["load_seconds"] > 0 and cost["swaps"] == 1 for cost in costs.values())
