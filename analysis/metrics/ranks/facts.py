"""Lists what is recorded of a rank's process and device, to see in what it is unlike the others."""

from __future__ import annotations

from collections import Counter

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import first_device
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

# A value is the usual one if more than this share of the ranks has it.
_USUAL_SHARE = 0.5


def unusual_facts(trace: Trace, rank: int) -> tuple[str, ...]:
    """Return the facts in which a rank is unlike more than half of the ranks, as in `link lanes 8 (usual: 16)`."""
    usual = _usual_facts(trace)
    own = _facts(trace, rank)
    return tuple(
        f"{name} {own[name]} (usual: {usual[name]})" for name in own if own[name] != usual.get(name, own[name])
    )


@once_per_trace
def _usual_facts(trace: Trace) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for rank in trace.ranks:
        for name, value in _facts(trace, rank).items():
            counts.setdefault(name, Counter())[value] += 1
    most = {name: values.most_common(1)[0] for name, values in counts.items()}
    return {name: value for name, (value, count) in most.items() if count > _USUAL_SHARE * len(trace.ranks)}


def _facts(trace: Trace, rank: int) -> dict[str, str]:
    """Return the facts of a rank that were recorded."""
    entry, device = trace.rank(rank), first_device(trace, rank)
    cores = entry.numa.cpu_nodes if entry.numa is not None else ()
    on_gpu_node = None if device.numa_node is None or not cores else device.numa_node in cores
    facts = {
        "device": device.name,
        "device memory": None if device.capacity_bytes is None else bytes_text(device.capacity_bytes),
        "link lanes": device.link.width,
        "link generation": device.link.generation,
        "driver": device.driver,
        "cores on the GPU's NUMA node": None if on_gpu_node is None else ("yes" if on_gpu_node else "no"),
        "threads": entry.threads.torch,
        "torch": entry.torch,
        "parameters": entry.model.params,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}
