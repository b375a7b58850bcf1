"""Results as pandas tables: what results have in common, and tables of dataclasses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

if TYPE_CHECKING:
    import pandas as pd

# pandas dtype of each type of a dataclass field. Missing integers keep their other
# digits (`Int64`).
_DTYPES: dict[Any, str] = {
    int: "int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
    bool: "bool",
    str: "str",
    str | None: "string",
}


class TabularResult:
    """A result of the analysis: one line as text, its main table in a notebook."""

    _table: ClassVar[str]

    def __init_subclass__(cls, table: str = "", **options: Any) -> None:
        """Take the name of the field that is the main table.

        The field is a list or tuple of dataclasses.
        """
        super().__init_subclass__(**options)
        cls._table = table

    def to_pandas(self) -> pd.DataFrame:
        """Return its main table: a row per entry, with the fields as columns."""
        return to_frame(
            getattr(self, self._table),
            get_args(get_type_hints(type(self))[self._table])[0],
        )

    def as_json(self) -> Any:
        """Return the object that the command prints with `--json`."""
        return asdict(self)  # type: ignore[call-overload]

    def __repr__(self) -> str:
        rows = len(self.to_pandas())
        return (
            f"<{type(self).__name__}: {rows:,} row{'s' if rows != 1 else ''}; "
            "to_pandas(), as_json()>"
        )

    def _repr_html_(self) -> str:
        return str(self.to_pandas()._repr_html_())


def to_frame(rows: Iterable[Any], kind: type) -> pd.DataFrame:
    """Make a table of dataclass instances: a row each, a column per field.

    A field that is a dataclass gives a column for each of its own fields,
    FIELD_SUBFIELD; tuples and lists are kept as Python objects.
    """
    import pandas as pd

    dtypes = _dtypes(kind)
    table = pd.DataFrame([_flat(asdict(row)) for row in rows], columns=list(dtypes))
    return table.astype(
        {column: dtype for column, dtype in dtypes.items() if dtype is not None}
    )


def _dtypes(kind: type) -> dict[str, str | None]:
    hints = get_type_hints(kind)
    dtypes: dict[str, str | None] = {}
    for field in fields(kind):
        hint = hints[field.name]
        if hasattr(hint, "__dataclass_fields__"):
            dtypes |= {
                f"{field.name}_{name}": dtype for name, dtype in _dtypes(hint).items()
            }
        else:
            dtypes[field.name] = _DTYPES.get(hint)
    return dtypes


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}_{field}": part for field, part in value.items()}
        else:
            flat[name] = value
    return flat
