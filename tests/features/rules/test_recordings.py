"""Recordings of jobs with any optimizer: the bytes of its state in the workload, and in
a replay."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import convert

from ebbtide.analysis.metrics.recorded_free_memory import state_bytes
from ebbtide.cli import run
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.rules import RULES
from ebbtide.interleave.engine.rules.rule import BLOCK
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler import Tracer, open_trace
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import OptimizerInfo, RankInfo
from tests.conftest import slow_case
from tests.features.advise.jobs import gpu_machine
from tests.features.dryrun.forked import run_forked
from tests.interleave.engine.training import MACHINE


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """A user's own optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
            param -= 1e-3 * moment.lerp(param.grad, 0.1).sign()
            moment.lerp_(param.grad, 0.01)


def train(
    model: torch.nn.Module, *optimizers: torch.optim.Optimizer, device: str = "cpu"
) -> None:
    for _ in range(3):
        model(torch.ones(4, 64, device=device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def record(
    folder: Path, model: torch.nn.Module, *optimizers: torch.optim.Optimizer
) -> Trace:
    with Tracer(folder / "job.ebb"):
        train(model, *optimizers)
    return open_trace(folder / "job.ebb")


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 32, bias=False)
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            ("adamw-8bit", torch.float32),
            ("muon", torch.float32),
            ("adamw-remainder", torch.bfloat16),
        ),
        *(
            slow_case(name, torch.float32)
            for name in sorted(RULES.keys() - {"adamw-8bit", "muon", "adamw-remainder"})
        ),
        slow_case("adamw-bf16", torch.bfloat16),
    ],
)
def test_replay_plan_and_dry_run__have_the_state_of_a_rule(
    name: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = new_model()
    if dtype == torch.bfloat16:
        model = model.bfloat16()
        model.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    rule, policy = RULES[name], "zero-offload"
    if dtype == torch.float32:
        rule = rule.without_masters
    with closing(
        InterleavedOptimizer(model.parameters(), name, policy=policy, machine=MACHINE)
    ) as optimizer:
        trace = record(tmp_path, model, optimizer)
        measured = optimizer._runner.engine.store.states.host_bytes
        (info,) = trace.rank(0).optimizers
        workload = workload_of(trace)
        blocks = dict.fromkeys(rule.scales, workload.params // BLOCK)
        rows = dict.fromkeys(
            rule.row_names[: rule.has_masters + len(rule.moments)], workload.params
        )
        assert info.state_names == {**rows, **blocks}
        assert workload.state_bytes == rule.state_bytes
        schedule = simulate(make_plan(policy, workload, MACHINE), workload, MACHINE)
        buffers = (workload.param_bytes + workload.grad_bytes) * workload.params
        assert schedule.host_bytes() - buffers == pytest.approx(measured, rel=0.01)
    (tmp_path / "job.json").write_text(json.dumps(workload.as_json()))
    gpu_machine().save(tmp_path / "machine.json")
    options = [
        "--machine",
        str(tmp_path / "machine.json"),
        "--policy",
        policy,
        "--json",
    ]
    assert run(["plan", "--workload", str(tmp_path / "job.json"), *options]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["host_bytes"] - buffers == pytest.approx(measured, rel=0.01)
    if dtype == torch.float32:
        assert run_forked(lambda: dry_run_state_bytes(name)) == pytest.approx(
            measured / workload.params, rel=0.01
        )


def dry_run_state_bytes(name: str) -> float:
    """Return the bytes of state per parameter that a dry run of a job with a rule
    has."""
    with DryRun(DryRunOptions(iterations=2)) as dry_run:
        model = new_model()
        with closing(
            InterleavedOptimizer(
                model.parameters(), name, policy="zero-offload", machine=MACHINE
            )
        ) as own:
            train(model, own)
    infos = tuple(convert(optimizer, OptimizerInfo) for optimizer in dry_run.optimizers)
    return state_bytes(RankInfo(rank=0, optimizers=infos), own_masters=True)


OPTIMIZERS = pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        # fp32 parameters are their own masters; the rule `sgd` has a momentum in any
        # case.
        ([lambda params: torch.optim.SGD(params, lr=0.1)], 4),
        ([lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)], 4),
        ([Lion], 4),
        ([torch.optim.AdamW], 8),
        # 8,192 parameters with one moment, 4,096 with two.
        (
            [
                lambda params: Lion(params[:1]),
                lambda params: torch.optim.AdamW(params[1:]),
            ],
            (8192 * 4 + 4096 * 8) / 12288,
        ),
    ],
)


@OPTIMIZERS
def test_workload_of__has_the_state_of_other_optimizers(
    optimizers: list[Any], expected: float, tmp_path: Path
) -> None:
    model = new_model()
    params = list(model.parameters())
    workload = workload_of(
        record(tmp_path, model, *(make(params) for make in optimizers))
    )
    assert workload.state_bytes == pytest.approx(expected)


@OPTIMIZERS
def test_dry_run__has_the_state_of_other_optimizers(
    optimizers: list[Any], expected: float
) -> None:
    def describe() -> list[dict[str, Any]]:
        with DryRun(DryRunOptions(iterations=2)) as dry_run:
            model = new_model().to("cuda")
            params = list(model.parameters())
            train(model, *(make(params) for make in optimizers), device="cuda")
        return dry_run.optimizers

    described = run_forked(describe)
    assert {
        device for optimizer in described for device in optimizer["state_devices"]
    } <= {"cpu", "cuda"}
    entry = RankInfo(
        rank=0,
        optimizers=tuple(convert(optimizer, OptimizerInfo) for optimizer in described),
    )
    assert state_bytes(entry, own_masters=True) == pytest.approx(expected)
