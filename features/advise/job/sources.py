"""Jobs to find a machine for: of a trace, of a workload file, or of a size."""

import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.analysis.metrics.devices import ran_on_cpu
from ebbtide.analysis.metrics.framework_setup import framework_setup
from ebbtide.analysis.metrics.gradient_wait import gradient_wait
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.job_kind import kind_of_trace
from ebbtide.analysis.metrics.prediction import is_predicted
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
from ebbtide.interleave.model.workload import Workload, load_workload
from ebbtide.interleave.replay.inputs import (
    JobSize,
    recorded_gpu,
    workload_of_size,
)
from ebbtide.interleave.replay.recorded_job import (
    RecordedJob,
    recorded_job,
    state_bytes_on_device,
)
from ebbtide.interleave.replay.workload_from_trace import NO_FREE_MEMORY, workload_of
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES

# The CUDA context and workspaces.
CONTEXT_BYTES = 1e9
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
    replica = shape.parallel.ranks
    ranks, micro_batch = batch.ranks or replica, batch.micro_batch or 1
    if ranks % replica:
        raise WorkloadError(
            f"--ranks {ranks} is not a multiple of the {replica} that share a model"
        )
    step_tokens = ranks // replica * micro_batch * shape.sequence
    tokens = batch.tokens or step_tokens
    micro_steps, rest = divmod(tokens, step_tokens)
    if rest or not micro_steps:
        raise WorkloadError(
            f"--tokens {tokens:,} is not a multiple of the {step_tokens:,} of ranks x "
            "micro-batch x sequence (ranks that share a model count once)"
        )
    workload = replace(
        workload_of_size(JobSize(shape.params, ranks)),
        notes=(),
        gradients_held_until_step=micro_steps > 1,
    )
    settings = TunableSettings(ranks, micro_batch, checkpointing, offload=False)
    recorded = RecordedJob(
        {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": micro_steps,
            **_BF16,
        },
        micro_steps=micro_steps,
        policy="gpu-only",
    )
    return TrainingJob(
        workload=workload,
        settings=settings,
        compute=TransformerCompute(shape, workload.param_bytes, implementation),
        memory=_memory_of_shape(shape, workload, settings),
        micro_steps=micro_steps,
        tokens=float(tokens),
        recorded=recorded,
        facts=JobFacts(total_params=shape.params),
        notes=(
            f"assumed: {shape.text}, sequence {shape.sequence:,}, vocabulary "
            f"{shape.vocabulary:,}, fused attention; {PARAM_BYTES} + {GRAD_BYTES} + "
            f"{STATE_BYTES} B a parameter (bf16 "
            "weights and gradients, fp32 masters and moments); memory is an estimate: "
            "`ebbtide dry-run` has the bytes",
        ),
    )


def job_of_files(
    trace: Trace | None, workload: Path | None, batch: BatchSettings
) -> TrainingJob | None:
    """Return the job of a trace or of a workload file; None without either."""
    if trace is not None:
        return job_of_trace(trace, batch)
    if workload is not None:
        return job_of_workload(load_workload(workload), batch)
    return None


def job_of_workload(workload: Workload, batch: BatchSettings) -> TrainingJob:
    """Return the job of a workload file, with its times and free memory on every
    machine."""
    settings = TunableSettings(
        batch.ranks or 1, batch.micro_batch, checkpointing=False, offload=False
    )
    compute = _recorded_compute(workload, settings)
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
        command = shlex.join(trace.meta.command or ("python", "train.py"))
        raise WorkloadError(
            f"{trace.path} was recorded on a CPU, which says nothing of a GPU: use "
            f"`ebbtide dry-run --gpu h100-80gb -o predicted.ebb -- {command}` "
            "(`ebbtide machines` has other names)"
        )
    recorded = recorded_job(trace)
    if not batch.is_empty:
        recorded = replace(recorded, iteration_s=None)
    setup = framework_setup(trace)
    offloads = setup is not None and setup.ratio is not None
    # Gradients of torch's own loops stay on the device until the step.
    workload = replace(workload_of(trace), gradients_held_until_step=not offloads)
    rank, gpu = trace.rank(trace.ranks[0]), recorded_gpu(trace)
    framework = rank.framework
    settings = TunableSettings(
        ranks=batch.ranks or rank.world_size or len(trace.ranks),
        micro_batch=batch.micro_batch or recorded.micro_batch or framework.micro_batch,
        checkpointing=bool(JobMetrics(trace).checkpointing),
        offload=offloads,
    )
    micro_steps = recorded.micro_steps or 1
    memory = recorded_memory(trace, workload)
    return TrainingJob(
        workload=workload,
        settings=settings,
        compute=replace(
            _recorded_compute(workload, settings),
            gpu=gpu.compute,
            gpu_name=gpu.name,
            work=recorded_kernels(trace, workload.param_bytes),
            factor=_times_factor(trace, workload),
            own_update_s=recorded.own_update_s,
            kind=kind_of_trace(trace) if is_predicted(trace) else None,
        ),
        memory=memory,
        state_bytes=state_bytes_on_device(JobMetrics(trace)),
        micro_steps=micro_steps,
        tokens=_tokens(batch, settings, micro_steps, framework.tokens),
        recorded=recorded,
        notes=tuple(
            note for note in workload.notes if memory is None or note != NO_FREE_MEMORY
        ),
        facts=facts_of(trace),
        host_peak_bytes=_host_peak(trace),
    )


