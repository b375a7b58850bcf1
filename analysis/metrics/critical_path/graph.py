"""A graph of dependencies between points in time, and its longest path."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Ints


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which every edge leads to a later one.

    The first is the start, the last the end.
    """

    sources: Ints  # Node before each edge.
    targets: Ints  # Node after each edge, ascending.
    weights: Ints  # Time from one to the other, ns, at least 0.
    count: int  # Number of nodes.

    def times(self) -> Ints:
        """Return the earliest time of each node after the start, ns.

        Every edge takes its time.
        """
        return np.array(self._earliest()[0], np.int64)

    def longest_path(self) -> list[int]:
        """Return the edges of the longest path from the start to the end, in order."""
        last_edges = self._earliest()[1]
        path, node = [], self.count - 1
        while node > 0 and (edge := last_edges[node]) >= 0:
            path.append(edge)
            node = int(self.sources[edge])
        return path[::-1]

    def _earliest(self) -> tuple[list[int], list[int]]:
        """Return the earliest time of each node, and the edge that determines it.

        The edge is -1 where there is none.
        """
        times, last_edges = [0] * self.count, [-1] * self.count
        edges = zip(
            self.sources.tolist(),
            self.targets.tolist(),
            self.weights.tolist(),
            strict=True,
        )
        for edge, (source, target, weight) in enumerate(edges):
            reached = times[source] + weight
            if reached > times[target] or last_edges[target] < 0:
                times[target], last_edges[target] = reached, edge
        return times, last_edges


@dataclass(frozen=True)
class BuiltGraph:
    """A graph whose nodes have times."""

    graph: Graph
    order: Ints  # Number of each node as it was added.
    times: Ints  # ns
    kinds: Ints  # Kind of each edge.


class GraphBuilder:
    """Collects points in time and what they depend on, and makes a graph of them.

    In the graph every point has its recorded time. The edge from the latest that a
    point depends on takes the time between both, all others take none.
    """

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self.start_ns, self.end_ns = start_ns, end_ns
        self._times: list[Ints] = [np.array([start_ns])]
        self._places: list[Ints] = [np.array([-1])]
        self._edges: list[tuple[Ints, Ints, Ints]] = []
        self._moved: list[tuple[Ints, Ints]] = []
        self._count = 1

    def nodes(self, times: Ints, place: int | Ints) -> Ints:
        """Add nodes and return their numbers. `place`: order among nodes of the same
        time."""
        numbers = np.arange(self._count, self._count + len(times))
        self._times.append(times)
        self._places.append(np.broadcast_to(np.asarray(place, np.int64), times.shape))
        self._count += len(times)
        return numbers

    def move(self, nodes: Ints, times: Ints) -> None:
        """Give nodes that were added another time, within the span."""
        self._moved.append((nodes, times))

    def edges(
        self, sources: Ints | Sequence[int], targets: Ints | Sequence[int], kind: int
    ) -> None:
        """Add edges of a kind, a number of the caller. Those back in time are left
        out."""
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        self._edges.append((sources, targets, np.full(len(sources), kind)))

    def build(self, kind: int, last: Ints) -> BuiltGraph:
        """Return the graph up to the latest of the nodes `last`. `kind`: of edges from
        the start and to the end."""
        end = int(self.nodes(np.array([self.end_ns]), 99)[0])
        times, places = np.concatenate(self._times), np.concatenate(self._places)
        for nodes, later in self._moved:
            times[nodes] = later
        order = np.lexsort((places, times))
        position = np.empty(self._count, np.int64)
        position[order] = np.arange(self._count)
        times = times[order]
        sources, targets, kinds = (
            np.concatenate(part) for part in zip(*self._edges, strict=True)
        )
        sources, targets = position[sources], position[targets]
        forward = sources < targets
        sources, targets, kinds = sources[forward], targets[forward], kinds[forward]
        free = np.setdiff1d(np.arange(1, self._count - 1), targets)
        last = np.append(position[last], 0).max(keepdims=True)
        sources = np.concatenate([sources, np.zeros(len(free), np.int64), last])
        targets = np.concatenate([targets, free, np.full(len(last), position[end])])
        kinds = np.concatenate([kinds, np.full(len(free) + len(last), kind)])
        by_target = np.lexsort((sources, targets))
        sources, targets, kinds = (
            sources[by_target],
            targets[by_target],
            kinds[by_target],
        )
        binding = np.append(targets[1:] != targets[:-1], True)
        weights = np.where(binding, times[targets] - times[sources], 0)
        return BuiltGraph(
            Graph(sources, targets, weights, self._count), order, times, kinds
        )
