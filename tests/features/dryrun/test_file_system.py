"""The file system of a dry run: the job sees its own changes, and the disk keeps the
user's files."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import posix
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.files import view as view_module
from ebbtide.features.dryrun.files.patching import FileFunctions
from ebbtide.features.dryrun.files.programs import changing_program
from ebbtide.features.dryrun.files.view import FileView, guard
from ebbtide.features.dryrun.files.writers import fork_processes, patch_writers
from ebbtide.profiler.agent.patches import Patches

CAPTURED_OPEN = builtins.open


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user, which must be as it was after the test, with file functions
    that go through a view."""
    for name in (
        "out/step-1/model.bin",
        "out/step-2/model.bin",
        "out/log.txt",
        "data/train.bin",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    view, patches = FileView(), Patches()
    FileFunctions(view, lambda _path: None).install(patches)
    guard.start(view)
    try:
        yield tmp_path
    finally:
        patches.undo()
        guard.stop()
        view.close()
    assert tree(tmp_path) == before
    assert not os.path.exists(view.folder)


def test_open__changes_a_copy(folder: Path) -> None:
    with open("out/log.txt", "a") as file:
        file.write("+")
    assert Path("out/log.txt").read_text() == "out/log.txt+"
    assert os.path.getsize("out/log.txt") == len("out/log.txt+")
    (folder / "out/log.txt").write_text("new")
    with open(b"out/log.txt") as file:
        assert file.read() == "new"
    descriptor = os.open("data/train.bin", os.O_RDWR)
    os.ftruncate(descriptor, 4)
    os.close(descriptor)
    assert Path("data/train.bin").read_text() == "data"
    os.truncate("data/train.bin", 2)
    assert Path("data/train.bin").read_text() == "da"
    with pytest.raises(FileExistsError):
        Path("out/step-1/model.bin").open("x").close()


def test_rmtree__hides_a_folder_that_can_be_made_again(folder: Path) -> None:
    shutil.rmtree("out")
    assert not os.path.exists("out/step-1")
    assert not Path("out").exists()
    assert sorted(os.listdir(".")) == ["data"]
    with pytest.raises(FileNotFoundError):
        Path("out/log.txt").read_text()
    with pytest.raises(FileNotFoundError):
        Path("out/log.txt").write_text("")
    os.makedirs("out/step-3")
    Path("out/step-3/model.bin").write_text("3")
    assert [(path, sorted(names)) for path, names, _ in os.walk("out")] == [
        ("out", ["step-3"]),
        ("out/step-3", []),
    ]
    assert [entry.path for entry in os.scandir("out/step-3")] == [
        "out/step-3/model.bin"
    ]
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("out")


def test_rename__of_the_users_files_holds_for_the_job_alone(folder: Path) -> None:
    os.rename("out/step-1", "out/best")
    Path("out/best/model.bin").write_text("changed")
    Path("out/best/more.txt").write_text("more")
    assert sorted(os.listdir("out")) == ["best", "log.txt", "step-2"]
    assert sorted(os.listdir("out/best")) == ["model.bin", "more.txt"]
    os.rename("out/best", "out/step-1")
    assert Path("out/step-1/model.bin").read_text() == "changed"
    shutil.move("out/step-2", "data/step-2")
    assert Path("data/step-2/model.bin").read_text() == "out/step-2/model.bin"
    assert not os.path.exists("out/step-2")


def test_replace__of_a_checkpoint_by_a_new_one_works_again_and_again(
    folder: Path,
) -> None:
    for content in ("1", "2", "3"):
        Path("model.tmp").write_text(content)
        os.replace("model.tmp", "out/step-1/model.bin")
        assert Path("out/step-1/model.bin").read_text() == content
        assert not os.path.exists("model.tmp")
    os.remove("out/step-1/model.bin")
    assert os.listdir("out/step-1") == []


def test_links__do_not_lead_to_changes(folder: Path) -> None:
    os.symlink("step-2", "out/latest")
    Path("out/latest/model.bin").write_text("through the link")
    os.link("data/train.bin", "data/copy.bin")
    Path("data/copy.bin").write_text("through the hard link")
    assert Path("data/copy.bin").read_text() == "through the hard link"
    os.chmod("data/train.bin", 0o400)
    os.utime("data/train.bin", (1, 1))
    assert posix.stat("data/train.bin").st_mtime > 1


def test_new_files__are_on_the_disk_until_the_end(folder: Path) -> None:
    Path("cache/a").mkdir(parents=True)
    Path("cache/a/b.arrow").write_text("b")
    os.rename("cache/a", "cache/c")
    assert CAPTURED_OPEN("cache/c/b.arrow").read() == "b"
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as other:
        file.write(b"1")
        Path(other, "x").write_text("x")
    assert not os.path.exists(other)


def test_new_files__of_a_forked_process_are_removed_at_the_end(folder: Path) -> None:
    child = os.fork()
    if not child:
        Path("prepared").mkdir()
        Path("prepared/data.arrow").write_text("x")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.listdir("prepared") == ["data.arrow"]


def _write_new() -> None:
    Path("prepared.arrow").write_text("x")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_new_files__of_a_process_that_is_started_afresh_are_removed_at_the_end(
    folder: Path, method: str
) -> None:
    patches = Patches()
    fork_processes(multiprocessing.context, patches)
    try:
        process = multiprocessing.get_context(method).Process(target=_write_new)
        process.start()
        process.join()
    finally:
        patches.undo()
    assert Path("prepared.arrow").read_text() == "x"
    assert multiprocessing.get_context(method).get_start_method() == method


def test_guard__refuses_functions_that_were_taken_before(folder: Path) -> None:
    for call in (
        lambda: CAPTURED_OPEN("out/log.txt", "w"),
        lambda: posix.unlink("out/log.txt"),
        lambda: posix.rename("out/log.txt", "x"),
        lambda: posix.truncate("out/log.txt", 1),
        lambda: os.remove("log.txt", dir_fd=os.open("out", os.O_RDONLY)),
    ):
        with pytest.raises(
            PermissionError, match="a dry run changes no file that exists"
        ):
            call()


def test_large_file__is_not_copied_to_be_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "_MAX_COPIED_BYTES", 3)
    with pytest.raises(CannotFakeError, match=r"a change of .*train.bin: it exists"):
        Path("data/train.bin").open("r+b").close()
    Path("data/train.bin").write_text("needs no copy")


