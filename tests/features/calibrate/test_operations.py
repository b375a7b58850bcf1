"""Measurement of the time of an operation of the executor."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.features.calibrate import run
from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.features.calibrate.record import MeasurementRecord, Setup
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

SETUP = Setup(
    Ranks(), threads=1, cores=1, working_set=1 << 20, window_s=0.0, device=None
)


@pytest.mark.parametrize(
    "policy", ["interleaved:2", "interleaved:3@0.5", "pipelined", "gpu-only"]
)
@pytest.mark.parametrize("seconds", [1e-4, 0.5])
def test_operation_s__is_that_of_the_machine_on_which_a_plan_was_simulated(
    policy: str, seconds: float
) -> None:
    tiny = Workload("tiny", 32, 1, forward_s=0.0, backward_s=0.0)
    machine = Machine(
        h2d_bytes_per_s=1e12,
        d2h_bytes_per_s=1e12,
        host_memory_bytes_per_s=1e12,
        cpu_update_params_per_s=1e12,
        gpu_update_params_per_s=1e12,
        operation_s=seconds,
    )
    schedule = simulate(make_plan(policy, tiny, machine), tiny, machine)
    assert run.operation_s(schedule) == pytest.approx(seconds, rel=1e-4)


def test_measure_operation__runs_the_executor_and_says_on_which_device() -> None:
    record = MeasurementRecord()
    run.measure_operation(SETUP, record)
    # More than a call of a Python function, less than a second.
    assert 1e-6 < record.rates["operation_s"] < 1
    assert record.measured["operation_s"]["runs"] >= 3
    assert "on the emulated device" in record.measured["operation_s"]["how"]
    assert record.notes == []


def test_measure_operation__an_engine_that_cannot_run_leaves_it_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("no compiler for GPU kernels")

    monkeypatch.setattr(run, "InterleavedAdamW", refuse)
    record = MeasurementRecord()
    run.measure_operation(SETUP, record)
    assert record.rates == {}
    assert record.notes == ["operation_s was not measured: no compiler for GPU kernels"]
