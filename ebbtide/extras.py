"""Extras: packages that the base install is without.

Also the line that names the extra where one is missing.
"""

from importlib import import_module
from typing import Any

from ebbtide.errors import MissingPackageError

# By package: the extra that has it. Commands may name another that has it, too.
EXTRAS = {
    "aiohttp": "remote",
    "bokeh": "report",
    "distributed": "dask",
    "fsspec": "remote",
    "highspy": "plan",
    "huggingface_hub": "remote",
    "mcp": "mcp",
    "numba": "run",
    "prometheus_client": "live",
    "scipy": "calibrate",
    "textual": "live",
    "torch": "run",
}


def missing_text(package: str, extra: str | None = None) -> str:
    """Return the line on a package that is not installed."""
    extra = extra or EXTRAS[package]
    return (
        f"this needs the package {package}: pip install 'ebbtide[{extra}]' (in a "
        f"clone: pip install '.[{extra}]')"
    )


def require(package: str) -> Any:
    """Import a package of an extra and return it. Raises MissingPackageError where it
    is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackageError(missing_text(package)) from None
