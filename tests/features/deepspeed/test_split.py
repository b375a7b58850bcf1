"""Rounding of Twin-Flow's ratio to whole subgroups, and its gradients."""

from dataclasses import replace

import pytest

from ebbtide.analysis.metrics.state_split import Framework, split_of
from ebbtide.features.deepspeed.split import version_numbers
from ebbtide.interleave.model.workload import workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even

ROUNDINGS = [
    (1.0, 5, 0, 0),
    (0.0, 5, 5, 5),
    (0.5, 5, 2, 3),
    (0.3, 10, 7, 7),
    (0.9, 10, 0, 1),
    (0.5, 1, 0, 1),
    (0.5, 31, 15, 16),
    (0.8, 31, 6, 7),
]


def test_resident__rounds_as_deepspeed_does() -> None:
    """(1 - 0.9) * 10 is just less than 1; the published logs are of 0.13.3 with 31
    subgroups."""
    for ratio, count, resident, resident_before_0_18 in ROUNDINGS:
        for version in ("", "0.18.0", "0.19.8", "1.0", "unknown"):
            assert split_of(Framework("deepspeed", version)).resident(
                ratio, count
            ) == range(resident)
        for version in ("0.12.3", "0.13.3+895a05c1", "0.17.6"):
            last = range(count - resident_before_0_18, count)
            assert (
                split_of(Framework("deepspeed", version)).resident(ratio, count) == last
            )


def test_gradient_bytes__are_those_of_zero_3() -> None:
    split = split_of(Framework("deepspeed", "0.19.8"))
    assert split.gradient_bytes([3, 2], grad_bytes=2.0, offloads=True) == 4 * 5
    assert (
        split.gradient_bytes([3, 2], grad_bytes=2.0, offloads=False)
        == 2 * 5 + (2 + 4) * 3
    )
    assert split.gradient_bytes([], grad_bytes=2.0, offloads=False) == 0


VERSIONS = [
    (None, ()),
    ("", ()),
    ("unknown", ()),
    ("0.13.3+895a05c1", (0, 13, 3)),
    ("0.19", (0, 19)),
    ("1.2.dev0", (1, 2)),
]


def test_version_numbers__reads_the_leading_numbers() -> None:
    for version, numbers in VERSIONS:
        assert version_numbers(version) == numbers


def test_workload_from__reads_the_version_that_as_json_writes() -> None:
    for version in (None, "", "0.13.3"):
        values = even(10).as_json() | {"deepspeed_version": version}
        workload = workload_from(values, "workload.json")
        assert workload.framework == (
            None if version is None else Framework("deepspeed", version)
        )
        assert workload.as_json()["deepspeed_version"] == version


@pytest.mark.parametrize(
    ("ratio", "old", "current"),
    [
        ("0", range(10), range(10)),
        ("0.41", range(4, 10), range(5)),
        ("0.5", range(5, 10), range(5)),
        ("0.8", range(8, 10), range(1)),
        ("0.9", range(9, 10), range(0)),
        ("1", range(0), range(0)),
    ],
)
def test_twin_flow__chooses_residents_by_the_version_of_the_recorded_job(
    ratio: str, old: range, current: range
) -> None:
    """1 - 0.9 and 1 - 0.8 are just less than 0.1 and 0.2 in floating point, so
    DeepSpeed rounds down."""
    for version, resident in (
        ("0.13.3+c7da512a", old),
        ("0.17.6", old),
        ("0.18.0", current),
        (None, current),
    ):
        workload = replace(
            even(10), framework=version and Framework("deepspeed", version)
        )
        for policy_text in (f"twin-flow:{ratio}", f"interleaved:2@{ratio}"):
            plan = make_plan(policy_text, workload, TEST_MACHINE)
            assert plan.resident == frozenset(resident), (policy_text, version)


def test_twin_flow__updates_residents_when_the_loop_comes_to_them() -> None:
    """DeepSpeed before 0.18 keeps the last subgroups resident: their updates follow
    those of the CPU."""
    for policy_text in ("twin-flow:0.5", "interleaved:2@0.5"):
        ends = {}
        for version in ("0.13.3", "0.18.0"):
            workload = replace(
                even(10), framework=version and Framework("deepspeed", version)
            )
            schedule = simulate(
                make_plan(policy_text, workload, TEST_MACHINE), workload, TEST_MACHINE
            )
            ends[version] = schedule.update_s
        resident_s = 5 * 10**8 / (TEST_MACHINE.gpu_update_params_per_s or 1.0)
        assert ends["0.13.3"] == pytest.approx(ends["0.18.0"] + resident_s, rel=1e-6), (
            policy_text
        )
