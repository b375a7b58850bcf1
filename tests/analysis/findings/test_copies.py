"""Pageable copies, copies that take turns, links that ranks share."""

from __future__ import annotations

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.copies import one_direction, pageable_copies, shared_link
from tests.analysis.findings.jobs import MIB, PEAK, Job, async_copies, devices, offloaded, on_cpu, on_gpu

GB = 10**9


def slow_pair(job: Job, together_ms: float, alone_ms: float = 4) -> Job:
    """Two ranks that copy 100 MiB each for themselves, then 1 GB side by side."""
    for number in job.ranks:
        job.copy("h2d", "forward", 10 * number, alone_ms, 100 * MIB, ranks=[number])
    size = round(100 * MIB / alone_ms * 10)  # what takes 10 ms alone
    return job.copy("h2d", "update", 5, together_ms, size)


def test_pageable_copies_at_a_quarter_of_the_pinned_rate_are_worth_three_quarters() -> None:
    job = on_gpu().copy("h2d", "forward", 0, 10, GB // 5).copy("h2d", "backward", 0, 40, GB // 5, "pageable")
    found = job.finding(pageable_copies)
    # The batch of 40 MB in 1 ms is pinned too: 240 MB in 11 ms.
    pinned = 0.24 / 11e-3
    assert found.worth_ms == pytest.approx(40 * (1 - (0.2 / 40e-3) / pinned), rel=1e-3)
    assert (
        "1 pageable copies per iteration, 190.73 MiB in 40.0 ms (5 GB/s; pinned ones could run at 21.8 GB/s)"
        in (found.evidence[0])
    )


def test_without_pinned_copies_the_links_peak_is_the_measure() -> None:
    job = offloaded().copy("d2h", "update", 0, 40, GB // 2, "pageable")
    assert job.finding(pageable_copies).worth_ms == pytest.approx(40 * (1 - 12.5e9 / PEAK))


def test_both_directions_count_and_the_warm_up_does_not() -> None:
    job = offloaded().copy("d2h", "update", 0, 40, GB // 2, "pageable")
    job.copy("h2d", "update", 50, 20, GB // 4, "pageable")
    for number in job.ranks:
        job.builder.rank(number).transfer("h2d", 0, 10**9, 1, f"cuda:{number}", host_memory="pageable")
    found = job.finding(pageable_copies)
    assert found.worth_ms == pytest.approx(60 * (1 - 12.5e9 / PEAK))
    assert len(found.evidence) == 2


def test_where_neither_pinned_copies_nor_a_peak_tell_there_is_no_worth() -> None:
    found = offloaded(peak=None).copy("d2h", "update", 0, 40, GB // 2, "pageable").finding(pageable_copies)
    assert found.worth_ms is None
    assert "12.5 GB/s" in found.evidence[0]
    assert offloaded(peak=None).copy("d2h", "update", 0, 4, GB // 20, "pageable").says(pageable_copies) is None


@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded()),
        on_gpu(),
        offloaded().copy("d2h", "update", 0, 40, None, "pageable"),
        offloaded().copy("d2h", "update", 0, 5, GB // 20, "pageable"),  # 4 ms of 405: less than 1 %
        offloaded().copy("d2h", "update", 0, 40, 2 * GB, "pageable"),  # at the peak
        on_cpu().meta(transfers_recorded=True),
    ],
)
def test_pinned_copies_small_ones_and_fast_ones_are_well(job: Job) -> None:
    assert job.says(pageable_copies) is None


def test_one_percent_of_the_iteration_is_enough() -> None:
    found = offloaded().copy("d2h", "update", 0, 5.5, 5_500_000, "pageable").finding(pageable_copies)
    assert found.worth_ms == pytest.approx(5.5 * (1 - 1e9 / PEAK))


def test_copies_that_do_not_tell_their_memory_are_asked_for() -> None:
    assert isinstance(offloaded().says(pageable_copies), Unknown)
    assert isinstance(offloaded().copy("d2h", "update", 0, 40, GB, None).says(pageable_copies), Unknown)


@pytest.mark.parametrize(
    ("h2d", "d2h", "both"), [((0, 30), (30, 30), 0), ((0, 30), (20, 60), 10), ((10, 80), (0, 90), 80)]
)
def test_copies_that_take_turns_are_worth_the_overlap_that_is_possible(
    h2d: tuple[int, int], d2h: tuple[int, int], both: int
) -> None:
    job = offloaded().copy("h2d", "update", *h2d, GB // 10).copy("d2h", "update", *d2h, GB // 10)
    possible = min(h2d[1], d2h[1]) - both
    if not possible:
        assert job.says(one_direction) is None
        return
    found = job.finding(one_direction)
    assert found.worth_ms == pytest.approx(possible)
    assert found.evidence == (
        f"update: h2d busy {h2d[1]:.1f} ms, d2h busy {d2h[1]:.1f} ms, both at once "
        + (f"{both:.1f} ms" if both >= 10 else f"{both:.2f} ms"),
    )


def test_phases_add_up_and_copies_of_different_phases_or_ranks_cannot_overlap() -> None:
    job = offloaded(2).copy("h2d", "forward", 0, 30, GB // 10).copy("d2h", "backward", 0, 30, GB // 10)
    job.copy("h2d", "update", 0, 50, GB // 10, ranks=[0]).copy("d2h", "update", 0, 50, GB // 5, ranks=[1])
    assert job.says(one_direction) is None
    job.copy("d2h", "forward", 40, 20, GB // 10).copy("h2d", "backward", 40, 10, GB // 10, ranks=[1])
    found = job.finding(one_direction)
    assert found.worth_ms == pytest.approx(20 + 10)
    assert [line.partition(":")[0] for line in found.evidence] == ["forward", "backward"]


@pytest.mark.parametrize(("length", "there"), [(3.9, False), (4.2, True)])
def test_turns_of_less_than_one_percent_are_well(length: float, there: bool) -> None:
    job = offloaded().copy("h2d", "update", 0, 20, GB // 10).copy("d2h", "update", 30, length, GB // 10)
    assert (job.says(one_direction) is not None) == there


def test_turns_cannot_be_told_without_copies() -> None:
    assert isinstance(offloaded().sample("update", 0.5, 0.5).says(one_direction), Unknown)
    assert on_cpu().says(one_direction) is None


@pytest.mark.parametrize("together", [15, 40])
def test_ranks_that_slow_each_other_share_a_link(together: float) -> None:
    found = slow_pair(offloaded(2), together).finding(shared_link)
    assert found.worth_ms == pytest.approx(together - 10, rel=1e-6)
    assert "alone" in found.evidence[0]
    assert "(12 and 12 copies of 1 MiB or more)" in found.evidence[0]


@pytest.mark.parametrize(
    "job",
    [
        slow_pair(offloaded(2), 13.9),  # less than 1.4 times slower
        slow_pair(offloaded(1), 40),
        async_copies(offloaded(2)),
        on_gpu(2),
        on_cpu(2),
    ],
)
def test_ranks_that_do_not_share_no_link(job: Job) -> None:
    assert job.says(shared_link) is None


def test_pageable_copies_beside_each_other_are_not_held_against_pinned_ones_alone() -> None:
    job = offloaded(2)
    for number in job.ranks:
        job.copy("h2d", "forward", 10 * number, 4, 100 * MIB, ranks=[number])
    assert job.copy("h2d", "update", 5, 40, 100 * MIB, "pageable").says(shared_link) is None


def test_ranks_of_two_hosts_share_no_link() -> None:
    job = slow_pair(offloaded(2), 40)
    job.builder.rank(1, host="another")
    assert job.says(shared_link) is None


def test_every_rank_must_tell_of_its_copies() -> None:
    assert isinstance(devices(Job(2)).says(shared_link), Unknown)
    job = offloaded(2).copy("h2d", "update", 0, 40, GB, ranks=[1])
    assert isinstance(job.says(shared_link), Unknown)
