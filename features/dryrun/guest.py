"""Program of a dry run in another environment, whose interpreter runs it by its path.

python -P guest.py RECORD SETTINGS train.py ARGUMENTS...

The environment needs torch and the standard library. The package ebbtide is loaded from
the folder of this file, without its other packages.
"""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Meta:
    """Stands in for a constraint of msgspec: values were checked before."""

    def __init__(self, **constraints: Any) -> None:
        self.description = constraints.get("description")


def _convert(values: dict[str, Any], kind: Any) -> Any:
    return kind(**values)


def load_ebbtide() -> None:
    """Load the package and what a dry run needs of it."""
    folder = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(
        "ebbtide", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["ebbtide"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    is_missing = importlib.util.find_spec("msgspec") is None
    if is_missing:
        stand_in: Any = ModuleType("msgspec")
        stand_in.Meta, stand_in.convert = _Meta, _convert
        stand_in.ValidationError = ValueError
        sys.modules["msgspec"] = stand_in
    importlib.import_module("ebbtide.features.dryrun.child")
    if is_missing:
        del sys.modules["msgspec"]


if __name__ == "__main__":
    load_ebbtide()
    runpy.run_module("ebbtide.features.dryrun", run_name="__main__", alter_sys=True)
