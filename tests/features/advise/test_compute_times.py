"""Times of forward and backward on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ebbtide.errors import WorkloadError
from ebbtide.features.advise.job.compute_times import (
    PEAKS_FACTOR,
    SAME_GPU_FACTOR,
    UNKNOWN_GPU_FACTOR,
    RecordedCompute,
    RecordedKernels,
    combined_factor,
)
from ebbtide.features.advise.job.decoder import (
    RUNTIMES,
    Implementation,
    LayerParts,
    Parallelism,
    checkpointed_share,
    shape_of,
)
from ebbtide.features.advise.job.sources import BatchSettings, job_of_size
from ebbtide.features.advise.job.training_job import ComputeTimes, TunableSettings
from ebbtide.machines.catalog import preset
from ebbtide.machines.kernels.efficiency import (
    DEVIATIONS_OF_RANGE,
    FLASH_2,
    FLASH_3,
    PRODUCT,
    CardClass,
    kernel_share,
)
from ebbtide.machines.kernels.time_priors import (
    COLLECTIVE_EFFICIENCY,
    PYTHON_OPERATION_NS,
)
from ebbtide.machines.machine import GpuCompute
from tests.features.advise.jobs import gpu_machine

ONE_RANK = TunableSettings(1, 1, checkpointing=False, offload=False)


def gpu(flops: float, memory: float = 2e12) -> GpuCompute:
    return GpuCompute("GPU", None, {"bfloat16": flops}, memory, 300e9)


def recorded(
    flops: float | None, kernels: RecordedKernels | None = None
) -> RecordedCompute:
    """Return the compute of a job that took 1 s and 3 s on a GPU with a peak, or with
    none that is known."""
    own = None if flops is None else gpu(flops)
    return RecordedCompute(
        1.0, 3.0, 0.5, own, "recorded GPU", kernels, 1.0, ONE_RANK, 2.0, 1e9
    )


def on_gpu(
    compute: RecordedCompute, flops: float, settings: TunableSettings = ONE_RANK
) -> ComputeTimes:
    values = {
        "flops_per_s": {"bfloat16": flops},
        "memory_bytes_per_s": 2e12,
        "peer_bytes_per_s": 300e9,
    }
    return compute.times(gpu_machine(gpu=values), settings, 1)


def times_of_size(
    params: float, implementation: Implementation, **settings: Any
) -> ComputeTimes:
    """Return the times of a decoder of this size on an H100: one sequence of 2,048
    tokens unless others are given."""
    machine = preset(settings.pop("machine", "h100-80gb"))
    checkpointing = settings.pop("checkpointing", False)
    shape = shape_of(int(params), settings.get("sequence", 2048), 50_304)
    job = job_of_size(shape, BatchSettings(**settings), checkpointing, implementation)
    return job.compute.times(machine, job.settings, job.micro_steps)


FUSED = Implementation("fused", FLASH_3)


def test_times__of_a_size_follow_its_operations_and_the_shares_of_the_peak() -> None:
    """Six operations per weight and token at the share of large products, and
    attention; recomputation is a forward."""
    shape, tokens = shape_of(int(30e9), 2048, 50_304), 8 * 2048
    times = times_of_size(30e9, FUSED, micro_batch=8)
    least_s = 3 * shape.forward_flops(tokens) / 989.5e12
    share = kernel_share(PRODUCT, "NVIDIA H100 80GB HBM3", CardClass.HOPPER).median
    assert least_s / share < times.forward_s + times.backward_s < 1.25 * least_s / share
    again = times_of_size(30e9, FUSED, micro_batch=8, checkpointing=True)
    assert again.backward_s == pytest.approx(times.forward_s + times.backward_s)


def test_times__small_products_and_short_jobs_reach_less_of_the_peak() -> None:
    """The time per operation falls with the tokens of a micro-batch, and with the
    width."""

    def per_flop(params: float, micro_batch: int) -> float:
        flops = shape_of(int(params), 2048, 50_304).forward_flops(2048 * micro_batch)
        return times_of_size(params, FUSED, micro_batch=micro_batch).forward_s / flops

    assert per_flop(7e9, 1) > 1.05 * per_flop(7e9, 8)
    assert per_flop(0.3e9, 8) > 1.2 * per_flop(7e9, 8)


def test_times__depend_on_the_implementation_and_span_all_where_it_is_not_stated() -> (
    None
):
    """FlashAttention 3 is faster than 2, which is faster than scores in memory; eager
    kernels are slower."""

    def seconds(implementation: Implementation) -> tuple[float, float, float]:
        times = times_of_size(8e9, implementation, sequence=16_384)
        total, side = (
            times.forward_s + times.backward_s,
            times.factor**DEVIATIONS_OF_RANGE,
        )
        return total / side, total, total * side

    kinds = [Implementation("fused", kind) for kind in (FLASH_3, FLASH_2, "math")]
    likely = [seconds(kind)[1] for kind in kinds]
    assert likely == sorted(likely)
    assert seconds(Implementation("eager", FLASH_2))[1] > likely[1]
    low, _, high = seconds(Implementation())
    assert low < seconds(kinds[0])[1]
    assert high > seconds(Implementation("eager", FLASH_2))[1]


def test_times__small_models_wait_for_launches() -> None:
    """One sequence of 16 tokens takes the time in which the host issues all
    operations."""
    shape = shape_of(int(1e9), 16, 50_304)
    times = times_of_size(1e9, Implementation("eager", FLASH_2), sequence=16)
    operations = RUNTIMES["eager"].forward.launches
    assert times.forward_s > shape.layers * operations * PYTHON_OPERATION_NS.fast / 1e9


def test_times__of_deepspeed_hide_neither_exchanges_nor_copies_of_gradients() -> None:
    shown = [
        times_of_size(13e9, Implementation(name, FLASH_2), ranks=4)
        for name in ("eager", "deepspeed")
    ]
    alone = times_of_size(13e9, Implementation("deepspeed", FLASH_2))
    copies_s = [
        4 * 13e9 / ranks / preset("h100-80gb").d2h_bytes_per_s for ranks in (1, 4)
    ]
    compute_s = alone.forward_s + alone.backward_s - copies_s[0]
    total_s = shown[1].forward_s + shown[1].backward_s
    assert total_s == pytest.approx(
        compute_s + shown[1].collectives_s + copies_s[1], rel=1e-3
    )
    assert shown[0].forward_s + shown[0].backward_s < total_s


def test_times__of_a_recording_are_scaled_by_peaks() -> None:
    same, twice, unknown = (
        on_gpu(recorded(3e14), 3e14),
        on_gpu(recorded(3e14), 6e14),
        on_gpu(recorded(None), 3e14),
    )
    assert (same.forward_s, same.backward_s, same.other_s) == (1.0, 3.0, 0.5)
    assert (twice.forward_s, twice.backward_s, unknown.forward_s) == (0.5, 1.5, 1.0)
    factors = [same.factor, twice.factor, unknown.factor]
    assert factors == pytest.approx([SAME_GPU_FACTOR, PEAKS_FACTOR, UNKNOWN_GPU_FACTOR])


def test_times__of_kernels_follow_the_roofline() -> None:
    """One kernel of 1 s of arithmetic at the rate of products, and one of 1 s of
    memory, as fast on both GPUs."""
    share = kernel_share(PRODUCT, "GPU", CardClass.OTHER).median
    kernels = RecordedKernels(np.array([share * 3e14, 1.0]), np.array([1.0, 2e12]), 2.0)
    assert on_gpu(recorded(3e14, kernels), 6e14).forward_s == pytest.approx(0.75)
    assert on_gpu(recorded(3e14, kernels), 1e12).forward_s == pytest.approx(
        (300 + 1) / 2
    )


def test_times__more_ranks_exchange_parameters() -> None:
    compute = recorded(3e14)
    alone, shared = (
        on_gpu(compute, 3e14),
        on_gpu(compute, 3e14, TunableSettings(4, 1, False, False)),
    )
    exchange_s = 3 * 2e9 * 3 / 4 / (300e9 * COLLECTIVE_EFFICIENCY.typical)
    assert shared.collectives_s == pytest.approx(exchange_s)
    total = shared.forward_s + shared.backward_s
    assert 4.0 < total < 4.0 + exchange_s
    assert shared.factor > 1
    assert alone.collectives_s == 0


def test_times__of_pipelines_have_their_bubble() -> None:
    """Each of 4 stages has a quarter of the layers; 8 micro-steps take 11 of it."""
    whole, staged = (
        parallel_times(1, stages, ranks=4, tokens=tokens)
        for stages, tokens in ((1, 4 * 8 * 2048), (4, 8 * 2048))
    )
    ratio = staged.forward_s / (whole.forward_s / 4 * 11 / 8)
    # The last stage has all of the vocabulary.
    assert 1 <= ratio < 1.25
    assert parallel_times(1, 4, ranks=4, tokens=2048).forward_s == pytest.approx(
        staged.forward_s * 4 / 11
    )


def test_times__of_tensor_parallelism_sum_in_each_layer() -> None:
    """A half of each product, and 2 sums of 2,048 x hidden in each layer: no shorter
    than half the time and they at the rate of NVLink."""
    shape = shape_of(int(7e9), 2048, 50_304)
    whole, halves = (parallel_times(n, 1, ranks=n, tokens=2048) for n in (1, 2))
    sums_s = 2 * shape.layers * 2048 * shape.hidden * 2 / 450e9
    assert halves.forward_s > whole.forward_s / 2 + sums_s
    assert halves.forward_s < 0.8 * whole.forward_s
    # Within a replica there is nothing to exchange.
    assert halves.collectives_s == 0
    # 4 replicas of 2 on a host exchange gradients and parameters once.
    assert parallel_times(2, 1, ranks=8, tokens=8 * 2048).collectives_s > 0


def parallel_times(tensor: int, pipeline: int, **batch: Any) -> ComputeTimes:
    """Return the times of 7 B on H100, 2,048 tokens a micro-step."""
    parts = LayerParts(parallel=Parallelism(tensor, pipeline))
    shape = shape_of(int(7e9), 2048, 50_304, parts=parts)
    job = job_of_size(shape, BatchSettings(**batch), False, FUSED)
    machine = preset("h100-80gb")
    # Exchanges between replicas are tested by themselves.
    times = job.compute.times(machine, job.settings, job.micro_steps)
    if not times.collectives_s or tensor * pipeline > 1:
        return times
    alone = replace(job.settings, ranks=1)
    return job.compute.times(machine, alone, job.micro_steps)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "ranks", "problem"),
    [
        (64, 1, 64, "--tensor-parallel 64 is more than 32 heads"),
        (1, 64, 64, "--pipeline-parallel 64 is more than"),
        (2, 2, 6, "--ranks 6 is not a multiple of the 4 that share a model"),
    ],
)
def test_parallelism__refuses_what_cannot_be(
    tensor: int, pipeline: int, ranks: int, problem: str
) -> None:
    with pytest.raises(WorkloadError, match=problem):
        parallel_times(tensor, pipeline, ranks=ranks)


def test_times__exchanges_of_several_hosts_pass_their_links() -> None:
    """DGX A100: 8 links of 200 Gbit/s, and 300 GB/s between the GPUs of a host."""
    host, hosts = (
        times_of_size(7e9, FUSED, machine="a100-80gb-sxm", ranks=ranks)
        for ranks in (8, 16)
    )
    by_ranks = (15 / 16) / (7 / 8)
    ratio = hosts.collectives_s / host.collectives_s
    assert ratio == pytest.approx(300 / 200 * by_ranks)


def test_combined_factor__adds_squares_of_logarithms() -> None:
    assert combined_factor(1.3) == pytest.approx(1.3)
    assert combined_factor(np.exp(3), np.exp(4)) == pytest.approx(np.exp(5))


@pytest.mark.parametrize(
    ("params", "layers", "hidden"),
    [(6.7e9, 32, 4096), (13e9, 40, 5140), (65e9, 80, 8192), (175e9, 96, 12288)],
)
def test_shape_of__guesses_published_decoders(
    params: float, layers: int, hidden: int
) -> None:
    shape = shape_of(int(params), 2048, 50_000)
    assert shape.layers == pytest.approx(layers, rel=0.25)
    assert shape.hidden == pytest.approx(hidden, rel=0.15)
    assert shape_of(int(params), 2048, 50_000, layers, hidden).layers == layers


def test_activations__full_checkpointing_keeps_inputs_and_one_layer() -> None:
    """34 bytes per token and hidden unit of each layer, or 2 and those of one layer
    (Korthikanti et al. 2022)."""
    shape = shape_of(int(6.7e9), 2048, 50_000, 32, 4096)
    assert shape.kept_bytes(2048, checkpointing=False) == 2048 * 4096 * 32 * 34
    assert shape.kept_bytes(2048, checkpointing=True) == 2048 * 4096 * 32 * 2
    assert 2 / 34 < checkpointed_share(int(6.7e9)) < 0.15


# Published: parameters, layers, width, heads, size and heads of keys, vocabulary, tied,
# and the width of the feed-forward network, of which the last two have more.
DECODERS = [
    (751_632_384, 28, 1024, 16, 128, 8, 151_936, False, True, 1, 3072),
    (596_049_920, 28, 1024, 16, 128, 8, 151_936, True, True, 1, 3072),
    (8_030_261_248, 32, 4096, 32, 128, 8, 128_256, False, True, 1, 14_336),
    (124_439_808, 12, 768, 12, 64, 12, 50_257, True, False, 1, 3072),
    (46_702_792_704, 32, 4096, 32, 128, 8, 32_000, False, True, 8, 14_336),
    (30_532_122_624, 48, 2048, 32, 128, 4, 151_936, False, True, 128, 768),
]


@pytest.mark.parametrize("decoder", DECODERS)
def test_shape_of__has_the_feed_forward_network_of_published_decoders(
    decoder: tuple[Any, ...],
) -> None:
    """Qwen3-0.6B (both ends counted, and one), Llama 3.1 8B, GPT-2, Mixtral 8x7B and
    Qwen3-30B-A3B."""
    params, layers, hidden, heads, size, keys, entries, tied, gated, experts, width = (
        decoder
    )
    parts = LayerParts(
        head_size=size,
        key_value_heads=keys,
        is_gated=gated,
        is_tied=tied,
        experts=experts,
    )
    shape = shape_of(params, 2048, entries, layers, hidden, heads, parts)
    assert shape.feed_forward_width == pytest.approx(width, rel=0.02)
    assert shape.query_width == heads * size


def test_times__of_wider_heads_and_more_experts_follow_their_work() -> None:
    """Heads of 128 at a width of 1,024 have twice the attention of those of 64, and of
    128 experts a token runs through 8."""

    def seconds(params: int, **parts: Any) -> float:
        shape = shape_of(params, 16_384, 50_304, 28, 1024, 16, LayerParts(**parts))
        job = job_of_size(shape, BatchSettings(), False, FUSED)
        times = job.compute.times(preset("h100-80gb"), job.settings, 1)
        return times.forward_s

    small = 500_000_000
    assert seconds(small, head_size=64) == pytest.approx(seconds(small), rel=0.01)
    assert 1.2 < seconds(small, head_size=128) / seconds(small) < 2
    all_run = seconds(8 * small, experts=128, active_experts=128)
    assert seconds(8 * small, experts=128, active_experts=8) < all_run / 2


@pytest.mark.parametrize(
    "parts",
    [
        LayerParts(experts=2, active_experts=3),
        LayerParts(key_value_heads=5),
        LayerParts(head_size=4096),
    ],
)
def test_shape_of__refuses_parts_that_cannot_be(parts: LayerParts) -> None:
    with pytest.raises(WorkloadError):
        shape_of(500_000_000, 2048, 50_304, 28, 1024, 16, parts)
