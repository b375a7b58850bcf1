"""Ranks that differ in a known way are found with their cause; equal ranks with noise
are not reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.analysis.metrics.ranks.comparison import RankDifference, rank_differences
from ebbtide.profiler.trace import TraceBuilder
from ebbtide.units import runs_text
from tests.analysis.metrics.ranks.fleets import GIB, fleet
from tests.conftest import slow_case


def only(*differences: RankDifference) -> RankDifference:
    (difference,) = differences
    return difference


@pytest.mark.parametrize("ranks", [2, slow_case(4)])
@pytest.mark.parametrize(
    ("peculiar", "cause", "quantities"),
    [
        (
            {"forward": 1.25},
            "slow forward",
            {"forward_ms", "phases_ms", "backward_late_ms"},
        ),
        ({"update": 1.2}, "slow update", {"update_ms", "phases_ms"}),
        (
            {"late_ms": 80.0},
            "late forward",
            {"forward_late_ms", "backward_late_ms", "update_late_ms"},
        ),
        ({"link": 0.5}, "slow link", {"h2d_bytes_per_s", "d2h_bytes_per_s"}),
        ({"bytes": 4 * GIB}, "less free memory", {"free_bytes"}),
        ({"clock": 0.8}, "slow clock", {"sm_clock_mhz"}),
    ],
)
def test_rank_differences__finds_rank_and_cause(
    ranks: int, peculiar: dict[str, float], cause: str, quantities: set[str]
) -> None:
    difference = only(
        *rank_differences(fleet(ranks, peculiar={1: peculiar}, noise=0.01)).differences
    )
    assert (difference.ranks, difference.cause, difference.is_host) == (
        (1,),
        cause,
        False,
    )
    assert quantities <= {deviation.quantity for deviation in difference.deviations}


def test_rank_differences__states_values_beside_usual_ones() -> None:
    job = fleet(5, peculiar={3: {"backward": 1.5, "bytes": 8 * GIB}}, noise=0.0)
    difference = only(*rank_differences(job).differences)
    deviations = {deviation.quantity: deviation for deviation in difference.deviations}
    assert deviations["backward_ms"].value == pytest.approx(600)
    assert deviations["backward_ms"].usual == pytest.approx(400)
    assert deviations["update_late_ms"].value == pytest.approx(200)
    assert deviations["free_bytes"].usual - deviations[
        "free_bytes"
    ].value == pytest.approx(8 * GIB, abs=70 * 2**20)
    assert difference.extra_ms == pytest.approx(200)
    assert deviations["backward_ms"].text == "backward 600.0 ms, usual 400.0 ms (+50 %)"


def test_rank_differences__rank_with_fewer_bytes_has_no_slow_link() -> None:
    # Its rates are half of the others', and so are its bytes: it moves less, which says
    # nothing about its link.
    builder = TraceBuilder("recorded", warmup_iterations=0)
    for rank in range(6):
        job = builder.rank(
            rank,
            devices=[
                {"device": "cuda:0", "kind": "cuda", "link": {"peak_bytes_per_s": 32e9}}
            ],
        )
        starts = np.arange(10) * 10**9
        job.extend(
            "phases",
            phase="update",
            iteration=np.arange(10),
            micro_step=0,
            start_ns=starts,
            end_ns=starts + 10**9,
        )
        rate = 4e9 if rank == 2 else 8e9
        ends = np.arange(1, 100) * 10**8
        columns = {
            "source": "gpm",
            "window_ns": 10**8,
            "h2d_bytes_per_s": rate,
            "d2h_bytes_per_s": rate,
        }
        job.extend("link", t_ns=ends, device="cuda:0", **columns)
    assert not rank_differences(builder.build()).differences


def test_rank_differences__groups_ranks_of_a_host() -> None:
    peculiar: dict[int, dict[str, float]] = {
        rank: {"update": 1.2} for rank in range(3, 6)
    }
    peculiar[1] = {"link": 0.6}
    peculiar[4] = {"update": 1.2, "forward": 1.4}
    result = rank_differences(fleet(12, 10, peculiar, noise=0.005, ranks_per_host=3))
    assert (result.compared, result.hosts) == (12, 4)
    host, *others = result.differences
    assert (host.is_host, host.host, host.ranks, host.cause) == (
        True,
        "node1",
        (3, 4, 5),
        "slow update",
    )
    assert {(rank.ranks, rank.cause) for rank in others} == {
        ((4,), "slow forward"),
        ((1,), "slow link"),
    }
    assert result.ranks == [1, 3, 4, 5]


def test_rank_differences__hosts_with_clocks_apart_are_not_late() -> None:
    # A clock of another host that is 300 ms ahead.
    peculiar: dict[int, dict[str, float]] = {
        rank: {"late_ms": 300.0} for rank in (4, 5, 6, 7)
    }
    peculiar[6] = {"late_ms": 380.0}
    difference = only(
        *rank_differences(
            fleet(12, 10, peculiar, noise=0.005, ranks_per_host=4)
        ).differences
    )
    assert (difference.ranks, difference.cause) == ((6,), "late forward")
    assert difference.deviations[0].value == pytest.approx(80, abs=3)


def test_rank_differences__lists_facts_unlike_those_of_most_ranks() -> None:
    job = fleet(6, peculiar={4: {"link": 0.5}}, noise=0.01, threads={"torch": 8})
    job.raw_meta["ranks"][4]["devices"][0]["link"]["width"] = 8
    for rank in (0, 1, 2, 3, 5):
        job.raw_meta["ranks"][rank]["devices"][0]["link"]["width"] = 16
    assert only(*rank_differences(job).differences).facts == (
        "link lanes 8 (usual: 16)",
    )


@pytest.mark.parametrize("job", [{"ranks": 1}, {"ranks": 3, "iterations": 4}])
def test_rank_differences__needs_ranks_and_iterations(job: dict[str, Any]) -> None:
    result = rank_differences(fleet(**job, peculiar={0: {"forward": 3.0}}))
    assert (result.compared, result.differences, result.as_json()) == (0, (), None)


@pytest.mark.parametrize(
    ("ranks", "iterations", "jobs"),
    [
        (5, 10, 1),
        pytest.param(2, 10, 200, marks=pytest.mark.slow),
        pytest.param(4, 8, 100, marks=pytest.mark.slow),
        pytest.param(64, 30, 10, marks=pytest.mark.slow),
    ],
)
def test_rank_differences__of_equal_ranks_are_none(
    ranks: int, iterations: int, jobs: int
) -> None:
    # Iterations scatter by 5 %, ranks do not differ.
    difference = [
        bool(
            rank_differences(
                fleet(ranks, iterations, noise=0.05, seed=seed, ranks_per_host=4)
            ).differences
        )
        for seed in range(jobs)
    ]
    assert sum(difference) <= 0.01 * jobs


def test_runs_text__joins_runs() -> None:
    assert runs_text([0, 2, 3, 4, 9]) == "0, 2-4, 9"
