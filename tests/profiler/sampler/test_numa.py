"""NUMA nodes of recorded processes, from an invented host to the metadata of a rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from ebbtide.profiler.recording.spools.recovery import recover
from ebbtide.profiler.sampler.numa import NumaReader, describe_nodes, placement_file
from ebbtide.profiler.sampler.sampler import Sampler
from ebbtide.profiler.trace.metadata import HostInfo, NumaPlacement, RankInfo
from tests.numa_hosts import GIB, numa_host, write_process
from tests.profiler.sampler.fake_nvml import FakeCard, FakeNvml
from tests.profiler.sampler.test_sampler import write_agent_files

PID = 4242


class Reader:
    """A reader of an invented host, at times that the test sets."""

    def __init__(self, folder: Path, cpus: dict[int, str]) -> None:
        self.root = numa_host(folder / "root", cpus)
        self.spools = folder / "spools"
        self.spools.mkdir()
        self.now_s = 100.0
        self._reader = NumaReader(self.spools, self.root, clock=lambda: self.now_s)

    def read_at(self, now_s: float) -> NumaPlacement | None:
        self.now_s = now_s
        self._reader.read(PID)
        file = placement_file(self.spools, PID)
        return (
            msgspec.json.decode(file.read_bytes(), type=NumaPlacement)
            if file.exists()
            else None
        )


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path, {0: "0-15", 1: "16-31", 2: ""})


def placement(cpu_nodes: tuple[int, ...], **gib: float) -> NumaPlacement:
    sizes = {name.removeprefix("node"): round(size * GIB) for name, size in gib.items()}
    return NumaPlacement(cpu_nodes=cpu_nodes, memory_bytes=sizes)


def test_numa_reader__reads_cores_at_once_and_memory_when_the_job_has_allocated(
    reader: Reader,
) -> None:
    write_process(reader.root, PID, "0-31", {0: 1, 1: 2})
    assert reader.read_at(100.0) == placement((0, 1))
    assert reader.read_at(101.9) == placement((0, 1))
    assert reader.read_at(102.0) == placement((0, 1), node0=1, node1=2)


def test_numa_reader__reads_memory_ever_more_rarely(reader: Reader) -> None:
    reader.read_at(100.0)
    changes = []
    latest = None
    for now_s in range(100, 800, 2):
        write_process(reader.root, PID, "0-31", {0: now_s})
        read = reader.read_at(now_s)
        if read != latest:
            changes.append(now_s)
            latest = read
    assert changes == [100, 102, 104, 108, 116, 132, 164, 228, 348, 468, 588, 708]


def test_numa_reader__keeps_the_reading_with_the_most_memory(reader: Reader) -> None:
    write_process(reader.root, PID, "0-31", {0: 1, 1: 20})
    reader.read_at(100.0)
    largest = reader.read_at(102.0)
    write_process(reader.root, PID, "16-31", {0: 0.1})
    assert largest == placement((0, 1), node0=1, node1=20)
    assert reader.read_at(104.0) == placement((1,), node0=1, node1=20)
    for file in (reader.root / f"proc/{PID}").iterdir():
        file.unlink()
    assert reader.read_at(200.0) == placement((1,), node0=1, node1=20)


def test_numa_reader__leaves_out_the_memory_of_a_gpu(reader: Reader) -> None:
    """On a GH200, memory of the GPU is a node without cores."""
    write_process(reader.root, PID, "0-15", {0: 3, 2: 90})
    reader.read_at(100.0)
    assert reader.read_at(102.0) == placement((0,), node0=3, node1=0)


def test_numa_reader__reads_no_memory_where_there_is_one_node(tmp_path: Path) -> None:
    reader = Reader(tmp_path, {0: "0-71", 1: ""})
    write_process(reader.root, PID, "0-71", {0: 3})
    assert reader.read_at(100.0) == reader.read_at(200.0) == placement((0,))


def test_numa_reader__writes_nothing_about_a_process_that_has_ended(
    reader: Reader,
) -> None:
    assert reader.read_at(100.0) is None
    write_process(reader.root, PID, "0-15")
    assert reader.read_at(100.2) == placement((0,))


@pytest.mark.parametrize("content", ["", "{", '{"cpu_nodes": "0"}', "[]"])
def test_sampler__records_the_nodes_of_gpu_and_process(
    tmp_path: Path, content: str
) -> None:
    root = numa_host(
        tmp_path / "root",
        {0: "0-15", 1: "16-31"},
        {"0000:1b:00.0": 0, "0001:1b:00.0": 1},
    )
    pid = os.getpid()  # the header of a spool has that of its process
    write_process(root, pid, "0-15")
    spools = tmp_path / "spools"
    spools.mkdir()
    sampler = Sampler(
        spools,
        library=FakeNvml(FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b")),
        root=root,
    )
    write_agent_files(spools, sampler.host["name"], "GPU-b", pid)
    sampler.start()
    sampler.stop()
    host = msgspec.convert(json.loads(json.dumps(sampler.host)), HostInfo)
    assert [gpu.numa_node for gpu in host.gpus] == [0, 1]
    assert [(node.node, node.cpus, node.memory_bytes) for node in host.numa_nodes] == [
        (0, "0-15", 64 * GIB),
        (1, "16-31", 64 * GIB),
    ]
    assert describe_nodes(root) == sampler.host["numa_nodes"]

    def read_rank() -> RankInfo:
        (training,) = recover(spools, {"host": sampler.host, "options": {}})
        return msgspec.convert(training.ranks[0].meta, RankInfo)

    rank = read_rank()
    assert rank.main_device.numa_node == 1
    assert rank.numa == placement((0,))
    placement_file(spools, pid).write_text(content)
    assert read_rank().numa is None
