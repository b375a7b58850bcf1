"""The critical path: equal to an exhaustive longest path, of made graphs and of made
runs of host and device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.metrics.critical_path.critical_path import (
    path_graph,
    path_segments,
)
from ebbtide.analysis.metrics.critical_path.graph import Graph
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples

GPU = {"device": "cuda:0", "kind": "cuda"}
US = 1_000


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph in which every node can be reached from the start."""
    count = draw(st.integers(2, 8))
    edges = [
        (source, target, draw(st.integers(0, 9)))
        for target in range(1, count)
        for source in sorted(draw(st.sets(st.integers(0, target - 1), min_size=1)))
    ]
    sources, targets, weights = (
        np.array(column, np.int64) for column in zip(*edges, strict=True)
    )
    return Graph(sources, targets, weights, count)


def all_paths(graph: Graph, node: int) -> Iterator[list[int]]:
    """Yield every path from the start to a node, as its edges."""
    if node == 0:
        yield []
    for edge in np.flatnonzero(graph.targets == node).tolist():
        for path in all_paths(graph, int(graph.sources[edge])):
            yield [*path, edge]


@settings(max_examples=examples(100))
@given(graphs())
def test_longest_path__is_that_of_an_exhaustive_search(graph: Graph) -> None:
    path = graph.longest_path()
    assert path in list(all_paths(graph, graph.count - 1))
    longest = max(
        int(graph.weights[other].sum()) for other in all_paths(graph, graph.count - 1)
    )
    assert int(graph.weights[path].sum()) == longest == graph.times()[-1]


# A step of the host: microseconds of other code, then of the call, and what it does:
# launches a kernel of so many microseconds on a stream, or (None) waits for the stream.
Step = tuple[int, int, int, int | None]
STEPS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 20),
        st.integers(0, 2),
        st.none() | st.integers(1, 90),
    ),
    min_size=1,
    max_size=7,
)


class Run:
    """A made run: each operation starts when those that it waits for have ended."""

    def __init__(self, steps: list[Step]) -> None:
        self.builder = TraceBuilder()
        self.rank = self.builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
        self.before: dict[str, list[str]] = {}
        self.lengths: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        streams: dict[int, str] = {}
        host = ""
        # Unequal lengths: no two chains take the same time.
        for number, (code, call, stream, kernel) in enumerate(steps):
            host = self.run(f"code {number}", code * US + 2 ** (2 * number), host)
            start = self.ends[host]
            host = self.run(f"call {number}", 0 if kernel is None else call * US, host)
            name = "cudaStreamSynchronize" if kernel is None else "cudaLaunchKernel"
            if kernel is None:
                host = self.run(f"wait {number}", 0, host, streams.get(stream, ""))
            else:
                streams[stream] = self.run(
                    f"kernel {number}",
                    kernel * US + 2 ** (2 * number + 1),
                    host,
                    streams.get(stream, ""),
                )
                work_end = self.ends[streams[stream]]
                work_start = work_end - self.lengths[streams[stream]]
                self.rank.kernel(
                    work_start,
                    work_end,
                    "compute",
                    streams[stream],
                    stream=stream,
                    launch_ns=start,
                )
            awaited = stream if kernel is None else None
            self.rank.add(
                "calls",
                start_ns=start,
                end_ns=self.ends[host],
                name=name,
                thread=1,
                awaited_stream=awaited,
            )
        self.end = max(self.ends.values())

    def run(self, name: str, length: int, *before: str) -> str:
        self.before[name] = [operation for operation in before if operation]
        self.lengths[name] = length
        self.ends[name] = (
            max((self.ends[operation] for operation in self.before[name]), default=0)
            + length
        )
        return name

    def chains(self, name: str) -> Iterator[list[str]]:
        """Yield every chain of operations that ends with one."""
        if not self.before[name]:
            yield [name]
        for operation in self.before[name]:
            for chain in self.chains(operation):
                yield [*chain, name]

    def longest(self) -> list[str]:
        chains = [chain for name in self.before for chain in self.chains(name)]
        return max(chains, key=lambda chain: sum(self.lengths[name] for name in chain))


@settings(max_examples=examples(100, by_default=25))
@given(STEPS)
def test_path__of_a_made_run_has_the_kernels_of_the_longest_chain(
    steps: list[Step],
) -> None:
    run = Run([*steps, (1, 1, 0, 5)])
    segments = path_segments(run.builder.build(), 0, 0, run.end)
    longest = run.longest()
    assert [s.name for s in segments if s.kind == "kernel"] == [
        name for name in longest if name.startswith("kernel")
    ]
    assert (
        sum(s.end_ns - s.start_ns for s in segments)
        == sum(run.lengths[name] for name in longest)
        == run.end
    )
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(segments))


