"""Measure the update on the CPU out of place, with streaming and with ordinary stores,
against the one in place.

    python benchmarks/out_of_place.py [--params 30] [--rounds 40]

All take a bf16 gradient and return a bf16 parameter; master and moments are fp32. In
every round each runs once on one thread and on all, in changing order, and ratios are
within a round. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from tables import machine_line, spread, table

from ebbtide.interleave.engine.numerics import compiled, compiled_beside
from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules.adamw import ADAMW, Hyper

IN_PLACE, STREAMING, ORDINARY = (
    "in place",
    "out of place, streaming stores",
    "out of place, ordinary stores",
)
WHOLE_PAGES = "out of place, streaming stores, rows whole pages apart"


def state(params: int, stride: int) -> torch.Tensor:
    """Return master and moments whose rows begin at this distance, in elements; all
    pages are written."""
    return torch.zeros((3, stride))[:, :params].fill_(1e-3)


def updates(params: int, threads: int) -> dict[str, Callable[[], None]]:
    """Return each update; all share the same memory."""
    kernel, ordinary_kernel = CpuKernel(threads), CpuKernel(threads)
    elements = compiled.compile_loop(
        compiled_beside._update_elements, rule=ADAMW, step=compiled.make_step(ADAMW)
    )
    ordinary_kernel._beside = SimpleNamespace(  # type: ignore[assignment]
        update_of=lambda rule: (
            lambda grad, *arguments: elements(grad, *arguments, 0, grad.size)
        )
    )
    gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
    half = torch.ones_like(gradient)
    stride = row_stride(params)
    old, new = (state(params, stride) for _ in range(2))
    old_in_pages, new_in_pages = (
        state(params, stride + -stride % 1024) for _ in range(2)
    )
    scalars = Hyper().scalars(1)
    everything = [(0, params, scalars)]
    return {
        IN_PLACE: lambda: kernel.update(gradient, tuple(old), half, scalars),
        STREAMING: lambda: kernel.update_beside(gradient, old, new, half, everything),
        WHOLE_PAGES: lambda: kernel.update_beside(
            gradient, old_in_pages, new_in_pages, half, everything
        ),
        ORDINARY: lambda: ordinary_kernel.update_beside(
            gradient, old, new, half, everything
        ),
    }


def seconds(update: Callable[[], None]) -> float:
    begin = time.perf_counter()
    update()
    return time.perf_counter() - begin


def fast(rates: list[float]) -> float:
    """Return the rate that a tenth of the runs exceed, which other work on the machine
    disturbed least."""
    return statistics.quantiles(rates, n=10)[-1]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--params", type=int, default=30, help="parameters in millions")
    flags.add_argument("--rounds", type=int, default=40)
    args = flags.parse_args()
    params = args.params * 1_000_000
    threads = sorted({1, len(os.sched_getaffinity(0))})
    runs = {
        (count, name): run
        for count in threads
        for name, run in updates(params, count).items()
    }
    # Compile the loops, and touch the memory.
    for run in runs.values():
        run()
    rates: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    for number in range(args.rounds):
        for key in runs if number % 2 else reversed(runs):
            rates[key].append(params / seconds(runs[key]))
    load = f"load {os.getloadavg()[0]:.1f}"
    setup = (
        f"{args.params} M parameters, {args.rounds} rounds, {load}: median (minimum to "
        "maximum)"
    )
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, torch {torch.__version__}, "
        f"{setup}\n"
    )
    rows = []
    for (count, name), own in rates.items():
        ratios = [
            rate / base for rate, base in zip(own, rates[count, IN_PLACE], strict=True)
        ]
        undisturbed = fast(own) / fast(rates[count, IN_PLACE])
        rows.append(
            [
                str(count),
                name,
                spread([rate / 1e9 for rate in own], 2),
                spread(ratios, 2),
                f"{undisturbed:.2f}",
            ]
        )
    table(
        [
            "threads",
            "update",
            "Gparam/s",
            "its rate / rate in place",
            "the same of the fastest tenth",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
