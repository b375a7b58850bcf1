"""Hypothesis strategies for machines, workloads and policies."""

from __future__ import annotations

from hypothesis import strategies as st

from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.machines.machine import Machine


def spread(low: float, high: float) -> st.SearchStrategy[float]:
    """Return a strategy for numbers that is uniform in the logarithm."""
    return st.floats(0, 1).map(lambda share: low * (high / low) ** share)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Draw a machine with all rates, from wide ranges; the duplex limit may be None."""
    return Machine(
        name="random",
        gpu_memory_bytes=80e9,
        host_memory_bytes=1e14,
        h2d_bytes_per_s=draw(spread(2e9, 100e9)),
        d2h_bytes_per_s=draw(spread(2e9, 100e9)),
        duplex_bytes_per_s=draw(st.none() | spread(3e9, 200e9)),
        h2d_pageable_bytes_per_s=draw(spread(1e9, 20e9)),
        d2h_pageable_bytes_per_s=draw(spread(1e9, 20e9)),
        host_memory_bytes_per_s=draw(spread(10e9, 500e9)),
        cpu_update_params_per_s=draw(spread(0.1e9, 20e9)),
        cpu_remainder_ratio=draw(st.sampled_from([None, 0.6, 1.3])),
        cpu_cast_params_per_s=draw(spread(1e9, 40e9)),
        gpu_update_params_per_s=draw(spread(1e9, 100e9)),
        gpu_cast_params_per_s=draw(spread(1e9, 100e9)),
        cpu_norm_params_per_s=draw(st.none() | spread(1e9, 40e9)),
        step_overhead_s=draw(st.sampled_from([0.0, 0.01, 0.2])),
        operation_s=draw(st.sampled_from([None, 0.0, 1e-4, 1e-2])),
    )


def cpu_rate(workload: Workload, machine: Machine) -> float:
    """Return the parameters updated on the CPU per second."""
    ratio = (
        machine.cpu_remainder_ratio or 28 / 26
        if workload.master == "remainder"
        else 1.0
    )
    return (machine.cpu_update_params_per_s or 0.0) * ratio


@st.composite
def subgroup_sizes(draw: st.DrawFn, max_count: int) -> tuple[int, ...]:
    """Draw the sizes of subgroups: equal except for a smaller last one, or all
    different."""
    size = round(draw(spread(1e6, 1e9)))
    count = draw(st.integers(1, max_count))
    if draw(st.booleans()):
        return tuple(max(1, round(size * draw(spread(0.1, 3.0)))) for _ in range(count))
    return (size,) * (count - 1) + (draw(st.integers(size // 4, size)),)


@st.composite
def workloads(
    draw: st.DrawFn,
    clipping: bool | None = None,
    max_subgroups: int = 16,
    free_known: bool = True,
) -> Workload:
    """Draw a workload.

    Args:
        draw: Draws from a strategy.
        clipping: Whether it clips; None for either.
        max_subgroups: Largest number of subgroups.
        free_known: Whether the free memory is known: little or plenty, always or in
            windows.
    """
    sizes = draw(subgroup_sizes(max_subgroups))
    forward, backward = (draw(st.just(0.0) | spread(0.01, 5.0)) for _ in range(2))
    other = draw(st.sampled_from([0.0, 0.1]))
    master = draw(st.sampled_from(["fp32", "fp32", "fp32", "parameter", "remainder"]))
    param_bytes, state_bytes = {"remainder": (2.0, 10.0), "parameter": (4.0, 8.0)}.get(
        master, (draw(st.sampled_from([2.0, 4.0])), draw(st.sampled_from([12.0, 8.0])))
    )
    return Workload(
        name="random",
        params=sum(sizes),
        subgroup_params=max(sizes),
        sizes=sizes,
        forward_s=forward,
        backward_s=backward,
        other_s=other,
        param_bytes=param_bytes,
        grad_bytes=draw(st.sampled_from([2.0, 4.0])),
        state_bytes=state_bytes,
        master=master,
        gpu_free=draw(_free_memory(sum(sizes) * 14, other + forward + backward))
        if free_known
        else None,
        h2d_busy_share=draw(st.sampled_from([0.0, 0.3])),
        d2h_busy_share=draw(st.sampled_from([0.0, 0.3])),
        clipping=draw(st.booleans()) if clipping is None else clipping,
        norm=draw(st.sampled_from([None, "host", "device"])),
        collective_bytes=draw(
            st.sampled_from([(), (("forward", 1e9, 1e9), ("backward", 2e10, 0.0))])
        ),
        gradients_held_until_step=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def _free_memory(
    draw: st.DrawFn, everything_bytes: float, compute_s: float
) -> FreeMemorySteps:
    """Draw steps of free memory over an iteration and beyond its end, up to 1.5 times
    the memory of everything."""
    times = sorted({0, *(draw(st.lists(st.integers(0, 40), max_size=4)))})
    return tuple(
        (
            time / 32 * compute_s,
            everything_bytes * draw(st.just(0.0) | spread(0.01, 1.5)),
        )
        for time in times
    )


def fixed_policies() -> st.SearchStrategy[str]:
    """Return a strategy for all policies except `adaptive`, with their options."""
    options = st.tuples(
        st.sampled_from(["async", "blocking"]),
        st.sampled_from(["pipelined", "blocking"]),
    )
    share = st.integers(0, 20).map(lambda twentieths: twentieths / 20)
    names = st.one_of(
        st.sampled_from(["zero-offload", "pipelined"]),
        share.map(lambda ratio: f"twin-flow:{ratio:g}"),
        st.tuples(st.integers(1, 12), share).map(
            lambda both: f"interleaved:{both[0]}@{both[1]:g}"
        ),
    )
    with_options = st.tuples(names, options).map(
        lambda both: f"{both[0]},grads={both[1][0]},params={both[1][1]}"
    )
    return with_options | st.just("gpu-only")


def policies() -> st.SearchStrategy[str]:
    """Return a strategy for all policies with their options; `adaptive` is frequent."""
    return fixed_policies() | st.just("adaptive")
