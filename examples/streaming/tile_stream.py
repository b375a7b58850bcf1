"""Passes over a matrix in host memory whose row tiles go through slots of device
memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from ebbtide.interleave.engine.devices.cuda import CudaDevice
from ebbtide.interleave.engine.devices.device import copy_now
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.runtime.engine import record_operations, reserve_rows
from ebbtide.interleave.engine.runtime.executor import Executor
from ebbtide.interleave.model.plan import STEP, Op
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.profiler import Tracer
from examples.streaming.tile_plan import fit_layout, pass_plan, pass_workload

# Computes a tile: (its rows of the matrix, its rows of the factor), both on the device.
TileFunction = Callable[[torch.Tensor, torch.Tensor], object]


class TileStream:
    """A matrix (rows, columns) and a factor (rows, factor_columns) in host memory,
    fp32, and a device for their tiles.

    Args:
        device: The device.
        matrix: The matrix, in memory from `device.allocate_host`.
        factor_columns: Columns of the factor.
        tile_rows: Rows of a tile.
        slots: Tiles on the device through which those pass that are not resident.
        memory_bytes: Device memory for all that the job allocates; None: no tile is
            resident.
        other_elements: Number of fp32 elements that the job allocates besides tiles.
        compute_s: Seconds that the computation of a pass takes at least, a timed wait;
            0: as long as it takes.
        tracer: Records each pass; None: nothing is recorded.

    Attributes:
        layout: Tiles, slots and resident tiles.
        tile_budget_bytes: Device memory for tiles; None: only the slots.
        factor: The factor in host memory; rows of resident tiles are those of
            `collect`.
        schedules: The measured schedule of each pass.
        load_s: Seconds in which the resident tiles were copied to the device.

    Raises:
        LayoutError: The slots do not fit the memory.
    """

    def __init__(
        self,
        device: EmulatedDevice | CudaDevice,
        matrix: torch.Tensor,
        factor_columns: int,
        tile_rows: int,
        slots: int,
        memory_bytes: float | None = None,
        other_elements: int = 0,
        compute_s: float = 0.0,
        tracer: Tracer | None = None,
    ) -> None:
        rows, columns = matrix.shape
        other_bytes = other_elements * matrix.element_size()
        self.tile_budget_bytes = (
            None if memory_bytes is None else memory_bytes - other_bytes
        )
        self.layout = fit_layout(
            rows, columns, factor_columns, tile_rows, slots, self.tile_budget_bytes
        )
        self.matrix = matrix
        self.factor = device.allocate_host((rows, factor_columns), torch.float32)
        self.schedules: list[Schedule] = []
        self.load_s = 0.0
        self._device = device
        self._compute_s = compute_s
        self._tracer = tracer
        self._blocks: list[torch.Tensor] = []
        self._function: TileFunction = lambda matrix, factor: None
        self._plan_options = False, False
        self._executor = Executor(self._perform, device)

    def __enter__(self) -> TileStream:
        layout = self.layout
        elements = layout.tile_rows * (layout.columns + layout.factor_columns)
        needs_slots = len(layout.resident) < len(layout.tiles)
        slots = [
            self.allocate(elements) for _ in range(layout.slots if needs_slots else 0)
        ]
        streamed = [
            tile for tile in range(len(layout.tiles)) if tile not in layout.resident
        ]
        memory = {
            tile: slots[number % layout.slots] for number, tile in enumerate(streamed)
        }
        memory |= {tile: self.allocate(elements) for tile in sorted(layout.resident)}
        self._tiles = [
            self._views(memory[tile], len(rows))
            for tile, rows in enumerate(layout.tiles)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.close()
        for block in self._blocks:
            self._device.release(block)
        self._blocks.clear()

    def allocate(self, *shape: int) -> torch.Tensor:
        """Allocate device memory, fp32, until the stream ends. Raises DeviceMemoryError
        if there is none."""
        block = self._device.allocate_state(torch.Size(shape).numel(), rows=1)
        for stream in ("h2d", "gpu", "d2h"):
            self._device.wait(stream, [self._device.record("memory")])
        self._blocks.append(block)
        return block.view(shape)

    def load(self) -> None:
        """Copy the resident tiles to the device."""
        start_s = time.perf_counter()
        copy_now(
            self._device,
            "h2d",
            [self._host_and_device(tile)[0] for tile in self._resident()],
        )
        self.load_s = time.perf_counter() - start_s

    def replace_factor(self, values: torch.Tensor) -> None:
        """Write the factor, and the rows of it that are on the device."""
        self.factor.copy_(values)
        copy_now(
            self._device,
            "h2d",
            [self._host_and_device(tile)[1] for tile in self._resident()],
        )

    def collect(self) -> torch.Tensor:
        """Return the factor, with the rows of resident tiles as they are on the
        device."""
        pairs = [self._host_and_device(tile)[1] for tile in self._resident()]
        copy_now(self._device, "d2h", [(device, host) for host, device in pairs])
        return self.factor

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a small tensor to the device."""
        copy_now(self._device, "h2d", [(source.to(torch.float32).contiguous(), target)])

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Return a small tensor of the device in host memory."""
        target = torch.empty_like(source, device="cpu")
        copy_now(self._device, "d2h", [(source, target)])
        return target

    def compute(self, work: Callable[[], object]) -> None:
        """Compute between two passes, on the device."""
        self._device.submit("gpu", work)
        self._device.record("gpu").synchronize()

    def prepare(self) -> AbstractContextManager[None]:
        """Record what is computed before a pass, as the phase `backward`."""
        return self._tracer.phase("backward") if self._tracer else nullcontext()

    def run_pass(
        self,
        function: TileFunction,
        fetch_factor: bool = False,
        flush_factor: bool = False,
    ) -> None:
        """Compute each tile once, in the order of rows, and record the pass as the
        phase `update`.

        Args:
            function: Computes a tile. It may write the factor, and tensors from
                `allocate`.
            fetch_factor: Whether it reads the factor.
            flush_factor: Whether the host gets the factor. Otherwise tiles are
                dropped.
        """
        plan = pass_plan(self.layout, fetch_factor, flush_factor)
        self._function, self._plan_options = function, (fetch_factor, flush_factor)
        with self._tracer.phase("update") if self._tracer else nullcontext():
            self._device.begin_iteration()
            numbers = reserve_rows(plan)
            self._executor.begin(plan)
            self._executor.advance_to(STEP)
            run = self._executor.finish()
            record_operations(run, numbers)
        workload = pass_workload(self.layout)
        self.schedules.append(
            Schedule(plan, workload, run.starts, run.ends, 0.0, 0.0, 0.0, max(run.ends))
        )

    def _perform(self, op: Op) -> None:
        fetch_factor, flush_factor = self._plan_options
        matrix, factor = self._host_and_device(op.subgroup)
        if op.kind == "fetch":
            self._device.copy("h2d", [matrix, factor] if fetch_factor else [matrix])
        elif op.kind == "update":
            self._device.submit("gpu", lambda: self._compute_tile(matrix[1], factor[1]))
        elif flush_factor:
            self._device.copy("d2h", [(factor[1], factor[0])])

    def _compute_tile(self, matrix: torch.Tensor, factor: torch.Tensor) -> None:
        start_s = time.perf_counter()
        self._function(matrix, factor)
        if self._compute_s:
            end_s = start_s + self._compute_s * len(matrix) / self.layout.rows
            time.sleep(max(0.0, end_s - time.perf_counter()))

    def _views(
        self, block: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of a block for the matrix and for the factor, each
        contiguous."""
        layout = self.layout
        middle = layout.tile_rows * layout.columns
        return (
            block[: rows * layout.columns].view(rows, layout.columns),
            block[middle : middle + rows * layout.factor_columns].view(
                rows, layout.factor_columns
            ),
        )

    def _host_and_device(self, tile: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (host memory, device memory) of a tile's part of the matrix, and of
        the factor."""
        rows = self.layout.tiles[tile]
        matrix, factor = self._tiles[tile]
        return [
            (self.matrix[rows.start : rows.stop], matrix),
            (self.factor[rows.start : rows.stop], factor),
        ]

    def _resident(self) -> list[int]:
        return sorted(self.layout.resident)
