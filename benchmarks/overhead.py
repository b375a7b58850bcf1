"""Measure the cost of recording a training step.

    python benchmarks/overhead.py [--blocks 60] [--record phases|allocations|on-demand|slice] [--plot overhead.png]
    python benchmarks/overhead.py --whole-runs [--rounds 9]

The first is an A/B in one process: short blocks of steps with the agent attached
alternate with blocks without it, on, off, off, on. Each ratio compares two neighbouring
blocks, by the median step of each, so that slow changes of the speed of the machine
cancel. With each median stands the interval in which it lies with a confidence of 95 %.
The ratio of CPU times counts all threads of the process, and other work on the machine
hardly changes it. With allocations, every iteration of a block is captured, and the
pause at the end of a capture is printed for each. On-demand is a recording that waits
for `ebbtide profile --attach`, and slice is one within a slice. The second compares
whole runs of the example: bare, under `ebbtide profile` and torch.profiler with memory
recording, in turn and in changing order. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tables import machine_line, spread, table

# Aimed length of a step in ms -> steps of a block, and steps before it with the
# recorder in the state of that block: files are created at the first phase, and the
# interpreter specializes its code anew for the hooks.
STEP_MS = {0.5: (150, 50), 1.0: (80, 30), 3.0: (40, 20), 20.0: (8, 5), 400.0: (2, 1)}
AIMS = {0.5: 0.10, 3.0: 0.03, 20.0: 0.01}
# `all` and `phases` as the option of `ebbtide profile`; `allocations` as with its
# option --allocator-iterations; `on-demand` as with --on-demand, and `slice` in a slice
# that --attach has asked for.
RECORDS = ("all", "phases", "allocations", "on-demand", "slice")
# The agent looks for requests four times a second.
REQUEST_S = 0.4


class Block(NamedTuple):
    """One block of steps: the median step, and the CPU time of a step over all threads
    of the process."""

    wall_ms: float
    cpu_ms: float


class Cost(NamedTuple):
    """The cost of recording at one length of step. ends_ms: pauses at the end of the
    recording, per recorded step."""

    step_ms: list[float]
    wall_ratios: list[float]
    cpu_ratios: list[float]
    ends_ms: list[float]


def make_step(aim_ms: float) -> Callable[[], None]:
    """Return a training step of about the length `aim_ms`: a small network, and
    products of small matrices."""
    import torch
    from torch import nn

    class Busy(nn.Module):
        products = 0

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
            self.matrix = torch.full((64, 64), 1 / 64)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                for _ in range(self.products):
                    self.matrix @ self.matrix
            return self.layers(x)

    model = Busy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 16), torch.randn(8, 4)

    def step() -> None:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def cpu_ms(products: int) -> float:
        model.products = products
        return statistics.median(run_block(step, 5).cpu_ms for _ in range(9))

    # CPU times, which do not depend on other work that runs now.
    run_block(step, 20)
    base_ms, with_products_ms = cpu_ms(0), cpu_ms(50)
    model.products = max(
        0, round((aim_ms - base_ms) / (with_products_ms - base_ms) * 50)
    )
    return step


def run_block(step: Callable[[], None], steps: int) -> Block:
    """Run and time a block of steps."""
    walls = []
    cpu = time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        walls.append(time.perf_counter() - begin)
    return Block(
        statistics.median(walls) * 1e3, (time.process_time() - cpu) / steps * 1e3
    )


def begin_slice(step: Callable[[], None], folder: str) -> None:
    """Begin a slice that lasts to the end of the recording into a folder."""
    from ebbtide.profiler.agent.options import MAX_ITERATIONS, REQUEST, SliceRequest

    step()
    link = Path(folder) / REQUEST
    link.unlink(missing_ok=True)
    link.symlink_to(SliceRequest(time.monotonic_ns(), 0, MAX_ITERATIONS).text())
    time.sleep(REQUEST_S)
    step()


@contextmanager
def recorded(folder: str, step: Callable[[], None], record: str) -> Iterator[None]:
    """Record this process into a folder in the block, as `ebbtide profile` would;
    `record` is one of RECORDS."""
    import torch

    from ebbtide.profiler.agent.options import Options
    from ebbtide.profiler.agent.start import start, stop

    iterations = 10**6 if record == "allocations" else 0
    on_demand = record in ("on-demand", "slice")
    memory = record != "phases" and not on_demand
    recorder = start(
        torch,
        folder,
        Options(allocator_iterations=iterations, memory=memory, on_demand=on_demand),
    )
    if recorder is None:
        raise SystemExit("the agent could not attach to this torch")
    try:
        if record == "slice":
            begin_slice(step, folder)
            if not recorder.poll_ms:
                raise SystemExit("the slice did not begin")
        yield
        if not recorder.live:
            raise SystemExit("the recording ended before its block did")
    finally:
        stop()


def waiting_costs(folder: str) -> str:
    """Return the cost of waiting for requests, in a sentence: each the least of many
    times."""
    from ebbtide.features.slices.agent.on_demand import DetailedSlices
    from ebbtide.profiler.agent.options import read_request

    slices = DetailedSlices(None)  # type: ignore[arg-type]  # neither is used before a slice
    look, boundary = (
        min(timeit.repeat(call, number=1000, repeat=50)) / 1000 * 1e6
        for call in (lambda: read_request(folder), lambda: slices.enter_iteration(7))
    )
    return (
        f"looking for a request: {look:.1f} us, four times a second; the end of an "
        f"iteration: {boundary:.2f} us"
    )


def measure(aim_ms: float, blocks: int, record: str, folder: str) -> Cost:
    """Alternate blocks with and without the recorder."""
    step = make_step(aim_ms)
    steps, warm_up = STEP_MS[aim_ms]

    def block(on: bool) -> Block:
        if not on:
            run_block(step, warm_up)
            return run_block(step, steps)
        with recorded(folder, step, record):
            run_block(step, warm_up)
            timed = run_block(step, steps)
            begin = time.perf_counter()
        cost.ends_ms.append((time.perf_counter() - begin) * 1e3 / (warm_up + steps))
        return timed

    cost = Cost([], [], [], [])
    for number in range(blocks):
        order = (True, False) if number % 2 == 0 else (False, True)
        pair = {on: block(on) for on in order}
        cost.step_ms.append(pair[False].wall_ms)
        cost.wall_ratios.append(pair[True].wall_ms / pair[False].wall_ms)
        cost.cpu_ratios.append(pair[True].cpu_ms / pair[False].cpu_ms)
    return cost


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median between the ends of its 95 % confidence interval (order
    statistics of a binomial)."""
    half = math.ceil(0.98 * math.sqrt(len(values)))
    ordered, middle = sorted(values), len(values) // 2
    return (
        ordered[max(middle - half, 0)],
        statistics.median(values),
        ordered[min(middle + half, len(values) - 1)],
    )


