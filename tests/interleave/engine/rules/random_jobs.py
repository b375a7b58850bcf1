"""Random jobs of an update rule, under a plan and by the reference.

    python -m tests.interleave.engine.rules.random_jobs [FIRST_SEED [JOBS [RANKS [RULE ...]]]]

runs jobs of each rule and prints those whose bits differ. With several ranks, parameters are sharded (gloo, on the
CPU). The reference then has the shards of element-wise rules, and whole matrices."""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbtide.interleave.engine.numerics import reference, remainder
from ebbtide.interleave.engine.numerics.norm import sum_of_squares, total
from ebbtide.interleave.engine.numerics.rounding import FACTOR
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.interleave.engine.rules import RULES, UpdateRule, find_rule
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE

POLICIES = ("zero-offload", "pipelined", "twin-flow:0.4", "interleaved:2", "gpu-only", "adaptive")
HYPERPARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "adamw": {"betas": ((0.9, 0.999), (0.4, 0.5)), "weight_decay": (0.0, 0.1), "eps": (1e-8, 0.0)},
    "adamw-bf16": {
        "betas": ((0.9, 0.999), (0.4, 0.5)),
        "weight_decay": (0.0, 0.1),
        "stochastic_rounding": (True, False),
    },
    "adamw-8bit": {"betas": ((0.9, 0.999), (0.4, 0.5)), "weight_decay": (0.0, 0.1)},
    "adam": {"betas": ((0.9, 0.999), (0.4, 0.5)), "weight_decay": (0.0, 0.1), "eps": (1e-8, 0.0)},
    "lion": {"betas": ((0.9, 0.99), (0.5, 0.4)), "weight_decay": (0.0, 0.1)},
    "muon": {
        "momentum": (0.0, 0.4, 0.95),
        "nesterov": (True, False),
        "weight_decay": (0.0, 0.1),
        "adjust_lr_fn": (None, "match_rms_adamw"),
    },
    "sgd": {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)},
}
MOMENTUM = {"nesterov": (False, True)}, {"dampening": (0.0, 0.3)}


