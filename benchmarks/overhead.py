"""Measure the cost of recording: a job bare, under `ebbtide profile`, and under torch.profiler with memory recording.

    python benchmarks/overhead.py [--rounds 9] [--quick]

The three run in turn in changing order, and each is compared with the bare run of its round: the figures are ratios of
the median step time (by the clock of the script, without its first steps). Prints Markdown.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import machine_line, spread

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
STEP = re.compile(r"^step .*?([\d.]+) ms$", re.MULTILINE)

# Steps of about a hundred, ten, and a few milliseconds: costs per phase are visible in the last.
JOBS = {
    "4.8 M parameters": ["--steps", "24"],
    "0.9 M parameters, context 64": ["--layers", "4", "--width", "128", "--context", "64", "--steps", "120"],
    "0.1 M parameters, context 32": ["--layers", "2", "--width", "64", "--context", "32", "--steps", "400"],
}
SKIP = 8

TORCH_PROFILER = """
import runpy, sys
from torch.profiler import profile, ProfilerActivity
import torch
sys.argv = sys.argv[1:]
activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
with profile(activities=activities, profile_memory=True):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def commands(job: list[str], folder: Path) -> dict[str, list[str]]:
    script = [str(EXAMPLE), *job]
    trace = str(folder / "run.ebb")
    return {
        "bare": [sys.executable, *script],
        "ebbtide": [sys.executable, "-m", "ebbtide", "profile", "--force", "-o", trace, "--", sys.executable, *script],
        "torch.profiler": [sys.executable, "-c", TORCH_PROFILER, *script],
    }


def step_ms(command: list[str]) -> float:
    """Return the median step of one run in ms."""
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return statistics.median(float(ms) for ms in STEP.findall(run.stdout)[SKIP:])


def compare(job: list[str], rounds: int) -> dict[str, list[float]]:
    """Return for each variant the ratio of its median step to that of the bare run, per round; for `bare` the ms."""
    figures: dict[str, list[float]] = {"bare": [], "ebbtide": [], "torch.profiler": []}
    with tempfile.TemporaryDirectory() as folder:
        variants = list(commands(job, Path(folder)).items())
        for number in range(rounds):
            order = variants[number % 3 :] + variants[: number % 3]
            steps_ms = {name: step_ms(command) for name, command in order}
            figures["bare"].append(steps_ms["bare"])
            for name in ("ebbtide", "torch.profiler"):
                figures[name].append(steps_ms[name] / steps_ms["bare"])
            print(f"  {steps_ms}", file=sys.stderr)
    return figures


def machine() -> str:
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return f"{machine_line()}{gpu}, torch {torch.__version__}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--quick", action="store_true", help="only two rounds, to check that the benchmark works")
    args = flags.parse_args()
    rounds = 2 if args.quick else args.rounds
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {rounds} rounds: median (minimum to maximum)\n")
    print("| job | bare step, ms | under `ebbtide profile` / bare | under torch.profiler / bare |")
    print("| --- | --- | --- | --- |")
    for name, job in JOBS.items():
        figures = compare(job, rounds)
        ours, theirs = spread(figures["ebbtide"], 3), spread(figures["torch.profiler"], 3)
        print(f"| {name} | {spread(figures['bare'], 1)} | {ours} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
