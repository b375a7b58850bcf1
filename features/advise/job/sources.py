"""Jobs to find a machine for: of a trace, of a workload file, or of a size."""

import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.analysis.metrics.devices import ran_on_cpu
from ebbtide.analysis.metrics.framework_setup import framework_setup
from ebbtide.analysis.metrics.gradient_wait import gradient_wait
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.prediction import predicted_range
from ebbtide.analysis.metrics.recorded_free_memory import moment_elements
from ebbtide.errors import WorkloadError
from ebbtide.features.advise.job.compute_times import (
    GATHERED_LAYERS,
    RecordedCompute,
    TransformerCompute,
    recorded_kernels,
)
from ebbtide.features.advise.job.decoder import (
    NOT_STATED,
    Implementation,
    TransformerShape,
)
from ebbtide.features.advise.job.memory import recorded_memory
from ebbtide.features.advise.job.training_job import (
    JobFacts,
    MemoryPoint,
    OwnMemory,
    TrainingJob,
    TunableSettings,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.inputs import (
    JobSize,
    RecordedGpu,
    recorded_gpu,
    workload_of_size,
)
from ebbtide.interleave.replay.recorded_job import (
    RecordedJob,
    recorded_job,
    state_bytes_on_device,
)
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.machines.kernels.efficiency import DEVIATIONS_OF_RANGE
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES

# The CUDA context and workspaces.
_CONTEXT_BYTES = 1e9
# What the allocator reserves beyond the tensors of a job of a given size.
_FRAGMENTATION = 1.1
# Buffers of the gradients that are being reduced.
_REDUCE_BYTES = 1e9
_STEPS_PER_PHASE = 8
# Estimated waits for gradients are within this share: 3.62 s estimated, 3.48 s measured
# (docs/validation.md).
_WAIT_ERROR = 0.1


@dataclass(frozen=True)
class BatchSettings:
    """Settings of the batch (samples of a rank, tokens of all ranks) that the user
    states; None is not stated."""

    ranks: int | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    tokens: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the batch is that of the job's source."""
        return self.ranks is None and self.micro_batch is None


def job_of_size(
    shape: TransformerShape,
    batch: BatchSettings,
    checkpointing: bool,
    implementation: Implementation = NOT_STATED,
) -> TrainingJob:
    """Return a job of a decoder in bf16 with Adam, whose parameters, gradients and
    state all ranks share."""
    ranks, micro_batch = batch.ranks or 1, batch.micro_batch or 1
    step_tokens = ranks * micro_batch * shape.sequence
    tokens = batch.tokens or step_tokens
    micro_steps, rest = divmod(tokens, step_tokens)
    if rest or not micro_steps:
        raise WorkloadError(
            f"--tokens {tokens:,} is not a multiple of the {step_tokens:,} of ranks x "
            "micro-batch x sequence"
        )
    workload = replace(workload_of_size(JobSize(shape.params, ranks)), notes=())
    recorded = RecordedJob(
        {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": micro_steps,
            **_BF16,
        },
        micro_steps=micro_steps,
        policy="gpu-only",
    )
    accumulates = micro_steps > 1
    return TrainingJob(
        workload=replace(workload, gradients_held_until_step=accumulates),
        settings=TunableSettings(ranks, micro_batch, checkpointing, offload=False),
        compute=TransformerCompute(shape, workload.param_bytes, implementation),
        memory=_memory_of_shape(
            shape, workload, micro_batch, ranks, checkpointing, accumulates
        ),
        micro_steps=micro_steps,
        tokens=float(tokens),
        recorded=recorded,
        facts=JobFacts(total_params=shape.params),
        notes=(
            f"assumed: {shape.layers} layers of width {shape.hidden:,}, sequence "
            f"{shape.sequence:,}, vocabulary "
            f"{shape.vocabulary:,}, fused attention; {PARAM_BYTES} + {GRAD_BYTES} + "
            f"{STATE_BYTES} B a parameter (bf16 "
            "weights and gradients, fp32 masters and moments); memory is an estimate: "
            "`ebbtide dry-run` has the bytes",
        ),
    )


def job_of_workload(workload: Workload, batch: BatchSettings) -> TrainingJob:
    """Return the job of a workload file, with its times and free memory on every
    machine."""
    settings = TunableSettings(
        batch.ranks or 1, batch.micro_batch, checkpointing=False, offload=False
    )
    compute = _recorded_compute(workload, settings, None, None)
    notes = (
        *workload.notes,
        "times and free memory are those of the workload on every machine",
    )
    tokens, recorded = _tokens(batch, settings, 1, None), RecordedJob(policy="gpu-only")
    return TrainingJob(
        workload, settings, compute, None, tokens=tokens, recorded=recorded, notes=notes
    )


def job_of_trace(trace: Trace, batch: BatchSettings) -> TrainingJob:
    """Return the job of a trace. Raises WorkloadError if it ran on a CPU, whose figures
    say nothing of a GPU."""
    if ran_on_cpu(trace):
        command = (
            shlex.join(trace.meta.command) if trace.meta.command else "python train.py"
        )
        raise WorkloadError(
            f"{trace.path} was recorded on a CPU, which says nothing of a GPU: use "
            f"`ebbtide dry-run --gpu h100-80gb -o predicted.ebb -- {command}` "
            "(`ebbtide machines` has other names)"
        )
    workload = workload_of(trace)
    recorded = recorded_job(trace)
    if not batch.is_empty:
        recorded = replace(recorded, iteration_s=None)
    setup = framework_setup(trace)
    offloads = setup is not None and setup.ratio is not None
    # Gradients of torch's own loops stay on the device until the step.
    stay = not offloads
    ranks = batch.ranks or trace.rank(trace.ranks[0]).world_size or len(trace.ranks)
    settings = TunableSettings(
        ranks=ranks,
        micro_batch=batch.micro_batch
        or recorded.micro_batch
        or trace.rank(trace.ranks[0]).framework.micro_batch,
        checkpointing=bool(JobMetrics(trace).checkpointing),
        offload=offloads,
    )
    micro_steps = recorded.micro_steps or 1
    compute = _recorded_compute(
        workload, settings, trace, recorded_gpu(trace), _times_factor(trace, workload)
    )
    return TrainingJob(
        workload=replace(workload, gradients_held_until_step=stay),
        settings=settings,
        compute=replace(compute, own_update_s=recorded.own_update_s),
        memory=recorded_memory(trace, workload, stay),
        state_bytes=state_bytes_on_device(JobMetrics(trace)),
        micro_steps=micro_steps,
        tokens=_tokens(
            batch, settings, micro_steps, trace.rank(trace.ranks[0]).framework.tokens
        ),
        recorded=recorded,
        notes=workload.notes,
        facts=facts_of(trace),
    )


def _times_factor(trace: Trace, workload: Workload) -> float:
    """Return the factor within which the times of a trace are known: a dry run has a
    range with a probability of 80 %; an estimated wait for gradients that was taken off
    the backward is known within a share of it."""
    if (
        span := predicted_range(trace, "iteration")
    ) is not None and 0 < span.low_ms < span.high_ms:
        return math.exp(math.log(span.high_ms / span.low_ms) / 2 / DEVIATIONS_OF_RANGE)
    wait = gradient_wait(JobMetrics(trace))
    if wait is None or wait.wait_ms <= 0 or workload.compute_s <= 0:
        return 1.0
    return 1 + _WAIT_ERROR * wait.wait_ms / 1e3 / workload.compute_s


_BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def _tokens(
    batch: BatchSettings, settings: TunableSettings, steps: int, step_tokens: int | None
) -> float | None:
    if batch.tokens is not None:
        return float(batch.tokens)
    if batch.sequence is not None and settings.micro_batch is not None:
        step_tokens = batch.sequence * settings.micro_batch
    return None if step_tokens is None else float(step_tokens * steps * settings.ranks)


def _recorded_compute(
    workload: Workload,
    settings: TunableSettings,
    trace: Trace | None,
    gpu: RecordedGpu | None,
    factor: float = 1.0,
) -> RecordedCompute:
    return RecordedCompute(
        forward_s=workload.forward_s,
        backward_s=workload.backward_s,
        other_s=workload.other_s,
        gpu=gpu.compute if gpu is not None else None,
        gpu_name=gpu.name if gpu is not None else None,
        work=recorded_kernels(trace, workload.param_bytes)
        if trace is not None
        else None,
        factor=factor,
        settings=settings,
        param_bytes=workload.param_bytes,
        params=float(workload.params * settings.ranks),
    )


def _memory_of_shape(
    shape: TransformerShape,
    workload: Workload,
    micro_batch: int,
    ranks: int,
    checkpointing: bool,
    accumulates: bool,
) -> OwnMemory:
    tokens = shape.sequence * micro_batch
    kept = shape.kept_bytes(tokens, checkpointing) * _FRAGMENTATION
    working = shape.layer_bytes(tokens) * _FRAGMENTATION if checkpointing else 0.0
    logits = shape.logit_bytes(tokens) * _FRAGMENTATION
    gradients = workload.grad_bytes * workload.params if accumulates else 0.0
    points = [MemoryPoint(0.0, gradients, 0.0)]
    for number in range(_STEPS_PER_PHASE):
        share = (number + 1) / _STEPS_PER_PHASE
        last = logits if number == _STEPS_PER_PHASE - 1 else 0.0
        points.append(
            MemoryPoint(
                1 + number / _STEPS_PER_PHASE, gradients, kept * share + working + last
            )
        )
    for number in range(_STEPS_PER_PHASE):
        share = 1 - number / _STEPS_PER_PHASE
        # The logits and their gradients are on the device at the start of the backward.
        first = 2 * logits if number == 0 else 0.0
        points.append(
            MemoryPoint(
                2 + number / _STEPS_PER_PHASE, gradients, kept * share + working + first
            )
        )
    points.append(MemoryPoint(3.0, gradients, 0.0))
    gathered = min(
        GATHERED_LAYERS * workload.param_bytes * shape.layer_params + _REDUCE_BYTES,
        2.0 * shape.params,
    )
    whole = shape.kept_bytes(tokens, False) * _FRAGMENTATION
    checkpointed = (
        shape.kept_bytes(tokens, True) + shape.layer_bytes(tokens)
    ) * _FRAGMENTATION
    return OwnMemory(
        fixed_bytes=_CONTEXT_BYTES + (gathered if ranks > 1 else 0.0),
        param_bytes=workload.param_bytes * workload.params,
        gather_bytes=gathered if ranks == 1 else 0.0,
        points=tuple(points),
        checkpointed=None
        if checkpointing
        else (checkpointed + 2 * logits) / (whole + 2 * logits),
    )


_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|output|head)$")
_ADAM = re.compile(r"adam|lion", re.IGNORECASE)
# Fewer trained parameters, as a share of all, belong to adapters.
_ADAPTER_SHARE = 0.2
_QUANTIZED = frozenset({"uint8", "int8"})


