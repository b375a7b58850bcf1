"""Plans of passes over row tiles: which tiles stay on the device, and how the others go
through its slots.

A tile is a subgroup of the engine, and a row of it a parameter: the plan of a pass
fetches, computes (`update`) and evicts (`flush`) each tile, so that the engine's
executor runs it and the simulator predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ebbtide.errors import UserError
from ebbtide.interleave.model.plan import STEP, Op, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.units import bytes_text

ELEMENT_BYTES = 4


class LayoutError(UserError):
    """Tiles and slots that do not fit the device's memory."""


@dataclass(frozen=True)
class TileLayout:
    """The tiles of a matrix and of its factor, which has as many rows, and the places
    of tiles on the device.

    Attributes:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        factor_columns: Columns of the factor, which is stored beside the matrix in each
            tile.
        tile_rows: Rows of a tile; the last one may have fewer.
        slots: Tiles on the device through which those pass that are not resident.
        resident_count: Tiles that stay on the device.
    """

    rows: int
    columns: int
    factor_columns: int
    tile_rows: int
    slots: int
    resident_count: int = 0

    @cached_property
    def tiles(self) -> tuple[range, ...]:
        """The rows of each tile."""
        return tuple(
            range(begin, min(begin + self.tile_rows, self.rows))
            for begin in range(0, self.rows, self.tile_rows)
        )

    @cached_property
    def resident(self) -> frozenset[int]:
        """The tiles that stay on the device, spread evenly, so that they are computed
        while others are fetched."""
        count = len(self.tiles)
        return frozenset(
            tile
            for tile in range(count)
            if tile * self.resident_count // count
            != (tile + 1) * self.resident_count // count
        )

    @property
    def resident_share(self) -> float:
        """The share of the rows that stay on the device."""
        return sum(len(self.tiles[tile]) for tile in self.resident) / self.rows

    @property
    def tile_bytes(self) -> int:
        """Device memory of a tile with its part of the factor."""
        return ELEMENT_BYTES * self.tile_rows * (self.columns + self.factor_columns)

    @property
    def device_bytes(self) -> int:
        """Device memory of all slots and resident tiles."""
        slots = 0 if len(self.resident) == len(self.tiles) else self.slots
        return (slots + self.resident_count) * self.tile_bytes


def fit_layout(
    rows: int,
    columns: int,
    factor_columns: int,
    tile_rows: int,
    slots: int,
    free_bytes: float | None,
) -> TileLayout:
    """Return the layout with as many resident tiles as memory allows beside the slots.

    Args:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        factor_columns: Columns of the factor.
        tile_rows: Rows of a tile.
        slots: Tiles through which those pass that are not resident.
        free_bytes: Device memory for tiles, in bytes; None: only the slots, no tile is
            resident.

    Raises:
        LayoutError: The slots do not fit the memory.
    """
    tile_rows = min(tile_rows, rows)
    layout = TileLayout(rows, columns, factor_columns, tile_rows, slots)
    if free_bytes is None:
        return layout
    count = len(layout.tiles)
    places = int(free_bytes // layout.tile_bytes)
    if places < min(slots, count):
        raise LayoutError(
            f"{bytes_text(max(0, free_bytes))} of device memory are left for tiles, "
            f"and {slots} slots of {tile_rows} "
            f"rows need {bytes_text(slots * layout.tile_bytes)}: choose fewer "
            "--tile-rows, fewer --slots or "
            "more --memory"
        )
    resident = count if places >= count else max(0, places - slots)
    return TileLayout(rows, columns, factor_columns, tile_rows, slots, resident)


def pass_workload(layout: TileLayout) -> Workload:
    """Return what a pass is to the simulator: an iteration that has an update only, of
    one parameter per row."""
    return Workload(
        name="pass over row tiles",
        params=layout.rows,
        subgroup_params=layout.tile_rows,
        forward_s=0.0,
        backward_s=0.0,
        param_bytes=0.0,
        grad_bytes=0.0,
        state_bytes=float(ELEMENT_BYTES * (layout.columns + layout.factor_columns)),
        clipping=False,
    )


def pass_plan(layout: TileLayout, fetch_factor: bool, flush_factor: bool) -> Plan:
    """Return the plan of one pass over all tiles.

    Tiles are computed in the order of their rows, whatever is resident, so sums over
    tiles do not depend on the layout.

    Args:
        layout: The layout.
        fetch_factor: Whether the computation reads the factor.
        flush_factor: Whether it writes the factor. If not, a tile is dropped when it is
            computed: the plan ends with a flush of 0 bytes for it, which nothing waits
            for.
    """
    ops: list[Op] = []
    # By slot: the operation that has emptied it.
    emptied_by: list[tuple[int, ...]] = [()] * layout.slots
    computed: tuple[int, ...] = ()
    streamed = 0
    fetched_columns = layout.columns + (layout.factor_columns if fetch_factor else 0)
    for tile, tile_range in enumerate(layout.tiles):
        rows = len(tile_range)
        row_bytes = ELEMENT_BYTES * rows
        if tile in layout.resident:
            ops.append(Op("update", "gpu", tile, rows, 0.0, STEP, computed))
            computed = (len(ops) - 1,)
            continue
        slot = streamed % layout.slots
        streamed += 1
        size = float(layout.tile_bytes)
        fetch = Op(
            "fetch",
            "h2d",
            tile,
            rows,
            row_bytes * fetched_columns,
            STEP,
            emptied_by[slot],
            takes=size,
        )
        update = Op("update", "gpu", tile, rows, 0.0, STEP, (*computed, len(ops)))
        flush = Op("flush", "d2h", tile, rows, 0.0, STEP, (len(ops) + 1,))
        if flush_factor:
            flush = flush._replace(nbytes=row_bytes * layout.factor_columns, gives=size)
        else:
            update = update._replace(gives=size)
        computed = (len(ops) + 1,)
        emptied_by[slot] = (len(ops) + 2,) if flush_factor else computed
        ops += [fetch, update, flush]
    plan = Plan(
        policy=f"tiles of {layout.tile_rows} rows, {layout.slots} slots",
        ops=tuple(ops),
        subgroups=len(layout.tiles),
        resident=layout.resident,
        parked=frozenset(),
        # The tiles have no gradients: none is copied to the host.
        kept_gradients=frozenset(range(len(layout.tiles))),
        resident_bytes=float(layout.resident_count * layout.tile_bytes),
    )
    return plan.validate(pass_workload(layout))
