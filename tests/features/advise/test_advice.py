"""Advice cannot be made of a simulation that is no better than the job, or does not
fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.analysis.metrics.advice import Advice, AdviceError, IterationGain
from ebbtide.analysis.metrics.device_fit import MemoryNeed
from ebbtide.features.advise.recommendation import recommend
from ebbtide.interleave.replay.recorded_job import RecordedJob
from tests.interleave.job_files import machine, workload


def advice(gain: IterationGain, *memory: MemoryNeed) -> Advice:
    return Advice("policy", {"policy": "adaptive"}, "use adaptive", gain, memory)


@pytest.mark.parametrize(
    "gain",
    [
        IterationGain(100.0, 100.0, present_ms=90.0),
        # It gains less than a change is worth.
        IterationGain(100.0, 100.0, present_ms=101.9),
        # It is faster than the simulated iteration, and slower than the recorded one.
        IterationGain(100.0, 100.0, present_ms=150.0, recorded_ms=95.0),
        # It does not settle.
        IterationGain(100.0, 160.0, present_ms=150.0),
    ],
)
def test_advice__is_refused_where_it_gains_too_little(gain: IterationGain) -> None:
    with pytest.raises(AdviceError, match="use adaptive: it gains too little"):
        advice(gain)


@pytest.mark.parametrize("memory", ["device", "host", "pinned"])
def test_advice__is_refused_where_it_does_not_fit(memory: str) -> None:
    faster = IterationGain(100.0, 100.0, present_ms=150.0)
    assert advice(faster, MemoryNeed(memory, 8e9, 8e9)).gain_ms == 50.0
    assert advice(faster, MemoryNeed(memory, 8e9, None)).gain_ms == 50.0
    with pytest.raises(AdviceError, match=f"it does not fit \\({memory}\\)"):
        advice(faster, MemoryNeed(memory, 8e9 + 1, 8e9))


def test_recommend__says_what_its_advice_is_for_and_needs() -> None:
    advised = recommend(
        workload(), machine(), RecordedJob(policy="zero-offload")
    ).advice
    assert advised is not None
    assert advised.gain.baseline == "zero-offload"
    assert advised.framework == "ebbtide"
    needs = {need.memory: need for need in advised.memory}
    assert needs["device"].needed_bytes <= (needs["device"].free_bytes or 0.0)
    assert needs["host"].needed_bytes > 0
    assert advised.placeholders == (
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
        "optimizer",
    )
    assert "enable(" in advised.lines["deepspeed"]
    assert "InterleavedAdamW(" in advised.lines["script"]
    slower = replace(advised.gain, present_ms=advised.iteration_ms)
    with pytest.raises(AdviceError):
        replace(advised, gain=slower)
