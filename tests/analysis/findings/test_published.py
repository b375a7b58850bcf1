"""The rules on published runs of which is known what held them back, and what they took without it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.trace_metrics import Study
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.profiler.trace import Trace, open_trace

TRACES = Path(__file__).parents[3] / "traces"
RULE = "blocking-gradients"


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def run(name: str) -> Trace:
    """The trace of a run, opened once."""
    return open_trace(TRACES / f"{name}.ebb")


@pytest.mark.parametrize("job", ["h100-20b", "a100-13b", slow("h100-20b-ratio0.8"), slow("h100-20b-ratio0.5")])
def test_the_blocking_backward_is_worth_what_the_asynchronous_run_saves(job: str) -> None:
    blocking, asynchronous = run(f"{job}-blocking"), run(f"{job}-async")
    before, after = (Study(trace).ms("backward") for trace in (blocking, asynchronous))
    assert before is not None
    assert after is not None
    findings = find(blocking).findings
    (waiting,) = [finding for finding in findings if finding.rule == RULE]
    # On the A100 the whole state nearly fits into free memory, which is worth still more.
    assert findings.index(waiting) == (1 if job == "a100-13b" else 0)
    assert waiting.worth_ms == pytest.approx(before - after, rel=0.15)
    assert RULE not in {f.rule for f in find(asynchronous).findings}


@pytest.mark.parametrize("job", [slow("h100-20b"), slow("h100-20b-ratio0.8"), "h100-20b-ratio0.5"])
def test_the_update_is_bound_by_the_cpu_at_its_own_rate(job: str) -> None:
    found = find(run(f"{job}-async"))
    (update,) = [f for f in found.findings if f.rule == "cpu-bound-update"]
    # The CPU updates as fast whichever share it has.
    rate = float(update.evidence[2].split("updates ")[1].split(" G")[0])
    assert rate == pytest.approx(1.69, rel=0.05)
    # Interleaving, as published, brought a part of what the idle link could.
    before, after = Study(run(f"{job}-blocking")), Study(run(f"{job}-interleaved-2"))
    saved = (before.ms("update") or 0) - (after.ms("update") or 0)
    assert update.worth_ms is not None
    assert saved < update.worth_ms < 2 * saved


def test_the_windows_name_what_is_free_in_the_update() -> None:
    trace = run("h100-20b-blocking")
    found = find_windows(trace, 40 * 2**30)
    assert {w.rank for w in found.windows} == {0, 1, 2, 3}
    for rank in trace.ranks:
        places = [w for w in found.guaranteed if (w.rank, w.phase) == (rank, "update")]
        longest = max(places, key=lambda w: w.end_ms - w.start_ms)
        assert longest.end_ms - longest.start_ms > 2000  # of 2272 ms
        assert longest.free_bytes > 60 * 2**30
        assert longest.d2h_idle_share is not None
        assert longest.d2h_idle_share > 0.9
    assert not any(word in line for f in find(trace).findings for line in f.evidence for word in ("nan", "None"))
