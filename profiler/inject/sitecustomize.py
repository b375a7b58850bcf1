"""Loads the agent into every Python that starts, then runs the job's own `sitecustomize`, which this one hides.

`ebbtide profile` puts this folder first on PYTHONPATH. The agent is loaded by its path, under its own name, since
ebbtide need not be installed where the job runs.
"""

import contextlib
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_AGENT = "ebbtide.profiler.agent"


def _load_agent():
    if _AGENT not in sys.modules:
        folder = os.path.join(os.path.dirname(_FOLDER), "agent")
        spec = importlib.util.spec_from_file_location(
            _AGENT, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[_AGENT] = module
        spec.loader.exec_module(module)
        # An import statement for one of its modules would import this by `__import__`, which looks for `ebbtide`, too.
        importlib.import_module(_AGENT + ".deepspeed")
    importlib.import_module(_AGENT + ".start").from_environment()


def _run_hidden():
    """Run the job's own sitecustomize, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
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
