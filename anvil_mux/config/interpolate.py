"""The Compose file without the Compose program.

``read`` parses one YAML file and remembers the line of every key, which also serves the error messages where
the Compose program does the reading. ``resolve`` then puts in the variables of the environment and of the
``.env`` beside the file, as ``docker compose config`` would. What this subset cannot read (other files, YAML
tags) is an error that names it, never a guess.

YAML is read as Compose reads it: ``on`` and ``yes`` are text, and so is ``22:22``; a key given twice is an
error. Variables are put in after parsing, into values and not into keys, whether or not the value is used:
``$V ${V} ${V:-d} ${V-d} ${V:?e} ${V?e} ${V:+r} ${V+r} $$``, nested. As in Compose the word behind an operator
is worked out even where it is not needed, and a ``$`` in front of anything else stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from anvil_mux import state
from anvil_mux.config.kinds import Diagnostic, KeyPath, Position, as_diagnostic, unfit
from anvil_mux.errors import ConfigError

MOST_NODES = 100_000
"""The most nodes of a file whose aliases are written out: a small file can stand for a huge one."""
DEEPEST = 50
MOST_DIGITS = 3500
"""The digits of a whole number: Python shows none of many more, in whichever base they are written."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
HALF_A_PAIR = "holds half a surrogate pair, which is no text"

MERGE = "tag:yaml.org,2002:merge"
OTHER_FILES = ("extends", "label_file")
"""Keys of a service that bring in what stands elsewhere."""
NEED_COMPOSE = "needs the Docker Compose program, which reads the file where runtime is compose"


@dataclass(frozen=True, slots=True)
class Document:
    """One file as it is written."""

    file: Path
    content: dict[str, Any]
    lines: Mapping[KeyPath, int]
    tags: tuple[tuple[KeyPath, str], ...] = ()
    """YAML tags that we do not know, such as Compose's !reset."""

    def knows(self, key: KeyPath) -> int:
        """How much of ``key`` stands in this file."""
        return next(length for length in range(len(key), -1, -1) if key[:length] in self.lines)

    def place(self, key: KeyPath) -> Position:
        """The file, and the line of the key or of its nearest parent that stands in this file.

        Without a line where not even its service does: that is in a file which this one includes.
        """
        known = self.knows(key)
        elsewhere = key[:1] == ("services",) and known < min(len(key), 2) and len(key) > 1
        return Position(str(self.file), None if elsewhere else self.lines[key[:known]])

    def diagnostic(self, key: KeyPath, text: object) -> Diagnostic:
        """A mistake in what stands at a key, with its place."""
        return as_diagnostic(text).at(self.place(key), key, ".".join(key))

    def where(self, key: KeyPath) -> str:
        """FILE:LINE: key."""
        return f"{self.place(key)}" + (f": {'.'.join(key)}" if key else "")


