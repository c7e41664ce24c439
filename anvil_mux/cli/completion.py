"""Completion for shells: a script that is made from the parser itself, so that it knows every command.

``eval "$(anvil-mux completion bash)"`` in ``~/.bashrc`` (zsh: the same in ``~/.zshrc``), or
``anvil-mux completion fish | source``. Where a model's name belongs, a running anvil-mux is asked for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")
MODEL = "MODEL"
"""The metavar of an argument that names a model."""

_BASH = """\
_anvil_mux() {
    local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} choices=
    if [ "$COMP_CWORD" -eq 1 ]; then choices="%(commands)s"; else
        case $command in
%(cases)s
        esac
        if [[ $word != -* ]]; then
            case $command in
                %(models)s) choices=$(anvil-mux completion --models 2>/dev/null) ;;
                *) choices= ;;
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}
complete -o default -F _anvil_mux anvil-mux
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
_FISH = r"""complete -c anvil-mux -n __fish_use_subcommand -a "%(commands)s" -f
complete -c anvil-mux -n "__fish_seen_subcommand_from %(models)s" -f \
    -a "(anvil-mux completion --models 2>/dev/null)"
"""


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script that a shell has to read; ``parsers`` are those of the commands."""
    models = [name for name, parser in parsers.items() if _takes_model(parser)]
    if shell == "fish":
        lines = [_FISH % {"commands": " ".join(parsers), "models": " ".join(models)}]
        for name, parser in parsers.items():
            words = (f"-l {option[2:]}" for option in _options(parser))
            lines += [f'complete -c anvil-mux -n "__fish_seen_subcommand_from {name}" {w}\n' for w in words]
        return "".join(lines)
    cases = [f'            {name}) choices="{" ".join(_options(p))}" ;;' for name, p in parsers.items()]
    text = _BASH % {
        "commands": " ".join(parsers),
        "cases": "\n".join(cases),
        "models": "|".join(models),
    }
    return _ZSH + text if shell == "zsh" else text


def _options(parser: argparse.ArgumentParser) -> list[str]:
    found = [option for action in parser._actions for option in action.option_strings]
    return sorted(option for option in found if option.startswith("--"))


def _takes_model(parser: argparse.ArgumentParser) -> bool:
    return any(action.metavar == MODEL for action in parser._actions)
