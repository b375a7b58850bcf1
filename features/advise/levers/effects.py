"""Changes of a job's settings, and their effects on memory by its trace."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from ebbtide.features.advise.job.decoder import guessed_layers
from ebbtide.features.advise.job.training_job import Variant
from ebbtide.machines.machine import MAX_RANKS

# Moments in 8 bits have a scale in fp32 for each 256 (Dettmers et al. 2022, "8-bit
# Optimizers via Block-wise Quantization").
_MOMENT_BYTES = 1 + 4 / 256
# Weights in 4 bits have a scale in fp32 for each 64 (Dettmers et al. 2023, "QLoRA");
# embeddings and the head stay.
_WEIGHT_BYTES = 0.5 + 4 / 64
# Adapters have 18 r h weights on the 12 h^2 of a layer: 4 x 2h in attention, and 2 x 5h
# in the feed-forward network (Hu et al. 2022, "LoRA"), of which fp32 weights, gradients
# and two moments are on the device.
_LORA_RANK = 16
_LORA_PER_WIDTH = 18 / 12
_ADAPTER_STATE_BYTES, _ADAPTER_OWN_BYTES = 8.0, 8.0
_WIDTH_PER_LAYER = 128
# Trainers of Hugging Face keep the moments of embeddings in 32 bits.
_EMBEDDINGS_IN_32_BITS = frozenset({"transformers", "trl", "llamafactory", "axolotl"})


@dataclass(frozen=True)
class Lever:
    """A change of settings."""

    name: str
    cost: str  # What it costs beside memory, in words.
    # Returns the changed variants, the least change first; none where the change is not
    # possible.
    apply: Callable[[Variant], Iterable[Variant]]


def _smaller_micro_batch(one: Variant) -> Iterable[Variant]:
    size = one.settings.micro_batch or 1
    for smaller in range(size - 1, 0, -1):
        if size % smaller == 0:
            yield one.with_settings(micro_batch=smaller)


def _streamed(one: Variant) -> Iterable[Variant]:
    """Each gradient is used and freed in the backward, but for several micro-steps; the
    largest tensor's remains."""
    job, memory = one.job, one.job.memory
    is_held = job.workload.gradients_held_until_step and one.micro_steps == 1
    if memory is None or not is_held:
        return
    left = job.facts.largest_share or 1 / guessed_layers(
        job.facts.total_params or job.workload.params
    )
    yield replace(one, job=replace(job, memory=replace(memory, gradient_share=left)))


def _quantized_state(one: Variant, state: str = "device") -> Iterable[Variant]:
    """Moments in 8 bits; masters in fp32, and moments of embeddings in trainers that
    keep them, stay. Such optimizers do not update sharded parameters."""
    job, facts = one.job, one.job.facts
    if (
        one.settings.ranks > 1
        or not facts.moments
        or one.state != "device"
        or one.settings.offload
    ):
        return
    before = (
        job.state_bytes if job.state_bytes is not None else job.workload.state_bytes
    )
    kept = (
        facts.embedding_share
        if facts.framework in _EMBEDDINGS_IN_32_BITS and not facts.has_adapters
        else 0.0
    )
    masters = 4.0 if job.state_bytes is None else 0.0
    after = masters + facts.moments * ((1 - kept) * _MOMENT_BYTES + kept * 4.0)
    if after < before:
        yield replace(one, job=replace(job, state_bytes=after), state=state)


def _checkpointed(one: Variant) -> Iterable[Variant]:
    """Layers keep their input alone, and one layer is computed again at a time
    (`checkpointed_share`)."""
    memory = one.job.memory
    can_checkpoint = memory is not None and memory.checkpointed is not None
    if can_checkpoint and not one.settings.checkpointing:
        yield one.with_settings(checkpointing=True)


def _offloaded(one: Variant) -> Iterable[Variant]:
    if one.state == "device" and not one.settings.offload:
        yield replace(one.with_settings(offload=True), state="offloaded")


def _adapters(one: Variant) -> Iterable[Variant]:
    """Only adapters of rank 16 on all linear layers have gradients and state;
    activations are taken to stay."""
    job, memory, facts = one.job, one.job.memory, one.job.facts
    if (
        memory is None
        or facts.has_adapters
        or one.state == "offloaded"
        or job.settings.ranks > 1
    ):
        return
    width = _WIDTH_PER_LAYER * guessed_layers(job.workload.params)
    adapters = max(1, round(job.workload.params * _LORA_PER_WIDTH * _LORA_RANK / width))
    memory = replace(
        memory,
        fixed_bytes=memory.fixed_bytes + _ADAPTER_OWN_BYTES * adapters,
        gradient_share=0.0,
    )
    workload = replace(
        job.workload, params=adapters, sizes=None, subgroup_params=adapters
    )
    job = replace(
        job,
        workload=workload,
        memory=memory,
        state_bytes=_ADAPTER_STATE_BYTES,
        facts=replace(facts, has_adapters=True),
    )
    yield replace(one, job=job)


def _quantized_weights(one: Variant) -> Iterable[Variant]:
    """Frozen weights of linear layers in 4 bits, under adapters; strategies that shard
    weights do not take them."""
    if one.job.facts.has_quantized_weights or one.settings.ranks > 1:
        return
    for base in [one] if one.job.facts.has_adapters else _adapters(one):
        job, facts = base.job, base.job.facts
        if job.memory is None:
            continue
        kept = min(1.0, facts.embedding_share + facts.head_share)
        smaller = kept + (1 - kept) * _WEIGHT_BYTES / job.workload.param_bytes
        if smaller < 1:
            memory = replace(job.memory, param_bytes=job.memory.param_bytes * smaller)
            yield replace(
                base,
                job=replace(
                    job, memory=memory, facts=replace(facts, has_quantized_weights=True)
                ),
            )


def _more_ranks(one: Variant) -> Iterable[Variant]:
    ranks = one.settings.ranks
    while (ranks := 2 * ranks) <= min(MAX_RANKS, 64 * one.settings.ranks):
        yield one.with_settings(ranks=ranks)


# By cost: of time, of risk for the quality of the results, of what is trained, and of
# GPUs.
LEVERS = (
    Lever(
        "micro-batch",
        "more and smaller micro-steps; the batch stays",
        _smaller_micro_batch,
    ),
    Lever("streamed gradients", "no clipping by the norm of all gradients", _streamed),
    Lever("8-bit optimizer", "moments are rounded to 8 bits", _quantized_state),
    Lever("checkpointing", "a second forward in the backward", _checkpointed),
    Lever(
        "paged optimizer",
        "8-bit moments; copies where memory is short",
        partial(_quantized_state, state="paged"),
    ),
    Lever("offload", "copies, and updates on the CPU", _offloaded),
    Lever("LoRA", "trains adapters alone", _adapters),
    Lever("QLoRA", "trains adapters alone, on weights of 4 bits", _quantized_weights),
    Lever("ranks", "more GPUs, which share all state", _more_ranks),
)
