"""Loads the agents of features, which plug into this one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any


def load_feature_agents() -> list[str]:
    """Load the folders `agent` of features by their path, as this one, and return the
    names of their packages.

    Each has a module `hooks` with a function `install(recorder)`, which calls no
    function of the job, and returns a function that undoes it. It may have a `READER`,
    a `FrameworkReader`.
    """
    root = os.path.join(
        os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "features"
    )
    names = []
    for feature in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        folder, name = (
            os.path.join(root, feature, "agent"),
            f"ebbtide.features.{feature}.agent",
        )
        path = os.path.join(folder, "__init__.py")
        if not os.path.exists(path):
            continue
        names.append(name)
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(
                name, path, submodule_search_locations=[folder]
            )
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules[name] = module
            spec.loader.exec_module(module)  # type: ignore[union-attr]
    return names


def feature_hooks() -> list[Any]:
    """Return the modules `hooks` of the agents of features."""
    return [importlib.import_module(f"{name}.hooks") for name in load_feature_agents()]
