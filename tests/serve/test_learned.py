"""What swaps cost is known after a restart, and nothing that happens to the file stops the program."""

import json
from types import SimpleNamespace

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.host.seam import CardRead
from anvil_mux.protocol.cards import ModelCard
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.serve.files import Known, LearnedFile, as_text, recalled
from anvil_mux.serve.watches import HostWatches
from tests.cli.demo import compose
from tests.running import seen, serving

AB = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))))
TO_B = Cost("a", "b", "stop", 0.5, 9.0, 3)
TO_A = Cost("b", "a", "stop", 1.5, 3.0, 1)


def forbidden(text):
    pytest.fail(f"nothing is wrong, but it says {text}")


HELD_BY_A = Footprint("a", "sleep", {"0": 18}, {"0": 1}, 16, 2)
SAID = CardRead("a", "d", ModelCard(4096, {"tools": True}))


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        (Known([TO_B, TO_A]), Known([TO_B, TO_A], [])),
        (Known([TO_B, Cost("a", "gone", "stop", 0.0, 1.0, 1)]), Known([TO_B], [])),
        (
            Known([TO_B], [HELD_BY_A, Footprint("b", "stop")]),
            Known([TO_B], [HELD_BY_A, Footprint("b", "stop")]),
        ),
        (Known([], [Footprint("gone", "stop", {"0": 18}, {"0": 0})]), Known([], [])),
        (Known([], [Footprint("a", "stop", {"1": 18}, {"1": 0})]), Known([], [])),
        (Known([], [Footprint("a", "stop", {"0": -1}, {"0": 0})]), Known([], [])),
        (Known([], [Footprint("a", "stop", {"0": 18}, {})]), Known([], [])),
        (Known([], [], (SAID, CardRead("gone", "d", ModelCard(4096)))), Known([], [], (SAID,))),
        (
            Known([], [], (CardRead("b", "d", ModelCard(0, {"flies": True})),)),
            Known([], [], (CardRead("b", "d", ModelCard()),)),
        ),
    ],
    ids=[
        *("costs", "of a model that is gone", "footprints", "of a backend that is gone", "on other GPUs"),
        *("negative", "without residual", "cards", "an odd card"),
    ],
)
def test_what_was_saved_and_can_be_is_read_by_the_next_start(tmp_path, saved, kept):
    assert LearnedFile(tmp_path, forbidden).read(AB) == Known()
    LearnedFile(tmp_path, forbidden).save(saved)
    assert LearnedFile(tmp_path, forbidden).read(AB) == kept


def test_hosts_are_told_what_was_learned_of_them_when_something_has_changed():
    config = Config((Backend("a", "a", ("0",), host="x"), Backend("b", "b", ("0",), host="y")))
    of_x, of_y = Cost("", "a", "stop", 0.0, 9.0, 1, "x"), Cost("", "b", "stop", 0.0, 5.0, 1, "y")
    x, y = SimpleNamespace(learned=""), SimpleNamespace(learned="")
    about = dict.fromkeys(("took", "read_ahead", "say", "fenced", "changed"), print)
    watches = HostWatches(SimpleNamespace(cluster=None, local=None), None, None, None, **about)

    def told(known, *of_hosts, under=config):
        for each in of_hosts:
            each.learned = "as before"
        watches.by_host = dict(zip("xy", of_hosts, strict=False))
        watches.remember(known, under)
        return [each.learned for each in of_hosts]

    assert told(Known([of_x]), x) == [as_text(Known([of_x], []))]
    assert told(Known([of_x]), x) == ["as before"]
    assert told(Known([of_x]), x, y) == [as_text(Known([of_x], [])), as_text(Known([], []))]
    assert told(Known([of_x, of_y]), x, y)[1] == as_text(Known([of_y], []))
    assert told(Known([of_x, of_y]), x, y) == ["as before", "as before"]
    assert told(Known([of_x, of_y]), x, y, under=Config(config.backends[:1]))[0] == as_text(Known([of_x], []))


@pytest.mark.parametrize(
    ("content", "known"),
    [
        ('{"version": 2, "costs": []}', Known([], [])),
        ('{"version": 99, "costs": "otherwise"}', Known()),
    ],
)
def test_a_file_that_lacks_a_part_is_read_and_one_of_another_version_passed_over(tmp_path, content, known):
    (tmp_path / "learned").write_text(content)
    assert LearnedFile(tmp_path, forbidden).read(AB) == known


