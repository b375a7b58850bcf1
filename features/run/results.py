"""The logs of a run's processes, for the command that started it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
# A process that steps optimizers writes their end when it ends.
_NO_END = (
    "it was killed or left by os._exit, so the figures of its optimizers are not known"
)


@dataclass(frozen=True)
class ProcessLog:
    """The events of a process that has stepped an optimizer."""

    rank: int
    events: list[Event]
    # The parameters at the end, where they are compared.
    params_path: Path

    def of_kind(self, kind: str) -> list[Event]:
        """Return the events of a kind, in their order."""
        return [event for event in self.events if event["kind"] == kind]

    def values(self, kind: str, key: str = "bits") -> list[Any]:
        """Return a value of each event of a kind."""
        return [event[key] for event in self.of_kind(kind)]


def read_logs(folder: Path) -> list[ProcessLog]:
    """Return the logs of a run, by rank."""
    logs = [
        ProcessLog(_rank(path), list(_events(path)), path.with_suffix(".pt"))
        for path in folder.glob("*.jsonl")
    ]
    return sorted(logs, key=lambda log: log.rank)


def _rank(path: Path) -> int:
    return int(path.name.split("-")[0])


def _events(path: Path) -> Iterator[Event]:
    for line in path.read_text().splitlines():
        # The last line of a process that was killed is in part.
        try:
            yield json.loads(line)
        except ValueError:
            return


def summary_lines(logs: list[ProcessLog]) -> list[str]:
    """Return a line for each optimizer, or for each process that drove none."""
    lines = []
    for log in logs:
        rank = f"rank {log.rank}, " if len(logs) > 1 else ""
        ends = log.of_kind("end")
        left = [own for own in log.of_kind("left") if "optimizer" not in own]
        for event in ends or left:
            lines.append(f"{rank}{_end_text(event)}")
        if not (ends or left):
            lines.append(f"{rank}{_NO_END}")
    if not lines:
        lines.append(
            "nothing was driven: no Adam, AdamW, SGD or Muon of torch has stepped "
            "after a backward"
        )
    return lines


def _end_text(event: Event) -> str:
    if "optimizer" not in event:
        return str(event["reason"])
    name = f"optimizer {event['optimizer']}"
    if not event["steps"]:
        return f"{name}: left to torch: {event['left'] or 'it had no backward'}"
    text = f"{name}: {event['steps']} steps under {event['policy']}"
    if event["left"]:
        return f"{text}, then left to torch: {event['left']}"
    measured, predicted = event.get("measured_ms"), event.get("predicted_ms")
    if measured:
        text += f", iteration {measured['iteration']:.1f} ms"
    if measured and predicted:
        text += f", predicted {predicted['iteration']:.1f} ms"
    return text
