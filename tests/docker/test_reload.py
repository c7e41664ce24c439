"""Another configuration while real containers serve: who is described as before goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.docker.conftest import Stack
from tests.docker.served import ENDLESS, FOREVER, ask, client_of, count, eventually, run_of, served, stream
from tests.running import Running

MakeStack = Callable[..., Stack]
STAYS, CHANGES, GOES, COMES = "model-1", "model-2", "model-3", "model-4"


@pytest.fixture
def stack(llamacpp_compose: MakeStack, tmp_path: Path) -> Stack:
    """Each on a GPU of its own; who stays and who changes have answers without an end."""
    special: dict[str, dict[str, Any]] = {
        name: {"x-anvil": {"gpus": [str(number)]}} for number, name in enumerate((STAYS, CHANGES, GOES))
    }
    for name in (STAYS, CHANGES):
        special[name] |= ENDLESS
    return llamacpp_compose(tmp_path, services=special, top={"x-anvil": {"drain_timeout": 0.5}})


def services(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(stack.file.read_text())["services"]
    return found


def reload(stack: Stack, mux: Running, described: Mapping[str, Any], **top: object) -> int:
    """Writes other services into the file and has it take effect; the status of the answer."""
    written = yaml.safe_load(stack.file.read_text())
    written["x-anvil"] |= top
    stack.file.write_text(yaml.safe_dump({**written, "services": dict(described)}))
    return mux.request("POST", "/reload")[0]


def otherwise(stack: Stack) -> dict[str, Any]:
    """One as before but for what only steers us, one with another command, one gone, one that is new."""
    before = services(stack)
    stays, changes = before[STAYS], before[CHANGES]
    stays["x-anvil"] |= {"aliases": ["alias"], "ttl": "1h"}
    new = {**before[GOES], "command": [COMES if word == GOES else word for word in before[GOES]["command"]]}
    changed = {**changes, "command": [*changes["command"], "--threads-http", "3"]}
    return {STAYS: stays, CHANGES: changed, COMES: new}


def test_a_stream_spans_a_reload_in_which_all_other_containers_change(stack):
    with served(stack) as mux, client_of(mux) as client:
        for model in stack.models:
            assert ask(mux, model) == ""
        before = {model: run_of(stack, model) for model in stack.models}
        with stream(client, STAYS, FOREVER) as answer, stream(client, CHANGES, FOREVER) as drained:
            assert next(answer)
            assert reload(stack, mux, otherwise(stack)) == 200
            with pytest.raises(openai.APIError):
                list(drained)
            assert ask(mux, CHANGES) == ask(mux, COMES) == ""
            assert [mux.chat(model, max_tokens=1)[0] for model in ("alias", GOES)] == [200, 404]
            eventually(lambda: stack.up() == {STAYS, CHANGES, COMES})
            assert next(answer)
        assert run_of(stack, STAYS) == before[STAYS]
        assert run_of(stack, CHANGES) != before[CHANGES]
        assert [count(mux, "anvil_severed_requests", model=model) for model in (STAYS, CHANGES)] == [0, 1]


def test_what_cannot_be_used_changes_no_container(stack):
    with served(stack) as mux, client_of(mux) as client:
        for model in stack.models:
            assert ask(mux, model) == ""
        before = [run_of(stack, model) for model in stack.models]
        with stream(client, STAYS, FOREVER) as answer:
            assert next(answer)
            good, others = services(stack), otherwise(stack)
            unknown = {**others, COMES: {**others[COMES], "image": "anvil-mux-test/no-such-image"}}
            assert reload(stack, mux, unknown) == 422
            assert reload(stack, mux, others, drain_timeout="soon") == 422
            assert len(mux.get("/healthz")["reload"]["problems"]) == 1
            assert reload(stack, mux, good, drain_timeout=0.5) == 200
            assert next(answer)
        assert [run_of(stack, model) for model in stack.models] == before
        assert count(mux, "anvil_severed_requests") == 0
