"""Measure the update on the CPU: ebbtide's kernel, torch's AdamW, DeepSpeed's CPU Adam,
and the memory bandwidth.

    python benchmarks/kernels.py [--deepspeed-python PATH] [--rounds 7] [--params 100] [--seconds 3]

Each takes a bf16 gradient and returns a bf16 parameter; master and moments are fp32.
Torch and DeepSpeed need an fp32 gradient, so their casts count. PATH is the Python of
an environment with DeepSpeed, if this one does not have it. The memory bandwidth is the
best of three loops over fp32 arrays on as many threads (bytes read and written, without
write-allocate traffic). Each runs in its own process, they take turns in changing
order, and ratios are within a round. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tables import machine_line, spread

OURS, TORCH, DEEPSPEED, MEMORY = "ebbtide", "torch", "DeepSpeed", "memory"
# Read and written by one pass per parameter.
BYTES = 28


def ebbtide_step(params: int, threads: int) -> Callable[[], object]:
    from ebbtide.features.calibrate.cpu import OnePassAdamW

    return OnePassAdamW(params, threads)


def torch_step(params: int, threads: int) -> Callable[[], object]:
    import torch

    from ebbtide.features.calibrate.cpu import TorchAdamW

    return TorchAdamW(params, torch.device("cpu"), threads)


def deepspeed_step(params: int, threads: int) -> Callable[[], object]:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(threads)
    gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
    half = torch.ones_like(gradient)
    master = torch.nn.Parameter(torch.ones(params))
    wide = torch.ones(params)
    master.grad = wide
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, weight_decay=0.01, adamw_mode=True)

    def step() -> None:
        wide.copy_(gradient)
        optimizer.step()
        half.copy_(master.detach())

    return step


STEPS = {OURS: ebbtide_step, TORCH: torch_step, DEEPSPEED: deepspeed_step}


def rate(step: Callable[[], object], amount: float, seconds: float) -> float:
    """Return the amount per second: the median of all runs after two that compile and
    touch the memory."""
    step()
    step()
    lengths = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(lengths) < 5:
        begin = time.perf_counter()
        step()
        lengths.append(time.perf_counter() - begin)
    return amount / statistics.median(lengths)


def bandwidth(params: int, threads: int, seconds: float) -> dict[str, float]:
    """Return the bytes per second of copy (a = b), triad (a = b + s * c) and scaling in
    place (a = s * a)."""
    import numpy as np
    from numba import njit

    def copy(a: Any, b: Any, c: Any) -> None:
        for i in range(a.size):
            a[i] = b[i]

    def triad(a: Any, b: Any, c: Any) -> None:
        for i in range(a.size):
            a[i] = b[i] + np.float32(0.5) * c[i]

    def scale(a: Any, b: Any, c: Any) -> None:
        for i in range(a.size):
            a[i] *= np.float32(0.5)
            b[i] *= np.float32(0.5)
            c[i] *= np.float32(0.5)

    arrays = [np.ones(params, np.float32) for _ in range(3)]
    edges = [params * number // threads for number in range(threads + 1)]
    pool = ThreadPoolExecutor(threads)
    rates = {}
    for loop, moved in ((copy, 8), (triad, 12), (scale, 24)):
        compiled = njit(nogil=True)(loop)

        def part(number: int, compiled: Any = compiled) -> None:
            compiled(*(array[edges[number] : edges[number + 1]] for array in arrays))

        rates[loop.__name__] = rate(
            lambda part=part: list(pool.map(part, range(threads))),
            moved * params,
            seconds,
        )
    return rates


def measure(name: str, params: int, threads: int, seconds: float) -> dict[str, float]:
    if name == MEMORY:
        return bandwidth(params, threads, seconds)
    return {"params_per_s": rate(STEPS[name](params, threads), params, seconds)}


def first_call_s() -> tuple[float, float]:
    """Return the seconds that the first update of a new process takes, without and with
    a compiled kernel on disk."""
    code = (
        "import time, torch; begun = time.perf_counter()\n"
        "from ebbtide.features.calibrate.cpu import OnePassAdamW\n"
        "OnePassAdamW(1000, 1)(); print(time.perf_counter() - begun)"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        runs = [
            subprocess.run(command, env=environment, capture_output=True, check=True)
            for _ in range(2)
        ]
    return float(runs[0].stdout), float(runs[1].stdout)


def run(name: str, python: str, args: argparse.Namespace) -> dict[str, float] | str:
    """Measure in another process; return its rates, or an error message."""
    options = [
        "--params",
        str(args.params),
        "--seconds",
        str(args.seconds),
        "--measure",
        name,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(
        [python, __file__, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  load {os.getloadavg()[0]:.1f}: {name} {rates}", file=sys.stderr)
    return rates


def machine(deepspeed_python: str) -> str:
    code = (
        "from importlib.metadata import version; print(version('deepspeed'), 'with "
        "torch', version('torch'))"
    )
    versions = subprocess.run(
        [deepspeed_python, "-c", code], capture_output=True, text=True, check=False
    )
    other = f", DeepSpeed {versions.stdout.strip()}" if versions.returncode == 0 else ""
    import torch

    return f"{machine_line()}, torch {torch.__version__}{other}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--deepspeed-python", default=sys.executable)
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--params", type=int, default=100, help="parameters in millions")
    flags.add_argument(
        "--seconds", type=float, default=3.0, help="duration of each measurement in s"
    )
    flags.add_argument("--measure", choices=[*STEPS, MEMORY], help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.measure:
        threads = len(os.sched_getaffinity(0))
        print(
            json.dumps(
                measure(args.measure, args.params * 1_000_000, threads, args.seconds)
            )
        )
        return
    errors: dict[str, str] = {}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        names = [
            name for name in (MEMORY, OURS, TORCH, DEEPSPEED) if name not in errors
        ]
        results = {}
        for name in names if number % 2 else reversed(names):
            result = run(
                name,
                args.deepspeed_python if name == DEEPSPEED else sys.executable,
                args,
            )
            if isinstance(result, str):
                errors[name] = result
            else:
                results[name] = result
        rounds.append(results)
    report(args, rounds, errors)


def report(
    args: argparse.Namespace,
    rounds: list[dict[str, dict[str, float]]],
    errors: dict[str, str],
) -> None:
    setup = (
        f"{args.params} M parameters, {args.rounds} rounds: median (minimum to maximum)"
    )
    print(f"{time.strftime('%Y-%m-%d')}, {machine(args.deepspeed_python)}, {setup}\n")
    print("| update | Gparam/s | rate of ebbtide / rate | 28 B x rate / bandwidth |")
    print("| --- | --- | --- | --- |")
    for name in STEPS:
        if name in errors:
            print(f"| {name} | not measured: {errors[name]} | | |")
            continue
        rates = [results[name]["params_per_s"] for results in rounds]
        ratios = [
            results[OURS]["params_per_s"] / own
            for results, own in zip(rounds, rates, strict=True)
        ]
        shares = [
            BYTES * own / max(results[MEMORY].values())
            for results, own in zip(rounds, rates, strict=True)
        ]
        print(
            f"| {name} | {spread([own / 1e9 for own in rates], 2)} | "
            f"{spread(ratios, 2)} | {spread(shares, 2)} |"
        )
    print("\n| loop over memory | GB/s |\n| --- | --- |")
    for loop in rounds[0][MEMORY]:
        print(
            f"| {loop} | "
            f"{spread([results[MEMORY][loop] / 1e9 for results in rounds], 1)} |"
        )
    uncached, cached = (f"{seconds:.1f} s" for seconds in first_call_s())
    print(
        f"\nFirst update of a new process: {uncached} (import of numba, compilation), "
        f"then {cached} (compiled before)."
    )


if __name__ == "__main__":
    main()
