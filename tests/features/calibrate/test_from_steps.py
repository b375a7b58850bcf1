"""Tests of rates from the sub-steps of recorded DeepSpeed jobs, whose rates are
given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.cli import run
from ebbtide.errors import MachineError
from ebbtide.features.calibrate.fitting.from_traces import machine_of
from ebbtide.features.calibrate.fitting.samples import step_rates
from tests.analysis.findings.jobs import offloaded, on_cpu
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job

# For each subgroup of 1e8 parameters: 40 ms update, 20 ms parameters, 15 ms of them
# copies. A step has 10 ms overhead.
UPDATE, CAST, PAGEABLE, OVERHEAD = SIZE / 0.04, SIZE / 0.005, 2 * SIZE / 0.015, 0.01


def test_step_rates__has_update_cast_copy_and_overhead_with_copies() -> None:
    steps = step_rates(deepspeed_job().build())
    assert steps is not None
    assert steps.rates == {
        "cpu_update_params_per_s": pytest.approx(UPDATE, rel=1e-3),
        "cpu_cast_params_per_s": pytest.approx(CAST, rel=1e-3),
        "h2d_pageable_bytes_per_s": pytest.approx(PAGEABLE, rel=1e-3),
        "step_overhead_s": OVERHEAD,
    }
    assert set(steps.how) == set(steps.rates)
    assert steps.not_in_plans_s == pytest.approx(5 * 0.01)


def test_step_rates__lacks_the_cast_without_copies() -> None:
    steps = step_rates(deepspeed_job(copies=False).build())
    assert steps is not None
    assert set(steps.rates) == {"cpu_update_params_per_s", "step_overhead_s"}


def test_step_rates__counts_the_cpus_part_of_a_static_split() -> None:
    job = deepspeed_job(ratio=0.6, devices=("cuda",) * 2 + ("cpu",) * 3)
    steps = step_rates(job.build())
    assert steps is not None
    # In this synthetic job all five take 40 ms. Three of them run on the CPU.
    assert steps.rates["cpu_update_params_per_s"] == pytest.approx(
        UPDATE * 3 / 5, rel=1e-3
    )
    assert "cpu_cast_params_per_s" not in steps.rates


def test_machine_of__without_a_gpu_has_cpu_rates_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deepspeed_job(gpu=False).write(tmp_path / "run.ebb")
    machine = machine_of([tmp_path / "run.ebb"], "here")
    assert machine.cpu_update_params_per_s == pytest.approx(UPDATE, rel=1e-3)
    assert machine.cpu_cast_params_per_s == pytest.approx(SIZE / 0.02, rel=1e-3)
    assert (
        machine.h2d_bytes_per_s,
        machine.gpu_update_params_per_s,
        machine.h2d_pageable_bytes_per_s,
    ) == (
        None,
        None,
        None,
    )
    output = tmp_path / "machine.json"
    assert (
        run(["calibrate", "--from-trace", str(tmp_path / "run.ebb"), "-o", str(output)])
        == 0
    )
    out, err = capsys.readouterr()
    assert re.search(r"update on the CPU .* measured", out)
    assert "are not known" in err


def test_machine_of__takes_measured_rates_and_explains_the_update(
    tmp_path: Path,
) -> None:
    deepspeed_job().write(tmp_path / "run.ebb")
    machine = machine_of([tmp_path / "run.ebb"], "box")
    assert machine.cpu_update_params_per_s == pytest.approx(UPDATE, rel=1e-3)
    fit = machine.extra["fit"]
    assert "cpu_update_params_per_s" not in fit["uncertainty"]
    # The simulator copies the last gradient down after the backward.
    assert fit["residuals"]["run"] == pytest.approx(0.02, abs=0.01)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (("cpu", "gpu"), "ran on a GPU and others did not"),
        (("bare",), "has no sub-steps of DeepSpeed's"),
        (("adaptive",), "whose plan follows the machine"),
    ],
)
def test_machine_of__refuses_unsuitable_traces(
    jobs: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    builders = {
        "cpu": deepspeed_job(gpu=False),
        "gpu": deepspeed_job(),
        "bare": on_cpu().builder,
        "adaptive": deepspeed_job(policy="adaptive"),
    }
    for name in jobs:
        builders[name].write(tmp_path / f"{name}.ebb")
    with pytest.raises(MachineError, match=message):
        machine_of([tmp_path / f"{name}.ebb" for name in jobs], "none")


def test_step_rates__is_none_without_sub_steps() -> None:
    assert step_rates(offloaded().trace) is None
