"""The trace's folder: never replaced while it is recorded, never deleted if it is not
the recorder's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ebbtide, running_process
from tests.profiler.harm.programs import (
    ebbtide_lines,
    iterations_of,
    job_lines,
    profile_command,
    run_profiled,
    training_program,
)

UNTIL_TOLD = """
import pathlib, time
train(3)
print("ready", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
train(2)
"""


def test_profile__refuses_to_replace_a_trace_that_is_being_recorded(
    tmp_path: Path,
) -> None:
    path, go = tmp_path / "run.ebb", tmp_path / "go"
    job = training_program(tmp_path, UNTIL_TOLD)
    with running_process(profile_command(path, sys.executable, job, go)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        second = ebbtide(
            "profile", "--force", "-o", path, "--", "touch", "second", cwd=tmp_path
        )
        go.touch()
        assert process.wait(60) == 0
    assert second.returncode == 2
    assert len(second.stderr.splitlines()) == 1
    assert second.stderr.startswith("ebbtide: ")
    assert str(path) in second.stderr
    assert not (tmp_path / "second").exists()
    assert iterations_of(path) == 5
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "go",
        "job.py",
        "run.ebb",
    ]


@pytest.mark.parametrize(
    "recorded", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_profile__does_not_delete_a_folder_that_took_the_place_of_its_own(
    recorded: bool, tmp_path: Path
) -> None:
    swap = "mv run.ebb moved && mkdir run.ebb && echo kept > run.ebb/notes"
    train = f"{sys.executable} {training_program(tmp_path, 'train(3)')}"
    run = run_profiled(
        "sh", "-c", f"{swap} && {train}" if recorded else swap, cwd=tmp_path
    )
    assert run.returncode == 0
    assert job_lines(run.stderr) == []
    assert [file.name for file in (tmp_path / "run.ebb").iterdir()] == ["notes"]
    assert (tmp_path / "run.ebb" / "notes").read_text() == "kept\n"


def test_profile__does_not_replace_a_folder_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "run.ebb").mkdir()
    (tmp_path / "run.ebb" / "notes").write_text("kept")
    run = ebbtide("profile", "--force", "-o", "run.ebb", "--", "true", cwd=tmp_path)
    assert run.returncode == 2
    assert (tmp_path / "run.ebb" / "notes").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 0])
def test_profile__keeps_the_exit_status_of_a_job_that_removes_the_trace(
    steps: int, tmp_path: Path
) -> None:
    program = (
        f"train({steps}) if {steps} else None\nimport shutil; "
        "shutil.rmtree('run.ebb')\ntrain(2)\nsys.exit(5)\n"
    )
    run = run_profiled(
        sys.executable, training_program(tmp_path, program), cwd=tmp_path
    )
    assert run.returncode == 5
    assert job_lines(run.stderr) == []
    assert len(ebbtide_lines(run.stderr)) == 1
    assert not (tmp_path / "run.ebb").exists()


@pytest.mark.slow
def test_profile__outlives_the_removal_of_all_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    program = "import shutil; shutil.rmtree(sys.argv[1])\ntrain(2)\nprint('done')\n"
    job = training_program(tmp_path, program)
    run = run_profiled(sys.executable, job, folder, cwd=folder)
    assert (run.returncode, run.stdout) == (0, "done\n")
    assert job_lines(run.stderr) == []
    assert not folder.exists()


@pytest.mark.slow
def test_profile__writes_a_relative_output_where_it_was_started(tmp_path: Path) -> None:
    program = "os.mkdir('elsewhere')\nos.chdir('elsewhere')\ntrain(3)\n"
    run = run_profiled(
        sys.executable, training_program(tmp_path, program), cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert iterations_of(tmp_path / "run.ebb") == 3
    shutil.rmtree(tmp_path / "run.ebb")
