"""Findings on files of other tools: rules that apply to a whole trace, and what the
others need."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import Findings, all_rules, find
from ebbtide.analysis.findings.rules.memory import fragmentation, needless_growth
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.importers.importer import Hardware
from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.findings.jobs import GIB, MS, Job, devices
from tests.conftest import ebbtide_in_process
from tests.features.importers.kineto.made_kineto import (
    launched,
    memory_event,
    write_trace,
)
from tests.features.importers.torch_memory.made_snapshots import event, segment

NAMES = {rule.name for rule in all_rules()}
DEEPSPEED_LOG = (
    Path(__file__).parents[2]
    / "features"
    / "importers"
    / "data"
    / "deepspeed-0.19.8-zero3-torchrun.log"
)


def kineto(folder: Path) -> Path:
    """Write a trace without phases, whose GPU is idle for two thirds of the time, and
    whose allocator has 9 GiB."""
    events = [
        *launched(0, 10, 20, 1),
        *launched(
            900,
            1010,
            1020,
            2,
            name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)",
        ),
        *(memory_event(ts, 3 * GIB, 9 * GIB) for ts in (5, 500, 1000)),
    ]
    return write_trace(folder / "run.json", events)


def snapshot(folder: Path) -> Path:
    """Write a memory snapshot of one tensor of 8 GiB in a segment of 24 GiB."""
    contents = {
        "segments": [segment(24 * GIB, 8 * GIB)],
        "device_traces": [[event("alloc", 8 * GIB)]],
    }
    path = folder / "memory.pickle"
    path.write_bytes(pickle.dumps(contents))
    return path


def monitor(folder: Path) -> Path:
    path = folder / "monitor.csv"
    rows = [
        f"2024/04/15 00:52:4{second}.000, 0, {1000 * second} MiB, 81559 MiB"
        for second in range(1, 9)
    ]
    path.write_text(
        "timestamp, index, memory.used [MiB], memory.total [MiB]\n"
        + "\n".join(rows)
        + "\n"
    )
    return path


def imported(folder: Path, make: Callable[[Path], Path]) -> Trace:
    hardware = Hardware(capacity_bytes=None if make is monitor else 80 * GIB)
    return import_trace([make(folder)], folder / "run.ebb", hardware=hardware)


def results(trace: Trace) -> tuple[Findings, dict[str, str]]:
    """Return the findings and the kind of result of each rule; each rule must have
    exactly one."""
    result = find(trace)
    kinds = (
        {finding.rule: "finding" for finding in result.findings}
        | {unknown.rule: "unknown" for unknown in result.unknown}
        | {entry.rule: "not applicable" for entry in result.not_applicable}
        | dict.fromkeys(result.nothing_found, "nothing")
    )
    groups = (
        result.findings,
        result.unknown,
        result.not_applicable,
        result.nothing_found,
    )
    assert sum(map(len, groups)) == len(kinds)
    assert kinds.keys() | {"phases"} == NAMES
    return result, kinds


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            kineto,
            {
                "gpu-idle": "finding",
                "free-memory": "finding",
                "fragmentation": "finding",
                "launch-bound": "nothing",
            },
        ),
        (
            snapshot,
            {
                "free-memory": "finding",
                "fragmentation": "finding",
                "memory-outside-torch": "unknown",
            },
        ),
        (
            monitor,
            {
                "free-memory": "finding",
                "fragmentation": "unknown",
                "gpu-idle": "not applicable",
            },
        ),
        (
            lambda _: DEEPSPEED_LOG,
            {"blocking-gradients": "finding", "free-memory": "finding", "phases": None},
        ),
    ],
)
def test_find__answers_from_the_whole_trace_or_says_what_is_missing(
    tmp_path: Path, make: Callable[[Path], Path], expected: dict[str, str | None]
) -> None:
    trace = imported(tmp_path, make)
    result, kinds = results(trace)
    assert {rule: kinds.get(rule) for rule in expected} == expected
    # Nobody who imports a file can tell what the host did meanwhile.
    assert kinds["remote-numa-node"] == "not applicable"
    if make in (kineto, snapshot, monitor):
        assert kinds["swapping"] == "not applicable"
        assert all(finding.potential_gain_ms is None for finding in result.findings)
        assert all(
            "steady iteration" not in text
            for finding in result.findings
            for text in finding.evidence
        )
    assert all(entry.needs for entry in result.not_applicable)


def test_findings_command__names_the_four_kinds_of_results(tmp_path: Path) -> None:
    imported(tmp_path, kineto)
    printed = ebbtide_in_process("findings", "run.ebb", "-v", cwd=tmp_path)
    assert (printed.returncode, printed.stderr) == (0, "")
    lines = printed.stdout.splitlines()
    assert lines[0] == "run.ebb: 3 findings"
    assert "nothing runs on the GPU for 0.99 ms of 1.01 ms (98 %)" in printed.stdout
    assert "at every moment of the trace (capacity minus reserved)" in printed.stdout
    assert "expandable_segments" not in printed.stdout
    nothing = lines[lines.index("Rules that looked and found nothing:") + 1]
    assert "launch-bound" in nothing
    needs = dict(pairwise(lines))
    assert (
        needs["   - swapping, host-memory-limit"]
        == "     needs: memory of the host (`ebbtide profile` records it)"
    )


def test_find__simulated_and_recorded_traces_have_a_result_of_every_rule() -> None:
    for source in ("simulated", "recorded", "imported"):
        job = devices(Job(1)).memory("device", {"other": 70})
        job.builder.meta["source"] = source
        _, kinds = results(job.trace)
        assert kinds["swapping"] == (
            "unknown" if source == "recorded" else "not applicable"
        )
        assert kinds["drift"] == "not applicable"
        assert kinds["between-phases"] == "nothing"


def with_pools(sizes: list[tuple[int, int]]) -> Trace:
    """Make a trace without iterations whose pools have these GiB: (reserved,
    allocated), a pair per ms."""
    builder = TraceBuilder()
    rank = builder.rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda", "capacity_bytes": 80 * GIB}]
    )
    for number, (reserved, allocated) in enumerate(sizes):
        rank.memory(number * MS, reserved * GIB, "reserved").memory(
            number * MS, allocated * GIB, "allocated"
        )
    return builder.build()


@pytest.mark.parametrize(
    ("sizes", "grown"),
    [
        # A flat cache: tensors come and go in what was reserved at the beginning.
        ([(60, 60), (60, 20), (60, 50), (60, 20)], 0),
        # A growth that a tensor fills soon after.
        ([(40, 40), (60, 30), (60, 58), (60, 30)], 0),
        # Torch reserves 20 GiB more, in two steps, although half of its memory is free.
        ([(40, 40), (40, 15), (52, 20), (60, 20), (60, 25)], 20),
        # Memory that was given back, and reserved again.
        ([(60, 20), (20, 20), (60, 55), (60, 20)], 0),
        ([(60, 20)], 0),
    ],
)
def test_needless_growth__counts_what_tensors_never_filled(
    sizes: list[tuple[int, int]], grown: int
) -> None:
    trace = with_pools(sizes)
    assert needless_growth(trace, 0) == grown * GIB
    finding: Any = fragmentation(JobMetrics(trace))
    if finding is not None:
        assert ("expandable_segments" in finding.advice) == (grown > 0)
        assert ("fragmented" in finding.title) == (grown > 0)


def test_needless_growth__is_0_without_counts_of_tensors() -> None:
    builder = TraceBuilder()
    builder.rank(0).memory(0, GIB, "reserved").memory(1, 2 * GIB, "reserved")
    assert needless_growth(builder.build(), 0) == 0
