"""The definition of what fits on a device: findings, replay, recommendations and plans all use it."""

from collections.abc import Iterable, Sequence

from ebbtide.state_bytes import MASTER_BYTES


def fits_beside(changes: Iterable[tuple[float, float]], free: Sequence[tuple[float, float]], end_s: float) -> bool:
    """Return whether memory stays within what is free at every instant of an iteration that ends at `end_s`. `changes`:
    (time, bytes) of memory in use. `free`: (time, bytes free from there on), the first at 0. Both are in the order of
    time."""
    # Intervals as short as rounding errors do not count.
    shortest_s = 1e-9 * end_s
    begin, used, number = 0.0, 0.0, 0
    free_bytes = free[0][1]
    for time, size in (*changes, (end_s, 0.0)):
        while number < len(free) and free[number][0] <= time:
            if used > _with_tolerance(free_bytes) and free[number][0] - begin > shortest_s:
                return False
            begin, free_bytes = free[number]
            number += 1
        if used > _with_tolerance(free_bytes) and time - begin > shortest_s:
            return False
        begin = time
        used += size
    return True


def gradient_starts(subgroups: Sequence[int], begin_s: float, backward_s: float, accumulates: bool) -> list[float]:
    """Return from when on the gradient of each subgroup is on the device, if it stays there until its update: in
    reverse order of the backward, or with several micro-steps (`accumulates`) from the start."""
    if accumulates:
        return [0.0] * len(subgroups)
    total, done, starts = sum(subgroups), 0, []
    for size in reversed(subgroups):
        starts.append(begin_s + backward_s * done / total)
        done += size
    return starts[::-1]


def deepspeed_gradient_bytes(resident: Sequence[int], grad_bytes: float, offloads: bool) -> float:
    """Return the bytes of gradients that DeepSpeed's ZeRO-3 keeps on the device for resident subgroups, all the time.

    With `offload_optimizer` each has one in fp32. Without, all have a buffer of `grad_bytes` a parameter, and at the
    step that of one subgroup is made flat and fp32 (runtime/zero/stage3.py, `initialize_optimizer_states` and
    `_prepare_fp32_grad_for_sub_group`; the same in all versions with Twin-Flow that were read, 0.12.4 to 0.19.8)."""
    if offloads:
        return float(MASTER_BYTES * sum(resident))
    return grad_bytes * sum(resident) + (grad_bytes + MASTER_BYTES) * max(resident, default=0)


def equal_sizes(params: int, size: int) -> tuple[int, ...]:
    """Return the sizes of subgroups of `size` parameters, of which the last may be smaller."""
    count, remainder = divmod(params, size)
    return (size,) * count + ((remainder,) if remainder else ())


def _with_tolerance(size: float) -> float:
    return size * (1 + 1e-9) + 1.0
