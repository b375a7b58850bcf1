"""The parts of a step of a log as marks: `timing_s/PART` of verl, and the like."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from ebbtide.features.explain import formats
from ebbtide.profiler.trace.builder import RankBuilder

_NS = 1e9
_WHOLE = "step"
# In the order in which verl runs them (0.5, trainer/ppo/ray_trainer.py); others follow
# in the order of the line.
_ORDER = (
    "gen",
    "gen_max",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "testing",
    "save_checkpoint",
)
# Times inside of `gen`.
_WITHIN = frozenset({"generate_sequences", "reshard"})
# A sum of parts above this many steps has parts within parts.
_MAX_SUM = 1.02


def add_parts(entry: RankBuilder, steps: pd.DataFrame) -> int:
    """Add a mark for each step and each of its parts, one after the other.

    `steps` has the columns of parts, `start_ns` and `end_ns`. Return the number of
    steps whose parts take longer than the step: they are shortened alike."""
    columns = _columns(steps)
    too_long = 0
    for step in steps.to_dict("records"):
        start_ns, end_ns = int(step["start_ns"]), int(step["end_ns"])
        lengths = {name: step[column] * _NS for name, column in columns.items()}
        lengths = {name: length for name, length in lengths.items() if length > 0}
        total = sum(lengths.values())
        too_long += total > _MAX_SUM * (end_ns - start_ns)
        scale = min(1.0, (end_ns - start_ns) / total) if total else 1.0
        entry.add("marks", name=_WHOLE, start_ns=start_ns, end_ns=end_ns)
        for name, length in lengths.items():
            part_end_ns = min(start_ns + round(length * scale), end_ns)
            entry.add("marks", name=name, start_ns=start_ns, end_ns=part_end_ns)
            start_ns = part_end_ns
    return too_long


def _columns(steps: pd.DataFrame) -> dict[str, str]:
    """Return the column of each part, in the order of the program."""
    columns = dict(_parts(steps))
    first = {name: columns[name] for name in _ORDER if name in columns}
    return first | columns


def _parts(steps: pd.DataFrame) -> Iterator[tuple[str, str]]:
    for column in steps:
        name = str(column).removeprefix(formats.PART)
        if name != column and name not in _WITHIN:
            yield name, str(column)
