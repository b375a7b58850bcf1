"""Runs scripts on the stand-in for the CUDA runtime."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda_runtime import build

ROOT = Path(__file__).parents[2]
# Of a process; the machine may be busy.
LIMIT_S = 600
OnStandIn = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def on_stand_in(tmp_path_factory: pytest.TempPathFactory) -> OnStandIn:
    """Return a function that runs a script, given as text or as a path with arguments, on the stand-in.

    Keywords are settings of the stand-in without their prefix: `jitter_us=1500` is CUDA_RUNTIME_JITTER_US."""
    if message := build.missing_requirement():
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("scripts")

    def run(
        script: str | list[str], succeeds: bool = True, **settings: float | str
    ) -> subprocess.CompletedProcess[str]:
        if isinstance(script, str):
            path = folder / f"{len(list(folder.iterdir()))}.py"
            path.write_text(script)
            script = [str(path)]
        own = {f"CUDA_RUNTIME_{name.upper()}": str(value) for name, value in settings.items()}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **own}
        command = [sys.executable, "-W", "ignore", "-m", "tests.cuda_runtime", *script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert not succeeds or done.returncode == 0, done.stderr[-3000:]
        assert "this kernel does not run here" not in done.stderr
        return done

    return run
