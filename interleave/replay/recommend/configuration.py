"""The configuration of DeepSpeed for a policy, as version 0.19.8 reads it."""

from __future__ import annotations

from typing import Any

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_PRECISION = ("bf16", "fp16", "data_types")
# Stand for values of the job that are not known.
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-4


def deepspeed_config(workload: Workload, job: RecordedJob, ratio: float | None, stage: int = 3) -> dict[str, Any]:
    """Return a configuration that `deepspeed.initialize` accepts.

    Args:
        workload: The workload.
        job: The settings to repeat.
        ratio: Share of the state that is offloaded to the CPU; None to offload nothing.
        stage: The stage of ZeRO. A ratio below 1 needs 3.
    """
    offload: dict[str, Any] = {"device": "none"}
    if ratio is not None:
        offload = {"device": "cpu", "pin_memory": True, "ratio": ratio}
    # The recorded size may exceed the parameters; another one would change the layout of checkpoints.
    configured = job.section("zero_optimization").get("sub_group_size")
    size = int(configured) if isinstance(configured, (int, float)) and configured >= 1 else workload.subgroup_params
    zero = {"stage": stage, "offload_optimizer": offload, "sub_group_size": size}
    norm = max_grad_norm(workload, job)
    return {
        "zero_optimization": zero,
        **({"gradient_clipping": norm} if norm is not None else {}),
        **_precision(workload, job),
        **_batch(job),
        **_optimizer(job),
    }


def placeholders(workload: Workload, job: RecordedJob) -> list[str]:
    """Return the keys of the configuration whose values stand for values of the job that are not known."""
    keys = [] if job.config or not workload.clipping else ["gradient_clipping"]
    keys += [] if job.settings(_BATCH[:2]) else ["train_micro_batch_size_per_gpu"]
    return keys + ([] if job.settings(("optimizer",)) else ["optimizer"])


def max_grad_norm(workload: Workload, job: RecordedJob) -> float | None:
    """Return the maximum norm of the gradients; None if they are not clipped.

    If the workload clips and the norm is not known, MAX_GRAD_NORM stands for it.
    """
    if not job.config:
        return MAX_GRAD_NORM if workload.clipping else None
    norm = job.config.get("gradient_clipping")
    return float(norm) if isinstance(norm, (int, float)) and norm > 0 else None


def _precision(workload: Workload, job: RecordedJob) -> dict[str, Any]:
    if job.config:
        return job.settings(_PRECISION)
    return {"bf16": {"enabled": True}} if workload.param_bytes == 2 else {}


def _batch(job: RecordedJob) -> dict[str, Any]:
    sizes = job.settings(_BATCH)
    if _BATCH[1] in sizes and _BATCH[2] in sizes:
        # Follows from the others and the number of ranks.
        sizes.pop(_BATCH[0], None)
    return sizes if sizes.keys() & set(_BATCH[:2]) else {_BATCH[1]: 1, **sizes}


def _optimizer(job: RecordedJob) -> dict[str, Any]:
    recorded = job.settings(("optimizer", "scheduler"))
    if "optimizer" in recorded:
        return recorded
    return {"optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}}, **recorded}