@dataclass
class ReferenceParam:
    """A parameter that the reference updates, flat, and its rule and hyperparameters."""

    param: torch.Tensor
    rule: UpdateRule
    group: dict[str, Any]
    number: int
    remainders: bool
    # That of the shards of a matrix.
    placement: Any = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.param.shape) if self.rule.finish is not None else None
        self.param = self.param.detach().reshape(-1)
        self.steps = 0
        self.state = self.rule.zero_rows(len(self.param), self.remainders)
        if not self.remainders:
            self.state[0].copy_(self.param)

    def step(self, gradient: torch.Tensor, scale: float) -> None:
        self.steps += 1
        update = remainder.update if self.remainders else reference.update
        scalars, position = self.rule.scalars(self.group, self.steps, scale), self.number * FACTOR
        update(gradient.reshape(-1), self.state, self.param, scalars, self.rule, position, self.shape)

    def own(self, row: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        """Return this rank's part of the parameter or of a row of its state, flat."""
        if self.placement is None:
            return row
        return distribute_tensor(row.reshape(self.shape), mesh, [self.placement]).to_local().reshape(-1)


def scale_of(gradients: list[torch.Tensor], max_norm: float | None, shards: Sequence[list[torch.Tensor]] = ()) -> float:
    """Return the factor of gradients; `shards` are those of each rank of the gradients that are sharded."""
    sums = list(map(sum_of_squares, gradients))
    sums += [total(total(map(sum_of_squares, own)) for own in shards)] if shards else []
    norm = math.sqrt(total(sums))
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def choose_group(rule: UpdateRule, choose: random.Random) -> dict[str, Any]:
    """Return hyperparameters of a rule."""
    group = {name: choose.choice(values) for name, values in HYPERPARAMETERS[rule.name].items()}
    if rule.name == "sgd" and group["momentum"]:
        group |= {name: choose.choice(values) for name, values in choose.choice(MOMENTUM).items()}
    return group | {"lr": choose.choice((1e-3, 0.1))}


def choose_shapes(rule: UpdateRule, choose: random.Random) -> list[tuple[int, ...]]:
    """Return the shapes of parameters of a rule."""
    count = choose.randint(1, 4)
    if rule.finish is None:
        return [(choose.randint(1, 1200 if rule.scales else 400),) for _ in range(count)]
    return [(choose.randint(1, 20), choose.randint(1, 20)) for _ in range(count)]


def check(rule: UpdateRule, seed: int, mixed: bool | None = None, mesh: DeviceMesh | None = None) -> str | None:
    """Run one job, and return what is wrong with it; None if all bits are those of the reference.

    `mixed`: whether a second group has another rule; None: often. `mesh`: the ranks that run it."""
    choose = random.Random(f"{rule.name} {seed}")
    streamed, remainders = choose.random() < 0.5, choose.random() < 0.25
    dtype = torch.bfloat16 if remainders else choose.choice((torch.bfloat16, torch.float32, torch.float16))
    # Gates of the forward are for shards of fully_shard only: see late_rank_jobs.
    late = [] if mesh is None else ["forward", "both"]
    overlaps = ["none", "forward"] + (["backward", "both"] if streamed and not remainders else [])
    overlaps = [overlap for overlap in overlaps if overlap not in late]
    policy, overlap = choose.choice(POLICIES), choose.choice(overlaps)
    if policy not in ("pipelined", "interleaved:2", "adaptive"):
        overlap = "none"
    max_norm = choose.choice((None, 0.5, 50.0))
    generator = torch.Generator().manual_seed(seed)
    hyperparameters = choose_group(rule, choose)
    own: list[torch.nn.Parameter] = []
    expected: list[ReferenceParam] = []
    groups = []
    # Often there is a second group, with another rule.
    is_mixed = choose.random() < 0.4 if mixed is None else mixed
    others = [find_rule(choose.choice(sorted(RULES.keys() - {rule.name})))] if is_mixed else []
    for group_rule, group in ((rule, hyperparameters), *((other, choose_group(other, choose)) for other in others)):
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in choose_shapes(group_rule, choose)]
        whole = {**group_rule.defaults, **group}
        numbers = range(len(own), len(own) + len(values))
        placements = [
            None if mesh is None else Shard(choose.randint(0, 1) if group_rule.finish is not None else 0)
            for _ in values
        ]
        params = [
            torch.nn.Parameter(sharded(value, mesh, placement))
            for value, placement in zip(values, placements, strict=True)
        ]
        expected += [
            ReferenceParam(value.clone(), group_rule, whole, number, remainders, placement)
            if group_rule.finish is not None
            else ReferenceParam(local_shard(param.detach()).clone(), group_rule, whole, number, remainders)
            for value, param, number, placement in zip(values, params, numbers, placements, strict=True)
        ]
        groups.append({"params": params} if not groups else {"params": params, "rule": group_rule.name, **group})
        own += params
    model = torch.nn.ParameterList(own)
    words = f"{[rule.name, *(other.name for other in others)]} {seed}: {policy}, overlap {overlap}, {dtype}, streamed "
    words += f"{streamed}, {remainders}, {hyperparameters}"
    with tempfile.TemporaryDirectory() as folder:
        optimizer = InterleavedOptimizer(
            groups,
            rule.name,
            policy=policy,
            machine=MACHINE,
            subgroup_params=choose.choice((50, 128, 1000)),
            memory_budget=None if policy != "adaptive" else choose.choice((0, 4000, 1e9)),
            max_grad_norm=max_norm,
            gradients="streamed" if streamed else "kept",
            overlap=overlap,
            model=model if overlap in ("forward", "both") else None,
            master="remainder" if remainders else "fp32",
            storage=folder if choose.random() < 0.2 and policy == "adaptive" else None,
            **hyperparameters,
        )
        try:
            for _ in range(5):
                whole = [torch.randn(param.shape, generator=generator).to(dtype) for param in own]
                factors = [
                    sharded(factor, mesh, param.placements[0]) if hasattr(param, "to_local") else factor
                    for param, factor in zip(own, whole, strict=True)
                ]
                for param, factor in zip(own, factors, strict=True):
                    (local_shard(param) * local_shard(factor)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scale = scale_of(*of_ranks(expected, whole, max_norm, mesh))
                for other, factor, gradient in zip(expected, factors, whole, strict=True):
                    other.step(gradient if other.placement is not None else local_shard(factor), scale)
            state = optimizer.state_dict()["state"]
            for index, (param, other) in enumerate(zip(own, expected, strict=True)):
                if not torch.equal(bits(local_shard(param.detach()).reshape(-1)), bits(other.own(other.param, mesh))):
                    return f"{words}: parameter {index}"
                for name, row in zip(other.rule.row_names[1:], other.state[1:], strict=True):
                    row = other.own(row, mesh)
                    if not torch.equal(bits(local_shard(state[index][name]).reshape(-1))[: len(row)], bits(row)):
                        return f"{words}: {name} of parameter {index}"
        finally:
            optimizer.close()
    return None


def sharded(value: torch.Tensor, mesh: DeviceMesh | None, placement: Any) -> torch.Tensor:
    """Return a copy of a tensor, of which each rank of a mesh has a part."""
    return value.clone() if mesh is None else distribute_tensor(value.clone(), mesh, [placement])


def of_ranks(
    params: list[ReferenceParam], gradients: list[torch.Tensor], max_norm: float | None, mesh: DeviceMesh | None
) -> tuple[list[torch.Tensor], float | None, list[list[torch.Tensor]]]:
    """Return the gradients that are not sharded or are gathered, and the parts of each rank of the others."""
    is_sharded = [mesh is not None and param.placement is None for param in params]
    whole = [gradient for gradient, is_part in zip(gradients, is_sharded, strict=True) if not is_part]
    parts = [gradient for gradient, is_part in zip(gradients, is_sharded, strict=True) if is_part]
    ranks = mesh.size() if mesh is not None else 0
    chunks = [[*gradient.chunk(ranks), *[gradient[:0]] * ranks][:ranks] for gradient in parts]
    return whole, max_norm, [[chunk[rank] for chunk in chunks] for rank in range(ranks)] if parts else []


def main(first: int = 0, jobs: int = 500, ranks: int = 1, rules: Sequence[str] = ()) -> None:
    if ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (ranks, folder, first, jobs, rules), nprocs=ranks)
        return
    for name in rules or sorted(RULES):
        wrong = [text for seed in range(first, first + jobs) if (text := check(find_rule(name), seed))]
        print(f"{name}: {len(wrong)} of {jobs} jobs differ", *wrong[:5], sep="\n  ", flush=True)


def run_rank(rank: int, ranks: int, folder: str, first: int, jobs: int, rules: Sequence[str]) -> None:
    """Run jobs on a rank, which raises RuntimeError if bits differ."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for name in rules or sorted(RULES):
        wrong = [text for seed in range(first, first + jobs) if (text := check(find_rule(name), seed, mesh=mesh))]
        if wrong:
            raise RuntimeError(f"{name}, rank {rank}: " + "\n".join(wrong[:5]))
        if rank == 0:
            print(f"{name}: none of {jobs} jobs on {ranks} ranks differ", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
