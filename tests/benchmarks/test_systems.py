"""Tests of the published figures of other systems: most of what the simulator predicts
is close to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.systems import CLOSE, Figure, megatron_bridge, zenflow


@pytest.mark.parametrize("source", [megatron_bridge, zenflow])
def test_figures__at_least_three_are_predicted(
    source: Callable[[], list[Figure]],
) -> None:
    predicted = [figure for figure in source() if not figure.is_fitted]
    assert (
        sum(
            abs(figure.simulated / figure.published - 1) <= CLOSE
            for figure in predicted
        )
        >= 3
    )
