"""The memory of each NUMA node, measured on nodes that are invented over the cores of this host."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ebbtide.interleave.calibrate.host_memory import measure_nodes, numa_nodes
from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.numa.topology import NumaNode

CPUS = os.sched_getaffinity(0)
FIRST = min(CPUS)
OUTSIDE = max(CPUS) + 1
READERS = ("ebbtide.numa.topology.read_nodes", "ebbtide.interleave.calibrate.host_memory.read_nodes")


def measured(monkeypatch: pytest.MonkeyPatch, *cores: set[int], device: int | None = None) -> Record:
    """Measure on a host with nodes of these cores; they have high numbers, which no host has."""
    nodes = tuple(NumaNode(900 + number, frozenset(cpus), None) for number, cpus in enumerate(cores))
    for reader in READERS:
        monkeypatch.setattr(reader, lambda root=None: nodes)
    record = Record()
    measure_nodes(Setup(Ranks(), threads=3, cores=3, working_set=4 << 20, window_s=0.0, device=device), record)
    return record


def test_measure_nodes__has_a_rate_for_each_node_and_the_share_of_remote_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process may use the cores of both nodes, so each gets its memory by first touch."""
    record = measured(monkeypatch, {FIRST}, {FIRST, OUTSIDE}, set())
    assert numa_nodes() == [900, 901]
    result = record.extra["numa"]
    assert (result["node"], result["threads"]) == (900, 1)
    assert list(result["bytes_per_s"]) == ["900", "901"]
    assert all(1e6 < rate < 1e13 for rate in result["bytes_per_s"].values())
    assert result["remote_share"] == result["bytes_per_s"]["901"] / result["bytes_per_s"]["900"]
    assert os.sched_getaffinity(0) == CPUS


def test_measure_nodes__has_no_rate_of_a_node_that_memory_cannot_be_placed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(monkeypatch, {FIRST}, {OUTSIDE}).extra["numa"]
    assert result["bytes_per_s"]["900"] > 0
    assert (result["bytes_per_s"]["901"], result["remote_share"]) == (None, None)


@pytest.mark.parametrize(("remote", "note"), [(60e9, "60 % of that of node 900"), (95e9, None)])
def test_measure_nodes__has_a_note_on_slow_remote_memory(
    monkeypatch: pytest.MonkeyPatch, remote: float, note: str | None
) -> None:
    rates = {900: 100e9, 901: remote}
    monkeypatch.setattr(
        "ebbtide.interleave.calibrate.host_memory._node_bandwidth", lambda setup, home, node, threads: rates[node]
    )
    record = measured(monkeypatch, {FIRST}, {FIRST, OUTSIDE})
    assert record.extra["numa"]["remote_share"] == remote / 100e9
    assert [note in line for line in record.notes] == ([True] if note else [])


def test_measure_nodes__says_that_the_node_of_the_gpu_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0xFFFF, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    record = measured(monkeypatch, {FIRST}, {FIRST}, device=0)
    assert record.extra == {}
    assert record.notes == ["local and remote host memory were not measured: the NUMA node of the GPU is not known"]
