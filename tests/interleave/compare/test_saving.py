"""Schedules that are saved as traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.interleave.compare.results import Comparison, save_traces
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import open_trace


def test_save_traces__writes_a_measured_and_a_predicted_trace_per_policy(
    comparison: Comparison, tmp_path: Path
) -> None:
    save_traces(comparison, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * len(comparison.results)
    for result in comparison.results:
        name = result.policy.replace(":", "_")
        for half, schedule, source in (
            ("measured", result.measured, "recorded"),
            ("predicted", result.predicted, "simulated"),
        ):
            trace = open_trace(tmp_path / f"{name}.{half}.ebb")
            assert trace.meta.source == source
            assert any(half in note and "emulated" in note for note in trace.notes)
            phases = {phase.phase: phase.median_ms for phase in summarize(trace).phases}
            for phase in PHASES:
                assert phases[phase] == pytest.approx(
                    1e3 * getattr(schedule, f"{phase}_s"), abs=1e-5
                )
            assert len(trace.ops(rank=0)) == len(schedule.plan.ops)
            assert set(trace.memory(rank=0)["pool"]) == {"planned"}
            assert trace.memory(rank=0)["bytes"].max() == schedule.peak_device_bytes
