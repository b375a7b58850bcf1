"""The rules on published runs of which is known what held them back, and what they took without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.findings.study import Study
from ebbtide.analysis.windows import find_windows
from ebbtide.profiler.importers.load import Hardware, import_trace
from ebbtide.profiler.trace import Trace

PUBLISHED = Path(__file__).parents[4] / "shared" / "published" / "deep-optimizer-states"
needs_runs = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published runs are not here")
H100 = "h100-20B/log-20B-tp1-dp4-l40-h5120-a64-sl2048-gbs4-mbs1-ratio{}-subg100000000-prefetch0-flush_async{}-opt_gaps0"
A100 = "a100-13B/log-13B-tp1-dp4-l40-h5120-a40-sl2048-gbs4-mbs1-ratio{}-subg100000000-prefetch0-flush_async{}-opt_gaps0"
RULE = "blocking-gradients"


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """The trace of a run, imported once."""
    folder = tmp_path_factory.mktemp("published")

    @cache
    def run(name: str) -> Trace:
        log = PUBLISHED / f"{name}.log"
        monitor = log.with_name(log.stem + "-monitor.csv")
        files = [log, monitor] if monitor.exists() else [log]
        hardware = Hardware(link=(5, 16)) if monitor.exists() else None
        return import_trace(files, folder / f"{log.stem}.ebb", hardware=hardware)

    return run


@needs_runs
@pytest.mark.parametrize(("runs", "ratio"), [(H100, "1.0"), (A100, "1"), slow(H100, "0.8"), slow(H100, "0.5")])
def test_the_blocking_backward_is_worth_what_the_asynchronous_run_saves(
    runs: str, ratio: str, imported: Callable[[str], Trace]
) -> None:
    blocking, asynchronous = (imported(runs.format(ratio, way)) for way in (0, 1))
    before, after = (Study(trace).ms("backward") for trace in (blocking, asynchronous))
    assert before is not None
    assert after is not None
    found = find(blocking)
    assert found.findings[0].rule == RULE
    assert found.findings[0].worth_ms == pytest.approx(before - after, rel=0.15)
    assert RULE not in {f.rule for f in find(asynchronous).findings}


@needs_runs
@pytest.mark.parametrize("ratio", [slow("1.0"), slow("0.8"), "0.5"])
def test_the_update_is_bound_by_the_cpu_at_its_own_rate(ratio: str, imported: Callable[[str], Trace]) -> None:
    found = find(imported(H100.format(ratio, 1)))
    (update,) = [f for f in found.findings if f.rule == "cpu-bound-update"]
    # The CPU updates as fast whichever share it has.
    rate = float(update.evidence[2].split("updates ")[1].split(" G")[0])
    assert rate == pytest.approx(1.69, rel=0.05)
    # Interleaving, as published, brought a part of what the idle link could.
    interleaved = H100.format(ratio, 1).replace("prefetch0", "prefetch1").replace("opt_gaps0", "opt_gaps2")
    before, after = Study(imported(H100.format(ratio, 0))), Study(imported(interleaved))
    saved = (before.ms("update") or 0) - (after.ms("update") or 0)
    assert update.worth_ms is not None
    assert saved < update.worth_ms < 2 * saved


@needs_runs
def test_the_windows_name_what_is_free_in_the_update(imported: Callable[[str], Trace]) -> None:
    trace = imported(H100.format("1.0", 0))
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
