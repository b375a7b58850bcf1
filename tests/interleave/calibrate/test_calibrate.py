"""The parts of a calibration that need no card: arithmetic of times, kernels, ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate.adamw import OnePassAdamW, TorchAdamW
from ebbtide.interleave.calibrate.cpu import Copier
from ebbtide.interleave.calibrate.host_memory import working_set
from ebbtide.interleave.calibrate.link import copy_seconds, together_bytes_per_s
from ebbtide.interleave.calibrate.ranks import Ranks, ranks_of
from ebbtide.interleave.calibrate.record import Record
from ebbtide.interleave.calibrate.timing import Timed, timed

GIB = 2**30
CPU = torch.device("cpu")


@given(st.integers(2**20, 2**43), st.none() | st.integers(0, 2**32))
def test_a_working_set_dwarfs_the_caches_or_takes_an_eighth_of_the_memory(memory: int, cache: int | None) -> None:
    size = working_set(memory, cache)
    assert size <= memory // 8
    assert size == memory // 8 or size == max(256 << 20, 4 * cache if cache is not None else GIB)


def test_the_length_of_copies_is_between_their_marks() -> None:
    assert copy_seconds([2.0, 4.0, 7.0]) == pytest.approx([0.002, 0.003])


@given(
    st.floats(1, 100), st.floats(1, 100), st.integers(3, 20), st.integers(3, 20), st.floats(0, 2), st.floats(1e-3, 1e3)
)
def test_both_ways_together_give_the_sum_of_their_rates_while_both_run(
    one_ms: float, other_ms: float, count: int, others: int, late: float, unit: float
) -> None:
    first = [one_ms * number for number in range(count + 1)]
    second = [late + other_ms * number for number in range(others + 1)]
    nbytes = round(1e6 * unit)
    expected = nbytes / one_ms * 1e3 + nbytes / other_ms * 1e3
    assert together_bytes_per_s([first, second], nbytes) == pytest.approx(expected, rel=1e-6)


def test_a_run_is_repeated_three_times_at_least_and_once_before() -> None:
    calls: list[int] = []
    found = timed(lambda: calls.append(1), 0.0, Ranks())
    assert (len(calls), found.runs) == (4, 3)
    assert Timed.of([float(n) for n in (9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10)]) == Timed(seconds=5.0, runs=11, spread=1.6)


def test_host_memory_gives_the_most_that_was_seen_to_pass() -> None:
    record = Record()
    for rate in (10.0, 30.0, 20.0):
        record.host_traffic(rate, f"at {rate}")
    assert record.rates == {"host_memory_bytes_per_s": 30.0}
    assert record.measured["host_memory_bytes_per_s"] == {"how": "at 30.0"}


def test_a_copier_counts_what_passes_while_something_is_done() -> None:
    def copy() -> int:
        time.sleep(0.001)
        return 1000

    with Copier(copy) as copier:
        rate = copier.rate_over(lambda: time.sleep(0.2))
    # A sleep is never shorter than asked for.
    assert 0 < rate <= 1.1e6


def test_a_copy_that_fails_is_not_taken_for_none() -> None:
    def copy() -> int:
        raise MachineError("no room")

    with Copier(copy) as copier, pytest.raises(MachineError, match="no room"):
        copier.rate_over(lambda: time.sleep(0.01))


def test_torchs_kernel_is_adamw_on_the_master_with_half_precision_around() -> None:
    step = TorchAdamW(1000, CPU)
    for _ in range(3):
        step()
    plain = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.01, fused=False, foreach=False)
    for _ in range(3):
        plain.grad = torch.full((1000,), 1e-3, dtype=torch.bfloat16).float()
        optimizer.step()
    torch.testing.assert_close(step.master, plain.detach())
    assert torch.equal(step.half, step.master.bfloat16())
    assert [tensor.dtype for tensor in step.state] == [torch.float32] * 3


def test_the_one_pass_kernel_does_the_same() -> None:
    one, other = OnePassAdamW(1000, 3), TorchAdamW(1000, CPU)
    for _ in range(3):
        one()
        other()
    torch.testing.assert_close(one.master, other.master.detach(), rtol=1e-6, atol=0)
    assert torch.equal(one.half, one.master.bfloat16())


def meet(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.wait()
    ranks.gather({"rate": float(ranks.rank)})


def stumble(ranks: Ranks) -> None:
    ranks.wait()
    raise MachineError("the GPU has no room")


def die(ranks: Ranks) -> None:
    ranks.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_wait_for_each_other_and_tell_what_they_found() -> None:
    with ranks_of(2, meet) as ranks:
        for _ in range(3):
            ranks.wait()
        assert ranks.gather({"rate": 0.0}) == [{"rate": 0.0}, {"rate": 1.0}]
        helpers = ranks.helpers
    assert not any(helper.is_alive() for helper in helpers)


@pytest.mark.parametrize(
    ("work", "said"), [(stumble, "rank 1: the GPU has no room"), (die, "one of 2 ranks was killed")]
)
def test_a_rank_that_fails_ends_the_others_wait(work: object, said: str) -> None:
    with ranks_of(2, work) as ranks:  # type: ignore[arg-type]
        ranks.wait()
        with pytest.raises(MachineError, match=said):
            ranks.wait()


def test_one_rank_waits_for_nobody() -> None:
    with ranks_of(None, meet) as ranks:
        ranks.wait()
        assert ranks.gather({"rate": 1.0}) == [{"rate": 1.0}]
        assert (ranks.count, ranks.local_count, ranks.helpers) == (1, 1, [])
