"""The NUMA node of pinned memory and of the CPU kernel's threads."""

from __future__ import annotations

import gc
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ebbtide.interleave.engine.devices.host_memory import allocate_pinned, gpu_node
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules.adamw import Hyper
from ebbtide.numa import binding, topology
from ebbtide.numa.topology import NumaNode, read_nodes
from tests.interleave.engine.states import (
    arguments,
    assert_same,
    plausible_state,
    updated,
)
from tests.test_numa import invent_nodes, policy_of

CPUS = os.sched_getaffinity(0)


def test_allocate_pinned__places_memory_on_the_node_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = read_nodes()[0].number if read_nodes() else 0
    probe = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    may_bind = binding._prefer_node(probe.ctypes.data, probe.nbytes, node) is None
    policies = []
    pinned: set[int] = set()

    def register(pointer: int, nbytes: int, flags: int) -> int:
        policies.append(policy_of(pointer))
        pinned.add(pointer)
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=pinned.remove
    )
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    placed = allocate_pinned((1 << 20,), torch.float32, node)
    anywhere = allocate_pinned((1 << 20,), torch.float32)
    assert pinned == {placed.data_ptr(), anywhere.data_ptr()}
    # Some containers forbid mbind: then the memory is touched first, by a thread on the
    # node.
    assert policies == [f"prefer:{node}" if may_bind else policies[1], policies[1]]
    assert policies[1] in ("default", None)
    assert not placed.any()
    assert not anywhere.any()
    del placed, anywhere
    gc.collect()
    assert not pinned


@pytest.mark.parametrize(
    ("nodes", "gpu", "expected"),
    [
        ((True, True), 1, 1),
        ((True, True), None, None),
        ((True, False), 0, None),
        ((True,), 0, None),
    ],
)
def test_gpu_node__is_known_where_there_is_a_choice(
    monkeypatch: pytest.MonkeyPatch,
    nodes: tuple[bool, ...],
    gpu: int | None,
    expected: int | None,
) -> None:
    invented = tuple(
        NumaNode(number, frozenset({number} if has_cores else ()), None)
        for number, has_cores in enumerate(nodes)
    )
    monkeypatch.setattr(topology, "read_nodes", lambda root=None: invented)
    files = {
        "/sys/bus/pci/devices/0000:c1:00.0/numa_node": "-1" if gpu is None else str(gpu)
    }
    monkeypatch.setattr(topology, "read_text", lambda path: files.get(str(path)))
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    assert gpu_node(torch.device("cuda", 0)) == expected
    assert gpu_node(torch.device("cpu")) is None
    del properties.pci_domain_id  # an older torch
    assert gpu_node(torch.device("cuda", 0)) is None


def test_cpu_kernel__runs_on_the_cores_of_the_node_that_it_is_bound_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.host_limits.rank_cores", lambda: len(CPUS))
    # This process may use no core of node 1.
    invent_nodes(monkeypatch, {min(CPUS)}, {max(CPUS) + 1})
    affinities: list[set[int]] = []
    bind = binding.bind_thread

    def spy(node: int | None) -> None:
        bind(node)
        affinities.append(os.sched_getaffinity(0))

    monkeypatch.setattr("ebbtide.interleave.engine.numerics.kernels.bind_thread", spy)
    state = plausible_state(100_000, torch.bfloat16, torch.bfloat16, 1)
    expected = updated(updated(state, Hyper().scalars(1)), Hyper().scalars(2))
    kernel = CpuKernel()
    for step, (node, cpus) in enumerate([(0, {min(CPUS)}), (1, CPUS)], 1):
        kernel.bind(node)
        affinities.clear()
        kernel.update(*arguments(state), Hyper().scalars(step))
        assert kernel.threads == len(cpus)
        assert affinities
        assert all(affinity == cpus for affinity in affinities)
    kernel.close()
    assert_same(state, expected)
    assert os.sched_getaffinity(0) == CPUS
