"""The rules on DeepSpeed's own step: reported where it is slow, with the time that a
change would save."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Finding, Rule, Unknown
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.deepspeed.findings.gradients import (
    blocking_gradients,
    gradient_round_trip,
)
from ebbtide.features.deepspeed.findings.update import (
    pageable_masters,
    passes_beside_adam,
    twin_flow_ratio,
)
from tests.analysis.findings.jobs import PARAMS, async_copies, offloaded
from tests.analysis.metrics.deepspeed_jobs import (
    GIB,
    PEAK,
    SIZE,
    deepspeed_job,
    update_ms,
)

RULES = (gradient_round_trip, pageable_masters, passes_beside_adam, twin_flow_ratio)


def check(rule: Rule, **job: Any) -> Finding | Unknown | None:
    return rule(JobMetrics(deepspeed_job(**job).build()))


def expect(rule: Rule, **job: Any) -> Finding:
    result = check(rule, **job)
    assert isinstance(result, Finding), result
    return result


def test_twin_flow_ratio__names_both_shares_and_advises_finer_subgroups() -> None:
    devices = ("cuda", "cpu", "cpu")
    finding = expect(twin_flow_ratio, sizes=(SIZE,) * 3, ratio=0.5, devices=devices)
    assert finding.potential_gain_ms == pytest.approx(
        update_ms(3) * (2 / 3 - 0.5) / (2 / 3)
    )
    assert (
        "the configured share on the CPU is 0.5; it is 0.67: more than configured"
        in finding.evidence[0]
    )
    assert "has 3 (of 100 M to 100 M parameters)" in finding.evidence[1]
    assert (
        '"sub_group_size": 75000000 makes about 4 of them, a share of 0.50'
        in finding.advice
    )
    # Devices that were not recorded follow from DeepSpeed's own rounding.
    assert (
        expect(twin_flow_ratio, sizes=(SIZE,) * 3, ratio=0.5, devices=("cpu",)).evidence
        == finding.evidence
    )


def test_twin_flow_ratio__has_no_gain_if_less_is_on_cpu() -> None:
    sizes = (4 * SIZE, SIZE, SIZE, SIZE)
    finding = expect(
        twin_flow_ratio, sizes=sizes, ratio=0.75, devices=("cuda", "cpu", "cpu", "cpu")
    )
    assert finding.potential_gain_ms is None
    assert "it is 0.43: less than configured" in finding.evidence[0]


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
def test_twin_flow_ratio__is_none_if_split_matches(job: dict[str, Any]) -> None:
    assert check(twin_flow_ratio, **job) is None


def test_pageable_masters__gain_is_time_saved_at_link_peak() -> None:
    finding = expect(pageable_masters)
    assert finding.potential_gain_ms == pytest.approx(100 - 10 * SIZE / PEAK * 1e3)
    assert (
        "`parameters` takes 100.0 ms per iteration for 953.67 MiB: 10 GB/s, over a "
        "link that carries 50 GB/s" in (finding.evidence[0])
    )
    assert finding.evidence[2] == "a pageable copy runs for 75 % of that time"
    assert "`ebbtide.interleave.deepspeed.enable(policy=" in finding.advice
    assert len(expect(pageable_masters, copies=False).evidence) == 2
    for job in ({"masters_pinned": True}, {"masters_pinned": None}, {"gpu": False}):
        assert check(pageable_masters, **job) is None


@pytest.mark.parametrize(("gpu", "gain_ms"), [(True, 40 + 100 - 20), (False, 140)])
def test_passes_beside_adam__gain_is_at_most_their_sum(
    gpu: bool, gain_ms: float
) -> None:
    finding = expect(passes_beside_adam, gpu=gpu)
    assert finding.potential_gain_ms == pytest.approx(gain_ms)
    assert (
        "`unscale` takes 40.0 ms and `parameters` 100.0 ms, in addition to 200.0 ms"
        in finding.evidence[0]
    )
    assert finding.evidence[1].startswith(
        f"{100 * (1 - 200 / 360):.0f} % of the update, 360.0 ms"
    )


def test_gradient_round_trip__gain_is_time_of_excess_bytes() -> None:
    finding = expect(gradient_round_trip)
    # Of 6 B down 4 are too many, and 2 B go up, at the peak: 40 ms and 20 ms.
    assert finding.potential_gain_ms == pytest.approx(60)
    assert (
        "2.79 GiB go down, 6.0 B a parameter, and 953.67 MiB up" in finding.evidence[0]
    )
    result = check(gradient_round_trip, copies=False)
    assert isinstance(result, Unknown)
    assert "--transfers" in result.record
    for job in ({"stage": 2}, {"policy": "adaptive"}, {"gpu": False}):
        assert check(gradient_round_trip, **job) is None


def test_gradient_round_trip__is_none_if_gradients_go_down_once() -> None:
    job = offloaded().copy("d2h", "backward", 10, 40, 2 * PARAMS)
    assert job.result(gradient_round_trip) is None
    # Parameters that are offloaded too go up in the backward: those bytes are not
    # gradients.
    job = (
        offloaded()
        .copy("d2h", "backward", 10, 60, 6 * PARAMS)
        .copy("h2d", "backward", 10, 90, 2 * PARAMS)
    )
    job.builder.meta["deepspeed"]["config"]["zero_optimization"]["offload_param"] = {
        "device": "cpu"
    }
    assert job.finding(gradient_round_trip).potential_gain_ms == pytest.approx(40)


def test_blocking_gradients__uses_measured_sub_step() -> None:
    finding = expect(blocking_gradients)
    assert finding.potential_gain_ms == 20
    assert (
        "`gradient down` keeps the host for 20.0 ms of the backward's 300.0 ms"
        in finding.evidence[0]
    )


@pytest.mark.parametrize("rule", RULES)
def test_deepspeed_rules__are_none_without_sub_steps(rule: Rule) -> None:
    assert async_copies(offloaded(ratio=0.5)).result(rule) is None


def subgroups_of(tensors: list[int], sub_group_size: int) -> list[int]:
    """Group whole tensors as DeepSpeed's ZeRO-3 does (`_create_fp16_sub_groups`)."""
    groups = [0]
    for tensor in tensors:
        if groups[-1] >= sub_group_size:
            groups.append(0)
        groups[-1] += tensor
    return groups


@pytest.mark.parametrize(("layers", "fits"), [(5, True), (6, False)])
def test_twin_flow_ratio__advises_a_size_that_gives_more_subgroups_if_their_share_fits(
    layers: int, fits: bool
) -> None:
    # The layers of a 7 B model: subgroups of 100 M become about 1.3 times as large. 10
    # GiB are always free.
    tensors = [*([16_777_216] * 4 + [45_088_768] * 3) * layers, 131_072_000]
    config = {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e8,
            "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        }
    }
    sizes = tuple(subgroups_of(tensors, 10**8))
    assert (16 * sum(sizes) / 2 < 10 * GIB) == fits
    devices = ("cpu",) * len(sizes)
    finding = expect(
        twin_flow_ratio, sizes=sizes, ratio=0.5, devices=devices, config=config
    )
    if not fits:
        assert "the device has no memory for the share" in finding.advice
        return
    advised = int(finding.advice.partition('"sub_group_size": ')[2].split()[0])
    assert advised < 10**8
    assert len(subgroups_of(tensors, advised)) > len(sizes)
