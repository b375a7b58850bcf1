"""The line that starts a job with each rank on its own cores of its GPU's NUMA node,
with a thread for each.

Launchers bind ranks in ways of their own, or not at all, and not without a GPU. So the
launcher starts, in place of Python, a shell that looks up the rank's cores and binds
itself by `numactl`, or by `taskset` where that is missing; its memory is then on the
node that it runs on.
"""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.features.doctor.host import JobHost
from ebbtide.features.doctor.job import LAUNCHERS
from ebbtide.numa.topology import cpus_text, node_cpus, parse_cpus, read_text


@dataclass(frozen=True)
class RankBinding:
    """The place of a rank: logical cores, threads of OpenMP, and the NUMA node of its
    memory (None: any)."""

    cpus: frozenset[int]
    threads: int
    node: int | None


def rank_bindings(host: JobHost) -> list[RankBinding]:
    """Return the binding of each rank to an even share of the cores of its GPU's node,
    or of all nodes if that is not known."""
    ranks = host.ranks
    nodes = [node.number for node in host.nodes if node.cpus & host.cpus]
    homes: list[int | None] = []
    for rank in range(ranks):
        node = host.cards[rank].node if rank < len(host.cards) else None
        homes.append(
            node
            if node in nodes
            else nodes[rank * len(nodes) // ranks]
            if nodes
            else None
        )
    quota = host_limits.within_quotas(len(host.cpus), host.root) / max(
        1, len(host.cpus)
    )
    bindings = []
    for rank, home in enumerate(homes):
        cpus = host.cpus if home is None else node_cpus(home, host.root) & host.cpus
        cores = _cores(cpus, host.root)
        sharing = homes.count(home)
        number = homes[:rank].count(home)
        share = cores[
            number * len(cores) // sharing : (number + 1) * len(cores) // sharing
        ] or [cores[number % len(cores)]]
        own = frozenset().union(*share)
        bindings.append(
            RankBinding(
                own, max(1, int(len(share) * quota)), home if len(nodes) > 1 else None
            )
        )
    return bindings


def launch_line(host: JobHost) -> str:
    """Return the line that starts the job of a host with its ranks bound. Raises
    UserError for unknown launchers."""
    job, bindings = host.job, rank_bindings(host)
    variables = [
        f"{name}={shlex.quote(value)}"
        for name, value in job.variables
        if name != "OMP_NUM_THREADS"
    ]
    start = [
        *variables,
        f"OMP_NUM_THREADS={min(binding.threads for binding in bindings)}",
    ]
    if job.launcher is None:
        if len(bindings) > 1:
            raise UserError(
                f"the ranks of {job.words[0]} cannot be bound: name a command of "
                "torchrun, accelerate or deepspeed"
            )
        (binding,) = bindings
        return " ".join(
            [
                *start,
                _binder(cpus_text(binding.cpus), binding.node),
                shlex.join(job.words),
            ]
        )
    launcher = LAUNCHERS[job.launcher]
    options, program = launcher.split(job.words)
    cores = " ".join(cpus_text(binding.cpus) for binding in bindings)
    nodes = " ".join(
        str(binding.node) for binding in bindings if binding.node is not None
    )
    script = f"c=({cores}); "
    if nodes:
        script += f"n=({nodes}); "
    script += (
        f"exec {_binder('${c[LOCAL_RANK]}', '${n[LOCAL_RANK]}' if nodes else None)} "
        f'"$@"{launcher.last_argument}'
    )
    return " ".join(
        [
            *start,
            shlex.join(options),
            f"bash -c {shlex.quote(script)} rank",
            shlex.join(program),
        ]
    )


def _binder(cpus: str, node: int | str | None) -> str:
    """Return the words that bind a program to cores, and its memory to a node."""
    if shutil.which("numactl") is None:
        return f"taskset -c {cpus}"
    return f"numactl --physcpubind={cpus}" + (
        f" --preferred={node}" if node is not None else ""
    )


def _cores(cpus: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Return logical cores by core: those that share one."""
    siblings = {
        parse_cpus(
            read_text(
                root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            )
            or str(cpu)
        )
        & cpus
        for cpu in cpus
    }
    return sorted(siblings, key=min)
