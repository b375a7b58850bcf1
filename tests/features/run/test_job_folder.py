"""Private copies of the folder of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.run.comparison import job_folder
from ebbtide.features.run.comparison.job_folder import private_copy


def test_copy_is_private_and_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "train.txt").write_text("mine")
    (home / ".venv").mkdir()
    (tmp_path / "beside.txt").write_text("beside")
    with private_copy(home) as copy:
        assert copy is not None
        assert (copy / "data" / "train.txt").read_text() == "mine"
        assert (copy / ".." / "beside.txt").read_text() == "beside"
        assert (copy / ".venv").is_symlink()
        (copy / "data" / "train.txt").write_text("of the job")
        (copy / "out").mkdir()
    assert (home / "data" / "train.txt").read_text() == "mine"
    assert not copy.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.txt", "home"]
    assert not (home / "out").exists()


def test_large_files_are_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "_MAX_FILE_BYTES", 10)
    home = tmp_path / "home"
    home.mkdir()
    (home / "large.bin").write_bytes(bytes(11))
    (home / "small.bin").write_bytes(bytes(10))
    with private_copy(home) as copy:
        assert copy is not None
        assert (copy / "large.bin").is_symlink()
        assert not (copy / "small.bin").is_symlink()


def test_folder_of_many_files_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folder, "_MAX_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    with private_copy(tmp_path) as copy:
        assert copy is None
