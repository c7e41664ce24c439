"""Hosts and their GPUs, as they describe themselves and as compose files name and declare them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any, NamedTuple

from anvil_mux.config import kinds
from anvil_mux.config.kinds import (
    MEMORY,
    NAMES,
    TEXT,
    Diagnostic,
    ValueKind,
    Wrong,
    has_one_of,
    is_mapping,
    show,
    unfit,
)
from anvil_mux.config.values import COMMAND

LOCAL, ANY_HOST = "local", "any"
"""The names that files give to the host that anvil-mux runs on, and to every host."""
HOST_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
"""The pattern for names of hosts, which become parts of compose projects and files."""
ALL = "all"
"""How a service asks for every GPU of its host."""
WantedHosts = str | tuple[str, ...] | dict[str, str]
"""The hosts on which a service may run: ``ANY_HOST``, their names, or the labels that they have."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device slot, real (as its driver tells) or declared. Memory in bytes; ``vram`` None: unknown."""

    id: str
    vram: int | None = None
    reserve: int = 0
    """Bytes that are never given to a backend."""
    host: str = ""
    """The host that it is in; "": the one that anvil-mux runs on."""
    shared: int = 0
    """Bytes of its memory that are host memory as well."""
    file: str = ""
    """The device file by which a container is given it; "" for NVIDIA's, and where that is not known."""
    missing: str = ""
    """Why nothing can be loaded on it: the machine reports its GPUs, and this one is not among them."""

    @property
    def name(self) -> str:
        """The name that it has among the GPUs of all hosts."""
        return gpu_name(self.host, self.id)


def gpu_name(host: str, id: str) -> str:
    """A GPU's name among those of all hosts: its id alone on anvil-mux's own, ``HOST/ID`` elsewhere."""
    return f"{host}/{id}" if host else id


@dataclass(frozen=True, slots=True)
class Machine:
    """A host of the cluster, as it described itself or as the file describes it."""

    gpus: tuple[Gpu, ...] = ()
    host_memory: int | None = None
    """Bytes of its memory, of which engines get 9/10 unless the file says how much; None: not known."""
    address: str = ""
    """The address at which its engines are reached; "": not known, since it has never been there."""
    labels: tuple[tuple[str, str], ...] = ()
    is_own: bool = False
    """Whether it is the machine that anvil-mux runs on."""
    problem: str = ""
    """Why it is in the cluster and cannot be used; then nothing else is known of it."""


@dataclass(frozen=True, slots=True)
class Wake:
    """How a host is woken that is not there: by a packet to its network card, or by a command here."""

    mac: str = ""
    broadcast: str = "255.255.255.255"
    """The address to which the packet is sent."""
    run: tuple[str, ...] = ()
    """The command and its arguments; no shell."""
    timeout: float = 180.0
    """Seconds after which it is given up."""


class DeclaredMachine(NamedTuple):
    """A host as the file describes it; None: as it describes itself."""

    gpus: tuple[Gpu, ...] | None = None
    host_memory: int | None = None
    """Bytes of its memory for all engines there."""
    wake: Wake | None = None
    """How it is woken; None: it is not."""


# What there is, as the file declares it


HOST_MEMORY = kinds.positive(MEMORY)
_SIZES = kinds.record(dict, vram=MEMORY, reserve=MEMORY)


def _read_gpu(id: str, about: Any) -> Gpu:
    """A GPU; one that is described wrongly is there all the same, and its memory is not known."""
    if about is None:
        return Gpu(id)
    if not isinstance(about, dict):
        text = 'must hold its memory, as in gpus: {"0": {vram: 24GiB, reserve: 1GiB}}'
        raise Wrong([((), Diagnostic(text, value="{vram: 24GiB}"))], Gpu(id))
    gpu: Gpu = _SIZES.then(lambda sizes: Gpu(id, **sizes)).read(about)
    if gpu.vram is not None and gpu.vram <= gpu.reserve:
        text = "reserve leaves nothing of its vram"
        raise Wrong([((), Diagnostic(text, value="{vram: 24GiB, reserve: 1GiB}"))], Gpu(id))
    return gpu


GPUS = kinds.either(
    NAMES.called("list of ids").then(lambda ids: tuple(map(Gpu, ids))),
    kinds.by_name(
        _read_gpu,
        kinds.any_of(_SIZES.shape, kinds.NOTHING),
        "{id: {vram, reserve}}",
        '{"0": {vram: 24GiB}}',
    ).then(lambda gpus: tuple(gpus.values())),
)

_MAC = re.compile(r"[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5}")


def _read_mac(value: Any) -> str:
    if not isinstance(value, str) or not _MAC.fullmatch(value):
        raise unfit(f"must be six bytes as in aa:bb:cc:dd:ee:ff, not {show(value)}", '"aa:bb:cc:dd:ee:ff"')
    return value.lower().replace("-", ":")


