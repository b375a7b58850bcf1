"""The rules on device memory: `does-not-fit`, `free-memory`, `memory-outside-torch`,
`fragmentation`."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Finding, Rule, Unknown
from ebbtide.analysis.findings.rules.memory import (
    does_not_fit,
    fragmentation,
    free_memory,
    memory_outside_torch,
    unified_memory,
)
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.state_split import StateSplit
from ebbtide.analysis.metrics.static_split import largest_split
from tests.analysis.findings.jobs import (
    GIB,
    NO_OFFLOAD,
    PARAMS,
    Job,
    SimulatedSetting,
    async_copies,
    devices,
    offloaded,
    on_cpu,
    on_gpu,
    split_by_stub,
)


def on_card(name: str | None, capacity_gib: float) -> Job:
    job = on_gpu(used=40)
    device = {
        "device": "cuda:0",
        "kind": "cuda",
        "capacity_bytes": int(capacity_gib * GIB),
    }
    job.builder.rank(0, devices=[{**device, "name": name}])
    return job


def test_unified_memory__tells_what_the_system_takes_and_which_copies_are_in_vain() -> (
    None
):
    job = on_card("NVIDIA GB10", 121.69)
    finding = job.finding(unified_memory)
    assert "take 19.9 of its 121.6 GiB" in finding.evidence[0]
    assert "#47" in finding.evidence[0]
    assert "copies h2d move 38.15 MiB within it" in finding.evidence[1]
    assert "offload frees nothing" in finding.advice
    # What the system takes is not free.
    free = JobMetrics(job.trace).always_free_bytes
    assert free == pytest.approx((121.69 - 19.9 - 40) * GIB, rel=0.01)
    # A limit below the whole memory was stated for the job.
    stated = JobMetrics(on_card("NVIDIA GB10", 100).trace)
    assert stated.capacity_bytes == 100 * GIB


@pytest.mark.parametrize(
    ("name", "speaks"), [("Orin", True), ("NVIDIA GH200 480GB", False), (None, False)]
)
def test_unified_memory__speaks_of_devices_that_share_memory(
    name: str | None, speaks: bool
) -> None:
    unmet = unified_memory.unmet(JobMetrics(on_card(name, 80).trace))
    assert (unmet is None) == speaks


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(("free", "ratio"), [(2, None), (4, 0.5), (4, 0.75)])
def test_free_memory__gain_is_share_of_update_whose_state_fits(
    free: float, ratio: float | None
) -> None:
    job = split_by_stub(ratio, used=80 - free)
    finding = job.finding(free_memory)
    offloads = PARAMS * (ratio or 1)
    # Of ten subgroups whole ones fit, with their gradients in fp32.
    subgroups = int((free * GIB + 16 * (PARAMS - offloads)) / 16 / (PARAMS / 10))
    fitting = subgroups * PARAMS / 10 - (PARAMS - offloads)
    assert 0 < fitting < offloads
    assert finding.potential_gain_ms == pytest.approx(100 * fitting / offloads)
    assert f"{free:.2f} GiB of 80.00 GiB" in finding.evidence[0]
    assert (
        f"{100 * fitting / offloads:.0f} % of what this rank offloads"
        in finding.evidence[1]
    )
    split = largest_split(JobMetrics(job.trace))
    assert split is not None
    assert len(StateSplit().resident(split.ratio, 10)) == subgroups
    # On a machine that is not known no split is simulated, and none is advised.
    assert finding.action is None
    assert finding.advice.startswith(
        f"`ebbtide replay {job.trace.path} --recommend --machine M` simulates"
    )


def test_free_memory__advises_no_split_if_no_further_subgroup_fits() -> None:
    assert offloaded(used=78.6, ratio=0.5).result(free_memory) is None


def test_does_not_fit__names_what_is_missing() -> None:
    finding = (
        offloaded(2, used=70)
        .memory("device", {"backward": 83}, rank=1)
        .finding(does_not_fit)
    )
    assert finding.evidence == (
        "it needs 83.00 GiB of the 80.00 GiB that it may use (device): 3.00 GiB are "
        "missing",
    )
    assert "ebbtide plan" in finding.advice
    assert offloaded(used=80).result(does_not_fit) is None


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(("ratio", "free"), [(None, 14), (0.5, 8)])
def test_free_memory__advises_no_offload_if_all_state_fits(
    ratio: float | None, free: float
) -> None:
    job = split_by_stub(ratio, used=80 - free)
    assert job.finding(free_memory).potential_gain_ms == pytest.approx(100)
    finding = free_memory(JobMetrics(job.trace, NO_OFFLOAD))
    assert isinstance(finding, Finding)
    assert finding.advice == ("do not offload at all (simulated: 400.0 -> 340.0 ms)")
    # The gain is the simulated one.
    assert finding.potential_gain_ms == pytest.approx(60)
    assert finding.action == NO_OFFLOAD.setting
    assert free_memory(JobMetrics(job.trace, SimulatedSetting(None))) is None


def test_free_memory__is_minimum_over_time_and_ranks() -> None:
    job = offloaded(2, used=70).memory("device", {"backward": 79.5}, rank=1)
    assert job.result(free_memory) is None
    once = offloaded(2, used=70)
    once.builder.rank(1).memory(
        once.begins[1, "forward"][4] + 10, 78 * GIB, device="cuda:1"
    )
    assert "2.00 GiB of 80.00 GiB" in once.finding(free_memory).evidence[0]
    warm_up = offloaded(2, used=70)
    warm_up.builder.rank(1).memory(
        warm_up.begins[1, "forward"][0] + 10, 80 * GIB, device="cuda:1"
    )
    assert "10.00 GiB" in warm_up.finding(free_memory).evidence[0]


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded()),
        offloaded(used=79.1),
        on_gpu(used=61),
        on_cpu(),
        split_by_stub(0, used=61),
    ],
)
def test_free_memory__is_none_for_full_device(job: Job) -> None:
    assert job.result(free_memory) is None


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(
    "job",
    [
        on_gpu(used=59),
        split_by_stub(0, used=59),
        offloaded(used=59).meta(optimizers=[]),
    ],
)
def test_free_memory__reports_quarter_of_device_without_gain(job: Job) -> None:
    finding = job.finding(free_memory)
    assert finding.potential_gain_ms is None
    assert "21.00 GiB of 80.00 GiB" in finding.evidence[0]


def test_free_memory__accepts_any_configured_ratio() -> None:
    for ratio in ("half", -1, 7, None, [], {}):
        assert offloaded(used=66, ratio=ratio).finding(
            free_memory
        ).potential_gain_ms == pytest.approx(100)


@pytest.mark.parametrize(("gap", "reported"), [(3.9, False), (4.1, True), (20, True)])
def test_memory_outside_torch__needs_twentieth_of_device(
    gap: float, reported: bool
) -> None:
    job = (
        devices(Job(2))
        .memory("device", {"other": 78})
        .memory("reserved", {"other": 78 - gap})
    )
    result = job.result(memory_outside_torch)
    assert (result is not None) == reported
    if reported:
        finding = job.finding(memory_outside_torch)
        assert f"{gap:.2f} GiB of 80.00 GiB" in finding.evidence[0]
        assert finding.potential_gain_ms is None


def test_memory_outside_torch__ignores_temporary_memory() -> None:
    job = (
        devices(Job(2))
        .memory("device", {"other": 78})
        .memory("reserved", {"forward": 77, "update": 60})
    )
    assert job.result(memory_outside_torch) is None


def test_memory_outside_torch__reports_largest_rank() -> None:
    job = devices(Job(2)).memory("reserved", {"other": 60})
    job.memory("device", {"other": 61}, rank=0).memory("device", {"other": 75}, rank=1)
    assert "15.00 GiB" in job.finding(memory_outside_torch).evidence[0]


def test_fragmentation__ignores_memory_of_activations() -> None:
    # 50 GiB of activations are freed before the update, their blocks stay reserved.
    job = on_gpu().memory("allocated", {"forward": 70, "update": 20})
    assert job.result(fragmentation) is None


def test_fragmentation__counts_update_only_if_state_is_offloaded() -> None:
    job = offloaded(used=79.5)
    job.memory("allocated", {"forward": 78, "update": 20, "other": 20})
    finding = job.finding(fragmentation)
    assert "in the median update never less than" in finding.evidence[0]
    assert "empty_cache" in finding.advice


@pytest.mark.parametrize(("gap", "reported"), [(3.9, False), (4.1, True)])
def test_fragmentation__reports_memory_that_is_never_used(
    gap: float, reported: bool
) -> None:
    job = (
        devices(Job(2))
        .memory("reserved", {"other": 70})
        .memory("allocated", {"forward": 70 - gap, "update": 30})
    )
    result = job.result(fragmentation)
    assert (result is not None) == reported
    if reported:
        assert (
            f"in the median iteration never less than {gap:.2f} GiB"
            in job.finding(fragmentation).evidence[0]
        )
        assert "expandable_segments" not in job.finding(fragmentation).advice


def without_capacity(job: Job) -> Job:
    for number in job.ranks:
        job.builder.rank(number).meta["devices"][0]["capacity_bytes"] = None
    return job


@pytest.mark.parametrize("rule", [free_memory, memory_outside_torch, fragmentation])
def test_memory_rules__ask_for_missing_records(rule: Rule) -> None:
    for job in (
        devices(Job(2)),
        without_capacity(on_gpu()),
        without_capacity(offloaded()),
    ):
        result = job.result(rule)
        assert isinstance(result, Unknown)
        assert result.record
    assert on_cpu().result(rule) is None


def test_free_memory__infers_offload_from_state_devices() -> None:
    cases: list[tuple[Any, bool]] = [
        (["cpu"], True),
        (["cuda"], False),
        (["cpu", "cuda"], False),
        ([], False),
    ]
    for where, offloads in cases:
        job = on_gpu(used=78).meta(
            optimizers=[{"class": "AdamW", "params": PARAMS, "state_devices": where}]
        )
        assert (job.result(free_memory) is not None) == offloads
