"""The times of cycles and of their parts, as marks or repetition give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ebbtide.profiler.trace import Trace

# Time of a cycle in no part.
OTHER = "other"
# A shorter rest of a cycle belongs to nobody.
_MIN_REST_SHARE = 0.002


@dataclass(frozen=True)
class NamedTime:
    """A named interval, ns, on the clock of the device where it has one."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class CycleSpan:
    """One cycle: its interval, and its parts in order of time without overlaps.

    `rest`: name of the time in none.
    """

    start_ns: int
    end_ns: int
    parts: tuple[NamedTime, ...]
    rest: str = OTHER

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    def with_rests(self) -> Iterator[NamedTime]:
        """Yield the parts, and between them the time in none."""
        reached = self.start_ns
        least_ns = _MIN_REST_SHARE * self.length_ns
        for part in (*self.parts, NamedTime("", self.end_ns, self.end_ns)):
            if part.start_ns - reached > least_ns:
                yield NamedTime(self.rest, reached, part.start_ns)
            if part.name:
                yield part
            reached = max(reached, part.end_ns)


@dataclass(frozen=True)
class CycleSpans:
    """The cycles of a rank.

    Attributes:
        source: How they are known: `marks` of ebbtide.step, `ranges` that the job names
            for its profiler, or `repetition`.
        spans: The whole cycles, in order of time.
        trace: The trace on the clock of the spans.
    """

    source: str
    spans: tuple[CycleSpan, ...]
    trace: Trace

    @property
    def steady(self) -> tuple[CycleSpan, ...]:
        """The cycles without the first, which warms up, where enough are left."""
        return self.spans[1:] if len(self.spans) >= _MIN_FOR_WARMUP else self.spans

    def renamed(self, names: Mapping[str, str]) -> CycleSpans:
        """Return the cycles with other names of some parts, or of the rest."""
        spans = []
        for cycle in self.spans:
            parts = [
                replace(part, name=names.get(part.name, part.name))
                for part in cycle.parts
            ]
            rest = names.get(cycle.rest, cycle.rest)
            spans.append(replace(cycle, parts=tuple(parts), rest=rest))
        return replace(self, spans=tuple(spans))


_MIN_FOR_WARMUP = 3


def outermost(ranges: Sequence[NamedTime]) -> list[NamedTime]:
    """Return the ranges that no other one contains, in order of time."""
    kept: list[NamedTime] = []
    # Of ranges that begin together the longest contains the others, except for one
    # without a length, which was over before.
    by_start = sorted(
        ranges, key=lambda one: (one.start_ns, one.length_ns > 0, -one.end_ns)
    )
    for one in by_start:
        if not kept or one.start_ns >= kept[-1].end_ns:
            kept.append(one)
    return kept


def within(ranges: Sequence[NamedTime], start_ns: int, end_ns: int) -> list[NamedTime]:
    """Return the ranges inside of an interval."""
    return [one for one in ranges if start_ns <= one.start_ns and one.end_ns <= end_ns]
