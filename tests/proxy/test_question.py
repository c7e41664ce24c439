"""What was asked stays as it was: its types are not frozen, so that it is looked after here."""

import ast
from pathlib import Path

import anvil_mux.proxy

NEVER_ALTERED = {"context", "question"}
MODULES = sorted(Path(anvil_mux.proxy.__file__).parent.glob("*.py"))


def altered(source: str) -> list[int]:
    """The lines in which a field of what was asked is assigned."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, (ast.Store, ast.Del))
        and (
            (isinstance(node.value, ast.Name) and node.value.id in NEVER_ALTERED)
            or (isinstance(node.value, ast.Attribute) and node.value.attr in NEVER_ALTERED)
        )
    ]


def test_an_assignment_would_be_seen():
    assert altered("question.body = b''\nself.context.key = None\ncontext = 1\nx = context.key") == [1, 2]


def test_nobody_alters_what_was_asked():
    assert {path.name: altered(path.read_text()) for path in MODULES} == {path.name: [] for path in MODULES}
