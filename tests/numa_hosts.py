"""Files of /sys and /proc of invented hosts with several NUMA nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.test_host_limits import host

GIB = 2**30


def numa_host(
    root: Path, cpus: Mapping[int, str], gpus: Mapping[str, int | str] | None = None
) -> Path:
    """Write a host with NUMA nodes of 64 GiB each.

    Args:
        root: The folder for `sys` and `proc`.
        cpus: The cores of each node, as Linux writes them.
        gpus: By PCI address the node of a device, or its `local_cpulist` where the
            firmware gives no node.
    """
    files: dict[str, str] = {}
    for node, cores in cpus.items():
        files[f"sys__devices__system__node__node{node}__cpulist"] = cores
        total = f"Node {node} MemTotal:       {64 * GIB // 1024} kB"
        files[f"sys__devices__system__node__node{node}__meminfo"] = (
            f"{total}\nNode {node} MemFree: 1 kB"
        )
    for address, place in (gpus or {}).items():
        files[f"sys__bus__pci__devices__{address}__numa_node"] = (
            str(place) if isinstance(place, int) else "-1"
        )
        files[f"sys__bus__pci__devices__{address}__local_cpulist"] = (
            place if isinstance(place, str) else ""
        )
    return host(root, **files)


def write_process(
    root: Path, pid: int, cpus: str, gib: Mapping[int, float] | None = None
) -> None:
    """Write the files of a process: the cores that it may use, and its GiB of memory by
    node."""
    host(
        root,
        **{
            f"proc__{pid}__status": (
                f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}"
            )
        },
    )
    pages = " ".join(
        f"N{node}={round(size * GIB / 4096)}" for node, size in (gib or {}).items()
    )
    maps = [
        "7f0000000000 default file=/usr/lib/libtorch.so mapped=700000 N1=700000 "
        "kernelpagesize_kB=4",
        f"7f1000000000 default anon=1 dirty=1 {pages} kernelpagesize_kB=4"
        if pages
        else "7f1000000000 default",
    ]
    host(root, **{f"proc__{pid}__numa_maps": "\n".join(maps)})
