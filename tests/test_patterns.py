"""Every regular expression that reads what others wrote takes steps in proportion to what it reads.

The steps are counted, not timed: ``Matcher`` interprets a pattern as ``re`` does, by trying and going back,
and counts each try. What it is shown is drawn from the pattern itself: something that fits, a part of it many
times over, and an end that does not fit.
"""

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

import anvil_mux

try:
    from re import _constants as sre
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_constants as sre
    import sre_parse as parser

LENGTHS = (120, 240)
STEPS_PER_CHARACTER = 40
DRAWN = 60
OF_OUR_OWN = {"anvil_mux.proxy.page"}
"""Modules whose patterns read files of ours alone."""
SEARCHES = {"search", "findall", "finditer", "sub", "subn", "split"}
Continue = Callable[[int], bool]


class TooManySteps(Exception):
    """A match that takes more steps than it may."""


class Matcher:
    """One pattern at one text, with the steps that it takes."""

    def __init__(self, pattern: str | bytes, flags: int, text: str, most: int) -> None:
        self.tree = parser.parse(pattern, flags & ~re.UNICODE if isinstance(pattern, bytes) else flags)
        self.flags = flags
        self.text = text
        self.most = most
        self.steps = 0

    def search(self) -> bool:
        """Whether it matches anywhere, from each place on, as ``findall`` does after a match too."""
        start, found = 0, False
        while start <= len(self.text):
            ends: list[int] = []
            self._sequence(list(self.tree), 0, start, partial(_note, ends))
            found = found or bool(ends)
            start = max([start + 1, *ends])
        return found

    def fullmatch(self) -> bool:
        return self._sequence(list(self.tree), 0, 0, lambda end: end == len(self.text))

    def match(self) -> bool:
        return self._sequence(list(self.tree), 0, 0, lambda end: True)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self.most:
            raise TooManySteps

    def _sequence(self, nodes: list[Any], index: int, at: int, go_on: Continue) -> bool:
        if index == len(nodes):
            return go_on(at)
        op, value = nodes[index]

        def rest(place: int) -> bool:
            return self._sequence(nodes, index + 1, place, go_on)

        self._step()
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return self._is_one(op, value, at) and rest(at + 1)
        if op is sre.AT:
            return self._is_at(value, at) and rest(at)
        if op is sre.SUBPATTERN:
            return self._sequence(list(value[-1]), 0, at, rest)
        if op is sre.BRANCH:
            return any(self._sequence(list(branch), 0, at, rest) for branch in value[1])
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            return self._looks(value, at) == (op is sre.ASSERT) and rest(at)
        assert op in (sre.MAX_REPEAT, sre.MIN_REPEAT), op
        return self._repeat(value, at, rest, lazy=op is sre.MIN_REPEAT)

    def _looks(self, value: Any, at: int) -> bool:
        direction, nodes = value
        if direction > 0:
            return self._sequence(list(nodes), 0, at, lambda end: True)
        width = nodes.getwidth()[1]
        return at >= width and self._sequence(list(nodes), 0, at - width, lambda end: end == at)

    def _repeat(self, value: Any, at: int, rest: Continue, *, lazy: bool) -> bool:
        least, most, body = value
        nodes = list(body)
        if len(nodes) == 1 and nodes[0][0] in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return self._repeat_one(nodes[0], least, most, at, rest, lazy=lazy)

        def again(place: int, count: int) -> bool:
            def more() -> bool:
                return count < most and self._sequence(
                    nodes, 0, place, lambda end: end > place and again(end, count + 1)
                )

            if count < least:
                return more()
            return (rest(place) or more()) if lazy else (more() or rest(place))

        return again(at, 0)

    def _repeat_one(self, node: Any, least: int, most: int, at: int, rest: Continue, *, lazy: bool) -> bool:
        end = at
        while end - at < most and self._is_one(*node, end):
            self._step()
            end += 1
        places = range(at + least, end + 1) if lazy else range(end, at + least - 1, -1)
        for place in places:
            self._step()
            if rest(place):
                return True
        return False

    def _is_at(self, where: Any, at: int) -> bool:
        if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return at == 0 or (bool(self.flags & re.M) and self.text[at - 1] == "\n")
        if where in (sre.AT_END, sre.AT_END_STRING):
            return at >= len(self.text) - 1 or (bool(self.flags & re.M) and self.text[at] == "\n")
        before, after = self.text[at - 1 : at], self.text[at : at + 1]
        is_word = bool(re.match(r"\w", before)) != bool(re.match(r"\w", after))
        return is_word == (where is sre.AT_BOUNDARY)

    def _is_one(self, op: Any, value: Any, at: int) -> bool:
        if at >= len(self.text):
            return False
        each = self.text[at]
        if op is sre.ANY:
            return each != "\n" or bool(self.flags & re.S)
        if op is sre.IN:
            return any(_is_in(value, one) for one in self._cases(each))
        return (ord(each) == value) == (op is sre.LITERAL) or any(
            ord(one) == value for one in self._cases(each) if op is sre.LITERAL
        )

    def _cases(self, each: str) -> tuple[str, ...]:
        return (each.lower(), each.upper()) if self.flags & re.I else (each,)


def _note(ends: list[int], end: int) -> bool:
    ends.append(end)
    return True


CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def _is_in(items: Any, each: str) -> bool:
    if len(each) != 1:
        return False
    wanted = True
    for op, value in items:
        if op is sre.NEGATE:
            wanted = False
        elif (
            (op is sre.LITERAL and ord(each) == value)
            or (op is sre.RANGE and value[0] <= ord(each) <= value[1])
            or (op is sre.CATEGORY and re.match(CATEGORIES[value], each))
        ):
            return wanted
    return not wanted


# What it is shown


