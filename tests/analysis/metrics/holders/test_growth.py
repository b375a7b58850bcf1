"""Memory that stays from iteration to iteration."""

from __future__ import annotations

from ebbtide.analysis.metrics.holders.categories import Growth, memory_growth
from ebbtide.profiler.trace import Trace, TraceBuilder

LEAK = "main (/job/train.py:9)\nkeep (/job/model.py:3)"
BRIEF = "main (/job/train.py:9)\nforward (/job/model.py:8)"


def job(iterations: int, leaking: int) -> Trace:
    """Return a trace of iterations of 100 ns; the first `leaking` of them leave 64 B of
    `keep` behind."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cpu", "kind": "cpu"}])
    rank.add(
        "allocations",
        start_ns=-1,
        device="cpu",
        bytes=512,
        category="parameter",
        module="layer",
    )
    for number in range(iterations):
        start = 100 * number
        rank.phase("forward", start, start + 40, number).phase(
            "backward", start + 40, start + 80, number
        )
        rank.phase("update", start + 80, start + 100, number)
        rows = [
            (10, 30, 1000, BRIEF, None),
            (50, 110, 256, None, "gradient"),
            (90, 190, 8, BRIEF, None),
        ]
        rows.append((20, 10**6 if number < leaking else 30, 64 + number, LEAK, None))
        for begin, end, size, stack, category in rows:
            times = {"start_ns": start + begin, "end_ns": start + end}
            rank.add(
                "allocations",
                **times,
                device="cpu",
                bytes=size,
                stack=stack,
                category=category,
            )
    return builder.build()


def test_memory_growth__finds_the_site_that_each_iteration_leaves_blocks_of() -> None:
    assert memory_growth(job(5, 5), 0) == [
        Growth("keep (/job/model.py:3)", None, 64, 4)
    ]


def test_memory_growth__ignores_blocks_that_only_some_iterations_leave() -> None:
    assert memory_growth(job(5, 1), 0) == []
    assert memory_growth(job(5, 0), 0) == []


def test_memory_growth__counts_the_last_captured_iteration() -> None:
    # Nothing is allocated between its last block and its end, nor is anything recorded
    # after it.
    assert memory_growth(job(3, 3), 0) == [
        Growth("keep (/job/model.py:3)", None, 64, 2)
    ]


def test_memory_growth__is_not_known_of_two_iterations_or_without_allocations() -> None:
    assert memory_growth(job(2, 2), 0) is None
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cpu"}]).phase("update", 0, 5, 0)
    assert memory_growth(builder.build(), 0) is None
