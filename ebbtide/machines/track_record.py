"""How far predictions could be trusted so far: comparisons with measured runs, as docs/accuracy.md has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("track_record.json")


@dataclass(frozen=True)
class TrackRecord:
    """Runs that were not fitted to, and the share of their iterations that the predicted ranges held."""

    runs: int
    held: float

    def text(self) -> str:
        """Return the record in few words."""
        return f"80 % range; held {100 * self.held:.0f} % of {self.runs:,} runs predicted blind"


@cache
def _values() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def track_records() -> dict[str, TrackRecord]:
    """Return the records of iterations by GPU, a part of its name; `all` has those of all GPUs."""
    return {name: TrackRecord(**record) for name, record in _values()["iterations"].items()}


def updates_text() -> str:
    """Return in few words how well updates of published runs were predicted by fits to the others."""
    record = _values()["updates"]
    return f"held-out runs: {100 * record['mean_error']:.1f} % mean, {100 * record['largest_error']:.1f} % at most"


def record_of(gpu_name: str | None) -> TrackRecord | None:
    """Return the record of a GPU; None where no run on one was compared."""
    return next((record for name, record in track_records().items() if name in (gpu_name or "")), None)
