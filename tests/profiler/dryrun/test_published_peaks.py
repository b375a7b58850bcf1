"""Peaks of a job that was recorded on an H100, predicted from the description of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.profiler.dryrun.session import DryRun, DryRunOptions
from ebbtide.profiler.memory_snapshot.pools import pool_timeline
from ebbtide.profiler.memory_snapshot.reader import read_snapshot
from tests.profiler.dryrun.forked import run_forked
from tests.profiler.dryrun.published_model import BATCH, VOCABULARY, PublishedModel, SimpleAdamW

PUBLISHED = Path(__file__).parents[4] / "shared" / "published" / "snapshots"
CONTEXT = 128


def measured_peaks(name: str) -> tuple[int, int]:
    """Return the largest requested and reserved bytes of a snapshot; skip where it is missing."""
    path = PUBLISHED / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"{path.name} is not published here")
    snapshot = read_snapshot(lambda: path.open("rb"))
    requested, reserved = (int(pool_timeline(snapshot, 0, pool).bytes.max()) for pool in ("requested", "reserved"))
    return requested, reserved


def predict_peaks(full_step: bool) -> tuple[int, int]:
    """Return the largest requested and reserved bytes of a dry run, in a process of its own."""
    with DryRun(DryRunOptions(iterations=1)) as run:
        model = PublishedModel(CONTEXT)
        tokens, targets = (torch.randint(0, VOCABULARY, (BATCH, CONTEXT)).to("cuda") for _ in range(2))
        logits = model(tokens)
        if full_step:
            optimizer = SimpleAdamW(model.parameters())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1)).backward()
            optimizer.step()
    return run.memory.most_bytes, run.memory.most_reserved_bytes


@pytest.mark.parametrize(
    ("name", "full_step"),
    [
        ("cs336-ctx128-forward", False),
        pytest.param("cs336-ctx128-fullstep", True, marks=pytest.mark.slow),
    ],
)
def test_dry_run__predicts_the_peaks_of_an_h100(name: str, full_step: bool) -> None:
    requested, reserved = measured_peaks(name)
    predicted, predicted_reserved = run_forked(lambda: predict_peaks(full_step))
    assert predicted == pytest.approx(requested, rel=1e-4)
    assert predicted_reserved == pytest.approx(reserved, rel=0.005)
