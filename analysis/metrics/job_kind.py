"""The kind of a job that a dry run predicted, by which others are like it."""

from collections.abc import Iterable, Mapping

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.machines.evidence import JobKind, kind_of
from ebbtide.profiler.trace import Trace

# From this share of the operations on the other kind of layers counts, too.
_MINOR_SHARE = 0.2
# A part of the note of a dry run on a compiled job.
_COMPILED = "torch.compile was left out"
_CASTS = "aten::_to_copy"
# Under autocast there are at least so many casts for each product of matrices.
_LEAST_CASTS = 1 / 3
_PRODUCTS = ("aten::mm", "aten::addmm", "convolution")


@once_per_trace
def kind_of_trace(trace: Trace) -> JobKind:
    """Return the kind of the job of a trace, by its first rank."""
    rank = trace.rank(trace.ranks[0])
    kernels = trace.kernels(trace.ranks[0])
    flops = kernels["flops"].astype(float).groupby(kernels["name"], observed=True).sum()
    names = [str(name) for name in flops.index]
    total = flops.sum() or 1.0
    convolved = sum(
        size for name, size in zip(names, flops, strict=True) if "convolution" in name
    )
    has_attention = any("attention" in name or "bmm" in name for name in names)
    layers = "transformer" if has_attention else "other"
    if convolved > _MINOR_SHARE * total:
        is_mixed = convolved < (1 - _MINOR_SHARE) * total
        layers = "both" if is_mixed else "convolutions"
    runtime = "eager"
    if rank.framework.name == "deepspeed":
        runtime = "deepspeed"
    elif any(_COMPILED in note for note in trace.meta.notes):
        runtime = "fused"
    tokens, samples = rank.framework.tokens, rank.framework.micro_batch
    return kind_of(
        layers,
        runtime,
        tokens // samples if tokens and samples else None,
        "bfloat16" if _is_half(rank.model.dtypes, kernels["name"]) else "float32",
        rank.world_size or len(trace.ranks),
        rank.main_device.name,
    )


def _is_half(dtypes: Mapping[str, int], kernels: Iterable[str]) -> bool:
    """Return whether a job computes in 16 bits: most weights are in less than 32, or
    autocast casts what its products take."""
    full = sum(count for name, count in dtypes.items() if "32" in name)
    if 2 * full < sum(dtypes.values()):
        return True
    names = [str(name) for name in kernels]
    products = sum(name.endswith(_PRODUCTS) for name in names)
    return names.count(_CASTS) > _LEAST_CASTS * products
