"""Prepares each Python process on the stand-in: replaces kernels of CUDA once their modules are imported."""

import atexit
import faulthandler
import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

# By modules of the job, those of the stand-in that replace kernels in them.
INSTALLERS = {
    "torch": "tests.cuda_runtime.kernels",
    "ebbtide.interleave.engine.numerics.triton_kernel": "tests.cuda_runtime.triton_kernels",
}


class AfterImport:
    """A finder that calls `install` of a module of the stand-in after the import of one of the job."""

    def __init__(self, installers):
        self._installers = dict(installers)
        self._is_searching = False

    def find_spec(self, name, path=None, target=None):
        """Return the spec of other finders, with a loader that installs kernels; None for other modules."""
        # Pytest's finder, which comes first, takes modules of packages that have plugins.
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)
        if self._is_searching or name not in self._installers:
            return None
        self._is_searching = True
        spec = importlib.util.find_spec(name)
        self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        installer = self._installers.pop(name)
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            importlib.import_module(installer).install()

        spec.loader.exec_module = execute_and_install
        return spec


def _remove_counters():
    """Remove the folder of counters when the process ends that has made it."""
    folder = Path(os.environ["CUDA_RUNTIME_COUNTERS"]).parent
    if folder.name.endswith(f".{os.getpid()}"):
        shutil.rmtree(folder, ignore_errors=True)


if "CUDA_RUNTIME_COUNTERS" in os.environ:
    sys.meta_path.insert(0, AfterImport(INSTALLERS))
    atexit.register(_remove_counters)
    if seconds := os.environ.get("CUDA_RUNTIME_DUMP_S"):
        faulthandler.dump_traceback_later(float(seconds), exit=True)
