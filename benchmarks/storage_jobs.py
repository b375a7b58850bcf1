"""The jobs that `storage.py` compares: one model with state in files, by DeepSpeed's
ZeRO-Infinity and by ebbtide."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rival_jobs import build_model

# Buffers of a subgroup's fp32 numbers that DeepSpeed needs to read ahead and write
# behind.
BUFFERS = 12
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
BEST = "ZeRO-Infinity, pipelines, gradients in host memory"
# Name -> (changes to offload_optimizer, whether gradients stay in host memory).
DEEPSPEED: dict[str, tuple[dict[str, Any], bool]] = {
    "ZeRO-Infinity, defaults": ({}, False),
    "ZeRO-Infinity, pipelines": (
        {"pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFERS},
        False,
    ),
    BEST: (
        {"pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFERS},
        True,
    ),
}
# Name -> (overlap, rule).
EBBTIDE = {
    "ebbtide": ("none", "adamw"),
    "ebbtide, overlap=forward": ("forward", "adamw"),
    "ebbtide, adamw-remainder": ("none", "adamw-remainder"),
}
NAMES = (*DEEPSPEED, *EBBTIDE)
_WARM_UP = 3


def block_params(width: int) -> int:
    """Return the parameters of a block of the model, which is a subgroup of
    DeepSpeed's."""
    return 8 * width**2 + 5 * width


def host_bytes(width: int, blocks: int) -> int:
    """Return the host memory of DeepSpeed's best configuration: its buffers, and fp32
    gradients."""
    return 4 * BUFFERS * block_params(width) + 4 * blocks * block_params(width)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a job; return medians of ms and bytes per step, the losses, and the peak of
    its memory."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        make = _ebbtide_job if name in EBBTIDE else _deepspeed_job
        iterate = make(name, folder, args)
        values: dict[str, list[float]] = {
            key: [] for key in ("step", "iteration", "read", "written")
        }
        losses = []
        for _ in range(args.steps + _WARM_UP):
            before, begin_s = _io_bytes(), time.perf_counter()
            loss, step_s = iterate()
            end_s, after = time.perf_counter(), _io_bytes()
            values["step"].append(step_s * 1e3)
            values["iteration"].append((end_s - begin_s) * 1e3)
            for key in ("read", "written"):
                values[key].append(after[key] - before[key])
            losses.append(loss)
        peak_kib = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        result: dict[str, Any] = {
            key: statistics.median(numbers[_WARM_UP:])
            for key, numbers in values.items()
        }
        return {
            **result,
            "losses": losses,
            "peak_bytes": int(peak_kib.group(1)) * 1024 if peak_kib else 0,
        }


def _io_bytes() -> dict[str, int]:
    """Return the bytes that this process has moved from and to drives."""
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
    )
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


Iterate = Callable[[], tuple[float, float]]


def _batch(args: argparse.Namespace) -> Any:
    import torch

    return torch.randn(1, args.width, generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16
    )


def _ebbtide_job(name: str, folder: str, args: argparse.Namespace) -> Iterate:
    import torch

    from ebbtide.interleave import InterleavedOptimizer

    model, batch, (overlap, rule) = (
        build_model(args).to(torch.bfloat16),
        _batch(args),
        EBBTIDE[name],
    )
    optimizer = InterleavedOptimizer(
        model.parameters(),
        rule,
        lr=LEARNING_RATE,
        policy="pipelined",
        subgroup_params=int(args.subgroup * 1e6),
        gradients="streamed",
        max_grad_norm=MAX_NORM,
        overlap=overlap,
        model=model if overlap != "none" else None,
        storage=folder,
        host_memory_budget=args.host_bytes,
    )

    def iterate() -> tuple[float, float]:
        loss = model(batch).float().square().mean()
        loss.backward()
        begin_s = time.perf_counter()
        optimizer.step()
        step_s = time.perf_counter() - begin_s
        optimizer.zero_grad()
        return loss.item(), step_s

    return iterate


def _deepspeed_job(name: str, folder: str, args: argparse.Namespace) -> Iterate:
    import deepspeed

    for key, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    changes, keeps_gradients = DEEPSPEED[name]
    size = block_params(args.width)
    # Tensors below the block size are not swapped: it is above the largest gradient,
    # and below a subgroup.
    largest, subgroup = 16 * args.width**2, 4 * size
    block = (largest + subgroup) // 2 // 4096 * 4096
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": size,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": folder,
                "pin_memory": False,
                **changes,
            },
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.01},
        },
        "steps_per_print": 1_000_000,
        **({"aio": {"block_size": block}} if keeps_gradients else {}),
    }
    model = build_model(args)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    batch = _batch(args).to(engine.device)

    def iterate() -> tuple[float, float]:
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        begin_s = time.perf_counter()
        engine.step()
        return loss.item(), time.perf_counter() - begin_s

    return iterate
