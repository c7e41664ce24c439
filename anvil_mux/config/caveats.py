"""Warnings of what becomes of a service that its owner hardly wants, with remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address

from anvil_mux.config import devices
from anvil_mux.config.diagnostic import Diagnostic, advice
from anvil_mux.config.service import (
    KEYS,
    USUAL_PORTS,
    RawService,
    argv,
    commanded_port,
    engine,
    environment,
    profiles,
    published,
)
from anvil_mux.config.values import site

SLEEPERS = ("vllm", "sglang")
"""Engines whose sleep gives memory back only if PyTorch's allocator plays along."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LLAMACPP_PORT = "LLAMA_ARG_PORT"


def is_steered_by_all(engine: str, variables: Mapping[str, str]) -> bool:
    """Whether whoever reaches its port may steer the engine, also without its API key."""
    return engine == "vllm" and variables.get("VLLM_SERVER_DEV_MODE") == "1"


def steered_at(address: str) -> str:
    """Say what follows where others reach such an engine at an address; "" where none does."""
    try:
        if ip_address(address).is_loopback:
            return ""
    except ValueError:
        pass  # a name
    return (
        f"VLLM_SERVER_DEV_MODE lets whoever reaches {address} put the engine to sleep and run"
        " /collective_rpc, with or without its API key"
    )


def caveats(service: RawService, engine: str, port: int | None, gpus: Sequence[str]) -> Iterator[str]:
    """Warnings of what Docker would do with this service that its owner hardly wants, with remedies."""
    restart = str(service.get("restart", "no"))
    if restart in ("always", "unless-stopped"):
        said = f"`restart: {restart}` brings the engine back onto the GPU after it was evicted"
        yield advice(said, 'restart: "no"', "take it away", key=("restart",))
    yield from _reached_by_others(service, engine)
    if not profiles(service):
        said, write = "without `profiles`, a bare `docker compose up` starts every model", "profiles: [llm]"
        yield advice(said, write, f"add `{write}`", key=("profiles",))
    allocator = [environment(service, {}).get(name, "") for name in ALLOCATOR]
    if engine in SLEEPERS and any("expandable_segments:True" in said for said in allocator):
        text = "expandable_segments keeps a sleeping engine from giving its memory back; take it out"
        yield Diagnostic(text, key=("environment",), page="standby.md#the-levels")
    if gpus and not devices.reserves_gpu(service):
        names = ", ".join(gpus)
        text = f"`x-anvil` names GPU {names}, but the service reserves none, so Docker gives it none"
        more = "add `gpus: all` or deploy.resources.reservations.devices, unless it computes on the CPU"
        said = f"{text} (leave it so if it computes on the CPU)"
        yield Diagnostic(f"{text}; {more}", said=said, write="gpus: all", key=("gpus",))
    elif not gpus and devices.others_gpus(service, {}) is None:
        said = "has no GPU, so it is never evicted; if it uses one, reserve it"
        write = "gpus: all"
        yield Diagnostic(f"{said} or say x-anvil: {{gpus: [...]}}", said=said, write=write, key=("gpus",))
    if others := devices.others_gpus(service, {}):
        yield from devices.caveats(service, others, gpus)
    yield from _unheard(service, engine, port)
    yield from _unpublished(service, port, USUAL_PORTS.get(engine, "PORT"))


def process_caveats(service: RawService, port: int | None) -> Iterator[str]:
    """The same warnings for a local process.

    Your own program may read PORT from its environment; engines do not.
    """
    yield from _other_port(service, port)
    for key in ("secrets", "configs"):
        if service.get(key):
            said = f"`{key}` are files of a container, which a process is not given"
            yield advice(said, "environment: ..., or the path of a file in its command", key=(key,))
    for key in service:
        if key not in KEYS and not key.startswith("x-"):
            yield Diagnostic(f"`{key}` has no effect on a local process", key=(key,))
    family = engine(service)
    if family == "openai" or commanded_port(service) or any("PORT" in word for word in argv(service)):
        return
    by_variable = {LLAMACPP_PORT, "OLLAMA_HOST"} & set(environment(service, {}))
    if not by_variable and (port is None or port != USUAL_PORTS.get(family)):
        said, flag = "its command does not say where it is to listen", "--port $$PORT"
        yield advice(said, f"command: ... {flag}", f"add {flag}", key=("command",))


def _other_port(service: RawService, port: int | None) -> Iterator[str]:
    """A warning if the command has the engine listen at another port than that where it is asked."""
    told = commanded_port(service)
    if told is not None and port is not None and told != port:
        said = f"its command listens on {told}, and is asked on {port} (x-anvil: port)"
        yield advice(said, f"x-anvil: {{port: {told}}}", key=("x-anvil", "port"))


def _unheard(service: RawService, engine: str, port: int | None) -> Iterator[str]:
    """A warning if the engine may listen somewhere else than at the port that is published."""
    inside, told = [each.inside for each in published(service)], commanded_port(service)
    if told is not None:
        if port in inside and told not in inside:
            text = f"its command listens on {told}, but published is {', '.join(map(str, inside))}"
            yield Diagnostic(text, write=f'ports: ["127.0.0.1::{told}"]', key=("ports",))
        else:
            yield from _other_port(service, port)
    elif engine == "llamacpp" and not environment(service, {}).get(LLAMACPP_PORT):
        said = "llama.cpp listens on 8080 or, in newer versions, on 9931"
        flag = f'--port "{inside[0] if inside else 8080}"'
        yield advice(said, f"command: ... {flag}", f"add {flag} to its command", key=("command",))


def _reached_by_others(service: RawService, engine: str) -> Iterator[str]:
    """Warnings of ports that are published to more than this machine."""
    is_steered = is_steered_by_all(engine, environment(service, {}))
    for each in published(service):
        address = f'"127.0.0.1::{each.inside}"'
        more, page = f"write {address}", ""
        if each.address in ("", "0.0.0.0", "::"):
            said = f"port {each.inside} is published on all interfaces, past the firewall and without a key"
        elif is_steered and (said := steered_at(each.address)):
            more, page = f"{more}, or let a firewall admit this machine alone", "cluster.md#security"
        else:
            continue
        yield advice(said, f"ports: [{address}]", more, key=("ports",), page=page)


def _unpublished(service: RawService, port: int | None, usual: int | str) -> Iterator[str]:
    inside = [each.inside for each in published(service)]
    if service.get("network_mode") == "host" or (inside and (port is None or port in inside)):
        return
    told = commanded_port(service)
    if inside:
        text = f"its port {port} is not among those published ({', '.join(map(str, inside))})"
        yield Diagnostic(text, write=f'ports: ["127.0.0.1::{port}"]', key=("ports",))
        return
    said = "its port is not published, so it can only be reached from the Docker host itself"
    yield advice(said, f'ports: ["127.0.0.1::{port or told or usual}"]', key=("ports",))


def external_caveats(url: str, *, key: str, compose: bool, profiles: tuple[str, ...]) -> Iterator[str]:
    """Warnings of what its owner hardly wants, with remedies. ``compose``: it stands in a Compose project."""
    if compose and not profiles:
        said, write = "a bare `docker compose up` would try to start it", "profiles: [elsewhere]"
        yield advice(said, write, f"add `{write}`", key=("profiles",))
    found = site(url)
    if key and not found.secure and found.host not in ("localhost", "127.0.0.1", "::1"):
        write = f"url: {url.replace('http:', 'https:', 1)}"
        said = f"its key and all prompts go to {found.name} unencrypted"
        yield advice(said, write, "use https", key=("x-anvil", "url"))
