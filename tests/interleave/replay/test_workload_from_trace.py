"""Tests of workloads from traces: they contain what was recorded."""

from __future__ import annotations

import random

import pytest

from ebbtide.analysis.metrics.state_split import Framework
from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.replay import replay
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import (
    CAPACITY,
    GIB,
    MS,
    PARAMS,
    PEAK,
    PHASES,
    Job,
    devices,
    offloaded,
    split_by_stub,
)
from tests.interleave.job_files import machine

FORWARD, BACKWARD, OTHER = 0.1, 0.2, 0.005
POOL_NOTE = "free device memory: capacity minus device"


@pytest.mark.usefixtures("stub_framework")
def test_workload_of__has_what_was_recorded() -> None:
    job = devices(Job(2))
    job.builder.meta["stub"] = {"subgroup_params": 300_000_000, "version": "3"}
    job.meta(
        model={"params": 7, "dtypes": {"torch.bfloat16": 900, "torch.float32": 100}},
        optimizers=[
            {"params": PARAMS - 5, "state_dtypes": {"torch.float32": 2 * PARAMS}},
            {"params": 5},
        ],
    )
    job.memory("device", {"other": 70, "forward": 60, "backward": 50, "update": 70})
    # The job itself uses a quarter of the link in the forward. The copies of the update
    # are the optimizer's.
    job.copy("h2d", "forward", 10, 50, round(0.25 * PEAK * FORWARD)).copy(
        "d2h", "update", 10, 50, round(0.05 * PEAK)
    )
    assert workload_of(job.builder.build("name.ebb")) == Workload(
        name="name",
        params=PARAMS,
        subgroup_params=300_000_000,
        forward_s=FORWARD,
        backward_s=BACKWARD,
        other_s=OTHER,
        param_bytes=2.0,
        grad_bytes=2.0,
        state_bytes=12.0,
        gpu_free=(
            (0.0, 10.0 * GIB),
            (OTHER, 20.0 * GIB),
            (OTHER + FORWARD, 30.0 * GIB),
            (OTHER + FORWARD + BACKWARD, 10.0 * GIB),
        ),
        h2d_busy_share=pytest.approx(0.25),  # type: ignore[arg-type]
        d2h_busy_share=0.0,
        clipping=True,
        framework=Framework("stub", "3"),
        notes=(POOL_NOTE,),
    )


def test_gpu_free__is_the_least_over_iterations_at_each_position() -> None:
    job = devices(Job(1, iterations=3)).meta(optimizers=[{"params": PARAMS}])
    job.memory("device", dict.fromkeys(("other", *PHASES), 20))
    job.builder.meta["warmup_iterations"] = 0
    rank = job.builder.rank(0)
    # One iteration uses more from a quarter of the backward on, another one in its
    # second half.
    for iteration, offset_ms, size in ((1, 50, 50), (2, 100, 70)):
        rank.memory(job.begins[0, "backward"][iteration] + offset_ms * MS, size * GIB)
    workload = workload_of(job.trace)
    assert workload.gpu_free is not None
    begin = OTHER + FORWARD
    times, sizes = zip(*workload.gpu_free, strict=True)
    assert times == pytest.approx(
        (0, OTHER, begin, begin + BACKWARD / 4, begin + BACKWARD / 2, begin + BACKWARD)
    )
    assert sizes == tuple(size * GIB for size in (60, 60, 60, 30, 10, 60))


def test_gpu_free__reduces_many_steps_without_promising_more() -> None:
    job = devices(Job(1, iterations=1)).meta(optimizers=[{"params": PARAMS}])
    job.memory("device", {"other": 1})
    draw = random.Random(0)
    (begin,) = job.begins[0, "forward"]
    used = [(offset_ms, draw.uniform(1, 79)) for offset_ms in range(100)]
    for offset_ms, size in used:
        job.builder.rank(0).memory(begin + offset_ms * MS, round(size * GIB))
    workload = workload_of(job.trace)
    assert workload.gpu_free is not None
    inside = [
        entry for entry in workload.gpu_free if OTHER <= entry[0] < OTHER + FORWARD
    ]
    assert len(inside) <= 32
    for offset_ms, size in used:
        free = workload.free_at(OTHER + (offset_ms + 0.5) / 1e3)
        assert free is not None
        assert free <= CAPACITY - size * GIB + 1
    assert max(size for _, size in inside) > CAPACITY / 4


@pytest.mark.usefixtures("stub_framework")
def test_gpu_free__counts_state_of_the_recorded_job_as_free() -> None:
    used, state = 40, 12 * PARAMS
    free = CAPACITY - used * GIB
    split = split_by_stub(0.75, used=used)
    # Resident state, and the gradients in fp32 beside it.
    assert workload_of(split.trace).min_free_bytes == free + (state + 4 * PARAMS) / 4
    unsplit = offloaded(1, used=used)
    assert workload_of(unsplit.trace).min_free_bytes == free
    resident = devices(Job(1)).memory("device", {"other": used})
    resident.meta(
        optimizers=[
            {"params": PARAMS, "state_bytes": state, "state_devices": ["cuda:0"]}
        ]
    )
    assert workload_of(resident.trace).min_free_bytes == free + state


