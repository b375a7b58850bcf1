"""The rule `frozen-weights-down`."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.features.layers.findings import frozen_weights_down
from tests.analysis.findings.jobs import MIB, Job, on_gpu

SIZES = [64 * MIB, 32 * MIB]


def _job(trained: float = 0.01, **ms: Any) -> Job:
    model = {"total_params": 1000, "trainable_params": round(1000 * trained)}
    return on_gpu(used=60, **ms).meta(model=model)


def _swap(job: Job, phase: str, directions: tuple[str, ...] = ("h2d", "d2h")) -> Job:
    for number, size in enumerate(SIZES):
        for place, direction in enumerate(directions):
            job.copy(direction, phase, 10 + 20 * number + 10 * place, 8, size)
    return job


def test_frozen_weights_down__names_copies_that_come_up_again() -> None:
    job = _swap(_swap(_job(), "forward"), "backward")
    finding = job.finding(frozen_weights_down)
    assert finding.potential_gain_ms == pytest.approx(4 * 8)
    assert finding.evidence[0].startswith("4 copies an iteration, 192.00 MiB in 32.0")
    assert "copies up only" in finding.advice
    assert "swap fewer blocks" in finding.advice


@pytest.mark.parametrize("trained", [1.0, 0.6])
def test_frozen_weights_down__is_silent_where_weights_are_trained(
    trained: float,
) -> None:
    assert _swap(_job(trained), "forward").result(frozen_weights_down) is None


def test_frozen_weights_down__is_silent_on_copies_up_only() -> None:
    job = _swap(_job(), "forward", ("h2d",))
    assert job.result(frozen_weights_down) is None


def test_frozen_weights_down__is_silent_on_activations() -> None:
    """They go down in the forward, and up in the backward."""
    job = _swap(_job(), "forward", ("d2h",))
    assert _swap(job, "backward", ("h2d",)).result(frozen_weights_down) is None


def test_frozen_weights_down__is_silent_on_few_bytes() -> None:
    job = _job(forward=1e5)
    assert _swap(job, "forward").result(frozen_weights_down) is None