def read(file: Path) -> Document:
    """The file, not interpolated; ConfigError with its problems."""
    text = ""
    try:
        text = state.read_text(file)
        loader = Loader(text)
        root = loader.get_single_node()
        walk = _Walk(file)
        walk.visit(root, ())
        if walk.problems:
            raise ConfigError(walk.problems)
        content = _constructed(loader, root) if root else {}
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{file}: is not a text file (UTF-8)"]) from None
    except RecursionError:
        raise ConfigError([f"{file}: is nested too deeply"]) from None
    except yaml.MarkedYAMLError as error:
        line, why = in_plain_words(error, text)
        raise ConfigError([why.at(Position(str(file), line), (), "is not YAML")]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{file}: is not YAML: {error}"]) from None
    if not isinstance(content, dict):
        found = Diagnostic("is not a Compose file: it has no keys such as `services:`", write="services: ...")
        raise ConfigError([found.at(Position(str(file), 1), (), "")])
    return Document(file, content, walk.lines, tuple(walk.tags))


def _constructed(loader: Loader, root: yaml.Node) -> Any:
    """The content of a file; ValueError where a value is not what its tag says it is."""
    try:
        return loader.construct_document(root)
    except (KeyError, AttributeError, IndexError) as error:  # of the constructors of !!bool, !!timestamp, ...
        raise ValueError(f"a value is not what its tag (!!) says it is ({error})") from None


def resolve(document: Document, scope: Scope) -> Any:
    """The content with its variables replaced; ConfigError, also where it needs the Compose program."""
    problems = [document.diagnostic(key, f"{tag} {NEED_COMPOSE}") for key, tag in document.tags]
    problems += [document.diagnostic(key, NEED_COMPOSE) for key in _other_files(document.content)]
    return filled(document, document.content, (), scope, problems)


def filled(document: Document, value: Any, key: KeyPath, scope: Scope, problems: Sequence[str] = ()) -> Any:
    """The value at a key of the file with its variables replaced; ConfigError, with ``problems`` too."""
    problems = [*problems]

    def fill(text: str, where: KeyPath) -> str:
        try:
            return scope.fill(text, where)
        except ValueError as error:
            problems.append(document.diagnostic(where, error))
            return text

    found = with_texts(value, fill, key)
    if problems:
        raise ConfigError(problems)
    return found


def with_texts(value: Any, make: Callable[[str, KeyPath], str], key: KeyPath = ()) -> Any:
    """The value with what ``make`` makes of each text in it, which stands at a key, but for names."""
    match value:
        case str():
            return make(value, key)
        case Mapping():
            return {name: with_texts(each, make, (*key, str(name))) for name, each in value.items()}
        case list() | tuple():
            return [with_texts(each, make, (*key, str(at))) for at, each in enumerate(value)]
    return value


ENV_FILE = ".env"


def environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Merge ``environ`` over the variables of ``folder/.env``, or of the files in COMPOSE_ENV_FILES."""
    named = [Path(file) for file in environ.get("COMPOSE_ENV_FILES", "").split(",") if file]
    return variables_of(named or [folder / ENV_FILE], environ)


def variables_of(files: Sequence[Path], environ: Mapping[str, str]) -> dict[str, str]:
    """Merge ``environ`` over the variables of files, of which the later is the stronger; ConfigError."""
    known = dict(environ)
    for file in files:
        try:
            text = state.read_text(file, "utf-8-sig")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError([f"{file}: cannot be read: {why}"]) from None
        try:
            for name, value in _assignments(text, known):
                if name not in environ:
                    known[name] = value
        except ValueError as error:
            why, begins = error.args
            line = text.count("\n", 0, begins) + 1
            said = f"{file}:{line}: {why}"
            found = Diagnostic(said, write="NAME=value", place=Position(str(file), line))
            raise ConfigError([found]) from None
    return known


NO_STATEMENT = re.compile(r"(?:\s|#[^\n]*)*(?:export[^\S\n]+)?")
NAMED = re.compile(r"([^=:\n]*)([=:]?)[^\S\n]*")
QUOTED = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in "'\""}
ESCAPE = re.compile(r"\\(0[0-7]{3}|.)", re.DOTALL)
ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", '"': '"', "\\": "\\"}


def _assignments(text: str, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and value of each assignment of a .env file; ValueError(what is wrong, where it begins).

    A value in quotes may have several lines, and behind it another assignment may follow in the same line.
    """
    at = NO_STATEMENT.match(text).end()  # type: ignore[union-attr]
    while at < len(text):
        begins, found = at, NAMED.match(text, at)
        assert found is not None
        name, at = found[1].strip(), found.end()
        if not re.fullmatch(r"[\w.\[\]-]*", name):
            raise ValueError("is not NAME=VALUE", begins)
        if found[2]:
            try:
                value, at = _value(text, at, known)
            except ValueError as error:
                raise ValueError(error.args[0], begins) from None
            if name:
                yield name, value
        at = NO_STATEMENT.match(text, at).end()  # type: ignore[union-attr]


def _value(text: str, at: int, known: Mapping[str, str]) -> tuple[str, int]:
    """The value that begins at a place of a .env file, and where it ends."""
    quote = text[at : at + 1]
    if quote not in QUOTED:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        return Scope(known).fill(text[at:end].partition(" #")[0].strip()), end
    found = QUOTED[quote].match(text, at)
    if found is None:
        raise ValueError(f"a quote ({quote}) is opened here and not closed")
    if quote == "'":
        return found[1].replace("\\'", "'"), found.end()
    return Scope(known).fill(ESCAPE.sub(_unescaped, found[1])), found.end()


def _unescaped(escape: re.Match[str]) -> str:
    if len(escape[1]) > 1:
        return chr(int(escape[1], 8))
    return "$$" if escape[1] == "$" else ESCAPES.get(escape[1], escape[0])


NAME = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")
OPERATOR = re.compile(r":?[-?+]")


COMMANDS = (("command",), ("entrypoint",))
"""The keys of a service whose words are a command."""


class Scope:
    """The variables that may be put into a text.

    ``later``: those that stay as they are in a command (``$NAME``), unless they are set: its process is given
    them.
    """

    def __init__(self, environ: Mapping[str, str], later: Collection[str] = ()) -> None:
        self._environ = environ
        self._later = later
        self.unset: dict[str, KeyPath] = {}
        """The variables that were asked for in vain -> the key of the first text that does."""

    def fill(self, text: str, key: KeyPath = ()) -> str:
        """Replace the variables in the text at a key; ValueError says what is wrong with it."""
        return "".join(self._parts(text, key))

    def _parts(self, text: str, key: KeyPath) -> Iterator[str]:
        at = 0
        while (dollar := text.find("$", at)) >= 0:
            yield text[at:dollar]
            at = dollar + 1
            if text.startswith("{", at):
                end = _closing(text, at)
                yield self._braced(text[at + 1 : end], key)
                at = end + 1
            elif name := NAME.match(text, at):
                yield self._value(name[0], key)
                at = name.end()
            else:
                yield "$"
                at += text.startswith("$", at)
        yield text[at:]

    def _braced(self, inside: str, key: KeyPath) -> str:
        name = NAME.match(inside)
        operator = OPERATOR.match(inside, name.end()) if name else None
        if name is None or (operator is None and name.end() < len(inside)):
            text = f"${{{inside}}} is no variable; write $$ for a $ that stands for itself"
            raise ValueError(text)
        if operator is None:
            return self._value(name[0], key)
        word = self.fill(inside[operator.end() :], key)
        value = self._environ.get(name[0])
        there = bool(value) if operator[0].startswith(":") else value is not None
        match operator[0][-1]:
            case "+":
                return word if there else ""
            case "?" if not there:
                text = f"the variable {name[0]} must be set" + (f": {word}" if word else "")
                raise unfit(text, write=f"{name[0]}=... in .env")
            case "-" if not there:
                return word
        return value or ""

    def _value(self, name: str, key: KeyPath) -> str:
        value = self._environ.get(name)
        if value is not None:
            return value
        if name in self._later and key[2:3] in COMMANDS:
            return f"${name}"
        self.unset.setdefault(name, key)
        return ""


def _closing(text: str, at: int) -> int:
    """The index of the brace that closes the one at ``at``, in the same line."""
    depth = 1
    for found in re.finditer(r"\$?\{|\}|\n", text[at + 1 :]):
        match found[0]:
            case "}":
                depth -= 1
            case "${":
                depth += 1
            case "{":
                # Releases of Compose differ in whether this brace counts.
                raise ValueError(
                    f"${text[at:]} has braces in braces; put that text into a variable of its own"
                )
            case _:
                break
        if depth == 0:
            return at + 1 + found.start()
    raise ValueError(f"${text[at:]} does not end; write $$ for a $ that stands for itself")


def _other_files(content: Mapping[str, Any]) -> Iterator[KeyPath]:
    if content.get("include"):
        yield ("include",)
    services = content.get("services")
    for name, service in services.items() if isinstance(services, dict) else ():
        if isinstance(service, dict):
            yield from (("services", str(name), key) for key in OTHER_FILES if key in service)


class Loader(yaml.SafeLoader):
    """A YAML loader for which plain values become what they become for Compose; unknown tags are left out of
    account.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Begin a list or mapping within brackets; the scanner looks at all that are open with each token."""
        if self.flow_level >= DEEPEST:
            text = f"brackets are nested deeper than {DEEPEST} levels"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0b[01_]+|0o?[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("merge", r"<<", "<"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _untagged(loader: Loader, _suffix: str, node: yaml.Node) -> Any:
    match node:
        case yaml.MappingNode():
            return loader.construct_mapping(node, deep=True)
        case yaml.SequenceNode():
            return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)  # type: ignore[arg-type]


Loader.add_multi_constructor("!", _untagged)


class _Walk:
    """Visits every node as often as it is referred to: lines, tags, and what Compose would not accept."""

    def __init__(self, file: Path) -> None:
        self.lines: dict[KeyPath, int] = {(): 1}
        self.tags: list[tuple[KeyPath, str]] = []
        self.problems: list[str] = []
        self._file = file
        self._nodes = 0

    def visit(self, node: yaml.Node | None, key: KeyPath) -> None:
        if node is None:
            return
        self._nodes += 1
        if self._nodes > MOST_NODES or len(key) > DEEPEST:
            raise ConfigError([f"{self._file}: is too large, or its aliases (*name) repeat too much"])
        if node.tag.startswith("!"):
            self.tags.append((key, node.tag))
        if isinstance(node, yaml.ScalarNode) and _LONE_SURROGATE.search(node.value):
            self._complain(node.start_mark.line + 1, key, HALF_A_PAIR)
        if node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
            self._complain(node.start_mark.line + 1, key, "is too great a number")
        match node:
            case yaml.MappingNode():
                self._visit_mapping(node, key)
            case yaml.SequenceNode():
                for index, item in enumerate(node.value):
                    self._note((*key, str(index)), item)
                    self.visit(item, (*key, str(index)))

    def _visit_mapping(self, node: yaml.MappingNode, key: KeyPath) -> None:
        seen: dict[str, int] = {}
        merges = []
        for name, value in node.value:
            line = name.start_mark.line + 1
            inner = (*key, str(name.value))
            if not isinstance(name, yaml.ScalarNode):
                self._complain(line, key, "has a key that is not text")
            elif _LONE_SURROGATE.search(name.value):
                self._complain(line, key, f"its keys: {HALF_A_PAIR}")
            elif name.tag == MERGE:
                self.visit(value, inner)
                merges.append(value)
            elif not name.tag.endswith(":str"):
                text = f'the key must be text: write "{name.value}":'
                self._complain(line, inner, text, f'"{name.value}": ...')
            elif name.value in seen:
                text = f"stands here twice (first in line {seen[name.value]}); Compose takes one"
                self._complain(line, inner, text)
            else:
                seen[name.value] = line
                self._note(inner, name)
                self.visit(value, inner)

        for merged in merges:
            self._note_merged(merged, key)

    def _note_merged(self, node: yaml.Node, key: KeyPath) -> None:
        """Note the keys that ``<<`` brings in, but for the mapping's own; the first of several counts."""
        if isinstance(node, yaml.SequenceNode):
            for each in node.value:
                self._note_merged(each, key)
        elif isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                inner = (*key, str(name.value))
                if name.tag == MERGE:
                    self._note_merged(value, key)
                elif inner not in self.lines:
                    self._note(inner, name)
                    self.visit(value, inner)

    def _note(self, key: KeyPath, node: yaml.Node) -> None:
        self.lines.setdefault(key, node.start_mark.line + 1)

    def _complain(self, line: int, key: KeyPath, text: str, write: str = "") -> None:
        found = Diagnostic(text, write=write)
        self.problems.append(found.at(Position(str(self._file), line), key, ".".join(key)))


def _quoted(line: str, column: int) -> str:
    """The line with the value of its first key in quotes."""
    found = re.match(r"(\s*(?:- )?[^\s:#][^:]*: +|\s*- +)(.+?)\s*$", line)
    text = found[2].replace("'", "''") if found else ""
    return f"{found[1]}'{text}'" if found else ""


def _with_spaces(line: str, column: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return indent.replace("\t", "  ") + line.lstrip()


def _closed(line: str, column: int) -> str:
    """The line with the list, mapping or quote closed that begins at a column."""
    opened = line[column : column + 1]
    end = {"[": "]", "{": "}", '"': '"', "'": "'"}.get(opened)
    return f"{line.rstrip().rstrip(',')}{end}" if end else ""


def _with_colon(line: str, column: int) -> str:
    return f"{line.rstrip()}: ..."


def _in_single_quotes(line: str, column: int) -> str:
    return re.sub(r'"([^"\']*)"', r"'\1'", line)


Mend = Callable[[str, int], str]
"""Makes the line to write of a line and the column where the mistake begins; "" where it is not known."""
MISTAKES: tuple[tuple[str, str, Mend | None], ...] = (
    (
        r"mapping values are not allowed",
        "a second `: ` follows here: put text that has a colon into quotes",
        _quoted,
    ),
    (r"character '\\t'", "a tab stands here: indent with spaces", _with_spaces),
    (r"character '(?P<what>[@`%])'", "text may not begin with {what}: put it into quotes", _quoted),
    (
        r"expected <block end>",
        "it is indented unlike what is above it: begin it in the same column",
        None,
    ),
    (
        r"expected ',' or '(?P<what>[\]}])'",
        "a list or mapping that begins here does not end: add {what}",
        _closed,
    ),
    (r"found unexpected end of stream", "a quote that is opened here does not end: close it", _closed),
    (
        r"undefined alias '(?P<what>[^']*)'",
        "*{what} stands for nothing: write &{what} above, where it is meant",
        None,
    ),
    (r"second occurrence", "the same &name stands twice: give one of them another name", None),
    (
        r"unknown escape character",
        "in double quotes a backslash is an escape: write two, or single quotes",
        _in_single_quotes,
    ),
    (
        r"found another document|but found '<document start>'|expected a single document",
        "a second document begins (---): a compose file is one",
        None,
    ),
    (r"could not find expected ':'", "a key without its colon: write `key: value`", _with_colon),
)
"""Pattern in the parser's words -> what is wrong and what to do, and how the line is mended."""
BEGAN = r"expected ',' or|unexpected end of stream|could not find expected"


def in_plain_words(error: yaml.MarkedYAMLError, text: str) -> tuple[int | None, Diagnostic]:
    """Return the line of the mistake, and a sentence on it; an unknown one keeps the parser's words.

    ``text``: the file.
    """
    said = f"{error.context or ''} {error.problem or ''}"
    began = re.search(BEGAN, said) is not None
    mark = (error.context_mark if began else None) or error.problem_mark or error.context_mark
    number = mark.line + 1 if mark else None
    line = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
    for pattern, words, mend in MISTAKES:
        if found := re.search(pattern, said):
            mended = mend(line, mark.column) if mark and line and mend else ""
            mended = mended.strip() if _is_yaml(mended) else ""
            return number, Diagnostic(words.format(**found.groupdict()), write=mended)
    return number, Diagnostic(str(error.problem or error.context or "it cannot be read"))


def _is_yaml(line: str) -> bool:
    """Whether a line can be read by itself."""
    try:
        yaml.compose(line, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return False
    return bool(line.strip())