def test_workload_of__removes_waiting_from_the_backward() -> None:
    waited = 0.15
    job = offloaded(1, used=40)
    for begin in job.begins[0, "backward"]:
        # More memory is free from the middle of the backward on.
        job.builder.rank(0).memory(begin + 100 * MS, 20 * GIB)
    for begin in job.begins[0, "other"][1:]:
        job.builder.rank(0).memory(begin - 1, 40 * GIB)
    job.copy("d2h", "backward", 20, waited * 1e3, 2 * PARAMS, "pageable")
    workload = workload_of(job.trace)
    assert workload.backward_s == pytest.approx(BACKWARD - waited)
    assert workload.notes == (
        "the recorded backward waited about 150 ms for gradient copies (an estimate): "
        "replayed without that wait",
        POOL_NOTE,
    )
    # The free memory is scaled with the backward: its steps keep their relative
    # positions, the update follows.
    assert workload.gpu_free is not None
    assert workload.gpu_free[-1] == (
        pytest.approx(workload.compute_s),
        pytest.approx(40 * GIB, abs=1),
    )
    middle = OTHER + FORWARD + workload.backward_s / 2
    assert workload.free_at(middle - 1e-6) == CAPACITY - 40 * GIB
    assert workload.free_at(middle + 1e-6) == CAPACITY - 20 * GIB


def test_workload_of__without_memory_supports_policies_that_do_not_need_it() -> None:
    trace = devices(Job(1)).meta(optimizers=[{"params": PARAMS}]).trace
    job = workload_of(trace)
    assert job.gpu_free is None
    assert job.notes == ("the free memory of the device is not known",)
    replayed = replay(job, machine())
    assert list(replayed.skipped) == ["adaptive"]
    assert "needs to know what device memory is free" in replayed.skipped["adaptive"]
    # Plans without device memory fit; for the others it is not known.
    fits = {result.policy: result.fits for result in replayed.results}
    assert fits == {
        "zero-offload": True,
        "twin-flow:0.5": None,
        "pipelined": True,
        "interleaved:2": None,
        "gpu-only": None,
    }


@pytest.mark.parametrize(
    ("phases", "params", "message"),
    [
        ((), PARAMS, "no finished iteration with forward, backward and update"),
        (
            ("forward", "backward"),
            PARAMS,
            "no update phase: nothing to replay .an optimizer in the backward has none",
        ),
        (("forward", "update"), PARAMS, "no finished iteration|no backward"),
        (
            PHASES,
            None,
            "has no number of parameters that a rank updates: describe the job in a "
            "--work",
        ),
        (PHASES, 0, "has no number of parameters"),
    ],
)
def test_workload_of__refuses_traces_without_phases_or_parameters(
    phases: tuple[str, ...], params: int | None, message: str
) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, optimizers=[{"params": params}], first_iteration_start_ns=0)
    for number, phase in enumerate(phases):
        rank.phase(phase, number, number + 1, 0)
    with pytest.raises(WorkloadError, match=message) as error:
        workload_of(builder.build("bad.ebb"))
    assert str(error.value).startswith("bad.ebb ")
    with pytest.raises(WorkloadError, match="nothing to replay"):
        workload_of(TraceBuilder().build())


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(
    ("printed", "subgroups"),
    [
        ([6 * 10**8, 4 * 10**8], (6 * 10**8, 4 * 10**8)),
        # Sizes of other jobs or ranks, or no sizes: the configuration counts, and
        # without it 1e8.
        ([6 * 10**8], (25 * 10**7,) * 4),
        ([], (25 * 10**7,) * 4),
    ],
)
def test_subgroups__are_those_printed_or_configured(
    printed: list[int], subgroups: tuple[int, ...]
) -> None:
    job = split_by_stub(None)
    assert workload_of(job.trace).subgroups == (10**8,) * 10
    job.builder.meta["stub"] |= {"subgroup_params": 25 * 10**7, "subgroups": printed}
    assert workload_of(job.trace).subgroups == subgroups
    # A configured size may exceed the whole job.
    job.builder.meta["stub"] = {"subgroup_params": 10**12}
    assert workload_of(job.trace).subgroups == (PARAMS,)


@pytest.mark.usefixtures("stub_framework")
def test_workload_of__takes_bytes_from_the_dtypes() -> None:
    job = split_by_stub(1).meta(
        model={"dtypes": {"torch.float32": 10, "torch.float16": 3}}
    )
    workload = workload_of(
        job.meta(
            optimizers=[{"params": PARAMS, "state_dtypes": {"torch.float32": PARAMS}}]
        ).trace
    )
    # A master weight and a momentum.
    assert (workload.param_bytes, workload.grad_bytes, workload.state_bytes) == (
        4,
        4,
        8,
    )
