"""Invented hosts, healthy but for what a test changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.features.doctor.host import Card, JobHost
from ebbtide.features.doctor.job import read_job
from tests.numa_hosts import numa_host, write_process
from tests.test_host_limits import host as write_host

GIB = 2**30
NODES = {
    1: {0: "0-15"},
    2: {0: "0-15", 1: "16-31"},
    8: {node: f"{4 * node}-{4 * node + 3}" for node in range(8)},
}


def card(
    number: int, node: int | None = 0, width: int | None = 16, **device: Any
) -> Card:
    link = {
        "generation": 1,
        "width": width,
        "max_generation": 4,
        "max_width": 16,
        "peak_bytes_per_s": 31.5e9,
    }
    facts = {
        "index": number,
        "name": "NVIDIA Mock",
        "uuid": f"GPU-{number}",
        "capacity_bytes": 80 * GIB,
        "link": link,
    }
    return Card(facts | device, node, None)


def make_host(
    root: Path,
    command: Sequence[str] = ("python", "train.py"),
    nodes: Mapping[int, str] = NODES[1],
    cards: Sequence[Card] = (card(0),),
    environment: Mapping[str, str] | None = None,
    allowed: str | None = None,
    **files: str,
) -> JobHost:
    """Write the files of a host with nodes of 64 GiB each; `files` replace some, with
    `__` for a slash."""
    numa_host(root, nodes)
    cpus = ",".join(nodes.values())
    memory = len(nodes) * 64 * GIB // 1024
    write_process(root, 0, allowed or cpus)
    healthy = {
        "proc__self__status": f"Name:\tpython\nCpus_allowed_list:\t{allowed or cpus}",
        "proc__meminfo": (
            f"MemTotal: {memory} kB\nMemAvailable: {memory * 9 // 10} kB\nSwapTotal: "
            "0 kB\nSwapFree: 0 kB"
        ),
        "proc__cpuinfo": "processor: 0\nflags\t: fpu avx2 avx512f",
        "proc__version": "Linux version 6.8.0",
        "sys__devices__system__cpu__online": cpus,
        "sys__kernel__mm__transparent_hugepage__enabled": "always [madvise] never",
    }
    write_host(root, **(healthy | files))
    missing = "" if cards or environment else "no GPU can be seen"
    made = JobHost(
        read_job(command, environment or {}),
        tuple(cards),
        missing,
        root=root,
        folder=Path.cwd(),
    )
    made.__dict__["packages"] = {}  # asking a Python takes a process
    return made
