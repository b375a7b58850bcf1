"""The C++ extensions that DeepSpeed compiles when they are first used, in a directory
of the test environment's own.

torch guards each extension by a file named `lock`. A process that is killed leaves that
file behind, and every later process waits for it without a limit. So the tests never
use the user's `~/.cache/torch_extensions`, and locks of their own, which the kernel
releases when a process ends, show when a `lock` file is stale:

- `users.lock` is locked (shared) by every test process. A process that can lock it
  exclusively is alone, and removes `lock` files.
- `compile.lock` is locked by the process that compiles. Until the extensions exist no
  other process loads them.

`python -m tests.torch_extensions` compiles them before the tests, as `make test` does.
Those for storage take five minutes and need libaio-dev, so they are compiled only on
demand: `python -m tests.torch_extensions PinMemoryBuilder AsyncIOBuilder`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

DIRECTORY = Path(sys.prefix) / "torch_extensions"
# Four minutes of CPU time if nothing is there yet. In a test, pytest's own timeout
# comes after it.
COMPILE_TIMEOUT_S = 900.0
COMPILE_TIMEOUT_IN_TEST_S = 270.0
# Extensions that nearly every job loads.
BUILDERS = ("CPUAdamBuilder", "ShareMemCommBuilder")
STORAGE_BUILDERS = ("PinMemoryBuilder", "AsyncIOBuilder")
_COMPILE = """
import sys
from deepspeed.accelerator import get_accelerator
for name in sys.argv[1:]:
    builder = get_accelerator().create_op_builder(name)
    if builder is not None and "NotImplemented" not in type(builder).__name__:
        builder.load(verbose=False)
"""
# Held until the process ends.
_users_locks: list[int] = []


class ExtensionError(RuntimeError):
    """The extensions could not be compiled, or not in time."""


def missing_requirement() -> str | None:
    """Return a message if this environment lacks what the extensions need, else
    None."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    if shutil.which("c++") is None:
        return "DeepSpeed compiles its CPU Adam: needs a C++ compiler"
    return None


def missing_storage_requirement() -> str | None:
    """Return a message if the extension for swapping to storage was not compiled, else
    None."""
    if (DIRECTORY / "async_io" / "async_io.so").exists():
        return None
    return (
        "needs libaio-dev, and DeepSpeed's async_io: python -m tests.torch_extensions "
        + " ".join(STORAGE_BUILDERS)
    )


def use_own_directory() -> None:
    """Direct torch in this process and its children to `DIRECTORY`, and to the ninja of
    this environment.

    Another version of ninja would compile everything again, since their logs differ,
    while other jobs wait.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(DIRECTORY)
    os.environ["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    )


def register_user() -> None:
    """Hold `users.lock` as long as this process lives; remove stale `lock` files if no
    other process holds it."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(DIRECTORY / "users.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        _remove_stale_locks()
    # Another process holds it exclusively for no longer than it takes to remove files.
    _lock(descriptor, fcntl.LOCK_SH, timeout_s=30.0, purpose="registering")
    _users_locks.append(descriptor)


def compile_extensions(
    timeout_s: float = COMPILE_TIMEOUT_S, builders: tuple[str, ...] = BUILDERS
) -> None:
    """Compile the extensions unless that is done. Processes that ask at the same time
    wait for the first.

    Args:
        timeout_s: How long to wait for another process, and how long to compile.
        builders: Names of the classes that build the extensions in DeepSpeed.

    Raises:
        ExtensionError: The compiler failed, or took too long.
    """
    if not _users_locks:
        register_user()
    versions = f"torch-{version('torch')}-deepspeed-{version('deepspeed')}"
    stamp = DIRECTORY / f"{'-'.join(builders)}-{versions}"
    with _compile_lock(timeout_s) as descriptor:
        if stamp.exists():
            return
        if builders == BUILDERS:
            _remove_stale_locks()
        _run_compiler(timeout_s, builders, (descriptor, *_users_locks))
        stamp.touch()


def _run_compiler(
    timeout_s: float, builders: tuple[str, ...], locks: tuple[int, ...]
) -> None:
    """Compile in a process of its own. It inherits the locks: they stay locked if only
    this process is killed."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(DIRECTORY)}
    with subprocess.Popen(
        [sys.executable, "-c", _COMPILE, *builders],
        env=environment,
        pass_fds=locks,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            # With the compilers that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ExtensionError(
                    f"DeepSpeed's extensions were not compiled in {timeout_s:g} s"
                ) from error
            raise
    if process.returncode:
        raise ExtensionError(
            f"DeepSpeed's extensions could not be compiled:\n{output[-4000:]}"
        )


@contextmanager
def _compile_lock(timeout_s: float) -> Iterator[int]:
    descriptor = os.open(DIRECTORY / "compile.lock", os.O_RDWR | os.O_CREAT)
    try:
        _lock(
            descriptor,
            fcntl.LOCK_EX,
            timeout_s,
            purpose="another process that compiles",
        )
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int, timeout_s: float, purpose: str) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ExtensionError(
                    f"waited {timeout_s:g} s in {DIRECTORY} for {purpose}"
                ) from None
            time.sleep(0.1)


def _remove_stale_locks() -> None:
    for stale in DIRECTORY.glob("**/lock"):
        stale.unlink(missing_ok=True)


def main() -> None:
    missing = missing_requirement()
    if missing:
        print(f"Some tests will be skipped: {missing}.")
        return
    use_own_directory()
    try:
        compile_extensions(builders=tuple(sys.argv[1:]) or BUILDERS)
    except ExtensionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
