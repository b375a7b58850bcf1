"""Rates from the sub-steps of recorded DeepSpeed jobs: those that were put in come out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.cli import run
from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate.fitting.from_steps import step_rates
from ebbtide.interleave.calibrate.fitting.from_traces import machine_of
from tests.analysis.findings.jobs import offloaded, on_cpu
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job

# Of each subgroup of 1e8 parameters: 40 ms update, 20 ms parameters, 15 of them copied; 10 ms of a step are the rest.
UPDATE, CAST, PAGEABLE, OVERHEAD = SIZE / 0.04, SIZE / 0.005, 2 * SIZE / 0.015, 0.01


def test_a_job_with_copies_tells_the_kernel_the_conversion_the_copy_and_the_overhead() -> None:
    found = step_rates(deepspeed_job().build())
    assert found is not None
    assert found.rates == {
        "cpu_update_params_per_s": pytest.approx(UPDATE, rel=1e-3),
        "cpu_cast_params_per_s": pytest.approx(CAST, rel=1e-3),
        "h2d_pageable_bytes_per_s": pytest.approx(PAGEABLE, rel=1e-3),
        "step_overhead_s": OVERHEAD,
    }
    assert set(found.how) == set(found.rates)
    assert found.beside_s == pytest.approx(5 * 0.01)


def test_without_copies_it_is_not_known_what_of_the_time_is_conversion() -> None:
    found = step_rates(deepspeed_job(copies=False).build())
    assert found is not None
    assert set(found.rates) == {"cpu_update_params_per_s", "step_overhead_s"}


def test_of_a_static_split_the_cpus_part_counts() -> None:
    job = deepspeed_job(ratio=0.6, devices=("cuda",) * 2 + ("cpu",) * 3)
    found = step_rates(job.build())
    assert found is not None
    # In this made job all five take 40 ms; three of them are the CPU's to tell of.
    assert found.rates["cpu_update_params_per_s"] == pytest.approx(UPDATE * 3 / 5, rel=1e-3)
    assert "cpu_cast_params_per_s" not in found.rates


def test_a_job_without_a_gpu_tells_of_the_cpu_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed_job(gpu=False).write(tmp_path / "run.ebb")
    found = machine_of([tmp_path / "run.ebb"], "here")
    assert found.cpu_update_params_per_s == pytest.approx(UPDATE, rel=1e-3)
    assert found.cpu_cast_params_per_s == pytest.approx(SIZE / 0.02, rel=1e-3)
    assert (found.h2d_bytes_per_s, found.gpu_update_params_per_s, found.h2d_pageable_bytes_per_s) == (None, None, None)
    output = tmp_path / "machine.json"
    assert run(["calibrate", "--from-trace", str(tmp_path / "run.ebb"), "-o", str(output)]) == 0
    out, err = capsys.readouterr()
    assert "measured: DeepSpeed's kernel" in out
    assert "tell nothing" in err


def test_a_fit_takes_what_was_measured_and_explains_the_update(tmp_path: Path) -> None:
    deepspeed_job().write(tmp_path / "run.ebb")
    found = machine_of([tmp_path / "run.ebb"], "box")
    assert found.cpu_update_params_per_s == pytest.approx(UPDATE, rel=1e-3)
    fit = found.more["fit"]
    assert "cpu_update_params_per_s" not in fit["uncertainty"]
    # The simulator's last gradient comes down when the backward is over.
    assert fit["residuals"]["run"] == pytest.approx(0.02, abs=0.01)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (("cpu", "gpu"), "ran on a GPU and others did not"),
        (("bare",), "has no sub-steps of DeepSpeed's"),
        (("adaptive",), "whose plan follows the machine"),
    ],
)
def test_traces_that_tell_no_machine(jobs: tuple[str, ...], message: str, tmp_path: Path) -> None:
    made = {
        "cpu": deepspeed_job(gpu=False),
        "gpu": deepspeed_job(),
        "bare": on_cpu().builder,
        "adaptive": deepspeed_job(policy="adaptive"),
    }
    for name in jobs:
        made[name].write(tmp_path / f"{name}.ebb")
    with pytest.raises(MachineError, match=message):
        machine_of([tmp_path / f"{name}.ebb" for name in jobs], "none")


def test_without_sub_steps_nothing_is_told() -> None:
    assert step_rates(offloaded().trace) is None
