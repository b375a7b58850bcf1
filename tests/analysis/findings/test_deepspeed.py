"""What DeepSpeed's own step costs: found where it is there, and worth what it would save."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Finding, Rule, Unknown
from ebbtide.analysis.findings.deepspeed import (
    gradient_round_trip,
    pageable_masters,
    passes_beside_adam,
    twin_flow_ratio,
)
from ebbtide.analysis.findings.gradients import blocking_gradients
from ebbtide.analysis.metrics.trace_metrics import Study
from tests.analysis.findings.jobs import PARAMS, async_copies, offloaded
from tests.analysis.metrics.deepspeed_jobs import PEAK, SIZE, deepspeed_job, update_ms

RULES = (gradient_round_trip, pageable_masters, passes_beside_adam, twin_flow_ratio)


def says(rule: Rule, **job: Any) -> Finding | Unknown | None:
    return rule(Study(deepspeed_job(**job).build()))


def finding(rule: Rule, **job: Any) -> Finding:
    said = says(rule, **job)
    assert isinstance(said, Finding), said
    return said


def test_a_split_that_is_not_what_was_asked_for_says_both_and_what_would_come_near() -> None:
    devices = ("cuda", "cpu", "cpu")
    found = finding(twin_flow_ratio, sizes=(SIZE,) * 3, ratio=0.5, devices=devices)
    assert found.worth_ms == pytest.approx(update_ms(3) * (2 / 3 - 0.5) / (2 / 3))
    assert "a share of 0.5 on the CPU; it is 0.67: more than asked" in found.evidence[0]
    assert "has 3 (of 100 M to 100 M parameters)" in found.evidence[1]
    assert '"sub_group_size": 75000000 makes about 4 of them, a share of 0.50' in found.advice
    # Devices that were not recorded follow from DeepSpeed's own rounding.
    assert finding(twin_flow_ratio, sizes=(SIZE,) * 3, ratio=0.5, devices=("cpu",)).evidence == found.evidence


def test_less_on_the_cpu_than_asked_for_costs_memory_not_time() -> None:
    sizes = (4 * SIZE, SIZE, SIZE, SIZE)
    found = finding(twin_flow_ratio, sizes=sizes, ratio=0.75, devices=("cuda", "cpu", "cpu", "cpu"))
    assert found.worth_ms is None
    assert "it is 0.43: less than asked" in found.evidence[0]


@pytest.mark.parametrize(
    "job",
    [
        {"ratio": 0.6, "devices": ("cuda",) * 2 + ("cpu",) * 3},
        {"ratio": 1.0},
        {"ratio": 0.5, "devices": ("cuda",) * 2 + ("cpu",) * 3, "policy": "adaptive"},
        {"ratio": 0.5, "gpu": False},
        {"ratio": 0.5, "stage": 2},
    ],
)
def test_a_split_as_asked_for_or_none_is_no_finding(job: dict[str, Any]) -> None:
    assert says(twin_flow_ratio, **job) is None


def test_pageable_masters_are_worth_what_the_link_would_save() -> None:
    found = finding(pageable_masters)
    assert found.worth_ms == pytest.approx(100 - 10 * SIZE / PEAK * 1e3)
    assert (
        "`parameters` takes 100.0 ms per iteration for 953.67 MiB: 10 GB/s, over a link that carries 50 GB/s"
        in (found.evidence[0])
    )
    assert found.evidence[2] == "a pageable copy runs for 75 % of that time"
    assert "`ebbtide.interleave.deepspeed.enable(policy=" in found.advice
    assert len(finding(pageable_masters, copies=False).evidence) == 2
    for job in ({"masters_pinned": True}, {"masters_pinned": None}, {"gpu": False}):
        assert says(pageable_masters, **job) is None


@pytest.mark.parametrize(("gpu", "worth"), [(True, 40 + 100 - 20), (False, 140)])
def test_passes_beside_the_kernel_are_worth_at_most_their_sum(gpu: bool, worth: float) -> None:
    found = finding(passes_beside_adam, gpu=gpu)
    assert found.worth_ms == pytest.approx(worth)
    assert "`unscale` takes 40.0 ms and `parameters` 100.0 ms, beside 200.0 ms" in found.evidence[0]
    assert found.evidence[1].startswith(f"{100 * (1 - 200 / 360):.0f} % of the update, 360.0 ms")


def test_gradients_that_go_there_and_back() -> None:
    found = finding(gradient_round_trip)
    # Of 6 B down 4 are too many, and 2 B go up, at the peak: 40 ms and 20 ms.
    assert found.worth_ms == pytest.approx(60)
    assert "2.79 GiB go down, 6.0 B a parameter, and 953.67 MiB up" in found.evidence[0]
    said = says(gradient_round_trip, copies=False)
    assert isinstance(said, Unknown)
    assert "--transfers" in said.record
    for job in ({"stage": 2}, {"policy": "adaptive"}, {"gpu": False}):
        assert says(gradient_round_trip, **job) is None


def test_gradients_that_go_down_once_are_as_few_as_can_be() -> None:
    job = offloaded().copy("d2h", "backward", 10, 40, 2 * PARAMS)
    assert job.says(gradient_round_trip) is None
    # Parameters that are offloaded too go up in the backward: that is not the gradients' way back.
    job = offloaded().copy("d2h", "backward", 10, 60, 6 * PARAMS).copy("h2d", "backward", 10, 90, 2 * PARAMS)
    job.builder.meta["deepspeed"]["config"]["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert job.finding(gradient_round_trip).worth_ms == pytest.approx(40)


def test_how_long_the_host_copied_gradients_is_measured_not_guessed() -> None:
    found = finding(blocking_gradients)
    assert found.worth_ms == 20
    assert "`gradient down` keeps the host for 20.0 ms of the backward's 300.0 ms" in found.evidence[0]


@pytest.mark.parametrize("rule", RULES)
def test_jobs_without_sub_steps_have_no_such_trouble(rule: Rule) -> None:
    assert async_copies(offloaded(ratio=0.5)).says(rule) is None
