"""The candidates of a service: each choice of a host on which it may run, and of GPUs there, is a backend.

A service that names no hosts runs where anvil-mux runs. One that needs any N GPUs may have each aligned block
of N of a host, in the order of its GPUs (0-1, 2-3, ...): blocks never overlap, so that GPU groups stay small.

Hosts that are named but not there have their candidates all the same: a model that nobody can serve now is
not a model that does not exist. The same holds for GPUs that a machine does not report, unless the file
itself says which it has: such a GPU may have failed, or its driver may not be loaded yet.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from anvil_mux.config.kinds import Diagnostic, KeyPath, advice, as_yaml, gib, meant
from anvil_mux.config.machines import (
    ALL,
    ANY_HOST,
    HOST_NAME,
    LOCAL,
    DeclaredMachine,
    Gpu,
    Machine,
    WantedHosts,
)
from anvil_mux.config.reading import Problems
from anvil_mux.config.service import ALL_THERE_ARE, GivenGpus, of_vendors, vendor_of

SHOWN = 10
"""How many names a warning shows."""
STEM = re.compile(r"(?:[0-9]+|(?<=[-_.])[a-z])$")
"""The number or letter at the end of a host's name that tells it from others of its kind."""
Need = str | tuple[str, ...] | int | GivenGpus
"""The GPUs that a service needs: ``ALL``, ``ALL_THERE_ARE``, these, any so many, or those given by files."""


class HostChoice(NamedTuple):
    """One choice of a host and of GPUs there."""

    name: str
    """The name of the backend."""
    host: str
    gpus: tuple[str, ...]
    alone: bool = True
    """Whether it is its service's only one on its host."""


class GpusMissing(ValueError):
    """A machine reports fewer GPUs than a service needs. ``gpus``: those that the service would have."""

    def __init__(self, text: str, gpus: tuple[str, ...]) -> None:
        super().__init__(text)
        self.gpus = gpus


