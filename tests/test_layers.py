"""Imports go downwards only, and the core knows neither threads nor time."""

import ast
from pathlib import Path

import pytest

import anvil_mux

ROWS = (
    "errors clock http1 coding interpolate settings service home state notify remote",
    "screen completion",
    "keys naming api rewrite completions stages ollama anthropic composefile",
    "policy preemption profile routing prefix pipeline costs footprint demand hooks config loading change",
    "turns events steps placement ladder ledger replicas residency layout progress outlook status engine",
    "control gpu compose process freed lookout driver checkpoint",
    "swap adopt multiplexer scraper store simulate workload figures clairvoyant eventlog plot study",
    "prompts fleet contest",
    "answers pump tunnel relay accesslog gauges metrics feed journal learned client tls",
    "call heads delivery inference console healthz routerapi reloads gateway server signals",
    "program tally byhand bench profiler output arguments asking studying main __main__",
)
ORDER = [module for row in ROWS for module in row.split()]
"""Each module imports only modules that stand before it."""

CORE = (
    "events",
    "steps",
    "replicas",
    "residency",
    "outlook",
    "ladder",
    "placement",
    "policy",
    "preemption",
    "profile",
    "routing",
    "prefix",
    "ledger",
    "turns",
    "costs",
    "footprint",
    "demand",
    "layout",
    "change",
)
FORBIDDEN = {
    "threading",
    "time",
    "requests",
    "logging",
    "random",
    "datetime",
    "asyncio",
    "socket",
    "subprocess",
}

MODULES = {
    path.stem: path for path in Path(anvil_mux.__file__).parent.rglob("*.py") if path.stem != "__init__"
}


PACKAGES = {"anvil_mux"} | {
    path.parent.name for path in Path(anvil_mux.__file__).parent.glob("*/__init__.py")
}


def imported(module):
    """The modules that a module imports, anywhere in it; our own without the package's name."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("anvil_mux.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if not str(node.module).startswith("anvil_mux"):
                yield str(node.module)
                continue
            inside = str(node.module).rpartition(".")[2]
            names = [alias.name for alias in node.names if alias.name in MODULES]
            yield from names if inside in PACKAGES and names else [inside]


def test_every_module_has_a_rank():
    assert set(MODULES) == set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_downwards(module):
    assert module in ORDER, "give it a rank"
    below = set(ORDER[: ORDER.index(module)])
    ours = {name for name in imported(module) if name in MODULES}
    assert ours <= below


@pytest.mark.parametrize("module", CORE)
def test_the_core_knows_neither_threads_nor_time_nor_io(module):
    assert {name.partition(".")[0] for name in imported(module)} & FORBIDDEN == set()
