"""Compare the memory that dry runs predict with figures that frameworks publish.

    python benchmarks/memory_published.py [--only NAME]

The environment needs timm, torchvision, transformers, torchao, bitsandbytes, torchtune
and litgpt beside ebbtide. All jobs run in this process, one after the other, on tensors
without values. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import memory_published_jobs
import torch
from tables import machine_line, table

from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.machines.catalog import find_machine

GIB, GB, MIB = 2**30, 10**9, 2**20
AO = "pytorch/ao, torchao/optim/README.md"
TUNE = "pytorch/torchtune, README.md (0.3 and later)"
LIT = "Lightning-AI/litgpt, config_hub/finetune/README.md"
ALL = "query key value projection mlp head"
VIT_H = {
    "model": "vit_huge_patch14_224",
    "batch": 8,
    "amp": True,
    "checkpointing": False,
}
VIT_G = {
    "model": "vit_giant_patch14_dinov2",
    "batch": 32,
    "amp": False,
    "checkpointing": True,
}
LLAMA_2 = {"model": "llama2_7b", "batch": 2, "length": 256, "in_backward": False}
LLAMA_3 = {"batch": 2, "length": 2048}


@dataclass(frozen=True)
class PublishedPeak:
    """A published peak of memory and the job that had it.

    Attributes:
        size: The peak as published, in units of `unit` bytes.
        pool: Whether the figure counts `allocated` or `reserved` memory of torch.
        job: The function of memory_published_jobs.py, with its arguments.
    """

    title: str
    source: str
    gpu: str
    size: float
    unit: int
    pool: str
    job: str
    arguments: Mapping[str, Any]


def _vit_h(title: str, optimizer: str, size: float) -> PublishedPeak:
    arguments = {**VIT_H, "optimizer": optimizer}
    return PublishedPeak(
        f"ViT-H, {title}", AO, "rtx4090", size, GB, "allocated", "vit", arguments
    )


def _vit_g(title: str, size: float, **changes: Any) -> PublishedPeak:
    arguments = {**VIT_G, "optimizer": "AdamW", **changes}
    return PublishedPeak(
        f"ViT-g, {title}", AO, "rtx4090", size, GB, "allocated", "vit", arguments
    )


def _llama_2(optimizer: str, size: float) -> PublishedPeak:
    arguments = {**LLAMA_2, "optimizer": optimizer}
    title = f"Llama 2 7B, bf16, {optimizer}"
    return PublishedPeak(
        title, AO, "a100-80gb-sxm", size, GIB, "allocated", "torchtune_full", arguments
    )


def _litgpt(
    model: str,
    size: float,
    batch: int,
    rank: int,
    layers: str = "query value",
    **changes: Any,
) -> PublishedPeak:
    arguments = {
        "model": model,
        "batch": batch,
        "rank": rank,
        "layers": layers,
        **changes,
    }
    method = f"LoRA of rank {rank}" if rank else "full"
    title = f"{model}, bf16, {method}, {batch} x 512"
    title += f", {changes['steps']} micro-batches" if "steps" in changes else ""
    return PublishedPeak(title, LIT, "a10", size, GB, "allocated", "litgpt", arguments)


PEAKS = (
    _vit_g("bf16, checkpointing, batch 32", 9.82),
    _vit_g("the same, compiled", 9.90),
    _vit_g("state offloaded", 5.24, offload="state"),
    _vit_g("state offloaded, compiled", 5.33, offload="state"),
    _vit_g("state and gradients offloaded", 4.01, offload="gradients"),
    _vit_g("bf16 autocast, state offloaded", 9.90, amp=True, offload="state"),
    _vit_h("bf16 autocast, batch 8, compiled, AdamW", "AdamW", 12.23),
    _vit_h("bitsandbytes 8-bit AdamW", "bnb 8-bit", 8.32),
    _vit_h("torchao 8-bit AdamW", "ao 8-bit", 8.33),
    _vit_h("torchao FP8 AdamW", "ao FP8", 8.33),
    _vit_h("torchao 4-bit AdamW", "ao 4-bit", 7.72),
    _llama_2("AdamW", 51.6),
    _llama_2("bnb 8-bit", 39.3),
    _llama_2("ao 8-bit", 39.1),
    _llama_2("ao 4-bit", 33.2),
    PublishedPeak(
        "Llama 3.1 8B, full, paged 8-bit AdamW in the backward, 2 x 2,048, compiled", TUNE, "rtx4090", 18.9, GIB,
        "reserved", "torchtune_full",
        {**LLAMA_3, "model": "llama3_1_8b", "optimizer": "bnb paged 8-bit", "in_backward": True},
    ),
    PublishedPeak(
        "Llama 3.1 8B, LoRA of rank 8, 2 x 2,048, compiled", TUNE, "rtx4090", 16.2, GIB, "reserved", "torchtune_lora",
        {**LLAMA_3, "model": "llama3_1_8b", "quantized": False},
    ),
    PublishedPeak(
        "Llama 3.1 8B, QLoRA of rank 8, 2 x 2,048, compiled", TUNE, "rtx4090", 7.4, GIB, "reserved", "torchtune_lora",
        {**LLAMA_3, "model": "llama3_1_8b", "quantized": True},
    ),
    _litgpt("falcon-7b", 16.69, 1, 32),
    _litgpt("gemma-2b", 12.62, 2, 8, ALL, dropout=0.1),
    _litgpt("Llama-2-7b-hf", 19.77, 2, 32),
    _litgpt("Llama-3-8B", 19.73, 1, 32),
    _litgpt("Mistral-7B-v0.1", 20.66, 2, 32),
    _litgpt("phi-2", 13.98, 4, 8, ALL),
    _litgpt("Phi-3-mini-4k-instruct", 19.75, 4, 8, ALL),
    _litgpt("stablelm-base-alpha-3b", 8.58, 1, 32),
    _litgpt("tiny-llama-1.1b", 13.50, 8, 32, ALL),
    _litgpt("tiny-llama-1.1b", 14.10, 4, 0),
    # found after the comparison of the row before
    _litgpt("tiny-llama-1.1b", 14.10, 4, 0, steps=2),
    # NVML's figure, less the 1,343 MiB that it has for a context and one small tensor.
    PublishedPeak(
        "BERT large, fp32, Trainer, 4 x 512", "huggingface/transformers, model_memory_anatomy.md", "a100-80gb-sxm",
        14_949 - 1_343, MIB, "reserved", "bert", {"per_device_train_batch_size": 4},
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="jobs whose title contains this")
    args = parser.parse_args()
    print(machine_line(), flush=True)
    print()
    head = ["job", "source", "pool", "published", "predicted", "error"]
    table(head, (row_of(peak) for peak in PEAKS if args.only in peak.title))


def row_of(peak: PublishedPeak) -> list[str]:
    """Run the job of a published peak, and return its row."""
    start_s = time.perf_counter()
    unit = {GIB: "GiB", GB: "GB", MIB: "MiB"}[peak.unit]
    size = (
        predicted_bytes(peak.job, json.dumps(peak.arguments), peak.gpu)[peak.pool]
        / peak.unit
    )
    error = f"{100 * (size / peak.size - 1):+.1f} %"
    print(
        f"{peak.title}: {size:,.2f} {unit}, {error}, "
        f"{time.perf_counter() - start_s:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return [
        peak.title,
        peak.source,
        peak.pool,
        f"{peak.size:,} {unit}",
        f"{size:,.2f}",
        error,
    ]


@cache
def predicted_bytes(job: str, arguments: str, gpu: str) -> dict[str, int]:
    """Return the predicted peak of each pool."""
    machine = find_machine(gpu)
    name = machine.gpu.name if machine.gpu is not None else gpu
    with DryRun(DryRunOptions(iterations=3, machine=machine, device_name=name)) as run:
        getattr(memory_published_jobs, job)(**json.loads(arguments))
    torch.set_default_dtype(torch.float32)  # jobs change it
    _, _, allocated, reserved = (
        max(column) for column in zip(*run.memory.timeline, strict=True)
    )
    return {"allocated": allocated, "reserved": reserved}


if __name__ == "__main__":
    main()
