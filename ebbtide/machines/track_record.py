"""The share of measured runs that predicted ranges held, as docs/accuracy.md has it."""

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def track_record() -> dict[str, Any]:
    """Return `iterations` by GPU (a part of its name, or `all`): `runs`, the share `held`; and errors of `updates`."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def ranges_text(gpu_name: str = "all") -> str | None:
    """Return in few words how far ranges of iterations can be trusted; None where no run on such a GPU was compared."""
    for name, record in track_record()["iterations"].items():
        if name in gpu_name:
            return f"80 % range; held {100 * record['held']:.0f} % of {record['runs']:,} runs predicted blind"
    return None


def updates_text() -> str:
    """Return in few words how well updates of published runs were predicted by fits to the others."""
    record = track_record()["updates"]
    return f"held-out runs: {100 * record['mean_error']:.1f} % mean, {100 * record['largest_error']:.1f} % at most"
