"""The rules `swapping` and `remote-numa-node`."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.rules.host import remote_numa_node, swapping
from tests.analysis.findings.jobs import GIB, Job, devices, offloaded, on_cpu, on_gpu


@pytest.mark.parametrize("make", [on_gpu, offloaded, on_cpu])
def test_swapping__reports_swapped_memory_of_any_job(make: type[Job]) -> None:
    job = make().memory("swap", {"update": 0.5}, "cpu")
    finding = job.finding(swapping)
    assert finding.potential_gain_ms is None
    assert "512.00 MiB" in finding.evidence[0]
    assert make().result(swapping) is None


@pytest.mark.parametrize(("mib", "reported"), [(63, False), (65, True)])
def test_swapping__ignores_few_pages(mib: int, reported: bool) -> None:
    assert (
        on_cpu().memory("swap", {"other": mib / 1024}, "cpu").result(swapping)
        is not None
    ) == reported


@pytest.mark.parametrize(("used", "reported"), [(77, False), (78, True)])
def test_swapping__reports_full_host(used: float, reported: bool) -> None:
    job = devices(Job(2)).memory("host", {"other": used}, "cpu")
    job.builder.meta["host"]["cpu"]["capacity_bytes"] = 80 * 2**30
    assert (job.result(swapping) is not None) == reported
    if reported:
        assert "78.00 GiB of 80.00 GiB" in job.finding(swapping).evidence[0]
    job.builder.meta["host"]["cpu"]["capacity_bytes"] = None
    assert job.result(swapping) is None


def placed(cpu_nodes: list[int], gib: dict[int, float]) -> dict[str, Any]:
    return {
        "cpu_nodes": cpu_nodes,
        "memory_bytes": {str(node): round(size * GIB) for node, size in gib.items()},
    }


@pytest.mark.parametrize(
    ("numa", "evidence"),
    [
        # The GPU of rank 1 is on node 1.
        (placed([1], {0: 0.9, 1: 5}), None),
        (placed([0, 1], {0: 3, 1: 40}), None),
        (placed([1], {}), None),
        (placed([0], {}), "its cores are on node 0"),
        (placed([0], {0: 0.5, 1: 9}), "its cores are on node 0"),
        (
            placed([1], {0: 5, 1: 5}),
            "5.00 GiB of its 10.00 GiB of memory are on other nodes, its cores are on "
            "node 1",
        ),
        (
            placed([0, 1], {0: 30, 1: 10}),
            "30.00 GiB of its 40.00 GiB of memory are on other nodes, its cores are "
            "on node 0, 1",
        ),
        (
            placed([], {0: 20, 1: 20}),
            "20.00 GiB of its 40.00 GiB of memory are on other nodes",
        ),
    ],
)
def test_remote_numa_node__reports_cores_and_memory_elsewhere(
    numa: dict[str, Any], evidence: str | None
) -> None:
    job = on_gpu(2)
    job.builder.rank(1, numa=numa)
    if evidence is None:
        assert job.result(remote_numa_node) is None
        return
    finding = job.finding(remote_numa_node)
    assert finding.evidence == (f"rank 1: its GPU is on NUMA node 1; {evidence}",)
    assert "--numa-binding" in finding.advice


@pytest.mark.parametrize("numa", [None, placed([], {}), placed([0, 1], {})])
def test_remote_numa_node__asks_for_missing_records(
    numa: dict[str, Any] | None,
) -> None:
    job = on_gpu(2)
    job.builder.rank(1, numa=numa)
    assert isinstance(job.result(remote_numa_node), Unknown)
    job.builder.rank(0, numa=placed([1], {}))
    assert len(job.finding(remote_numa_node).evidence) == 1


def test_remote_numa_node__has_no_question_about_hosts_with_one_node_and_jobs_without_a_gpu() -> (
    None
):
    job = on_gpu()
    job.builder.rank(0, numa=None)
    # The memory of a GH200's GPU is a node without cores.
    job.builder.meta["host"]["numa_nodes"] = [
        {"node": 0, "cpus": "0-71"},
        {"node": 1, "cpus": ""},
    ]
    assert job.result(remote_numa_node) is None
    assert on_cpu().result(remote_numa_node) is None
