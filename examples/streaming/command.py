"""Options and output that the streaming examples share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ebbtide.errors import UserError
from ebbtide.interleave.engine.devices.cuda import CudaDevice
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler import Tracer
from ebbtide.units import bytes_text, ms_text, parse_bytes, rate_text
from examples.streaming.replay import bound_s, measure_rates, replay
from examples.streaming.tile_stream import TileStream

StreamDevice = EmulatedDevice | CudaDevice


def make_parser(description: str, slots: int, rank: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all examples.

    Args:
        description: The docstring of the example.
        slots: Default number of slots.
        rank: Default rank.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--rows",
        type=_positive,
        default=16384,
        help="rows of the matrix (default 16384)",
    )
    add(
        "--columns",
        type=_positive,
        default=1024,
        help="columns of the matrix (default 1024)",
    )
    add(
        "--rank",
        type=_positive,
        default=rank,
        help=f"rank of the result (default {rank})",
    )
    add("--tile-rows", type=_positive, default=512, help="rows of a tile (default 512)")
    add(
        "--slots",
        type=_positive,
        default=slots,
        help=f"tiles in flight on the device (default {slots})",
    )
    add(
        "--memory",
        type=_size,
        default="32MB",
        help="device memory for everything, such as 32MB (default)",
    )
    add(
        "--device",
        choices=("emulated", "cuda"),
        default="emulated",
        help="device (default emulated)",
    )
    add(
        "--link",
        type=_size,
        help=(
            "rate of each direction of the emulated link per second, such as 2GB "
            "(default: none)"
        ),
    )
    add(
        "--compute-seconds",
        type=float,
        default=0.0,
        help="least computation of a pass in s, a timed wait (default 0)",
    )
    add("--trace", type=Path, metavar="RUN.ebb", help="record the run as a trace")
    add(
        "--replay",
        action="store_true",
        help="predict a pass for other tile sizes and slots",
    )
    return parser


def run_command(main: Callable[[], None]) -> None:
    """Run the main function of an example. Wrong input gives one line, and exit status
    2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def open_device(options: argparse.Namespace) -> StreamDevice:
    """Return the device of the options. Raises UserError for options that it cannot
    have."""
    if options.device == "emulated":
        return EmulatedDevice(options.memory, options.link, options.link)
    if options.link or options.compute_seconds:
        raise UserError(
            "--link and --compute-seconds are for the emulated device: leave them out "
            "with --device cuda"
        )
    if not torch.cuda.is_available():
        raise UserError("torch finds no GPU: leave out --device cuda")
    return CudaDevice(torch.device("cuda"))


@contextmanager
def recording(options: argparse.Namespace) -> Iterator[Tracer | None]:
    """Record a block as the trace of the options, if they name one."""
    if options.trace is None:
        yield None
        return
    with Tracer(options.trace) as tracer:
        yield tracer


def open_stream(
    device: StreamDevice,
    matrix: torch.Tensor,
    factor_columns: int,
    other_elements: int,
    options: argparse.Namespace,
    tracer: Tracer | None,
) -> TileStream:
    """Return the stream of the options, see `TileStream`."""
    return TileStream(
        device,
        matrix,
        factor_columns,
        options.tile_rows,
        options.slots,
        options.memory,
        other_elements,
        options.compute_seconds,
        tracer,
    )


def print_times(
    stream: TileStream,
    device: StreamDevice,
    options: argparse.Namespace,
    factor: tuple[bool, bool],
) -> None:
    """Print layout, memory, rates and times of a stream, and with `--replay` those of
    other layouts.

    Args:
        stream: The stream, after its passes.
        device: Its device.
        options: The options.
        factor: Whether passes fetch, and whether they flush, the factor, in other
            layouts.
    """
    layout = stream.layout
    machine = measure_rates(stream.schedules)
    pass_s = [schedule.update_s for schedule in stream.schedules]
    predicted_s = [
        simulate(one.plan, one.workload, machine).update_s for one in stream.schedules
    ]
    bounds_s = [bound_s(one.plan, machine) for one in stream.schedules]
    peak = (
        device.peak_bytes
        if isinstance(device, EmulatedDevice)
        else torch.cuda.max_memory_allocated()
    )
    print(
        f"matrix   {bytes_text(stream.matrix.nbytes)} in {len(layout.tiles)} tiles of "
        f"{bytes_text(layout.tile_bytes)}"
    )
    print(
        f"device   {bytes_text(peak)} of {bytes_text(options.memory)} at the peak, "
        f"{layout.resident_count} tiles resident, {layout.slots} slots"
    )
    print(
        f"rates    {rate_text(machine.h2d_bytes_per_s)} to the device, "
        f"{machine.gpu_update_params_per_s:,.0f} rows/s computed, "
        f"{1e6 * (machine.operation_s or 0):.0f} us an operation"
    )
    print(
        f"passes   {_times_text(pass_s)}, after {ms_text(1e3 * stream.load_s)} of "
        "loading"
    )
    print(f"         {_times_text(predicted_s)} predicted")
    print(f"         {_times_text(bounds_s)} bound")
    if not options.replay:
        return
    print(
        "a pass predicted for other layouts: tile rows, slots, resident share, time, "
        "bound"
    )
    sizes = [2**power for power in range(5, 14) if 2**power <= layout.rows]
    for prediction in replay(
        layout, stream.tile_budget_bytes, sizes, (1, 2, 3, 4), *factor, machine
    ):
        other = prediction.layout
        print(
            f"{other.tile_rows:9} {other.slots:6} {100 * other.resident_share:7.0f} % "
            f"{ms_text(1e3 * prediction.pass_s):>10} "
            f"{ms_text(1e3 * prediction.bound_s):>10}"
        )


def _times_text(times_s: list[float]) -> str:
    return " ".join(ms_text(1e3 * seconds) for seconds in times_s)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
