"""What plan counts of random jobs, beside dry runs of the same jobs: bytes, and whether
they fit."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from ebbtide.features.fit.search import FitPoint, FitSearch
from ebbtide.features.fit.shape import shape_of_config
from ebbtide.machines.catalog import find_machine
from ebbtide.model_job import ModelJob
from tests.conftest import slow_case
from tests.features.fit.model_runs import configuration, dry_run, random_job

QUICK_SEEDS, SEEDS = range(6), range(6, 100)
# Of the tensors of a job.
TOLERANCE = 0.03


def needs_packages(job: ModelJob) -> None:
    if job.method != "full":
        pytest.importorskip("peft")
    if job.method == "qlora" or "8bit" in job.optimizer:
        pytest.importorskip("bitsandbytes")


def planned(config: dict, job: ModelJob, machine: str, capacity: float) -> FitPoint:
    shape = shape_of_config(config, "model")
    return FitSearch(job, shape, find_machine(machine), capacity).own


@pytest.mark.parametrize("seed", [*QUICK_SEEDS, *map(slow_case, SEEDS)])
def test_plan_and_dry_run__agree_on_bytes_and_on_what_fits(seed: int) -> None:
    config, job, machine = random_job(seed)
    needs_packages(job)
    huge = 10**13
    point = planned(config, job, machine, huge)
    # A device on which it just fits by the plan.
    capacity = int(huge - point.device.limit_bytes + point.needed_bytes) + 1
    assert planned(config, job, machine, capacity).lacks != "device"
    assert planned(config, job, machine, capacity - 2).lacks == "device"
    peak = dry_run(config, job, machine, capacity)
    assert point.memory.total == pytest.approx(peak.tensor_bytes, rel=TOLERANCE)
    assert peak.reserved_bytes + peak.context_bytes <= capacity


FRONTIER_JOB = ModelJob("model", batch=2, sequence=1024)
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_frontier__each_point_is_that_of_a_dry_run(kind: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    config = configuration(kind, **SIZES)
    machine = find_machine("rtx4090")
    search = FitSearch(FRONTIER_JOB, shape_of_config(config, "m"), machine, 24e9)
    assert len(search.points) > 100
    for point in search.line + search.points[::9]:
        peak = dry_run(config, point.job, "rtx4090", 24 * 10**9)
        expected = pytest.approx(peak.tensor_bytes, rel=TOLERANCE)
        assert point.memory.total == expected, point.text