def _host_peak(trace: Trace) -> float | None:
    """Return the host memory of a rank of a dry run; None: not known, or a plan has its
    own, since optimizer state is there."""
    prediction = trace.meta.prediction
    if prediction is None or "all" not in prediction.host_bytes:
        return None
    setup = framework_setup(trace)
    offloads = setup is not None and setup.ratio is not None
    return None if offloads else float(prediction.host_bytes["all"][0])


def _times_factor(trace: Trace, workload: Workload) -> float:
    """Return the factor within which the times of a trace are known: an estimated wait
    for gradients that was taken off the backward is known within a share of it."""
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


def _recorded_compute(workload: Workload, settings: TunableSettings) -> RecordedCompute:
    """Return the compute of a workload whose times count for every machine."""
    return RecordedCompute(
        forward_s=workload.forward_s,
        backward_s=workload.backward_s,
        other_s=workload.other_s,
        gpu=None,
        gpu_name=None,
        work=None,
        factor=1.0,
        settings=settings,
        param_bytes=workload.param_bytes,
        params=float(workload.params * settings.ranks),
    )


def _memory_of_shape(
    shape: TransformerShape, workload: Workload, settings: TunableSettings
) -> OwnMemory:
    """Return the estimated memory of a decoder."""
    tokens, checkpointing = shape.tokens(settings), settings.checkpointing
    kept = shape.kept_bytes(tokens, checkpointing) * _FRAGMENTATION
    working = shape.layer_bytes(tokens) * _FRAGMENTATION if checkpointing else 0.0
    logits = shape.logit_bytes(tokens) * _FRAGMENTATION
    gradients = 0.0
    if workload.gradients_held_until_step:
        gradients = workload.grad_bytes * workload.params
    # The logits at the end of the forward, and their gradients, too, at the start of
    # the backward.
    at_the_end = {_STEPS_PER_PHASE - 1: logits, _STEPS_PER_PHASE: 2 * logits}
    points = [MemoryPoint(0.0, gradients, 0.0)]
    for number in range(2 * _STEPS_PER_PHASE):
        # Activations grow in the forward, and shrink in the backward.
        steps = min(number + 1, 2 * _STEPS_PER_PHASE - number)
        size = kept * (steps / _STEPS_PER_PHASE) + working + at_the_end.get(number, 0.0)
        points.append(MemoryPoint(1 + number / _STEPS_PER_PHASE, gradients, size))
    points.append(MemoryPoint(3.0, gradients, 0.0))
    replica = shape.parallel.ranks
    is_alone = settings.ranks == 1
    gathered = min(
        GATHERED_LAYERS * workload.param_bytes * shape.layer_params + _REDUCE_BYTES,
        2.0 * shape.params,
    )
    if replica > 1:
        # A rank keeps the parameters and gradients of its part.
        others = shape.params / replica - workload.params
        gathered = (workload.param_bytes + workload.grad_bytes) * others
    inputs = shape.kept_bytes(tokens, True) + shape.layer_bytes(tokens)
    checkpointed = (inputs * _FRAGMENTATION + 2 * logits) / (kept + 2 * logits)
    return OwnMemory(
        fixed_bytes=CONTEXT_BYTES + (0.0 if is_alone else gathered),
        param_bytes=workload.param_bytes * workload.params,
        gather_bytes=gathered if is_alone else 0.0,
        points=tuple(points),
        checkpointed=None if checkpointing else checkpointed,
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
    dtypes = {name for optimizer in entry.optimizers for name in optimizer.state_dtypes}
    moments = sum(map(moment_elements, entry.optimizers))
    has_moments = bool(params) and is_adam and _QUANTIZED.isdisjoint(dtypes)
    sizes = _parameter_bytes(trace)
    # Of no sizes the shares are 0.
    total = sum(sizes.values()) or 1

    def share(pattern: re.Pattern[str]) -> float:
        return sum(sizes[module] for module in sizes if pattern.search(module)) / total

    trained, whole = model.trainable_params or 0, model.total_params or 0
    return JobFacts(
        framework=name or "torch",
        total_params=model.total_params,
        moments=round(moments / params) if has_moments else 0,
        has_adapters=0 < trained < _ADAPTER_SHARE * whole,
        has_quantized_weights=not _QUANTIZED.isdisjoint(model.dtypes),
        embedding_share=share(_EMBEDDING),
        head_share=share(_HEAD),
        largest_share=max(sizes.values(), default=0) / total,
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
