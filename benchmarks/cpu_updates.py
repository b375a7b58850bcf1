"""Measure updates of AdamW on the CPU as frameworks run them, against the bandwidth of
memory in the same round.

    python benchmarks/cpu_updates.py [--deepspeed-path FOLDER] [--rounds 5] [--params 64]

torch's AdamW in its three forms has fp32 parameters and gradients. Megatron's hybrid
optimizer and torchao's CPUOffloadOptimizer call its fused form, torchao with parameters
in bf16, too. DeepSpeed's CPU Adam has fp32 gradients. One pass moves 28 B a parameter
(14 B in bf16), and torch's loops 80 B. Each kind runs in a process of its own, with one
thread and with all; kinds take turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kernels import MEMORY, bandwidth, rate
from tables import machine_line, spread


class Kind(NamedTuple):
    """A form of the update: options of torch's AdamW (None: DeepSpeed's), the type of
    its parameters, and the bytes that it moves for each."""

    options: dict[str, bool] | None
    dtype: str
    bytes_per_param: int


KINDS = {
    "torch, plain loop (the default on the CPU)": Kind(
        {"foreach": False, "fused": False}, "float32", 80
    ),
    "torch, foreach": Kind({"foreach": True}, "float32", 80),
    "torch, fused (Megatron's hybrid, torchao)": Kind({"fused": True}, "float32", 28),
    "torch, fused, bf16 (torchao)": Kind({"fused": True}, "bfloat16", 14),
    "DeepSpeed": Kind(None, "float32", 28),
}


def step_of(kind: Kind, params: int) -> Callable[[], object]:
    """Return a step of an optimizer of this kind over one parameter."""
    import torch

    weight = torch.nn.Parameter(torch.ones(params, dtype=getattr(torch, kind.dtype)))
    weight.grad = torch.full_like(weight, 1e-3)
    make: Any = torch.optim.AdamW
    if kind.options is None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        make = DeepSpeedCPUAdam
    step: Callable[[], object] = make([weight], lr=1e-3, **(kind.options or {})).step
    return step


def measure(name: str, params: int, threads: int, seconds: float) -> float:
    """Return the bytes per second of memory, or the parameters per second."""
    if name == MEMORY:
        return max(bandwidth(params, threads, seconds).values())
    import torch

    torch.set_num_threads(threads)
    return rate(step_of(KINDS[name], params), params, seconds)


def run(name: str, threads: int, args: argparse.Namespace) -> float | None:
    """Measure in another process; None if it failed."""
    settings = {name_of: str(threads) for name_of in ("OMP_NUM_THREADS",)}
    paths = [args.deepspeed_path, os.environ.get("PYTHONPATH")]
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    options = ["--params", str(args.params), "--seconds", str(args.seconds)]
    command = [sys.executable, __file__, *options, "--measure", name, str(threads)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True
    )
    if done.returncode:
        print((done.stderr.strip().splitlines() or [name])[-1], file=sys.stderr)
        return None
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--deepspeed-path", help="folder with DeepSpeed, if not here")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--params", type=int, default=64, help="parameters in millions")
    flags.add_argument("--seconds", type=float, default=2.0)
    flags.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.measure:
        name, threads = args.measure[0], int(args.measure[1])
        print(json.dumps(measure(name, args.params * 10**6, threads, args.seconds)))
        return
    all_threads = len(os.sched_getaffinity(0))
    rounds = []
    for number in range(args.rounds):
        names = [MEMORY, *KINDS]
        for threads in sorted({1, all_threads}):
            ordered = names if number % 2 else names[::-1]
            rounds.append(
                (threads, {name: run(name, threads, args) for name in ordered})
            )
    report(args, rounds)


def report(
    args: argparse.Namespace, rounds: list[tuple[int, dict[str, float | None]]]
) -> None:
    import torch

    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, torch {torch.__version__}, "
        f"{args.params} M parameters, {args.rounds} rounds: median (minimum to maximum)"
    )
    print("\n| update | threads | Gparam/s | bytes x rate / bandwidth |")
    print("| --- | --- | --- | --- |")
    for threads in sorted({threads for threads, _ in rounds}):
        own = [results for number, results in rounds if number == threads]
        for name, kind in KINDS.items():
            pairs = [
                (rate_of, results[MEMORY])
                for results in own
                if (rate_of := results[name]) and results[MEMORY]
            ]
            if not pairs:
                print(f"| {name} | {threads} | not measured | |")
                continue
            rates = [one / 1e9 for one, _ in pairs]
            shares = [kind.bytes_per_param * one / (most or 1) for one, most in pairs]
            print(f"| {name} | {threads} | {spread(rates, 2)} | {spread(shares, 2)} |")
        memory = [(results[MEMORY] or 0.0) / 1e9 for results in own]
        print(f"| memory, GB/s | {threads} | {spread(memory, 1)} | |")


if __name__ == "__main__":
    main()
