"""Policies that run: measured schedules follow the predicted plan, and wrong results
are noticed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.interleave.compare import testbed as testbed_module
from ebbtide.interleave.compare.compare import POLICIES, CompareConfig, compare
from ebbtide.interleave.compare.picture import draw_comparison
from ebbtide.interleave.compare.results import Comparison, Pair
from ebbtide.interleave.compare.runs import (
    PhaseWaits,
    TrainingRun,
    find_shape,
    run_policy,
)
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import as_policy
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine, StoragePath
from ebbtide.state_bytes import STATE_BYTES
from tests.conftest import needs_all_features
from tests.interleave.compare.conftest import LINK, TINY

# Invented rates, so that tests need not measure.
MACHINE = Machine(
    host_memory_bytes_per_s=1e10,
    cpu_update_params_per_s=5e8,
    cpu_cast_params_per_s=1e9,
    gpu_memory_bytes=1e12,
)


@dataclass(frozen=True)
class RecordingTestbed(testbed_module.Testbed):
    """A testbed that keeps the devices that it makes."""

    devices: list[EmulatedDevice] = field(default_factory=list)

    def make_device(self) -> EmulatedDevice | None:
        device = super().make_device()
        assert device is not None
        self.devices.append(device)
        return device


def compare_small(*policies: str, **changes: Any) -> Comparison:
    config = CompareConfig(
        params=TINY,
        iterations=3,
        link_bytes_per_s=LINK,
        machine=MACHINE,
        policies=policies or None,
    )
    return compare(replace(config, **changes))


def test_compare__all_policies_run_with_equal_losses(comparison: Comparison) -> None:
    assert [result.policy for result in comparison.results] == list(POLICIES)
    assert comparison.skipped == {}
    assert comparison.losses_equal
    first = comparison.results[0].losses
    assert len(first) == len(set(first)) == 5
    assert all(result.losses == first for result in comparison.results)


def test_compare__phases_add_up_and_ratios_are_measured_over_predicted(
    comparison: Comparison,
) -> None:
    for result in comparison.results:
        assert (
            1 <= result.counted <= comparison.iterations - comparison.warmup_iterations
        )
        for schedule in (result.measured, result.predicted):
            assert min(schedule.forward_s, schedule.backward_s, schedule.update_s) > 0
            total_s = schedule.forward_s + schedule.backward_s + schedule.update_s
            assert schedule.iteration_s == pytest.approx(total_s)
        for phase, pair in result.times.items():
            assert pair.predicted == 1e3 * getattr(result.predicted, f"{phase}_s")
            assert pair.ratio == pair.measured / pair.predicted
        assert all(
            0 <= share <= 1
            for pair in result.busy.values()
            for share in (pair.measured, pair.predicted)
        )


def test_compare__measured_schedules_follow_the_predicted_plan(
    comparison: Comparison,
) -> None:
    for result in comparison.results:
        measured, predicted = result.measured, result.predicted
        assert measured.plan is predicted.plan
        assert predicted == simulate(
            measured.plan, predicted.workload, comparison.testbed.machine
        )
        assert (
            predicted.workload.forward_s
            == comparison.results[0].predicted.workload.forward_s
        )
        assert_plan_order(measured)


def assert_plan_order(schedule: Schedule) -> None:
    running: dict[str, float] = {}
    for op, start, end in sorted(schedule.items(), key=lambda item: (item[1], item[2])):
        assert 0 <= start <= end <= schedule.iteration_s
        assert start >= running.get(op.resource, 0.0)
        running[op.resource] = end
        assert all(schedule.ends[early] <= start for early in op.after)


def test_compare__an_emulated_link_is_not_faster_than_its_rate(
    comparison: Comparison,
) -> None:
    copies = [
        item
        for result in comparison.results
        for item in result.measured.items()
        if item[0].nbytes
    ]
    assert len(copies) > 50
    assert all(end - start >= op.nbytes / LINK for op, start, end in copies)


def test_run_policy__device_memory_is_that_of_the_device() -> None:
    shape = find_shape(TINY)
    testbed = RecordingTestbed(
        torch.device("cpu"),
        "emulated device",
        MACHINE,
        float(STATE_BYTES * shape.params),
        LINK,
        1,
    )
    training = TrainingRun(
        shape, 0, 3, -(-shape.params // 7), lambda: None, PhaseWaits(), streamed=False
    )
    for policy in ("twin-flow:0.5", "interleaved:2", "zero-offload"):
        run = run_policy(as_policy(policy), training, testbed)
        assert (
            max(schedule.peak_device_bytes for schedule in run.schedules)
            == testbed.devices[-1].peak_bytes
        )


def test_compare__predicts_the_device_memory_of_ebbtides_engine(
    comparison: Comparison,
) -> None:
    """It keeps no gradients in fp32 beside resident state, as DeepSpeed does."""
    (split,) = (
        result for result in comparison.results if result.policy == "twin-flow:0.5"
    )
    device = split.memory.device
    assert device.predicted == pytest.approx(device.measured, rel=0.02)


def test_find_testbed__an_emulated_device_has_its_own_link_and_gpu() -> None:
    rates = {
        "h2d_bytes_per_s": 1e12,
        "gpu_update_params_per_s": 1e12,
        "duplex_bytes_per_s": 1e12,
    }
    machine = compare_small(
        "pipelined", machine=replace(MACHINE, **rates)
    ).testbed.machine
    assert (
        machine.h2d_bytes_per_s,
        machine.d2h_bytes_per_s,
        machine.duplex_bytes_per_s,
    ) == (LINK, LINK, None)
    assert machine.cpu_update_params_per_s == MACHINE.cpu_update_params_per_s


def test_compare__notices_a_device_with_wrong_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = EmulatedDevice.run_updates

    def wrong_updates(self: Any, updates: Sequence[TensorUpdate]) -> None:
        update(self, updates)
        for changed in updates:
            changed.state[0].mul_(1 + 2**-7)

    monkeypatch.setattr(EmulatedDevice, "run_updates", wrong_updates)
    comparison = compare_small(
        "pipelined", "interleaved:2", "zero-offload", iterations=5
    )
    assert [result.losses_equal for result in comparison.results] == [True, False, True]
    assert not comparison.losses_equal
    assert comparison.as_json()["losses_equal"] is False


def test_compare__a_policy_without_memory_is_skipped_unless_it_was_given() -> None:
    tight_budget = STATE_BYTES * TINY / 2
    comparison = compare_small(memory_budget=tight_budget)
    assert list(comparison.skipped) == ["twin-flow:0.5"]
    assert "bytes" in comparison.skipped["twin-flow:0.5"]
    assert [result.policy for result in comparison.results] == [
        name for name in POLICIES if name not in comparison.skipped
    ]
    with pytest.raises(
        UserError, match=r"policy twin-flow:0\.5 cannot run here: .*bytes"
    ):
        compare_small("pipelined", "twin-flow:0.5", memory_budget=tight_budget)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": ("magic",)}, "there is no policy 'magic'"),
        ({"baselines": ("magic",)}, "--against 'magic': choose from torch"),
        ({"iterations": 2}, "--steps must be at least 3"),
        (
            {"machine": Machine(name="empty")},
            "machine empty .*has no host_memory_bytes_per_s, which compare needs",
        ),
    ],
)
def test_compare__refuses_invalid_settings_before_anything_runs(
    settings: dict[str, Any], message: str
) -> None:
    runs: list[str] = []
    with pytest.raises(UserError, match=message):
        compare(
            CompareConfig(params=TINY, link_bytes_per_s=LINK, **settings),
            lambda name, *_: runs.append(name),
        )
    assert set(runs) <= {"measuring this machine"}


def test_compare__refuses_a_model_that_does_not_fit_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_limits, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(
        UserError,
        match=(
            r"--params 200000 needs .* of host memory, but this host has only 1\.00 "
            r"MiB"
        ),
    ):
        compare_small()


def test_compare__progress_counts_all_iterations() -> None:
    calls: list[tuple[str, int, int]] = []
    compare(
        CompareConfig(
            ("pipelined", "zero-offload"),
            3,
            TINY,
            link_bytes_per_s=LINK,
            machine=MACHINE,
            baselines=("torch",),
        ),
        lambda *call: calls.append(call),
    )
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert {total for _, _, total in calls} == {9}
    assert calls[-1] == ("torch", 9, 9)
    assert list(dict.fromkeys(name for name, _, _ in calls))[1:] == [
        "pipelined",
        "zero-offload",
        "torch",
    ]


def test_as_json__is_valid_json(comparison: Comparison) -> None:
    printed = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert printed["device"]["emulated"] is True
    assert printed["losses_equal"] is True
    assert [result["policy"] for result in printed["results"]] == list(POLICIES)
    assert set(printed["results"][0]["update_ms"]) == {"measured", "predicted", "ratio"}
    assert printed["results"][0]["peak_device_bytes"] == {
        "measured": 0.0,
        "predicted": 0.0,
        "ratio": None,
    }


@needs_all_features
def test_compare__measures_memory_and_storage_beside_their_prediction(
    tmp_path: Path,
) -> None:
    # Known rates, so that no file is written to measure them.
    storage = StoragePath(
        read_bytes_per_s=1e9, write_bytes_per_s=1e9, path=str(tmp_path)
    )
    comparison = compare_small(
        "pipelined",
        "deepcompile",
        storage=[tmp_path],
        memory_budget=STATE_BYTES * 2 * TINY,
        machine=replace(MACHINE, storage=(storage,)),
    )
    assert comparison.losses_equal
    pipelined, deepcompile = comparison.results
    stored = sum(
        pipelined.measured.workload.subgroups[subgroup]
        for subgroup in pipelined.measured.plan.stored
    )
    assert 0 < stored < comparison.shape.params
    for pair in (pipelined.memory.storage_read, pipelined.memory.storage_written):
        assert pair.predicted == STATE_BYTES * stored
        # Requests are of whole pages.
        assert (
            0
            <= pair.measured - pair.predicted
            < 4096 * len(pipelined.measured.plan.stored)
        )
    assert deepcompile.memory.storage == Pair(0, 0)
    for result in comparison.results:
        assert result.memory.host.ratio == pytest.approx(1.0, abs=0.1)
        printed = result.as_json()
        assert printed["exact"] is True
        assert printed["storage_read_bytes"] == result.memory.storage_read.as_json()
        assert printed["stored_subgroups"] == len(result.measured.plan.stored)
    # The state of all subgroups passes through the device.
    assert deepcompile.memory.device.measured == deepcompile.memory.device.predicted > 0
    assert not list(tmp_path.iterdir())
    bars = draw_comparison(comparison).subfigs[0].axes[3]
    assert bars.get_xlabel() == "storage traffic (MiB)"
    lanes = [
        label.get_text()
        for label in draw_comparison(comparison).subfigs[1].axes[0].get_yticklabels()
    ]
    assert lanes[-2:] == ["storage read", "storage write"]


def test_compare__late_updates_run_under_the_next_forward() -> None:
    policies = ("pipelined", "pipelined,overlap=forward")
    comparison = compare_small(*policies, iterations=4, waits=PhaseWaits(0.03, 0.03))
    assert comparison.losses_equal
    plain, late = comparison.results
    assert all(not op.due for op, _, _ in plain.measured.items())
    for result in (plain, late):
        for schedule in (result.measured, result.predicted):
            assert schedule.workload.forward_s >= 0.03
            assert schedule.workload.backward_s >= 0.03
        predicted = result.times["exposed"].predicted
        assert 0 <= predicted <= result.times["iteration"].predicted
    for schedule in (late.measured, late.predicted):
        late_ends = [end for op, _, end in schedule.items() if op.is_late]
        assert max(late_ends) > schedule.iteration_s
        # They end before the next backward.
        assert (
            max(late_ends)
            <= schedule.iteration_s + schedule.forward_s + schedule.backward_s
        )
    assert late.measured.plan is late.predicted.plan


def test_compare__refuses_waits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = testbed_module.Testbed(torch.device("cpu"), "a GPU", MACHINE, 1e9, None, None)
    monkeypatch.setattr(
        "ebbtide.interleave.compare.compare.find_testbed", lambda *_: gpu
    )
    with pytest.raises(
        UserError, match="--forward-ms and --backward-ms are for an emulated device"
    ):
        compare_small("pipelined", waits=PhaseWaits(0.1, 0.1))
