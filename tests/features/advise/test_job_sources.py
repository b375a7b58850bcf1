"""Jobs of traces and of sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.errors import WorkloadError
from ebbtide.features.advise.job.decoder import shape_of
from ebbtide.features.advise.job.memory import place
from ebbtide.features.advise.job.sources import BatchSettings, job_of_size, job_of_trace
from ebbtide.interleave.replay.inputs import recorded_gpu
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.machines.catalog import preset
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from tests.analysis.findings.jobs import PARAMS, offloaded

TRACES = Path(__file__).parents[3] / "traces"


def test_job_of_trace__on_its_own_machine_is_the_replayed_workload() -> None:
    trace = open_trace(TRACES / "a100-13b-interleaved-2.ebb")
    job, workload = (
        job_of_trace(trace, BatchSettings(sequence=2048)),
        workload_of(trace),
    )
    assert (job.settings.ranks, job.settings.micro_batch, job.settings.offload) == (
        4,
        1,
        True,
    )
    assert job.tokens == 4 * 2048
    placed = place(
        job, job.settings, preset("a100-40gb-published").for_ranks(4)
    ).workload
    assert (placed.forward_s, placed.backward_s) == (
        workload.forward_s,
        workload.backward_s,
    )
    assert placed.params == workload.params
    assert placed.sizes == workload.sizes
    assert workload.min_free_bytes is not None
    assert placed.min_free_bytes == pytest.approx(workload.min_free_bytes)


def test_job_of_trace__has_more_free_memory_on_a_larger_device() -> None:
    job = job_of_trace(open_trace(TRACES / "a100-13b-async.ebb"), BatchSettings())
    free = [
        place(job, job.settings, preset(name)).workload.min_free_bytes or 0.0
        for name in ("a100-40gb-published", "a100-80gb-sxm")
    ]
    capacities = [
        preset(name).gpu_memory_bytes or 0.0
        for name in ("a100-40gb-published", "a100-80gb-sxm")
    ]
    assert free[1] - free[0] == pytest.approx(capacities[1] - capacities[0])


def test_job_of_trace__gradients_of_a_loop_of_torch_stay_on_the_device(
    tmp_path: Path,
) -> None:
    builder = offloaded(2, used=60).builder
    builder.write(tmp_path / "run.ebb")
    trace = open_trace(tmp_path / "run.ebb")
    job = job_of_trace(trace, BatchSettings(ranks=2, micro_batch=3, tokens=100))
    assert job.workload.gradients_held_until_step == (not job.settings.offload)
    assert (
        job.workload.params,
        job.settings.ranks,
        job.settings.micro_batch,
        job.tokens,
    ) == (PARAMS, 2, 3, 100)


def trained(path: Path, *, kept_bytes: int, checkpointing: bool = False) -> Trace:
    """Write a trace of 2 GiB of parameters and up to 20 GiB of activations, of which
    torch keeps all, and more."""
    builder = TraceBuilder("recorded")
    model = {
        "params": PARAMS,
        "total_params": PARAMS,
        "bytes": 2 << 30,
        "checkpointing": checkpointing,
    }
    device = {
        "device": "cuda:0",
        "kind": "cuda",
        "capacity_bytes": 80 << 30,
        "name": "NVIDIA A100-SXM4-80GB",
    }
    rank = builder.rank(0, world_size=1, devices=[device], model=model)
    for iteration in range(6):
        for index, (phase, tensors) in enumerate(
            (("forward", 12), ("backward", 22), ("update", 2))
        ):
            begin = (300 * iteration + 100 * index) * 10**6
            rank.phase(phase, begin, begin + 100 * 10**6, iteration)
            at = begin + 10**6
            rank.memory(at, tensors << 30, "requested").memory(
                at, kept_bytes, "reserved"
            )
    builder.write(path)
    return open_trace(path)


@pytest.mark.parametrize("kept_gib", [22, 30])
def test_place__a_smaller_micro_batch_needs_less_where_torch_keeps_its_memory(
    kept_gib: int, tmp_path: Path
) -> None:
    trace = trained(tmp_path / "run.ebb", kept_bytes=kept_gib << 30)
    job, machine = (
        job_of_trace(trace, BatchSettings(micro_batch=4)),
        preset("a100-80gb-sxm"),
    )
    capacity = machine.gpu_memory_bytes or 0.0
    settings = {size: replace(job.settings, micro_batch=size) for size in (8, 4, 2)}
    free = {
        size: place(job, settings[size], machine).workload.gpu_free or ()
        for size in settings
    }
    used = {
        size: capacity - min(left for _, left in steps) for size, steps in free.items()
    }
    assert used[4] == pytest.approx(kept_gib << 30, rel=0.01)
    activations = 20 << 30
    assert used[8] - used[4] == pytest.approx(activations, rel=0.01)
    held_gradients = 2 * PARAMS
    assert used[4] - used[2] == pytest.approx(
        activations / 2 - held_gradients, rel=0.01
    )


def test_job_of_trace__knows_whether_the_job_checkpoints(tmp_path: Path) -> None:
    for checkpointing in (False, True):
        trace = trained(
            tmp_path / f"{checkpointing}.ebb",
            kept_bytes=30 << 30,
            checkpointing=checkpointing,
        )
        assert (
            job_of_trace(trace, BatchSettings()).settings.checkpointing is checkpointing
        )


@pytest.mark.parametrize(
    ("name", "capacity", "expected"),
    [
        ("NVIDIA A100 40GB", 42949672960, 312e12),
        ("NVIDIA GeForce RTX 4090", 25.4e9, 165.2e12),
        ("NVIDIA A100-SXM4-80GB", 85e9, 312e12),
        ("NVIDIA A100 40GB", 85e9, 312e12),
        ("Quadro P400", 2e9, None),
    ],
)
def test_recorded_gpu__is_found_by_model_and_memory(
    name: str, capacity: float, expected: float | None
) -> None:
    builder = TraceBuilder("recorded")
    builder.rank(
        0,
        devices=[
            {
                "device": "cuda:0",
                "kind": "cuda",
                "name": name,
                "capacity_bytes": int(capacity),
            }
        ],
    )
    gpu = recorded_gpu(builder.build())
    assert gpu.name == name
    assert (
        gpu.compute.flops_per_s["bfloat16"] if gpu.compute is not None else None
    ) == expected


def test_recorded_gpu__of_a_dry_run_without_a_machine_is_that_of_its_times() -> None:
    builder = TraceBuilder("predicted")
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda", "name": "dry run"}])
    assert recorded_gpu(builder.build()).compute == preset("h100-80gb").gpu


def test_job_of_size__tokens_are_a_multiple_of_a_micro_step() -> None:
    shape = shape_of(10**9, 1024, 50_000)
    job = job_of_size(
        shape,
        BatchSettings(ranks=2, micro_batch=2, tokens=16 * 1024),
        checkpointing=False,
    )
    assert (job.micro_steps, job.tokens) == (4, 16 * 1024)
    assert job.workload.gradients_held_until_step
    with pytest.raises(WorkloadError, match=r"not a multiple of the 4,096"):
        job_of_size(
            shape,
            BatchSettings(ranks=2, micro_batch=2, tokens=5000),
            checkpointing=False,
        )


def test_job_of_size__its_memory_is_near_that_of_a_published_run() -> None:
    """20B on 4 H100: parameters, activations and buffers, as NVML measured them beside
    the optimizer's."""
    trace = open_trace(TRACES / "h100-20b-async.ebb")
    measured = job_of_trace(trace, BatchSettings())
    sized = job_of_size(
        shape_of(15_326_663_680, 2048, 50_304, 40, 5120), BatchSettings(ranks=4), False
    )
    machine = preset("h100-80gb-sxm-published")
    free = [
        place(job, job.settings, machine).workload.min_free_bytes or 0.0
        for job in (measured, sized)
    ]
    used = [(machine.gpu_memory_bytes or 0.0) - size for size in free]
    assert used[1] == pytest.approx(used[0], rel=0.2)
