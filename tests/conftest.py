"""Fixtures and helpers of all tests: environment, number of random cases, real jobs and
real commands.

`EBBTIDE_FUZZ` multiplies the number of random cases of every property test and fuzzer:
1 by default, more in `make test-all`.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ebbtide import seams
from ebbtide.profiler.trace import Trace, open_trace
from tests import torch_extensions

# Before anything imports DeepSpeed.
torch_extensions.use_own_directory()
# pytest-xdist sets it to the width of its terminal; outputs are those in a file, but
# for tests of a width.
os.environ.pop("COLUMNS", None)
# Also in processes that tests start. With more threads than idle cores, each operator
# waits for the others' threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Files of tests need not outlive a crash of the machine, and each of thousands of
# traces would wait for the disk.
os.fsync = lambda file: None

FUZZ = float(os.environ.get("EBBTIDE_FUZZ", "1"))
PROCESS_TIMEOUT_S = 240.0


def examples(count: int, by_default: int | None = None) -> int:
    """Scale a number of random cases by `EBBTIDE_FUZZ`.

    Args:
        count: Number of cases for a factor of 1.
        by_default: Smaller number of costly cases, for factors up to 1.
    """
    return max(1, round((by_default if by_default and FUZZ <= 1 else count) * FUZZ))


# The same cases in every `make test`, so that its result is a property of the code;
# `make test-all` draws new ones, and a failure prints how to reproduce it.
settings.register_profile(
    "ebbtide",
    max_examples=examples(25, by_default=5),
    deadline=None,
    derandomize=FUZZ <= 1,
    print_blob=True,
    # How slow a test is depends on the load of the machine.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ebbtide")


@contextmanager
def seeded(seed: object) -> Iterator[random.Random]:
    """Make the generator of one random case of a fuzzer; a failure names its seed."""
    try:
        yield random.Random(str(seed))
    except BaseException as error:
        error.add_note(f"This is the random case with seed {str(seed)!r}.")
        raise


def pytest_configure() -> None:
    """Remove stale locks of torch's extensions before any worker process starts, and
    take Ctrl-C."""
    # Until all tests are collected: what is imported stays.
    gc.disable()
    torch_extensions.register_user()
    # A shell without job control starts background processes with SIGINT ignored, which
    # their children inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def deepspeed_extensions() -> None:
    """Compile DeepSpeed's CPU Adam, once for all processes and sessions; skip where
    that is not possible."""
    missing = torch_extensions.missing_requirement()
    if missing:
        pytest.skip(missing)
    torch_extensions.compile_extensions(torch_extensions.COMPILE_TIMEOUT_IN_TEST_S)


def slow(values: Iterable[str], but: Collection[str]) -> list[Any]:
    """Mark parameter values as slow, except those in `but`."""
    return [
        value if value in but else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


# Set where features are deleted.
WITHOUT_FEATURES = "EBBTIDE_WITHOUT_FEATURES"
needs_all_features = pytest.mark.skipif(
    WITHOUT_FEATURES in os.environ, reason="names commands of features"
)


@pytest.fixture
def stub_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the feature of `tests/stub_framework.py`."""
    from tests import stub_framework

    monkeypatch.setitem(seams.features(), "tests", stub_framework.FEATURE)


def slow_case(*values: Any, id: str | None = None) -> Any:
    """Mark one set of parameter values as slow."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


_FEATURE = re.compile(r"^\s*from (?:ebbtide|tests)\.features\.(\w+)", re.MULTILINE)
_FEATURES = Path(__file__).parents[1] / "features"
# Names of features are offered by packages of the core, too.
_MISSING = re.compile(
    r"No module named '(?:ebbtide|tests)\.features\.|cannot import name '\w+' from "
    r"'ebbtide\."
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests that import a feature whose folder is not there: those of the
    core run without."""
    file = (
        collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    )
    if file.suffix != ".py" or not file.exists():
        return None
    needed = set(_FEATURE.findall(file.read_text(encoding="utf-8")))
    return True if any(not (_FEATURES / name).is_dir() for name in needed) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Leave out tests, too, that import such a feature by way of others."""
    report = yield
    if (
        WITHOUT_FEATURES in os.environ
        and report.failed
        and _MISSING.search(str(report.longrepr))
    ):
        report.outcome, report.longrepr = (
            "skipped",
            (str(collector.path), 0, "its feature is not there"),
        )
    return report


# What a test of the core ends with that names something of a feature.
_NEEDS_FEATURE = re.compile(
    r"which is not installed|No such command|No module named 'ebbtide\.features\.|has "
    r"no option '|there is no policy '"
    r"|KeyError: '[a-z-]+'$|rule is '[a-z0-9-]+': it must be one of",
    re.MULTILINE,
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave out tests of the core that name something of a feature which is not
    there."""
    report = yield
    if (
        WITHOUT_FEATURES in os.environ
        and report.failed
        and _NEEDS_FEATURE.search(str(report.longrepr))
    ):
        report.outcome, report.longrepr = (
            "skipped",
            (str(item.path), 0, "its feature is not there"),
        )
    return report


