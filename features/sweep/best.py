"""Finds the best policy in each scenario of a sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import ebbtide
from ebbtide.analysis.tables.table import (
    Column,
    Gain,
    Table,
    View,
    ms,
    share,
    size,
    text,
)
from ebbtide.features.sweep.task import NOT_COLUMNS, Row, Task
from ebbtide.interleave.model.plan import RESOURCES, STORAGE_RESOURCES
from ebbtide.interleave.replay.replay import RESULT_BYTES, PolicyResult
from ebbtide.interleave.replay.tables import FITS_TEXTS
from ebbtide.units import bytes_text, count_text

BASELINE = "zero-offload"
_MAX_ROWS = 40
# The rows of best policies on one screen.
_MAX_SHORT = 12
_ARROW_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
}
# Null means not known. scale_params, free_bytes, subgroup_params and host_free_bytes
# are the scenario (1 and null: the workload as it is); params, subgroups,
# largest_subgroup_params and least_free_bytes describe the changed workload. compute_ms
# is the iteration without its optimizer; the other figures are as in `ebbtide replay`,
# busy shares for the update phase. note: why results are not exact. error: why there
# are no figures.
SCHEMA = pa.schema(
    [
        *(
            pa.field(name, pa.string(), nullable=False)
            for name in ("workload", "machine", "policy")
        ),
        pa.field("scale_params", pa.float64(), nullable=False),
        *(pa.field(name, pa.float64()) for name in ("free_bytes", "host_free_bytes")),
        *(
            pa.field(name, pa.int64())
            for name in (
                "subgroup_params",
                "params",
                "subgroups",
                "largest_subgroup_params",
            )
        ),
        *(pa.field(name, pa.float64()) for name in ("least_free_bytes", "compute_ms")),
        *(
            pa.field(figure.name, _ARROW_TYPES[str(figure.type).partition(" ")[0]])
            for figure in fields(PolicyResult)
            if figure.name not in ("policy", *NOT_COLUMNS)
        ),
        *(
            pa.field(f"{resource}_busy_share", pa.float64())
            for resource in (*RESOURCES, *STORAGE_RESOURCES)
        ),
        *(
            pa.field(f"bound_{overlap}{name}_ms", pa.float64())
            for overlap in ("", "overlap_")
            for name in ("iteration", "exposed", "exposed_whole_subgroups")
        ),
        pa.field("bound_update_ms", pa.float64()),
        *(pa.field(name, pa.string()) for name in ("bound_overlap", "error")),
    ]
)


# The columns whose combinations of values have a best policy each.
_GROUP = ("workload", "machine", "scale_params", "free_bytes", "host_free_bytes")


@dataclass(frozen=True)
class BestPolicy:
    """The fastest combination of policy and subgroup size for a workload, a machine and
    a scenario."""

    group: Row  # The values of _GROUP.
    row: Row | None  # Row of the combination; None if no combination fits.
    error: str | None  # Why no combination has a result; None if one has.
    # Speed-up over the baseline with the same subgroups; None if that is not in the
    # sweep.
    speed_up: float | None

    @property
    def above_bound(self) -> float | None:
        """Time of the iteration above the lower bound, as a share of the bound.

        The bound has the policy's overlap.
        """
        if self.row is None or not self.row["bound_overlap_iteration_ms"]:
            return None
        return float(
            self.row["iteration_ms"] / self.row["bound_overlap_iteration_ms"] - 1
        )

    def as_json(self) -> dict[str, object]:
        names = (
            "policy",
            "params",
            "largest_subgroup_params",
            "least_free_bytes",
            "iteration_ms",
            "exposed_ms",
            "fits",
            "exact",
            "peak_device_bytes",
            "host_bytes",
            "storage_read_bytes",
            "storage_written_bytes",
        )
        return {
            **self.group,
            **{name: self.row[name] if self.row else None for name in names},
            "error": self.error,
            "speed_up": self.speed_up,
            "above_bound_share": self.above_bound,
        }


def find_best(rows: Sequence[Row]) -> list[BestPolicy]:
    """Return the best combination of each case, in order.

    A case is a workload, machine, size, and free memory of device and host. Exact
    combinations come first, then those known to fit, then the fastest; those that do
    not fit are left out.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in _GROUP), []).append(row)
    return [
        _best(dict(zip(_GROUP, group, strict=True)), group_rows)
        for group, group_rows in groups.items()
    ]


def _best(group: Row, rows: Sequence[Row]) -> BestPolicy:
    replayed = [row for row in rows if row["error"] is None]
    best = min(
        (row for row in replayed if row["fits"] is not False),
        key=lambda row: (not row["exact"], row["fits"] is None, row["iteration_ms"]),
        default=None,
    )
    baseline_ms = [
        row["iteration_ms"]
        for row in replayed
        if best
        and row["policy"] == BASELINE
        and row["subgroup_params"] == best["subgroup_params"]
    ]
    speed_up = (
        baseline_ms[0] / best["iteration_ms"]
        if best and baseline_ms and best["iteration_ms"]
        else None
    )
    return BestPolicy(group, best, None if replayed else rows[0]["error"], speed_up)


