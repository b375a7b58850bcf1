"""Memory and phases of the ways to train, in a dry run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import (
    BATCH,
    LAYER_BYTES,
    WIDTH,
    dry_run,
    held_bytes,
    train,
)


@pytest.mark.parametrize(
    ("dtype", "head", "mask", "kernel"),
    [
        (torch.bfloat16, 64, False, "flash"),
        (torch.float32, 64, False, "efficient"),
        (torch.bfloat16, 64, True, "efficient"),
        (torch.float32, 33, False, "math"),
    ],
)
def test_attention__is_that_which_cuda_chooses(
    dtype: torch.dtype, head: int, mask: bool, kernel: str
) -> None:
    length = 512

    def job() -> int:
        q, k, v = (
            torch.randn(
                2, 4, length, head, device="cuda", dtype=dtype, requires_grad=True
            )
            for _ in range(3)
        )
        bias = (
            torch.ones(length, length, dtype=torch.bool, device="cuda")
            if mask
            else None
        )
        before = torch.cuda.memory_allocated()
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=not mask
        )
        out.float().sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
        return before

    def observe() -> Any:
        run, _ = dry_run(job)
        scores = 2 * 4 * length * length * dtype.itemsize
        return dict(run.attention.counts), any(
            block.size == scores for block in run.memory.blocks
        )

    # Only the kernel that is not fused makes the matrix of scores.
    assert run_forked(observe) == ({kernel: 1}, kernel == "math")


@pytest.mark.parametrize(
    ("options", "temporaries"), [({"foreach": False}, 3), ({}, 8), ({"fused": True}, 0)]
)
def test_adamw__has_the_temporaries_of_its_implementation(
    options: dict[str, bool], temporaries: int
) -> None:
    layers = 8

    def job() -> None:
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        ).cuda()
        train(model, torch.optim.AdamW(model.parameters(), **options))

    def observe() -> Any:
        run, _ = dry_run(job)
        update = run.tracker.phases[-1]
        inside = [
            row[1]
            for row in run.memory.timeline
            if update.start_ns <= row[0] <= update.end_ns
        ]
        before = [row[1] for row in run.memory.timeline if row[0] < update.start_ns][-1]
        return (max([before, *inside]) - before) / (4 * WIDTH * WIDTH)

    assert run_forked(observe) == pytest.approx(temporaries, abs=0.1)


def test_autocast__keeps_half_precision_copies_of_weights_during_the_forward() -> None:
    def job() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).cuda()
        train(model, torch.optim.AdamW(model.parameters()), dtype=torch.bfloat16)

    def observe() -> Any:
        run, _ = dry_run(job)
        forward = run.tracker.phases[3]
        return [
            block.size
            for block in run.memory.blocks
            if forward.start_ns <= block.start_ns <= forward.end_ns
            and block.size == 2 * WIDTH * WIDTH
        ]

    assert run_forked(observe) == [2 * WIDTH * WIDTH]


def test_checkpointing__saves_the_activations_inside_of_blocks() -> None:
    from torch.utils.checkpoint import checkpoint

    class Blocks(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.recompute = recompute
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    *(
                        layer
                        for _ in range(8)
                        for layer in (nn.Linear(64, 64), nn.GELU())
                    )
                )
                for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = (
                    checkpoint(block, x, use_reentrant=False)
                    if self.recompute
                    else block(x)
                )
            return x

    def job(recompute: bool) -> None:
        model = Blocks(recompute).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.randn(4096, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def observe() -> Any:
        runs = [
            dry_run(lambda recompute=recompute: job(recompute))[0]
            for recompute in (False, True)
        ]
        assert [phase.phase for phase in runs[1].tracker.phases[:3]] == [
            "forward",
            "backward",
            "update",
        ]
        return [run.memory.most_bytes for run in runs]

    plain, recomputed = run_forked(observe)
    activation = 4 * 4096 * 64
    # 64 saved tensors, against 4 inputs and the 16 of one block.
    assert plain - recomputed == pytest.approx(
        (64 - 20) * activation, abs=4 * activation
    )


def test_grad_scaler__steps_since_gradients_count_as_finite() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer, scaler = (
            torch.optim.AdamW(model.parameters(), fused=True),
            torch.amp.GradScaler("cuda"),
        )
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(BATCH, WIDTH, device="cuda")).float().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def observe() -> Any:
        run, _ = dry_run(job)
        return held_bytes(run, "optimizer_state"), [
            phase.phase for phase in run.tracker.phases
        ]

    # Two moments of each parameter, and a step of 4 B for each of the two.
    assert run_forked(observe) == (
        2 * LAYER_BYTES + 8,
        ["forward", "backward", "update"] * 2,
    )


def test_closure__has_phases_of_its_own_inside_the_update() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(BATCH, WIDTH, device="cuda")).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    phases = run_forked(
        lambda: [(p.phase, p.iteration) for p in dry_run(job)[0].tracker.phases]
    )
    kinds = [phase for phase, iteration in phases if iteration == 1]
    assert kinds[-3:] == ["forward", "backward", "update"]
    assert kinds.count("backward") == 1