def test_what_has_not_changed_is_not_written_again(tmp_path):
    learned = LearnedFile(tmp_path, forbidden)
    learned.save(Known([TO_B]))
    (tmp_path / "learned").unlink()
    learned.save(Known([TO_B]))
    assert not (tmp_path / "learned").exists()
    learned.save(Known([TO_B, TO_A]))
    assert (tmp_path / "learned").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 2, "costs": [{"source": "a"}]}',
        '{"version": 2, "costs": [], "cards": [{"backend": "a", "described": "d", "card": {"context": 1}}]}',
        '{"version": 2, "costs": [], "footprints": [{"backend": "a"}]}',
        '{"version": 2, "costs": [], "footprints": [{"backend": "a", "way": "sleep", "held": [7]}]}',
        '{"version": 2, "costs": [], "footprints": [{"backend": "a", "way": "sleep", "host_bytes": "7"}]}',
        "\0\xff",
    ],
)
def test_a_file_that_cannot_be_read_is_said_once_and_replaced(tmp_path, content):
    (tmp_path / "learned").write_text(content)
    said = []
    learned = LearnedFile(tmp_path, said.append)
    assert learned.read(AB) == Known()
    learned.save(Known([TO_B]))
    assert [text for text in said if "learned from scratch" in text] == said != []
    assert LearnedFile(tmp_path, forbidden).read(AB) == Known([TO_B], [])


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    said = []
    learned = LearnedFile(tmp_path / "missing", said.append)
    learned.save(Known([TO_B]))
    learned.save(Known([TO_A]))
    assert len(said) == 1


def test_a_restart_knows_what_swaps_cost_and_what_engines_said_of_their_models(tmp_path):
    file = compose(tmp_path)

    def lengths(running):
        return {each["id"]: each.get("context_length") for each in running.get("/v1/models")["data"]}

    with serving(file, "--policy", "eager", state=tmp_path) as running:
        assert lengths(running) == {"a": None, "b": None}
        assert running.chat("a")[0] == 200
        seen(lambda: lengths(running), lambda said: said["a"] == 4096)
        for model in "ba":
            assert running.chat(model)[0] == 200
        seen(lambda: lengths(running), lambda said: said == {"a": 4096, "b": 4096})
    [kept] = tmp_path.rglob("learned")
    costs = {(cost["source"], cost["target"]): cost for cost in json.loads(kept.read_text())["costs"]}
    assert costs.keys() == {("", "a"), ("a", "b"), ("b", "a")}
    assert all(cost["load_seconds"] > 0 and cost["swaps"] == 1 for cost in costs.values())
    with serving(file, state=tmp_path) as running:
        assert lengths(running) == {"a": 4096, "b": 4096}
    compose(tmp_path, "a", "b", load_seconds=0.2)
    with serving(file, state=tmp_path) as running:
        assert lengths(running) == {"a": None, "b": None}


# What hosts of the cluster keep

FAR = Backend("m.h", "m", ("0",), host="h")
WIDE = Config((*AB.backends, FAR))
ON_H = Cost("", "m", "stop", 0.0, 7.0, 2, "h")
HELD = Footprint("m.h", "sleep", {"0": 18}, {"0": 1}, 16, 2)
OF_H = CardRead("m.h", "d", ModelCard(4096))


def test_of_each_host_its_own_costs_and_footprints_are_kept_there():
    known = Known([TO_B, ON_H], [HELD, Footprint("a", "stop")], (OF_H, CardRead("a", "d", ModelCard(1))))
    assert known.of_host("h", WIDE) == Known([ON_H], [HELD], (OF_H,))


def test_what_a_host_keeps_is_known_to_a_successor_that_never_swapped_there():
    text = as_text(Known([ON_H], [HELD]))
    assert recalled({"h": text, "g": ""}, WIDE) == Known([ON_H], [HELD])


def test_a_host_tells_nothing_of_others_and_its_own_file_wins():
    foreign = recalled({"h": as_text(Known([TO_B], [Footprint("a", "stop")]))}, WIDE)
    assert (list(foreign.costs), list(foreign.footprints)) == ([], [])
    newer = Cost("", "m", "stop", 0.0, 5.0, 9, "h")
    assert Known([newer]).with_more(Known([ON_H, TO_A])) == Known([newer, TO_A], [])
    later = CardRead("b", "d", ModelCard())
    more = Known(cards=(SAID, later))
    assert Known(cards=(SAID,)).with_more(more).cards == (SAID, later)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 2, "costs": [{}]}', "\0"])
def test_what_a_host_cannot_tell_is_left_out(text):
    found = recalled({"h": text}, WIDE)
    assert (list(found.costs), list(found.footprints)) == ([], [])
