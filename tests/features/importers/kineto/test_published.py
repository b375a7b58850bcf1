"""Traces of torch.profiler that others have published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.features.importers.kineto.made_kineto import (
    events,
    import_files,
    named,
    shape,
)

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "kineto"


@pytest.fixture(params=["control.json.gz", "sampled_rank-0.json.gz"])
def published(request: pytest.FixtureRequest) -> Path:
    path = PUBLISHED / request.param
    if not path.exists():
        pytest.skip("the published measurements are not here (shared/published)")
    return path


def test_transfers__match_the_json_of_published_traces(published: Path) -> None:
    trace = import_files(published)
    (rank,) = trace.ranks
    rows = trace.transfers(rank)
    for direction, kind in (("h2d", "HtoD"), ("d2h", "DtoH")):
        copies = [
            e
            for e in events(published)
            if e.get("cat") == "gpu_memcpy" and kind in e["name"]
        ]
        imported_copies = rows[rows["direction"] == direction]
        assert len(imported_copies) == len(copies) > 0
        assert imported_copies["bytes"].sum() == sum(
            event["args"]["bytes"] for event in copies
        )
        spans = zip(
            imported_copies["start_ns"].tolist(),
            imported_copies["end_ns"].tolist(),
            strict=True,
        )
        assert busy(spans) == busy((event["start"], event["end"]) for event in copies)


def busy(spans: Any) -> int:
    """Return the ns that at least one of the spans covers."""
    total = reached = 0
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def test_find_phases__match_the_annotations_of_published_traces(
    published: Path,
) -> None:
    trace = import_files(published)
    phases = trace.phases(trace.ranks[0])
    for phase, name in (("forward", "## forward ##"), ("backward", "## backward ##")):
        of_phase = phases[phases["phase"] == phase]
        assert of_phase["start_ns"].tolist() == [
            event["start"] for event in named(published, name)
        ]
        assert of_phase["end_ns"].tolist() == [
            event["end"] for event in named(published, name)
        ]
    steps = [
        int(e["name"][13:])
        for e in events(published)
        if e.get("name", "").startswith("ProfilerStep#")
    ]
    assert phases["iteration"].unique().tolist() == sorted(steps)
    assert {text.rstrip("u") for text in shape(phases).values()} == {"fb"}
