"""Runs a script or a module on the stand-in for the CUDA runtime.

    python -m tests.cuda_runtime SCRIPT ARGUMENTS...
    python -m tests.cuda_runtime -m MODULE ARGUMENTS...

It compiles the libraries on first use, begins again with them preloaded, and replaces the kernels of CUDA.
CUDA_RUNTIME_DUMP_S: after so many seconds it prints where all threads are, and ends.
"""

import faulthandler
import os
import runpy
import sys
from pathlib import Path

from tests.cuda_runtime import build

LIBRARIES = Path(sys.prefix) / "cuda_runtime"


def main() -> None:
    if "libcudart" not in os.environ.get("LD_PRELOAD", ""):
        _begin_again()
    from tests.cuda_runtime import kernels, triton_kernels

    if seconds := os.environ.get("CUDA_RUNTIME_DUMP_S"):
        faulthandler.dump_traceback_later(float(seconds), exit=True)
    kernels.install()
    triton_kernels.install()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _begin_again() -> None:
    if message := build.missing_requirement():
        sys.exit(message)
    build.compile_if_changed(LIBRARIES)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], build.environment(LIBRARIES))


if __name__ == "__main__":
    main()
