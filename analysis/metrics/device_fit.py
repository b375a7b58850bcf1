"""The definition of what fits on a device.

Findings, replay, recommendations and plans all use it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class MemoryNeed(NamedTuple):
    """The bytes that a plan needs in a memory, and those that it may use there."""

    memory: str  # `device`, `host` or `pinned`.
    needed_bytes: float
    free_bytes: float | None  # None: not known.

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as that is known."""
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes


def fits_beside(
    changes: Iterable[tuple[float, float]],
    free: Sequence[tuple[float, float]],
    end_s: float,
) -> bool:
    """Return whether memory stays within what is free at every instant of an iteration
    that ends at `end_s`. `changes`: (time, bytes) of memory in use. `free`: (time,
    bytes free from there on), the first at 0. Both are in the order of time."""
    return all(
        used <= _with_tolerance(free_bytes)
        for used, free_bytes in _lasting(changes, free, end_s)
    )


def tightest(
    changes: Iterable[tuple[float, float]],
    free: Sequence[tuple[float, float]],
    end_s: float,
) -> MemoryNeed:
    """Return what is in use and what is free where least is left; the arguments are
    as in `fits_beside`."""
    used, free_bytes = max(
        _lasting(changes, free, end_s),
        key=lambda pair: pair[0] - _with_tolerance(pair[1]),
        default=(0.0, free[0][1]),
    )
    if free_bytes < used <= _with_tolerance(free_bytes):
        used = free_bytes
    return MemoryNeed("device", used, free_bytes)


def _lasting(
    changes: Iterable[tuple[float, float]],
    free: Sequence[tuple[float, float]],
    end_s: float,
) -> Iterator[tuple[float, float]]:
    """Yield the bytes in use and free of each interval; those as short as rounding
    errors do not count."""
    shortest_s = 1e-9 * end_s
    begin, used, number = 0.0, 0.0, 0
    free_bytes = free[0][1]
    for time, size in (*changes, (end_s, 0.0)):
        while number < len(free) and free[number][0] <= time:
            if free[number][0] - begin > shortest_s:
                yield used, free_bytes
            begin, free_bytes = free[number]
            number += 1
        if time - begin > shortest_s:
            yield used, free_bytes
        begin = time
        used += size


def gradient_starts(
    subgroups: Sequence[int], begin_s: float, backward_s: float, accumulates: bool
) -> list[float]:
    """Return the time from which each subgroup's gradient is on the device until its
    update.

    Gradients come in reverse order in the backward, or with several micro-steps
    (`accumulates`) are there from the start."""
    if accumulates:
        return [0.0] * len(subgroups)
    total, done, starts = sum(subgroups), 0, []
    for size in reversed(subgroups):
        starts.append(begin_s + backward_s * done / total)
        done += size
    return starts[::-1]


def equal_sizes(params: int, size: int) -> tuple[int, ...]:
    """Return the sizes of subgroups of `size` parameters.

    The last may be smaller.
    """
    count, remainder = divmod(params, size)
    return (size,) * count + ((remainder,) if remainder else ())


def _with_tolerance(size: float) -> float:
    return size * (1 + 1e-9) + 1.0
