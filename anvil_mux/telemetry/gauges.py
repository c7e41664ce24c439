"""The state at the moment of a scrape, as rows of metrics.

Pure: everything comes from a ``Status``, from what was learned and from what was last seen of the GPUs. What
is not known has no value.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from anvil_mux.host.seam import GpuUse, GpuUses
from anvil_mux.multiplexer.circuits import CIRCUIT_STATES
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.slot import STATES
from anvil_mux.scheduler.status import BackendState, Status

NONE, SEVERAL = "none", "several"

Labels = tuple[str, ...]


def gauge(name: str, text: str, labels: str, values: Mapping[Any, float | None]) -> Metric:
    """A row: its name, its text, the names of its labels, and its values by these; None: not known."""
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for of, value in values.items():
        if value is not None:
            family.add_metric(of, float(value))
    return family


def of_models(status: Status) -> Iterator[Metric]:
    models = status.models
    yield gauge(
        "anvil_inflight_requests",
        "Requests that hold a lease.",
        "model",
        {(m.model,): m.leases for m in models},
    )
    yield gauge(
        "anvil_queued_requests", "Requests that are queued.", "model", {(m.model,): m.waiting for m in models}
    )
    of_states = {(m.model, state): m.offered_state == state for m in models for state in STATES}
    yield gauge("anvil_model_state", "1 for the state that the model is in.", "model state", of_states)
    done = {(m.model,): m.progress.fraction for m in models if m.progress}
    text = "Progress of a load from 0 to 1, if known."
    yield gauge("anvil_model_load_progress_ratio", text, "model", done)
    backends = [backend for model in models for backend in model.backends]
    listed = [backend for backend in backends if _is_listed(backend)]
    of_states = {(b.backend, state): b.state == state for b in listed for state in STATES}
    yield gauge("anvil_backend_state", "1 for the state that the backend is in.", "backend state", of_states)
    figures = {backend.backend: backend.engine for backend in backends if backend.engine}
    loads = {name: each.load for name, each in figures.items() if each.load}
    requests: dict[Labels, float | None] = {}
    for name, load in loads.items():
        requests |= {(name, "running"): load.running, (name, "waiting"): load.waiting}
    text = "Requests at the engine, as the engine reports them."
    yield gauge("anvil_engine_requests", text, "backend state", requests)
    text = "Fill level of the engine's KV cache, as the engine reports it."
    usage = {(name,): load.usage for name, load in loads.items()}
    yield gauge("anvil_engine_cache_usage_ratio", text, "backend", usage)
    text = "Age of the figures that the engine reported last."
    ages = {(name,): each.age_seconds for name, each in figures.items()}
    yield gauge("anvil_engine_figures_age_seconds", text, "backend", ages)


def _is_listed(backend: BackendState) -> bool:
    """Whether the state of a backend is a series.

    On other hosts a model may have hundreds of backends, of which all but a few are always stopped.
    """
    return backend.host is None or backend.state != "stopped"


def of_gpus(status: Status, gpu_uses: GpuUses) -> Iterator[Metric]:
    gpus = status.gpus
    held = {(gpu.gpu,): len(gpu.residents) for gpu in gpus}
    yield gauge("anvil_gpu_residents", "Backends that hold the GPU.", "gpu", held)
    text = "1 while the GPU is reserved for the model by a running swap."
    reserved = {(gpu.gpu, model): 1.0 for gpu in gpus for model in gpu.reserved_for}
    yield gauge("anvil_gpu_reserved", text, "gpu model", reserved)
    uses = {gpu.gpu: gpu_uses.get(gpu.gpu, GpuUse()) for gpu in gpus}
    total = {(gpu.gpu,): gpu.total if uses[gpu.gpu].total is None else uses[gpu.gpu].total for gpu in gpus}
    yield gauge("anvil_gpu_memory_total_bytes", "Memory of the GPU, if known.", "gpu", total)
    used = {(gpu,): each.used for gpu, each in uses.items()}
    yield gauge("anvil_gpu_memory_used_bytes", "Used memory of the GPU, whoever uses it.", "gpu", used)
    text = "Memory of the GPU that is kept free of models."
    reserve = {(gpu.gpu,): gpu.reserve for gpu in gpus}
    yield gauge("anvil_gpu_memory_reserve_bytes", text, "gpu", reserve)
    text = "Memory of the GPU that other processes hold."
    foreign = {(gpu,): sum(s.used or 0 for s in each.others) for gpu, each in uses.items() if gpu in gpu_uses}
    yield gauge("anvil_gpu_memory_other_bytes", text, "gpu", foreign)
    text = "Memory of the GPU that backends in standby still hold."
    kept = {(gpu.gpu,): sum(amount for _, amount in gpu.residuals) for gpu in gpus}
    yield gauge("anvil_gpu_memory_residual_bytes", text, "gpu", kept)
    sensors = {(gpu,): each.sensors for gpu, each in uses.items()}
    text = "Utilization of the GPU from 0 to 1, if it reports it."
    busy = {gpu: each.utilization for gpu, each in sensors.items()}
    yield gauge("anvil_gpu_utilization_ratio", text, "gpu", busy)
    text = "Temperature of the GPU, if it reports it."
    yield gauge(
        "anvil_gpu_temperature_celsius", text, "gpu", {gpu: each.celsius for gpu, each in sensors.items()}
    )
    text = "Power draw of the GPU, if it reports it."
    yield gauge("anvil_gpu_power_watts", text, "gpu", {gpu: each.watts for gpu, each in sensors.items()})


def of_pause(status: Status) -> Iterator[Metric]:
    yield gauge("anvil_paused", "1 while anvil-mux is paused.", "", {(): status.pause is not None})


def of_hosts(status: Status, round_trips: Mapping[str, float]) -> Iterator[Metric]:
    """The hosts beside the one that anvil-mux runs on; ``round_trips``: seconds to each agent and back."""
    hosts = status.hosts
    text = "1 while the host is lost: neither its agent nor its engines answer."
    yield gauge("anvil_host_lost", text, "host", {(host.host,): host.is_lost for host in hosts})
    text = "1 while the host cannot be controlled, for whatever reason, and its engines answer."
    yield gauge("anvil_host_away", text, "host", {(host.host,): host.is_away for host in hosts})
    text = "1 while the host is drained by hand."
    yield gauge("anvil_host_drained", text, "host", {(host.host,): host.is_drained for host in hosts})
    text = "Last round-trip time to the agent of the host."
    trips = {(host,): seconds for host, seconds in round_trips.items()}
    yield gauge("anvil_host_round_trip_seconds", text, "host", trips)


def of_circuits(circuits: Mapping[str, str]) -> Iterator[Metric]:
    """The circuits before servers elsewhere, by backend."""
    text = "1 for the state of the circuit before a server elsewhere."
    states = {(name, each): state == each for name, state in circuits.items() for each in CIRCUIT_STATES}
    yield gauge("anvil_circuit_state", text, "backend state", states)


def of_costs(costs: Iterable[Cost], models: Container[str]) -> Iterator[Metric]:
    """The costs of swaps; where there are several victims, only the dearest direction stands for all."""
    dearest: dict[Labels, float] = {}
    for cost in costs:
        source = cost.source if cost.source in models else SEVERAL if cost.source else NONE
        key = source, cost.target, cost.way
        dearest[key] = max(cost.seconds, dearest.get(key, 0.0))
    text = "Learned duration of a swap, without its drain."
    yield gauge("anvil_swap_cost_seconds", text, "from to way", dearest)


def of_footprints(footprints: Iterable[Footprint]) -> Iterator[Metric]:
    held: dict[Labels, float] = {}
    kept: dict[Labels, float] = {}
    host: dict[Labels, float] = {}
    for each in footprints:  # the newest last
        held |= {(each.backend, gpu): amount for gpu, amount in each.held.items()}
        if each.way != "stop":
            key = each.backend, each.way
            kept |= {(*key, gpu): amount for gpu, amount in each.residual.items()}
            host[key] = each.host_bytes
    text = "GPU memory that the backend held when it was last evicted."
    yield gauge("anvil_backend_memory_bytes", text, "backend gpu", held)
    text = "GPU memory that the backend still held when it was last in standby."
    yield gauge("anvil_backend_residual_bytes", text, "backend way gpu", kept)
    text = "Host memory that the backend held when it was last in standby."
    yield gauge("anvil_backend_host_bytes", text, "backend way", host)
