"""The published runs with asynchronous gradient copies, as traces of this
repository."""

from __future__ import annotations

from pathlib import Path

from ebbtide.profiler.trace import Trace, open_trace

TRACES = Path(__file__).parents[2] / "traces"
# The prefix of the names of each preset's runs.
PRESETS = {"h100-80gb-sxm-published": "h100-20b", "a100-40gb-published": "a100-13b"}


def runs(preset: str) -> dict[str, Trace]:
    """Return the traces that a preset is fitted to, by name."""
    traces = [
        open_trace(path)
        for path in sorted(TRACES.glob(f"{PRESETS[preset]}*.ebb"))
        if "blocking" not in path.name
    ]
    return {trace.name: trace for trace in traces}