@settings(max_examples=examples(50, by_default=15))
@given(STEPS, st.data())
def test_path__less_time_off_the_path_never_shortens_the_iteration(
    steps: list[Step], data: st.DataObject
) -> None:
    run = Run([*steps, (1, 1, 0, 5)])
    built, _ = path_graph(run.builder.build(), 0, 0, run.end)
    graph = built.graph
    # The replay of the graph is what was recorded.
    assert graph.times().tolist() == built.times.tolist()
    path = set(graph.longest_path())
    off = [edge for edge in range(len(graph.weights)) if edge not in path]
    weights = graph.weights.copy()
    for edge in data.draw(st.sets(st.sampled_from(off))) if off else ():
        weights[edge] = data.draw(st.integers(0, int(weights[edge])))
    assert replace(graph, weights=weights).times()[-1] == run.end


def iterations(
    builder: TraceBuilder, rank: int, count: int = 3, length: int = 1_000 * US
) -> Any:
    entry = builder.rank(rank, devices=[GPU], first_iteration_start_ns=0)
    for number in range(count):
        begin = number * length
        entry.phase("forward", begin, begin + length // 2, number, 0)
        entry.phase("update", begin + length // 2, begin + length, number, 0)
    return entry


def path_of(trace: Trace) -> Any:
    path = TraceAnalysis(trace).rank(0).critical_path
    assert path is not None
    assert path.length_ms == pytest.approx(sum(part.ms for part in path.parts))
    assert path.length_ms == pytest.approx(sum(path.phases.values()))
    return path


def test_path__leads_to_the_rank_that_came_last_to_a_collective() -> None:
    builder = TraceBuilder()
    # The clock of the second rank is 7 us ahead.
    for rank, begin, ahead in ((0, 100, 0), (1, 600, 7)):
        entry = iterations(builder, rank)
        for number in range(3):
            at = (number * 1_000 + ahead) * US
            entry.kernel(
                at + 10 * US,
                at + begin * US,
                "compute",
                f"gemm {rank}",
                stream=7,
                launch_ns=at + 5 * US,
            )
            entry.kernel(
                at + begin * US,
                at + 990 * US,
                "communication",
                "nccl_AllReduce",
                stream=7,
                launch_ns=at + 8 * US,
            )
    path = path_of(builder.build())
    assert {(part.kind, part.name): part.ms for part in path.parts} == {
        ("kernel", "gemm 1"): pytest.approx(0.59),
        ("collective", "nccl_AllReduce"): pytest.approx(0.39),
        ("launch", "launch"): pytest.approx(0.005),
        ("host", "forward"): pytest.approx(0.005),
        ("wait", "not explained"): pytest.approx(0.01),
    }
    assert path.ranks == {0: pytest.approx(0.4), 1: pytest.approx(0.6)}


def test_path__follows_a_stream_that_waits_for_another() -> None:
    builder = TraceBuilder()
    entry = iterations(builder, 0)
    for number in range(3):
        at = number * 1_000 * US
        entry.kernel(
            at + 10 * US,
            at + 400 * US,
            "compute",
            "first",
            stream=7,
            launch_ns=at + 5 * US,
        )
        entry.kernel(
            at + 402 * US,
            at + 1_000 * US,
            "compute",
            "second",
            stream=8,
            launch_ns=at + 20 * US,
        )
    path = path_of(builder.build())
    assert ("wait", "for another stream", 0.002) in [
        (part.kind, part.name, part.ms) for part in path.parts
    ]
    assert {part.name for part in path.parts if part.kind == "kernel"} == {
        "first",
        "second",
    }


def test_path__goes_through_the_thread_of_the_backward() -> None:
    builder = TraceBuilder()
    entry = iterations(builder, 0)
    for number in range(3):
        at = number * 1_000 * US
        for start, end, thread in ((0, 100, 1), (510, 700, 2)):
            entry.add(
                "calls",
                start_ns=at + start * US,
                end_ns=at + end * US,
                name="cudaMalloc",
                thread=thread,
            )
        entry.kernel(
            at + 900 * US, at + 910 * US, "compute", "last", launch_ns=at + 899 * US
        )
    path = path_of(builder.build())
    parts = {(part.kind, part.name): part.ms for part in path.parts}
    # Until the update's first call the host runs code of the forward.
    assert parts["host", "cudaMalloc"] == pytest.approx(0.1 + 0.19)
    assert (parts["host", "forward"], parts["host", "update"]) == pytest.approx(
        (0.41, 0.199)
    )


def test_path__is_none_without_kernels_or_iterations() -> None:
    builder = TraceBuilder()
    iterations(builder, 0)
    builder.rank(1, devices=[GPU]).kernel(0, 10, "compute", "gemm")
    metrics = TraceAnalysis(builder.build())
    assert metrics.rank(0).critical_path is None
    assert metrics.rank(1).critical_path is None
