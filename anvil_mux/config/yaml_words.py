"""The mistakes in YAML in plain words: where each is, what is wrong, and the line as it should be."""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml

from anvil_mux.config.diagnostic import Diagnostic


def _quoted(line: str, column: int) -> str:
    """The line with the value of its first key in quotes."""
    found = re.match(r"(\s*(?:- )?[^\s:#][^:]*: +)(.+?)\s*$", line) or re.match(r"(\s*- +)(.+?)\s*$", line)
    if not found:
        return ""
    text = found[2].replace("'", "''")
    return f"{found[1]}'{text}'"


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


def _not_mended(line: str, column: int) -> str:
    return ""


Mend = Callable[[str, int], str]
"""Makes the line to write of a line and the column where the mistake begins; "" where it is not known."""
MISTAKES: tuple[tuple[str, str, Mend], ...] = (
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
        _not_mended,
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
        _not_mended,
    ),
    (r"second occurrence", "the same &name stands twice: give one of them another name", _not_mended),
    (
        r"unknown escape character",
        "in double quotes a backslash is an escape: write two, or single quotes",
        _in_single_quotes,
    ),
    (
        r"found another document|but found '<document start>'|expected a single document",
        "a second document begins (---): a compose file is one",
        _not_mended,
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
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    for pattern, words, mend in MISTAKES:
        if found := re.search(pattern, said):
            mended = mend(line, mark.column) if mark and line else ""
            mended = mended.strip() if _is_yaml(mended) else ""
            return mark.line + 1 if mark else None, Diagnostic(
                words.format(**found.groupdict()), write=mended
            )
    why = str(error.problem or error.context or "it cannot be read")
    return mark.line + 1 if mark else None, Diagnostic(why)


def _is_yaml(line: str) -> bool:
    """Whether a line can be read by itself."""
    try:
        yaml.compose(line, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return False
    return bool(line.strip())
