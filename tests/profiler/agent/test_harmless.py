"""Recording does not change the job: its results, output, signals, modules and
processes."""

from __future__ import annotations

import os
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.profiler.trace import open_trace
from tests.conftest import Recorded, Run, ebbtide, phases_of, run_process
from tests.profiler.agent.jobs import ADAMW, PLAIN, PRELUDE

Record = Callable[..., Recorded]


@pytest.mark.slow
def test_recorder__lets_an_exception_of_a_signal_handler_reach_the_job(
    record: Record,
) -> None:
    recorded = record(
        PRELUDE
        + PLAIN
        + """
import os, signal, sys
class Alarm(Exception):
    pass
def ring(*_):
    raise Alarm
signal.signal(signal.SIGUSR1, ring)
reader = sys.modules["ebbtide.profiler.agent.memory_reader"].MemoryReader
reader.read_here = lambda self: os.kill(os.getpid(), signal.SIGUSR1) or []
for _ in range(3):
    try:
        x, y = batch()
        F.mse_loss(model(x), y).backward()
    except Alarm:
        print("alarm")
        break
"""
    )
    assert (recorded.run.returncode, recorded.run.stdout) == (0, "alarm\n"), (
        recorded.run.stderr
    )
    assert len(recorded.phases()) == 4


def test_inject__does_not_hide_modules_of_the_job(
    tmp_path: Path, record: Record
) -> None:
    (tmp_path / "profiler.py").write_text("HERE = 'profiler.py of the job'\n")
    for package in ("analysis", "interleave"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(
            f"HERE = '{package} of the job'\n"
        )
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ['SITE'] = 'sitecustomize of the job'\n"
    )
    modules = (
        "import os, sys, profiler, analysis, interleave, sitecustomize\n"
        "print(profiler.HERE, analysis.HERE, interleave.HERE, os.environ['SITE'], "
        "sitecustomize.__file__, sys.path)\n"
    )
    (tmp_path / "modules.py").write_text(modules)
    bare = _bare(tmp_path / "modules.py", PYTHONPATH=str(tmp_path))
    recorded = record(modules + PRELUDE + PLAIN, env={"PYTHONPATH": str(tmp_path)})
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.run.stdout == bare.stdout
    assert len(recorded.phases()) == 4


def test_torch_hooks__leave_nothing_in_models_copies_or_checkpoints(
    record: Record, tmp_path: Path
) -> None:
    recorded = record(
        "import copy, io, pickle, pickletools, sys, threading\n"
        + PRELUDE
        + ADAMW
        + PLAIN
        + textwrap.dedent(
            """
            data = pickle.dumps([model, copy.deepcopy(model), optimizer.state_dict()])
            torch.save(model, file := io.BytesIO())
            assert b"ebbtide" not in data + file.getvalue()
            clone = copy.deepcopy(model)
            assert clone(torch.ones(1, 16)).equal(model(torch.ones(1, 16)))
            assert "_compiled_call_impl" not in vars(model)
            assert not model._forward_hooks and not model._forward_pre_hooks
            assert threading.active_count() == 1
            replica = model._replicate_for_data_parallel()
            """
        )
    )
    assert recorded.run.returncode == 0, recorded.run.stderr


def test_recorder__records_a_fork_that_trains_apart_and_no_data_loader_workers(
    record: Record,
) -> None:
    recorded = record(
        PRELUDE
        + """
import os, sys
from torch.utils.data import DataLoader
model = nn.Linear(4, 4)
optimizer = PlainSGD(model.parameters(), lr=0.1)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        model(torch.ones(1, 4)).sum().backward()  # in the worker: not of the training
        return torch.ones(4)
if __name__ == "__main__":
    for x in DataLoader(Data(), batch_size=2, num_workers=2):
        model(x).sum().backward()
        optimizer.step()
    if os.fork() == 0:
        for _ in range(5):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        sys.exit(0)  # runs atexit handlers, in the child
    os.wait()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""
    )
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.trace.ranks == [0]
    assert len(recorded.phases()) == 5
    assert recorded.trace.rank(0).stopped == "closed"
    fork = open_trace(recorded.path.with_name("run-2.ebb"))
    assert (fork.ranks, len(phases_of(fork)), fork.rank(0).stopped) == (
        [0],
        5,
        "closed",
    )
    assert not recorded.path.with_name("run-3.ebb").exists()


@pytest.mark.slow
def test_inject__reaches_a_job_that_sets_pythonpath(
    record: Record, tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(
        f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"\n'
    )
    recorded = record(PRELUDE + PLAIN, launcher=("bash", str(tmp_path / "train.sh")))
    assert len(recorded.phases()) == 4


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has torch and not ebbtide."""
    home = tmp_path_factory.mktemp("other")
    venv.create(home, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = home / "lib" / version / "site-packages"
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "ebbtide" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return home / "bin" / "python"


@pytest.mark.slow
def test_inject__reaches_an_environment_without_ebbtide(
    other_python: Path, record: Record
) -> None:
    probe = (
        "import importlib.util; assert importlib.util.find_spec('ebbtide') is None\n"
    )
    recorded = record(probe + PRELUDE + PLAIN, launcher=(str(other_python),))
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert len(recorded.phases()) == 4


@pytest.mark.slow
def test_profile__explains_why_an_isolated_environment_is_not_recorded(
    other_python: Path, record: Record
) -> None:
    recorded = record(PRELUDE + PLAIN, launcher=(str(other_python), "-I"))
    assert recorded.run.returncode == 0
    (line,) = recorded.run.stderr.splitlines()
    assert "nothing was recorded: no Python process loaded the agent" in line
    assert not recorded.path.exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["true"], "no Python process loaded the agent"),
        pytest.param(
            [sys.executable, "-c", "pass"], "imported torch", marks=pytest.mark.slow
        ),
        pytest.param(
            [sys.executable, "-c", "import torch; torch.ones(3)"],
            "no module ran forward with gradients",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no Python", "no torch", "no training"],
)
def test_profile__explains_why_a_command_without_training_is_not_recorded(
    command: list[str], reason: str, tmp_path: Path
) -> None:
    run = ebbtide("profile", "-o", tmp_path / "run.ebb", "--", *command)
    assert run.returncode == 0
    assert reason in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "run.ebb").exists()


@pytest.mark.slow
def test_profile__says_that_a_job_failed_before_it_trained(tmp_path: Path) -> None:
    script = "import torch\nraise ImportError('of the job')"
    run = ebbtide(
        "profile", "-o", tmp_path / "run.ebb", "--", sys.executable, "-c", script
    )
    assert run.returncode == 1
    assert (
        "nothing was recorded: the job failed before any module ran forward with "
        "gradients" in run.stderr
    )
    assert "disk space" not in run.stderr


def _bare(job: Path, **env: str) -> Run:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    run = run_process([sys.executable, job], cwd=job.parent, env=environment)
    assert run.returncode == 0, run.stderr
    return run
