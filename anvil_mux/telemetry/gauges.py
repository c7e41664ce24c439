"""The state at the moment of a scrape, as metric families.

Pure: everything comes from a ``Status``, from what was learned and from what was last seen of the GPUs. What
is not known has no sample.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from anvil_mux.host.seam import Seen, Sight
from anvil_mux.multiplexer.circuits import CIRCUIT_STATES
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.slot import TRANSITIONS
from anvil_mux.scheduler.status import BackendState, Status

STATES = sorted({state for state, _ in TRANSITIONS} | set(TRANSITIONS.values()))
NONE, SEVERAL = "none", "several"

Samples = dict[tuple[str, ...], float]
"""Values by the values of their labels."""


def of_models(status: Status) -> Iterator[Metric]:
    models = status.models
    inflight: Samples = {(m.model,): float(m.leases) for m in models}
    yield _gauge("anvil_inflight_requests", "Requests that hold a lease.", "model", inflight)
    queued: Samples = {(m.model,): float(m.waiting) for m in models}
    yield _gauge("anvil_queued_requests", "Requests that are queued.", "model", queued)
    states: Samples = {(m.model, state): float(m.offered_state == state) for m in models for state in STATES}
    yield _gauge("anvil_model_state", "1 for the state that the model is in.", "model state", states)
    far = [(m.model, m.progress.fraction) for m in models if m.progress]
    done: Samples = {(model,): fraction for model, fraction in far if fraction is not None}
    yield _gauge(
        "anvil_model_load_progress_ratio", "Progress of a load from 0 to 1, if known.", "model", done
    )
    backends = [backend for model in models for backend in model.backends]
    told = [backend for backend in backends if _is_told(backend)]
    states = {(b.backend, state): float(b.state == state) for b in told for state in STATES}
    yield _gauge("anvil_backend_state", "1 for the state that the backend is in.", "backend state", states)
    said = {b.backend: b.engine for b in backends if b.engine}
    loads = {name: each.load for name, each in said.items() if each.load}
    requests: Samples = {(name, "running"): float(load.running) for name, load in loads.items()}
    waiting = {name: load.waiting for name, load in loads.items() if load.waiting is not None}
    requests |= {(name, "waiting"): float(count) for name, count in waiting.items()}
    text = "Requests at the engine, as the engine reports them."
    yield _gauge("anvil_engine_requests", text, "backend state", requests)
    usage: Samples = {(name,): load.usage for name, load in loads.items() if load.usage is not None}
    text = "Fill level of the engine's KV cache, as the engine reports it."
    yield _gauge("anvil_engine_cache_usage_ratio", text, "backend", usage)
    ages: Samples = {(name,): each.age_seconds for name, each in said.items()}
    text = "Age of the figures that the engine reported last."
    yield _gauge("anvil_engine_figures_age_seconds", text, "backend", ages)


def _is_told(backend: BackendState) -> bool:
    """Whether the state of a backend is a series.

    On other hosts a model may have hundreds of backends, of which all but a few are always stopped.
    """
    return backend.host is None or backend.state != "stopped"


def of_gpus(status: Status, sight: Sight) -> Iterator[Metric]:
    gpus = status.gpus
    held: Samples = {(gpu.gpu,): float(len(gpu.residents)) for gpu in gpus}
    yield _gauge("anvil_gpu_residents", "Backends that hold the GPU.", "gpu", held)
    promised: Samples = {(gpu.gpu, model): 1.0 for gpu in gpus for model in gpu.reserved_for}
    yield _gauge(
        "anvil_gpu_reserved",
        "1 while the GPU is reserved for the model by a running swap.",
        "gpu model",
        promised,
    )
    seen = {gpu.gpu: sight.get(gpu.gpu, Seen()) for gpu in gpus}
    total = {gpu.gpu: gpu.total if seen[gpu.gpu].total is None else seen[gpu.gpu].total for gpu in gpus}
    yield _by_gpu("anvil_gpu_memory_total_bytes", "Memory of the GPU, if known.", total)
    used = {gpu: each.used for gpu, each in seen.items()}
    yield _by_gpu("anvil_gpu_memory_used_bytes", "Used memory of the GPU, whoever uses it.", used)
    reserve = {gpu.gpu: gpu.reserve for gpu in gpus}
    yield _by_gpu("anvil_gpu_memory_reserve_bytes", "Memory of the GPU that is kept free of models.", reserve)
    foreign = {gpu: sum(s.used or 0 for s in each.others) for gpu, each in seen.items() if gpu in sight}
    yield _by_gpu("anvil_gpu_memory_other_bytes", "Memory of the GPU that other processes hold.", foreign)
    kept = {gpu.gpu: sum(amount for _, amount in gpu.residuals) for gpu in gpus}
    yield _by_gpu(
        "anvil_gpu_memory_residual_bytes", "Memory of the GPU that backends in standby still hold.", kept
    )
    sensors = {gpu: each.sensors for gpu, each in seen.items()}
    busy = {gpu: each.utilization for gpu, each in sensors.items()}
    text = "Utilization of the GPU from 0 to 1, if it reports it."
    yield _by_gpu("anvil_gpu_utilization_ratio", text, busy)
    heat = {gpu: each.celsius for gpu, each in sensors.items()}
    yield _by_gpu("anvil_gpu_temperature_celsius", "Temperature of the GPU, if it reports it.", heat)
    power = {gpu: each.watts for gpu, each in sensors.items()}
    yield _by_gpu("anvil_gpu_power_watts", "Power draw of the GPU, if it reports it.", power)


def of_pause(status: Status) -> Iterator[Metric]:
    paused: Samples = {(): float(status.pause is not None)}
    yield _gauge("anvil_paused", "1 while anvil-mux is paused.", "", paused)


def of_hosts(status: Status, round_trips: Mapping[str, float]) -> Iterator[Metric]:
    """The hosts beside the one that anvil-mux runs on; ``round_trips``: seconds to each agent and back."""
    lost: Samples = {(host.host,): float(host.is_lost) for host in status.hosts}
    yield _gauge(
        "anvil_host_lost", "1 while the host is lost: neither its agent nor its engines answer.", "host", lost
    )
    away: Samples = {(host.host,): float(host.is_away) for host in status.hosts}
    text = "1 while the agent of the host does not answer but its engines do."
    yield _gauge("anvil_host_away", text, "host", away)
    drained: Samples = {(host.host,): float(host.is_drained) for host in status.hosts}
    yield _gauge("anvil_host_drained", "1 while the host is drained by hand.", "host", drained)
    trips: Samples = {(host,): seconds for host, seconds in round_trips.items()}
    text = "Last round-trip time to the agent of the host."
    yield _gauge("anvil_host_round_trip_seconds", text, "host", trips)


def of_circuits(circuits: Mapping[str, str]) -> Iterator[Metric]:
    """The circuits before servers elsewhere, by backend."""
    states: Samples = {
        (name, each): float(state == each) for name, state in circuits.items() for each in CIRCUIT_STATES
    }
    text = "1 for the state of the circuit before a server elsewhere."
    yield _gauge("anvil_circuit_state", text, "backend state", states)


def of_costs(costs: Iterable[Cost], models: Container[str]) -> Iterator[Metric]:
    """The costs of swaps; where there are several victims, only the dearest direction stands for all."""
    dearest: Samples = {}
    for cost in costs:
        source = cost.source if cost.source in models else SEVERAL if cost.source else NONE
        key = source, cost.target, cost.way
        dearest[key] = max(cost.seconds, dearest.get(key, 0.0))
    yield _gauge(
        "anvil_swap_cost_seconds", "Learned duration of a swap, without its drain.", "from to way", dearest
    )


def of_footprints(footprints: Iterable[Footprint]) -> Iterator[Metric]:
    held: Samples = {}
    kept: Samples = {}
    host: Samples = {}
    for each in footprints:  # the newest last
        held |= {(each.backend, gpu): float(amount) for gpu, amount in each.held.items()}
        if each.way != "stop":
            key = each.backend, each.way
            kept |= {(*key, gpu): float(amount) for gpu, amount in each.residual.items()}
            host[key] = float(each.host_bytes)
    text = "GPU memory that the backend held when it was last evicted."
    yield _gauge("anvil_backend_memory_bytes", text, "backend gpu", held)
    text = "GPU memory that the backend still held when it was last in standby."
    yield _gauge("anvil_backend_residual_bytes", text, "backend way gpu", kept)
    text = "Host memory that the backend held when it was last in standby."
    yield _gauge("anvil_backend_host_bytes", text, "backend way", host)


def _by_gpu(name: str, text: str, values: Mapping[str, float | None]) -> Metric:
    """A gauge by GPU, without those of which it is not known."""
    return _gauge(name, text, "gpu", {(gpu,): float(n) for gpu, n in values.items() if n is not None})


def _gauge(name: str, text: str, labels: str, values: Samples) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for key, value in values.items():
        family.add_metric(key, value)
    return family
