"""Policies run for real: what was measured belongs to the plan that is predicted, and faults show."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.experiments.compare.compare import POLICIES, Asked, compare
from ebbtide.interleave.experiments.compare.job import shape_of
from ebbtide.interleave.experiments.compare.results import Comparison
from ebbtide.interleave.experiments.compare.runs import Training, run_policy
from ebbtide.interleave.experiments.compare.testbed import Box
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.experiments.compare.conftest import LINK, TINY

# Of a machine nobody measured, so that tests need not.
MACHINE = Machine(
    host_memory_bytes_per_s=1e10, cpu_update_params_per_s=5e8, cpu_cast_params_per_s=1e9, gpu_memory_bytes=1e12
)


@dataclass(frozen=True)
class KeptBox(Box):
    """Keeps the devices that it makes."""

    made: list[EmulatedDevice] = field(default_factory=list)

    def make_device(self) -> EmulatedDevice | None:
        device = super().make_device()
        assert device is not None
        self.made.append(device)
        return device


def small(*policies: str, **more: Any) -> Comparison:
    asked = Asked(params=TINY, iterations=3, link_bytes_per_s=LINK, machine=MACHINE, policies=policies or None)
    return compare(replace(asked, **more))


def test_all_policies_run_and_their_losses_are_the_same(found: Comparison) -> None:
    assert [result.policy for result in found.results] == list(POLICIES)
    assert found.skipped == {}
    assert found.losses_equal
    first = found.results[0].losses
    assert len(first) == len(set(first)) == 5
    assert all(result.losses == first for result in found.results)


def test_phases_add_up_and_ratios_are_of_what_they_say(found: Comparison) -> None:
    for result in found.results:
        assert 1 <= result.counted <= found.iterations - found.warmup_iterations
        for schedule in (result.measured, result.predicted):
            assert min(schedule.forward_s, schedule.backward_s, schedule.update_s) > 0
            whole = schedule.forward_s + schedule.backward_s + schedule.update_s
            assert schedule.iteration_s == pytest.approx(whole)
        for phase, pair in result.times.items():
            assert pair.predicted == 1e3 * getattr(result.predicted, f"{phase}_s")
            assert pair.ratio == pair.measured / pair.predicted
        assert all(0 <= share <= 1 for pair in result.busy.values() for share in (pair.measured, pair.predicted))


def test_what_was_measured_went_by_the_plan_that_is_predicted(found: Comparison) -> None:
    for result in found.results:
        measured, predicted = result.measured, result.predicted
        assert measured.plan is predicted.plan
        assert predicted == simulate(measured.plan, predicted.workload, found.box.machine)
        assert predicted.workload.forward_s == found.results[0].predicted.workload.forward_s
        respects_the_plan(measured)


def respects_the_plan(schedule: Schedule) -> None:
    running: dict[str, float] = {}
    for op, start, end in sorted(schedule.items(), key=lambda item: (item[1], item[2])):
        assert 0 <= start <= end <= schedule.iteration_s
        assert start >= running.get(op.resource, 0.0)
        running[op.resource] = end
        assert all(schedule.ends[early] <= start for early in op.after)


def test_an_emulated_link_is_not_faster_than_it_is_set_to(found: Comparison) -> None:
    copies = [item for result in found.results for item in result.measured.items() if item[0].nbytes]
    assert len(copies) > 50
    assert all(end - start >= op.nbytes / LINK for op, start, end in copies)


def test_device_memory_is_what_the_device_saw() -> None:
    shape = shape_of(TINY)
    box = KeptBox(torch.device("cpu"), "emulated device", MACHINE, 12.0 * shape.params, LINK, 1)
    training = Training(shape, 0, 3, -(-shape.params // 7), lambda: None)
    for policy in ("twin-flow:0.5", "interleaved:2", "zero-offload"):
        run = run_policy(policy, training, box)
        assert max(schedule.peak_device_bytes for schedule in run.schedules) == box.made[-1].peak_bytes


def test_an_emulated_device_has_its_own_link_and_gpu_whatever_the_machine_file_says() -> None:
    asked = {"h2d_bytes_per_s": 1e12, "gpu_update_params_per_s": 1e12, "duplex_bytes_per_s": 1e12}
    machine = small("pipelined", machine=replace(MACHINE, **asked)).box.machine
    assert (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s, machine.duplex_bytes_per_s) == (LINK, LINK, None)
    assert machine.cpu_update_params_per_s == MACHINE.cpu_update_params_per_s


def test_a_device_that_computes_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    update = EmulatedDevice.update

    def wrong(self: Any, grad: Any, master: torch.Tensor, *rest: Any) -> None:
        update(self, grad, master, *rest)
        master.mul_(1 + 2**-7)

    monkeypatch.setattr(EmulatedDevice, "update", wrong)
    found = small("pipelined", "interleaved:2", "zero-offload", iterations=5)
    assert [result.losses_equal for result in found.results] == [True, False, True]
    assert not found.losses_equal
    assert found.as_json()["losses_equal"] is False


def test_what_has_no_room_is_left_out_unless_it_was_asked_for() -> None:
    tight = 12 * TINY / 2
    found = small(memory_budget=tight)
    assert list(found.skipped) == ["twin-flow:0.5"]
    assert "bytes" in found.skipped["twin-flow:0.5"]
    assert [result.policy for result in found.results] == [name for name in POLICIES if name not in found.skipped]
    with pytest.raises(UserError, match=r"policy twin-flow:0\.5 cannot run here: .*bytes"):
        small("pipelined", "twin-flow:0.5", memory_budget=tight)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"policies": ("magic",)}, "there is no policy 'magic'"),
        ({"peers": ("magic",)}, "--against 'magic': there are torch, deepspeed, torchao"),
        ({"iterations": 2}, "--iterations is at least 3"),
        ({"machine": Machine(name="empty")}, "machine empty .*has no host_memory_bytes_per_s, which compare needs"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(asked: dict[str, Any], says: str) -> None:
    told: list[str] = []
    with pytest.raises(UserError, match=says):
        compare(replace(Asked(params=TINY, link_bytes_per_s=LINK, **asked)), lambda name, *_: told.append(name))
    assert set(told) <= {"measuring this machine"}


def test_a_model_that_the_host_has_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"--params 200000 takes .* of host memory: it has 1\.00 MiB"):
        small()


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[tuple[str, int, int]] = []
    compare(
        Asked(("pipelined", "zero-offload"), 3, TINY, link_bytes_per_s=LINK, machine=MACHINE, peers=("torch",)),
        lambda *what: told.append(what),
    )
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert {total for _, _, total in told} == {9}
    assert told[-1] == ("torch", 9, 9)
    assert list(dict.fromkeys(name for name, _, _ in told))[1:] == ["pipelined", "zero-offload", "torch"]


def test_the_object_is_json_and_losses_that_are_no_numbers_are_null(found: Comparison) -> None:
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["device"]["emulated"] is True
    assert told["losses_equal"] is True
    assert [result["policy"] for result in told["results"]] == list(POLICIES)
    assert set(told["results"][0]["update_ms"]) == {"measured", "predicted", "ratio"}
    assert told["results"][0]["peak_device_bytes"] == {"measured": 0.0, "predicted": 0.0, "ratio": None}
