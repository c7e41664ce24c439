"""The macros of llama-swap, and the words of its commands, as a compose file has them.

``${NAME}`` stands for a macro, of the model or else of the whole file, ``${env.NAME}`` for a variable, and
``${MODEL_ID}``, ``${PORT}`` and ``${PID}`` for what llama-swap knows. A variable stays one (``${NAME?}``: it
has to be set, as llama-swap wants it), and the port becomes the one that anvil-mux gives (``$$PORT``): both
are marks until a value is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

MACRO = re.compile(r"\$\{([a-zA-Z0-9_.-]+)\}")
PORT, PID = "\ue000", "\ue001"
"""The marks of the port and of the process id."""
VARIABLE = "\ue002"
"""The mark before the name of a variable; ``_END`` stands behind it."""
_END = "\ue003"
_MARKED = re.compile(rf"{PORT}(?=(\w?))|{VARIABLE}([^{VARIABLE}{_END}]*){_END}|\$")


class Macros:
    """The macros of one model: ``own`` before ``common``."""

    def __init__(self, common: Mapping[str, Any], own: Mapping[str, Any], model: str) -> None:
        self._values: dict[str, Any] = {**common, **own, "MODEL_ID": model, "PORT": PORT, "PID": PID}

    def fill(self, value: Any) -> Any:
        """The value, of any kind, with its macros replaced; ValueError says which cannot be."""
        return self._fill(value, ())

    def _fill(self, value: Any, within: tuple[str, ...]) -> Any:
        match value:
            case str():
                alone = MACRO.fullmatch(value.strip())
                if alone:
                    return self._value(alone[1], within)
                return MACRO.sub(lambda found: _text(self._value(found[1], within)), value)
            case dict():
                return {str(self._fill(name, within)): self._fill(v, within) for name, v in value.items()}
            case list():
                return [self._fill(each, within) for each in value]
        return value

    def _value(self, name: str, within: tuple[str, ...]) -> Any:
        if name.startswith("env."):
            return VARIABLE + name[len("env.") :] + _END
        if name not in self._values:
            raise ValueError(f"${{{name}}} is no macro of the file")
        if name in within:
            raise ValueError(f"the macro {name} holds itself: {' -> '.join([*within, name])}")
        return self._fill(self._values[name], (*within, name))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def words(command: str) -> list[str]:
    """The words of a command as llama-swap reads it: no shell, and lines that begin with # are comments."""
    return shlex.split("\n".join(line.rstrip().removesuffix("\\") for line in uncommented(command)))


def uncommented(command: str) -> list[str]:
    """The lines of a command that are no comments."""
    return [line for line in command.splitlines() if not line.strip().startswith("#")]


def written(value: Any, port: int | None = None) -> Any:
    """The value as a compose file has it; ``port``: the port where it is not anvil-mux's to give."""

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "$":
            return "$$"
        if found[0] != PORT:
            return f"${{{found[2]}?}}"
        if port is not None:
            return str(port)
        return "$${PORT}" if found[1] else "$$PORT"

    match value:
        case str():
            return _MARKED.sub(replaced, value)
        case dict():
            return {written(name, port): written(each, port) for name, each in value.items()}
        case list() | tuple():
            return [written(each, port) for each in value]
    return value


def plain(value: Any) -> str:
    """The value as people write it, for messages."""
    text = _MARKED.sub(lambda found: f"${{env.{found[2]}}}" if found[2] else found[0], str(value))
    return text.replace(PORT, "${PORT}").replace(PID, "${PID}")


def variable(value: Any) -> str:
    """The variable that a value is and nothing else; "" where it is something else."""
    text = str(value)
    alone = text.startswith(VARIABLE) and text.endswith(_END) and text.count(_END) == 1
    return text[1:-1] if alone else ""
