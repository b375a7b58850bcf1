"""The definition of what fits on a device.

Findings, replay, recommendations and plans all use it.
"""

from collections.abc import Iterable, Sequence


def fits_beside(
    changes: Iterable[tuple[float, float]],
    free: Sequence[tuple[float, float]],
    end_s: float,
) -> bool:
    """Return whether memory always stays within what is free in an iteration.

    It must at every instant; the iteration ends at `end_s`. `changes`: (time, bytes) of
    memory in use. `free`: (time, bytes free from there on), the first at 0. Both are in
    the order of time.
    """
    # Intervals as short as rounding errors do not count.
    shortest_s = 1e-9 * end_s
    begin, used, number = 0.0, 0.0, 0
    free_bytes = free[0][1]
    for time, size in (*changes, (end_s, 0.0)):
        while number < len(free) and free[number][0] <= time:
            if (
                used > _with_tolerance(free_bytes)
                and free[number][0] - begin > shortest_s
            ):
                return False
            begin, free_bytes = free[number]
            number += 1
        if used > _with_tolerance(free_bytes) and time - begin > shortest_s:
            return False
        begin = time
        used += size
    return True


def gradient_starts(
    subgroups: Sequence[int], begin_s: float, backward_s: float, accumulates: bool
) -> list[float]:
    """Return from when on each subgroup's gradient is on the device.

    It stays there until its update. Gradients come in reverse order of the backward, or
    with several micro-steps (`accumulates`) from the start.
    """
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
