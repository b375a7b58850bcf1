"""The rules on copies: `pageable-copies`, `one-direction`, `shared-link`."""

from __future__ import annotations

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.rules.link import (
    one_direction,
    pageable_copies,
    shared_link,
)
from tests.analysis.findings.jobs import (
    MIB,
    PEAK,
    Job,
    async_copies,
    devices,
    offloaded,
    on_cpu,
    on_gpu,
)

GB = 10**9


def slow_pair(job: Job, together_ms: float, alone_ms: float = 4) -> Job:
    """Add copies of 100 MiB that each rank makes alone, then copies that all ranks make
    at once."""
    for number in job.ranks:
        job.copy("h2d", "forward", 10 * number, alone_ms, 100 * MIB, ranks=[number])
    size = round(100 * MIB / alone_ms * 10)  # what takes 10 ms alone
    return job.copy("h2d", "update", 5, together_ms, size)


def test_pageable_copies__gain_is_time_saved_at_pinned_rate() -> None:
    job = (
        on_gpu()
        .copy("h2d", "forward", 0, 10, GB // 5)
        .copy("h2d", "backward", 0, 40, GB // 5, "pageable")
    )
    finding = job.finding(pageable_copies)
    # The batch of 40 MB in 1 ms is pinned too: 240 MB in 11 ms.
    pinned = 0.24 / 11e-3
    assert finding.potential_gain_ms == pytest.approx(
        40 * (1 - (0.2 / 40e-3) / pinned), rel=1e-3
    )
    assert (
        "1 pageable copies per iteration, 190.73 MiB in 40.0 ms (5 GB/s; pinned ones "
        "could run at 21.8 GB/s)" in (finding.evidence[0])
    )


def test_pageable_copies__compares_with_link_peak_without_pinned_copies() -> None:
    job = offloaded().copy("d2h", "update", 0, 40, GB // 2, "pageable")
    assert job.finding(pageable_copies).potential_gain_ms == pytest.approx(
        40 * (1 - 12.5e9 / PEAK)
    )


def test_pageable_copies__counts_both_directions_without_warm_up() -> None:
    job = offloaded().copy("d2h", "update", 0, 40, GB // 2, "pageable")
    job.copy("h2d", "update", 50, 20, GB // 4, "pageable")
    for number in job.ranks:
        job.builder.rank(number).transfer(
            "h2d", 0, 10**9, 1, f"cuda:{number}", host_memory="pageable"
        )
    finding = job.finding(pageable_copies)
    assert finding.potential_gain_ms == pytest.approx(60 * (1 - 12.5e9 / PEAK))
    assert len(finding.evidence) == 2


def test_pageable_copies__is_none_for_values_that_the_job_reads() -> None:
    job = offloaded().copy("d2h", "forward", 0, 40, 4, "pageable")
    assert job.result(pageable_copies) is None


def test_pageable_copies__has_no_gain_without_pinned_copies_and_peak() -> None:
    finding = (
        offloaded(peak=None)
        .copy("d2h", "update", 0, 40, GB // 2, "pageable")
        .finding(pageable_copies)
    )
    assert finding.potential_gain_ms is None
    assert "12.5 GB/s" in finding.evidence[0]
    assert (
        offloaded(peak=None)
        .copy("d2h", "update", 0, 4, GB // 20, "pageable")
        .result(pageable_copies)
        is None
    )


@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded()),
        on_gpu(),
        offloaded().copy("d2h", "update", 0, 40, None, "pageable"),
        # 4 ms of 405: less than 1 %
        offloaded().copy("d2h", "update", 0, 5, GB // 20, "pageable"),
        offloaded().copy("d2h", "update", 0, 40, 2 * GB, "pageable"),  # at the peak
        on_cpu().meta(transfers_recorded=True),
    ],
)
def test_pageable_copies__is_none_for_pinned_small_and_fast_copies(job: Job) -> None:
    assert job.result(pageable_copies) is None


def test_pageable_copies__needs_one_percent_of_iteration() -> None:
    finding = (
        offloaded()
        .copy("d2h", "update", 0, 5.5, 5_500_000, "pageable")
        .finding(pageable_copies)
    )
    assert finding.potential_gain_ms == pytest.approx(5.5 * (1 - 1e9 / PEAK))


def test_pageable_copies__asks_for_kind_of_host_memory() -> None:
    assert isinstance(offloaded().result(pageable_copies), Unknown)
    assert isinstance(
        offloaded().copy("d2h", "update", 0, 40, GB, None).result(pageable_copies),
        Unknown,
    )


@pytest.mark.parametrize(
    ("h2d", "d2h", "both"),
    [((0, 30), (30, 30), 0), ((0, 30), (20, 60), 10), ((10, 80), (0, 90), 80)],
)
def test_one_direction__gain_is_possible_overlap(
    h2d: tuple[int, int], d2h: tuple[int, int], both: int
) -> None:
    job = (
        offloaded()
        .copy("h2d", "update", *h2d, GB // 10)
        .copy("d2h", "update", *d2h, GB // 10)
    )
    possible = min(h2d[1], d2h[1]) - both
    if not possible:
        assert job.result(one_direction) is None
        return
    finding = job.finding(one_direction)
    assert finding.potential_gain_ms == pytest.approx(possible)
    assert finding.evidence == (
        f"update: h2d busy {h2d[1]:.1f} ms, d2h busy {d2h[1]:.1f} ms, both at once "
        + (f"{both:.1f} ms" if both >= 10 else f"{both:.2f} ms"),
    )


def test_one_direction__sums_phases_and_compares_within_phase_and_rank() -> None:
    job = (
        offloaded(2)
        .copy("h2d", "forward", 0, 30, GB // 10)
        .copy("d2h", "backward", 0, 30, GB // 10)
    )
    job.copy("h2d", "update", 0, 50, GB // 10, ranks=[0]).copy(
        "d2h", "update", 0, 50, GB // 5, ranks=[1]
    )
    assert job.result(one_direction) is None
    job.copy("d2h", "forward", 40, 20, GB // 10).copy(
        "h2d", "backward", 40, 10, GB // 10, ranks=[1]
    )
    finding = job.finding(one_direction)
    assert finding.potential_gain_ms == pytest.approx(20 + 10)
    assert [text.partition(":")[0] for text in finding.evidence] == [
        "forward",
        "backward",
    ]


@pytest.mark.parametrize(("length", "reported"), [(3.9, False), (4.2, True)])
def test_one_direction__needs_one_percent_of_iteration(
    length: float, reported: bool
) -> None:
    job = (
        offloaded()
        .copy("h2d", "update", 0, 20, GB // 10)
        .copy("d2h", "update", 30, length, GB // 10)
    )
    assert (job.result(one_direction) is not None) == reported


@pytest.mark.parametrize("together", [15, 40])
def test_shared_link__gain_is_slowdown_of_concurrent_copies(together: float) -> None:
    finding = slow_pair(offloaded(2), together).finding(shared_link)
    assert finding.potential_gain_ms == pytest.approx(together - 10, rel=1e-6)
    assert "alone" in finding.evidence[0]
    assert "(12 and 12 copies of 1 MiB or more)" in finding.evidence[0]


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
def test_shared_link__is_none_for_separate_links(job: Job) -> None:
    assert job.result(shared_link) is None


def test_shared_link__compares_copies_of_one_kind() -> None:
    job = offloaded(2)
    for number in job.ranks:
        job.copy("h2d", "forward", 10 * number, 4, 100 * MIB, ranks=[number])
    assert (
        job.copy("h2d", "update", 5, 40, 100 * MIB, "pageable").result(shared_link)
        is None
    )


def test_shared_link__ignores_ranks_of_other_hosts() -> None:
    job = slow_pair(offloaded(2), 40)
    job.builder.rank(1, host="another")
    assert job.result(shared_link) is None


def test_shared_link__asks_for_copies_of_every_rank() -> None:
    assert isinstance(devices(Job(2)).result(shared_link), Unknown)
    job = offloaded(2).copy("h2d", "update", 0, 40, GB, ranks=[1])
    assert isinstance(job.result(shared_link), Unknown)
