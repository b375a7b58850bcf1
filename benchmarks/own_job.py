"""Measure what `ebbtide run` costs a job whose update is all there is.

    python benchmarks/own_job.py [--rounds 3]

Each run trains the same parameters with a fused AdamW of torch: bare, recorded, with
losses logged (torch still steps), and under policies with a link without limit. The
step is the median of the last steps, as the job itself sees it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ebbtide.features.run.agent.hooks import RUN
from ebbtide.features.run.options import RunOptions

JOB = """
import os, statistics, time, torch
torch.manual_seed(0)
tensors, rows, width = map(int, os.environ["SHAPE"].split(","))
params = [torch.nn.Parameter(torch.randn(rows, width) * 0.02) for _ in range(tensors)]
optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
steps, passes = [], []
for number in range(30):
    begin = time.perf_counter()
    sum((param * param).mean() for param in params).backward()
    middle = time.perf_counter()
    optimizer.step()
    steps.append(time.perf_counter() - middle)
    passes.append(middle - begin)
    optimizer.zero_grad(set_to_none=False)
figures = statistics.median(passes[10:]), statistics.median(steps[10:]), steps[0]
print("FIGURES", *(1e3 * figure for figure in figures))
"""
SHAPES = {
    "40 matrices of 256 x 1024": "40,256,1024",
    "600 vectors of 64": "600,64,1",
}
# Name -> options of the run; None: bare; {}: recorded alone.
RUNS: dict[str, dict[str, object] | None] = {
    "bare": None,
    "recorded": {},
    "losses logged": {"policy": "none", "compares": True},
    "gpu-only": {"policy": "gpu-only", "memory_budget": 1e12, "compares": True},
    "zero-offload": {"policy": "zero-offload", "compares": True},
    "adaptive": {"policy": "adaptive", "compares": True},
}


def measure(shape: str, options: dict[str, object] | None) -> tuple[float, ...]:
    """Return the times in ms of forward and backward, of a step, and of the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = folder / "job.py"
        job.write_text(JOB)
        words = [sys.executable, str(job)]
        environment = {**os.environ, "SHAPE": shape, "OMP_NUM_THREADS": "1"}
        if options is not None:
            profile = ["-m", "ebbtide", "profile", "-o", str(folder / "run.ebb"), "--"]
            words = [sys.executable, *profile, *words]
        if options:
            run = RunOptions(str(folder), link_bytes_per_s=1e13, **options)  # type: ignore[arg-type]
            environment[RUN] = run.text()
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=True
        )
    lines = [line.split() for line in done.stdout.splitlines()]
    return tuple(
        map(float, next(words[1:] for words in lines if words[0] == "FIGURES"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("| job | run | forward and backward ms | step ms | of bare | first step ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for title, shape in SHAPES.items():
        measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in RUNS}
        for _ in range(rounds):
            for name, options in RUNS.items():
                measured[name].append(measure(shape, options))
        bare = statistics.median(times[1] for times in measured["bare"])
        for name, times in measured.items():
            passes, step, first = (
                statistics.median(column) for column in zip(*times, strict=True)
            )
            print(
                f"| {title} | {name} | {passes:.2f} | {step:.2f} | {step / bare:.2f} | "
                f"{first:.0f} |"
            )


if __name__ == "__main__":
    main()
