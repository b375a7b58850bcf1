"""Mechanisms that keep bits: without each of them the generator of jobs finds wrong bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ebbtide.features.layers.engine.recomputation import Recomputation
from ebbtide.features.layers.engine.transfers import StorageTransfers
from ebbtide.features.overlap.gates import ForwardGates
from ebbtide.features.overlap.pending_params import LateParams, PendingParams
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.runtime.store import Store
from tests.conftest import slow
from tests.interleave.engine.grid.draw import draw_job
from tests.interleave.engine.grid.job import Job
from tests.interleave.engine.grid.judge import judge
from tests.interleave.engine.grid.models import WRITERS

Patch = tuple[type, str, Callable[..., Any]]
# Seeds that are drawn, and jobs of them that are run.
SEEDS, JOBS = 2000, 25
EFFECTS = {"own generator", "random", "numpy", "counter", "buffer", "dropped", "cache", "batch norm"}
CHANGES = {"scale", "data", "signs", "element", "all", "load"}


@dataclass(frozen=True)
class Mechanism:
    """Functions that take a mechanism out, and the jobs that it concerns."""

    patches: tuple[Patch, ...]
    concerns: Callable[[Job], bool]


def recomputes(job: Job) -> bool:
    return job.activations in ("recompute", "recompute-offload") and not EFFECTS.isdisjoint(job.kinds)


def writes_weights(job: Job) -> bool:
    return job.weights is not None and not set(WRITERS).isdisjoint(job.kinds)


def is_changed(job: Job) -> bool:
    return any(edit.kind in CHANGES and edit.step < job.steps for edit in job.edits)


def is_late(job: Job) -> bool:
    return job.overlap in ("forward", "both") and job.gradients == "kept" and None not in job.rates


def has_remainders(job: Job) -> bool:
    return is_changed(job) and job.rule == "adamw-remainder" and job.policy != "gpu-only"


def same_fingerprints(_: EmulatedDevice, values: Sequence[Any]) -> Callable[[], list[bytes]]:
    return lambda: [b"" for _ in values]


MECHANISMS = {
    "comparison of recomputation": Mechanism(
        ((Recomputation, "_is_same", lambda _: True), (Recomputation, "_effect", lambda *_: "")), recomputes
    ),
    "writes to streamed weights": Mechanism(((StorageTransfers, "copy_now", lambda *_: None),), writes_weights),
    "fingerprints of parameters": Mechanism(((EmulatedDevice, "fingerprint", same_fingerprints),), is_changed),
    "waits for late parameters": Mechanism(
        (
            (LateParams, "set", lambda *_: None),
            (PendingParams, "wait_for", lambda *_: None),
            (PendingParams, "check_gradient", lambda *_: None),
            (ForwardGates, "is_gated", lambda *_: True),
        ),
        is_late,
    ),
    "copies of changed parameters": Mechanism(((Store, "forget_params", lambda *_: None),), has_remainders),
}


@pytest.mark.parametrize("name", slow(MECHANISMS, but=("writes to streamed weights",)))
def test_random_jobs__find_each_mechanism_that_is_taken_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = MECHANISMS[name]
    for owner, attribute, replacement in mechanism.patches:
        monkeypatch.setattr(owner, attribute, replacement)
    concerned = (job for seed in range(SEEDS) if mechanism.concerns(job := draw_job(seed)))
    jobs = [job for job, _ in zip(concerned, range(JOBS), strict=False)]
    number = next((number for number, job in enumerate(jobs, 1) if judge(job).kind == "differs"), None)
    print(f"{name}: in job {number} of {len(jobs)}")
    assert number is not None
