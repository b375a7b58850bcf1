"""Runs of ZeRO-Infinity and MLP-Offload beside simulated ones, for
`benchmarks/systems.py`.

The runs are the logs of MLP-Offload's authors: github.com/mauryaavinash95/MLP-Offload,
folder `logs`, commit e181b47; four H100 with a local drive, and for MLP-Offload a
parallel file system, too. Times are means of all iterations but the first; parameters,
subgroups and buffers are as logged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.published import simulated
from benchmarks.published_figures import Figure, box, fitted_rate
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine, StoragePath

_RANKS = 4
# The model that rates are fitted to.
_FITTED = "52B"
# Buffers of each path in the policy `mlp-offload`, of the state of a subgroup.
_BUFFERS = 3


@dataclass(frozen=True)
class LoggedRun:
    """A model of the logs.

    Attributes:
        params: Parameters of the model.
        subgroups: Subgroups of a rank.
        buffers: Buffers of a subgroup's size in fp32, of both systems.
        forward_s: The forward.
        infinity_s: The iteration with ZeRO-Infinity.
        infinity_backward_s: The backward with ZeRO-Infinity, in which gradients are
            written.
        backward_s: The backward with MLP-Offload, in which they are not. None: it was
            not logged.
        mlp_s: The iteration with MLP-Offload. None: it was not logged.
        in_memory: Subgroups that MLP-Offload did not wait for in the step: their state
            was in host memory.
    """

    params: float
    subgroups: int
    buffers: int
    forward_s: float
    infinity_s: float
    infinity_backward_s: float
    backward_s: float | None
    mlp_s: float | None
    in_memory: int

    @property
    def workload(self) -> Workload:
        """The job of one rank."""
        params = round(self.params / _RANKS)
        # Where it was not logged, in proportion to the parameters.
        backward_s = self.backward_s or 1.833 * self.params / RUNS[_FITTED].params
        size = -(-params // self.subgroups)
        return Workload(
            "logged", params, size, self.forward_s, backward_s, gpu_free=((0.0, 1e13),)
        )


RUNS = {
    "40B": LoggedRun(48.164e9, 97, 64, 0.654, 242.28, 27.47, None, None, 0),
    "52B": LoggedRun(44.278e9, 66, 56, 0.512, 238.60, 28.29, 1.833, 92.17, 14),
    "70B": LoggedRun(68.605e9, 82, 50, 0.766, 370.56, 32.91, 2.946, 151.34, 12),
    "100B": LoggedRun(105.885e9, 126, 36, 1.202, 572.03, 68.34, 4.563, 275.53, 9),
}


def zero_infinity() -> list[Figure]:
    """Both rates of the drive are fitted to the run of the 52B model."""
    figures = []
    for name, run in RUNS.items():
        schedule = _infinity(run, _drive())
        is_fitted = name == _FITTED
        figures += [
            Figure(
                "ZeRO-Infinity",
                f"iteration, {name}",
                "s",
                run.infinity_s,
                schedule.iteration_s,
                is_fitted,
            ),
            Figure(
                "ZeRO-Infinity",
                f"backward, {name}",
                "s",
                run.infinity_backward_s,
                schedule.backward_s,
                is_fitted,
            ),
        ]
    return figures


def mlp_offload() -> list[Figure]:
    """The rate of the parallel file system is fitted to the run of the 52B model, on
    the drive of `zero_infinity`."""
    fitted_s = RUNS[_FITTED].mlp_s or 0.0
    rate = fitted_rate(lambda rate: _mlp(RUNS[_FITTED], rate).iteration_s, fitted_s)
    figures = []
    for name, run in RUNS.items():
        if run.mlp_s is not None:
            seconds = _mlp(run, rate).iteration_s
            figures.append(
                Figure(
                    "MLP-Offload",
                    f"iteration, {name}",
                    "s",
                    run.mlp_s,
                    seconds,
                    name == _FITTED,
                )
            )
            if name != _FITTED:
                times = _infinity(run, _drive()).iteration_s / seconds
                what = f"times as fast as ZeRO-Infinity, {name}"
                figures.append(
                    Figure("MLP-Offload", what, "", run.infinity_s / run.mlp_s, times)
                )
    return figures


@cache
def _drive() -> StoragePath:
    """Return the drive with the rates at which the backward and the iteration of the
    fitted model take as long as logged."""
    run = RUNS[_FITTED]
    write = fitted_rate(
        lambda rate: _infinity(run, StoragePath(rate, rate)).backward_s,
        run.infinity_backward_s,
    )
    both = fitted_rate(
        lambda rate: (
            _infinity(
                run, StoragePath(rate, write, duplex_bytes_per_s=rate)
            ).iteration_s
        ),
        run.infinity_s,
    )
    return StoragePath(both, write, duplex_bytes_per_s=both)


def _machine(*storage: StoragePath) -> Machine:
    return replace(box("h100-80gb"), storage=storage)


def _infinity(run: LoggedRun, drive: StoragePath) -> Schedule:
    policy = f"zero-infinity:{run.buffers},pipeline_read=true,pipeline_write=true"
    return simulated(policy, run.workload, _machine(drive))


def _mlp(run: LoggedRun, rate: float) -> Schedule:
    """Simulate with host memory for as many subgroups as were in memory, and the
    buffers of both paths."""
    job = run.workload
    state_in_memory = (
        (run.in_memory + 2 * _BUFFERS) * job.state_bytes * job.subgroup_params
    )
    copies = (job.grad_bytes + job.param_bytes) * job.params
    machine = _machine(_drive(), StoragePath(rate, rate, duplex_bytes_per_s=rate))
    return simulated(
        "mlp-offload",
        replace(job, host_free_bytes=state_in_memory + copies + 1.0),
        machine,
    )
