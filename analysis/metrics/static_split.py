"""The static split of the optimizer state between host and device, with the largest
part that fits on the device."""

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.analysis.metrics.device_fit import equal_sizes, fits_beside
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.recorded_free_memory import (
    param_bytes,
    recorded_free_memory,
    state_bytes,
)
from ebbtide.analysis.metrics.state_split import Framework, StateSplit, split_of
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE

# DeepSpeed's own default is 1e9. Smaller subgroups overlap better, and larger ones need
# more device memory.
_SUBGROUP_PARAMS = 100_000_000
# Subgroups may have so much more than the parameters: DeepSpeed pads what it divides
# among ranks.
_MAX_PADDING = 0.1


class StaticSplit(NamedTuple):
    """A share on the CPU, in hundredths, and the parameters that it moves.

    Their state moves from the host to the device with it.
    """

    ratio: float
    moved_params: float


def largest_split(metrics: JobMetrics) -> StaticSplit | None:
    """Return the fitting split with the most state on the device.

    Return None where no split moves any there.
    """
    if not metrics.params or not metrics.offloaded_params:
        return None
    sizes = recorded_sizes(metrics) or equal_sizes(
        metrics.params, subgroup_params(metrics)
    )
    split, tried = job_split(metrics), range(0)
    for hundredths in range(100):
        resident = split.resident(hundredths / 100, len(sizes))
        if resident == tried:
            continue
        tried = resident
        cpu_share = 1 - sum(sizes[resident.start : resident.stop]) / sum(sizes)
        moved_params = metrics.offloaded_params - metrics.params * cpu_share
        if moved_params <= 0:
            return None
        if split_fits(metrics, sizes, resident):
            return StaticSplit(hundredths / 100, moved_params)
    return None


def split_fits(
    metrics: JobMetrics, sizes: Sequence[int], resident: range
) -> bool | None:
    """Return whether the state of some subgroups fits on the devices for good.

    Devices are the job's. Gradients beside the state count by the rules of `twin-flow`
    and `gpu-only`; None: not known.
    """
    phase_s = {
        phase: (metrics.phase_ms(phase) or 0.0) / 1e3
        for phase in (OTHER, FORWARD, BACKWARD)
    }
    free = recorded_free_memory(metrics, phase_s)
    if free is None:
        return None
    on_device = sizes[resident.start : resident.stop]
    used = state_bytes(metrics.entry) * sum(on_device)
    offloads = len(on_device) < len(sizes)
    used += job_split(metrics).gradient_bytes(
        on_device, param_bytes(metrics.entry), offloads
    )
    return fits_beside(
        [(0.0, used)],
        free,
        sum(phase_s.values()) + (metrics.phase_ms(UPDATE) or 0.0) / 1e3,
    )


def recorded_sizes(metrics: JobMetrics) -> tuple[int, ...] | None:
    """Return the recorded sizes of the subgroups, which consist of whole tensors.

    Return None for the sizes of another rank or model, which do not add up to these
    parameters.
    """
    setup, params = metrics.setup, metrics.params or 0
    if (
        setup is None
        or not params <= sum(setup.subgroups) <= (1 + _MAX_PADDING) * params
    ):
        return None
    return setup.subgroups


def subgroup_params(metrics: JobMetrics) -> int:
    """Return the configured parameters of a subgroup, else a default."""
    configured = metrics.setup.subgroup_params if metrics.setup is not None else None
    return _SUBGROUP_PARAMS if configured is None else configured


def job_framework(metrics: JobMetrics) -> Framework | None:
    """Return the framework that chose the resident subgroups.

    Return None if none did, or ebbtide's engine ran the updates.
    """
    return metrics.setup.framework if metrics.setup is not None else None


def job_split(metrics: JobMetrics) -> StateSplit:
    """Return the split of a job's state (see `split_of`)."""
    return split_of(job_framework(metrics))
