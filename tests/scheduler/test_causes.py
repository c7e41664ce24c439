import ast
import json
from pathlib import Path
from string import Formatter

import pytest

from anvil_mux.scheduler import events, policies
from anvil_mux.scheduler.events import KINDS, SENTENCES, Cause, Severance, ending, parse, sentence, to_json

FULL = {
    "model": "coder",
    "backend": "coder-2",
    "residents": ("a", "b"),
    "way": "sleep",
    "seconds": 4.0,
    "waiting": 3,
    "expected": 4.5,
    "required": 2.25,
    "host": "h",
    "detail": "exited with code 1",
}


def figures(kind):
    """What the sentence of a kind is made of."""
    return {name: FULL[name] for _, name, _, _ in Formatter().parse(SENTENCES[kind]) if name}


def words(nodes):
    """The texts that stand in these expressions."""
    found = [each for node in nodes for each in ast.walk(node)]
    return {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def written(tree):
    """The kinds of the causes that a module makes, and those that it compares a kind with."""
    made, compared = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Cause":
            made |= words(node.args[:1])
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
            compared |= words(node.comparators) if node.left.attr == "kind" else set()
    return made, compared


def test_every_kind_that_the_program_speaks_of_has_a_sentence():
    root = Path(events.__file__).parent.parent
    texts = [path.read_text() for path in root.rglob("*.py")]
    found = [written(ast.parse(text)) for text in texts if "Cause(" in text or ".kind" in text]
    made = set().union(*[made for made, _ in found])
    assert len(made) > 50
    assert made <= set(SENTENCES)
    groups = events.BY_HAND, events.DEATHS, events.FOUND, events.CLEARING, events.PRELOADS, events.RESENT
    assert set().union(*groups) <= set(SENTENCES)
    assert set().union(*[compared for _, compared in found]) <= {*SENTENCES, *KINDS}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_sentence_is_whole_and_shows_every_figure_that_the_kind_has(kind):
    text = sentence(Cause(kind, **figures(kind)))
    assert text
    assert "{" not in text
    shown = {"a and b" if name == "residents" else str(value) for name, value in figures(kind).items()}
    assert all(each.removesuffix(".0").removesuffix(".25") in text for each in shown)


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_cause_is_the_same_after_its_way_through_json(kind):
    for cause in (Cause(kind), Cause(kind, **figures(kind))):
        assert parse(json.loads(json.dumps(to_json(cause)))) == cause


def test_json_holds_no_empty_figure():
    assert to_json(Cause("overdue")) == {"kind": "overdue"}
    told = {"kind": "slice", "residents": ("a",)}
    assert to_json(Cause("slice", residents=("a",))) == told


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"kind": "astrology"},
        {"kind": ["overdue"]},
        {"kind": "overdue", "mood": 1},
        {"kind": "idle", "seconds": "long"},
        {"kind": "slice", "residents": 3},
        "overdue",
        None,
    ],
)
def test_what_is_no_cause_is_refused(told):
    with pytest.raises((TypeError, ValueError)):
        parse(told)


@pytest.mark.parametrize("value", [None, "my reason", ("overdue",), Cause("astrology")])
def test_a_policy_that_gives_anything_else_is_found_out(value):
    assert not policies.is_decided(value)
    assert policies.is_decided(Cause("policy_text", detail="mine"))


def test_no_cause_has_no_words():
    assert sentence(None) == ""


def test_how_a_backend_ended_goes_on_from_its_name():
    assert ending(Cause("died", detail="exited with code 1")) == "exited with code 1"
    early = Cause("died_early", seconds=2.04, detail="exited with code 1")
    soon = "exited with code 1 2.0 s after it was loaded, before it had completed an answer"
    assert (ending(early), sentence(early)) == (soon, f"died: {soon}")


@pytest.mark.parametrize(
    ("severance", "text"),
    [
        (
            Severance(Cause("evicted", "b"), 5.0),
            "a was evicted for b before this request ended, after a drain of 5.0 s",
        ),
        (Severance(Cause("unloaded")), "a was unloaded on request before this request ended"),
        (Severance(Cause("changed")), "the configuration of a changed before this request ended"),
        (Severance(Cause("removed")), "a was removed from the configuration before this request ended"),
        (Severance(Cause("idle")), "a was evicted because nobody used it before this request ended"),
        (Severance(Cause("policy")), "the policy unloaded a before this request ended"),
        (Severance(Cause("silent")), "the engine of a did not answer before this request ended"),
        (Severance(Cause("shutdown")), "anvil-mux shut down before this request ended"),
        (
            Severance(Cause("moved", backend="r1")),
            "another replica of a became free before this request ended",
        ),
        (
            Severance(Cause("stale", backend="r1")),
            "the engine of a did not answer before this request ended",
        ),
    ],
)
def test_a_severed_client_is_told_what_ended_its_request(severance, text):
    assert severance.sentence("a") == text
