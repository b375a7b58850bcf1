"""Lets each process of a rehearsal run on the stand-in for the CUDA runtime: its kernels, as soon as torch is there.

Python imports it where this folder is on PYTHONPATH. It does nothing without the stand-in's libraries.
"""

import builtins
import os
import sys
import threading
from typing import Any

_import = builtins.__import__
_thread = threading.local()


def _import_and_install(name: str, *arguments: Any, **options: Any) -> Any:
    """Import a module. After the outermost import that brings torch, install its kernels."""
    depth = getattr(_thread, "depth", 0)
    _thread.depth = depth + 1
    try:
        module = _import(name, *arguments, **options)
    finally:
        _thread.depth = depth
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    # importlib.import_module does not come here, but the imports inside torch do.
    if depth == 0 and spec is not None and not spec._initializing:
        builtins.__import__ = _import
        from tests.cuda_runtime import kernels, triton_kernels

        kernels.install()
        triton_kernels.install()
    return module


# The process that begins with the stand-in's own command installs them itself.
if "libcudart" in os.environ.get("LD_PRELOAD", "") and "tests.cuda_runtime" not in sys.orig_argv:
    builtins.__import__ = _import_and_install
