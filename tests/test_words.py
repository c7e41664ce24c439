"""One word for one thing: docs/glossary.md says which, and users meet no other.

User-facing text is each string of the program that is no docstring, the status page, the documents, and the
comments of the files that users copy. A retired word is refused there; ``ALLOWED`` are the phrases in which
it means something else.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
from anvil_mux.scheduler.events import KINDS
from anvil_mux.scheduler.slot import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent

RETIRED = {
    r"lines?": "queue",
    r"put(s|ting)? (out|down|up)": "evict",
    r"put(s|ting)? off": "hold back",
    r"(rest|rests|rested|resting)": "standby",
    r"(on standby|parked)": "in standby",
    r"(rungs?|ladders?)": "standby level",
    r"errands?": "preload",
    r"strangers?": "other processes",
    r"islands?": "GPU group",
    r"(seats?|houses?)": "backend, slot",
    r"units?": "failure domain",
    r"(outlooks?|prospects?|lookouts?)": "wait estimate",
    r"ledgers?": "in-flight tracker",
    r"preempt\w*": "evict",
    r"cut off": "sever",
    r"keepers?": "worker",
    r"(said|told) of (it|them)": "report",
}
WORD = re.compile("|".join(rf"(?P<_{n}>\b{pattern}\b)" for n, pattern in enumerate(RETIRED)), re.I)

ALLOWED = re.compile(
    r"""
    # a line of text, of a file, of a table
    (command|comment|header|request|status|changelog|keep-alive|first|last|several|this|on\ a|_)\ lines?
    | lines?\ (come|end|ends|in|of\ JSON|of\ an\ event\ log)\b | end\ of\ its\ line | file\ and\ line
    | one\ line | (a|one)\ line\ (for\ each|to\ paste) | (one|key)\ to\ a\ line | overrides\ a\ line
    | in\ line$ | ^line\) | request's\ line
    # an engine that broke off
    | stream\ was\ cut\ off
    # what is left
    | (the|all\ the)\ rest\b
    # systemd's, and the English word
    | systemd\ unit | in\ its\ unit | the\ unit\ in\ which | unit\ of\ time
    """,
    re.X | re.I,
)

NAMES = {
    *("line", "lines", "-n --lines N"),  # of a log
    "rest",  # an attribute
}
"""Names that stand in the program as strings."""


def strings(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that are not its documentation, f-strings in their pieces."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    documentation = {id(each.value) for body in bodies for each in body if isinstance(each, ast.Expr)}
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str) and node.value not in NAMES:
            yield node.lineno, node.value


def markdown(file: Path) -> Iterator[tuple[int, str]]:
    """A document without the addresses of its links."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        yield number, re.sub(r"\]\([^)]*\)", "]", line)


def comments(file: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if "#" in line:
            yield number, line.partition("#")[2]


def page(file: Path) -> Iterator[tuple[int, str]]:
    """What the page shows: text between tags, and the sentences in its scripts."""
    if file.suffix == ".html":
        yield 0, re.sub(r"<[^>]*>", " ", file.read_text())
        return
    for said in re.findall(r'"[^"\n]*"|`[^`\n]*`', file.read_text()):
        if " " in (text := re.sub(r"\$\{[^}]*\}", "", said[1:-1])):
            yield 0, text


def dashboard(file: Path) -> Iterator[tuple[int, str]]:
    for said in re.findall(r'"(?:title|description|legendFormat)": ("[^"]*")', file.read_text()):
        yield 0, json.loads(said)


@cache
def texts() -> list[tuple[str, str]]:
    """All that users read, each text behind where it stands."""
    readers = {
        strings: "anvil_mux/**/*.py",
        page: "anvil_mux/proxy/web/*.html anvil_mux/proxy/web/*.js",
        markdown: "README.md CONTRIBUTING.md docs/*.md anvil_mux/lab/*/README.md",
        comments: "compose/*.yaml contrib/* grafana/alerts.yml",
        dashboard: "grafana/anvil-mux.json",
    }
    return [
        (f"{file.relative_to(ROOT)}:{number}", text)
        for reader, patterns in readers.items()
        for pattern in patterns.split()
        for file in sorted(ROOT.glob(pattern))
        for number, text in reader(file)
    ]


def retired(text: str) -> list[str]:
    """The retired words in a text; what stands between backticks is a name."""
    return [found.group() for found in WORD.finditer(ALLOWED.sub("", re.sub(r"`[^`]*`", "_", text).strip()))]


def test_users_meet_no_retired_word():
    found = [f"{where}: {', '.join(words)}: {text}" for where, text in texts() if (words := retired(text))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Requests that wait in a line.", ["line"]),
        ("no line waits longer than this", ["line"]),
        ("Held back, put out, cut", ["put out"]),
        ("its swap is put off for 2 s", ["put off"]),
        ("what backends that rest hold still", ["rest"]),
        ("GPU 0 rests; a ledger of strangers on an island", ["rests", "ledger", "strangers", "island"]),
        ("`rest` is a name, and the rest of the command line is one line of JSON", []),
    ],
)
def test_a_retired_word_is_found(text, words):
    assert retired(text) == words


def test_every_kind_of_text_is_read():
    places = {where.partition(":")[0] for where, _ in texts()}
    assert {
        "anvil_mux/config/config.py",
        "anvil_mux/proxy/web/page.html",
        "anvil_mux/proxy/web/state.js",
        "README.md",
        "docs/metrics.md",
    } <= places
    assert {"compose/demo.yaml", "contrib/anvil-mux.service", "grafana/anvil-mux.json"} <= places


GLOSSARY, _, ON_PAGE = (ROOT / "docs" / "glossary.md").read_text().partition("\n## ")
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| ((?:state|event|setting) .+?) \|$", GLOSSARY, re.M)
NAMED = {
    "state": {start for start, _ in TRANSITIONS} | {*TRANSITIONS.values()},
    "event": {*KINDS},
    "setting": {*SETTINGS, *SERVICE_SETTINGS},
}


def test_every_word_of_the_glossary_says_by_what_it_is_named():
    assert len(ROWS) == GLOSSARY.count("\n| ") - 1 > 20


@pytest.mark.parametrize(("word", "names"), [(word, names) for word, _, names in ROWS])
def test_what_the_glossary_names_exists(word, names):
    kind = ""
    for kind_or_name in re.findall(r"\w+", names):
        if kind_or_name in NAMED and f"`{kind_or_name}`" not in names:
            kind = kind_or_name
        else:
            assert kind_or_name in NAMED[kind], word


def test_the_glossary_has_each_state():
    assert NAMED["state"] <= set(re.findall(r"`(\w+)`", GLOSSARY))


NO_SUBJECT = re.compile(
    r"(Who|Whoever|Whom|Whose|What|Whatever|Which|Those|These|It|Its|They|Nobody|Somebody|Of|As|With|By|At|In|To"
    r"|From|Under|Where|Among|Between|For|Such|So|Told|Said)\b|[a-z(]"
)


def documentation(file: Path) -> Iterator[str]:
    """The docstrings of a module, also those below its names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_a_docstring_begins_with_what_it_is_about():
    lost = [
        (str(file.relative_to(ROOT)), text)
        for file in sorted((ROOT / "anvil_mux").rglob("*.py"))
        for text in documentation(file)
        if NO_SUBJECT.match(text) and not text.startswith("anvil-mux")
    ]
    assert not lost
