"""Time of a pass of the streaming examples by tile size and slots: measured, predicted,
and bound (examples/streaming/README.md).

    PYTHONPATH=. python benchmarks/streaming.py bounds
    PYTHONPATH=. python benchmarks/streaming.py layouts --plot docs/pictures/streaming.png

The device is emulated: copies are throttled, and the computation is a timed wait around
the real arithmetic. So times show what plan and executor lose, not how fast a GPU is.
All settings are measured in turn, several times, and the median is reported. `bounds`
exits with 1 if a pass takes more than 15 % longer than its bound.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import matplotlib
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine
from examples.streaming import nmf, svd
from examples.streaming.replay import bound_s, measure_rates, predict_pass
from examples.streaming.tile_plan import TileLayout
from examples.streaming.tile_stream import TileStream

ROWS, COLUMNS, WIDTH = 8192, 1024, 32
MATRIX_BYTES = 4 * ROWS * COLUMNS
# Links so slow that delays of other work on the host, a millisecond at times, are small
# beside a tile of 256 rows.
BOUND_LINK_BYTES_PER_S, LAYOUT_LINK_BYTES_PER_S = 25e6, 50e6
MEMORY_BYTES = 14e6
TILE_ROWS = (16, 32, 64, 128, 256, 512, 1024)
SLOTS = (1, 2, 3)
# Predictions use the rates of passes with tiles of these sizes.
RATE_TILE_ROWS = (32, 512)
TOLERANCE = 0.15


@dataclass(frozen=True)
class StreamJob:
    """A job whose passes are timed.

    Attributes:
        name: Its name.
        slots: The number of slots that its passes need.
        uses_factor: Whether its passes fetch the factor and flush it.
        other_elements: Number of fp32 elements that it allocates besides tiles, by rows
            of a tile.
        run: Runs two passes.
    """

    name: str
    slots: int
    uses_factor: bool
    other_elements: Callable[[int], int]
    run: Callable[[TileStream], object]


class Setting(NamedTuple):
    """The settings of a measured pass: its job, and options of the examples."""

    job: StreamJob
    tile_rows: int
    slots: int
    memory_bytes: float | None
    link_bytes_per_s: float
    compute_s: float

    @property
    def link_s(self) -> float:
        """The seconds in which the link copies the whole matrix."""
        return MATRIX_BYTES / self.link_bytes_per_s


class Measurement(NamedTuple):
    """The layout of a setting, the median time of a pass, s, and all schedules."""

    layout: TileLayout
    pass_s: float
    schedules: list[Schedule]


def make_jobs() -> list[StreamJob]:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.rand(*shape, generator=generator)
        for shape in ((ROWS, WIDTH), (WIDTH, COLUMNS))
    )
    return [
        StreamJob(
            "svd",
            2,
            False,
            lambda tile_rows: svd.other_elements(COLUMNS, WIDTH),
            # The last pass also writes the factor; its traffic to the host is 3 % of
            # that to the device.
            lambda stream: svd.randomized_svd(
                stream, WIDTH - svd.OVERSAMPLING, power=1
            ),
        ),
        StreamJob(
            "nmf",
            3,
            True,
            lambda tile_rows: nmf.other_elements(COLUMNS, WIDTH, tile_rows),
            lambda stream: nmf.nmf(stream, left, right, iterations=2),
        ),
    ]


def measure(
    settings: Iterable[Setting], matrix: torch.Tensor, repetitions: int
) -> dict[Setting, Measurement]:
    """Measure all settings in turn, and each of them `repetitions` times."""
    order = list(settings)
    schedules: dict[Setting, list[Schedule]] = defaultdict(list)
    layouts: dict[Setting, TileLayout] = {}
    for _ in range(repetitions):
        for setting in order:
            job, tile_rows, slots, memory_bytes, link_bytes_per_s, compute_s = setting
            device = EmulatedDevice(memory_bytes, link_bytes_per_s, link_bytes_per_s)
            others = job.other_elements(tile_rows)
            with TileStream(
                device, matrix, WIDTH, tile_rows, slots, memory_bytes, others, compute_s
            ) as stream:
                job.run(stream)
            device.close()
            schedules[setting] += stream.schedules
            layouts[setting] = stream.layout
    return {
        setting: Measurement(
            layouts[setting], median(schedule.update_s for schedule in runs), runs
        )
        for setting, runs in schedules.items()
    }


def emulated_rates(setting: Setting) -> Machine:
    """Return the rates that the device of a setting emulates."""
    return Machine(
        name="emulated",
        h2d_bytes_per_s=setting.link_bytes_per_s,
        d2h_bytes_per_s=setting.link_bytes_per_s,
        gpu_update_params_per_s=ROWS / setting.compute_s,
    )


def bound_table(jobs: list[StreamJob], matrix: torch.Tensor, repetitions: int) -> bool:
    """Print measured passes against their bound, and return whether all are close to
    it."""
    settings = [
        Setting(
            job,
            256,
            job.slots,
            memory,
            BOUND_LINK_BYTES_PER_S,
            ratio * MATRIX_BYTES / BOUND_LINK_BYTES_PER_S,
        )
        for job in jobs
        for memory in (None, MEMORY_BYTES)
        for ratio in (0.5, 1.0, 2.0)
    ]
    print("job  slots  computation/link  resident  pass (ms)  bound (ms)  pass/bound")
    worst = 0.0
    for setting, (layout, pass_s, schedules) in measure(
        settings, matrix, repetitions
    ).items():
        least_s = bound_s(schedules[0].plan, emulated_rates(setting))
        worst = max(worst, pass_s / least_s)
        print(
            f"{setting.job.name} {setting.slots:6} "
            f"{setting.compute_s / setting.link_s:17.1f} "
            f"{100 * layout.resident_share:7.0f} % {1e3 * pass_s:10.0f} "
            f"{1e3 * least_s:11.0f} {pass_s / least_s:11.3f}"
        )
    print(f"largest ratio {worst:.3f}")
    return worst <= 1 + TOLERANCE


def layout_table(
    jobs: list[StreamJob], matrix: torch.Tensor, repetitions: int
) -> list[tuple[Setting, Measurement, float]]:
    """Print measured and predicted passes by tile size and slots. Returns (setting,
    measurement, predicted s)."""
    # As long as the copies of what is not resident: the hardest case for the overlap.
    compute_s = (MATRIX_BYTES - MEMORY_BYTES) / LAYOUT_LINK_BYTES_PER_S
    link_and_computation = LAYOUT_LINK_BYTES_PER_S, compute_s
    settings = [
        Setting(job, rows, slots, MEMORY_BYTES, *link_and_computation)
        for job in jobs
        for rows in TILE_ROWS
        for slots in SLOTS
    ]
    measured = measure(settings, matrix, repetitions)
    results = []
    for job in jobs:
        passes = [
            schedule
            for rows in RATE_TILE_ROWS
            for schedule in measured[
                Setting(job, rows, 1, MEMORY_BYTES, *link_and_computation)
            ].schedules
        ]
        machine = measure_rates(passes)
        print(
            f"{job.name}, rates of passes with 1 slot and {RATE_TILE_ROWS[0]} or "
            f"{RATE_TILE_ROWS[1]} rows: "
            f"{(machine.h2d_bytes_per_s or 0) / 1e6:.1f} MB/s, "
            f"{machine.gpu_update_params_per_s:,.0f} rows/s, "
            f"{1e6 * (machine.operation_s or 0):.0f} us an operation"
        )
        print(
            "tile rows  slots  resident  measured (ms)  predicted (ms)  "
            "predicted/measured"
        )
        for setting in [setting for setting in settings if setting.job is job]:
            measurement = measured[setting]
            predicted = predict_pass(
                measurement.layout, job.uses_factor, job.uses_factor, machine
            ).pass_s
            results.append((setting, measurement, predicted))
            print(
                f"{setting.tile_rows:9} {setting.slots:6} "
                f"{100 * measurement.layout.resident_share:7.0f} % "
                f"{1e3 * measurement.pass_s:14.0f} {1e3 * predicted:15.0f} "
                f"{predicted / measurement.pass_s:19.3f}"
            )
    return results


def draw(results: list[tuple[Setting, Measurement, float]], path: Path) -> None:
    """Draw the time of a pass by tile size: per number of slots a line of predictions
    and markers of measurements."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    jobs = list(dict.fromkeys(setting.job for setting, _, _ in results))
    figure, axes = plt.subplots(
        1, len(jobs), figsize=(9.5, 4.6), sharey=True, layout="constrained"
    )
    styles = dict(
        zip(
            SLOTS,
            (("#d55e00", "o", "-"), ("#0072b2", "s", "--"), ("#009e73", "^", ":")),
            strict=True,
        )
    )
    for axis, job in zip(axes, jobs, strict=True):
        for slots, (color, marker, line) in styles.items():
            rows = [
                result
                for result in results
                if result[0].job is job and result[0].slots == slots
            ]
            sizes = [
                measurement.layout.tile_bytes / 2**20 for _, measurement, _ in rows
            ]
            predicted = [1e3 * seconds for _, _, seconds in rows]
            label = f"{slots} slot{'s' if slots > 1 else ''}"
            axis.plot(sizes, predicted, line, color=color, label=f"{label}, predicted")
            measured = [1e3 * measurement.pass_s for _, measurement, _ in rows]
            axis.plot(
                sizes,
                measured,
                marker,
                color=color,
                markersize=5,
                label=f"{label}, measured",
            )
        compute_s = max(setting.compute_s for setting, _, _ in results)
        axis.axhline(
            1e3 * compute_s, color="#444444", linewidth=1, label="bound: computation"
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
        axis.set_title(job.name.upper())
        axis.set_xlabel("tile (MiB)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("time of a pass (ms)")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", choices=("bounds", "layouts"), help="the table to measure"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="runs of each setting (default 5)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the table `layouts`"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrix = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    jobs = make_jobs()
    if options.table == "bounds":
        raise SystemExit(0 if bound_table(jobs, matrix, options.repetitions) else 1)
    results = layout_table(jobs, matrix, options.repetitions)
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
