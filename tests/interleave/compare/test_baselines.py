"""Other optimizers on the same job."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ebbtide.interleave.compare.compare import CompareConfig, compare
from ebbtide.interleave.compare.results import Comparison
from tests.conftest import needs_all_features
from tests.interleave.compare.conftest import LINK, TINY
from tests.interleave.compare.test_compare import MACHINE


@pytest.mark.slow
def test_torch__starts_from_the_same_loss_and_follows_it(
    comparison: Comparison,
) -> None:
    (baseline,) = comparison.baselines
    ours = comparison.results[0].losses
    assert baseline.name == "torch"
    assert baseline.losses[0] == ours[0]
    assert baseline.losses == pytest.approx(ours, abs=0.02)
    assert baseline.final_loss == baseline.losses[-1]
    assert (
        0
        < max(baseline.forward_ms, baseline.backward_ms, baseline.update_ms)
        < baseline.iteration_ms
    )


@needs_all_features
@pytest.mark.parametrize("name", ["deepspeed", "torchao"])
def test_run_baseline__a_missing_package_is_skipped(name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    config = CompareConfig(
        ("pipelined",),
        3,
        TINY,
        link_bytes_per_s=LINK,
        machine=MACHINE,
        baselines=(name,),
    )
    assert compare(config).skipped == {name: f"not installed: pip install {name}"}
