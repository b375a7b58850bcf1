"""What must be updated, and what the rest of the iteration looks like."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide.errors import WorkloadError
from ebbtide.json_files import number, read_object

# (seconds from the iteration's start, bytes free from there on), in order; the first at 0.
FreeLine = tuple[tuple[float, float], ...]
_MOST_SUBGROUPS = 10_000_000


@dataclass(frozen=True)
class Workload:
    """One rank's part of a job. An iteration is other, forward, backward, update, in this order.

    params: parameters whose state the rank holds. subgroup_params: of a subgroup; the last one may be smaller. sizes:
    the parameters of each subgroup, where they were recorded.
    Bytes are per parameter: param_bytes (half-precision copy on the device), grad_bytes, state_bytes (fp32 master and
    moments). forward_s, backward_s, other_s: without any waiting for the optimizer. gpu_free: what is free beside the
    job's own parameters, gradients and activations, a step function over the iteration; None: not known.
    Busy shares: what the job itself takes of the link. clipping: whether all gradients are needed before any update.
    gradients_stay: they lie on the device, in the job's own memory, and come down only when the step begins; else each
    may leave as soon as it is made.
    notes: what is estimated or not known, for people.
    """

    name: str
    params: int
    subgroup_params: int
    forward_s: float
    backward_s: float
    other_s: float = 0.0
    param_bytes: float = 2.0
    grad_bytes: float = 2.0
    state_bytes: float = 12.0
    gpu_free: FreeLine | None = None
    h2d_busy_share: float = 0.0
    d2h_busy_share: float = 0.0
    clipping: bool = True
    gradients_stay: bool = False
    sizes: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def subgroups(self) -> tuple[int, ...]:
        """Parameters of each subgroup, in the order of the forward."""
        if self.sizes is not None:
            return self.sizes
        whole, rest = divmod(self.params, self.subgroup_params)
        return (self.subgroup_params,) * whole + ((rest,) if rest else ())

    @property
    def cpu_update_bytes(self) -> float:
        """What an update on the CPU reads and writes of host memory, a parameter: gradient and state in, state and
        half-precision parameter out."""
        return self.grad_bytes + 2 * self.state_bytes + self.param_bytes

    @property
    def waits(self) -> bool:
        """Whether no update can begin before the backward is over."""
        return self.clipping or self.gradients_stay

    @property
    def compute_s(self) -> float:
        """The iteration without its update."""
        return self.other_s + self.forward_s + self.backward_s

    def free_at(self, seconds: float) -> float | None:
        """Bytes free at a time of the iteration; the last value holds through the update."""
        if self.gpu_free is None:
            return None
        return value_at(self.gpu_free, seconds)

    def gpu_free_from(self, seconds: float) -> FreeLine:
        """The free line from a time of the iteration on; it must be known."""
        line = self.gpu_free or ((0.0, 0.0),)
        return ((seconds, value_at(line, seconds)), *((at, size) for at, size in line if at > seconds))

    @property
    def least_free(self) -> float | None:
        """Bytes free at every moment of the iteration."""
        return min(size for _, size in self.gpu_free) if self.gpu_free is not None else None


def value_at(line: FreeLine, seconds: float) -> float:
    """The value of a step function that begins at 0."""
    return next(size for at, size in reversed(line) if at <= max(seconds, 0.0))


def workload_from(values: dict[str, Any], where: str) -> Workload:
    """A workload from the object of a workload file. Raises WorkloadError for values that are missing or cannot be."""

    def need(key: str, most: float, least: float = 0.0) -> float:
        value = number(values, key, WorkloadError, where, most, least)
        if value is None:
            raise WorkloadError(f"{where} has no {key}")
        return value

    def may(key: str, default: float, most: float, least: float = 0.0) -> float:
        value = number(values, key, WorkloadError, where, most, least)
        return default if value is None else value

    params = round(need("params", 1e15, 1))
    subgroup = min(round(may("subgroup_params", params, 1e15, 1)), params)
    if params / subgroup > _MOST_SUBGROUPS:
        raise WorkloadError(f"{where}: more than {_MOST_SUBGROUPS:,} subgroups: choose larger ones")
    return Workload(
        name=where if values.get("name") is None else str(values["name"]),
        params=params,
        subgroup_params=subgroup,
        forward_s=need("forward_s", 1e6),
        backward_s=need("backward_s", 1e6),
        other_s=may("other_s", 0.0, 1e6),
        param_bytes=may("param_bytes", 2.0, 64),
        grad_bytes=may("grad_bytes", 2.0, 64),
        state_bytes=may("state_bytes", 12.0, 1024, 1),
        gpu_free=_free(values.get("gpu_free_bytes"), where),
        h2d_busy_share=_share(values, "h2d_busy_share", where),
        d2h_busy_share=_share(values, "d2h_busy_share", where),
        clipping=_flag(values, "clipping", True, where),
        gradients_stay=_flag(values, "gradients_stay", False, where),
        sizes=_sizes(values.get("sizes"), params, where),
    )


def load_workload(path: Path) -> Workload:
    """Read a workload file. Raises WorkloadError where it is none."""
    return workload_from(read_object(path, "workload", WorkloadError), path.name)


def _flag(values: dict[str, Any], key: str, default: bool, where: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise WorkloadError(f"{where}: {key} is neither true nor false")
    return default if value is None else value


def _sizes(value: Any, params: int, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
    if not whole or sum(value) != params or len(value) > _MOST_SUBGROUPS:
        raise WorkloadError(f"{where}: sizes is not a list of whole numbers above 0 that add up to params")
    return tuple(value)


def _share(values: dict[str, Any], key: str, where: str) -> float:
    share = number(values, key, WorkloadError, where, 1.0) or 0.0
    if share == 1.0:
        raise WorkloadError(f"{where}: {key} is 1: a link that is always busy moves nothing")
    return share


def _free(value: Any, where: str) -> FreeLine | None:
    if value is None:
        return None
    if not isinstance(value, list):
        size = number({"gpu_free_bytes": value}, "gpu_free_bytes", WorkloadError, where, 1e14)
        return ((0.0, size or 0.0),)
    line = []
    for item in value:
        if not isinstance(item, dict):
            raise WorkloadError(f'{where}: gpu_free_bytes is a number, or a list of {{"at_s", "bytes"}}')
        at = number(item, "at_s", WorkloadError, f"{where}: gpu_free_bytes", 1e6)
        size = number(item, "bytes", WorkloadError, f"{where}: gpu_free_bytes", 1e14)
        if at is None or size is None:
            raise WorkloadError(f"{where}: an entry of gpu_free_bytes lacks at_s or bytes")
        line.append((at, size))
    line.sort(key=lambda entry: entry[0])
    if not line:
        return None
    if line[0][0] > 0:
        # Before the first entry nothing is known to be free.
        line.insert(0, (0.0, 0.0))
    return tuple(line)
