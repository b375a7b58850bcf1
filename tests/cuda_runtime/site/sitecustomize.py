"""Prepares each Python process on the stand-in: replaces kernels of CUDA once their
modules are imported."""

import atexit
import faulthandler
import importlib
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

# By modules of the job, those of the stand-in that replace kernels in them.
INSTALLERS = {
    "torch": "tests.cuda_runtime.kernels",
    "ebbtide.interleave.engine.numerics.triton_kernel": (
        "tests.cuda_runtime.triton_kernels"
    ),
}


class InstallingLoader:
    """A loader that calls `install` of a module of the stand-in when another one has
    loaded a module of the job."""

    def __init__(self, loader, installer):
        self._loader = loader
        self._installer = installer

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        """Create the module as the other loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module):
        """Execute the module, then install."""
        self._loader.exec_module(module)
        importlib.import_module(self._installer).install()


class AfterImport:
    """A finder that calls `install` of a module of the stand-in after the import of one
    of the job."""

    def __init__(self, installers):
        self._installers = dict(installers)
        self._is_searching = False

    def find_spec(self, name, path=None, target=None):
        """Return the spec of other finders, with a loader that installs kernels; None
        for other modules."""
        # Pytest's finder, which comes first, takes modules of packages that have
        # plugins.
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)
        if self._is_searching or name not in self._installers:
            return None
        self._is_searching = True
        spec = importlib.util.find_spec(name)
        self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        spec.loader = InstallingLoader(spec.loader, self._installers.pop(name))
        return spec


def _remove_counters():
    """Remove the folder of counters when the process ends that has made it."""
    folder = Path(os.environ["CUDA_RUNTIME_COUNTERS"]).parent
    if folder.name.endswith(f".{os.getpid()}"):
        shutil.rmtree(folder, ignore_errors=True)


def _dump_at(end_s):
    """Print where all threads are at a time, and end; in processes forked off, too.

    These have no thread that waits for the time, but would wait for it when they end.
    """

    def wait():
        left_s = max(1, end_s - time.monotonic())
        faulthandler.dump_traceback_later(left_s, exit=True)

    wait()
    os.register_at_fork(
        before=faulthandler.cancel_dump_traceback_later,
        after_in_parent=wait,
        after_in_child=wait,
    )


if "CUDA_RUNTIME_COUNTERS" in os.environ:
    sys.meta_path.insert(0, AfterImport(INSTALLERS))
    atexit.register(_remove_counters)
    if seconds := os.environ.get("CUDA_RUNTIME_DUMP_S"):
        _dump_at(time.monotonic() + float(seconds))
