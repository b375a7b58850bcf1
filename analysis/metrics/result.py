"""The base class of results of the analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class TabularResult:
    """A result of the analysis: one line as text, its main table in a notebook."""

    def to_pandas(self) -> pd.DataFrame:
        """Return its main table."""
        raise NotImplementedError

    def as_json(self) -> Any:
        """Return the object that the command prints with `--json`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = len(self.to_pandas())
        return f"<{type(self).__name__}: {rows:,} row{'s' if rows != 1 else ''}; to_pandas(), as_json()>"

    def _repr_html_(self) -> str:
        return str(self.to_pandas()._repr_html_())
