"""Measure what `ebbtide watch` costs the job that it shows.

    python benchmarks/watching.py [--pairs 80] [--step-ms 20] [--size 80x24]

An A/B in one process, which trains and is recorded all the time: blocks of a few
seconds in which a real `ebbtide watch` in a tmux of its own follows the recording
alternate with blocks in which it is stopped (SIGSTOP), on, off, off, on. Each ratio
compares the mean steps of two neighbouring blocks, in wall time and in CPU time of the
job (of all its threads, which other work hardly changes). The CPU time of the view is
that of its process per second of the blocks in which it runs, the first seconds
(imports) left out. Prints Markdown.
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

from overhead import Block, machine, make_step, percent_interval, run_block
from tables import spread, table

BLOCK_S = 2.0
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
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", columns, "-y", rows, command], check=True
    )
    pid = subprocess.run(
        [*tmux, "list-panes", "-F", "#{pane_pid}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(pid.stdout)


def train(step: Callable[[], None], seconds: float) -> Block:
    """Run steps for a time; return their means."""
    blocks = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        blocks.append(run_block(step, 1))
    return Block(*(statistics.fmean(values) for values in zip(*blocks, strict=True)))


def measure(
    step: Callable[[], None], pairs: int, pid: int
) -> tuple[list[tuple[Block, Block]], list[float]]:
    """Return pairs of blocks without and with the view, and its CPU seconds per
    second."""
    measured, shares = [], []
    for number in range(pairs):
        pair = {}
        for on in (True, False) if number % 2 == 0 else (False, True):
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
            begun, used = time.monotonic(), cpu_s(pid)
            pair[on] = train(step, BLOCK_S)
            if on:
                shares.append((cpu_s(pid) - used) / (time.monotonic() - begun))
        measured.append((pair[False], pair[True]))
    return measured, shares


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "--pairs", type=int, default=80, help="pairs of blocks (default: 80)"
    )
    flags.add_argument(
        "--step-ms",
        type=float,
        default=20.0,
        help="aimed length of a step in ms (default: 20)",
    )
    flags.add_argument(
        "--size", default="80x24", help="columns and rows of the view (default: 80x24)"
    )
    args = flags.parse_args()
    import torch

    from ebbtide.profiler.agent.options import Options
    from ebbtide.profiler.agent.start import start, stop
    from ebbtide.profiler.recording.lifecycle import open_recording, spool_folder

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
            measured, shares = measure(step, args.pairs, pid)
        finally:
            subprocess.run(["tmux", "-L", server, "kill-server"], check=False)
            stop()
            recording.sampler.stop()
    blocks = f"view of {args.size}, {args.pairs} pairs of blocks of {BLOCK_S:.0f} s"
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, {blocks}\n")
    without = [block.wall_ms for block, _ in measured]
    ratios = [
        percent_interval([on[index] / off[index] for off, on in measured])
        for index in (0, 1)
    ]
    share = spread([1e3 * share for share in shares], 0)
    head = [
        "recorded step without view, ms",
        "step with view (95 % interval)",
        "its CPU time",
        "CPU ms of the view per s",
    ]
    table(head, [[spread(without, 2), *ratios, share]])


if __name__ == "__main__":
    main()
