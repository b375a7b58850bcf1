"""Advice by simulation, one function for each question: which policy, which setting of
DeepSpeed itself, and which activations."""

from collections.abc import Mapping
from typing import Any

from ebbtide.analysis.metrics.advice import Advice
from ebbtide.features.advise.choice import PolicyChoice, fits_memory
from ebbtide.features.advise.lines.setups import (
    PasteContext,
    PolicySetup,
    best_setup,
    placeholders,
    setup_of,
)
from ebbtide.features.advise.present import Present
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay.replay import memory_needs
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.machine import unified_memory_text
from ebbtide.units import bytes_text


def policy_advice(choice: PolicyChoice, context: PasteContext) -> Advice | None:
    """Return the policy to change to; None where nothing gains, or fits."""
    if not choice.gains:
        return None
    policy = choice.best.plan.policy
    if policy == "gpu-only":
        return deepspeed_advice(choice.steps, choice.present, context)
    overlap = "none" if choice.overlap is None else choice.overlap.option
    return _advice(
        "policy",
        {"policy": policy, "overlap": overlap},
        f"use {choice.steps.plan.policy}",
        choice.steps,
        choice.present,
        context,
        best_setup(choice, context),
    )


def deepspeed_advice(
    steps: Steps, present: Present, context: PasteContext
) -> Advice | None:
    """Return a setting that DeepSpeed has by itself, no offload or a static split; None
    where it gains nothing or does not fit."""
    # With unified memory the state has its place already.
    fits = context.machine.unified_memory or fits_memory(steps, context.machine)
    if not fits or not present.is_slower_than(steps):
        return None
    setup = setup_of(steps, context)
    change = "do not offload at all"
    if setup.policy != "gpu-only":
        change = (
            "keep that part of the optimizer's state on the device (a static split: "
            f'"offload_optimizer": {{"ratio": {setup.offload_optimizer["ratio"]:g}}})'
        )
    settings = {"offload_optimizer": setup.offload_optimizer}
    return _advice("deepspeed", settings, change, steps, present, context, setup)


def activations_advice(
    workload: Workload, context: PasteContext, *, offloads: bool
) -> Advice | None:
    """Return the best choice of activations of layers, compared with computing all
    again: so does a job that checkpoints, and one that does not fits only so. None
    where none fits or gains."""
    machine = context.machine
    policy = Policy.make("pipelined" if offloads else "gpu-only")
    again, best = (
        simulate_steps(
            policy.with_options(activations=kind).plan(workload, machine),
            workload,
            machine,
        )
        for kind in ("recompute", "auto")
    )
    layers, present = best.valid.plan.layers, Present(again)
    fits = fits_memory(best, machine)
    if layers is None or not fits or not present.is_slower_than(best):
        return None
    counts = layers.counts(len(workload.chunk_shares))[1]
    kinds = [
        f"{kind.replace('-', ' and ')} those of {count} layers"
        for kind, count in counts.items()
        if count
    ]
    change = f"activations: {', '.join(kinds)}"
    if copied := layers.host_bytes(workload):
        change += (
            f": {bytes_text(copied)} to the host in the forward, and back in the "
            "backward"
        )
    return _advice("activations", counts, change, best, present, context)


def _advice(
    kind: str,
    settings: Mapping[str, Any],
    change: str,
    steps: Steps,
    present: Present,
    context: PasteContext,
    setup: PolicySetup | None = None,
) -> Advice:
    machine, workload = context.machine, steps.valid.workload
    counts = workload.framework
    ends_offload = kind == "deepspeed" and steps.plan.policy == "gpu-only"
    note = unified_memory_text(machine) if ends_offload else None
    return Advice(
        kind,
        settings,
        change,
        present.gain(steps),
        () if machine.unified_memory else memory_needs(steps.valid, machine),
        "ebbtide" if counts is None else " ".join(counts).strip(),
        {} if setup is None else setup.blocks(),
        () if setup is None else tuple(placeholders(workload, context.job)),
        () if note is None else (note,),
        ends_offload,
    )
