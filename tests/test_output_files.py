"""Tests of output that is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.errors import UserError
from ebbtide.output_files import new_output


def write(path: Path, force: bool = False, text: str = "new") -> None:
    with new_output(path, force, Path.is_file, "a file") as temporary:
        temporary.write_text(text)
        assert not path.exists() or path.read_text() == "old"


def test_new_output__writes_a_complete_file(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "new"
    # The mode of other files of the user, not that of the private ones of tempfile.
    (tmp_path / "plain").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_new_output__keeps_an_existing_file_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(UserError, match="--force"):
        write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "old"
    write(tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_new_output__force_replaces_only_output_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="is not a file"):
        write(tmp_path / "out", force=True)
    with pytest.raises(UserError, match="is not a file"):
        write(Path(os.devnull), force=True)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("force", [False, True])
def test_new_output__failed_block_changes_nothing(tmp_path: Path, force: bool) -> None:
    if force:
        (tmp_path / "out").write_text("old")
    before = os.listdir(tmp_path)
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "out", force, "half \ud800")
    assert os.listdir(tmp_path) == before
    assert not force or (tmp_path / "out").read_text() == "old"


def test_new_output__restores_a_folder_that_could_not_be_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with (
        pytest.raises(UserError, match="cannot write"),
        new_output(tmp_path / "out", True, Path.is_dir, "a folder"),
    ):
        pass  # nothing was made
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["kept"]


def test_new_output__reports_an_unwritable_path_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"cannot write .*file/new/out: Not a directory"
    ):
        write(tmp_path / "file" / "new" / "out")


def test_new_output__creates_folders_unless_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "new" / "folder" / "out", text="half \ud800")
    assert os.listdir(tmp_path) == []
    write(tmp_path / "new" / "folder" / "out")
    assert os.listdir(tmp_path / "new" / "folder") == ["out"]
