"""Runs Python on the stand-in for the CUDA runtime.

    python -m tests.cuda_runtime SCRIPT ARGUMENTS...
    python -m tests.cuda_runtime -m MODULE ARGUMENTS...

It compiles the libraries on first use, and begins again with them preloaded. Processes
of Python that it starts run on the stand-in, too: `python -m tests.cuda_runtime -m
ebbtide profile -- python train.py`. CUDA_RUNTIME_DUMP_S: after so many seconds a
process prints where all threads are, and ends.
"""

import os
import sys
from pathlib import Path

from tests.cuda_runtime import build

# Checkouts may share an environment.
LIBRARIES = (
    Path(sys.prefix)
    / "cuda_runtime"
    / build.ROOT.as_posix().replace("/", "-").strip("-")
)


def main() -> None:
    variables = dict(os.environ)
    if not build.is_on_stand_in():
        if message := build.missing_requirement():
            sys.exit(message)
        build.compile_if_changed(LIBRARIES)
        variables = build.environment(LIBRARIES)
    options = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    os.execve(sys.executable, [sys.executable, *options, *sys.argv[1:]], variables)


if __name__ == "__main__":
    main()
