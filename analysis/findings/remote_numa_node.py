"""Finds ranks whose cores or memory are on another NUMA node than their GPU."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text

# Less memory elsewhere is that of libraries and of the interpreter.
_MIN_REMOTE_BYTES = 1 << 30
_MIN_REMOTE_SHARE = 0.1


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare the nodes of each rank's cores and memory with the node of its GPU."""
    if not metrics.has_gpu:
        return None
    nodes = [node for node in metrics.trace.meta.host.numa_nodes if node.cpus]
    if len(nodes) == 1:
        return None
    evidence = [line for rank in metrics.trace.ranks if (line := _remote(metrics, rank)) is not None]
    if not evidence:
        # Files of other tools do not have the nodes, and only a job that was recorded can be recorded again.
        if not metrics.is_recorded or all(_is_recorded(metrics, rank) for rank in metrics.trace.ranks):
            return None
        return Unknown(
            "remote-numa-node",
            "are cores and memory on the NUMA node of the GPU?",
            "record a few seconds with `ebbtide profile`, on the host itself: virtual machines often hide the nodes",
        )
    return Finding(
        "remote-numa-node",
        "Ranks use cores or memory of another NUMA node than their GPU's",
        None,
        tuple(evidence),
        "start each rank on its GPU's node: torchrun --numa-binding=node, deepspeed --bind_cores_to_rank, or "
        "numactl --cpunodebind=N --preferred=N",
    )


def _is_recorded(metrics: TraceMetrics, rank: int) -> bool:
    """Return whether the trace has the GPU's node, the cores' nodes, and (unless all cores are there) the memory's."""
    node, placement = first_device(metrics.trace, rank).numa_node, metrics.trace.rank(rank).numa
    if node is None or placement is None or not placement.cpu_nodes:
        return False
    return placement.cpu_nodes == (node,) or bool(placement.memory_bytes)


def _remote(metrics: TraceMetrics, rank: int) -> str | None:
    """Return what a rank uses of other nodes; None if that is too little to matter, or was not recorded."""
    node, placement = first_device(metrics.trace, rank).numa_node, metrics.trace.rank(rank).numa
    if node is None or placement is None:
        return None
    total = sum(placement.memory_bytes.values())
    remote = total - placement.memory_bytes.get(str(node), 0)
    cores = f"its cores are on node {', '.join(map(str, placement.cpu_nodes))}"
    remarks = []
    if remote >= max(_MIN_REMOTE_BYTES, _MIN_REMOTE_SHARE * total):
        remarks.append(f"{bytes_text(remote)} of its {bytes_text(total)} of memory are on other nodes")
    if placement.cpu_nodes and (node not in placement.cpu_nodes or remarks):
        remarks.append(cores)
    return f"rank {rank}: its GPU is on NUMA node {node}; {', '.join(remarks)}" if remarks else None
