"""Random training loops: the peak of a dry run is that of an eager run, to the byte."""

from __future__ import annotations

import pytest

from tests.features.dryrun.random_jobs import peaks

_FAST, _SLOW = 8, 120


@pytest.mark.parametrize("seed", range(_FAST))
def test_dry_run__has_the_peak_of_an_eager_run(seed: int) -> None:
    _, eager, dry = peaks(seed)
    assert dry == eager


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_dry_run__has_the_peaks_of_many_eager_runs() -> None:
    answers = [(seed, *peaks(seed)) for seed in range(_FAST, _SLOW)]
    assert [answer for answer in answers if answer[2] != answer[3]] == []
