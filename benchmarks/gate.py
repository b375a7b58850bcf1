"""Count how often `ebbtide diff --fail-if` fails: on planted changes, and on equal
runs.

    python benchmarks/gate.py [--runs 12] [--iterations 40] [--seed 0]

Recorded runs: a small job is recorded again and again in this process, in turn as it
is, as it is once more, and with 15 % more micro-steps, and the nearest 100 pairs of
runs are compared. In one job the host waits, as it does for a GPU, and in the other it
computes, which other work on the machine disturbs more. Quiet machines: the times of a
job with 0.5 % of normal noise, in which each iteration resembles the one before
(correlation 0.5), and 6 % more. Memory: peaks of 1 to 80 GiB, and 2 % more. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tables import machine_line, table

from ebbtide.features.diff.comparison import compare
from ebbtide.features.diff.gate import Limit, results
from ebbtide.profiler import Trace, TraceBuilder, Tracer

MS = 10**6
PAIRS = 100
MICRO_STEPS = {"base": 20, "equal": 20, "slower": 23}


def make_iteration(wait_s: float) -> Callable[[int], None]:
    """Return an iteration of so many micro-steps, each of which waits or (0)
    computes."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(1 if wait_s else 256, 64)

    def iteration(micro_steps: int) -> None:
        for _ in range(micro_steps):
            loss = model(batch).square().mean()
            time.sleep(wait_s)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def record(
    wait_s: float, runs: int, iterations: int, folder: Path
) -> dict[str, list[Trace]]:
    """Record runs of each kind in turn."""
    iteration = make_iteration(wait_s)
    recorded: dict[str, list[Trace]] = {kind: [] for kind in MICRO_STEPS}
    for run in range(runs):
        for kind, micro_steps in MICRO_STEPS.items():
            with Tracer(folder / f"{kind}-{run}-{wait_s}.ebb") as tracer:
                for _ in range(iterations + 2):
                    iteration(micro_steps)
            assert tracer.trace is not None
            recorded[kind].append(tracer.trace)
    return recorded


def nearest_pairs(a: Sequence[Trace], b: Sequence[Trace]) -> list[tuple[Trace, Trace]]:
    """Return the pairs of runs that were recorded nearest to each other."""
    places = sorted(
        ((i, j) for i in range(len(a)) for j in range(len(b))),
        key=lambda place: abs(place[0] - place[1]),
    )
    return [(a[i], b[j]) for i, j in places[:PAIRS]]


def failures(pairs: Sequence[tuple[Trace, Trace]], limit: str) -> str:
    """Return how many comparisons fail."""
    failed = sum(
        results(compare(a, b), [Limit.parse(limit)])[0].fails for a, b in pairs
    )
    return f"{failed} of {len(pairs)}"


def quiet_run(random: np.random.Generator, factor: float, iterations: int) -> Trace:
    """Return a run of iterations of 1 s with the noise of a quiet machine."""
    noise = random.standard_normal(iterations + 20)
    for number in range(1, len(noise)):
        noise[number] = 0.5 * noise[number - 1] + np.sqrt(0.75) * noise[number]
    return built((1000 * factor * (1 + 0.005 * noise[20:])).tolist(), 1 << 30)


def built(times_ms: Sequence[float], peak_bytes: int) -> Trace:
    """Return a trace of updates of these times, and of one peak of allocated memory."""
    builder = TraceBuilder("recorded", warmup_iterations=0)
    rank, now = builder.rank(0, first_iteration_start_ns=0), 0
    for number, time_ms in enumerate(times_ms):
        rank.phase("update", now, now := now + round(time_ms * MS), number)
    rank.memory(now, peak_bytes, "allocated")
    return builder.build()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, wait_s in (
            ("waits for its device", 0.002),
            ("computes on the CPU", 0.0),
        ):
            runs = record(wait_s, options.runs, options.iterations, Path(folder))
            for kind, change in (("equal", "none"), ("slower", "+15 % micro-steps")):
                pairs = nearest_pairs(runs["base"], runs[kind])
                rows.append(
                    (
                        f"recorded, {name}",
                        change,
                        "iteration>5%",
                        failures(pairs, "iteration>5%"),
                    )
                )
    random = np.random.default_rng(options.seed)
    for factor, change in ((1.0, "none"), (1.06, "+6 %")):
        pairs = [
            tuple(quiet_run(random, f, options.iterations) for f in (1.0, factor))
            for _ in range(PAIRS)
        ]
        rows.append(
            (
                "synthetic, 0.5 % of noise",
                change,
                "iteration>5%",
                failures(pairs, "iteration>5%"),
            )
        )
    peaks = random.integers(1 << 30, 80 << 30, PAIRS).tolist()
    for factor, change in ((1.0, "none"), (1.02, "+2 %")):
        pairs = [
            (built([1.0], peak), built([1.0], round(peak * factor))) for peak in peaks
        ]
        rows.append(
            (
                "allocated memory",
                change,
                "peak_allocated>1%",
                failures(pairs, "peak_allocated>1%"),
            )
        )
    print(f"{machine_line()}. {options.iterations} iterations a run.\n")
    table(("runs", "planted", "limit", "failed"), rows)


if __name__ == "__main__":
    main()
