"""Checks of cores, threads, NUMA nodes and the instruction set."""

import platform
import re
from collections.abc import Iterator

from ebbtide import host_limits
from ebbtide.features.doctor.check import Answer, check
from ebbtide.features.doctor.host import JobHost
from ebbtide.numa.topology import nodes_of, parse_cpus, read_text
from ebbtide.units import counted

# A rank needs one core for its Python and launches, and others for loading data and for
# updates on the CPU.
_MIN_RANK_CORES = 2
# Less than this share of the host's cores is worth a word.
_MIN_SHARE = 0.5


@check("cores")
def cores(host: JobHost) -> Iterator[Answer]:
    """Compare the cores that the job may use with its ranks, and the host's cores."""
    online = parse_cpus(read_text(host.root / "sys/devices/system/cpu/online") or "")
    total = max(len(online), len(host.cpus))
    text = (
        f"{host.cores} of {total} logical cores for {counted(host.ranks, 'rank')}, "
        f"{host.rank_cores} each"
    )
    remedy = (
        "docker run --cpus N --cpuset-cpus LIST, --cpus-per-task N of Slurm, "
        "limits.cpu of Kubernetes"
    )
    if host.rank_cores < _MIN_RANK_CORES:
        yield (
            "warning",
            f"{text}: launches, data loading and updates on the CPU take turns",
            f"give it more: {remedy}",
        )
    elif host.cores < _MIN_SHARE * total:
        by = "quota of its control group" if host.cores < len(host.cpus) else "affinity"
        yield (
            "warning",
            f"{text} ({by}): updates on the CPU run at {host.cores}/{total} of the "
            "host",
            remedy,
        )
    else:
        yield "ok", text


@check("threads")
def threads(host: JobHost) -> Iterator[Answer]:
    """Compare the threads of OpenMP with the cores of a rank.

    DeepSpeedCPUAdam uses these threads.
    """
    own, possible = host.job.threads, host.rank_cores
    own_text = f"ebbtide's own update takes {possible} whatever it is"
    remedy = f"OMP_NUM_THREADS={possible} in the environment of the job"
    if own is None and not host.job.launcher and host.ranks > 1:
        yield (
            "warning",
            "OMP_NUM_THREADS is not set: torchrun starts each rank with 1 thread on "
            f"{possible} cores (17.2 s for "
            "a CPU step of 1.8 s in a case of Megatron-LM)",
            remedy,
        )
    elif own is None and host.ranks > 1:
        each = max(1, len(host.cpus) // 2)
        text = (
            f"each of {host.ranks} ranks starts {each} threads or more on {possible} "
            "cores"
        )
        yield "warning", f"OMP_NUM_THREADS is not set: {text}", remedy
    elif own is not None and host_limits.too_few_threads(
        own, possible, host_limits.threads_per_core(host.root)
    ):
        by = (
            "OMP_NUM_THREADS"
            if host.job.environment.get("OMP_NUM_THREADS")
            else f"default of {host.job.launcher}"
        )
        yield (
            "warning",
            f"{counted(own, 'thread')} a rank ({by}) on {possible} cores: "
            "DeepSpeedCPUAdam runs at about "
            f"{own}/{possible} of its speed; {own_text}",
            remedy,
        )
    elif own is not None and own * host.ranks > 2 * host.cores:
        where = f"for {counted(host.ranks, 'rank')} on {host.cores} cores"
        text = f"OMP_NUM_THREADS={own} {where}: threads wait for each other"
        yield "warning", text, remedy
    else:
        yield (
            "ok",
            f"{own or possible} a rank for OpenMP (DeepSpeedCPUAdam); {own_text}",
        )


@check("numa")
def numa(host: JobHost) -> Iterator[Answer]:
    """Check whether ranks are bound to the one of several NUMA nodes with their GPU."""
    nodes = host.nodes
    if not nodes:
        yield (
            "unknown",
            "the host does not report NUMA nodes (virtual machines often hide them)",
        )
        return
    used = nodes_of(host.cpus, nodes)
    if len(nodes) == 1:
        yield "ok", "one NUMA node"
    elif host.job.binds_ranks or len(used) == 1:
        yield (
            "ok",
            f"bound to nodes {', '.join(map(str, used))}"
            if len(used) == 1
            else "the command binds its ranks",
        )
    else:
        homes = [str(card.node) for card in host.cards if card.node is not None]
        where = f"; the GPUs are on {', '.join(homes)}" if homes else ""
        command = " ".join(host.job.words) or "torchrun --nproc-per-node N train.py"
        yield (
            "warning",
            f"{len(nodes)} NUMA nodes, and ranks are bound to none{where}: memory and "
            "threads of another node slow "
            "copies and updates (ebbtide binds its own)",
            f'ebbtide doctor --launch "{command}"',
        )


@check("instruction-set")
def instruction_set(host: JobHost) -> Iterator[Answer]:
    """Check the vector instructions that CPU Adams are built for."""
    match = re.search(
        r"^(?:flags|Features)\s*:(.*)$", host.text("proc/cpuinfo"), re.MULTILINE
    )
    flags = set(match[1].split()) if match else set()
    instructions = next(
        (name for name in ("avx512f", "avx2", "sve", "asimd") if name in flags), None
    )
    if instructions is not None:
        name = instructions.removesuffix("f").upper()
        yield (
            "ok",
            f"{name} for DeepSpeedCPUAdam; ebbtide compiles its loops for this CPU",
        )
    elif flags:
        text = (
            "neither AVX2 nor AVX-512: DeepSpeedCPUAdam falls back to loops over "
            "single values"
        )
        yield (
            "warning",
            text,
            "let the virtual machine pass the CPU through (-cpu host of QEMU)",
        )
    else:
        yield (
            "unknown",
            f"the kernel does not list the instructions of this {platform.machine()}",
        )