_TEST_PROCESS = os.getpid()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """End a child that a test has forked and that leaves its function: it would go on
    with the next tests, and pytest-xdist take its reports for those of its parent."""
    try:
        return (yield)
    except BaseException:
        if os.getpid() != _TEST_PROCESS:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != _TEST_PROCESS:
            os.write(2, b"A forked child has left the function of its test.\n")
            os._exit(70)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU on machines without one, and what the stand-in for one
    does not have."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        from tests.cuda_runtime.build import is_on_stand_in

        has_gpu = torch.cuda.is_available()
        for item in marked:
            if not has_gpu or (
                is_on_stand_in() and item.get_closest_marker("real_gpu")
            ):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


# Number of modules that were imported when garbage was last collected for good.
_frozen_modules = 0


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection: some tests, and DeepSpeed,
    collect often."""
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()
    gc.enable()
    # As in the command.
    gc.set_threshold(200_000)


def pytest_runtest_logfinish() -> None:
    """Exempt also what tests have imported, once it is much: torch's compiler makes a
    collection take 0.2 s."""
    if len(sys.modules) > _frozen_modules + 200:
        pytest_collection_finish()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Restore the environment variables that a test, or a library in it, has set."""
    before = dict(os.environ)
    yield
    for name in {*os.environ, *before} - {"PYTEST_CURRENT_TEST"}:
        if os.environ.get(name) != before.get(name):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})


def hide_process_group() -> Iterator[None]:
    """Hide the process group that DeepSpeed's tests leave in a process; to be made a
    fixture of modules."""
    from torch.distributed import distributed_c10d

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_world", distributed_c10d._World())
        yield


def torch_on_one_thread() -> Iterator[None]:
    """Run torch's operators on one thread; to be made a fixture.

    More threads than cores slow the tests down, and the number of threads changes the
    bits of a sum.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Run = subprocess.CompletedProcess[str]


def run_process(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = PROCESS_TIMEOUT_S,
) -> Run:
    """Run a process and capture its output; fail, and kill it and its children, if it
    does not end in time."""
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words,
        cwd=cwd,
        env=env,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            stdout, stderr = process.communicate()
            command_line = " ".join(words)
            pytest.fail(
                f"not finished after {timeout_s:g} s: "
                f"{command_line}\n{stdout[-2000:]}\n{stderr[-4000:]}"
            )
    return Run(words, process.returncode, stdout, stderr)


@contextmanager
def running_process(
    command: Sequence[str | Path], timeout_s: float = PROCESS_TIMEOUT_S
) -> Iterator[subprocess.Popen[str]]:
    """Start a process with its stdout piped; kill it and its children at the end of the
    block or after `timeout_s`."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    words = [str(word) for word in command]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        watchdog = threading.Timer(timeout_s, kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            kill()


def ebbtide(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Run:
    """Run the command in a process of its own."""
    environment = {**os.environ, **(env or {})}
    run = run_process(
        [sys.executable, "-m", "ebbtide", *arguments], cwd=cwd, env=environment
    )
    skip_without_feature(run)
    return run


def ebbtide_in_process(*arguments: str | Path, cwd: Path | None = None) -> Run:
    """Run the command in this process, which is faster than `ebbtide`."""
    from ebbtide.cli import run

    out, err = io.StringIO(), io.StringIO()
    with chdir(cwd or Path.cwd()), redirect_stdout(out), redirect_stderr(err):
        status = run([str(argument) for argument in arguments])
    done = Run(arguments, status, out.getvalue(), err.getvalue())
    skip_without_feature(done)
    return done


def skip_without_feature(run: Run) -> None:
    """Skip a test that needs a feature which is not there: `test_without_features.py`
    deletes some."""
    is_missing = (
        "No such command" in run.stderr,
        "which is not installed" in run.stderr,
    )
    if WITHOUT_FEATURES in os.environ and any(is_missing):
        pytest.skip("its feature is not there")


def shared_folder(
    factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]
) -> Path:
    """Return a folder that the first of pytest's worker processes to ask for it fills,
    and all of them read."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    # Waits no longer than the timeout of the test that asks.
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "filled").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            (folder / "filled").touch()
    return folder


def phases_of(trace: Trace, rank: int = 0) -> list[list[str]]:
    """The phases of each finished iteration, in order."""
    rows = trace.phases(rank)
    return [
        list(group["phase"])
        for _, group in rows[rows["iteration"].notna()].groupby("iteration")
    ]


class Recorded:
    """A profiled job: its process, and its trace if there is one."""

    def __init__(self, run: Run, path: Path) -> None:
        self.run = run
        self.path = path

    @property
    def trace(self) -> Trace:
        assert self.path.exists(), self.run.stderr
        return open_trace(self.path)

    def phases(self, rank: int = 0) -> list[list[str]]:
        """The phases of each finished iteration, in order."""
        return phases_of(self.trace, rank)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recorded]:
    """Return a function that profiles a script given as text.

    Its `options` go to `ebbtide profile`, its `launcher` is put before the script.
    """

    def run(
        script: str,
        options: Sequence[str] = (),
        launcher: Sequence[str] = (sys.executable,),
        arguments: Sequence[str] = (),
        **process_options: Any,
    ) -> Recorded:
        file = tmp_path / "job.py"
        file.write_text(textwrap.dedent(script))
        path = tmp_path / "run.ebb"
        job = [*launcher, str(file), *arguments]
        return Recorded(
            ebbtide(
                "profile",
                "-o",
                path,
                *options,
                "--",
                *job,
                cwd=tmp_path,
                **process_options,
            ),
            path,
        )

    return run
