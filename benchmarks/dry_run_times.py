"""Compare forward and backward times that a dry run predicts with those of published
jobs.

    python benchmarks/dry_run_times.py [--traces traces]

The jobs are those of traces/README.md: decoders of 11.3e9 parameters on A100 and 15.3e9
on H100 under DeepSpeed ZeRO-3 with activation checkpointing, rebuilt from the arguments
in their logs. The dry run has the compute of one rank. What DeepSpeed adds is a term of
its own: parameters that are gathered in the forward and in the backward, gradients that
are reduced, and their copies to host memory in fp32 (by the link counters of these
traces). DeepSpeed hides a part of it that the logs do not state, so the range begins
where all of it is hidden, under fast assumptions, and ends where nothing is, under slow
ones. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import machine_line, table
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebbtide.analysis.metrics.iterations import median_ms
from ebbtide.analysis.metrics.prediction import predicted_range
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.machines.catalog import preset
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import open_trace

CONTEXT, VOCABULARY, LAYERS, WIDTH, KEY_HEADS = 2048, 50_304, 40, 5120, 4
HALF_BYTES, GRADIENT_BYTES = 2, 4


@dataclass(frozen=True)
class PublishedJob:
    """A published job: arguments of its log, its machine, and its runs with
    asynchronous copies.

    Attributes:
        runs: Names of traces by the share of the parameters whose state is
            offloaded.
    """

    name: str
    machine: str
    ranks: int
    batch: int
    heads: int
    hidden: int
    runs: dict[float, tuple[str, ...]]


JOBS = (
    PublishedJob(
        "13B, 4 A100 40 GB",
        "a100-40gb-published",
        4,
        1,
        40,
        13_824,
        {
            1.0: (
                "a100-13b-async",
                *(f"a100-13b-interleaved-{stride}" for stride in (2, 3, 4, 6, 8, 10)),
            )
        },
    ),
    PublishedJob(
        "13B, 2 A100 40 GB",
        "a100-40gb-published",
        2,
        4,
        40,
        13_632,
        {
            1.0: (
                "a100-ranks2-async",
                "a100-ranks2-interleaved-2",
                "a100-ranks2-interleaved-6",
            )
        },
    ),
    PublishedJob(
        "13B, 1 A100 40 GB",
        "a100-40gb-published",
        1,
        4,
        40,
        13_632,
        {1.0: ("a100-ranks1-async", "a100-ranks1-interleaved-6")},
    ),
    PublishedJob(
        "20B, 4 H100 80 GB",
        "h100-80gb-sxm-published",
        4,
        1,
        64,
        20_480,
        {
            1.0: ("h100-20b-async", "h100-20b-interleaved-2"),
            0.8: ("h100-20b-ratio0.8-async", "h100-20b-ratio0.8-interleaved-2"),
            0.5: ("h100-20b-ratio0.5-async", "h100-20b-ratio0.5-interleaved-2"),
        },
    ),
)


class Block(nn.Module):
    """A layer with RMSNorm, rotary embeddings, grouped keys, unfused attention and
    SwiGLU, all without biases."""

    def __init__(self, job: PublishedJob) -> None:
        super().__init__()
        self.heads, self.size = job.heads, WIDTH // job.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (job.heads + 2 * KEY_HEADS) * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = (
            nn.Linear(WIDTH, 2 * job.hidden, bias=False),
            nn.Linear(job.hidden, WIDTH, bias=False),
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = (
            self.qkv(self.norm_1(x)).view(batch, length, -1, self.size).transpose(1, 2)
        )
        q, k, v = qkv.split([self.heads, KEY_HEADS, KEY_HEADS], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (
            part.repeat_interleave(self.heads // KEY_HEADS, 1).flatten(0, 1)
            for part in (k, v)
        )
        scores = torch.empty(
            batch * self.heads, length, length, device=x.device, dtype=x.dtype
        )
        scores = torch.baddbmm(
            scores, q.flatten(0, 1), k.transpose(1, 2), beta=0.0, alpha=self.size**-0.5
        )
        # Megatron's fused kernel scales, masks and normalizes in one pass: as a softmax
        # does.
        attended = torch.bmm(scores.softmax(-1), v).view(
            batch, self.heads, length, self.size
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Decoder(nn.Module):
    """The model of a job, which computes every layer again in the backward."""

    def __init__(self, job: PublishedJob) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(job) for _ in range(LAYERS))
        self.norm, self.head = (
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        angles = torch.empty(CONTEXT, WIDTH // job.heads)
        self.register_buffer("cos", angles)
        self.register_buffer("sin", angles.clone())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, self.cos, self.sin, use_reentrant=True)
        return F.cross_entropy(
            self.head(self.norm(x)).float().flatten(0, 1), targets.flatten()
        )


def predict(job: PublishedJob, machine: Machine) -> tuple[Any, int]:
    """Return the trace of a dry run of one rank's compute, and the number of
    parameters."""
    with DryRun(
        DryRunOptions(iterations=2, machine=machine, device_name=machine.name)
    ) as run:
        model = Decoder(job).to("cuda", torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters())
        params = sum(parameter.numel() for parameter in model.parameters())
        while True:
            tokens = torch.randint(0, VOCABULARY, (job.batch, CONTEXT + 1)).cuda()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace_of_run(run).build(), params


def added_ms(
    job: PublishedJob, machine: Machine, params: int, phase: str, offloaded: float
) -> list[float]:
    """Return what DeepSpeed adds to a phase if nothing hides it, in each case: gathers,
    reductions and copies."""
    passes = 1 if phase == "forward" else 2
    sent = passes * HALF_BYTES * params * (job.ranks - 1) / job.ranks
    copied = (
        offloaded * GRADIENT_BYTES * params / job.ranks if phase == "backward" else 0.0
    )
    peer, link = machine.gpu.peer_bytes_per_s, machine.d2h_bytes_per_s
    return [
        1e3 * (sent / (peer * gathers) + copied / (link * copies))
        for gathers, copies in zip(
            priors.COLLECTIVE_EFFICIENCY, priors.COPY_EFFICIENCY, strict=True
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--traces", type=Path, default=Path(__file__).parents[1] / "traces"
    )
    args = parser.parse_args()
    rows = []
    for job in JOBS:
        machine = preset(job.machine)
        trace, params = predict(job, machine)
        for (offloaded, names), phase in itertools.product(
            job.runs.items(), ("forward", "backward")
        ):
            span, typical = predicted_range(trace, phase), median_ms(trace, phase)
            added = added_ms(job, machine, params, phase, offloaded)
            measured = [
                median_ms(open_trace(args.traces / f"{name}.ebb"), phase)
                for name in names
            ]
            low, high = span.low_ms, span.high_ms + added[-1]
            inside = sum(low <= time <= high for time in measured)
            rows.append(
                [
                    job.name,
                    f"{offloaded:.0%}",
                    phase,
                    f"{span.low_ms:,.0f} / {typical:,.0f} / {span.high_ms:,.0f}",
                    " / ".join(f"{time:,.0f}" for time in added),
                    f"{low:,.0f} to {high:,.0f}",
                    f"{min(measured):,.0f} to {max(measured):,.0f}",
                    f"{inside} of {len(measured)}",
                ]
            )
    print(f"{machine_line()}\n")
    table(
        [
            "job",
            "offloaded",
            "phase",
            "compute, ms",
            "added by ZeRO-3, ms",
            "range, ms",
            "measured, ms",
            "in range",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
