"""Measures what the figures for a job's logger and for Prometheus cost.

    python benchmarks/metrics.py

Times are CPU times, the least of several rounds. Prints Markdown, see docs/metrics.md.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

from tables import machine_line, table

from ebbtide.features.live.agent.iteration_figures import IterationFigures
from ebbtide.features.live.prometheus.server import LiveTraceCollector
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import HOST, Spool
from ebbtide.profiler.trace.files import write_meta

ROUNDS = 7
STEPS = 20_000
RANKS = (1, 2, 8)
HEAP = kinds.POOLS.index("heap")


def best(values: list[float]) -> float:
    """Return the least of some times: other processes of the machine only add to
    them."""
    return min(values)


def step_records(step: int) -> bytes:
    """Return the records of a step of three phases with a memory reading at each
    boundary."""
    rows = []
    for phase in range(3):
        end_ns = 3 * step + phase + 1
        rows.append((kinds.MEMORY, HEAP, HOST, 0, 0, 0, 0, end_ns - 1, 10**9, 0))
        rows.append((kinds.MEMORY, HEAP, HOST, 0, 0, 0, 0, end_ns, 10**9, 0))
        sequence = 3 * step + phase
        rows.append((kinds.PHASE, phase, 0, sequence, 0, 0, 0, end_ns - 1, end_ns, 0))
    rows.append((kinds.ITERATION, 0, 0, step, 0, 0, 0, 0, 0, 0))
    return b"".join(kinds.RECORD.pack(*row) for row in rows)


def bookkeeping_us() -> float:
    """Return microseconds in which the figures take the records of a step, and read
    them."""
    steps = [step_records(step) for step in range(STEPS)]
    times = []
    for _ in range(ROUNDS):
        figures = IterationFigures()
        begun_s = time.process_time()
        for records in steps:
            figures.add(records)
            figures.read()
        times.append((time.process_time() - begun_s) / STEPS * 1e6)
    return best(times)


def query_us() -> float:
    """Return microseconds in which the figures of the last iteration are computed."""
    figures = IterationFigures()
    for step in range(200):
        figures.add(step_records(step))
    figures.read()
    times = []
    for _ in range(ROUNDS):
        begun_s = time.process_time()
        for _ in range(1000):
            figures.peaks(next(figures.times()).number)
        times.append((time.process_time() - begun_s) * 1e3)
    return best(times)


class GrowingRank:
    """One rank of a recording, whose iterations the benchmark writes. An iteration
    takes 100 ms, read every 25 ms."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._spool = Spool(
            str(folder / f"agent-{socket.gethostname()}-{os.getpid()}.{rank:x}.spool")
        )
        self._spool.put_header(rank, ranks, rank)
        self._iterations = 0

    def grow(self, iterations: int) -> None:
        """Write iterations."""
        for number in range(self._iterations, self._iterations + iterations):
            start_ns = number * 100_000_000
            for phase in range(3):
                begin_ns, end_ns = (
                    start_ns + 30_000_000 * phase,
                    start_ns + 30_000_000 * (phase + 1),
                )
                self._spool.put_memory(HEAP, HOST, begin_ns, 10**9 + number)
                self._spool.put_phase(
                    phase, 3 * number + phase + 1, 0, 0, begin_ns, end_ns
                )
                self._spool.put_memory(HEAP, HOST, end_ns, 10**9)
            self._spool.put(
                kinds.ITERATION, a=number, b=3 * number + 3, x=start_ns + 90_000_000
            )
        self._iterations += iterations
        self._spool.flush()


def scrape_ms(ranks: int) -> float:
    """Return milliseconds of CPU time of a scrape, ten seconds of the job after the one
    before."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder)
        (trace / "spool").mkdir()
        host = {
            "name": socket.gethostname(),
            "cpu": {"device": "cpu", "kind": "cpu", "capacity_bytes": 2**36},
        }
        write_meta(
            trace,
            {
                "state": "recording",
                "source": "recorded",
                "host": host,
                "ranks": [],
                "notes": [],
            },
        )
        growing = [GrowingRank(trace / "spool", rank, ranks) for rank in range(ranks)]
        collector = LiveTraceCollector(trace)
        times = []
        for _ in range(ROUNDS):
            for rank in growing:
                rank.grow(100)
            begun_s = time.process_time()
            names = {metric.name for metric in collector.collect()}
            times.append((time.process_time() - begun_s) * 1e3)
            assert "ebbtide_phase_seconds" in names
    return best(times)


def main() -> None:
    print(machine_line(), "\n")
    rows = [
        (
            "a job asks for figures, per step of three phases",
            f"{bookkeeping_us():.1f} us",
        ),
        ("`ebbtide.metrics()` on the CPU", f"{query_us():.0f} us"),
        *(
            (
                f"a scrape, {ranks} rank{'s' if ranks > 1 else ''}",
                f"{scrape_ms(ranks):.0f} ms",
            )
            for ranks in RANKS
        ),
    ]
    table(("what", "CPU time"), rows)


if __name__ == "__main__":
    main()
