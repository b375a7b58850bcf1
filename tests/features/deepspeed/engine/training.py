"""A small job for DeepSpeed, plain or driven by ebbtide."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ebbtide.interleave.deepspeed import disable, enable


def import_muon() -> None:
    """Import DeepSpeed's Muon, as every engine does, without what compiles its
    products: that takes as long as all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function: function)
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


# Slices of this size cut DeepSpeed's subgroups of 9,000 elements or more at unaligned
# positions.
SLICE = 5_003
WIDTH = 48


class Model(nn.Module):  # type: ignore[misc]
    """A model with odd sizes, so that ranks have padding."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 97), nn.GELU(), nn.Linear(97, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            else:
                x = x + block(x)
        return self.head(x)


def config(dtype: str = "bf16", accumulate: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a configuration as a user of ZeRO-Offload writes it."""
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "sub_group_size": 9_000,
        "stage3_param_persistence_threshold": 100,
    }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4},
        },
        "steps_per_print": 1_000_000,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    zero.update(changes.pop("zero", {}))
    return {**settings, **changes}


@contextmanager
def engine(
    policy: str | None,
    settings: dict[str, Any],
    seed: int = 0,
    make_model: Callable[..., nn.Module] = Model,
    **options: Any,
) -> Iterator[Any]:
    """Yield a DeepSpeed engine, driven by a policy or plain. Options are for the model
    and for `enable`.

    Late updates are slow, so that steps return long before they have ended."""
    import cpuinfo
    import deepspeed

    # DeepSpeed calls it for every CPU Adam, and it takes a second.
    if not hasattr(cpuinfo.get_cpu_info, "cache_clear"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    model_options = {
        name: options.pop(name) for name in ("checkpointing",) if name in options
    }
    torch.manual_seed(seed)
    model = make_model(**model_options)
    try:
        if policy is not None:
            enable(
                policy,
                subgroup_params=options.pop("subgroup_params", SLICE),
                beside=True,
                **options,
            )
        created, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
    finally:
        disable()
    if "forward" in f"{policy} {options.get('overlap')}":
        replace_update(created, lambda: time.sleep(1e-3))
    try:
        yield created
    finally:
        created.destroy()


def replace_update(engine: Any, before: Callable[[], object]) -> None:
    """Call a function before each update on the CPU."""
    kernel = engine.optimizer._runner.kernel
    update = kernel.update_ranges

    def update_after(*arguments: Any) -> None:
        before()
        update(*arguments)

    kernel.update_ranges = update_after


def batches(
    engine: Any, count: int, seed: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(seed + 100 * rank)
    dtype = next(engine.module.parameters()).dtype
    for _ in range(count):
        x, y = (
            torch.randn(4, WIDTH, generator=generator),
            torch.randint(0, 7, (4,), generator=generator),
        )
        yield x.to(engine.device, dtype), y.to(engine.device)


def loss_of(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(engine(batch[0]).float(), batch[1])


def train(engine: Any, steps: int, seed: int = 1) -> list[float]:
    """Train some optimizer steps; return the loss of each micro-step."""
    losses = []
    for batch in batches(engine, steps * engine.gradient_accumulation_steps(), seed):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine: Any) -> list[torch.Tensor]:
    """Return copies of the masters, moments and parameters of this rank, without
    padding (its values are arbitrary)."""
    optimizer = engine.optimizer
    copies = []
    for group, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        moments = optimizer.optimizer.state[master]
        tensors = [
            master.detach(),
            optimizer.fp16_partitioned_groups_flat[group].detach(),
        ]
        tensors += [
            moments[name]
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
            if name in moments
        ]
        sizes = [tensor.numel() for tensor in optimizer.fp16_partitioned_groups[group]]
        for tensor in tensors:
            for part, padding in zip(
                tensor.split(sizes), optimizer.groups_padding[group], strict=True
            ):
                copies.append(part[: len(part) - padding].clone())
    return copies


def digest(engine: Any) -> str:
    sha256 = hashlib.sha256()
    for tensor in state(engine):
        sha256.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


class OneStep(NamedTuple):
    """The masters after one step from one checkpoint, of plain DeepSpeed and of
    ebbtide, and where they are apart."""

    theirs: torch.Tensor
    ours: torch.Tensor
    # By more than 4 ulp of the larger of master and learning rate.
    is_apart: torch.Tensor
    digest: str  # Of ebbtide's.


def masters(engine: Any) -> torch.Tensor:
    return torch.cat(
        [
            master.detach().clone()
            for master in engine.optimizer.fp32_partitioned_groups_flat
        ]
    )


def step_beside_deepspeed(
    settings: dict[str, Any], steps: int, folder: Path
) -> OneStep:
    """Train plain DeepSpeed, and then one step with the same gradients there and in
    ebbtide, whose checkpoint is `driven`."""
    with engine(None, settings) as before:
        train(before, steps)
        before.save_checkpoint(folder, tag="plain")
    results = []
    for policy in (None, "interleaved:2"):
        with engine(policy, settings, seed=5) as running:
            running.load_checkpoint(folder, tag="plain")
            train(running, 1, seed=9)
            results.append(masters(running))
            lr, of_last = running.get_lr()[0], digest(running)
            if policy is not None:
                running.save_checkpoint(folder, tag="driven")
    theirs, ours = results
    size = torch.maximum(theirs.abs(), torch.tensor(lr))
    ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
    return OneStep(theirs, ours, (ours - theirs).abs() > 4 * ulp, of_last)
