"""The agent writes to no descriptor of the job, and loses nothing where the job ends
without a warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import slow
from tests.profiler.harm.programs import (
    iterations_of,
    job_lines,
    run_profiled,
    training_program,
)

CLOSE_AND_OPEN = """
os.closerange(3, 4096)
files = [open(f"own-{number}.bin", "wb", buffering=0) for number in range(12)]
"""

DUPLICATE_OVER_ALL = """
files = [open(f"own-{number}.bin", "wb", buffering=0) for number in range(12)]
for number in range(3, 512):
    if number not in [file.fileno() for file in files]:
        os.dup2(files[number % 12].fileno(), number)
"""

TAKE_OVER = {
    "closes all descriptors": CLOSE_AND_OPEN,
    "duplicates over all descriptors": DUPLICATE_OVER_ALL,
}


@pytest.mark.parametrize("name", slow(TAKE_OVER, but=["closes all descriptors"]))
def test_agent__writes_nothing_into_files_of_a_job_that_takes_over_its_descriptor(
    name: str, tmp_path: Path
) -> None:
    program = (
        "import time\ntrain(2)\n"
        + TAKE_OVER[name]
        + """
for file in files:
    file.write(b"x" * 200)
train(3)
time.sleep(0.6)
train(2)
if os.fork() == 0:
    for file in files:
        file.write(b"child")
    sys.exit(0)
print(os.wait()[1])
for file in files:
    file.write(b"parent")
"""
    )
    run = run_profiled(
        sys.executable, training_program(tmp_path, program), cwd=tmp_path
    )
    assert job_lines(run.stderr) == []
    assert (run.returncode, run.stdout) == (0, "0\n")
    contents = [(tmp_path / f"own-{number}.bin").read_bytes() for number in range(12)]
    assert contents == [b"x" * 200 + b"child" + b"parent"] * 12
    assert iterations_of(tmp_path / "run.ebb") == 7


@pytest.mark.slow
def test_agent__leaves_the_numbers_of_the_standard_descriptors_to_the_job(
    tmp_path: Path,
) -> None:
    program = """
    for number in range(3):
        os.close(number)
    train(2)
    numbers = [os.open(name, os.O_WRONLY | os.O_CREAT) for name in ("first", "second", "third")]
    print("printed", numbers)
    train(2)
    """
    run = run_profiled(
        sys.executable, training_program(tmp_path, program), cwd=tmp_path
    )
    assert run.returncode == 0
    assert (tmp_path / "second").read_text() == "printed [0, 1, 2]\n"
    assert [(tmp_path / name).read_text() for name in ("first", "third")] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("os._exit(0)", 0), ("os.kill(os.getpid(), 9)", -9)]
)
def test_agent__loses_at_most_the_last_iteration_of_a_job_that_ends_abruptly(
    end: str, status: int, tmp_path: Path
) -> None:
    run = run_profiled(
        sys.executable,
        training_program(tmp_path, f"train(1000)\n{end}\n"),
        cwd=tmp_path,
    )
    assert (run.returncode, job_lines(run.stderr)) == (status, [])
    assert iterations_of(tmp_path / "run.ebb") in (999, 1000)


@pytest.mark.slow
def test_profile__does_not_blame_a_job_that_has_no_descriptor_left_for_the_recorder(
    tmp_path: Path,
) -> None:
    program = training_program(
        tmp_path,
        """
        import resource
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        print(train(3))
        """,
    )
    run = run_profiled(sys.executable, program, cwd=tmp_path)
    assert run.returncode == 0
    assert float(run.stdout) > 0
    assert "no file descriptor" in run.stderr
