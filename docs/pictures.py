"""Draw the pictures of README and docs from the traces in `traces/`.

    python docs/pictures.py [-o docs/pictures]

Every picture is the output of an ebbtide command, except that of a critical path, which
shows the segments of one. Those of the report and of the terminal view are screenshots
by a headless Chromium; without Chromium they are not drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ebbtide.cli import run

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "traces"
BLOCKING, INTERLEAVED = (
    TRACES / "h100-20b-blocking.ebb",
    TRACES / "h100-20b-interleaved-2.ebb",
)
THREE_POLICIES = [
    TRACES / f"h100-20b-{kind}.ebb" for kind in ("blocking", "async", "interleaved-2")
]
SWEEP_JOB = ROOT / "examples" / "workload-7b.json"
SWEEP_MACHINES = (ROOT / "examples" / "machine-desktop-nvme.json", "rtx4090")
# Stands for a table in the folder of the picture's temporary files.
TABLE = "TABLE"
# Picture -> the command that draws it, without its output.
COMMANDS: dict[str, list[str | Path]] = {
    "memory-and-link.png": ["plot", INTERLEAVED, "--iterations", "4:7", "-o"],
    "windows.png": [
        "plot",
        INTERLEAVED,
        "--kind",
        "windows",
        "--iterations",
        "4:6",
        "-o",
    ],
    "tutorial-blocking.png": ["plot", BLOCKING, "--iterations", "4:6", "-o"],
    "three-policies.png": [
        "plot",
        *THREE_POLICIES,
        "--kind",
        "memory",
        "--iterations",
        "4:6",
        "-o",
    ],
    "activity.png": [
        "plot",
        TRACES / "a100-torch-profiler.ebb",
        "--kind",
        "activity",
        "--iterations",
        "1011:1013",
        "-o",
    ],
    "fit.png": [
        "plan",
        "--model",
        "Qwen/Qwen3-8B",
        "--machine",
        "rtx4090",
        "--frontier",
        "--plot",
    ],
    "plan.png": [
        "plan",
        "--params",
        "13e9",
        "--ranks",
        "4",
        "--micro-batch",
        "2",
        *(
            part
            for name in (
                "a10",
                "a100-40gb-pcie",
                "a100-80gb-sxm",
                "l40s",
                "h100-80gb-pcie",
                "h100-80gb",
            )
            for part in ("--machine", name)
        ),
        *(
            part
            for price in ("4", "6", "16", "8", "12", "24")
            for part in ("--price-per-hour", price)
        ),
        "--plot",
    ],
    "storage.png": [
        "replay",
        *("--params", "7e9", "--forward-ms", "2050", "--backward-ms", "4100"),
        *("--free-bytes", "5GB", "--host-free-bytes", "72GB"),
        *("--machine", ROOT / "examples" / "machine-desktop-nvme.json"),
        *(
            "--policy",
            "pipelined",
            "--policy",
            "pipelined,overlap=both",
            "--policy",
            "interleaved:1,overlap=forward",
        ),
        "--plot-schedules",
    ],
    "overlaps.png": [
        "replay",
        TRACES / "a100-13b-async.ebb",
        "--machine",
        "a100-40gb-published",
        "--free-bytes",
        "10e9",
        *(
            part
            for policy in (
                "pipelined",
                "pipelined,overlap=forward",
                "pipelined,overlap=backward",
                "pipelined,overlap=both",
                "adaptive",
                "adaptive,overlap=both",
            )
            for part in ("--policy", policy)
        ),
        "--plot",
    ],
    "policies.png": [
        "replay",
        TRACES / "a100-13b-async.ebb",
        "--machine",
        "a100-40gb-published",
        "--plot",
    ],
    "sweep.png": [
        *("sweep", "--workload", SWEEP_JOB, "-o", TABLE),
        *(part for machine in SWEEP_MACHINES for part in ("--machine", machine)),
        *(
            "--policy",
            "pipelined",
            "--policy",
            "adaptive",
            "--policy",
            "mlp-offload",
            "--policy",
            "superoffload",
        ),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true"),
        *("--jobs", "1", "--plot"),
    ],
    "sweep-lines.png": [
        *(
            "sweep",
            "--workload",
            SWEEP_JOB,
            "--scale-params",
            "0.5,0.75,1",
            "-o",
            TABLE,
        ),
        *("--machine", SWEEP_MACHINES[0]),
        *(
            "--policy",
            "pipelined",
            "--policy",
            "mlp-offload",
            "--policy",
            "superoffload",
        ),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true"),
        *("--jobs", "1", "--plot"),
    ],
    "sweep-host-memory.png": [
        *(
            "sweep",
            "--workload",
            SWEEP_JOB,
            "--host-free-bytes",
            "24GB,48GB,72GB,96GB,120GB",
            "-o",
            TABLE,
        ),
        *("--machine", SWEEP_MACHINES[0]),
        *("--policy", "pipelined", "--policy", "adaptive", "--policy", "mlp-offload"),
        *("--jobs", "1", "--plot"),
    ],
    "systems-storage.png": [
        "replay",
        *("--params", "7e9", "--forward-ms", "2050", "--backward-ms", "4100"),
        *("--free-bytes", "5GB", "--host-free-bytes", "72GB"),
        *("--machine", ROOT / "examples" / "machine-desktop-nvme.json"),
        *("--policy", "pipelined", "--policy", "zero-infinity"),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true"),
        *(
            "--policy",
            "zero-infinity:12,pipeline_read=true,pipeline_write=true,gradients=device",
        ),
        *("--policy", "mlp-offload"),
        "--plot",
    ],
    "systems.png": [
        "replay",
        "--workload",
        TRACES.parent / "examples" / "workload-13b.json",
        "--machine",
        "a100-40gb-published",
        *(
            part
            for policy in ("zero-offload", "adaptive", "systems")
            for part in ("--policy", policy)
        ),
        "--plot",
    ],
    "layers.png": [
        *(
            "replay",
            "--workload",
            TRACES.parent / "examples" / "workload-8b-layers.json",
            "--machine",
            "rtx4090",
        ),
        *("--policy", "adaptive,weights=streamed,activations=offload"),
        *("--policy", "adaptive,weights=auto,activations=auto", "--plot-schedules"),
    ],
    "block-swap.png": [
        *(
            "replay",
            "--workload",
            TRACES.parent / "examples" / "workload-lora-blocks.json",
            "--machine",
            "rtx3060",
        ),
        *("--policy", "block-swap:20", "--policy", "block-swap:22,down=no"),
        "--plot-schedules",
    ],
}
REPORT = "report.png"
# Many ranks of which some differ, as `benchmarks/fleet.py` makes them.
CYCLE = "rl-cycle.png"
FLEET, FLEET_RANKS, FLEET_ITERATIONS = "fleet.png", 64, 60
REPORT_SIZE = "1180,1100"
CRITICAL_PATH = "critical-path.png"
VIEW = "watch.png"
VIEW_SIZE = (120, 36)


def draw(folder: Path) -> list[Path]:
    """Draw all pictures into a folder, and return the paths of those that were
    drawn."""
    pictures = []
    for name in COMMANDS:
        path = folder / name
        status = run_command(name, path)
        if status:
            raise SystemExit(status)
        pictures.append(path)
    pictures.append(draw_cycle(folder / CYCLE))
    pictures += [draw_fleet(folder / FLEET), draw_critical_path(folder / CRITICAL_PATH)]
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(
            "no Chromium is installed: the pictures of the report and of the view are "
            "not drawn",
            file=sys.stderr,
        )
        return pictures
    with tempfile.TemporaryDirectory() as scratch:
        draw_report(browser, folder / REPORT, Path(scratch))
        draw_view(browser, folder / VIEW, Path(scratch))
    return [*pictures, folder / REPORT, folder / VIEW]


def run_command(name: str, path: Path) -> int:
    """Draw a picture into a file, and return the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [
            str(Path(scratch) / "rows.parquet") if word is TABLE else str(word)
            for word in COMMANDS[name]
        ]
        return run([*words, str(path), "--force"])


