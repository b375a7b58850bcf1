"""Jobs of others whose steps are predicted: read from CSV files, and predicted as
`ebbtide plan` does.

A set of jobs has up to three files in `benchmarks/accuracy/`: `SET.jobs.csv` (settings
alone), `SET.predicted.csv` (date and ranges, committed before the next file was read)
and `SET.measured.csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ebbtide.features.advise.job.decoder import (
    Implementation,
    TransformerShape,
    compute_span,
    shape_of,
)
from ebbtide.features.advise.job.sources import BatchSettings, job_of_size
from ebbtide.features.advise.machine_plan import PlanRequest, plan_for_machine
from ebbtide.interleave.policies import as_policies
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.kernels.efficiency import DEVIATIONS_OF_RANGE, FLASH_2
from ebbtide.machines.kernels.rates import AttentionSize, GpuRates, KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass
from ebbtide.machines.machine import Machine

FOLDER = Path(__file__).parent / "accuracy"
# Sizes of heads that FlashAttention has kernels for. Before Hopper a forward runs those
# of all sizes from the model's own on: `run_mha_fwd` in ml_dataflow's copy of
# FlashAttention 3 does not return after the first. On H100 the next ones find its
# counter of tiles at the end.
KERNEL_HEADS = (64, 96, 128, 192, 256)
BEFORE_HOPPER = ("a100-80gb-sxm", "rtx3090")
# RTX 5090 has FlashAttention 2, whose deterministic backward starts ceil(170 / 32)
# blocks for each of 32 heads. With 72 or 80 KiB of shared memory each of 170
# multiprocessors runs one at a time: 192 blocks take two turns.
BACKWARD_TURNS = {"rtx5090": 2 * 170 / 192}


@dataclass(frozen=True)
class Job:
    """A job, as far as its publication states it; the step that is predicted is an
    optimizer step.

    Attributes:
        machine: A preset, or a file in the folder of the sets.
        params: Parameters of the model.
        tokens: Tokens of a step on one GPU.
        checkpointing: The share of a forward that the backward computes again.
        recompute_share: The share of all operations that is computed again; None: by
            `checkpointing`.
        policy: The policy of the update; None: only forward, backward and an update on
            the GPU.
        other_s: The time outside of the phases, as in other runs of the same
            authors.
    """

    name: str
    machine: str
    ranks: int
    params: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    sequence: int
    micro_batch: int
    tokens: int
    checkpointing: float = 0.0
    recompute_share: float | None = None
    runtime: str | None = None
    attention: str | None = None
    policy: str | None = None
    offloaded_share: float = 1.0
    other_s: float = 0.0

    @property
    def rates(self) -> Machine:
        """The machine: a preset, or a file beside the sets."""
        own = FOLDER / self.machine
        return find_machine(str(own) if own.exists() else self.machine)

    @property
    def shape(self) -> TransformerShape:
        """The decoder."""
        optional = (self.layers or None, self.hidden or None, self.heads)
        return shape_of(self.params, self.sequence, self.vocabulary, *optional)


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step, s: the ends of a range with a probability of 80 %,
    and the likely one."""

    name: str
    low_s: float
    likely_s: float
    high_s: float


def predict(job: Job) -> Prediction | None:
    """Predict a step; None if the plan is that the job does not fit."""
    implementation = Implementation(job.runtime, job.attention, job.offloaded_share)
    if job.recompute_share is not None:
        return _predict_streamed(job, implementation)
    machine = job.rates
    batch = BatchSettings(
        job.ranks, job.micro_batch, job.sequence, job.tokens * job.ranks
    )
    planned = job_of_size(job.shape, batch, job.checkpointing == 1, implementation)
    if job.policy is None:
        # The GPUs are known, their host is not: an update on the GPU takes few ms.
        machine = machine.for_ranks(min(job.ranks, 8))
        times = planned.compute.times(machine, planned.settings, planned.micro_steps)
        update_s = job.params / job.ranks / (machine.gpu_update_params_per_s or 1e11)
        again_s = times.forward_s * job.checkpointing if job.checkpointing < 1 else 0.0
        compute_s = times.forward_s + times.backward_s + again_s
        likely = compute_s + update_s + planned.workload.other_s
        side = times.factor**DEVIATIONS_OF_RANGE
        return Prediction(job.name, likely / side, likely, likely * side)
    plan = plan_for_machine(
        planned, machine, PlanRequest(job.machine, as_policies([job.policy]))
    )
    if plan.iteration is None:
        return None
    times_ms = plan.iteration.low, plan.iteration.likely, plan.iteration.high
    return Prediction(job.name, *(job.other_s + time / 1e3 for time in times_ms))


def _predict_streamed(job: Job, implementation: Implementation) -> Prediction:
    """Predict a step whose weights are streamed layer by layer, on one GPU: its
    compute, in chunks of tokens."""
    chunk = job.micro_batch * job.sequence
    span = compute_span(job.shape, chunk, job.rates, "bfloat16", implementation)
    scale = job.tokens / chunk / (1 - (job.recompute_share or 0.0))
    parts = zip(*span, _repeated_attention_s(job), strict=True)
    return Prediction(job.name, *(scale * sum(part) for part in parts))


def _repeated_attention_s(job: Job) -> list[float]:
    """Return the time of a chunk in which attention's kernels do more than once what
    the model needs, in each case."""
    forward, backward = attention_work(job.machine, job.shape.head_size)
    size = AttentionSize(job.sequence, job.shape.head_size, job.attention or FLASH_2)
    flops = job.layers * job.micro_batch * job.sequence**2 * job.hidden * 2
    kinds = (
        (forward - 1, WorkClass.ATTENTION),
        (backward - 2.5, WorkClass.ATTENTION_BACKWARD),
    )
    works = (
        KernelWork("attention", "compute", kind, more * flops, 0, "bfloat16", size)
        for more, kind in kinds
    )
    rates = GpuRates(job.rates)
    return [
        sum(times) / 1e9 for times in zip(*map(rates.kernel_ns, works), strict=True)
    ]


def attention_work(card: str, head_size: int) -> tuple[float, float]:
    """Return the work of attention's forward and backward on a card, in that of a
    forward with causal mask."""
    heads = (
        [head for head in KERNEL_HEADS if head >= head_size]
        if card in BEFORE_HOPPER
        else [head_size]
    )
    return sum(heads) / head_size, 2.5 * BACKWARD_TURNS.get(card, 1.0)


def read_rows(kind: type[Any], path: Path) -> list[Any]:
    """Read dataclasses from a CSV file; lines that begin with # are remarks."""
    types = {item.name: str(item.type) for item in fields(kind)}
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [
        kind(
            **{
                key: _converted(value, types[key])
                for key, value in row.items()
                if key in types
            }
        )
        for row in csv.DictReader(lines)
    ]


def _converted(value: str, kind: str) -> Any:
    if not value and "None" in kind:
        return None
    return (
        int(float(value))
        if kind == "int"
        else float(value)
        if "float" in kind
        else value
    )


def write_rows(path: Path, remarks: Iterable[str], rows: Iterable[Any]) -> None:
    """Write dataclasses of one kind to a CSV file."""
    rows = list(rows)
    names = [item.name for item in fields(rows[0])]
    with path.open("w", newline="") as file:
        file.writelines(f"# {remark}\n" for remark in remarks)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            values = (getattr(row, name) for name in names)
            writer.writerow(
                [
                    "" if v is None else f"{v:.6g}" if isinstance(v, float) else v
                    for v in values
                ]
            )
