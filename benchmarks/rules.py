"""Measure the update on the CPU of each rule: ebbtide's kernel, torch's and
DeepSpeed's, and a copy of as many bytes.

    python benchmarks/rules.py [--params 50] [--rounds 9]

Each takes a bf16 gradient and returns a bf16 parameter. Torch (`fused` and `foreach`)
and DeepSpeed (where it is installed) need an fp32 gradient, so their casts count; their
moments are fp32. Rules of whole matrices update one of 1,024 x 1,024; torch's have
neither version. The copy is numba's loop `a = b` over fp32 arrays. All take turns,
times are of the processor, on which other work has little influence, and ratios are of
medians. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numba import njit
from tables import machine_line, table

from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import RULES, UpdateRule

SHAPE = (1024, 1024)
FUSED, FOREACH, DEEPSPEED = OTHERS = "fused", "foreach", "DeepSpeed"
GROUPS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "weight_decay": 0.01}}


def ebbtide_step(
    rule: UpdateRule, params: int, kernel: CpuKernel
) -> Callable[[], object]:
    shape = SHAPE if rule.whole_update is not None else None
    if rule.has_masters:
        dtypes, target, kernel_rule = (
            rule.dtypes,
            torch.ones(params, dtype=torch.bfloat16),
            rule,
        )
    else:
        dtypes, target, kernel_rule = (
            (torch.bfloat16, *rule.dtypes),
            None,
            rule.with_masters,
        )
    # Rows begin at different places of a page, as in the engine.
    state = [
        torch.empty(row_stride(params) + 336 * row, dtype=of)[336 * row :]
        for row, of in enumerate(dtypes)
    ]
    state = [row[:params].fill_(1e-3) for row in state]
    gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
    scalars = rule.scalars({**rule.defaults, **GROUPS.get(rule.name, {})}, 5)
    return lambda: kernel.update(
        gradient, state, target, scalars, rule=kernel_rule, shape=shape
    )


def other_step(rule: UpdateRule, params: int, name: str) -> Callable[[], object] | None:
    """Return the step of torch's optimizer or of DeepSpeed's, with the casts around it;
    None: there is none."""
    options = {**rule.defaults, **GROUPS.get(rule.name, {})}
    if name == DEEPSPEED:
        if rule.name not in ("adam", "adamw", "lion"):
            return None
        from deepspeed.ops import adam, lion

        make = lion.DeepSpeedCPULion if rule.name == "lion" else adam.DeepSpeedCPUAdam
        options |= {} if rule.name == "lion" else {"adamw_mode": rule.name == "adamw"}
    elif (make := getattr(torch.optim, rule.title, None)) is None:
        return None
    elif rule.whole_update is None:
        options[name] = True
    elif name == FOREACH:
        return None
    options.pop("stochastic_rounding", None)
    gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
    half, shape = (
        torch.ones_like(gradient),
        (params,) if rule.whole_update is None else SHAPE,
    )
    master = torch.ones(shape)
    master.grad = torch.ones(shape)
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

    loop, arrays = (
        njit(nogil=True)(copy),
        [np.ones(params, np.float32) for _ in range(2)],
    )
    edges = [params * number // threads for number in range(threads + 1)]
    pool = ThreadPoolExecutor(threads)
    parts = [
        [array[edges[number] : edges[number + 1]] for array in arrays]
        for number in range(threads)
    ]
    return lambda: list(pool.map(lambda part: loop(*part), parts))


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--params", type=int, default=50, help="parameters in millions")
    flags.add_argument("--rounds", type=int, default=9)
    args = flags.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    kernel, rows = CpuKernel(threads), []
    for rule in RULES.values():
        params = (
            args.params * 1_000_000
            if rule.whole_update is None
            else SHAPE[0] * SHAPE[1]
        )
        steps = {
            "ebbtide": ebbtide_step(rule, params, kernel),
            "copy": copy_step(params, threads),
        }
        for name in OTHERS:
            if (name != DEEPSPEED or find_spec("deepspeed")) and (
                other := other_step(rule, params, name)
            ):
                steps[name] = other
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(args.rounds + 2):
            for name, step in steps.items():
                begin = time.process_time()
                step()
                if number > 1:
                    times[name].append(time.process_time() - begin)
        own, copied = (
            statistics.median(times["ebbtide"]),
            statistics.median(times["copy"]),
        )
        nbytes = 2 + 2 * rule.state_bytes + (4 if rule.reads_params else 2)
        ratios = [
            f"{statistics.median(times[name]) / own:.2f}" if name in times else "-"
            for name in OTHERS
        ]
        copies = (
            f"{nbytes / own / (8 / copied):.2f}" if rule.whole_update is None else "-"
        )
        rows.append((f"`{rule.name}`", f"{own / params * 1e9:.3g}", *ratios, copies))
    print(
        f"{machine_line()}, torch {torch.__version__}, {args.params} M parameters, "
        f"{args.rounds} rounds.\n"
    )
    others = ("rate / torch's fused", "rate / torch's foreach", "rate / DeepSpeed's")
    table(
        ("rule", "ns of a core per parameter", *others, "bytes/s / those of a copy"),
        rows,
    )


if __name__ == "__main__":
    main()
