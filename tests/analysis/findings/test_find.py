"""All rules together: nothing to find in jobs that are well, the dearest first, numbers in the evidence."""

from __future__ import annotations

import json

import pytest

from ebbtide.analysis.findings import RULES, find
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import MIB, Job, async_copies, devices, offloaded, on_cpu, on_gpu

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
    """Everything at once: a blocking backward, a slow update on one thread, waste of memory, a slow rank."""
    job = devices(Job(2, slower={(1, "forward"): 40}, other=400, backward=900, update=800))
    job.builder.meta["deepspeed"] = {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}
    job.meta(optimizers=[{"class": "DeepSpeedCPUAdam", "params": 10**9}], threads={"torch": 1, "omp": "1"})
    for pool, size in (("device", 60), ("reserved", 50), ("allocated", 30)):
        job.memory(pool, {"other": size})
    job.memory("swap", {"other": 1}, "cpu")
    job.copy("d2h", "backward", 0, 400, 2_000_000_000, "pageable").copy("h2d", "backward", 400, 100, 2_000_000_000)
    for number in (0, 1):  # beside each other they run at half their rate
        job.copy("h2d", "forward", 10 * number, 4, 100 * MIB, ranks=[number])
    return job.copy("h2d", "forward", 40, 40, 500 * MIB)


@pytest.mark.parametrize(
    "job",
    [
        on_gpu(),
        on_gpu(2),
        on_gpu(4),
        async_copies(offloaded()),
        async_copies(offloaded(4, ratio=0.5)),
        on_cpu(),
        on_cpu(2, torch=8),
        on_cpu(torch=8, update=300),
    ],
)
def test_nothing_is_found_where_all_is_well(job: Job) -> None:
    found = job.found
    assert found.findings == ()
    assert found.unknown == ()


def test_every_trouble_is_found_the_dearest_first_with_numbers() -> None:
    found = troubled().found
    assert {f.rule for f in found.findings} == {
        "blocking-gradients",
        "cpu-bound-update",
        "too-few-threads",
        "pageable-copies",
        "one-direction",
        "shared-link",
        "free-memory",
        "memory-outside-torch",
        "fragmentation",
        "swapping",
        "between-phases",
        "slow-rank",
    }
    assert found.unknown == ()
    worths = [f.worth_ms for f in found.findings]
    known = [worth for worth in worths if worth is not None]
    assert known == sorted(known, reverse=True)
    assert worths == known + [None] * (len(worths) - len(known))
    for finding in found.findings:
        assert finding.title
        assert finding.advice
        assert finding.evidence
        assert any(digit in line for line in finding.evidence for digit in "0123456789"), finding
        assert not any(word in line for line in finding.evidence for word in ("None", "nan", "inf"))
        assert finding.worth_ms is None or 0 < finding.worth_ms < 2000
    printed = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert [f["rule"] for f in printed["findings"]] == [f.rule for f in found.findings]


def test_a_bare_trace_says_what_to_record() -> None:
    found = devices(Job(2)).found
    assert found.findings == ()
    assert {u.rule for u in found.unknown} == UNKNOWN_ON_A_BARE_GPU
    assert all(u.question.endswith("?") and u.record for u in found.unknown)


@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_without_iterations_only_questions_are_left(ranks: int, kind: str) -> None:
    builder = TraceBuilder()
    for number in range(ranks):
        rank = builder.rank(number, devices=[{"device": "x", "kind": kind, "capacity_bytes": None}])
        rank.transfer("h2d", 0, 10, 2 * MIB, "x")
    found = find(builder.build())
    assert found.findings == ()
    assert "phases" in {u.rule for u in found.unknown}


def test_rules_do_not_change_the_trace() -> None:
    trace = troubled().trace
    first = find(trace)
    # All rules have found something, but the one that asks for phases and those of DeepSpeed's sub-steps.
    assert len(first.findings) == len(RULES) - 1 - 4
    assert find(trace) == first
