"""Random machines, workloads and policies."""

from __future__ import annotations

from hypothesis import strategies as st

from ebbtide.interleave.model.workload import FreeLine, Workload
from ebbtide.machines.machine import Machine


def spread(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers evenly in the logarithm."""
    return st.floats(0, 1).map(lambda share: low * (high / low) ** share)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """All rates known, and far apart; the duplex limit may be none."""
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
        cpu_cast_params_per_s=draw(spread(1e9, 40e9)),
        gpu_update_params_per_s=draw(spread(1e9, 100e9)),
        step_overhead_s=draw(st.sampled_from([0.0, 0.01, 0.2])),
    )


@st.composite
def subgroup_sizes(draw: st.DrawFn, most: int) -> tuple[int, ...]:
    """Parameters of each subgroup: all alike but the last, which may be smaller, or all different."""
    size = round(draw(spread(1e6, 1e9)))
    count = draw(st.integers(1, most))
    if draw(st.booleans()):
        return tuple(max(1, round(size * draw(spread(0.1, 3.0)))) for _ in range(count))
    return (size,) * (count - 1) + (draw(st.integers(size // 4, size)),)


@st.composite
def workloads(draw: st.DrawFn, clipping: bool | None = None, most: int = 16, known: bool = True) -> Workload:
    """known: it is known what device memory is free, some of it or plenty, always or in windows."""
    sizes = draw(subgroup_sizes(most))
    forward, backward = (draw(st.just(0.0) | spread(0.01, 5.0)) for _ in range(2))
    other = draw(st.sampled_from([0.0, 0.1]))
    return Workload(
        name="random",
        params=sum(sizes),
        subgroup_params=max(sizes),
        sizes=sizes,
        forward_s=forward,
        backward_s=backward,
        other_s=other,
        param_bytes=draw(st.sampled_from([2.0, 4.0])),
        grad_bytes=draw(st.sampled_from([2.0, 4.0])),
        state_bytes=draw(st.sampled_from([12.0, 8.0])),
        gpu_free=draw(_free_lines(sum(sizes) * 14, other + forward + backward)) if known else None,
        h2d_busy_share=draw(st.sampled_from([0.0, 0.3])),
        d2h_busy_share=draw(st.sampled_from([0.0, 0.3])),
        clipping=draw(st.booleans()) if clipping is None else clipping,
        gradients_stay=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def _free_lines(draw: st.DrawFn, whole: float, length: float) -> FreeLine:
    """Steps over an iteration, and beyond its end, up to somewhat more than everything."""
    times = sorted({0, *(draw(st.lists(st.integers(0, 40), max_size=4)))})
    return tuple((at / 32 * length, whole * draw(st.just(0.0) | spread(0.01, 1.5))) for at in times)


def fixed_policies() -> st.SearchStrategy[str]:
    """All policies with their knobs but `adaptive`."""
    knobs = st.tuples(st.sampled_from(["async", "blocking"]), st.sampled_from(["pipelined", "blocking"]))
    share = st.integers(0, 20).map(lambda twentieths: twentieths / 20)
    names = st.one_of(
        st.sampled_from(["zero-offload", "pipelined"]),
        share.map(lambda ratio: f"twin-flow:{ratio:g}"),
        st.tuples(st.integers(1, 12), share).map(lambda both: f"interleaved:{both[0]}@{both[1]:g}"),
    )
    knobbed = st.tuples(names, knobs).map(lambda both: f"{both[0]},grads={both[1][0]},params={both[1][1]}")
    return knobbed | st.just("gpu-only")


def policies() -> st.SearchStrategy[str]:
    """All policies with their knobs; `adaptive` often."""
    return fixed_policies() | st.just("adaptive")
