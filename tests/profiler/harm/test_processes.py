"""Jobs of several processes: exec, fork, several trainings, and commands that do not
train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbtide.profiler.trace import open_trace
from tests.conftest import Recorded
from tests.profiler.harm.programs import (
    ebbtide_lines,
    iterations_of,
    job_lines,
    profile_command,
    run_bare,
    run_profiled,
    trace_names,
    training_program,
)


@pytest.mark.slow
def test_profile__writes_a_trace_for_each_program_of_an_exec(tmp_path: Path) -> None:
    second = training_program(
        tmp_path, "train(5)\nprint('second', sys.argv[1:])\n", "second.py"
    )
    program = (
        f"train(3)\nos.execv(sys.executable, [sys.executable, {str(second)!r}, 'a'])\n"
    )
    run = run_profiled(
        sys.executable, training_program(tmp_path, program), cwd=tmp_path
    )
    assert (run.returncode, run.stdout) == (0, "second ['a']\n")
    assert job_lines(run.stderr) == []
    assert any("exec" in line for line in ebbtide_lines(run.stderr)), run.stderr
    assert trace_names(tmp_path) == ["run-2.ebb", "run.ebb"]
    assert iterations_of(tmp_path / "run.ebb") == 3
    assert iterations_of(tmp_path / "run-2.ebb") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["python a.py; python b.py", "python a.py & python b.py & wait"]
)
def test_profile__writes_a_trace_for_each_independent_training(
    script: str, tmp_path: Path
) -> None:
    training_program(tmp_path, "train(3)\n", "a.py")
    training_program(tmp_path, "train(5)\n", "b.py")
    (tmp_path / "job.sh").write_text(script.replace("python", sys.executable))
    run = run_profiled("sh", "job.sh", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "")
    assert job_lines(run.stderr) == []
    assert trace_names(tmp_path) == ["run-2.ebb", "run.ebb"]
    assert any("run-2.ebb" in line for line in ebbtide_lines(run.stderr)), run.stderr
    counts = [iterations_of(tmp_path / name) for name in ("run.ebb", "run-2.ebb")]
    assert counts == [3, 5] if "&" not in script else sorted(counts) == [3, 5]
    for name in trace_names(tmp_path):
        assert open_trace(tmp_path / name).ranks == [0]


@pytest.mark.slow
def test_profile__names_a_process_without_an_optimizer_beside_one_with(
    tmp_path: Path,
) -> None:
    manual = (
        "for _ in range(5):\n    F.mse_loss(model(batch()[0]), batch()[1]).backward()\n"
    )
    training_program(tmp_path, manual, "manual.py")
    training_program(
        tmp_path, "with torch.no_grad():\n    model(batch()[0])\n", "evaluation.py"
    )
    training_program(tmp_path, "train(3)\n")
    script = "python job.py; python manual.py; python evaluation.py".replace(
        "python", sys.executable
    )
    run = run_profiled("sh", "-c", script, cwd=tmp_path)
    assert (run.returncode, job_lines(run.stderr)) == (0, [])
    assert trace_names(tmp_path) == ["run.ebb"]
    (note,) = [
        note for note in open_trace(tmp_path / "run.ebb").notes if "left out" in note
    ]
    assert "manual.py) ran 5 backwards" in note
    assert note in run.stderr


@pytest.mark.slow
def test_profile__loses_no_iteration_of_a_process_that_becomes_a_daemon(
    tmp_path: Path,
) -> None:
    # Nothing is written before the fork, as on a slow file system.
    slow = (
        "sys.modules['ebbtide.profiler.agent.spool'].Spool.flush_if_cheap = lambda "
        "self: None\n"
    )
    program = (
        f"{slow}train(7)\nif os.fork():\n    os._exit(0)\nos.closerange(3, "
        "4096)\nos.setsid()\ntrain(2)\n"
    )
    run = run_profiled(
        sys.executable, training_program(tmp_path, program), cwd=tmp_path
    )
    assert (run.returncode, job_lines(run.stderr)) == (0, [])
    assert [iterations_of(tmp_path / name) for name in ("run.ebb", "run-2.ebb")] == [
        7,
        2,
    ]


@pytest.mark.slow
def test_profile__records_a_background_job_that_outlives_its_shell(
    tmp_path: Path,
) -> None:
    job = training_program(
        tmp_path,
        "import time\nfor _ in range(10):\n    train(1)\n    "
        "time.sleep(0.1)\nprint('end')\n",
    )
    run = run_profiled(
        "sh", "-c", f"{sys.executable} {job} & echo started", cwd=tmp_path
    )
    assert (run.returncode, run.stdout) == (0, "started\nend\n")
    assert iterations_of(tmp_path / "run.ebb") == 10
    assert not any(
        "killed" in line or "cut off" in line for line in ebbtide_lines(run.stderr)
    ), run.stderr
    assert not any(
        "killed" in note or "cut off" in note
        for note in open_trace(tmp_path / "run.ebb").notes
    )


@pytest.mark.slow
def test_profile__records_under_another_profile(tmp_path: Path) -> None:
    inner = profile_command(
        "inner.ebb", sys.executable, training_program(tmp_path, "train(3)\n")
    )
    run = run_profiled(*inner, cwd=tmp_path, output="outer.ebb")
    assert (run.returncode, job_lines(run.stderr)) == (0, [])
    assert iterations_of(tmp_path / "inner.ebb") == 3
    assert "imported torch" not in run.stderr
    assert not (tmp_path / "outer.ebb").exists()


def test_profile__does_not_blame_python_where_none_ran(tmp_path: Path) -> None:
    bare = run_bare("ls", "/nonexist", cwd=tmp_path)
    run = run_profiled("ls", "/nonexist", cwd=tmp_path)
    assert (run.returncode, run.stdout, job_lines(run.stderr)) == (
        bare.returncode,
        "",
        job_lines(bare.stderr),
    )
    (line,) = ebbtide_lines(run.stderr)
    assert "-I" not in line
    assert "nothing was recorded" in line


@pytest.mark.slow
def test_record__helpers_see_a_command_that_does_not_exist(tmp_path: Path) -> None:
    run = run_profiled("./no-such-command", cwd=tmp_path)
    recorded = Recorded(run, tmp_path / "run.ebb")
    assert run.returncode == 2
    assert run.stderr.startswith("ebbtide: cannot run ./no-such-command")
    assert not recorded.path.exists()
