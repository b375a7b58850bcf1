"""Facts of a recorded job that decide which of its settings can be changed."""

import re
from collections import Counter

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.interleave.advise.job.training_job import JobFacts
from ebbtide.profiler.trace import Trace

_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|output|head)$")
_ADAM = re.compile(r"adam|lion", re.IGNORECASE)
# Fewer trained parameters, as a share of all, are those of adapters.
_ADAPTER_SHARE = 0.2
_QUANTIZED_STATE = frozenset({"uint8", "int8"})
_QUANTIZED_WEIGHTS = frozenset({"uint8", "int8"})


def facts_of(trace: Trace) -> JobFacts:
    """Return the facts of a job. Traces without the entry `framework` are of DeepSpeed or of plain torch."""
    metrics = JobMetrics(trace)
    entry = metrics.entry
    model, name = entry.model, entry.framework.name
    if name in (None, "torch") and metrics.deepspeed is not None:
        name = "deepspeed"
    params = sum(optimizer.params or 0 for optimizer in entry.optimizers)
    is_adam = all(_ADAM.search(optimizer.class_name or "") for optimizer in entry.optimizers)
    dtypes: Counter[str] = Counter()
    for optimizer in entry.optimizers:
        dtypes.update(optimizer.state_dtypes)
    sizes = _parameter_bytes(trace)
    total = sum(sizes.values())

    def share(pattern: re.Pattern[str]) -> float:
        return sum(size for module, size in sizes.items() if pattern.search(module)) / total if total else 0.0

    trains_part = bool(model.total_params and model.trainable_params) and (
        (model.trainable_params or 0) < _ADAPTER_SHARE * (model.total_params or 0)
    )
    return JobFacts(
        framework=name or "torch",
        total_params=model.total_params,
        moments=round(sum(dtypes.values()) / params)
        if params and is_adam and not _QUANTIZED_STATE & set(dtypes)
        else 0,
        has_adapters=trains_part,
        has_quantized_weights=bool(_QUANTIZED_WEIGHTS & set(model.dtypes)),
        embedding_share=share(_EMBEDDING),
        head_share=share(_HEAD),
        largest_share=max(sizes.values(), default=0) / total if total else 0.0,
    )


def _parameter_bytes(trace: Trace) -> dict[str, int]:
    """Return the bytes of parameters on the device by module; empty where they were not recorded."""
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
