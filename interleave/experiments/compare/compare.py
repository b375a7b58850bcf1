"""A comparison: every policy runs, then every plan that ran is predicted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.interleave.experiments.compare.baselines import PEERS, run_peer
from ebbtide.interleave.experiments.compare.job import shape_of
from ebbtide.interleave.experiments.compare.results import (
    PHASES,
    Comparison,
    Pair,
    PeerResult,
    Result,
    busy_of,
    in_the_middle,
    known,
    times_of,
)
from ebbtide.interleave.experiments.compare.runs import CannotRun, Run, Training, run_policy
from ebbtide.interleave.experiments.compare.testbed import Box, find_box
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import parse
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

POLICIES = ("zero-offload", "pipelined", "twin-flow:0.5", "interleaved:2", "adaptive")
LEAST_ITERATIONS = 3
_WARMUP = 2
_STATE_BYTES = 12
# On the host, a parameter: state, and parameter and gradient twice, as a model on the CPU has them.
_HOST_BYTES = 20
# Where nobody chose: parts of the model, and how many subgroups have room beside its half.
_PARTS = 10
_SLOTS = 3

# (what runs, iterations of all that are done, iterations of all)
Tell = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Asked:
    """policies: None for POLICIES, of which those are left out that cannot run here. subgroup_params: None for a tenth
    of the model. memory_budget: bytes of device memory for state; None for half of it and three subgroups more. link,
    machine: see find_box."""

    policies: Sequence[str] | None = None
    iterations: int = 12
    params: int = 20_000_000
    subgroup_params: int | None = None
    memory_budget: float | None = None
    link_bytes_per_s: float | None = None
    machine: Machine | None = None
    peers: Sequence[str] = ()
    seed: int = 0


def compare(asked: Asked, tell: Tell = lambda *_: None) -> Comparison:
    """Train under each policy, one after the other. Raises UserError for what cannot be run."""
    policies = list(dict.fromkeys(asked.policies or POLICIES))
    for text in policies:
        parse(text)
    for name in asked.peers:
        if name not in PEERS:
            raise UserError(f"--against {name!r}: there are {', '.join(PEERS)}")
    if asked.iterations < LEAST_ITERATIONS:
        raise UserError(f"--iterations is at least {LEAST_ITERATIONS}: the first {_WARMUP} only warm up")
    shape = shape_of(asked.params)
    needed, there = _HOST_BYTES * shape.params, host_limits.memory_bytes()
    if there is not None and needed > there:
        raise UserError(
            f"--params {asked.params:g} takes {bytes_text(needed)} of host memory: it has {bytes_text(there)}"
        )
    subgroup = asked.subgroup_params or -(-shape.params // _PARTS)
    budget = asked.memory_budget or _STATE_BYTES * (shape.params / 2 + _SLOTS * subgroup)
    total = asked.iterations * (len(policies) + len(asked.peers))
    done = 0

    def next_of(name: str) -> Training:
        def told() -> None:
            nonlocal done
            done += 1
            tell(name, done, total)

        return Training(shape, asked.seed, asked.iterations, subgroup, told)

    tell("measuring this machine", 0, total)
    box = find_box(shape.params, budget, asked.link_bytes_per_s, asked.machine)
    runs: list[Run] = []
    skipped: dict[str, str] = {}
    for text in policies:
        tell(text, done, total)
        try:
            runs.append(run_policy(text, next_of(text), box))
        except CannotRun as error:
            if asked.policies:
                raise UserError(f"policy {text} cannot run here: {error}") from error
            skipped[text] = str(error)
    peers = []
    for name in dict.fromkeys(asked.peers):
        tell(name, done, total)
        try:
            peers.append(_peer(name, next_of(name), box))
        except CannotRun as error:
            skipped[name] = str(error)
    if not runs:
        raise UserError("no policy can run here: " + "; ".join(f"{text}: {why}" for text, why in skipped.items()))
    results = _results(runs, box.machine)
    return Comparison(box, shape, subgroup, asked.iterations, _WARMUP, results, peers, skipped)


def _results(runs: Sequence[Run], machine: Machine) -> list[Result]:
    counted = [_counted(run) for run in runs]
    # One job: how long its phases take does not depend on the policy, unless that makes them wait.
    every = [schedule for schedules in counted for schedule in schedules]
    phases = {key: median(getattr(schedule, key) for schedule in every) for key in ("forward_s", "backward_s")}
    found = []
    for run, schedules in zip(runs, counted, strict=True):
        last = schedules[-1]
        predicted = simulate(last.plan, replace(last.workload, **phases), machine)
        found.append(
            Result(
                policy=run.policy,
                counted=len(schedules),
                times=times_of(schedules, predicted),
                busy=busy_of(schedules, predicted),
                peak_device_bytes=Pair(max(s.peak_device_bytes for s in schedules), predicted.peak_device_bytes),
                losses=known(run.losses),
                losses_equal=_bits(run.losses) == _bits(runs[0].losses),
                measured=in_the_middle(schedules),
                predicted=predicted,
            )
        )
    return found


def _counted(run: Run) -> list[Schedule]:
    """Those after the warm-up that went by the last plan: a policy may plan anew as it learns."""
    last = run.schedules[-1].plan
    return [schedule for schedule in run.schedules[_WARMUP:] if schedule.plan is last]


def _bits(losses: Sequence[float]) -> bytes:
    return struct.pack(f"{len(losses)}d", *losses)


def _peer(name: str, training: Training, box: Box) -> PeerResult:
    times, losses = run_peer(name, training, box)
    counted = times[_WARMUP:]
    middle = {f"{phase}_ms": 1e3 * median(getattr(time, f"{phase}_s") for time in counted) for phase in PHASES}
    iteration = 1e3 * median(time.forward_s + time.backward_s + time.update_s for time in counted)
    shown = known(losses)
    return PeerResult(name, PEERS[name][0], iteration, **middle, final_loss=shown[-1], losses=shown)
