"""Says of a trace whether it is predicted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ebbtide.cli.printing import echo

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace


def print_prediction(trace: Trace) -> None:
    """Print a line if a dry run made the trace."""
    from ebbtide.analysis.metrics.prediction import prediction_line

    if line := prediction_line(trace):
        echo(f"{trace.path}: {line}")


def print_json(trace: Trace, printed: dict[str, Any]) -> None:
    """Print a JSON object about a trace, with `predicted`: true if a dry run made it."""
    from ebbtide.analysis.metrics.prediction import is_predicted

    echo(json.dumps({**printed, **({"predicted": True} if is_predicted(trace) else {})}))
