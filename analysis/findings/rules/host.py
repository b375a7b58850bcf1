"""Rules on the host: memory, NUMA nodes, threads."""

from ebbtide import host_limits
from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import (
    CPU_UPDATE,
    GPU,
    HOST_MEMORY,
    ITERATIONS,
    NUMA_NODES,
)
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import bytes_text, ms_text

# An update that takes less than this share of the iteration does not slow it down.
_MIN_SHARE = 0.1


@rule("too-few-threads", ITERATIONS, CPU_UPDATE)
def too_few_threads(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the threads of a rank with its share of the cores; torchrun sets
    OMP_NUM_THREADS=1."""
    update, iteration = metrics.phase_ms(UPDATE), metrics.iteration_ms
    if not update or not iteration or update < _MIN_SHARE * iteration:
        return None
    threads, cpu = metrics.entry.threads, metrics.trace.meta.host.cpu
    try:
        used, cores = int(str(threads.torch or threads.omp)), int(str(cpu.cores))
    except ValueError:
        return too_few_threads.unknown(
            "how many threads does the CPU update use, on how many cores?",
            "ebbtide profile records them; a log alone does not",
        )
    same_host = [
        r
        for r in metrics.trace.ranks
        if metrics.trace.rank(r).host == metrics.entry.host
    ]
    # Ranks that were not recorded may run on this host too.
    ranks = len(same_host) + metrics.world_size - len(metrics.trace.ranks)
    possible = max(cores // ranks, 1)
    if not host_limits.too_few_threads(used, possible, cpu.threads_per_core):
        return None
    evidence = (
        f"the update takes {ms_text(update)} on {used} "
        f"thread{'s' if used > 1 else ''} a rank",
        f"the job may use {cores} cores, {possible} a rank"
        + (f"; OMP_NUM_THREADS is {threads.omp}" if threads.omp else ""),
    )
    return too_few_threads.finding(
        "The CPU update runs on too few threads",
        clamp_gain(update * (1 - used / possible)),
        evidence,
        f"start the job with OMP_NUM_THREADS={possible} (torchrun sets 1 where it is "
        "not set)",
    )


# Libraries and the interpreter have less memory elsewhere.
_MIN_REMOTE_BYTES = 1 << 30
_MIN_REMOTE_SHARE = 0.1


@rule("remote-numa-node", GPU, NUMA_NODES)
def remote_numa_node(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the nodes of each rank's cores and memory with the node of its GPU."""
    nodes = [node for node in metrics.trace.meta.host.numa_nodes if node.cpus]
    if len(nodes) == 1:
        return None
    evidence = [
        line
        for rank in metrics.trace.ranks
        if (line := _remote(metrics, rank)) is not None
    ]
    if not evidence:
        # Files of other tools do not have the nodes, and only a job that was recorded
        # can be recorded again.
        if not metrics.is_recorded or all(
            _is_recorded(metrics, rank) for rank in metrics.trace.ranks
        ):
            return None
        return remote_numa_node.unknown(
            "are cores and memory on the NUMA node of the GPU?",
            "record a few seconds with `ebbtide profile`, on the host itself: virtual "
            "machines often hide the nodes",
        )
    return remote_numa_node.finding(
        "Ranks use cores or memory of another NUMA node than their GPU's",
        None,
        evidence,
        "start each rank on its GPU's node: torchrun --numa-binding=node, deepspeed "
        "--bind_cores_to_rank, or "
        "numactl --cpunodebind=N --preferred=N",
    )


def _is_recorded(metrics: JobMetrics, rank: int) -> bool:
    """Return whether the trace has the nodes of the GPU, the cores and the memory.

    The memory's node is not needed where all cores are there.
    """
    node, placement = (
        first_device(metrics.trace, rank).numa_node,
        metrics.trace.rank(rank).numa,
    )
    if node is None or placement is None or not placement.cpu_nodes:
        return False
    return placement.cpu_nodes == (node,) or bool(placement.memory_bytes)


def _remote(metrics: JobMetrics, rank: int) -> str | None:
    """Return what a rank uses of other nodes.

    Return None if that is too little to matter, or was not recorded.
    """
    node, placement = (
        first_device(metrics.trace, rank).numa_node,
        metrics.trace.rank(rank).numa,
    )
    if node is None or placement is None:
        return None
    total = sum(placement.memory_bytes.values())
    remote = total - placement.memory_bytes.get(str(node), 0)
    cores = f"its cores are on node {', '.join(map(str, placement.cpu_nodes))}"
    remarks = []
    if remote >= max(_MIN_REMOTE_BYTES, _MIN_REMOTE_SHARE * total):
        remarks.append(
            f"{bytes_text(remote)} of its {bytes_text(total)} of memory are on other "
            "nodes"
        )
    if placement.cpu_nodes and (node not in placement.cpu_nodes or remarks):
        remarks.append(cores)
    return (
        f"rank {rank}: its GPU is on NUMA node {node}; {', '.join(remarks)}"
        if remarks
        else None
    )


# Some pages of every process are in swap.
_MIN_SWAP_BYTES = 64 << 20
_FULL_SHARE = 0.97


@rule("swapping", HOST_MEMORY)
def swapping(metrics: JobMetrics) -> Finding | Unknown | None:
    """Check swap and host memory: with offloaded state in swap, every update reads from
    disk."""
    swap = metrics.pool_peak("swap")
    capacity = metrics.trace.meta.host.cpu.capacity_bytes
    used = metrics.pool_peak("host")
    if swap is not None and swap >= _MIN_SWAP_BYTES:
        return swapping.finding(
            "The host swaps",
            None,
            (f"up to {bytes_text(swap)} of a rank's memory are in swap",),
            "use less host memory: fewer ranks a host, fewer bytes of state, no "
            "pinned copies of the state",
        )
    if used is not None and capacity and used >= _FULL_SHARE * capacity:
        return swapping.finding(
            "The host's memory is full",
            None,
            (f"{bytes_text(used)} of {bytes_text(capacity)} are in use",),
            "use less host memory before the host begins to swap",
        )
    if swap is None and used is None and metrics.is_recorded:
        return swapping.unknown(
            "does the host swap?",
            "record with `ebbtide profile`, which reads each rank's swap",
        )
    return None


_NEAR_SHARE = 0.9
_SIGKILL = 9


@rule("host-memory-limit", HOST_MEMORY)
def host_memory_limit(metrics: JobMetrics) -> Finding | None:
    """Compare the memory in use in the job's control group, pinned memory included,
    with the limit."""
    meta = metrics.trace.meta
    limit, used = meta.host.memory_limit, metrics.pool_peak("cgroup")
    if not limit.bytes or used is None or used < _NEAR_SHARE * limit.bytes:
        return None
    evidence = [
        f"up to {bytes_text(used)} of {bytes_text(limit.bytes)} were in use "
        f"({used / limit.bytes:.0%})"
    ]
    pinned = metrics.pool_peak("pinned")
    if pinned:
        evidence.append(
            f"up to {bytes_text(pinned)} of a rank's memory were pinned by torch"
        )
    if meta.exit.signal == _SIGKILL:
        evidence.append(
            "the job was ended by signal 9, which the kernel sends where a group "
            "reaches its limit"
        )
    return host_memory_limit.finding(
        "Host memory is close to the limit of the job's control group",
        None,
        evidence,
        "raise the limit (memory of the container, --mem of Slurm), or use less: fewer "
        "ranks a host, fewer workers "
        "that load data, less pinned memory",
    )
