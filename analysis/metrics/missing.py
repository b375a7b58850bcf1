"""Lines on figures that a trace lacks: what was not recorded, and how to record it."""

from collections.abc import Sequence

from ebbtide.analysis.metrics.devices import first_device, ran_on_cpu
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.memory_spans import detailed_iterations
from ebbtide.phases import BACKWARD, UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.iterations import explain_no_iterations
from ebbtide.units import runs_text

NO_MEMORY = (
    "no memory of a device was recorded; `ebbtide profile` records it (without "
    "`--record phases`, and of a job under "
    "`--on-demand` when `--attach` asks for it); import a log with a CSV of "
    "nvidia-smi, or turn on its memory_breakdown"
)
_MAX_RANGES = 6
NO_GPU_STATE = (
    "utilization, power and clocks were not recorded; `ebbtide profile` records them "
    "with NVML"
)
NO_KERNELS = (
    "no kernels of the GPU were recorded; `ebbtide profile --transfers` records them, "
    "and torch.profiler with "
    "ProfilerActivity.CUDA"
)
NO_SUB_STEPS = (
    "no sub-steps of an update were recorded; `ebbtide profile` records those of "
    "DeepSpeed and InterleavedAdamW, and "
    "`ebbtide replay --save` simulates them"
)


def on_demand_remarks(trace: Trace) -> list[str]:
    """Return lines on the detailed iterations of a recording on demand.

    There are none for other traces.
    """
    if not trace.meta.options.on_demand:
        return []
    ranks_of: dict[tuple[int, ...], list[str]] = {}
    for rank in trace.ranks:
        ranks_of.setdefault(tuple(detailed_iterations(trace, rank)), []).append(
            str(rank)
        )
    lines, count = [], len(steady_iterations(trace).numbers)
    for numbers, ranks in ranks_of.items():
        of_ranks = f" of rank {', '.join(ranks)}" if len(ranks_of) > 1 else ""
        which = f"{len(numbers):,} of {count:,} iterations{of_ranks}"
        if numbers:
            lines.append(
                f"recorded on demand: details in {which} ({_ranges(numbers)}), not "
                "known in the others"
            )
        else:
            lines.append(
                f"recorded on demand: details in {which}; `ebbtide profile --attach` "
                "records some while the job runs"
            )
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, like `3 to 6, 9`; the first ranges of many."""
    texts = runs_text(numbers, " to ").split(", ")
    return ", ".join(
        texts[:_MAX_RANGES] + (["and more"] if len(texts) > _MAX_RANGES else [])
    )


def no_capacity(rank: int) -> str:
    """Return the line on a rank whose device has a capacity that is not known."""
    return (
        f"the capacity of rank {rank}'s device is not known, so free memory cannot be "
        "computed; pass --capacity to "
        "`ebbtide import`"
    )


def no_iterations(trace: Trace) -> str:
    """Return the line on a trace without a finished iteration."""
    phases = {
        phase for rank in trace.ranks for phase in trace.labels(rank, "phases", "phase")
    }
    stopped = [entry.stopped for entry in trace.meta.ranks]
    if not phases and {"cut off", "exec"}.isdisjoint(stopped):
        return (
            "no phases were recorded, so there are no iterations; `ebbtide profile` "
            "records them"
        )
    if trace.meta.source == "imported" and not phases & {BACKWARD, UPDATE}:
        return (
            "no training iteration is in it: only forwards, as of inference; its steps "
            "are below"
        )
    return explain_no_iterations(phases, stopped)


def out_of_memory_remarks(trace: Trace) -> list[str]:
    """Return a line on the first rank that ran out of memory; none where none did."""
    failed = [entry for entry in trace.meta.ranks if entry.out_of_memory]
    if not failed:
        return []
    device = failed[0].out_of_memory[-1].device or failed[0].main_device.device
    return [
        f"rank {failed[0].rank} ran out of memory on {device}: `ebbtide memory --at "
        "oom` explains it"
    ]


def no_link_use(trace: Trace, ranks: Sequence[int], has_samples: bool) -> str:
    """Return the line on ranks without figures of the link per phase.

    `has_samples`: whether the link was recorded.
    """
    if not has_samples:
        return no_link(trace, ranks)
    if not steady_iterations(trace).numbers:
        return no_iterations(trace)
    return (
        "no phase is long enough for the samples of the link; `ebbtide profile "
        "--transfers` records each copy"
    )


def no_link(trace: Trace, ranks: Sequence[int] | None = None) -> str:
    """Return the line on ranks (None: all) without data on the link."""
    if ran_on_cpu(trace):
        return "no GPU link was recorded (this job ran on the CPU)"
    reasons = "; ".join(link_reasons(trace, ranks))
    if reasons:
        return (
            f"no GPU link was recorded: {reasons}; `ebbtide profile --transfers` "
            "records each copy"
        )
    return (
        "no GPU link was recorded; `ebbtide profile` records its use with NVML, and "
        "each copy with `--transfers`"
    )


def link_reasons(trace: Trace, ranks: Sequence[int] | None = None) -> list[str]:
    """Return why the link of some ranks was not sampled, each reason once.

    The ranks are all if None.
    """
    devices = (
        first_device(trace, rank) for rank in (trace.ranks if ranks is None else ranks)
    )
    return list(
        dict.fromkeys(filter(None, (device.link_missing for device in devices)))
    )


def partly_no_link(trace: Trace) -> list[str]:
    """Return a line for each reason why the links of some ranks were not sampled, with
    the ranks."""
    ranks_of: dict[str, list[str]] = {}
    for rank in trace.ranks:
        if (reason := first_device(trace, rank).link_missing) and not trace.rank(
            rank
        ).transfers_recorded:
            ranks_of.setdefault(reason, []).append(str(rank))
    return [
        f"no link use of rank {', '.join(ranks)}: {reason}"
        for reason, ranks in ranks_of.items()
    ]
