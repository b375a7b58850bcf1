"""Loads the agent into every Python that starts, then runs the job's own
`sitecustomize`, which this one hides.

`ebbtide profile` puts this folder first on PYTHONPATH.
"""

import contextlib
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _load_agent():
    path = os.path.join(_FOLDER, "load_agent.py")
    with open(path, "rb") as file:
        exec(
            compile(file.read(), path, "exec"),
            {"__name__": "load_agent", "__file__": path},
        )


def _run_hidden():
    """Run the job's own sitecustomize, if there is one."""
    sys.path[:] = [
        entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER
    ]
    this_module = sys.modules.pop("sitecustomize", None)
    spec = importlib.util.find_spec("sitecustomize")
    if spec is None:
        if this_module is not None:
            sys.modules["sitecustomize"] = this_module
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


with contextlib.suppress(Exception):
    _load_agent()
_run_hidden()