def drawn(nodes: Any, draw: Random) -> str:
    """A text that fits."""
    return "".join(_drawn_of(op, value, draw) for op, value in nodes)


def _drawn_of(op: Any, value: Any, draw: Random) -> str:
    if op is sre.LITERAL:
        return chr(value)
    if op is sre.ANY:
        return draw.choice("a0 ")
    if op in (sre.IN, sre.NOT_LITERAL):
        items = value if op is sre.IN else [(sre.NEGATE, None), (sre.LITERAL, value)]
        fits = [each for each in map(chr, range(9, 127)) if _is_in(items, each)]
        return draw.choice(fits or [chr(arg if op is sre.LITERAL else arg[0]) for op, arg in items])
    if op is sre.SUBPATTERN:
        return drawn(value[-1], draw)
    if op is sre.BRANCH:
        return drawn(draw.choice(value[1]), draw)
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, body = value
        count = min(max(least, draw.randint(0, 5)), most, 5)
        return "".join(drawn(body, draw) for _ in range(count))
    return ""


def shown(tree: Any, draw: Random, length: int) -> str:
    """A text with a part that comes again and again, and an end that does not fit."""
    fits = drawn(tree, draw) or "a"
    if draw.random() < 0.3:  # its beginning many times, and never its end
        part = fits[: draw.randint(1, len(fits))]
        return part * (length // len(part) + 1)
    start = draw.randrange(len(fits))
    part = fits[start : start + draw.choice((1, 1, 2, 3, len(fits)))] or fits
    before = fits[:start] if draw.random() < 0.7 else ""
    return before + part * (length // len(part) + 1) + draw.choice(("\0", "\n", "x", "", '"'))


# The patterns of the program


def patterns() -> Iterator[tuple[str, str | bytes, int, str]]:
    """Where it stands, the pattern, its flags, and how it is used: search, match or fullmatch."""
    for module in pkgutil.walk_packages(anvil_mux.__path__, "anvil_mux."):
        if module.name not in OF_OUR_OWN and not module.name.endswith("__main__"):
            yield from _patterns_in(module.name)


def _patterns_in(name: str) -> Iterator[tuple[str, str | bytes, int, str]]:
    spec = importlib.util.find_spec(name)
    assert spec
    assert spec.origin
    with open(spec.origin) as file:
        text = file.read()
    if "import re\n" not in text:
        return
    tree, lines = ast.parse(text), text.splitlines()
    compiled = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any("re.compile" in each for each in _lines_of(node, lines))
        for each in node.targets
        for target in ast.walk(each)
        if isinstance(target, ast.Name)
    }
    uses: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in compiled:
            uses.setdefault(node.value.id, set()).add(node.attr)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "re"
            and node.func.attr in (*SEARCHES, "match", "fullmatch")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield f"{name}:{node.lineno}", node.args[0].value, 0, _kind({node.func.attr})
    if not compiled:
        return
    module = importlib.import_module(name)
    for each in sorted(compiled):
        for pattern in _compiled(getattr(module, each, None)):
            yield f"{name}.{each}", pattern.pattern, pattern.flags, _kind(uses.get(each, {"search"}))


def _lines_of(node: ast.stmt, lines: list[str]) -> list[str]:
    return lines[node.lineno - 1 : node.end_lineno]


def _compiled(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _compiled(each)


def _kind(methods: set[str]) -> str:
    anchored = [each for each in ("match", "fullmatch") if each in methods]
    return anchored[0] if anchored and not methods & SEARCHES else "search"


ALL = [pytest.param(*each[1:], id=f"{each[0]}-{number}") for number, each in enumerate(patterns())]


@pytest.fixture(autouse=True)
def deep() -> Iterator[None]:
    """Room for one call for each character and node."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(("pattern", "flags", "use"), ALL)
def test_it_takes_steps_in_proportion_to_what_it_reads(pattern, flags, use):
    tree = parser.parse(pattern, flags & ~re.UNICODE if isinstance(pattern, bytes) else flags)
    draw = Random(28)
    for _ in range(DRAWN):
        for length in LENGTHS:
            text = shown(tree, draw, length)
            matcher = Matcher(pattern, flags, text, STEPS_PER_CHARACTER * len(text))
            try:
                getattr(matcher, use)()
            except TooManySteps:
                pytest.fail(f"{pattern!r} takes more than {matcher.most} steps for {text!r}")


@pytest.mark.parametrize(
    ("pattern", "use"),
    [
        (r"(?:([0-9]+\.?[0-9]*|\.[0-9]+)(h|m))+", "fullmatch"),
        (r"[0-9]+\.?[0-9]*|\.[0-9]+", "fullmatch"),
        (r"\s*:", "search"),
        (r"(a|aa)+", "fullmatch"),
    ],
)
def test_what_goes_back_too_often_is_noticed(pattern, use):
    with pytest.raises(pytest.fail.Exception):
        test_it_takes_steps_in_proportion_to_what_it_reads(pattern, 0, use)


@pytest.mark.parametrize(
    "text", ["", "abc", "12:30", "a=1;b=2", "  x ", '{"a": "b\\"c"}', "GET / HTTP/1.1\r\n", "x" * 30, "1h30m"]
)
@pytest.mark.parametrize(
    "pattern",
    [r"\b\w+\b", r"(?:[^\"\\]|\\.)*", r"^[a-z]+$", r"([0-9]+)(h|m)", r"(?<!a)b?.*?[^0-9]", r"(?=x)x{2,4}"],
)
def test_the_matcher_finds_what_re_finds(pattern, text):
    for use in ("match", "fullmatch", "search"):
        matcher = Matcher(pattern, 0, text, 10**6)
        assert getattr(matcher, use)() == (getattr(re, use)(pattern, text) is not None), use
