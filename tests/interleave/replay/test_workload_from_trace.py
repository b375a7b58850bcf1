"""The workload of a trace: what was recorded, no more and no less."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import TraceError, WorkloadError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.results import replay
from ebbtide.interleave.replay.workload_from_trace import recorded_policy, workload_of
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from tests.analysis.findings.jobs import CAPACITY, GIB, MS, PARAMS, PEAK, PHASES, Job, devices, offloaded
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job
from tests.interleave.experiments.sweep.sweeps import machine

FORWARD, BACKWARD, OTHER = 0.1, 0.2, 0.005


def configured(job: Job, offload: Any = None, version: str = "0.19.5", **zero: Any) -> Job:
    """With a DeepSpeed configuration."""
    config = {
        "gradient_clipping": 1.0,
        "zero_optimization": {"offload_optimizer": offload or {"device": "cpu"}, **zero},
    }
    job.builder.meta["deepspeed"] = {"version": version, "config": config}
    return job


def test_a_workload_is_what_was_recorded() -> None:
    job = configured(devices(Job(2)), sub_group_size=3e8)
    job.meta(
        model={"params": 7, "dtypes": {"torch.bfloat16": 900, "torch.float32": 100}},
        optimizers=[{"params": PARAMS - 5, "state_dtypes": {"torch.float32": 2 * PARAMS}}, {"params": 5}],
    )
    job.memory("device", {"other": 70, "forward": 60, "backward": 50, "update": 70})
    # A quarter of the link in the forward is the job's own; that of the update is the optimizer's.
    job.copy("h2d", "forward", 10, 50, round(0.25 * PEAK * FORWARD)).copy("d2h", "update", 10, 50, round(0.05 * PEAK))
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
    )


def test_times_are_medians_of_the_slowest_rank_without_warmup() -> None:
    draw = random.Random(0)
    builder = TraceBuilder()
    lengths: dict[str, tuple[list[int], list[int]]] = {phase: ([], []) for phase in PHASES}
    for rank in (0, 1):
        now = 0
        ranked = builder.rank(rank, first_iteration_start_ns=0, optimizers=[{"params": PARAMS}])
        for iteration in range(9):
            for phase in PHASES:
                # The first two are warm-up, and slow; rank 1 is the slower one in the backward alone.
                length = draw.randrange(10**6, 10**7) * (100 if iteration < 2 else 1)
                length += 10**8 * (rank == 1 and phase == "backward")
                ranked.phase(phase, now, now + length, iteration)
                lengths[phase][rank].append(length)
                now += length
    job = workload_of(builder.build())
    slowest = {phase: [max(both) for both in zip(*lengths[phase], strict=True)][2:] for phase in PHASES}
    assert job.forward_s == pytest.approx(statistics.median(slowest["forward"]) / 1e9)
    assert job.backward_s == pytest.approx(statistics.median(slowest["backward"]) / 1e9)


def test_what_is_free_is_the_least_over_iterations_at_each_place() -> None:
    job = devices(Job(1, iterations=3)).meta(optimizers=[{"params": PARAMS}])
    job.memory("device", dict.fromkeys(("other", *PHASES), 20))
    job.builder.meta["warmup_iterations"] = 0
    rank = job.builder.rank(0)
    # One iteration uses more from a quarter of the backward on, another one in its second half.
    for iteration, at, size in ((1, 50, 50), (2, 100, 70)):
        rank.memory(job.begins[0, "backward"][iteration] + at * MS, size * GIB)
    found = workload_of(job.trace)
    assert found.gpu_free is not None
    begin = OTHER + FORWARD
    times, sizes = zip(*found.gpu_free, strict=True)
    assert times == pytest.approx((0, OTHER, begin, begin + BACKWARD / 4, begin + BACKWARD / 2, begin + BACKWARD))
    assert sizes == tuple(size * GIB for size in (60, 60, 60, 30, 10, 60))


def test_many_steps_become_few_and_promise_nothing_more() -> None:
    job = devices(Job(1, iterations=1)).meta(optimizers=[{"params": PARAMS}])
    job.memory("device", {"other": 1})
    draw = random.Random(0)
    (begin,) = job.begins[0, "forward"]
    used = [(place, draw.uniform(1, 79)) for place in range(100)]
    for place, size in used:
        job.builder.rank(0).memory(begin + place * MS, round(size * GIB))
    found = workload_of(job.trace)
    assert found.gpu_free is not None
    inside = [entry for entry in found.gpu_free if OTHER <= entry[0] < OTHER + FORWARD]
    assert len(inside) <= 32
    for place, size in used:
        free = found.free_at(OTHER + (place + 0.5) / 1e3)
        assert free is not None
        assert free <= CAPACITY - size * GIB + 1
    assert max(size for _, size in inside) > CAPACITY / 4


def test_state_that_the_job_kept_on_the_device_is_the_policys_to_place() -> None:
    used, state = 40, 12 * PARAMS
    free = CAPACITY - used * GIB
    split = configured(offloaded(1, used=used), {"device": "cpu", "ratio": 0.75})
    assert workload_of(split.trace).least_free == free + state / 4
    whole = offloaded(1, used=used)
    assert workload_of(whole.trace).least_free == free
    resident = devices(Job(1)).memory("device", {"other": used})
    resident.meta(optimizers=[{"params": PARAMS, "state_bytes": state, "state_devices": ["cuda:0"]}])
    assert workload_of(resident.trace).least_free == free + state


def test_a_backward_that_waited_is_replayed_without_the_wait() -> None:
    waited = 0.15
    job = offloaded(1, used=40)
    for begin in job.begins[0, "backward"]:
        # From the middle of the backward on there is more room.
        job.builder.rank(0).memory(begin + 100 * MS, 20 * GIB)
    for begin in job.begins[0, "other"][1:]:
        job.builder.rank(0).memory(begin - 1, 40 * GIB)
    job.copy("d2h", "backward", 20, waited * 1e3, 2 * PARAMS, "pageable")
    found = workload_of(job.trace)
    assert found.backward_s == pytest.approx(BACKWARD - waited)
    assert found.notes == (
        "the recorded backward waited some 150 ms for gradient copies (an estimate): replayed without",
    )
    # What is free shrinks with it: places of the backward stay where they are in it, the update begins where it ends.
    assert found.gpu_free is not None
    assert found.gpu_free[-1] == (pytest.approx(found.compute_s), pytest.approx(40 * GIB, abs=1))
    middle = OTHER + FORWARD + found.backward_s / 2
    assert found.free_at(middle - 1e-6) == CAPACITY - 40 * GIB
    assert found.free_at(middle + 1e-6) == CAPACITY - 20 * GIB


def test_without_memory_only_what_needs_it_refuses() -> None:
    trace = devices(Job(1)).meta(optimizers=[{"params": PARAMS}]).trace
    job = workload_of(trace)
    assert job.gpu_free is None
    assert job.notes == ("what is free on the device is not known",)
    found = replay(job, machine())
    assert list(found.skipped) == ["adaptive"]
    assert "needs to know what device memory is free" in found.skipped["adaptive"]
    # What takes nothing on the device fits; of the others it is not known.
    fits = {result.policy: result.fits for result in found.results}
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
        (("forward", "backward"), PARAMS, "no update phase|no finished iteration"),
        (("forward", "update"), PARAMS, "no finished iteration|no backward"),
        (PHASES, None, "does not tell how many parameters a rank updates: describe the job in a --work"),
        (PHASES, 0, "does not tell how many parameters"),
    ],
)
def test_traces_that_make_no_workload(phases: tuple[str, ...], params: int | None, message: str) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, optimizers=[{"params": params}], first_iteration_start_ns=0)
    for number, phase in enumerate(phases):
        rank.phase(phase, number, number + 1, 0)
    with pytest.raises(WorkloadError, match=message) as found:
        workload_of(builder.build("odd.ebb"))
    assert str(found.value).startswith("odd.ebb ")
    with pytest.raises(WorkloadError, match="nothing to replay"):
        workload_of(TraceBuilder().build())


@pytest.mark.parametrize(
    ("printed", "subgroups"),
    [
        ([6 * 10**8, 4 * 10**8], (6 * 10**8, 4 * 10**8)),
        # Of other jobs, of other ranks, or no sizes at all: then the configuration counts, and after it 1e8.
        ([6 * 10**8], (25 * 10**7,) * 4),
        ([2 * 10**9, -(10**9)], (25 * 10**7,) * 4),
        ("many", (25 * 10**7,) * 4),
        (None, (25 * 10**7,) * 4),
    ],
)
def test_subgroups_are_those_that_were_printed_or_configured(printed: Any, subgroups: tuple[int, ...]) -> None:
    job = configured(offloaded(1), sub_group_size=25e7)
    job.builder.meta["deepspeed"]["subgroup_params"] = printed
    assert workload_of(job.trace).subgroups == subgroups
    assert workload_of(configured(offloaded(1)).trace).subgroups == (10**8,) * 10
    # DeepSpeed's own default is larger than this whole job.
    assert workload_of(configured(offloaded(1), sub_group_size=1e12).trace).subgroups == (PARAMS,)


def test_a_recorded_job_gives_all_that_a_replay_takes() -> None:
    sizes = (SIZE, SIZE // 2 + 7, SIZE // 4)  # 7 of them padding
    builder = deepspeed_job(sizes=sizes, ratio=0.5, devices=("cuda", "cpu", "cpu"))
    builder.rank(0).meta["optimizers"][0]["params"] -= 7
    trace = builder.build()
    job = workload_of(trace)
    assert (job.params, job.sizes, job.subgroup_params) == (sum(sizes), sizes, SIZE)
    assert (job.param_bytes, job.state_bytes, job.clipping) == (2, 12, True)
    assert recorded_policy(trace) == "twin-flow:0.5,grads=async"
    # The backward's own copying kept the host for 20 ms; that is measured, and replayed without.
    assert job.backward_s == pytest.approx(0.28)
    assert job.notes == ("the recorded backward waited some 20 ms for gradient copies (an estimate): replayed without",)
    # What was resident counts as free: its share as it really was, 100 of 175 M parameters.
    assert job.gpu_free is not None
    resident = 12 * (sum(sizes) - 7) * SIZE / sum(sizes)
    assert job.gpu_free[0] == (0, pytest.approx(40 * GIB + resident))


def test_a_job_that_ebbtides_engine_drove_ran_under_its_policy() -> None:
    trace = deepspeed_job(ratio=0.5, policy="interleaved:2,grads=async").build()
    assert recorded_policy(trace) == "interleaved:2,grads=async"


@pytest.mark.parametrize(("stage", "policy"), [(2, "zero-offload,grads=async"), (3, "twin-flow:0.3,grads=async")])
def test_only_zero_3_knows_a_ratio(stage: int, policy: str) -> None:
    assert recorded_policy(deepspeed_job(ratio=0.3, stage=stage).build()) == policy


def test_bytes_of_a_parameter_are_those_of_its_kind() -> None:
    job = offloaded(1).meta(model={"dtypes": {"torch.float32": 10, "torch.float16": 3}})
    found = workload_of(job.meta(optimizers=[{"params": PARAMS, "state_dtypes": {"torch.float32": PARAMS}}]).trace)
    # A momentum alone beside the master.
    assert (found.param_bytes, found.grad_bytes, found.state_bytes) == (4, 4, 8)


@pytest.mark.parametrize("clipping", [0.0, None, 1.0])
def test_deepspeed_waits_for_all_gradients_whether_it_clips_or_not(clipping: float | None) -> None:
    job = configured(offloaded(1))
    job.builder.meta["deepspeed"]["config"]["gradient_clipping"] = clipping
    assert workload_of(job.trace) == workload_of(configured(offloaded(1)).trace)
    assert workload_of(job.trace).clipping


@pytest.mark.parametrize(
    ("offload", "version", "policy"),
    [
        ({"device": "cpu"}, "0.19.5", "zero-offload,grads=async"),
        ({"device": "cpu"}, "0.19.4+cu12", "zero-offload,grads=blocking"),
        ({"device": "cpu"}, "0.20", "zero-offload,grads=async"),
        ({"device": "cpu", "ratio": 0.3}, "0.19.5", "twin-flow:0.3,grads=async"),
        ({"device": "cpu", "part_grads_async": False}, "1.0", "zero-offload,grads=blocking"),
        (
            {"device": "cpu", "prefetch_optimizer": True, "prefetch_optimizer_gap": 3},
            "1.0",
            "interleaved:3@1,grads=async",
        ),
        (
            {"device": "cpu", "prefetch_optimizer": False, "prefetch_optimizer_gap": 3},
            "1.0",
            "zero-offload,grads=async",
        ),
        ({"device": "nvme"}, "1.0", None),
        ({"device": "cpu", "ratio": "auto"}, "1.0", None),
        ({"device": "cpu", "prefetch_optimizer": True, "prefetch_optimizer_gap": "auto"}, "1.0", None),
        ("cpu", "1.0", None),
    ],
)
def test_the_policy_of_a_deepspeed_job(offload: Any, version: str, policy: str | None) -> None:
    trace = configured(offloaded(1), offload, version).trace
    assert recorded_policy(trace) == policy
    if policy is not None:
        assert replay(workload_of(trace), machine(), [policy]).results[0].policy == policy


@pytest.mark.parametrize("config", [None, "ds.json", [], {"zero_optimization": []}, {"zero_optimization": {}}])
def test_odd_configurations_tell_nothing(config: Any) -> None:
    job = offloaded(1)
    job.builder.meta["deepspeed"] = {"config": config}
    assert recorded_policy(job.trace) is None
    assert workload_of(job.trace).params == PARAMS


def test_a_meta_that_is_no_meta_is_refused(tmp_path: Path) -> None:
    job = offloaded(1)
    job.builder.meta["deepspeed"] = "0.19.5"
    job.builder.write(tmp_path / "run.ebb")

    def opened() -> Trace:
        return open_trace(tmp_path / "run.ebb")

    with pytest.raises(TraceError, match=r"damaged: deepspeed in its meta\.json"):
        opened()