def facts_of(trace: Trace) -> JobFacts:
    """Return the facts of a job. Traces without the entry `framework` are of DeepSpeed
    or of plain torch."""
    metrics = JobMetrics(trace)
    entry = metrics.entry
    model, name = entry.model, entry.framework.name
    if name in (None, "torch") and metrics.setup is not None:
        name = metrics.setup.key
    params = sum(optimizer.params or 0 for optimizer in entry.optimizers)
    is_adam = all(
        _ADAM.search(optimizer.class_name or "") for optimizer in entry.optimizers
    )
    dtypes: Counter[str] = Counter()
    for optimizer in entry.optimizers:
        dtypes.update(optimizer.state_dtypes)
    sizes = _parameter_bytes(trace)
    total = sum(sizes.values())

    def share(pattern: re.Pattern[str]) -> float:
        return (
            sum(size for module, size in sizes.items() if pattern.search(module))
            / total
            if total
            else 0.0
        )

    trains_part = bool(model.total_params and model.trainable_params) and (
        (model.trainable_params or 0) < _ADAPTER_SHARE * (model.total_params or 0)
    )
    return JobFacts(
        framework=name or "torch",
        total_params=model.total_params,
        moments=round(sum(map(moment_elements, entry.optimizers)) / params)
        if params and is_adam and not _QUANTIZED & set(dtypes)
        else 0,
        has_adapters=trains_part,
        has_quantized_weights=bool(_QUANTIZED & set(model.dtypes)),
        embedding_share=share(_EMBEDDING),
        head_share=share(_HEAD),
        largest_share=max(sizes.values(), default=0) / total if total else 0.0,
    )


def _parameter_bytes(trace: Trace) -> dict[str, int]:
    """Return the bytes of parameters on the device by module; empty: not recorded."""
    rank = trace.ranks[0]
    sizes: Counter[str] = Counter()
    inventories = trace.rank(rank).inventories
    if inventories:
        for holder in inventories[0].holders:
            if holder.category == "parameter" and holder.device.startswith("cuda"):
                sizes[str(holder.module)] += holder.bytes
        return sizes
    blocks = trace.allocations(rank)
    blocks = blocks[(blocks["category"] == "parameter") & blocks["end_ns"].isna()]
    for module, size in zip(blocks["module"], blocks["bytes"], strict=True):
        sizes[str(module)] += int(size)
    return sizes