class Places:
    """The hosts there are, anvil-mux's own among them, and what services may have of them.

    ``declared``: the GPUs of this machine by the file, ``present``: by their driver, under id and UUID.
    ``hosts``: the cluster, as its hosts describe themselves. ``machines``: other hosts by the file.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        declared: Sequence[Gpu],
        present: Mapping[str, Gpu],
        hosts: Mapping[str, Machine],
        machines: Mapping[str, DeclaredMachine],
    ) -> None:
        self._problems = problems
        self._present = present
        self._declared = {gpu.id: gpu for gpu in map(self._known, declared)}
        named = {name: machine for name, machine in hosts.items() if self._is_name(name)}
        self.cluster = {name: machine for name, machine in named.items() if not machine.problem}
        self.own_names = [name for name, machine in self.cluster.items() if machine.is_own]
        """The names under which this machine is in the cluster as well."""
        self._unusable = {name: machine.problem for name, machine in named.items() if machine.problem}
        self._machines = machines
        self._gpus = {name: self._gpus_of_machine(name) for name in dict.fromkeys((*self.cluster, *machines))}
        here = {gpu.id: gpu for gpu in present.values()}
        self._gpus[""] = self._declared or here or None
        self.here = tuple(self._gpus[""] or ())
        """The ids of the GPUs of this machine that may be used, as far as they are known."""
        self.all_present = tuple(of_vendors(here, ()))
        """The ids of the GPUs that Docker gives here to a container that asks for all; (): unknown."""
        self._absent: dict[str, list[str]] = {}
        """Host that is not there -> the services that name it."""

    # What there is

    def address(self, host: str) -> str:
        """The address of a host's engines; "" where it has never been there."""
        return self.cluster[host].address if host in self.cluster else ""

    def gpus(self, used: Mapping[str, Collection[str]]) -> Iterator[Gpu]:
        """All GPUs that are declared or reported, and those that are used. ``used``: host -> ids."""
        for host, ids in sorted(used.items()):
            found = self._declared if not host else self._gpus.get(host) or {}
            unknown = sorted(set(ids) - set(found), key=lambda id: (len(id), id))
            yield from found.values()
            for gpu in (self._known(Gpu(id)) if not host else Gpu(id, host=host) for id in unknown):
                yield replace(gpu, missing=self._why_missing(gpu))

    def _why_missing(self, gpu: Gpu) -> str:
        """Why a GPU cannot be used; "" if it is there, or if it is not known which there are."""
        known = self._gpus.get(gpu.host)
        if known is None or gpu.id in known or self._is_declared(gpu.host) or gpu.id.startswith("MIG"):
            return ""
        where = f"the host {gpu.host}" if gpu.host else "this machine"
        return f"{where} has no GPU {gpu.id}; it has {', '.join(known) or 'none'}"

    def _is_declared(self, host: str) -> bool:
        """Whether the file says which GPUs a machine has."""
        if not host:
            return bool(self._declared)
        return self._machines.get(host, DeclaredMachine()).gpus is not None

    def memory(self) -> dict[str, int]:
        """Host -> bytes of its memory for all engines there, where that is known."""
        found: dict[str, int] = {}
        for name in dict.fromkeys((*self.cluster, *self._machines)):
            declared = self._machines.get(name, DeclaredMachine()).host_memory
            reported = self.cluster[name].host_memory if name in self.cluster else None
            if declared is not None or reported is not None:
                found[name] = (reported or 0) * 9 // 10 if declared is None else declared
        return found

    def _gpus_of_machine(self, name: str) -> dict[str, Gpu] | None:
        reported = {gpu.id: gpu for gpu in self.cluster[name].gpus} if name in self.cluster else None
        declared = self._machines.get(name, DeclaredMachine()).gpus
        if declared is None:
            return reported and {id: replace(gpu, host=name) for id, gpu in reported.items()}
        known = {gpu.id: (reported or {}).get(gpu.id, Gpu(gpu.id)) for gpu in declared}
        return {gpu.id: _described(known[gpu.id], gpu, name) for gpu in declared}

    def _known(self, gpu: Gpu) -> Gpu:
        """A GPU of this machine under its own id, with its real memory where none is declared."""
        real = self._present.get(gpu.id) or self._abbreviated(gpu.id)
        return gpu if real is None else _described(real, gpu)

    def _abbreviated(self, id: str) -> Gpu | None:
        """The one GPU of this machine whose UUID begins so; CUDA and Docker accept that."""
        fitting = {gpu.id: gpu for name, gpu in self._present.items() if name.startswith(id)}
        return next(iter(fitting.values())) if id.startswith("GPU-") and len(fitting) == 1 else None

    def _is_name(self, name: str) -> bool:
        fit = HOST_NAME.fullmatch(name) is not None and name not in (LOCAL, ANY_HOST)
        if not fit:
            text = (
                f"the host {name} of the cluster is left out: a name may hold lower-case letters, digits, - "
                f"and _, and is neither {LOCAL} nor {ANY_HOST}"
            )
            self._problems.warnings.append(Diagnostic(text, page="cluster.md#in-the-file"))
        return fit

    # Candidates

    def candidates(
        self,
        name: str,
        wanted: WantedHosts | None,
        need: Need,
        vram: int | None,
        vendors: Sequence[str] = (),
    ) -> list[HostChoice]:
        """The candidates of a service; none where its file has a problem, which is noted.

        ``vendors``: those whose GPUs it takes where it names none; (): NVIDIA's, if there are any.
        """
        if wanted is None:
            return self._only_here(name, need, vram, vendors)
        found: list[HostChoice] = []
        incomplete: list[HostChoice] = []
        lacking: list[str] = []
        for host in self._matching(wanted, need):
            try:
                choices = self._choices(host, need, vram, vendors)
            except ValueError as error:
                lacking.append(f"{host or LOCAL} {error}")
                if isinstance(error, GpusMissing):
                    incomplete += _named(name, host, [error.gpus], need)
                continue
            found += _named(name, host, choices, need)
            if host and not self.address(host):
                self._absent.setdefault(host, []).append(name)
        if incomplete and not found and wanted != ANY_HOST:
            self._problems.warn(_hosts_key(name), f"cannot be loaded now: {_shown(lacking)}")
            found = incomplete
        elif lacking and not found and isinstance(wanted, tuple):
            self._problems.add(_hosts_key(name), f"fits nowhere: {_shown(lacking)}")
        elif lacking and wanted != ANY_HOST:
            self._problems.warn(_hosts_key(name), f"fits on some hosts only: {_shown(lacking)}")
        return found if found or isinstance(wanted, tuple) else self._nowhere(name, wanted, need)

    def _only_here(self, name: str, need: Need, vram: int | None, vendors: Sequence[str]) -> list[HostChoice]:
        if not isinstance(need, int):
            return [HostChoice(name, "", self.used_here(name, need, vendors))]
        try:
            return _named(name, "", self._choices("", need, vram, vendors), need)
        except ValueError as error:
            key = ("services", name, "x-anvil", "gpu_count")
            write = f"gpu_count: {len(self.here)}" if 0 < len(self.here) < need else ""
            if isinstance(error, GpusMissing):
                self._problems.warn(key, f"cannot be loaded now: this machine {error}", write)
                return _named(name, "", [error.gpus], need)
            self._problems.add(key, f"this machine {error}", write)
            return []

    def _nowhere(self, name: str, wanted: str | dict[str, str], need: Need) -> list[HostChoice]:
        """A candidate on a host that is never there, since none is as wanted."""
        host = wanted if isinstance(wanted, str) else ",".join(f"{k}={v}" for k, v in wanted.items())
        self._absent.setdefault(host, []).append(name)
        return _named(name, host, [_unknown(need)], need)

    def _matching(self, wanted: WantedHosts, need: Need) -> Sequence[str]:
        """The hosts that are meant, whether they have the GPUs or not; ``""`` is this one."""
        if isinstance(wanted, tuple):
            return ["" if name == LOCAL else name for name in wanted]
        if isinstance(wanted, dict):
            labels = set(wanted.items())
            return sorted(name for name, each in self.cluster.items() if labels <= set(each.labels))
        known = sorted({*self.cluster, *self._machines})
        if need == ():
            return ["", *known]
        is_meant = not self.own_names and (self.here or need == ALL_THERE_ARE)
        return ["", *known] if is_meant else known

    def _choices(
        self, host: str, need: Need, vram: int | None, vendors: Sequence[str]
    ) -> list[tuple[str, ...]]:
        """The choices of GPUs on a host; ValueError says why there is none."""
        known = self._gpus.get(host)
        if not need:
            return [()]
        if need == ALL_THERE_ARE:
            return [tuple(of_vendors(known or (), vendors))]
        if isinstance(need, GivenGpus) and (known is not None or not host):
            return [self._given(host, need)]
        if known is None and not host and need == ALL:
            raise ValueError('has GPUs that are not known: declare them, x-anvil: {gpus: ["0"]}')
        if known is None:
            return [_unknown(need)]
        if isinstance(need, int):
            usable = {id: known[id] for id in of_vendors(known, vendors)}
            vendor = next(map(vendor_of, usable), next(iter(vendors), ""))
            return self._blocks_on(host, usable, need, vram, vendor)
        if need == ALL and not known:
            raise self._lack(host, "has no GPU", _unknown(need))
        assert not isinstance(need, GivenGpus)
        ids = tuple(of_vendors(known, vendors)) if need == ALL else self._ids(host, need)
        if missing := [id for id in ids if id not in known]:
            text = f"has no GPU {', '.join(missing)}; it has {', '.join(known) or 'none'}"
            raise self._lack(host, text, ids)
        return [ids]

    def _blocks_on(
        self, host: str, known: Mapping[str, Gpu], count: int, vram: int | None, vendor: str
    ) -> list[tuple[str, ...]]:
        """Return the blocks of so many GPUs of a host; ValueError says why there is none.

        ``known``: the GPUs of the one ``vendor`` there.
        """
        try:
            return _blocks(known, count, vram)
        except ValueError as error:
            ids = (f"{vendor}{index}" for index in itertools.count())
            large = (id for id in ids if not _too_small(known.get(id, Gpu(id)), vram))
            raise self._lack(host, str(error), tuple(itertools.islice(large, count))) from None

    def _lack(self, host: str, text: str, gpus: tuple[str, ...]) -> ValueError:
        """Return the error for GPUs that are not there; where the file says which there are it is wrong."""
        return ValueError(text) if self._is_declared(host) else GpusMissing(text, gpus)

    def _given(self, host: str, given: GivenGpus) -> tuple[str, ...]:
        """The GPUs of a host that a service is given by device files, of those that may be used."""
        known = self._gpus.get(host) or {}
        if not given.ids:
            return tuple(of_vendors(known, given.vendors))
        by_file = {gpu.file: id for id, gpu in known.items() if gpu.file}
        ids = [by_file.get(id, id) for id in (given.ids if host else self._ids("", given.ids))]
        return tuple(dict.fromkeys(id for id in ids if id in known))

    def files(self, choice: HostChoice) -> tuple[str, ...]:
        """The device files of the GPUs of a choice; "" for those that have none, or none that is known."""
        known = self._gpus.get(choice.host) or {}
        return tuple(known[id].file if id in known else "" for id in choice.gpus)

    def used_here(
        self, name: str, used: str | tuple[str, ...] | GivenGpus, vendors: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """The GPUs of this machine that a service names, or is given."""
        if isinstance(used, GivenGpus):
            return self._given("", used)
        if used in (ALL, ALL_THERE_ARE):
            if not self.here and used == ALL:
                said, write = "uses all GPUs; say which there are at the top level", 'x-anvil: {gpus: ["0"]}'
                found = advice(said, write, write, joint=": ", page="gpus.md#supported-gpus")
                self._problems.add(("services", name), found)
            return tuple(of_vendors(self.here, vendors))
        ids = self._ids("", used)
        for id in ids:
            if not self.here or id in self.here or (id.startswith("MIG") and not self._declared):
                continue
            key, write = ("services", name, "x-anvil", "gpus"), f"gpus: {as_yaml([self.here[0]])}"
            known = ", ".join(self.here)
            if self._declared:
                self._problems.add(key, f"GPU {id} is not declared; declared: {known}", write)
            else:
                self._problems.warn(key, f"this machine has no GPU {id}; it has {known}", write)
        return ids

    def find_here(self, given: tuple[str, ...] | GivenGpus) -> tuple[str, ...]:
        """Return the ids on this machine of GPUs that a container is given."""
        return self._given("", given) if isinstance(given, GivenGpus) else self._ids("", given)

    def _ids(self, host: str, used: Sequence[str]) -> tuple[str, ...]:
        """The ids of GPUs that a service may name by UUID, on this machine."""
        return tuple(dict.fromkeys(id if host else self._known(Gpu(id)).id for id in used))

    # What is not there

    def tell_absent(self) -> None:
        """Warn of services that wait for hosts which are not there."""
        if not (self.cluster or self._unusable or self._machines):
            names = list(dict.fromkeys(name for names in self._absent.values() for name in names))
            if names:
                text = f"served there once serve is started with --cluster: {_shown(names)}"
                self._problems.warn(_hosts_key(names[0]), text)
            return
        waiting: dict[tuple[str, ...], list[str]] = {}
        for host, names in self._absent.items():
            if why := self._unusable.get(host):
                text = f"cannot be used now: {host} ({why}); {_shown(names)} wait for that"
                self._problems.warn(_hosts_key(names[0]), text)
            elif self.cluster or host not in self._machines:
                waiting.setdefault(tuple(names), []).append(host)
        for services, hosts in waiting.items():
            text = f"not in the cluster: {_shown(hosts)}; {_shown(services)} wait for that"
            near = ""
            if len(hosts) == 1 and HOST_NAME.fullmatch(hosts[0]) and hosts[0] != ANY_HOST:
                text += "; no host of that name has answered yet"
                if self.cluster:
                    text += f"; known hosts: {_shown([*self.cluster])}"
                if near := self._misspelt(hosts[0]):
                    text += f"; did you mean {near}?"
            self._problems.warn(_hosts_key(services[0]), text, f"hosts: {near}" if near else "")

    def _misspelt(self, host: str) -> str:
        """Return the host whose name may be meant by one that was never seen; "" if none is.

        Names that the file describes, and those that only have another number or letter at their end, are
        hosts that are not there.
        """
        others = [each for each in self.cluster if STEM.sub("", each) != STEM.sub("", host)]
        return "" if host in self._machines else meant(host, others)


def _hosts_key(name: str) -> KeyPath:
    return ("services", name, "x-anvil", "hosts")


def _shown(names: Sequence[str]) -> str:
    """The names, or the first of many."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _unknown(need: Need) -> tuple[str, ...]:
    """The GPUs of a host of which nothing is known."""
    if isinstance(need, int):
        return tuple(str(index) for index in range(need))
    if isinstance(need, GivenGpus):
        return (f"{need.vendors[0]}0",)
    return ("0",) if need == ALL else () if need == ALL_THERE_ARE else tuple(need)


def _blocks(known: Mapping[str, Gpu], count: int, vram: int | None) -> list[tuple[str, ...]]:
    """The aligned blocks of so many GPUs, without those with a GPU that is too small."""
    if len(known) < count:
        raise ValueError(f"has {len(known) or 'no'} GPU{'s'[: len(known) != 1]}, and {count} are needed")
    ids = tuple(known)
    blocks = [ids[at : at + count] for at in range(0, len(ids) - count + 1, count)]
    fit = [block for block in blocks if not any(_too_small(known[id], vram) for id in block)]
    if not fit:
        raise ValueError(f"has no GPU that {gib(vram or 0)} fit")
    return fit


def _described(real: Gpu, declared: Gpu, host: str = "") -> Gpu:
    """A GPU as the file declares it, and as it reports itself where the file does not say."""
    return replace(real, vram=declared.vram or real.vram, reserve=declared.reserve, host=host)


def _too_small(gpu: Gpu, vram: int | None) -> bool:
    return bool(gpu.vram and vram and vram > gpu.vram - gpu.reserve)


def _named(name: str, host: str, choices: Sequence[tuple[str, ...]], need: Need) -> list[HostChoice]:
    """Name a service's candidates on a host: SERVICE, SERVICE.HOST, SERVICE.GPUS or SERVICE.HOST.GPUS."""
    alone = len(choices) == 1
    by_gpus = isinstance(need, int) and bool(host or not alone)
    return [
        HostChoice(".".join(filter(None, (name, host, as_name(gpus) if by_gpus else ""))), host, gpus, alone)
        for gpus in choices
    ]


def as_name(gpus: Sequence[str]) -> str:
    """GPUs as a part of a name, which may hold no more than a service's name."""
    return re.sub(r"[^a-zA-Z0-9._-]", "_", "-".join(gpus))
