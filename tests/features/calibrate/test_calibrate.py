"""Parts of a calibration that need no GPU: arithmetic of times, kernels, copies beside
them."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.features.calibrate.cpu import (
    OnePassAdamW,
    TorchAdamW,
    copy_rate_during,
    measure_norm,
    measure_out_of_place,
    working_set,
)
from ebbtide.features.calibrate.link import combined_bytes_per_s, copy_durations
from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.features.calibrate.record import (
    MeasurementRecord,
    Setup,
    Timing,
    measure_time,
)
from ebbtide.features.calibrate.run import _slowest
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.adamw import Hyper

GIB = 2**30
CPU = torch.device("cpu")


@given(st.integers(2**20, 2**43), st.none() | st.integers(0, 2**32))
def test_working_set__is_four_times_the_caches_or_an_eighth_of_the_memory(
    memory: int, cache: int | None
) -> None:
    size = working_set(memory, cache)
    assert size <= memory // 8
    assert size == memory // 8 or size == max(
        256 << 20, 4 * cache if cache is not None else GIB
    )


def test_copy_durations__are_between_the_events() -> None:
    assert copy_durations([2.0, 4.0, 7.0]) == pytest.approx([0.002, 0.003])


@given(
    st.floats(1, 100),
    st.floats(1, 100),
    st.integers(3, 20),
    st.integers(3, 20),
    st.floats(0, 2),
    st.floats(1e-3, 1e3),
)
def test_combined_bytes_per_s__is_the_sum_of_the_rates_while_both_directions_run(
    first_ms: float,
    second_ms: float,
    first_count: int,
    second_count: int,
    delay_ms: float,
    unit: float,
) -> None:
    first = [first_ms * number for number in range(first_count + 1)]
    second = [delay_ms + second_ms * number for number in range(second_count + 1)]
    nbytes = round(1e6 * unit)
    expected = nbytes / first_ms * 1e3 + nbytes / second_ms * 1e3
    assert combined_bytes_per_s([first, second], nbytes) == pytest.approx(
        expected, rel=1e-6
    )


def test_measure_time__runs_once_unmeasured_and_at_least_three_times() -> None:
    calls: list[int] = []
    timing = measure_time(lambda: calls.append(1), 0.0, Ranks())
    assert (len(calls), timing.runs) == (4, 3)
    assert Timing.from_runs(
        [float(n) for n in (9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10)]
    ) == Timing(seconds=5.0, runs=11, spread=1.6)


def test_record__takes_the_highest_host_traffic_as_bandwidth() -> None:
    record = MeasurementRecord()
    for rate in (10.0, 30.0, 20.0):
        record.host_traffic(rate, f"at {rate}")
    assert record.rates == {"host_memory_bytes_per_s": 30.0}
    assert record.measured["host_memory_bytes_per_s"] == {"how": "at 30.0"}


def test_copy_rate_during__measures_the_rate_during_an_action() -> None:
    def copy() -> int:
        time.sleep(0.001)
        return 1000

    rate = copy_rate_during(copy, lambda: time.sleep(0.2))
    # A sleep is never shorter than its argument.
    assert 0 < rate <= 1.1e6


def test_copy_rate_during__raises_the_error_of_a_failed_copy() -> None:
    def copy() -> int:
        raise MachineError("no room")

    with pytest.raises(MachineError, match="no room"):
        copy_rate_during(copy, lambda: time.sleep(0.01))


def test_torch_adamw__updates_the_master_and_casts_gradient_and_parameter() -> None:
    step = TorchAdamW(1000, CPU)
    for _ in range(3):
        step()
    plain = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW(
        [plain], lr=1e-3, weight_decay=0.01, fused=False, foreach=False
    )
    for _ in range(3):
        plain.grad = torch.full((1000,), 1e-3, dtype=torch.bfloat16).float()
        optimizer.step()
    torch.testing.assert_close(step.master, plain.detach())
    assert torch.equal(step.half, step.master.bfloat16())
    assert [tensor.dtype for tensor in step.state] == [torch.float32] * 3


def test_one_pass_adamw__gives_the_same_result_as_torch() -> None:
    one_pass, fused = OnePassAdamW(1000, 3), TorchAdamW(1000, CPU)
    for _ in range(3):
        one_pass()
        fused()
    torch.testing.assert_close(
        one_pass.state[0], fused.master.detach(), rtol=1e-6, atol=0
    )
    assert torch.equal(one_pass.half, one_pass.state[0].bfloat16())


def test_one_pass_adamw__makes_the_next_step_out_of_place() -> None:
    update = OnePassAdamW(1000, 1)
    update()
    for _ in range(2):
        update.update_beside()
    assert update.new_state is not None
    out_of_place, half = update.new_state.clone(), update.half.clone()
    update()
    assert torch.equal(update.state, out_of_place)
    assert torch.equal(update.half, half)


def test_one_pass_adamw__updates_remainders_of_its_parameters() -> None:
    update = OnePassAdamW(1000, 1)
    gradient, half, moments = (
        update.gradient.clone(),
        update.half.clone(),
        update.state[1:].clone(),
    )
    lowest = torch.zeros(1000, dtype=torch.int16)
    kernel = CpuKernel(1)
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    for step in (1, 2):
        update.update_remainders()
        kernel.update(
            gradient,
            (lowest, *moments),
            half,
            hyper.scalars(step),
            rule=find_rule("adamw-remainder"),
        )
    kernel.close()
    assert torch.equal(update.half, half)
    assert torch.equal(update.state[1:], moments)
    assert not torch.equal(update.half, torch.ones_like(half))


def test_measure_out_of_place__compares_the_times_of_the_same_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def sleep(update: OnePassAdamW, seconds: float) -> None:
        sizes.append(len(update.half))
        time.sleep(seconds)

    monkeypatch.setattr(OnePassAdamW, "__call__", lambda update: sleep(update, 0.005))
    monkeypatch.setattr(
        OnePassAdamW, "update_beside", lambda update: sleep(update, 0.05)
    )
    record = MeasurementRecord()
    measure_out_of_place(
        Setup(
            Ranks(), threads=1, cores=1, working_set=40_000, window_s=0.0, device=None
        ),
        record,
    )
    assert set(sizes) == {2000}
    rates = record.extra["cpu_out_of_place"]["params_per_s"]
    # A sleep is never shorter than its argument.
    assert rates["out_of_place"] <= 2000 / 0.05
    assert record.rates["cpu_out_of_place_share"] == min(
        1.0, rates["out_of_place"] / rates["in_place"]
    )
    assert record.measured["cpu_out_of_place_share"]["runs"] == 3


def test_measure_norm__is_the_rate_of_the_engines_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def slow(kernel: CpuKernel, gradient: torch.Tensor) -> float:
        assert gradient.dtype == torch.bfloat16
        sizes.append(len(gradient))
        time.sleep(0.01)
        return 0.0

    monkeypatch.setattr(CpuKernel, "sum_of_squares", slow)
    record = MeasurementRecord()
    measure_norm(
        Setup(Ranks(), threads=1, cores=1, working_set=4000, window_s=0.0, device=None),
        record,
    )
    assert set(sizes) == {2000}
    # A sleep is never shorter than its argument.
    assert 0 < record.rates["cpu_norm_params_per_s"] <= 2000 / 0.01
    assert record.measured["cpu_norm_params_per_s"]["runs"] == len(sizes) - 1


def test_slowest__is_the_smallest_rate_and_the_longest_time() -> None:
    assert _slowest("cpu_norm_params_per_s", [3.0, 1.0, 2.0]) == 1.0
    assert _slowest("host_memory_bytes", [3.0, 1.0, 2.0]) == 1.0
    assert _slowest("operation_s", [3.0, 1.0, 2.0]) == 3.0
    assert _slowest("step_overhead_s", [3.0, 1.0, 2.0]) == 3.0
