"""Limits of a run: planted changes fail, equal runs pass, and what is not known is no
pass."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.errors import UserError
from ebbtide.features.diff.comparison import compare
from ebbtide.features.diff.gate import Limit, results
from ebbtide.profiler.trace import Trace
from tests.conftest import slow_case
from tests.features.diff.test_diff import trained, with_updates

TIMES = np.random.default_rng(0).normal(1000, 5, (20, 40))


def fails(a: Trace, b: Trace, limit: str) -> bool:
    (result,) = results(compare(a, b), [Limit.parse(limit)])
    return result.fails


@pytest.mark.parametrize(
    ("factor", "failing"), [(1.0, 0), (1.06, 10), slow_case(0.9, 0)]
)
def test_results__tell_six_percent_from_five_on_a_quiet_machine(
    factor: float, failing: int
) -> None:
    """Updates of 1 s with noise of 0.5 %."""
    runs = [trained([round(time) for time in times]) for times in TIMES[:10]]
    slower = [trained([round(factor * time) for time in times]) for times in TIMES[10:]]
    assert (
        sum(fails(a, b, "update>5%") for a, b in zip(runs, slower, strict=True))
        == failing
    )


def test_results__need_certainty_of_times_and_none_of_sizes() -> None:
    wide = trained([50, 150] * 10), trained([58, 158] * 10)
    (result,) = results(compare(*wide), [Limit.parse("update > 5 %")])
    assert result.share == pytest.approx(0.08)
    assert result.low_share < 0.05
    assert not result.fails
    assert fails(
        trained([5] * 3, peak=10_000), trained([5] * 3, peak=10_200), "peak_device>1%"
    )
    assert not fails(
        trained([5] * 3, peak=10_000), trained([5] * 3, peak=10_100), "peak_device>1%"
    )
    assert fails(trained([5] * 3, moved=0), trained([5] * 3, moved=1), "h2d_bytes>50%")
    assert not fails(
        trained([5] * 3, moved=0), trained([5] * 3, moved=0), "h2d_bytes>0%"
    )


def test_results__of_dry_runs_are_exact() -> None:
    predicted = [with_updates([time] * 2) for time in (100, 110)]
    for builder in predicted:
        builder.meta["source"] = "predicted"
    (result,) = results(
        compare(*(builder.build() for builder in predicted)), [Limit.parse("update>9%")]
    )
    assert result.is_exact
    assert result.fails


@pytest.mark.parametrize(
    ("count", "limit", "message"),
    [
        (2, "update>5%", "fewer than three"),
        (3, "peak_reserved>1%", "peak_reserved of a.ebb is not known; both have"),
    ],
)
def test_results__refuse_what_is_not_known(
    count: int, limit: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fails(trained([5] * count), trained([5] * count), limit)


def test_limit__refuses_anything_else() -> None:
    for text in [
        "",
        "iteration",
        "iteration<5%",
        "iteration>5",
        "iteration>-5%",
        "speed>5%",
        "peak_>1%",
    ]:
        with pytest.raises(ValueError, match="is not a"):
            Limit.parse(text)
