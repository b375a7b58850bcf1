"""Tests of passes over plans, by which features change the plans of policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import registry
from ebbtide.interleave.policies.registry import (
    Maker,
    Policy,
    as_policy,
    complete,
    make_plan,
)
from ebbtide.machines.machine import Machine
from tests.interleave.model.test_kinds import machine, workload


class Marking:
    """Adds its name to the remarks of plans."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.offers: dict[str, tuple[str, ...]] = {}
        self.in_memory = name == "inner"
        self.options = {name: ("off", "on")}

    def plan(
        self, make: Maker, policy: Policy, workload: Workload, machine: Machine
    ) -> Plan:
        return self.complete(make(policy, workload, machine), workload, machine)

    def complete(self, plan: Plan, workload: Workload, machine: Machine) -> Plan:
        return replace(plan, remark=f"{plan.remark} {self.name}")


@pytest.fixture(autouse=True)
def _passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "plan_passes", lambda: [Marking("outer"), Marking("inner")]
    )


def test_plan__goes_through_all_passes_from_the_inside() -> None:
    assert make_plan("pipelined", workload(), machine()).remark == " inner outer"
    assert (
        as_policy("pipelined").plan_in_memory(workload(), machine()).remark == " inner"
    )


def test_plan__goes_through_no_pass_that_the_policy_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = replace(registry.POLICIES["pipelined"], without=frozenset({"outer"}))
    monkeypatch.setitem(registry.POLICIES, "pipelined", without)
    assert make_plan("pipelined", workload(), machine()).remark == " inner"
    # It does itself what the pass adds.
    assert as_policy("pipelined").uses("outer")
    assert not as_policy("pipelined").uses("inner")


def test_complete__completes_a_plan_of_a_search_by_each_pass() -> None:
    plan = as_policy("pipelined").plan_in_memory(workload(), machine())
    assert complete(plan, workload(), machine()).remark == " inner outer inner"
