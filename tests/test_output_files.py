"""Output stands whole at its path, or all is as it was."""

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


def test_a_file_appears_whole(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "new"
    # As any other file of the user's, not as the private ones of tempfile.
    (tmp_path / "plain").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_stands_is_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(UserError, match="--force"):
        write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "old"
    write(tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_force_replaces_nothing_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="is not a file"):
        write(tmp_path / "out", force=True)
    with pytest.raises(UserError, match="is not a file"):
        write(Path(os.devnull), force=True)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("force", [False, True])
def test_a_block_that_fails_leaves_all_as_it_was(tmp_path: Path, force: bool) -> None:
    if force:
        (tmp_path / "out").write_text("old")
    before = os.listdir(tmp_path)
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "out", force, "half \ud800")
    assert os.listdir(tmp_path) == before
    assert not force or (tmp_path / "out").read_text() == "old"


def test_a_folder_comes_back_where_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with (
        pytest.raises(UserError, match="cannot write"),
        new_output(tmp_path / "out", True, Path.is_dir, "a folder"),
    ):
        pass  # nothing was made
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["kept"]


def test_where_nothing_can_be_written_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*nowhere/out: No such file or directory"):
        write(tmp_path / "nowhere" / "out")