def draw_cycle(path: Path) -> Path:
    """Predict the example of reinforcement learning, and draw one of its cycles."""
    job = [ROOT / "examples" / "train_rl.py", "--offload"]
    sizes = ["--width", "2560", "--cycles", "8", "--tokens", "256"]
    with tempfile.TemporaryDirectory() as scratch:
        trace = f"{scratch}/rl.ebb"
        options = ["--gpu", "rtx4090", "--steps", "28", "-o", trace]
        command = ["dry-run", *options, "--", sys.executable, *job, *sizes]
        words = [str(word) for word in (sys.executable, "-m", "ebbtide", *command)]
        subprocess.run(words, check=True, capture_output=True)
        run(["cycles", trace, "--force", "-o", str(path)])
    return path


def draw_fleet(path: Path) -> Path:
    """Make a trace of many ranks and draw its heat maps."""
    with tempfile.TemporaryDirectory() as scratch:
        size = [
            "--ranks",
            str(FLEET_RANKS),
            "--iterations",
            str(FLEET_ITERATIONS),
            "--commands",
            "",
        ]
        subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "fleet.py", scratch, *size],
            check=True,
            cwd=ROOT,
        )
        trace = Path(scratch) / f"fleet-{FLEET_RANKS}x{FLEET_ITERATIONS}.ebb"
        status = run(
            ["plot", str(trace), "--kind", "ranks", "-o", str(path), "--force"]
        )
        if status:
            raise SystemExit(status)
    return path


