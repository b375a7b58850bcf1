"""DeepSpeed in a dry run: what it holds, against real runs; phases, copies and the
entry of the trace."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ebbtide.features.deepspeed.setup import deepspeed_of
from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.features.dryrun.torch_2_13.frameworks.deepspeed import extension
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.profiler.trace import open_trace
from tests.conftest import phases_of
from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.zero_partitions import (
    CPU,
    config,
    dry_run,
    forget_groups,
    run_for_real,
    train,
)

OFFLOAD = {"offload_optimizer": CPU}
QUICK = {"stage 3 offloaded": config(3, OFFLOAD)}
CASES = {
    **QUICK,
    "stage 1": config(1),
    "stage 1 offloaded": config(1, OFFLOAD),
    "stage 1 in fp32": config(1, dtype="fp32"),
    "stage 2": config(2, accumulate=2),
    "stage 2 offloaded": config(2, OFFLOAD, accumulate=2),
    "stage 2 pinned": config(2, {"offload_optimizer": {**CPU, "pin_memory": True}}),
    "stage 3": config(3, {"stage3_param_persistence_threshold": 1_000}),
    "stage 3 with accumulation": config(3, OFFLOAD, accumulate=2),
    "stage 3 by halves": config(3, {"offload_optimizer": {**CPU, "ratio": 0.5}}),
    "stage 3 with parameters offloaded": config(3, {**OFFLOAD, "offload_param": CPU}),
    "stage 3 in fp32": config(3, OFFLOAD, dtype="fp32"),
    "stage 3 in one subgroup": config(3, {**OFFLOAD, "sub_group_size": 10**9}),
}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, QUICK),
        *(pytest.param(ranks, CASES, marks=pytest.mark.slow) for ranks in (1, 2, 3)),
    ],
)
def test_zero__holds_what_real_ranks_hold(
    ranks: int, cases: dict[str, dict[str, Any]], deepspeed_extensions: None
) -> None:
    import deepspeed  # so that the children need not

    assert deepspeed
    predicted = run_forked(functools.partial(dry_run, cases, ranks))
    assert predicted == run_for_real(cases, ranks)


@pytest.mark.slow
def test_dry_run__of_a_deepspeed_job_gives_the_trace_of_a_recorded_one(
    tmp_path: Path,
) -> None:
    settings = config(
        3, {"offload_optimizer": {**CPU, "pin_memory": True}}, accumulate=2
    )

    def predict() -> list[str]:
        forget_groups()
        with DryRun(DryRunOptions(ranks=2)) as run:
            train(settings, 5)
        trace_of_run(run).write(tmp_path / "run.ebb")
        return run.notes()

    notes = run_forked(predict)
    trace = open_trace(tmp_path / "run.ebb")
    assert phases_of(trace) == [["forward", "backward"] * 2 + ["update"]] * 2
    job = deepspeed_of(trace).info
    assert job is not None
    assert (job.stage, job.gradients_pinned, job.masters_pinned) == (3, True, False)
    assert job.config["zero_optimization"] == settings["zero_optimization"]
    assert set(job.subgroup_devices) == {"cpu"}
    params = sum(job.subgroup_params)
    assert trace.meta.ranks[0].model.params == params
    # Gradients in half precision go down twice, the first ones up for the sum, and this
    # down in fp32. Parameters go up.
    copies = trace.transfers(0)
    pinned = (
        copies[copies["host_memory"] == "pinned"].groupby("direction")["bytes"].sum()
    )
    assert dict(pinned) == {
        "d2h": 2 * (2 + 2 + 4) * params,
        "h2d": 2 * (2 + 2) * params,
    }
    assert list(workload_of(trace).sizes) == list(job.subgroup_params)
    assert any("host memory of this rank" in note for note in notes)
    peaks = trace.memory(0).groupby("pool")["bytes"].max()
    # Gradients in half precision and fp32; the sizes of blocks are powers of two.
    assert 6 * params <= peaks["pinned"] < 2 * 6 * params
    assert peaks["heap"] >= 3 * 4 * params


@pytest.mark.parametrize("name", ["fused_lamb", "pin_memory"])
def test_extension__that_is_not_known_is_named(name: str) -> None:
    with pytest.raises(CannotFakeError, match=name):
        extension(name, VirtualClock(), None)
