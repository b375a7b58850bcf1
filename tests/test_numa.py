"""NUMA nodes of invented hosts, and binding on this one."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.numa import binding, topology
from ebbtide.numa.topology import (
    NumaNode,
    binding_node,
    cpus_text,
    nodes_of,
    parse_cpus,
    pci_node,
    read_allowed_cpus,
    read_memory_by_node,
    read_nodes,
)
from tests.numa_hosts import GIB, numa_host, write_process
from tests.test_host_limits import host

TWO_SOCKETS = {0: "0-15,32-47", 1: "16-31,48-63"}
GPU = "00000000:C1:00.0"


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3", {3}), ("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11})]
)
def test_parse_cpus__reads_what_linux_writes(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@given(st.frozensets(st.integers(0, 300)))
def test_cpus_text__is_read_back(cpus: frozenset[int]) -> None:
    text = cpus_text(cpus)
    assert parse_cpus(text) == cpus
    # No two ranges touch.
    assert text.count(",") + 1 - (not cpus) == len(
        [cpu for cpu in cpus if cpu - 1 not in cpus]
    )


def test_read_nodes__has_cores_and_memory_of_each_node(tmp_path: Path) -> None:
    assert read_nodes(tmp_path) == ()
    root = numa_host(tmp_path, {10: "", 2: "2-3", 0: "0-1"})
    assert read_nodes(root) == (
        NumaNode(0, frozenset({0, 1}), 64 * GIB),
        NumaNode(2, frozenset({2, 3}), 64 * GIB),
        NumaNode(10, frozenset(), 64 * GIB),
    )
    assert nodes_of({1, 2}, read_nodes(root)) == (0, 2)


@pytest.mark.parametrize(
    ("place", "node"),
    [
        (1, 1),
        (0, 0),
        ("16-31,48-63", 1),
        ("16-19", 1),
        # All cores are local: the firmware does not know better.
        ("0-63", None),
        ("", None),
    ],
)
def test_pci_node__is_the_one_of_the_firmware_or_of_the_local_cores(
    tmp_path: Path, place: int | str, node: int | None
) -> None:
    root = numa_host(tmp_path, TWO_SOCKETS, {"0000:c1:00.0": place})
    assert pci_node(GPU, root) == node
    assert pci_node("0000:c1:00.0", root) == node
    assert binding_node(GPU, root) == node
    assert pci_node("00000000:C2:00.0", root) is None
    assert pci_node(None, root) is None


def test_pci_node__keeps_long_domains(tmp_path: Path) -> None:
    """Virtual machines and GB200 have PCI domains with more than four digits."""
    root = numa_host(tmp_path, TWO_SOCKETS, {"10000:01:00.0": 1, "0018:01:00.0": 0})
    assert (pci_node("00010000:01:00.0", root), pci_node("00000018:01:00.0", root)) == (
        1,
        0,
    )
    assert topology.pci_address(0x18, 1, 0) == "0018:01:00.0"


def test_binding_node__is_unknown_on_a_host_with_one_node(tmp_path: Path) -> None:
    """The memory of a GH200's GPU is a node without cores: there is nothing to
    choose."""
    root = numa_host(tmp_path, {0: "0-71", 1: ""}, {"0009:01:00.0": -1})
    assert pci_node("00000009:01:00.0", root) == 0
    assert binding_node("00000009:01:00.0", root) is None


MAPS = """\
55fcf5141000 default file=/usr/bin/python mapped=2 N0=2 kernelpagesize_kB=4
7f0000000000 bind:1 anon=1000 dirty=1000 N0=10 N1=990 kernelpagesize_kB=4
7f0000001000 default file=/dev/shm/torch_1 dirty=7 N1=7 kernelpagesize_kB=4
7f0000002000 prefer:0 file=/anon_hugepage\\040(deleted) huge anon=3 dirty=3 N0=3 kernelpagesize_kB=2048
7f0000003000 default file=/lib/libc.so anon=4 dirty=4 mapped=5 N0=5 kernelpagesize_kB=4
7f0000004000 default stack
"""


def test_read_memory_by_node__counts_memory_of_the_process(tmp_path: Path) -> None:
    root = host(tmp_path, proc__5__numa_maps=MAPS)
    kib = {0: 4 * (10 + 5) + 3 * 2048, 1: 4 * (990 + 7)}
    assert read_memory_by_node(5, root) == {
        node: 1024 * size for node, size in kib.items()
    }
    assert read_memory_by_node(6, root) is None


def test_read_memory_by_node__has_the_resident_memory_of_this_process() -> None:
    block = np.ones(64 << 20, np.uint8)
    sizes = read_memory_by_node(os.getpid())
    if sizes is None:
        pytest.skip("the kernel has no numa_maps")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    assert block.nbytes <= sum(sizes.values()) <= resident + (16 << 20)


def test_read_allowed_cpus__are_those_of_the_affinity(tmp_path: Path) -> None:
    assert read_allowed_cpus(os.getpid()) == os.sched_getaffinity(0)
    write_process(tmp_path, 7, "0-3,8")
    assert read_allowed_cpus(7, tmp_path) == {0, 1, 2, 3, 8}
    assert read_allowed_cpus(8, tmp_path) is None


def in_thread(node: int | None) -> set[int]:
    """Return the affinity of a new thread after it is bound."""
    cpus: list[set[int]] = []

    def run() -> None:
        binding.bind_thread(node)
        cpus.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return cpus[0]


def invent_nodes(monkeypatch: pytest.MonkeyPatch, *cpus: set[int]) -> None:
    nodes = tuple(
        NumaNode(number, frozenset(cores), 64 * GIB)
        for number, cores in enumerate(cpus)
    )
    monkeypatch.setattr(topology, "read_nodes", lambda root=None: nodes)


def test_bind_thread__only_narrows_the_affinity_of_its_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ebbtide")
    binding._log_once.cache_clear()
    own = os.sched_getaffinity(0)
    first = min(own)
    outside = max(own) + 1
    invent_nodes(monkeypatch, {first, outside}, {outside})
    assert in_thread(0) == {first}
    # Without a core of its own on the node, a thread keeps those that it has.
    assert in_thread(1) == in_thread(7) == in_thread(None) == own
    assert os.sched_getaffinity(0) == own
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "threads of the update run on NUMA node 0",
        "threads are not bound to NUMA node 1: this process may use none of its cores",
        "threads are not bound to NUMA node 7: this process may use none of its cores",
    ]


def mapped(nbytes: int) -> np.ndarray:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, np.uint8)


def policy_of(address: int) -> str | None:
    """Return the memory policy of a mapping, from numa_maps."""
    for mapping in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy = mapping.split()[:2]
        if int(start, 16) == address:
            return policy
    return None


def test_place_memory__prefers_the_node() -> None:
    node = read_nodes()[0].number if read_nodes() else 0
    memory = mapped(8 << 20)
    if binding._prefer_node(memory.ctypes.data, memory.nbytes, node) is not None:
        pytest.skip("this host forbids mbind")
    assert binding.place_memory(memory.ctypes.data, memory.nbytes, node)
    memory.fill(3)
    assert policy_of(memory.ctypes.data) == f"prefer:{node}"
    assert memory.min() == 3


def test_place_memory__leaves_memory_without_a_node_as_it_is() -> None:
    memory = mapped(1 << 20)
    assert not binding.place_memory(memory.ctypes.data, memory.nbytes, None)
    assert policy_of(memory.ctypes.data) in ("default", None)


@pytest.mark.parametrize("machine", [platform.machine(), "riscv64"])
def test_place_memory__touches_it_first_where_mbind_is_refused(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """No such node, and no known number of the call: both are refusals."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    own = os.sched_getaffinity(0)
    invent_nodes(monkeypatch, set(), *[set()] * 62, {min(own)})
    memory = mapped(1 << 20)
    touched: list[set[int]] = []
    memset = ctypes.memset

    def spy(*arguments: int) -> int:
        touched.append(os.sched_getaffinity(0))
        return int(memset(*arguments) or 0)

    monkeypatch.setattr(ctypes, "memset", spy)
    assert binding.place_memory(memory.ctypes.data, memory.nbytes, 63)
    assert touched == [{min(own)}]
    assert os.sched_getaffinity(0) == own
    # This process may use no core of that node: the memory stays where it is.
    assert not binding.place_memory(memory.ctypes.data, memory.nbytes, 62)
