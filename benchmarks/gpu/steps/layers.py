"""Runs `ebbtide compare --layers`: choices for weights and activations of layers,
measured beside predicted.

It has not run on a GPU.
"""

from __future__ import annotations

import json

import torch
from step import argument_parser, ebbtide, start

TINY = ("--params", "2e5", "--emulate-link", "40MB", "--forward-ms", "10")


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--params", default="4e8")
    args = flags.parse_args()
    step = start(args)
    words = (
        ("--params", args.params)
        if torch.cuda.is_available() and not step.rehearse
        else TINY
    )
    comparison = json.loads(
        ebbtide("compare", "--layers", "--steps", "10", "--json", *words)
    )
    results, budget = comparison["results"], comparison["device"]["memory_budget"]
    rows = {f"{one['activations']}, {one['weights']}": one for one in results}
    step.add(results=rows, budget_bytes=budget)
    step.check(
        "the losses of the plain job to the bit under every choice",
        comparison["losses_equal"],
    )
    peaks = [
        one["device_bytes"]["measured"] for name, one in rows.items() if "auto" in name
    ]
    step.check(
        "layers within their memory where a plan chooses",
        all(peak <= budget for peak in peaks),
    )
    if not step.rehearse:
        ratios = [one["iteration_ms"]["ratio"] for one in results]
        close = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
        step.aim(
            "80 % of iterations within 10 % of predicted", close >= 0.8 * len(ratios)
        )


if __name__ == "__main__":
    main()
