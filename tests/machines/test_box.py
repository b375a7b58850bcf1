"""Tests of `box`: its validation, and the rates of ranks that share it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.machines.machine import Box, Machine, machine_from

# A rank alone updates 2.5 G parameters/s, two together 4, and more ranks no more than
# that.
SHARED = Machine(
    name="shared",
    host_memory_bytes=100e9,
    pinned_memory_bytes=40e9,
    host_memory_bytes_per_s=60e9,
    cpu_update_params_per_s=2e9,
    cpu_cast_params_per_s=8e9,
    h2d_bytes_per_s=25e9,
    box=Box(
        2,
        4e9,
        120e9,
        one_rank_cpu_update_params_per_s=2.5e9,
        one_rank_host_memory_bytes_per_s=90e9,
    ),
)
totals = st.none() | st.floats(1e6, 1e13)
boxes = st.builds(Box, st.integers(1, 64), totals, totals, totals, totals, totals)


def test_ring_bytes_per_s__of_several_boxes_is_that_of_their_links() -> None:
    """PCIe of 25 GB/s between GPUs without a rate of their own."""
    box = replace(SHARED.box or Box(2), network_bytes_per_s=12.5e9)
    machine = replace(SHARED, box=box)
    assert [machine.ring_bytes_per_s(ranks) for ranks in (2, 3)] == [25e9, 12.5e9]
    # Links that are faster than those between GPUs, and links that are not known.
    fast = replace(machine, box=replace(box, network_bytes_per_s=100e9))
    assert fast.ring_bytes_per_s(4) == SHARED.ring_bytes_per_s(4) == 25e9
    # With one rank on each host, two are two boxes.
    assert machine.for_ranks(1).ring_bytes_per_s(2) == 12.5e9


@pytest.mark.parametrize(
    ("ranks", "update", "memory"),
    [(1, 2.5e9, 90e9), (2, 2e9, 60e9), (3, 4e9 / 3, 40e9), (4, 1e9, 30e9)],
)
def test_for_ranks__takes_the_smaller_of_the_own_rate_and_the_part_of_the_total(
    ranks: int, update: float, memory: float
) -> None:
    rank = SHARED.for_ranks(ranks)
    assert (rank.cpu_update_params_per_s, rank.host_memory_bytes_per_s) == (
        update,
        memory,
    )
    # The memory of the host is divided, and each rank has a GPU of its own.
    assert (rank.host_memory_bytes, rank.pinned_memory_bytes) == (
        200e9 / ranks,
        80e9 / ranks,
    )
    assert (
        replace(
            rank,
            box=SHARED.box,
            cpu_update_params_per_s=SHARED.cpu_update_params_per_s,
            host_memory_bytes_per_s=SHARED.host_memory_bytes_per_s,
            host_memory_bytes=SHARED.host_memory_bytes,
            pinned_memory_bytes=SHARED.pinned_memory_bytes,
        )
        == SHARED
    )
    assert rank.box is not None
    assert rank.box.ranks == ranks


def test_for_ranks__own_rates_above_the_part_of_the_total_are_limited_by_it() -> None:
    """A file may have the rates of a rank alone at its top level."""
    box = Box(2, cpu_update_params_per_s=1.86e9, host_memory_bytes_per_s=80e9)
    machine = Machine(
        cpu_update_params_per_s=1.42e9, host_memory_bytes_per_s=60e9, box=box
    )
    rates = [machine.for_ranks(ranks).cpu_update_params_per_s for ranks in (1, 2, 4)]
    assert rates == [1.42e9, 0.93e9, 0.465e9]


def test_for_ranks__of_a_scaled_machine_equals_that_of_the_machine() -> None:
    for first in [1, 2, 3, 8]:
        for second in [1, 2, 5]:
            direct, twice = (
                SHARED.for_ranks(second),
                SHARED.for_ranks(first).for_ranks(second),
            )
            for key in (
                "cpu_update_params_per_s",
                "host_memory_bytes_per_s",
                "host_memory_bytes",
            ):
                assert getattr(twice, key) == pytest.approx(
                    getattr(direct, key), rel=1e-12
                ), key


def test_for_ranks__without_a_box_only_one_rank_is_known() -> None:
    machine = replace(SHARED, box=None)
    assert machine.for_ranks(1) is machine
    with pytest.raises(
        MachineError,
        match=r"shared has no box.* 3 ranks .*`ebbtide calibrate --ranks 3`",
    ):
        machine.for_ranks(3)


def test_for_ranks__unknown_totals_and_rates_limit_nothing() -> None:
    machine = Machine(cpu_update_params_per_s=1e9, box=Box(2))
    rank = machine.for_ranks(4)
    assert (
        rank.cpu_update_params_per_s,
        rank.host_memory_bytes_per_s,
        rank.host_memory_bytes,
    ) == (1e9, None, None)


@given(boxes)
def test_machine_from__reads_the_box_that_as_json_wrote(box: Box) -> None:
    machine = replace(SHARED, box=box)
    assert machine_from(json.loads(json.dumps(machine.as_json())), "file") == machine


def test_machine_from__accepts_an_integral_float_as_ranks() -> None:
    assert machine_from({"box": {"ranks": 4.0}}, "m.json").box == Box(4)
    assert machine_from({"box": None}, "m.json").box is None


IMPOSSIBLE = [
    (4, "box is 4; it must be an object with ranks"),
    ([4], "box is [4]; it must be an object"),
    ({}, "box has no ranks"),
    ({"cpu_update_params_per_s": 1e9}, "box has no ranks"),
    *(
        ({"ranks": ranks}, "box: ranks is ")
        for ranks in (0, -1, 2.5, True, "two", 10**6, [], 1e300)
    ),
    *(
        ({"ranks": 2, key: value}, f"box: {key} is ")
        for key in (
            "cpu_update_params_per_s",
            "host_memory_bytes_per_s",
            "one_rank_cpu_update_params_per_s",
        )
        for value in (0, -1, 50, "fast", 1e20, [], {})
    ),
]


def test_machine_from__refuses_an_impossible_box_in_one_line() -> None:
    for box, message in IMPOSSIBLE:
        with pytest.raises(MachineError) as error:
            machine_from({"box": box}, "m.json")
        assert str(error.value).startswith("m.json: ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)
