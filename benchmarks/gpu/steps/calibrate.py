"""Runs `ebbtide calibrate`, and compares link counters with copies of known size."""

from __future__ import annotations

import json
from typing import Any

import torch
from link_counters import check_counters
from step import argument_parser, ebbtide, start

from ebbtide.profiler.sampler.nvml import NvmlError

SECONDS, TINY_SECONDS = 40, 3
COPIES_S = 1.0


def agrees(source: dict[str, Any]) -> bool:
    """Return whether a source counts the copied bytes within 10 % in each direction."""
    scales = [
        source[direction]["scale"]
        for direction in ("h2d", "d2h")
        if direction in source
    ]
    return len(scales) == 2 and all(
        scale is not None and 0.9 < scale < 1.1 for scale in scales
    )


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--calibration-seconds", type=float, default=SECONDS)
    args = flags.parse_args()
    step = start(args)
    seconds = str(TINY_SECONDS if step.rehearse else args.calibration_seconds)
    output = ebbtide(
        "calibrate",
        "--seconds",
        seconds,
        "--force",
        "--json",
        "-o",
        step.out / "machine.json",
    )
    machine = json.loads(output)
    rates = {
        key: value for key, value in machine.items() if isinstance(value, int | float)
    }
    notes, sources = [*machine.get("notes", [])], None
    if torch.cuda.is_available():
        try:
            sources = check_counters(torch.cuda.current_device(), COPIES_S)
        except NvmlError as error:
            notes.append(f"the link counters of the GPU were not checked: {error}")
    step.add(rates=rates, counters=sources, notes=notes)
    step.check(
        "a source of the link's use is right within 10 %",
        any(map(agrees, sources.values())) if sources else None,
    )


if __name__ == "__main__":
    main()
