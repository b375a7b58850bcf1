"""All rules together: no findings in healthy jobs, the largest gain first, figures in
the evidence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ebbtide.analysis.findings import all_rules, find
from ebbtide.analysis.findings.needs import ENOUGH_VALUES
from ebbtide.analysis.timeseries.change_point import MIN_VALUES
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import (
    MIB,
    NO_OFFLOAD,
    Job,
    async_copies,
    devices,
    offloaded,
    on_cpu,
    on_gpu,
)
from tests.conftest import slow_case

UNKNOWN_ON_A_BARE_GPU = {
    "pageable-copies",
    "one-direction",
    "shared-link",
    "free-memory",
    "memory-outside-torch",
    "fragmentation",
    "swapping",
}


def troubled() -> Job:
    """Make a job with many problems: a blocking backward, a slow update on one thread,
    unused memory, a slow rank."""
    job = devices(
        Job(2, slower={(1, "forward"): 40}, other=400, backward=900, update=800)
    )
    job.builder.meta["deepspeed"] = {
        "config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    }
    job.meta(
        optimizers=[{"class": "DeepSpeedCPUAdam", "params": 10**9}],
        threads={"torch": 1, "omp": "1"},
    )
    for pool, size in (("device", 60), ("reserved", 50), ("allocated", 30)):
        job.memory(pool, {"other": size})
    job.memory("swap", {"other": 1}, "cpu").meta(
        numa={"cpu_nodes": [0], "memory_bytes": {"0": 8 * 10**9, "1": 0}}
    )
    job.copy("d2h", "backward", 0, 400, 2_000_000_000, "pageable").copy(
        "h2d", "backward", 400, 100, 2_000_000_000
    )
    for number in (0, 1):  # at the same time they run at half their rate
        job.copy("h2d", "forward", 10 * number, 4, 100 * MIB, ranks=[number])
    # The GPU of rank 0 is idle, waits for communication in the backward and for
    # launches in the update.
    job.kernels("update", [0.4 * n for n in range(1500)], 0.3, 0.05, ranks=[0])
    job.kernels("backward", [600], 250, 0.05, "communication", ranks=[0])
    return job.copy("h2d", "forward", 40, 40, 500 * MIB)


@pytest.mark.parametrize(
    "job",
    [
        slow_case(on_gpu()),
        on_gpu(2),
        slow_case(on_gpu(4)),
        slow_case(async_copies(offloaded())),
        async_copies(offloaded(4, ratio=0.5)),
        on_cpu(),
        slow_case(on_cpu(2, torch=8)),
        slow_case(on_cpu(torch=8, update=300)),
    ],
)
def test_find__is_empty_for_healthy_jobs(job: Job) -> None:
    results = job.results
    assert results.findings == ()
    assert results.unknown == ()


def test_find__sorts_all_findings_by_what_they_remove_and_gain() -> None:
    results = find(troubled().trace, NO_OFFLOAD)
    # Features have rules of their own.
    assert {f.rule for f in results.findings} >= {
        "cpu-bound-update",
        "too-few-threads",
        "pageable-copies",
        "one-direction",
        "shared-link",
        "remote-numa-node",
        "free-memory",
        "memory-outside-torch",
        "fragmentation",
        "swapping",
        "between-phases",
        "slow-rank",
        "gpu-idle",
        "launch-bound",
        "exposed-communication",
    }
    assert results.unknown == ()
    root_cause, *others = results.findings
    assert root_cause.rule == "free-memory"
    assert set(root_cause.removes) >= {"cpu-bound-update", "too-few-threads"}
    assert not any(finding.removes for finding in others)
    gains = [f.potential_gain_ms for f in others]
    gains_in_order = [gain for gain in gains if gain is not None]
    assert gains_in_order == sorted(gains_in_order, reverse=True)
    assert gains == gains_in_order + [None] * (len(gains) - len(gains_in_order))
    for finding in results.findings:
        assert finding.title
        assert finding.advice
        assert finding.evidence
        assert any(
            digit in text for text in finding.evidence for digit in "0123456789"
        ), finding
        assert not any(
            word in text for text in finding.evidence for word in ("None", "nan", "inf")
        )
        assert finding.potential_gain_ms is None or 0 < finding.potential_gain_ms < 2000
    printed = json.loads(json.dumps(results.as_json(), allow_nan=False))
    assert [f["rule"] for f in printed["findings"]] == [
        f.rule for f in results.findings
    ]


def test_find__bare_trace_asks_for_records() -> None:
    results = devices(Job(2)).results
    assert results.findings == ()
    assert {u.rule for u in results.unknown} == UNKNOWN_ON_A_BARE_GPU
    assert all(u.question.endswith("?") and u.record for u in results.unknown)


@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_find__trace_without_iterations_has_questions_only(
    ranks: int, kind: str
) -> None:
    builder = TraceBuilder()
    for number in range(ranks):
        rank = builder.rank(
            number, devices=[{"device": "x", "kind": kind, "capacity_bytes": None}]
        )
        rank.transfer("h2d", 0, 10, 2 * MIB, "x")
    results = find(builder.build())
    assert results.findings == ()
    assert "phases" in {u.rule for u in results.unknown}


def test_find__names_the_rules_that_do_not_apply_and_what_they_need() -> None:
    needs = {entry.rule: entry.needs for entry in on_gpu().results.not_applicable}
    assert needs["slow-rank"] == ("two ranks or more",)
    assert needs["cpu-bound-update"] == ("optimizer state in host memory",)
    assert all(
        any("kernels" in need for need in needs[rule])
        for rule in ("gpu-idle", "launch-bound")
    )
    assert "between-phases" in on_gpu().results.nothing_found
    # A rule that asks or reports is not in the list.
    assert not needs.keys() & {"swapping", "fragmentation", "pageable-copies"}
    everything = troubled().results
    reported = {finding.rule for finding in everything.findings}
    assert not reported & {entry.rule for entry in everything.not_applicable}


def test_find__does_not_change_trace() -> None:
    trace = troubled().trace
    first = find(trace)
    # Rules that have nothing to report of this job or do not apply to it, and the one
    # that asks for phases.
    silent = {
        *first.nothing_found,
        *(entry.rule for entry in first.not_applicable),
        "phases",
    }
    assert len(first.findings) == len(all_rules()) - len(silent)
    assert "drift" in silent
    assert find(trace) == first


def test_needs__name_the_number_of_iterations_that_drifts_take() -> None:
    assert ENOUGH_VALUES.text.startswith(f"{MIN_VALUES} ")


def test_rules__import_no_packages_of_figures_before_they_read_one() -> None:
    """Figures are members that are computed when asked for: what takes a package of
    modules is imported then."""
    script = "import sys, ebbtide.analysis.findings.rules.gpu; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    packages = {
        f"ebbtide.analysis.metrics.{name}"
        for name in ("activity", "holders", "ranks", "substeps")
    }
    assert not packages & set(printed.split())
