"""Records on which NUMA nodes the processes of a job run and have their memory."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.numa.topology import (
    NumaNode,
    cpus_text,
    nodes_of,
    read_allowed_cpus,
    read_memory_by_node,
    read_nodes,
)

# Memory is read so long after a process was first seen, then after twice the time: jobs
# allocate early.
_FIRST_S = 2.0
_MAX_INTERVAL_S = 120.0
# While the kernel counts the pages of a process, the process cannot map memory: at most
# this share of the time.
_MAX_COST_SHARE = 1e-3


def describe_nodes(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return the NUMA nodes of the host for a trace's metadata.

    Return an empty list if the host does not report them.
    """
    return [
        {
            "node": node.number,
            "cpus": cpus_text(node.cpus),
            "memory_bytes": node.memory_bytes,
        }
        for node in read_nodes(root)
    ]


@dataclass
class _Process:
    due_s: float
    interval_s: float = _FIRST_S
    placement: dict[str, Any] | None = None


class NumaReader:
    """Reads the placement of processes, and keeps it in a file per process.

    The files are in the folder of the spools. Placement of memory is read where the
    host has several nodes with cores; the largest reading counts, since a process that
    ends has released much. `root` holds `sys` and `proc`.
    """

    def __init__(
        self,
        directory: Path,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._root = root
        self._clock = clock
        self._nodes: tuple[NumaNode, ...] = tuple(
            node for node in read_nodes(root) if node.cpus
        )
        self._processes: dict[int, _Process] = {}

    def read(self, pid: int) -> None:
        """Read the placement of a process, if it is due."""
        process = self._processes.setdefault(pid, _Process(self._clock() + _FIRST_S))
        due = self._clock() >= process.due_s
        if process.placement is not None and not due:
            return
        cpus = read_allowed_cpus(pid, self._root)
        if not cpus or not self._nodes:
            return
        memory = self._read_memory(pid, process) if due else {}
        earlier = process.placement or {}
        if sum(memory.values()) < sum(earlier.get("memory_bytes", {}).values()):
            memory = earlier["memory_bytes"]
        placement = {
            "cpu_nodes": list(nodes_of(cpus, self._nodes)),
            "memory_bytes": memory,
        }
        if placement != process.placement:
            process.placement = placement
            self._write(pid, placement)

    def _read_memory(self, pid: int, process: _Process) -> dict[str, int]:
        begin_s = self._clock()
        sizes = (
            (read_memory_by_node(pid, self._root) or {}) if len(self._nodes) > 1 else {}
        )
        end_s = self._clock()
        process.due_s = end_s + max(
            process.interval_s, (end_s - begin_s) / _MAX_COST_SHARE
        )
        process.interval_s = min(2 * process.interval_s, _MAX_INTERVAL_S)
        # On a GH200, memory of the GPU is a node without cores.
        return (
            {str(node.number): sizes.get(node.number, 0) for node in self._nodes}
            if sizes
            else {}
        )

    def _write(self, pid: int, placement: dict[str, Any]) -> None:
        path = placement_file(self._directory, pid)
        unfinished = path.with_suffix(".new")
        try:
            unfinished.write_text(json.dumps(placement))
            unfinished.replace(path)
        except OSError:
            return  # a full disk: the placement is missing in the trace


def placement_file(directory: Path, pid: int) -> Path:
    """Return a process's placement file in the folder of the spools, with `cpu_nodes`
    and `memory_bytes` as in the metadata."""
    return directory / f"numa-{pid}.json"
