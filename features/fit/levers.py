"""Changes of a job that need less device memory, in the order of their cost."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.errors import UserError
from ebbtide.machines.machine import MAX_RANKS
from ebbtide.model_job import ModelJob


@dataclass(frozen=True)
class MemoryLever:
    """A change of a job."""

    name: str
    cost: str  # What it costs, in words.
    # Returns the changed jobs, the least change first; none where it is made already
    # or cannot be made.
    apply: Callable[[ModelJob], Iterable[ModelJob]]


def _setting(**values: Any) -> Callable[[ModelJob], Iterator[ModelJob]]:
    """Return a lever that sets fields of the job, where that makes sense."""

    def apply(job: ModelJob) -> Iterator[ModelJob]:
        # Settings that make no sense together are refused.
        with suppress(UserError):
            changed = replace(job, **values)
            if changed != job:
                yield changed

    return apply


def _smaller_micro_batch(job: ModelJob) -> Iterator[ModelJob]:
    for size in range(job.batch - 1, 0, -1):
        if job.batch % size == 0:
            steps = job.micro_steps * job.batch // size
            yield replace(job, batch=size, micro_steps=steps)


def _eight_bits(job: ModelJob) -> Iterator[ModelJob]:
    if job.optimizer == "adamw" and not job.offloads_optimizer:
        yield from _setting(optimizer="adamw-8bit")(job)


def _half_state(job: ModelJob) -> Iterator[ModelJob]:
    if job.precision == "bf16-mixed":
        yield from _setting(precision="bf16")(job)


def _offloaded_update(job: ModelJob) -> Iterator[ModelJob]:
    if job.strategy is None and job.optimizer == "adamw":
        yield from _setting(offloads_optimizer=True)(job)


def _adapters(job: ModelJob) -> Iterator[ModelJob]:
    if job.method == "full":
        yield from _setting(method="lora")(job)


def _four_bits(job: ModelJob) -> Iterator[ModelJob]:
    yield from _setting(method="qlora")(job)


def _more_ranks(job: ModelJob) -> Iterator[ModelJob]:
    ranks = max(2, job.ranks if job.strategy != "fsdp" else 2 * job.ranks)
    while ranks <= MAX_RANKS:
        yield from _setting(ranks=ranks, strategy="fsdp")(job)
        ranks *= 2


# By cost: time, then the rounding of what is stored, then copies, then what is trained,
# then GPUs. Weights that are streamed from the host belong after the offloaded update.
LEVERS = (
    MemoryLever(
        "chunked loss",
        "the head's forward runs twice",
        _setting(loss="chunked"),
    ),
    MemoryLever(
        "micro-batch", "smaller products; the batch stays", _smaller_micro_batch
    ),
    MemoryLever("bf16 state", "weights and moments are rounded", _half_state),
    MemoryLever("8-bit optimizer", "moments are rounded to 8 bits", _eight_bits),
    MemoryLever("checkpointing", "a second forward", _setting(checkpointing=True)),
    MemoryLever(
        "activation offload",
        "copies both ways in each micro-step",
        _setting(offloads_activations=True),
    ),
    MemoryLever(
        "optimizer offload", "copies, and updates on the CPU", _offloaded_update
    ),
    MemoryLever("LoRA", "trains adapters alone", _adapters),
    MemoryLever("QLoRA", "adapters, on weights of 4 bits", _four_bits),
    MemoryLever("sharding", "more GPUs, which send weights", _more_ranks),
)
*ON_ONE_RANK, SHARDING = LEVERS
