"""Reads the NUMA nodes of the host from /sys and /proc.

Also the nodes of a PCI device, and of a process and its memory.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ebbtide.units import runs_text


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node."""

    number: int  # The number of the node in Linux.
    # Its logical cores. A node of memory alone (the memory of a GH200's GPU, or CXL
    # memory) has none.
    cpus: frozenset[int]
    memory_bytes: int | None  # Its memory; None if the host does not report it.


def read_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes of the host, by number; none if it does not report them.
    `root` is the folder of `sys`."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = read_text(folder / "cpulist")
        if cpus is None:
            continue
        total = re.search(r"MemTotal:\s+(\d+) kB", read_text(folder / "meminfo") or "")
        nodes.append(
            NumaNode(
                int(folder.name[4:]),
                parse_cpus(cpus),
                int(total[1]) * 1024 if total else None,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.number))


def pci_node(pci_bus_id: str | None, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device, or the one node of a host.

    The address is as in NVML (`00000000:18:00.0`) or Linux (`0000:18:00.0`). Return
    None if neither firmware nor the device's list of local cores gives the node.
    """
    nodes = [node for node in read_nodes(root) if node.cpus]
    if len(nodes) == 1:
        return nodes[0].number
    if pci_bus_id is None or ":" not in pci_bus_id:
        return None
    domain, _, address = pci_bus_id.lower().partition(":")
    # NVML writes 8 digits, Linux at least 4.
    folder = root / "sys/bus/pci/devices" / f"{domain.lstrip('0'):0>4}:{address}"
    number = read_text(folder / "numa_node") or ""
    if number.isdigit():
        return int(number)
    local = nodes_of(parse_cpus(read_text(folder / "local_cpulist") or ""), nodes)
    return local[0] if len(local) == 1 else None


def binding_node(pci_bus_id: str | None, root: Path = Path("/")) -> int | None:
    """Return the node to bind memory and threads of a GPU to.

    Return None if it is not known or there is only one node.
    """
    several = sum(bool(node.cpus) for node in read_nodes(root)) > 1
    return pci_node(pci_bus_id, root) if several else None


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return the address of a PCI device as Linux writes it, from the numbers that CUDA
    gives."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_cpus(number: int, root: Path = Path("/")) -> frozenset[int]:
    """Return the logical cores of a node; an empty set if there is no such node."""
    return next(
        (node.cpus for node in read_nodes(root) if node.number == number), frozenset()
    )


def nodes_of(cpus: Collection[int], nodes: Iterable[NumaNode]) -> tuple[int, ...]:
    """Return the numbers of the nodes that have at least one of some logical cores."""
    return tuple(node.number for node in nodes if not node.cpus.isdisjoint(cpus))


def parse_cpus(text: str) -> frozenset[int]:
    """Return the logical cores of a list as Linux writes it.

    An example is `0-15,64-79`.
    """
    cpus: set[int] = set()
    for part in text.replace("\n", "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_text(cpus: Iterable[int]) -> str:
    """Return logical cores as Linux writes them, for example `0-15,64-79`."""
    return runs_text(cpus).replace(" ", "")


def read_text(path: Path) -> str | None:
    """Return the content of a file of /sys or /proc without surrounding space.

    Return None if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# Files whose pages are memory of the process; pages of other files (libraries, data)
# are the page cache.
_MEMORY_FILES = ("/dev/shm/", "/dev/zero", "/memfd:", "/anon_hugepage", "/SYSV")
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")
_FILE = re.compile(r"\bfile=(\S+)")


def read_allowed_cpus(pid: int | str, root: Path = Path("/")) -> frozenset[int] | None:
    """Return the logical cores that the main thread of a process (or `self`) may use.

    Return None if it has ended.
    """
    status = read_text(root / f"proc/{pid}/status") or ""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    return parse_cpus(match[1]) if match else None


def read_memory_by_node(pid: int, root: Path = Path("/")) -> dict[int, int] | None:
    """Return the resident bytes of a process by NUMA node.

    Return None if it has ended or is another user's, or without NUMA. Pages of files
    that are only read do not count, and memory of `cudaHostAlloc` may be missing. Read
    it rarely: the process cannot map memory meanwhile, about a second per TB in pages
    of 4 KiB.
    """
    sizes: dict[int, int] = {}
    try:
        with open(
            root / f"proc/{pid}/numa_maps", encoding="utf-8", errors="replace"
        ) as maps:
            for mapping in maps:
                page = _PAGE_KIB.search(mapping)
                if page is None or not _is_memory(mapping):
                    continue
                for node, pages in _PAGES.findall(mapping):
                    sizes[int(node)] = (
                        sizes.get(int(node), 0) + int(pages) * int(page[1]) * 1024
                    )
    except OSError:
        return None
    return sizes or None


def _is_memory(mapping: str) -> bool:
    """Return whether a line of `numa_maps` is memory of the process: anonymous, shared,
    or a written copy of a file."""
    file = _FILE.search(mapping)
    return file is None or file[1].startswith(_MEMORY_FILES) or " anon=" in mapping
