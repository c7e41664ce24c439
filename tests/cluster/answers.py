"""What agents answer, read as whoever asked reads it: by what the method declares that it returns."""

from __future__ import annotations

from typing import Any, get_type_hints

from anvil_mux.cluster import agent, frames
from anvil_mux.cluster.frames import AgentAnswer, AgentCall
from anvil_mux.host.seam import Host

AGENTS = {"hello": agent.Agent.hello, "lacks": agent._lacks}


def _method(name: str) -> Any:
    return AGENTS.get(name) or getattr(agent.Agent, f"_{name}", None) or getattr(Host, name)


def arguments_of(call: AgentCall) -> list[Any]:
    """Return the arguments of a call, as the agent reads them; those of a step that is begun too."""
    found = frames.arguments(_method(call.method), call.args)
    if call.method == "begin":
        found[2] = tuple(frames.arguments(_method(found[1]), found[2]))
    return found


def returned_by(method: str) -> Any:
    """Return the type of what a method of an agent returns, or a step."""
    return get_type_hints(_method(method))["return"]


def value_of(method: str, text: str) -> Any:
    """Return what an agent answered to a call of a method, or raise its error."""
    answer = frames.read(AgentAnswer, text, is_foreign=True)
    if answer.error:
        raise frames.error_of(answer.error)
    return frames.of(returned_by(method), answer.value)
