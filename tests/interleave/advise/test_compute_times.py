"""Times of forward and backward on a machine."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.interleave.advise.job.compute_times import (
    EFFICIENCY,
    PEAKS_FACTOR,
    SAME_GPU_FACTOR,
    UNKNOWN_GPU_FACTOR,
    RecordedCompute,
    RecordedKernels,
    checkpointed_share,
    combined_factor,
    shape_of,
)
from ebbtide.interleave.advise.job.training_job import ComputeTimes, TunableSettings
from ebbtide.machines.gpu_compute import GpuCompute
from tests.interleave.advise.jobs import gpu_machine, sized

ONE_RANK = TunableSettings(1, 1, checkpointing=False, offload=False)


def gpu(flops: float, memory: float = 2e12) -> GpuCompute:
    return GpuCompute("GPU", None, {"bfloat16": flops}, memory, 300e9)


def recorded(flops: float | None, kernels: RecordedKernels | None = None) -> RecordedCompute:
    """Return the compute of a job that took 1 s and 3 s on a GPU with a peak, or with none that is known."""
    own = None if flops is None else gpu(flops)
    return RecordedCompute(1.0, 3.0, 0.5, own, "recorded GPU", kernels, 1.0, ONE_RANK, 2.0, 1e9)


def on_gpu(compute: RecordedCompute, flops: float, settings: TunableSettings = ONE_RANK) -> ComputeTimes:
    values = {"flops_per_s": {"bfloat16": flops}, "memory_bytes_per_s": 2e12, "peer_bytes_per_s": 300e9}
    return compute.times(gpu_machine(gpu=values), settings, 1)


def test_times__of_a_size_are_six_operations_per_parameter_and_token() -> None:
    job = sized(2e9)
    times = job.compute.times(gpu_machine(), job.settings, 1)
    without_attention = 6 * 2e9 * 2048 / (300e12 * EFFICIENCY)
    assert without_attention < times.forward_s + times.backward_s < 1.2 * without_attention
    assert times.backward_s == pytest.approx(2 * times.forward_s)
    again = sized(2e9, checkpointing=True)
    assert again.compute.times(gpu_machine(), again.settings, 1).backward_s == pytest.approx(3 * times.forward_s)


def test_times__of_a_recording_are_scaled_by_peaks() -> None:
    same, twice, unknown = on_gpu(recorded(3e14), 3e14), on_gpu(recorded(3e14), 6e14), on_gpu(recorded(None), 3e14)
    assert (same.forward_s, same.backward_s, same.other_s) == (1.0, 3.0, 0.5)
    assert (twice.forward_s, twice.backward_s, unknown.forward_s) == (0.5, 1.5, 1.0)
    factors = [same.factor, twice.factor, unknown.factor]
    assert factors == pytest.approx([SAME_GPU_FACTOR, PEAKS_FACTOR, UNKNOWN_GPU_FACTOR])


def test_times__of_kernels_follow_the_roofline() -> None:
    """One kernel of 1 s of arithmetic, and one of 1 s of memory, whose rate is the same on both GPUs."""
    kernels = RecordedKernels(np.array([3e14, 1.0]), np.array([1.0, 2e12]), 2.0)
    assert on_gpu(recorded(3e14, kernels), 6e14).forward_s == pytest.approx(0.75)
    assert on_gpu(recorded(3e14, kernels), 1e12).forward_s == pytest.approx((300 + 1) / 2)


def test_times__more_ranks_exchange_parameters() -> None:
    compute = recorded(3e14)
    alone, shared = on_gpu(compute, 3e14), on_gpu(compute, 3e14, TunableSettings(4, 1, False, False))
    exchange_s = 3 * 2e9 * 3 / 4 / 300e9
    assert shared.collectives_s == pytest.approx(exchange_s)
    total = shared.forward_s + shared.backward_s
    assert 4.0 < total < 4.0 + exchange_s
    assert shared.factor > 1
    assert alone.collectives_s == 0


def test_combined_factor__adds_squares_of_logarithms() -> None:
    assert combined_factor(1.3) == pytest.approx(1.3)
    assert combined_factor(np.exp(3), np.exp(4)) == pytest.approx(np.exp(5))


@pytest.mark.parametrize(
    ("params", "layers", "hidden"), [(6.7e9, 32, 4096), (13e9, 40, 5140), (65e9, 80, 8192), (175e9, 96, 12288)]
)
def test_shape_of__guesses_published_decoders(params: float, layers: int, hidden: int) -> None:
    shape = shape_of(int(params), 2048, 50_000)
    assert shape.layers == pytest.approx(layers, rel=0.25)
    assert shape.hidden == pytest.approx(hidden, rel=0.15)
    assert shape_of(int(params), 2048, 50_000, layers, hidden).layers == layers


def test_activations__full_checkpointing_keeps_inputs_and_one_layer() -> None:
    """34 bytes per token and hidden unit of each layer, or 2 and those of one layer (Korthikanti et al. 2022)."""
    shape = shape_of(int(6.7e9), 2048, 50_000, 32, 4096)
    assert shape.kept_bytes(2048, checkpointing=False) == 2048 * 4096 * 32 * 34
    assert shape.kept_bytes(2048, checkpointing=True) == 2048 * 4096 * 32 * 2
    assert 2 / 34 < checkpointed_share(int(6.7e9)) < 0.15
