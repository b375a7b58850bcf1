"""The platform check of a recording."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbtide.errors import TraceError
from ebbtide.profiler import Tracer
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording import lifecycle
from ebbtide.profiler.recording.collector import RecordedCommand
from ebbtide.profiler.recording.launch import profile


@pytest.fixture(autouse=True)
def another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the recorder believe that this is macOS."""
    monkeypatch.setattr(lifecycle, "sys", SimpleNamespace(platform="darwin"))


def test_profile__requires_linux(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="records on Linux only, and this is darwin"):
        profile(RecordedCommand(["true"], tmp_path / "run.ebb", Options()))
    assert list(tmp_path.iterdir()) == []


def test_tracer__requires_linux(tmp_path: Path) -> None:
    with (
        pytest.raises(TraceError, match="records on Linux only"),
        Tracer(tmp_path / "run.ebb"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
