"""Measure what `ebbtide watch` costs the job that it shows.

    python benchmarks/watching.py [--pairs 20] [--step-ms 20] [--size 80x24]

An A/B in one process, which trains and is recorded all the time: blocks of a few seconds in which a real
`ebbtide watch` in a tmux of its own follows the recording alternate with blocks in which it is stopped (SIGSTOP), on,
off, off, on. Each ratio compares two neighbouring blocks by their median step. The CPU time of the view is that of its
process per second of the blocks in which it runs, the first seconds (imports) left out. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from overhead import machine, make_step, percent_interval, run_block
from tables import table

BLOCK_S = 5.0
SETTLE_S = 20.0


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its threads so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_view(trace: Path, size: str, server: str) -> int:
    """Start `ebbtide watch` in a detached tmux; return its process id."""
    columns, rows = size.split("x")
    tmux = ["tmux", "-L", server, "-f", "/dev/null"]
    command = f"exec {sys.executable} -m ebbtide watch {trace}"
    subprocess.run([*tmux, "new-session", "-d", "-x", columns, "-y", rows, command], check=True)
    pid = subprocess.run([*tmux, "list-panes", "-F", "#{pane_pid}"], check=True, capture_output=True, text=True)
    return int(pid.stdout)


def train(step: Callable[[], None], seconds: float) -> float:
    """Run steps for a time; return the median in ms."""
    steps = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        steps.append(run_block(step, 1).wall_ms)
    return statistics.median(steps)


def measure(step: Callable[[], None], pairs: int, pid: int) -> tuple[list[float], list[float], list[float]]:
    """Return the steps without the view in ms, the ratios with and without it, and its CPU seconds per second."""
    steps_ms, ratios, shares = [], [], []
    for number in range(pairs):
        pair = {}
        for on in (True, False) if number % 2 == 0 else (False, True):
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
            begun, used = time.monotonic(), cpu_s(pid)
            pair[on] = train(step, BLOCK_S)
            if on:
                shares.append((cpu_s(pid) - used) / (time.monotonic() - begun))
        steps_ms.append(pair[False])
        ratios.append(pair[True] / pair[False])
    return steps_ms, ratios, shares


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--pairs", type=int, default=20, help="pairs of blocks (default: 20)")
    flags.add_argument("--step-ms", type=float, default=20.0, help="aimed length of a step in ms (default: 20)")
    flags.add_argument("--size", default="80x24", help="columns and rows of the view (default: 80x24)")
    args = flags.parse_args()
    import torch

    from ebbtide.profiler.agent.options import Options
    from ebbtide.profiler.agent.start import start, stop
    from ebbtide.profiler.recording import open_recording, spool_folder

    torch.set_num_threads(1)
    step = make_step(args.step_ms)
    server = f"ebbtide-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ebb"
        path.mkdir()
        recording = open_recording(path, sys.argv, Options(), os.getpid())
        recording.sampler.start()
        if start(torch, str(spool_folder(path)), Options()) is None:
            raise SystemExit("the agent could not attach to this torch")
        try:
            train(step, 1.0)
            pid = start_view(path, args.size, server)
            train(step, SETTLE_S)
            steps_ms, ratios, shares = measure(step, args.pairs, pid)
        finally:
            subprocess.run(["tmux", "-L", server, "kill-server"], check=False)
            stop()
            recording.sampler.stop()
    blocks = f"view of {args.size}, {args.pairs} pairs of blocks of {BLOCK_S:.0f} s"
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {blocks}\n")
    low, middle, high = min(steps_ms), statistics.median(steps_ms), max(steps_ms)
    share = f"{1e3 * statistics.median(shares):.0f} ({1e3 * min(shares):.0f} to {1e3 * max(shares):.0f})"
    table(
        [
            "recorded step without view, ms (least to most)",
            "step with view (95 % interval)",
            "CPU ms of the view per s",
        ],
        [[f"{middle:.2f} ({low:.2f} to {high:.2f})", percent_interval(ratios), share]],
    )


if __name__ == "__main__":
    main()
