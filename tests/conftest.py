"""What tests share: running real jobs and real commands."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.trace import Trace, open_trace


def pytest_sessionstart(session: pytest.Session) -> None:
    """DeepSpeed compiles its CPU Adam when it is first used, for most of a minute: beside tests that do not need it. It
    locks while it does so, and who needs it waits."""
    controls = not hasattr(session.config, "workerinput") and not session.config.option.collectonly
    if (
        controls
        and getattr(session.config.option, "numprocesses", None)
        and importlib.util.find_spec("deepspeed") is not None
    ):
        load = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"
        quiet = subprocess.DEVNULL
        # Broken off it would leave its lock behind.
        compiling.append(
            subprocess.Popen(
                [sys.executable, "-c", load], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
            )
        )


def pytest_sessionfinish() -> None:
    while compiling:
        compiling.pop().wait()


compiling: list[subprocess.Popen[bytes]] = []


def slow(values: Iterable[str], but: Collection[str]) -> list[Any]:
    """Values to parametrize a test with: those beside `but` are left to `make test-all`."""
    return [value if value in but else pytest.param(value, marks=pytest.mark.slow) for value in values]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def torch_on_one_thread() -> Iterator[None]:
    """To be made a fixture of: torch's own operators on one thread. On few cores many tests at once would wait for each
    other, and how a sum is cut among threads changes its bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Run = subprocess.CompletedProcess[str]


def ebbtide(*arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Run:
    """Run the command as a user would."""
    command = [sys.executable, "-m", "ebbtide", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


class Recorded:
    """A job that was profiled: its process, and the trace where there is one."""

    def __init__(self, run: Run, path: Path) -> None:
        self.run = run
        self.path = path

    @property
    def trace(self) -> Trace:
        assert self.path.exists(), self.run.stderr
        return open_trace(self.path)

    def phases(self, rank: int = 0) -> list[list[str]]:
        """The phases of each finished iteration, in order."""
        rows = self.trace.phases(rank)
        return [list(group["phase"]) for _, group in rows[rows["iteration"].notna()].groupby("iteration")]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recorded]:
    """Profile a script given as text; `options` go to `ebbtide profile`, `launcher` before the script."""

    def run(
        script: str,
        options: Sequence[str] = (),
        launcher: Sequence[str] = (sys.executable,),
        arguments: Sequence[str] = (),
        **more: Any,
    ) -> Recorded:
        file = tmp_path / "job.py"
        file.write_text(textwrap.dedent(script))
        path = tmp_path / "run.ebb"
        job = [*launcher, str(file), *arguments]
        return Recorded(ebbtide("profile", "-o", path, *options, "--", *job, cwd=tmp_path, **more), path)

    return run
