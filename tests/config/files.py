"""Compose files for tests: written, read without the Compose program, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load

GIB = 1 << 30
SERVICE = "services: {a: {image: x, x-anvil: {%s}}}"
TOP = "x-anvil: {%s}\nservices: {a: {image: x, x-anvil: {}}}"


def write(folder: Path, text: str, name: str = "compose.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def plain(folder: Path, text: str, **given: Any) -> Config:
    """Read without the Compose program."""
    given.setdefault("environ", {})
    return load([write(folder, text)], compose=None, **given)


def problems(folder: Path, text: str, **given: Any) -> list[str]:
    """What is wrong with the file, without the file's folder."""
    with pytest.raises(ConfigError) as caught:
        plain(folder, text, **given)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def one(folder: Path, service: str, top: str = "") -> Backend:
    """The backend of a file with one service, described in YAML flow."""
    keys = ("" if "image:" in service else "image: x, ") + ("" if "x-anvil" in service else "x-anvil: {}, ")
    (backend,) = plain(folder, f"{top}\nservices: {{a: {{{keys}{service}}}}}").backends
    return backend


def table(text: str) -> list[tuple[str, str]]:
    """The rows of a table with two columns and an arrow in between; lines that are indented further go on."""
    rows = [row.split("\n") for row in re.split(r"\n(?=\S)", dedent(text).strip())]
    columns = [" ".join(map(str.strip, row)).partition("->") for row in rows]
    return [(left.strip(), right.strip()) for left, _, right in columns]
