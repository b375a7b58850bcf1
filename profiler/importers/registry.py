"""Finds the importers in the sub-packages of `importers`."""

from __future__ import annotations

import importlib
import pkgutil

from ebbtide.profiler import importers
from ebbtide.profiler.importers.importer import Importer


def find_importers() -> dict[str, Importer]:
    """Return all importers by the name of their format, in the order in which they are asked to recognize a file."""
    listed: list[Importer] = []
    for module in pkgutil.iter_modules(importers.__path__):
        if module.ispkg:
            listed.extend(importlib.import_module(f"{importers.__name__}.{module.name}").IMPORTERS)
    return {importer.format: importer for importer in sorted(listed, key=lambda importer: importer.recognition)}
