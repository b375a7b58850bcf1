"""Mechanisms that keep bits: without each of them the generator of jobs finds wrong
bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ebbtide.features.layers.engine import weights
from ebbtide.features.layers.engine.recomputation import Recomputation
from ebbtide.features.layers.engine.transfers import StorageTransfers, bytes_of
from ebbtide.features.overlap.gates import ForwardGates
from ebbtide.features.overlap.pending_params import LateParams, PendingParams
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.params.step_calls import StepCalls
from ebbtide.interleave.engine.runtime.store import Store
from tests.conftest import slow
from tests.interleave.engine.grid.draw import draw_job
from tests.interleave.engine.grid.job import Job
from tests.interleave.engine.grid.judge import judge
from tests.interleave.engine.grid.models import WRITERS

Patch = tuple[Any, str, Callable[..., Any]]
# Seeds that are drawn, and jobs of them that are run.
SEEDS, JOBS = 2000, 25
EFFECTS = {
    "own generator",
    "random",
    "numpy",
    "counter",
    "buffer",
    "dropped",
    "cache",
    "batch norm",
}
CHANGES = {"scale", "data", "signs", "element", "all", "load"}


@dataclass(frozen=True)
class Mechanism:
    """Functions that take a mechanism out, and the jobs that it concerns."""

    patches: tuple[Patch, ...]
    concerns: Callable[[Job], bool]


def recomputes(job: Job) -> bool:
    return job.activations in (
        "recompute",
        "recompute-offload",
    ) and not EFFECTS.isdisjoint(job.kinds)


def writes_weights(job: Job) -> bool:
    return job.weights is not None and not set(WRITERS).isdisjoint(job.kinds)


def is_changed(job: Job) -> bool:
    return any(edit.kind in CHANGES and edit.step < job.steps for edit in job.edits)


def is_late(job: Job) -> bool:
    return (
        job.overlap in ("forward", "both")
        and job.gradients == "kept"
        and None not in job.rates
    )


def has_remainders(job: Job) -> bool:
    return (
        is_changed(job) and job.rule == "adamw-remainder" and job.policy != "gpu-only"
    )


def has_own_masters(job: Job) -> bool:
    return (
        is_changed(job)
        and job.dtype == torch.float32
        and job.rule in ("adamw", "adam", "sgd")
        and job.policy != "gpu-only"
    )


def streams(job: Job) -> bool:
    has_freeze = any(edit.kind == "freeze" for edit in job.edits)
    return job.weights not in (None, "resident") and not has_freeze


def streams_some(job: Job) -> bool:
    return streams(job) and str(job.weights) in [
        f"streamed:{count}" for count in range(1, len(job.kinds))
    ]


def forget_with_copy(
    weight: weights._Weight, forget: Callable[..., None] = weights._Weight.forget
) -> None:
    """Copy the weight to the host before its memory on the device is released, as if
    its layer were trained."""
    storage = weight.storage.hold()
    if storage is not None and weight.storage.host is not None:
        weight._owner.transfers.copy_now("d2h", bytes_of(storage), weight.storage.host)
    forget(weight)


def same_fingerprints(
    _: EmulatedDevice, values: Sequence[Any]
) -> Callable[[], list[bytes]]:
    return lambda: [b"" for _ in values]


MECHANISMS = {
    "comparison of recomputation": Mechanism(
        (
            (Recomputation, "_is_same", lambda _: True),
            (Recomputation, "_effect", lambda *_: ""),
        ),
        recomputes,
    ),
    "writes to streamed weights": Mechanism(
        ((StorageTransfers, "copy_now", lambda *_: None),), writes_weights
    ),
    "frozen weights that never go down": Mechanism(
        ((weights._Weight, "forget", forget_with_copy),),
        lambda job: bool(job.frozen) and streams(job),
    ),
    "adapters that stay": Mechanism(
        ((weights, "_adapters_in", lambda _: ()),),
        lambda job: bool(job.adapted) and streams(job),
    ),
    "a number of streamed layers": Mechanism(
        ((weights, "spread", lambda _, count: (True,) * count),), streams_some
    ),
    "fingerprints of parameters": Mechanism(
        ((EmulatedDevice, "fingerprint", same_fingerprints),), is_changed
    ),
    "waits for late parameters": Mechanism(
        (
            (LateParams, "set", lambda *_: None),
            (PendingParams, "wait_for", lambda *_: None),
            (PendingParams, "gradient_ready", lambda *_: None),
            (ForwardGates, "is_gated", lambda *_: True),
        ),
        is_late,
    ),
    "parameters that a step may leave late": Mechanism(
        ((PendingParams, "decided", lambda *_: None),), is_late
    ),
    "records of what a late step has written": Mechanism(
        ((StepCalls, "record", lambda *_: None),), is_late
    ),
    "values of own masters on the host": Mechanism(
        ((Store, "params_on_host", lambda *_: set()),), has_own_masters
    ),
    "copies of changed parameters": Mechanism(
        ((Store, "forget_params", lambda *_: None),), has_remainders
    ),
}


@pytest.mark.parametrize("name", slow(MECHANISMS, but=("writes to streamed weights",)))
def test_random_jobs__find_each_mechanism_that_is_taken_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = MECHANISMS[name]
    for owner, attribute, replacement in mechanism.patches:
        monkeypatch.setattr(owner, attribute, replacement)
    concerned = (
        job for seed in range(SEEDS) if mechanism.concerns(job := draw_job(seed))
    )
    jobs = [job for job, _ in zip(concerned, range(JOBS), strict=False)]
    number = next(
        (number for number, job in enumerate(jobs, 1) if judge(job).kind == "differs"),
        None,
    )
    print(f"{name}: in job {number} of {len(jobs)}")
    assert number is not None
