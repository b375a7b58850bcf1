"""Runs a comparison: trains under every policy, then predicts every plan that ran."""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from ebbtide import host_limits, seams
from ebbtide.errors import UserError
from ebbtide.interleave.compare import results as figures
from ebbtide.interleave.compare import runs as training_runs
from ebbtide.interleave.compare.baselines import baseline_names, find_baseline
from ebbtide.interleave.compare.testbed import Testbed, find_testbed
from ebbtide.interleave.engine.runtime.backing import Backing
from ebbtide.interleave.policies import Policy, as_policy
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine
from ebbtide.phases import PHASES
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES
from ebbtide.units import ByteCount, byte_count, bytes_text

POLICIES = ("zero-offload", "pipelined", "twin-flow:0.5", "interleaved:2", "adaptive")
MIN_ITERATIONS = 3
_WARMUP = 2
# Host memory per parameter: a model on the CPU has parameter and gradient there twice.
_HOST_BYTES = STATE_BYTES + 2 * (PARAM_BYTES + GRAD_BYTES)
# Defaults: subgroups of the model, and subgroups that the memory budget holds in
# addition to half of the state.
_SUBGROUPS = 10
_EXTRA_SUBGROUPS = 3

# Called with the name of the current run, the iterations that are finished, and the
# number of all iterations.
ProgressCallback = Callable[[str, int, int], object]
Result = TypeVar("Result")


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison."""

    # Policies to run; None stands for the POLICIES that can run here.
    policies: Sequence[Policy | str] | None = None
    iterations: int = 12  # Iterations per policy, warm-up included.
    params: int = 20_000_000
    # Parameters per subgroup; None for a tenth of the model.
    subgroup_params: int | None = None
    # Bytes of device memory for optimizer state; None for half of the state and three
    # subgroups.
    memory_budget: ByteCount | None = None
    # Rate of an emulated link per direction; None for the default of `find_testbed`.
    link_bytes_per_s: float | None = None
    # Machine to predict with; None to measure this one.
    machine: MachineArgument | None = None
    # Times that forward and backward wait in addition to their arithmetic; None for the
    # default.
    waits: training_runs.PhaseWaits | None = None
    baselines: Sequence[str] = ()
    seed: int = 0
    # Folders for state that host memory does not hold; empty for none.
    storage: Sequence[Path] = ()
    # With storage: host memory for state and buffers; None: for what `_storage_options`
    # says.
    host_bytes: ByteCount | None = None


def compare(
    config: CompareConfig, progress: ProgressCallback = lambda *_: None
) -> figures.Comparison:
    """Train under each policy, one after the other, and predict each plan that ran.
    Raises UserError where a policy or setting is invalid, or a policy that was given
    cannot run here."""
    policies = {
        policy.text: policy for policy in map(as_policy, config.policies or POLICIES)
    }
    shape = _checked_shape(config, policies.values())
    subgroup_params = config.subgroup_params or -(-shape.params // _SUBGROUPS)
    budget = byte_count(
        config.memory_budget or _part_of_state(shape, subgroup_params), "memory_budget"
    )
    total = config.iterations * (len(policies) + len(config.baselines))
    done = 0

    def training_for(name: str) -> training_runs.TrainingRun:
        def on_iteration() -> None:
            nonlocal done
            done += 1
            progress(name, done, total)

        return training_runs.TrainingRun(
            shape,
            config.seed,
            config.iterations,
            subgroup_params,
            on_iteration,
            waits,
            streamed,
        )

    progress("measuring this machine", 0, total)
    storage = _storage_options(config, shape, subgroup_params)
    machine = None if config.machine is None else find_machine(config.machine)
    testbed = find_testbed(
        shape.params, subgroup_params, budget, config.link_bytes_per_s, machine
    )
    if storage is not None:
        testbed = replace(
            testbed,
            machine=storage.added_to(testbed.machine),
            storage=tuple(config.storage),
        )
    waits = _waits(config, policies.values(), testbed, shape)
    # Gradients must not wait for the step where updates are computed before all of them
    # are there.
    streamed = any(policy.speculates for policy in policies.values())
    skipped: dict[str, str] = {}

    def run_each(
        entries: Mapping[str, object], run: Callable[..., Result]
    ) -> Iterator[Result]:
        for name, entry in entries.items():
            progress(name, done, total)
            try:
                yield run(entry, training_for(name), testbed)
            except training_runs.CannotRun as error:
                if name in map(str, config.policies or ()):
                    raise UserError(
                        f"policy {name} cannot run here: {error}"
                    ) from error
                skipped[name] = str(error)

    runs = list(run_each(policies, training_runs.run_policy))
    baselines = list(run_each({name: name for name in config.baselines}, _baseline))
    if not runs:
        raise UserError(
            "no policy can run here: "
            + "; ".join(f"{text}: {reason}" for text, reason in skipped.items())
        )
    results = _results(runs, testbed.machine)
    return figures.Comparison(
        testbed,
        shape,
        subgroup_params,
        config.iterations,
        _WARMUP,
        results,
        baselines,
        skipped,
    )


def _part_of_state(shape: training_runs.Shape, subgroup_params: int) -> float:
    """Return the bytes of half of the state and some subgroups, for a memory that holds
    a part of the state."""
    return STATE_BYTES * (shape.params / 2 + _EXTRA_SUBGROUPS * subgroup_params)


def _storage_options(
    config: CompareConfig, shape: training_runs.Shape, subgroup_params: int
) -> Backing | None:
    """Return the folders and the host memory of a comparison with storage; None without
    storage."""
    if not config.storage:
        if config.host_bytes is not None:
            raise UserError(
                "--host-free-bytes is for runs with storage: add --storage FOLDER"
            )
        return None
    needed = (PARAM_BYTES + GRAD_BYTES) * shape.params + _part_of_state(
        shape, subgroup_params
    )
    backing: Backing = seams.service("storage")(
        config.storage, byte_count(config.host_bytes or needed, "host_bytes")
    )
    return backing


def _waits(
    config: CompareConfig,
    policies: Iterable[Policy],
    testbed: Testbed,
    shape: training_runs.Shape,
) -> training_runs.PhaseWaits:
    """Return how long forward and backward wait.

    By default, on an emulated device, they wait as long, and twice as long, as all
    updates on the CPU take: updates beside the step then have phases to run in, which
    take no core.
    """
    if config.waits is not None:
        if any(config.waits) and not testbed.emulated:
            raise UserError(
                "--forward-ms and --backward-ms are for an emulated device: add "
                "--emulate-link, e.g. 1GB"
            )
        return config.waits
    if not testbed.emulated or all(policy.overlap == "none" for policy in policies):
        return training_runs.PhaseWaits()
    update_s = shape.params / (testbed.machine.cpu_update_params_per_s or 1.0)
    return training_runs.PhaseWaits(update_s, 2 * update_s)


def _checked_shape(
    config: CompareConfig, policies: Iterable[Policy]
) -> training_runs.Shape:
    """Return the shape of the model. Raises UserError for settings that are invalid,
    before anything runs."""
    for policy in policies:
        policy.refuse_simulation_only()
    for name in config.baselines:
        if name not in (names := baseline_names()):
            raise UserError(f"--against {name!r}: choose from {', '.join(names)}")
    if config.iterations < MIN_ITERATIONS:
        raise UserError(
            f"--steps must be at least {MIN_ITERATIONS}: the first {_WARMUP} are "
            "warm-up"
        )
    shape = training_runs.find_shape(config.params)
    needed, memory = _HOST_BYTES * shape.params, host_limits.memory_bytes()
    if memory is not None and needed > memory:
        raise UserError(
            f"--params {config.params:g} needs {bytes_text(needed)} of host memory, "
            "but this host has only "
            f"{bytes_text(memory)}"
        )
    return shape


def _results(
    runs: Sequence[training_runs.PolicyRun], machine: Machine
) -> list[figures.ComparedPolicy]:
    # After the warm-up, and under the last plan: an adaptive policy may change its
    # plan.
    counted = [
        [one for one in run.schedules[_WARMUP:] if one.plan is run.schedules[-1].plan]
        for run in runs
    ]
    # All runs train the same job: the duration of its phases depends on the policy only
    # where they wait for it.
    schedules = [schedule for run_schedules in counted for schedule in run_schedules]
    phases = {
        key: median(getattr(schedule.workload, key) for schedule in schedules)
        for key in ("forward_s", "backward_s")
    }
    results = []
    for run, measured in zip(runs, counted, strict=True):
        last = measured[-1]
        predicted = simulate(last.plan, replace(last.workload, **phases), machine)
        losses_equal = _bits(run.losses) == _bits(runs[0].losses)
        results.append(
            figures.compared_policy(
                run.policy, measured, predicted, run.losses, losses_equal
            )
        )
    return results


def _bits(losses: Sequence[float]) -> bytes:
    return struct.pack(f"{len(losses)}d", *losses)


def _baseline(
    name: str, training: training_runs.TrainingRun, testbed: Testbed
) -> figures.BaselineResult:
    """Train with another optimizer. Raises CannotRun where it is not installed, or does
    not start."""
    job = training_runs.Job(
        training.shape, training.seed, testbed.device, training.waits
    )
    baseline = find_baseline(name)
    try:
        update = baseline.make(job.params)
    except ImportError as error:
        installed = find_spec(name) is not None
        raise training_runs.CannotRun(
            f"unsupported version: {error}"
            if installed
            else f"not installed: pip install {name}"
        ) from None
    except training_runs.CannotRun:
        raise
    except Exception as error:
        raise training_runs.CannotRun(f"it fails to start here: {error!r}") from error

    def clipped_update() -> None:
        torch.nn.utils.clip_grad_norm_(job.params, training_runs.MAX_GRAD_NORM)
        update()

    steps = training_runs.train(
        job, clipped_update, training.iterations, training.on_iteration
    )
    medians_ms = {
        f"{phase}_ms": 1e3
        * median(getattr(step, f"{phase}_s") for step in steps[_WARMUP:])
        for phase in ("iteration", *PHASES)
    }
    losses = figures.finite_losses([step.loss for step in steps])
    return figures.BaselineResult(
        name, baseline.description, **medians_ms, final_loss=losses[-1], losses=losses
    )
