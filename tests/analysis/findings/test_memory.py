"""Device memory that lies idle, is used by others, or is reserved for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Rule, Unknown
from ebbtide.analysis.findings.memory import fragmentation, free_memory, memory_outside_torch
from tests.analysis.findings.jobs import GIB, PARAMS, Job, async_copies, devices, offloaded, on_cpu, on_gpu


@pytest.mark.parametrize(("free", "ratio"), [(2, None), (2, 0.5), (4, 0.75)])
def test_free_memory_is_worth_the_part_of_the_update_whose_state_fits(free: float, ratio: float | None) -> None:
    found = offloaded(used=80 - free, ratio=ratio).finding(free_memory)
    offloads = PARAMS * (ratio or 1)
    fitting = free * GIB / 12
    assert fitting < offloads
    assert found.worth_ms == pytest.approx(100 * fitting / offloads)
    assert f"{free:.2f} GiB of 80.00 GiB" in found.evidence[0]
    assert f"{100 * fitting / offloads:.0f} % of what this rank offloads" in found.evidence[1]
    # What then is still offloaded, of all parameters.
    assert f'"ratio": {(offloads - fitting) / PARAMS:.2f}' in found.advice


@pytest.mark.parametrize(("ratio", "free"), [(None, 12), (0.5, 6)])
def test_where_all_fits_nothing_need_be_offloaded(ratio: float | None, free: float) -> None:
    found = offloaded(used=80 - free, ratio=ratio).finding(free_memory)
    assert found.worth_ms == pytest.approx(100)
    assert found.advice == "do not offload at all"


def test_free_is_what_is_free_at_every_moment_on_every_rank() -> None:
    job = offloaded(2, used=70).memory("device", {"backward": 79.5}, rank=1)
    assert job.says(free_memory) is None
    once = offloaded(2, used=70)
    once.builder.rank(1).memory(once.begins[1, "forward"][4] + 10, 79 * GIB, device="cuda:1")
    assert "1.00 GiB of 80.00 GiB" in once.finding(free_memory).evidence[0]
    warm_up = offloaded(2, used=70)
    warm_up.builder.rank(1).memory(warm_up.begins[1, "forward"][0] + 10, 80 * GIB, device="cuda:1")
    assert "10.00 GiB" in warm_up.finding(free_memory).evidence[0]


@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded()),
        offloaded(used=79.1),
        on_gpu(used=61),
        on_cpu(),
        offloaded(used=61, ratio=0),
    ],
)
def test_a_device_that_is_used_is_well(job: Job) -> None:
    assert job.says(free_memory) is None


@pytest.mark.parametrize("job", [on_gpu(used=59), offloaded(used=59, ratio=0), offloaded(used=59).meta(optimizers=[])])
def test_a_device_of_which_a_quarter_is_free_is_not_used(job: Job) -> None:
    found = job.finding(free_memory)
    assert found.worth_ms is None
    assert "21.00 GiB of 80.00 GiB" in found.evidence[0]


def test_the_rest_of_the_offload_configuration_may_be_anything() -> None:
    for ratio in ("half", -1, 7, None, [], {}):
        assert offloaded(used=68, ratio=ratio).finding(free_memory).worth_ms == pytest.approx(100)


@pytest.mark.parametrize(("gap", "there"), [(3.9, False), (4.1, True), (20, True)])
def test_memory_outside_torch_from_a_twentieth_of_the_device_on(gap: float, there: bool) -> None:
    job = devices(Job(2)).memory("device", {"other": 78}).memory("reserved", {"other": 78 - gap})
    said = job.says(memory_outside_torch)
    assert (said is not None) == there
    if there:
        found = job.finding(memory_outside_torch)
        assert f"{gap:.2f} GiB of 80.00 GiB" in found.evidence[0]
        assert found.worth_ms is None


def test_what_lies_outside_torch_only_at_times_is_not_counted() -> None:
    job = devices(Job(2)).memory("device", {"other": 78}).memory("reserved", {"forward": 77, "update": 60})
    assert job.says(memory_outside_torch) is None


def test_one_rank_with_a_stranger_on_its_card_is_enough() -> None:
    job = devices(Job(2)).memory("reserved", {"other": 60})
    job.memory("device", {"other": 61}, rank=0).memory("device", {"other": 75}, rank=1)
    assert "15.00 GiB" in job.finding(memory_outside_torch).evidence[0]


def test_activations_that_come_and_go_are_no_fragmentation() -> None:
    # 50 GiB of activations are gone in the update, their blocks stay reserved.
    job = on_gpu().memory("allocated", {"forward": 70, "update": 20})
    assert job.says(fragmentation) is None


def test_but_where_state_is_offloaded_the_update_could_use_them() -> None:
    job = offloaded(used=79.5)
    job.memory("allocated", {"forward": 78, "update": 20, "other": 20})
    found = job.finding(fragmentation)
    assert "in the median update never less than" in found.evidence[0]
    assert "empty_cache" in found.advice


@pytest.mark.parametrize(("gap", "there"), [(3.9, False), (4.1, True)])
def test_what_is_never_used_is_fragmentation(gap: float, there: bool) -> None:
    job = devices(Job(2)).memory("reserved", {"other": 70}).memory("allocated", {"forward": 70 - gap, "update": 30})
    said = job.says(fragmentation)
    assert (said is not None) == there
    if there:
        assert f"in the median iteration never less than {gap:.2f} GiB" in job.finding(fragmentation).evidence[0]
        assert "empty_cache" not in job.finding(fragmentation).advice


def without_capacity(job: Job) -> Job:
    for number in job.ranks:
        job.builder.rank(number).meta["devices"][0]["capacity_bytes"] = None
    return job


@pytest.mark.parametrize("rule", [free_memory, memory_outside_torch, fragmentation])
def test_what_was_not_recorded_is_asked_for(rule: Rule) -> None:
    for job in (devices(Job(2)), without_capacity(on_gpu()), without_capacity(offloaded())):
        said = job.says(rule)
        assert isinstance(said, Unknown)
        assert said.record
    assert on_cpu().says(rule) is None


def test_the_kind_of_state_is_known_from_where_it_lies() -> None:
    places: list[tuple[Any, bool]] = [(["cpu"], True), (["cuda"], False), (["cpu", "cuda"], False), ([], False)]
    for where, offloads in places:
        job = on_gpu(used=78).meta(optimizers=[{"class": "AdamW", "params": PARAMS, "state_devices": where}])
        assert (job.says(free_memory) is not None) == offloads
