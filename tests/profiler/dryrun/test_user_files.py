"""The user's files in a dry run: nothing is saved, nothing large is read, and what is opened for writing is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from ebbtide.profiler.dryrun import user_files
from ebbtide.profiler.dryrun.session import DryRun
from tests.profiler.dryrun.forked import run_forked

ELEMENTS = 100_000


def test_save__writes_nothing_and_counts_bytes(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(b"the user's own")

    def observe() -> list[str]:
        with DryRun() as run:
            weight = torch.zeros(1_000_000, device="cuda")
            torch.save({"weight": weight, "view": weight[:10]}, checkpoint)
            safetensors.torch.save_file({"weight": weight}, tmp_path / "model.safetensors")
        return run.user_files.lines()

    lines = run_forked(observe)
    assert lines == ["the job saved 2 times, 0.01 GB in all: nothing of it was written"]
    assert checkpoint.read_bytes() == b"the user's own"
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.parametrize("max_read_bytes", [0, 1 << 30])
def test_load__gives_fake_tensors_of_the_right_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_read_bytes: int
) -> None:
    monkeypatch.setattr(user_files, "_MAX_READ_BYTES", max_read_bytes)
    path = tmp_path / "model.pt"
    content = {"weight": torch.ones(ELEMENTS, dtype=torch.bfloat16), "step": torch.tensor(7), "name": "x"}
    torch.save(content, path)
    before = path.read_bytes()

    def observe() -> Any:
        with DryRun():
            loaded = torch.load(path, map_location="cuda")
            weight = loaded["weight"]
            step = loaded["step"].item()
        return type(weight).__name__, str(weight.device), tuple(weight.shape), str(weight.dtype), loaded["name"], step

    *facts, step = run_forked(observe)
    assert facts == ["FakeTensor", "cuda:0", (ELEMENTS,), "torch.bfloat16", "x"]
    # A checkpoint that is read has its small values.
    assert step == (7 if max_read_bytes else 1)
    assert path.read_bytes() == before


def test_safetensors__gives_fake_tensors_from_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(
        {"weight": torch.ones(400, 300, dtype=torch.float16), "bias": torch.ones(300)}, path, {"format": "pt"}
    )
    # Without the data behind its header.
    header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    path.write_bytes(header)

    def observe() -> Any:
        with DryRun():
            tensors = safetensors.torch.load_file(path, device="cuda")
            with safetensors.safe_open(path, framework="pt") as file:
                part = file.get_slice("weight")[:100]
                names, metadata = sorted(file.keys()), file.metadata()
        weight = tensors["weight"]
        return type(weight).__name__, str(weight.device), str(weight.dtype), tuple(part.shape), names, metadata

    assert run_forked(observe) == (
        "FakeTensor",
        "cuda:0",
        "torch.float16",
        (100, 300),
        ["bias", "weight"],
        {"format": "pt"},
    )
    with pytest.raises(Exception, match=r".+"):
        safetensors.torch.load_file(path)


def test_opened_files__are_listed_where_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x")

    def observe() -> list[str]:
        with DryRun() as run:
            run.user_files.watch_opens()
            (tmp_path / "data.txt").read_text()
            (tmp_path / "log.txt").write_text("y")
        (tmp_path / "afterwards.txt").write_text("z")
        return run.user_files.lines()

    assert run_forked(observe) == [f"files that the job opened for writing: {tmp_path / 'log.txt'}"]