def values_of(rows: Iterable[Row], column: str) -> list[Any]:
    """Return the values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[column] for row in rows))


def sweep_view(rows: Sequence[Row], output: Path | None, print_all: bool) -> View:
    """Return the best policy of each workload, machine and scenario.

    With `print_all`, return all rows of a small sweep.
    """
    best = find_best(rows)
    policies = len(values_of(rows, "policy"))
    yield _answer(best, policies)
    # Names that are the same in all rows are a line above the table.
    constant = [
        name for name in ("workload", "machine") if len(values_of(rows, name)) == 1
    ]
    if constant:
        yield ", ".join(f"{name}: {rows[0][name]}" for name in constant)
    scenario = _scenario_columns(rows)
    columns = [
        *scenario,
        text(
            "best policy",
            lambda row: _policy_text(row) if "policy" in row else row["misfit"],
        ),
        ms("iteration", lambda row: row.get("iteration_ms")),
        text(
            "speed-up",
            lambda row: None if row["speed_up"] is None else f"{row['speed_up']:.2f}x",
        ),
        text("fits", lambda row: FITS_TEXTS[row["fits"]] if "fits" in row else None),
        *_byte_columns(),
        share("above the bound", itemgetter("above_bound"), digits=1),
    ]
    best_rows = [
        {
            **item.group,
            **(item.row or {"misfit": "no result" if item.error else "none fits"}),
            "speed_up": item.speed_up,
            "above_bound": item.above_bound,
        }
        for item in best
    ]
    of_policies = f" of {policies} policies" if policies > 1 else ""
    title = (
        f"The best{of_policies} that fits (speed-up over {BASELINE}, same subgroups)"
    )
    max_rows = _MAX_ROWS if print_all else _MAX_SHORT
    yield Table(
        "best",
        title,
        columns,
        best_rows,
        source=str(output or "--all"),
        max_rows=max_rows,
    )
    if print_all:
        columns = [
            *scenario,
            text("policy", itemgetter("policy")),
            ms("iteration", lambda row: row.get("iteration_ms")),
            *_byte_columns(),
            text(
                "fits",
                lambda row: (
                    "cannot be replayed" if row["error"] else FITS_TEXTS[row["fits"]]
                ),
            ),
            text(
                "exact",
                lambda row: None if row["error"] else "yes" if row["exact"] else "no",
            ),
        ]
        yield Table("rows", "All combinations", columns, rows, max_rows=_MAX_ROWS)
    errors = [str(row["error"]) for row in rows if row["error"]]
    if errors:
        yield (
            f"{len(errors)} of {len(rows)} combinations cannot be replayed; the first: "
            f"{errors[0]}"
        )


def _answer(best: Sequence[BestPolicy], compared: int) -> str:
    """Return the line that says which of the compared policies to use, and where."""
    policies = Counter(item.row["policy"] for item in best if item.row)
    cases = "1 case" if len(best) == 1 else f"{len(best):,} cases"
    if not policies:
        return f"no policy fits ({cases})"
    no_result = sum(item.error is not None for item in best)
    others = {
        "none fits": len(best) - policies.total() - no_result,
        "no result": no_result,
    }
    rest = "".join(
        f"; {kind} in {number:,}" for kind, number in others.items() if number
    )
    of_policies = f" of {compared} policies" if compared > 1 else ""
    if (
        len(
            {
                tuple(value for name, value in item.group.items() if name != "machine")
                for item in best
            }
        )
        > 1
    ):
        policy, number = policies.most_common(1)[0]
        return Gain(f"{policy} is the best{of_policies} in {number:,} of {cases}{rest}")
    fastest = min(
        (item for item in best if item.row),
        key=lambda item: float((item.row or {})["iteration_ms"]),
    )
    assert fastest.row is not None
    gain = (
        f" ({fastest.speed_up:.2f}x {BASELINE})" if fastest.speed_up is not None else ""
    )
    of_cases = f", the best{of_policies}" if of_policies else ""
    of_cases += f", the fastest of {len(best)} machines" if len(best) > 1 else ""
    time = f"{fastest.row['iteration_ms']:,.0f} ms an iteration{gain}"
    return Gain(
        f"{_policy_text(fastest.row)} on {fastest.row['machine']}: "
        f"{time}{of_cases}{rest}"
    )


def _policy_text(row: Row) -> str:
    return str(row["policy"]) if row["exact"] else f"{row['policy']} (not exact)"


def _scenario_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that tell rows apart: of the replayed workload, else of the
    scenario alone."""
    columns = {
        **{name: text(name, itemgetter(name)) for name in ("workload", "machine")},
        "scale_params": text(
            "parameters",
            lambda row: (
                count_text(row["params"])
                if "params" in row
                else f"{row['scale_params']:g} x"
            ),
        ),
        "free_bytes": text(
            "always free",
            lambda row: bytes_text(row.get("least_free_bytes", row["free_bytes"])),
        ),
        "subgroup_params": text(
            "subgroup",
            lambda row: count_text(
                row.get("largest_subgroup_params", row.get("subgroup_params"))
            ),
        ),
        "host_free_bytes": text(
            "free host memory", lambda row: bytes_text(row["host_free_bytes"])
        ),
    }
    return [
        column for name, column in columns.items() if len(values_of(rows, name)) > 1
    ]


def _byte_columns() -> list[Column]:
    def of_replayed(bytes_of: Callable[[Row], float]) -> Callable[[Row], float | None]:
        return lambda row: bytes_of(row) if "host_bytes" in row else None

    return [
        size(kind, of_replayed(bytes_of)) for kind, bytes_of in RESULT_BYTES.items()
    ]


def write_rows(rows: Sequence[Row], tasks: Sequence[Task], path: Path) -> None:
    """Write a table with a row per combination.

    The table has all workloads and machines as JSON in its metadata `ebbtide`.
    """
    metadata = {
        "version": ebbtide.__version__,
        "workloads": list(
            {task.workload.name: asdict(task.workload) for task in tasks}.values()
        ),
        "machines": list(
            {task.machine.name: task.machine.as_json() for task in tasks}.values()
        ),
    }
    schema = SCHEMA.with_metadata({"ebbtide": json.dumps(metadata)})
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path, compression="zstd")
