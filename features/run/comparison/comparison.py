"""The runs of a job under policies, their figures, and what is equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.features.run.comparison.equality import Distance, max_ulp
from ebbtide.features.run.comparison.job_runs import JobRun
from ebbtide.phases import PHASES


def measured_ms(run: JobRun, phase: str) -> float | None:
    """Return the measured median time of a phase or an iteration."""
    return run.times_ms.get(phase)


def predicted_ms(run: JobRun, phase: str) -> float | None:
    """Return what a simulation of the last plan predicts, of a phase or an iteration.

    The time of an iteration outside of its phases is the measured one.
    """
    predicted = _of_engine(run, "predicted_ms", phase)
    if predicted is None or phase != "iteration":
        return predicted
    whole = measured_ms(run, phase) or 0.0
    return predicted + max(
        0.0, whole - (_of_engine(run, "measured_ms", phase) or whole)
    )


def exposed_ms(run: JobRun) -> float | None:
    """Return the measured time that updates add to forward and backward."""
    return _of_engine(run, "measured_ms", "exposed")


def total_bytes(run: JobRun, key: str) -> float | None:
    """Return the bytes of all optimizers of a run; None where not known."""
    values: list[Any] = [end.get(key) for end in run.ends]
    if not values or any(value is None for value in values):
        return None
    return float(sum(values))


@dataclass(frozen=True)
class JobComparison:
    """The runs of a job, and what is equal.

    Attributes:
        command: The words of the command.
        runs: The run as it is, and one for each policy.
        emulated_link: Bytes/s of the emulated link; None on a GPU.
        link_of: The machine whose link is emulated, to scale; None for no machine.
        difference: What differs first between policies; None if nothing does.
        self_difference: What differs first between two runs under one policy, where
            policies differ.
        reason: Why nothing was compared; None if something was.
        to_bare: The distance of the policies to the job as it is.
        of_kernels: The distance between two kernels of torch.
        is_in_place: Whether all runs had the same folder.
    """

    command: Sequence[str]
    steps: int
    runs: list[JobRun]
    emulated_link: float | None
    link_of: str | None
    difference: str | None
    self_difference: str | None
    reason: str | None
    to_bare: Distance
    of_kernels: Distance | None
    is_in_place: bool

    @property
    def status(self) -> int:
        """The exit status: 0 if equal, 1 for a bug, 2 if nothing is shown."""
        if self.reason or self.self_difference:
            return 2
        return 1 if self.difference else 0

    @property
    def fastest_policy(self) -> str:
        """The policy with the shortest iterations; the last one if there are none."""
        driven = self.runs[1:]
        fastest = min(driven, key=lambda run: run.times_ms.get("iteration", math.inf))
        return fastest.name

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide compare --json -- CMD` prints."""
        bare, *driven = self.runs
        first = driven[0]
        is_compared = self.reason is None
        return {
            "job": {
                "command": list(self.command),
                "steps": self.steps,
                "ranks": len(bare.logs),
                "params": params_of_run(bare),
            },
            "emulated": self.emulated_link is not None,
            "link_bytes_per_s": self.emulated_link,
            "runs": [_run_json(run) for run in self.runs],
            "equal": {
                name: all(run.bits(kind) == first.bits(kind) for run in driven)
                if is_compared
                else None
                for name, kind in (("losses", "loss"), ("parameters", "final"))
            },
            "against_job": {
                "max_ulp": max(max_ulp(bare, run) for run in driven),
                **vars(self.to_bare),
                "of_kernels": self.of_kernels and vars(self.of_kernels),
            },
            "deterministic": self.self_difference is None if is_compared else None,
            "difference": self.difference,
            "self_difference": self.self_difference,
            "reason": self.reason,
        }


def _run_json(run: JobRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "policy": run.policy,
        "iteration_ms": measured_ms(run, "iteration"),
        "predicted_ms": predicted_ms(run, "iteration"),
        "phases_ms": {phase: measured_ms(run, phase) for phase in PHASES},
        "exposed_ms": exposed_ms(run),
        **{
            key: total_bytes(run, key)
            for key in ("device_bytes", "host_bytes", "h2d_bytes", "d2h_bytes")
        },
        "losses": run.logs[0].values("loss", "value") if run.logs else [],
        "parameters_digest": "-".join(run.bits("final")),
        "optimizers": run.ends,
        "failures": run.failures,
    }


def params_of_run(run: JobRun) -> int:
    """Return the number of parameters of the first rank's optimizers."""
    starts = run.logs[0].of_kind("start") if run.logs else []
    return sum(int(start["params"]) for start in starts)


def _of_engine(run: JobRun, key: str, name: str) -> float | None:
    """Return a time of the only optimizer of a run; None where there are several."""
    if len(run.ends) != 1:
        return None
    value = run.ends[0].get(key, {}).get(name)
    return None if value is None else float(value)
