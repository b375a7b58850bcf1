"""Runs scripts on the stand-in for the CUDA runtime, and Triton's launcher over its
driver under a torch of the CPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda_runtime import build
from tests.cuda_runtime.host_driver import HostDriver
from tests.cuda_runtime.launch_recorder import (
    LaunchRecorder,
    MockEvent,
    UnpinnedHostMemory,
)
from tests.cuda_runtime.triton_cache import ENVIRONMENT

ROOT = Path(__file__).parents[2]
# Of a process; the machine may be busy.
LIMIT_S = 600
OnStandIn = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def on_stand_in(tmp_path_factory: pytest.TempPathFactory) -> OnStandIn:
    """Return a function that runs a script, given as text or as a path with arguments,
    on the stand-in.

    Keywords are settings of the stand-in without their prefix: `jitter_us=1500` is
    CUDA_RUNTIME_JITTER_US."""
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
        own = {
            f"CUDA_RUNTIME_{name.upper()}": str(value)
            for name, value in settings.items()
        }
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            # Says where a job hangs, before the limit of a test.
            "CUDA_RUNTIME_DUMP_S": str(LIMIT_S - 100),
            **own,
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.cuda_runtime", *script]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert not succeeds or done.returncode == 0, done.stderr[-3000:]
        assert "this kernel does not run here" not in done.stderr
        assert " kernels failed: " not in done.stderr, done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="session")
def host_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostDriver]:
    message = build.missing_for_launcher()
    if torch.version.cuda is not None:
        message = "this build of torch loads the driver's own libcuda.so.1"
    if message:
        pytest.skip(message)
    library = build.compile_launcher(tmp_path_factory.mktemp("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **ENVIRONMENT,
            "TRITON_LIBCUDA_PATH": str(library.parent),
        }.items():
            patch.setenv(name, value)
        yield HostDriver(library)


@pytest.fixture
def recorder(
    host_driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> LaunchRecorder:
    """Record all launches of ebbtide's kernels in this test, and the variants that
    Triton compiles for them."""
    import triton

    from ebbtide.interleave.engine.numerics import triton_compiled, triton_kernel

    recorder = LaunchRecorder()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_driver, "on_launch", recorder.on_launch)
    monkeypatch.setattr(MockEvent, "recorder", recorder, raising=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", host_driver.driver)
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda *, fn, **_: recorder.compiled.append(fn.name.split(".")[-1]),
    )
    monkeypatch.setattr(triton_kernel, "_DEVICE", "cpu")
    monkeypatch.setattr(triton_kernel, "_HOST_MEMORY", UnpinnedHostMemory())
    monkeypatch.setattr(torch.cuda, "Event", MockEvent)
    for kernel in ("update", "block_sums", "block_fingerprints", "load_table"):
        # Forget the variants of other tests. They are compiled again in no time: files
        # of TRITON_CACHE have them.
        getattr(triton_compiled, kernel).device_caches.clear()
    return recorder
