"""Changes that make a job fit: each is the least one, and memory is monotone in
capacity and ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.features.advise.changes import (
    changed,
    fits,
    least_settings,
    settings_in_order,
    share_host,
)
from ebbtide.features.advise.job.memory import place
from ebbtide.features.advise.job.training_job import TunableSettings, Variant
from ebbtide.machines.machine import MAX_RANKS
from tests.features.advise.jobs import gpu_machine, sized

device_bytes = st.sampled_from([4e9, 8e9, 12e9, 16e9, 24e9, 32e9, 48e9, 80e9])
host_bytes = st.sampled_from([1e9, 4e9, 16e9, 40e9, 200e9])
micro_batches = st.sampled_from([1, 2, 4, 6])


def test_settings_in_order__begins_with_the_job_and_alters_ranks_last() -> None:
    job = sized(micro_batch=2)
    order = list(settings_in_order(job))
    assert order[0] == job.settings
    assert order[1] == replace(job.settings, offload=True)
    assert order[2] == replace(job.settings, checkpointing=True)
    assert order[4] == replace(job.settings, micro_batch=1)
    assert {one.ranks for one in order[:8]} == {1}
    assert order[8] == replace(job.settings, ranks=2)
    assert order[-1] == TunableSettings(MAX_RANKS, 1, checkpointing=True, offload=True)
    assert len(set(order)) == len(order)


@settings(max_examples=12)
@given(device=device_bytes, host=host_bytes, micro_batch=micro_batches)
def test_least_settings__no_smaller_change_fits(
    device: float, host: float, micro_batch: int
) -> None:
    """Every combination of the grid is tried, and compared by the stated order of the
    changes."""
    job = sized(micro_batch=micro_batch)
    machine = gpu_machine(gpu_memory_bytes=device, host_memory_bytes=host)

    def size_of_change(
        ranks: int, batch: int, checkpointing: bool, offload: bool
    ) -> tuple[int, int, bool, bool]:
        return ranks, -batch, checkpointing, offload

    batches = [size for size in (1, 2, 3, 4, 6) if micro_batch % size == 0]
    fitting = []
    for ranks, batch, checkpointing, offload in product(
        (1, 2, 4), batches, (False, True), (False, True)
    ):
        tried = TunableSettings(ranks, batch, checkpointing, offload)
        shared = share_host(machine, ranks)
        if fits(tried, place(job, tried, shared), shared):
            fitting.append(size_of_change(ranks, batch, checkpointing, offload))
    one = least_settings(job, machine)
    if fitting:
        assert one is not None
        assert size_of_change(
            one.ranks, one.micro_batch or 0, one.checkpointing, one.offload
        ) == min(fitting)
    else:
        assert one is None or one.ranks > 4


@settings(max_examples=12)
@given(
    device=device_bytes,
    host=host_bytes,
    micro_batch=micro_batches,
    offload=st.booleans(),
)
def test_fits__is_monotone_in_both_capacities(
    device: float, host: float, micro_batch: int, offload: bool
) -> None:
    job = sized(micro_batch=micro_batch)
    tried = replace(job.settings, offload=offload)

    def answer(device_scale: float, host_scale: float) -> bool:
        machine = gpu_machine(
            gpu_memory_bytes=device * device_scale, host_memory_bytes=host * host_scale
        )
        shared = share_host(machine, 1)
        return fits(tried, place(job, tried, shared), shared)

    if answer(1.0, 1.0):
        assert answer(1.5, 1.0)
        assert answer(1.0, 1.5)


@given(
    params=st.sampled_from([1e9, 7e9, 70e9]),
    micro_batch=micro_batches,
    ranks=st.sampled_from([1, 2, 3, 8]),
)
def test_place__more_ranks_never_need_more_memory_of_one(
    params: float, micro_batch: int, ranks: int
) -> None:
    job = sized(params, ranks, micro_batch)
    machine = gpu_machine(gpu_memory_bytes=1e13, host_memory_bytes=1e13)
    few, many = (
        place(job, replace(job.settings, ranks=number), machine)
        for number in (ranks, 2 * ranks)
    )
    assert many.workload.params <= few.workload.params
    assert few.workload.min_free_bytes is not None
    assert many.workload.min_free_bytes is not None
    assert many.workload.min_free_bytes >= few.workload.min_free_bytes


def test_place__a_smaller_micro_batch_keeps_the_batch_and_holds_gradients() -> None:
    job, machine = sized(micro_batch=4), gpu_machine()
    whole, halved = (
        place(job, replace(job.settings, micro_batch=size), machine).workload
        for size in (4, 2)
    )
    assert Variant(job, replace(job.settings, micro_batch=2)).micro_steps == 2
    # Smaller products reach a little less of the peak.
    assert whole.forward_s < halved.forward_s < 1.1 * whole.forward_s
    assert (whole.gradients_held_until_step, halved.gradients_held_until_step) == (
        False,
        True,
    )


def test_place__missing_memory_is_what_capacity_lacks() -> None:
    job = sized()
    enough = gpu_machine(gpu_memory_bytes=80e9)
    free = place(job, job.settings, enough).workload.min_free_bytes
    assert free is not None
    short = gpu_machine(gpu_memory_bytes=80e9 - free - 1e9)
    assert place(job, job.settings, short).workload.missing_bytes == pytest.approx(1e9)


def test_changed__names_what_differs() -> None:
    before = TunableSettings(2, 4, checkpointing=False, offload=False)
    assert changed(before, before, "adaptive") is None
    after = TunableSettings(4, 2, checkpointing=True, offload=True)
    change = {
        "policy": "adaptive",
        "activation_checkpointing": True,
        "micro_batch": 2,
        "ranks": 4,
    }
    assert changed(before, after, "adaptive") == change
