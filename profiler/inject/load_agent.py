"""Loads the agent by its path, under its own name.

Ebbtide need not be installed where the job runs, and is not imported where it is. A
program that both `sitecustomize.py` and `ebbtide-agent.pth` run; `__file__` is its
path.
"""

import importlib.util
import os
import sys

_AGENT = "ebbtide.profiler.agent"

if _AGENT not in sys.modules:
    folder = os.path.join(os.path.dirname(os.path.dirname(__file__)), "agent")
    spec = importlib.util.spec_from_file_location(
        _AGENT, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[_AGENT] = module
    spec.loader.exec_module(module)
importlib.import_module(_AGENT + ".start").from_environment()