def draw_critical_path(path: Path) -> Path:
    """Draw the segments of the critical path of the A100 run, a lane per kind over the
    phases."""
    from matplotlib.figure import Figure

    from ebbtide.analysis import TraceAnalysis
    from ebbtide.profiler.trace import open_trace

    trace = open_trace(TRACES / "a100-torch-profiler.ebb")
    critical_path = TraceAnalysis(trace).rank(trace.ranks[0]).critical_path
    assert critical_path is not None
    segments = critical_path.segments
    start_ns = segments[0].start_ns
    kinds = ("wait", "host", "launch", "copy", "collective", "kernel")
    colors = ("#b8b8b8", "#e69f00", "#d55e00", "#56b4e9", "#009e73", "#0072b2")
    figure = Figure(figsize=(10, 3.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for lane, (kind, color) in enumerate(zip(kinds, colors, strict=True)):
        own = [segment for segment in segments if segment.kind == kind]
        bars = [
            ((s.start_ns - start_ns) / 1e6, (s.end_ns - s.start_ns) / 1e6) for s in own
        ]
        axes.broken_barh(bars, (lane + 0.1, 0.8), color=color)
        total = f"{critical_path.kind_ms(kind):.1f} ms"
        axes.text(
            1.005, lane + 0.5, total, transform=axes.get_yaxis_transform(), va="center"
        )
    parts = [segment.part for segment in segments]
    begins = [n for n, part in enumerate(parts) if n == 0 or part != parts[n - 1]]
    for n, end in zip(begins, [*begins[1:], len(segments) - 1], strict=True):
        at_ms, end_ms = ((segments[m].start_ns - start_ns) / 1e6 for m in (n, end))
        axes.axvline(at_ms, color="#444444", lw=0.6, ls=":")
        if end_ms - at_ms > 0.04 * critical_path.length_ms:
            axes.text(
                at_ms, len(kinds) + 0.1, f" {parts[n]}", fontsize=8, color="#444444"
            )
    axes.set(xlim=(0, critical_path.length_ms), ylim=(0, len(kinds) + 0.7))
    axes.set(xlabel=f"ms of iteration {critical_path.iteration}")
    axes.set_yticks([lane + 0.5 for lane in range(len(kinds))], labels=kinds)
    figure.savefig(path)
    return path


def draw_report(browser: str, path: Path, scratch: Path) -> None:
    """Draw the top of the report of the H100 run."""
    page = scratch / "report.html"
    status = run(["report", str(BLOCKING), "--rank", "0", "-o", str(page)])
    if status:
        raise SystemExit(status)
    photograph(browser, page, path, REPORT_SIZE)


def draw_view(browser: str, path: Path, scratch: Path) -> None:
    """Draw the terminal view of the interleaved H100 run, by textual's own picture of
    the screen."""
    from ebbtide.features.live.trace import LiveTrace
    from ebbtide.features.live.view.app import LiveView
    from ebbtide.features.live.view.snapshot import RecordingSnapshot, SnapshotReader

    reader = SnapshotReader(LiveTrace(INTERLEAVED))
    view = LiveView(reader, reader.read(0) or RecordingSnapshot(INTERLEAVED))

    async def picture() -> str:
        async with view.run_test(size=VIEW_SIZE) as pilot:
            await pilot.press("minus")
            while view.snapshot.findings is None:
                await pilot.pause(0.1)
            await pilot.pause()
            return view.export_screenshot()

    page = scratch / "view.svg"
    svg = asyncio.run(picture())
    page.write_text(svg, encoding="utf-8")
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    photograph(
        browser, page, path, f"{math.ceil(float(width))},{math.ceil(float(height))}"
    )


def photograph(browser: str, page: Path, path: Path, size: str) -> None:
    """Save a picture of a page in a window of a size (`width,height`)."""
    options = [
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        f"--user-data-dir={page.parent}/user",
    ]
    options += [
        "--disable-background-networking",
        "--disable-sync",
        "--disable-component-update",
    ]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    # The timeline of the report is drawn by a script after the page has loaded.
    output = [
        f"--screenshot={path}",
        f"--window-size={size}",
        "--virtual-time-budget=10000",
    ]
    subprocess.run(
        [browser, *options, *output, page.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).parent / "pictures"
    )
    for path in draw(parser.parse_args().output):
        print(path)


if __name__ == "__main__":
    main()