def _read_ip4(value: Any) -> str:
    try:
        return str(IPv4Address(value))
    except ValueError:
        raise unfit(f"must be an IPv4 address, not {show(value)}", "192.168.1.255") from None


_WAKE = kinds.record(
    Wake,
    mac=ValueKind("MAC address", _read_mac, TEXT.shape),
    broadcast=ValueKind("IPv4 address", _read_ip4, TEXT.shape),
    run=COMMAND,
    timeout=kinds.positive(kinds.SECONDS),
).of(
    has_one_of("mac", "run"),
    "must hold either mac or run, as in {mac: aa:bb:cc:dd:ee:ff}",
    '{mac: "aa:bb:cc:dd:ee:ff"}',
)
_MACHINE = kinds.record(DeclaredMachine, gpus=GPUS, host_memory=HOST_MEMORY, wake=_WAKE).of(
    is_mapping, "must hold gpus, host_memory or wake", "{host_memory: 64GiB}"
)


def _read_machine(name: str, about: Any) -> Any:
    if name == LOCAL:
        raise ValueError("is anvil-mux's own machine: its gpus and host_memory go to the top level")
    _check_host(name)
    return _MACHINE.read({} if about is None else about)


MACHINES = kinds.by_name(
    _read_machine,
    kinds.any_of(_MACHINE.shape, kinds.NOTHING),
    "{host: {gpus, host_memory, wake}}",
    "{a-host: {host_memory: 64GiB}}",
).then(lambda machines: (machines, {name: each.wake for name, each in machines.items() if each.wake}))


# What a service asks for


def _read_gpu_ids(value: Any) -> tuple[str, ...]:
    """The ids of GPUs of one host, which are without its name."""
    ids: tuple[str, ...] = NAMES.read(value)
    named = [id.partition("/")[0] for id in ids if "/" in id]
    if hosts := [name for name in dict.fromkeys(named) if HOST_NAME.fullmatch(name)]:
        text = (
            f"asks for GPUs of {' and '.join(hosts)}: an engine runs on one host, which `hosts` names, "
            "and here are the ids of its GPUs alone"
        )
        raise unfit(text, '["0"]')
    return ids


def _read_used_gpus(value: Any) -> str | tuple[str, ...] | list[tuple[str, ...]]:
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        return [_read_gpu_ids(each) for each in value]
    return ALL if value == ALL else _read_gpu_ids(value)


USED_GPUS = ValueKind(
    "list of ids, or all",
    _read_used_gpus,
    kinds.any_of(NAMES.shape, {"type": "array", "items": NAMES.shape}),
)


def _read_hosts(value: Any) -> WantedHosts:
    if isinstance(value, dict) and value:
        return {TEXT.read(label): TEXT.read(each) for label, each in value.items()}
    names: tuple[str, ...] = NAMES.read(value or [])
    if names == (ANY_HOST,):
        return ANY_HOST
    if not names:
        raise unfit("must name a host, or any, or {label: value}", ANY_HOST)
    for name in names:
        _check_host(name)
    return names


HOSTS = ValueKind(
    "list of hosts, any, or {label: value}",
    _read_hosts,
    kinds.any_of(NAMES.shape, kinds.names_shape(TEXT.shape)),
)


def _check_host(name: str) -> None:
    if name == ANY_HOST:
        text = f"{ANY_HOST} means every host, so it is written alone: hosts: {ANY_HOST}"
        raise unfit(text, ANY_HOST)
    if not HOST_NAME.fullmatch(name):
        text = f"a host's name may hold lower-case letters, digits, - and _, not {show(name)}"
        mended = re.sub("[^a-z0-9_-]+", "-", str(name).lower()).strip("-_")
        raise unfit(text, mended)


_VRAM = MEMORY.but(
    lambda amount: not amount, "must be more than 0; leave it out if the model needs its GPU whole"
).then(lambda amount: (amount, False))
VRAM = kinds.or_word(_VRAM, "measured", (None, True))
"""How much memory a model needs on a GPU, and whether it is the one that was measured."""


# Other programs

_YIELD_EXAMPLE = "{when_others_hold: 4GiB}"
YIELD = (
    kinds.record(
        lambda when_others_hold=None: when_others_hold,
        when_others_hold=kinds.or_word(HOST_MEMORY, "any", 1),
    )
    .of(is_mapping, "must hold when_others_hold", _YIELD_EXAMPLE)
    .but(lambda least: least is None, "says not how much they hold", _YIELD_EXAMPLE)
    .called("{when_others_hold: size or any}")
)
"""The bytes of a GPU that other programs must hold to have it left to them."""