def percent_interval(ratios: list[float]) -> str:
    """Return `median (interval)` of the increase in percent."""
    low, middle, high = (100 * (ratio - 1) for ratio in median_interval(ratios))
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def draw(costs: dict[float, Cost], path: Path) -> None:
    """Draw the increase over the length of the step: medians with their intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="0.6", linewidth=0.8)
    for label, marker, color, index in (
        ("step time", "o", "#0072b2", 1),
        ("CPU time", "s", "#d55e00", 2),
    ):
        rows = [median_interval(cost[index]) for cost in costs.values()]
        # Beside each other, so that the bars of one do not hide those of the other.
        shift = 0.94 if index == 1 else 1.06
        x = [statistics.median(cost.step_ms) * shift for cost in costs.values()]
        y = [100 * (middle - 1) for _, middle, _ in rows]
        bars = [
            [100 * (middle - low) for low, middle, _ in rows],
            [100 * (high - middle) for _, middle, high in rows],
        ]
        axes.errorbar(
            x, y, bars, marker=marker, color=color, capsize=3, linewidth=1, label=label
        )
    axes.plot(
        list(AIMS),
        [100 * aim for aim in AIMS.values()],
        "_",
        color="0.2",
        markersize=16,
        label="aim",
    )
    axes.set_xscale("log")
    axes.set_xlabel("step without recording, ms")
    axes.set_ylabel("increase under recording, %")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def blocks_in_one_process(blocks: int, record: str, plot: Path | None) -> None:
    """Print the table of the A/B in this process, and draw it."""
    import torch

    torch.set_num_threads(1)
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine()}, {blocks} pairs of blocks: median "
        "(95 % interval)\n"
    )
    costs, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for aim_ms in STEP_MS:
            costs[aim_ms] = cost = measure(aim_ms, blocks, record, folder)
            low, middle, high = median_interval(cost.step_ms)
            added_us = (statistics.median(cost.wall_ratios) - 1) * middle * 1e3
            aim = (
                f"{100 * AIMS[aim_ms]:.0f} %"
                if aim_ms in AIMS and record != "allocations"
                else ""
            )
            rows.append(
                [
                    f"{middle:.2f} ({low:.2f} to {high:.2f})",
                    percent_interval(cost.wall_ratios),
                    percent_interval(cost.cpu_ratios),
                    f"{added_us:.0f}",
                    f"{1e3 * statistics.median(cost.ends_ms):.0f}",
                    aim,
                ]
            )
            print(f"  {aim_ms} ms: {rows[-1]}", file=sys.stderr, flush=True)
    table(
        [
            "step without, ms",
            "step time",
            "CPU time",
            "added per step, us",
            "at the end per step, us",
            "aim",
        ],
        rows,
    )
    if record == "on-demand":
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{waiting_costs(folder)}")
    if plot is not None:
        draw(costs, plot)


EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
STEP = re.compile(r"^step .*?([\d.]+) ms$", re.MULTILINE)

# Steps of about a hundred, ten, and a few milliseconds: costs per phase are visible in
# the last.
JOBS = {
    "4.8 M parameters": ["--steps", "24"],
    "0.9 M parameters, context 64": [
        "--layers",
        "4",
        "--width",
        "128",
        "--context",
        "64",
        "--steps",
        "120",
    ],
    "0.1 M parameters, context 32": [
        "--layers",
        "2",
        "--width",
        "64",
        "--context",
        "32",
        "--steps",
        "400",
    ],
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
        "ebbtide": [
            sys.executable,
            "-m",
            "ebbtide",
            "profile",
            "--force",
            "-o",
            trace,
            "--",
            sys.executable,
            *script,
        ],
        "torch.profiler": [sys.executable, "-c", TORCH_PROFILER, *script],
    }


def step_ms(command: list[str]) -> float:
    """Return the median step of one run in ms."""
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return statistics.median(float(ms) for ms in STEP.findall(run.stdout)[SKIP:])


def compare(job: list[str], rounds: int) -> dict[str, list[float]]:
    """Return for each variant the ratio of its median step to that of the bare run, per
    round; for `bare` the ms."""
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

    gpu = (
        f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    )
    return f"{machine_line()}{gpu}, torch {torch.__version__}"


def whole_runs(rounds: int) -> None:
    """Print the table of whole runs of the example."""
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine()}, {rounds} rounds: median (minimum "
        "to maximum)\n"
    )
    print(
        "| job | bare step, ms | under `ebbtide profile` / bare | under torch.profiler "
        "/ bare |"
    )
    print("| --- | --- | --- | --- |")
    for name, job in JOBS.items():
        figures = compare(job, rounds)
        ours, theirs = (
            spread(figures["ebbtide"], 3),
            spread(figures["torch.profiler"], 3),
        )
        print(
            f"| {name} | {spread(figures['bare'], 1)} | {ours} | {theirs} |", flush=True
        )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "--blocks",
        type=int,
        default=60,
        help="pairs of blocks per length of step (default: 60)",
    )
    flags.add_argument(
        "--record",
        choices=RECORDS,
        default="all",
        help="what is recorded (default: all)",
    )
    flags.add_argument("--plot", type=Path, help="picture to write (default: none)")
    flags.add_argument(
        "--whole-runs",
        action="store_true",
        help="compare whole runs of the example instead",
    )
    flags.add_argument(
        "--rounds", type=int, default=9, help="rounds of whole runs (default: 9)"
    )
    flags.add_argument(
        "--quick",
        action="store_true",
        help="two rounds or four blocks, to check that it works",
    )
    args = flags.parse_args()
    if args.whole_runs:
        whole_runs(2 if args.quick else args.rounds)
    else:
        blocks_in_one_process(4 if args.quick else args.blocks, args.record, args.plot)


if __name__ == "__main__":
    main()
