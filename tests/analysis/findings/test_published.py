"""The rules on published runs whose bottleneck is known, with runs that do not have
it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.advise.trace_advice import TraceAdviser
from ebbtide.profiler.trace import Trace, open_trace

TRACES = Path(__file__).parents[3] / "traces"
RULE = "blocking-gradients"


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def run(name: str) -> Trace:
    """The trace of a run, opened once."""
    return open_trace(TRACES / f"{name}.ebb")


@pytest.mark.parametrize(
    "job",
    [
        "h100-20b",
        slow("a100-13b"),
        slow("h100-20b-ratio0.8"),
        slow("h100-20b-ratio0.5"),
    ],
)
def test_blocking_gradients__gain_matches_asynchronous_run(job: str) -> None:
    blocking, asynchronous = run(f"{job}-blocking"), run(f"{job}-async")
    before, after = (
        JobMetrics(trace).phase_ms("backward") for trace in (blocking, asynchronous)
    )
    assert before is not None
    assert after is not None
    findings = find(blocking, TraceAdviser(blocking)).findings
    (waiting,) = [finding for finding in findings if finding.rule == RULE]
    # On the A100 most of the state fits into free memory, which would gain even more;
    # on the H100 all of it, which removes this wait.
    assert findings.index(waiting) == 1
    assert (RULE in findings[0].removes) == job.startswith("h100")
    assert waiting.potential_gain_ms == pytest.approx(before - after, rel=0.15)
    assert RULE not in {f.rule for f in find(asynchronous).findings}
