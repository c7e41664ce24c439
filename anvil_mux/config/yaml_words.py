"""The mistakes in YAML in plain words: where each is, and what to write instead."""

from __future__ import annotations

import re

import yaml

MISTAKES: tuple[tuple[str, str], ...] = (
    (r"mapping values are not allowed", "a second `: ` follows here: put text that has a colon into quotes"),
    (r"character '\\t'", "a tab stands here: indent with spaces"),
    (r"character '(?P<what>[@`%])'", "text may not begin with {what}: put it into quotes"),
    (r"expected <block end>", "it is indented unlike what is above it: begin it in the same column"),
    (
        r"expected ',' or '(?P<what>[\]}])'",
        "a list or mapping that begins here does not end: add {what}",
    ),
    (r"found unexpected end of stream", "a quote that is opened here does not end: close it"),
    (
        r"undefined alias '(?P<what>[^']*)'",
        "*{what} stands for nothing: write &{what} above, where it is meant",
    ),
    (r"second occurrence", "the same &name stands twice: give one of them another name"),
    (
        r"unknown escape character",
        "in double quotes a backslash is an escape: write two, or single quotes",
    ),
    (r"found another document", "a second document begins (---): a compose file is one"),
    (r"could not find expected ':'", "a key without its colon: write `key: value`"),
)
"""Pattern in the parser's words -> what is wrong and what to write."""
BEGAN = r"expected ',' or|unexpected end of stream|could not find expected"


def in_plain_words(error: yaml.MarkedYAMLError) -> tuple[int | None, str]:
    """Return the line of the mistake, and a sentence on it; an unknown one keeps the parser's words."""
    said = f"{error.context or ''} {error.problem or ''}"
    began = re.search(BEGAN, said) is not None
    mark = (error.context_mark if began else None) or error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else None
    for pattern, words in MISTAKES:
        if found := re.search(pattern, said):
            return line, words.format(**found.groupdict())
    return line, str(error.problem or error.context or "it cannot be read")
