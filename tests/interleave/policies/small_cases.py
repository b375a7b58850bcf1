"""Random machines and workloads with few subgroups, by kind. The same kind and seed
give the same case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.machines.machine import Machine

KINDS = (
    "even clipped",
    "uneven clipped",
    "one large, clipped",
    "even not clipped",
    "uneven not clipped",
    "windows clipped",
    "windows not clipped",
)
# (position in the phase, share of the largest free memory): activations fill the memory
# in the forward and are freed in the backward.
_FORWARD_STEPS = ((0.0, 1.0), (0.1, 0.7), (0.5, 0.4), (1.0, 0.2))
_BACKWARD_STEPS = ((0.5, 0.5), (0.8, 0.8), (1.0, 1.0))


def small_case(kind: str, seed: int) -> tuple[Workload, Machine]:
    """Return a workload of 4 to 7 subgroups and a machine.

    Args:
        kind: One of `KINDS`.
        seed: Seed of the random choices.
    """
    draw = np.random.default_rng([KINDS.index(kind), seed])

    def spread(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    machine = _machine(draw, spread)
    count = int(draw.integers(4, 8))
    shares = _shares(kind, count, draw, spread)
    params = spread(0.3e9, 4e9)
    sizes = tuple(int(share * params / sum(shares)) for share in shares)
    forward_s = spread(0.05, 1)
    backward_s, other_s = forward_s * draw.uniform(2, 3), float(draw.choice([0, 0.05]))
    everything = 14 * sum(sizes)
    if kind.startswith("windows"):
        top = max(everything * spread(0.2, 1.5), 12 * max(sizes))
        free: FreeMemorySteps = (
            (0.0, top),
            *(
                (other_s + forward_s * position, top * share)
                for position, share in _FORWARD_STEPS
            ),
            *(
                (other_s + forward_s + backward_s * position, top * share)
                for position, share in _BACKWARD_STEPS
            ),
        )
    else:
        free = ((0.0, max(everything * spread(0.1, 1.1), 12 * min(sizes))),)
    workload = Workload(
        name=f"{kind}, seed {seed}",
        params=sum(sizes),
        subgroup_params=max(sizes),
        sizes=sizes,
        forward_s=forward_s,
        backward_s=backward_s,
        other_s=other_s,
        gpu_free=free,
        clipping="not" not in kind,
        h2d_busy_share=float(draw.choice([0, 0.2])),
    )
    return workload, machine


def _machine(
    draw: np.random.Generator, spread: Callable[[float, float], float]
) -> Machine:
    link = spread(10e9, 60e9)
    return Machine(
        name="random",
        gpu_memory_bytes=80e9,
        host_memory_bytes=1e13,
        h2d_bytes_per_s=link * spread(0.8, 1.2),
        d2h_bytes_per_s=link * spread(0.8, 1.2),
        duplex_bytes_per_s=link * draw.uniform(1.2, 2) if draw.random() < 0.5 else None,
        h2d_pageable_bytes_per_s=5e9,
        d2h_pageable_bytes_per_s=5e9,
        host_memory_bytes_per_s=spread(25e9, 200e9),
        cpu_update_params_per_s=spread(0.3e9, 5e9),
        cpu_cast_params_per_s=5e9,
        gpu_update_params_per_s=spread(5e9, 80e9),
        step_overhead_s=float(draw.choice([0, 0.02, 0.07])),
    )


def _shares(
    kind: str,
    count: int,
    draw: np.random.Generator,
    spread: Callable[[float, float], float],
) -> list[float]:
    """Return the relative sizes of the subgroups."""
    shares = [1.0] * count
    if kind.startswith("one large"):
        # An embedding is mostly at one of the ends.
        shares[int(draw.choice([0, count - 1, int(draw.integers(count))]))] = (
            draw.uniform(2, 6)
        )
    elif kind.startswith("uneven") or (
        kind.startswith("windows") and draw.random() >= 0.5
    ):
        shares = [spread(0.3, 3) for _ in shares]
    return shares
