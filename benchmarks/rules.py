"""Measure the update on the CPU of each rule: ebbtide's kernel, torch's fused optimizer, and a copy of as many bytes.

    python benchmarks/rules.py [--params 50] [--rounds 9]

Each takes a bf16 gradient and returns a bf16 parameter. Torch needs an fp32 gradient, so its casts count; its moments
are fp32. Rules of whole matrices update one of 1,024 x 1,024, and torch's have no fused version. The copy is numba's
loop `a = b` over fp32 arrays. All take turns, and ratios are of medians. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from tables import machine_line, table

from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import RULES, UpdateRule

SHAPE = (1024, 1024)
GROUPS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "weight_decay": 0.01}}


def ebbtide_step(rule: UpdateRule, params: int, kernel: CpuKernel) -> Callable[[], object]:
    dtypes, shape = rule.dtypes(), SHAPE if rule.finish is not None else None
    # Rows begin at different places of a page, as in the engine.
    state = [torch.empty(row_stride(params) + 336 * row, dtype=of)[336 * row :] for row, of in enumerate(dtypes)]
    state = [row[:params].fill_(1e-3) for row in state]
    gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
    half, scalars = torch.ones_like(gradient), rule.scalars({**rule.defaults, **GROUPS.get(rule.name, {})}, 5)
    return lambda: kernel.update(gradient, state, half, scalars, rule=rule, shape=shape)


def torch_step(rule: UpdateRule, params: int) -> Callable[[], object] | None:
    make = getattr(torch.optim, rule.title, None)
    if make is None:
        return None
    gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
    half, shape = torch.ones_like(gradient), (params,) if rule.finish is None else SHAPE
    master = torch.ones(shape)
    master.grad = torch.ones(shape)
    options = {**rule.defaults, **GROUPS.get(rule.name, {})} | ({"fused": True} if rule.finish is None else {})
    options.pop("stochastic_rounding", None)
    optimizer = make([master], **options)

    def step() -> None:
        master.grad.view(-1).copy_(gradient)
        optimizer.step()
        half.copy_(master.view(-1))

    return step


def copy_step(params: int, threads: int) -> Callable[[], object]:
    """Return a copy of fp32 arrays: 8 B for each parameter."""

    def copy(a: Any, b: Any) -> None:
        for i in range(a.size):
            a[i] = b[i]

    loop, arrays = njit(nogil=True)(copy), [np.ones(params, np.float32) for _ in range(2)]
    edges = [params * number // threads for number in range(threads + 1)]
    pool = ThreadPoolExecutor(threads)
    parts = [[array[edges[number] : edges[number + 1]] for array in arrays] for number in range(threads)]
    return lambda: list(pool.map(lambda part: loop(*part), parts))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--params", type=int, default=50, help="parameters in millions")
    flags.add_argument("--rounds", type=int, default=9)
    args = flags.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    kernel, rows = CpuKernel(threads), []
    for rule in RULES.values():
        params = args.params * 1_000_000 if rule.finish is None else SHAPE[0] * SHAPE[1]
        steps = {"ebbtide": ebbtide_step(rule, params, kernel), "copy": copy_step(params, threads)}
        if other := torch_step(rule, params):
            steps["torch"] = other
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(args.rounds + 2):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if number > 1:
                    times[name].append(time.perf_counter() - begin)
        own, copied = statistics.median(times["ebbtide"]), statistics.median(times["copy"])
        nbytes = 4 + 2 * rule.state_bytes()
        ratio = f"{statistics.median(times['torch']) / own:.2f}" if "torch" in times else "-"
        copies = f"{nbytes / own / (8 / copied):.2f}" if rule.finish is None else "-"
        rows.append((f"`{rule.name}`", f"{params / own / 1e9:.3g}", ratio, copies))
    print(f"{machine_line()}, torch {torch.__version__}, {args.params} M parameters, {args.rounds} rounds.\n")
    table(("rule", "Gparam/s", "rate / torch's", "bytes/s / those of a copy"), rows)


if __name__ == "__main__":
    main()
