"""Reads from /proc on which NUMA nodes a process may run, and has its memory."""

import re
from pathlib import Path

from ebbtide.numa.topology import parse_cpus, read_text

# Files whose pages are memory of the process; those of other files (libraries, data) are the page cache.
_MEMORY_FILES = ("/dev/shm/", "/dev/zero", "/memfd:", "/anon_hugepage", "/SYSV")
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")
_FILE = re.compile(r"\bfile=(\S+)")


def read_allowed_cpus(pid: int | str, root: Path = Path("/")) -> frozenset[int] | None:
    """Return the logical cores that the main thread of a process (or `self`) may use; None if it has ended."""
    status = read_text(root / f"proc/{pid}/status") or ""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    return parse_cpus(match[1]) if match else None


def read_memory_by_node(pid: int, root: Path = Path("/")) -> dict[int, int] | None:
    """Return the resident bytes of a process by NUMA node; None if it has ended or is another user's, or without NUMA.

    Pages of files that are only read (libraries, data sets) are left out. Memory that a driver maps into the process is
    not in `numa_maps`: that of `cudaHostAlloc` may be missing, that of `cudaHostRegister` is counted.

    The kernel walks the page tables of the process for this, during which the process cannot map memory: about a second
    per TB in pages of 4 KiB. Read it rarely."""
    sizes: dict[int, int] = {}
    try:
        with open(root / f"proc/{pid}/numa_maps", encoding="utf-8", errors="replace") as maps:
            for mapping in maps:
                page = _PAGE_KIB.search(mapping)
                if page is None or not _is_memory(mapping):
                    continue
                for node, pages in _PAGES.findall(mapping):
                    sizes[int(node)] = sizes.get(int(node), 0) + int(pages) * int(page[1]) * 1024
    except OSError:
        return None
    return sizes or None


def _is_memory(mapping: str) -> bool:
    """Return whether a line of `numa_maps` is memory of the process: anonymous, shared, or a written copy of a file."""
    file = _FILE.search(mapping)
    return file is None or file[1].startswith(_MEMORY_FILES) or " anon=" in mapping
