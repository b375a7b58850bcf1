"""Finds training that was resumed without Adam's moments, which DeepSpeed loses for state on storage."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics


def check(metrics: TraceMetrics) -> Finding | None:
    """Return a finding if a checkpoint was loaded and the swapped state had no moments afterwards."""
    if metrics.deepspeed is None or not metrics.deepspeed.info.moments_lost:
        return None
    evidence = (
        "after `load_checkpoint`, which set the engine's step count, the swapped state knew no file of a moment",
        "DeepSpeed copies these files, but a new process does not read them: moments and Adam's step count begin at 0",
    )
    return Finding(
        "lost-moments",
        "Training was resumed without Adam's moments and step count",
        None,
        evidence,
        "train with offload_optimizer.device: cpu, whose checkpoints are exact, or warm the learning rate up again; "
        "losses after this resume are not those of an uninterrupted run",
    )
