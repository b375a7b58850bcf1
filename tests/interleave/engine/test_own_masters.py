"""Parameters that are their own masters, fp32 ones and those of `adamw-pure-bf16`: the
bits of the reference."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.machines.machine import StoragePath
from tests.conftest import slow
from tests.interleave.engine.grid.reference import ReferenceOptimizer
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE, Job, throttle_cpu

POLICIES = (
    *("zero-offload", "pipelined", "interleaved:2", "gpu-only", "adaptive"),
    *(
        "pipelined,overlap=forward",
        "adaptive,overlap=backward",
        "adaptive,overlap=both",
    ),
)


DTYPE_OF = {"adamw": torch.float32, "adamw-pure-bf16": torch.bfloat16}


def optimizer_of(
    job: Job, policy: str, rule: str = "adamw", **options: Any
) -> InterleavedOptimizer:
    return InterleavedOptimizer(
        job.net.parameters(),
        rule,
        policy=policy,
        gradients="streamed",
        model=job.net,
        machine=MACHINE,
        subgroup_params=500,
        memory_budget=1e9 if policy == "gpu-only" else 20e3,
        threads=1,
        **options,
    )


@pytest.mark.parametrize(
    "policy", slow(POLICIES, but=("interleaved:2", "adaptive,overlap=both"))
)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("rule", DTYPE_OF)
def test_step__gives_the_bits_of_the_reference(
    rule: str, policy: str, max_norm: float | None
) -> None:
    """Clipped steps undo what was computed before, and edited parameters are read
    again."""
    job, same = Job(DTYPE_OF[rule]), Job(DTYPE_OF[rule])
    expected = ReferenceOptimizer(same.net.parameters(), rule, max_grad_norm=max_norm)
    with closing(optimizer_of(job, policy, rule, max_grad_norm=max_norm)) as optimizer:
        throttle_cpu(optimizer, lambda: 2e6)
        for step in range(8):
            job.step(optimizer, step)
            same.step(expected, step)
            if step % 3 == 2:
                optimizer.synchronize()
                for net in (job.net, same.net):
                    net.late.weight.data.mul_(0.5)
        optimizer.synchronize()
        for param, other in zip(
            job.net.parameters(), same.net.parameters(), strict=True
        ):
            assert torch.equal(bits(param.detach()), bits(other.detach()))
        saved = optimizer.state_dict()["state"]
        assert all(
            entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
            for entry in saved.values()
        )


@pytest.mark.parametrize(("rule", "nbytes"), [("adamw", 8), ("adamw-pure-bf16", 4)])
def test_state__has_the_moments_alone(rule: str, nbytes: int) -> None:
    job = Job(DTYPE_OF[rule])
    with closing(optimizer_of(job, "interleaved:2", rule)) as optimizer:
        job.step(optimizer, 0)
        params = sum(
            {id(param): param.numel() for param in job.net.parameters()}.values()
        )
        assert optimizer._runner.engine.store.states.host_bytes == nbytes * params
        fetched = next(op for op in optimizer.plan.ops if op.kind == "fetch")
        assert fetched.nbytes == nbytes * fetched.params


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_load_state_dict__follows_parameters_that_change_their_dtype(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """The state is loaded, and the model changes its dtype before the first step."""
    job, own = Job(dtypes[0]), Job(dtypes[0])
    with closing(optimizer_of(job, "pipelined")) as optimizer:
        for step in range(2):
            job.step(optimizer, step)
        saved = optimizer.state_dict()
    own.net.load_state_dict(job.net.state_dict())
    with closing(optimizer_of(own, "pipelined")) as optimizer:
        optimizer.load_state_dict(saved)
        own.net.to(dtypes[1])
        before = [param.detach().clone() for param in own.net.parameters()]
        for param in own.net.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        entries = optimizer.state_dict()["state"]
        for number, entry in entries.items():
            assert ("master" in entry) == (dtypes[1] != torch.float32)
            assert entry["step"] == 1 + (
                saved["state"][number]["step"] if number in saved["state"] else 0
            )
        assert any(
            not torch.equal(old, param)
            for old, param in zip(before, own.net.parameters(), strict=True)
        )


def test_storage__speculates_in_place_and_reads_the_parameters_again(
    tmp_path: Path,
) -> None:
    job, same = Job(torch.float32), Job(torch.float32)
    expected = ReferenceOptimizer(same.net.parameters(), "adamw", max_grad_norm=0.5)
    machine = replace(MACHINE, storage=(StoragePath(1e8, 1e8, path=str(tmp_path)),))
    with closing(
        InterleavedOptimizer(
            job.net.parameters(),
            policy="pipelined,overlap=backward",
            gradients="streamed",
            model=job.net,
            machine=machine,
            subgroup_params=500,
            max_grad_norm=0.5,
            threads=1,
            storage=tmp_path,
            host_memory_budget=45e3,
        )
    ) as optimizer:
        assert optimizer.plan.stored & optimizer.plan.speculated
        for step in range(6):
            job.step(optimizer, step)
            same.step(expected, step)
        for param, other in zip(
            job.net.parameters(), same.net.parameters(), strict=True
        ):
            assert torch.equal(bits(param.detach()), bits(other.detach()))


def test_adamw_pure_bf16__computes_what_torch_computes() -> None:
    """torch's fused kernel computes in fp32, too: results differ where fp32 roundings
    decide the one to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator).bfloat16()
    own, theirs = (torch.nn.Parameter(values.clone()) for _ in range(2))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    plain = torch.optim.AdamW([theirs], fused=True, **options)
    with closing(
        InterleavedOptimizer([own], "adamw-pure-bf16", policy="zero-offload", **options)
    ) as optimizer:
        for _ in range(5):
            gradient = torch.randn(20_000, generator=generator).bfloat16()
            own.grad, theirs.grad = gradient.clone(), gradient.clone()
            optimizer.step()
            plain.step()
            for mine, other in zip(
                (own, *_moments(optimizer)), (theirs, *_moments(plain)), strict=True
            ):
                assert other.dtype == torch.bfloat16
                assert (mine != other).float().mean() < 1e-3
        optimizer.load_state_dict(plain.state_dict())


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entry = optimizer.state_dict()["state"][0]
    return [entry["exp_avg"], entry["exp_avg_sq"]]


@pytest.mark.parametrize("rule", DTYPE_OF)
def test_plan__with_new_buffers_lets_no_update_run_ahead_without_the_parameters(
    rule: str,
) -> None:
    job, same = Job(DTYPE_OF[rule]), Job(DTYPE_OF[rule])
    expected = ReferenceOptimizer(same.net.parameters(), rule)
    with closing(optimizer_of(job, "pipelined,overlap=backward", rule)) as optimizer:
        for step in range(6):
            job.step(optimizer, step)
            same.step(expected, step)
            optimizer._runner.engine.store._buffers.clear()
            optimizer._runner.set_plan()
        for param, other in zip(
            job.net.parameters(), same.net.parameters(), strict=True
        ):
            assert torch.equal(bits(param.detach()), bits(other.detach()))