def test_caches__are_written_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    view, patches = FileView(), Patches()
    FileFunctions(view, lambda _path: None).install(patches)
    try:
        (tmp_path / "hub").mkdir()
        (tmp_path / "hub/model.safetensors").write_text("downloaded")
    finally:
        patches.undo()
        view.close()
    assert (tmp_path / "hub/model.safetensors").read_text() == "downloaded"


def test_databases__are_copied_to_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "study.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE trials (loss REAL)")
    before = database.read_bytes()
    patches, view = Patches(), FileView()
    patch_writers(patches, view)
    try:
        with monkeypatch.context() as smaller:
            smaller.setattr(view_module, "_MAX_COPIED_BYTES", 3)
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                sqlite3.connect(database).execute("INSERT INTO trials VALUES (1.0)")
        with sqlite3.connect(database) as copy:
            copy.execute("INSERT INTO trials VALUES (1.0)")
        assert sqlite3.connect(database).execute(
            "SELECT COUNT(*) FROM trials"
        ).fetchone() == (1,)
    finally:
        patches.undo()
        view.close()
    assert database.read_bytes() == before


PROGRAMS = [
    ("rm -rf out", "rm"),
    (["/bin/cp", "a", "b"], "cp"),
    (["sh", "-c", "echo; mv a b"], "mv"),
    ("nvidia-smi -q", None),
    (["git", "rev-parse", "HEAD"], None),
    ("echo 'unbalanced", None),
]


def test_changing_program__is_found_in_text_and_words() -> None:
    for command, program in PROGRAMS:
        assert changing_program(command) == program


def test_made__is_listed_on_the_disk_though_the_job_closes_descriptors(
    tmp_path: Path,
) -> None:
    view = FileView()
    (tmp_path / "a").touch()
    view.note_made(str(tmp_path / "a"))
    links = {
        number: os.path.realpath(f"/proc/self/fd/{number}")
        for number in map(int, posix.listdir("/proc/self/fd"))
    }
    # Opening the list for each file would take longer than the file.
    (number,) = (
        number
        for number, path in links.items()
        if path == os.path.join(view.folder, "made")
    )
    with open(tmp_path / "b", "w") as other:
        os.dup2(other.fileno(), number)
        view.note_made(str(tmp_path / "b"))
        assert os.path.getsize(tmp_path / "b") == 0
        assert [
            os.path.basename(path) for path in view_module.made_in(view.folder)
        ] == ["a", "b"]
        view.close()
        assert os.fstat(number)
        os.close(number)
    assert not any(tmp_path.iterdir())
