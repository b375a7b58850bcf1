"""Traces of jobs with and without cycles, built in memory."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.agent.without_gradients import NAME
from ebbtide.profiler.trace import Trace, TraceBuilder
from ebbtide.profiler.trace.builder import RankBuilder

MS = 1_000_000
GIB = 1 << 30


class Job:
    """A job on a GPU whose clock runs with what is added to it."""

    def __init__(self, capacity: int = 80 * GIB, **device: Any) -> None:
        self.builder = TraceBuilder("recorded")
        self.rank: RankBuilder = self.builder.rank(
            0,
            devices=[
                {
                    "device": "cuda:0",
                    "kind": "cuda",
                    "capacity_bytes": capacity,
                    "link": {"peak_bytes_per_s": 25e9},
                    **device,
                }
            ],
            transfers_recorded=True,
            first_iteration_start_ns=0,
        )
        self.at = 0
        self.iteration = 0
        self.used = 0

    def wait(self, ms: float) -> None:
        """Let the host do something."""
        self.at += round(ms * MS)

    def allocate(self, size: int) -> None:
        """Change the memory in use."""
        self.used += size
        self.rank.add(
            "memory", t_ns=self.at, device="cuda:0", pool="allocated", bytes=self.used
        )

    def forwards(self, count: int, ms: float = 1.0) -> None:
        """Run forwards without gradients."""
        for _ in range(count):
            start = self.at
            self.wait(ms)
            self.rank.add(
                "ops", start_ns=start, end_ns=self.at, resource="gpu", name=NAME
            )
            self.wait(0.2)

    def copy(self, direction: str, size: int, ms: float, memory: str) -> None:
        """Move state out (d2h) or in (h2d)."""
        start = self.at
        self.wait(ms)
        self.rank.add(
            "transfers",
            start_ns=start,
            end_ns=self.at,
            device="cuda:0",
            direction=direction,
            bytes=size,
            host_memory=memory,
            name=direction,
        )
        self.allocate(size if direction == "h2d" else -size)

    def train(self, count: int = 1, updates: int = 1) -> None:
        """Run iterations with some updates each."""
        for _ in range(count):
            for phase in ("forward", "backward", *["update"] * updates):
                start = self.at
                self.wait(5)
                self.rank.add(
                    "phases",
                    iteration=self.iteration,
                    micro_step=0,
                    phase=phase,
                    start_ns=start,
                    end_ns=self.at,
                    gpu_start_ns=start,
                    gpu_end_ns=self.at,
                )
            self.iteration += 1
            self.wait(0.1)

    def mark(self, name: str, start: int, table: str = "marks") -> None:
        """Name the time since a start."""
        self.wait(0.01)
        self.rank.add(table, name=name, start_ns=start, end_ns=self.at)
        self.wait(0.01)

    def trace(self) -> Trace:
        """Return the trace."""
        return self.builder.build()
