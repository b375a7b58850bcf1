"""Reads `timing_s/PART` of verl and of programs that print as it does.

Each step becomes an iteration and each part a mark, one after the other: the log has
lengths, but not when a part began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.logs.text_log import (
    first_log_lines,
    only_log,
    read_lines,
)
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder

_TIMING = re.compile(
    r"timing_s/([\w.\-]{1,60})['\"]?\s?[:=]\s?(?:np\.float\d\d\()?"
    r"(\d{1,9}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)"
)
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
_MAX_S = 1e7


@dataclass(frozen=True)
class _Step:
    length_s: float
    parts: tuple[tuple[str, float], ...]

    @property
    def sum_s(self) -> float:
        return sum(length_s for _, length_s in self.parts)


class TimingsImporter:
    """Imports a log with `timing_s/step` and the times of parts in its lines."""

    format = "timings"
    recognition, stage = Recognition.LOG_LINES, Stage.JOB

    def matches(self, source: Source) -> bool:
        return any(_step(line) is not None for line in first_log_lines(source))

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        source = only_log(sources, "timing_s")
        steps = list(_steps(source))
        if not steps:
            raise SourceError(f"{source.path} has no line with timing_s/step")
        rank = builder.rank(0)
        at_ns, too_long = 0, 0
        for number, step in enumerate(steps):
            end_ns = at_ns + round(step.length_s * 1e9)
            rank.add("iteration_marks", iteration=number, start_ns=at_ns, end_ns=end_ns)
            rank.add("marks", name=_WHOLE, start_ns=at_ns, end_ns=end_ns)
            too_long += step.sum_s > _MAX_SUM * step.length_s
            scale = min(1.0, step.length_s / step.sum_s) if step.sum_s else 1.0
            for name, length_s in step.parts:
                part_ns = round(length_s * scale * 1e9)
                part_end_ns = min(at_ns + part_ns, end_ns)
                rank.add("marks", name=name, start_ns=at_ns, end_ns=part_end_ns)
                at_ns = part_end_ns
            at_ns = end_ns
        builder.note(
            "the log has lengths alone: parts follow each other from the start of a "
            "step on"
        )
        if too_long:
            builder.note(
                f"in {too_long} steps the parts take longer than the step, so some "
                "contain others: all were shortened alike"
            )
        return [source]


def _steps(source: Source) -> Iterator[_Step]:
    for line in read_lines(source):
        step = _step(line.text)
        if step is not None:
            yield step


def _step(text: str) -> _Step | None:
    """Return the step of a line; None where it has no time of a whole step."""
    if "timing_s/" not in text:
        return None
    times = {name: float(length) for name, length in _TIMING.findall(text)}
    length_s = times.pop(_WHOLE, 0.0)
    if not 0 < length_s < _MAX_S:
        return None
    names = [name for name in _ORDER if name in times]
    names += [name for name in times if name not in {*_ORDER, *_WITHIN}]
    return _Step(length_s, tuple((name, times[name]) for name in names if times[name]))
