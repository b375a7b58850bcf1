"""Draw the pictures of README and docs from the traces in `traces/`.

    python docs/pictures.py [-o docs/pictures]

Every picture is the output of an ebbtide command. That of the report is a screenshot by a headless Chromium; without
Chromium it is not drawn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ebbtide.cli import run

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "traces"
BLOCKING, INTERLEAVED = TRACES / "h100-20b-blocking.ebb", TRACES / "h100-20b-interleaved-2.ebb"
THREE_POLICIES = [TRACES / f"h100-20b-{kind}.ebb" for kind in ("blocking", "async", "interleaved-2")]
SWEEP_JOB = ROOT / "examples" / "workload-7b.json"
SWEEP_MACHINES = (ROOT / "examples" / "machine-desktop-nvme.json", "rtx4090")
# Stands for a table in the folder of the picture's temporary files.
TABLE = "TABLE"
# Picture -> the command that draws it, without its output.
COMMANDS: dict[str, list[str | Path]] = {
    "memory-and-link.png": ["plot", INTERLEAVED, "--iterations", "4:7", "-o"],
    "windows.png": ["plot", INTERLEAVED, "--kind", "windows", "--iterations", "4:6", "-o"],
    "tutorial-blocking.png": ["plot", BLOCKING, "--iterations", "4:6", "-o"],
    "three-policies.png": ["plot", *THREE_POLICIES, "--kind", "memory", "--iterations", "4:6", "-o"],
    "activity.png": [
        "plot",
        TRACES / "a100-torch-profiler.ebb",
        "--kind",
        "activity",
        "--iterations",
        "1011:1013",
        "-o",
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
            for name in ("a10", "a100-40gb-pcie", "a100-80gb-sxm", "l40s", "h100-80gb-pcie", "h100-80gb")
            for part in ("--machine", name)
        ),
        *(part for price in ("4", "6", "16", "8", "12", "24") for part in ("--price-per-hour", price)),
        "-o",
    ],
    "storage.png": [
        "replay",
        *("--params", "7e9", "--forward-ms", "2050", "--backward-ms", "4100"),
        *("--free-bytes", "5GB", "--host-free-bytes", "72GB"),
        *("--machine", ROOT / "examples" / "machine-desktop-nvme.json"),
        *("--policy", "pipelined", "--policy", "pipelined,overlap=both", "--policy", "interleaved:1,overlap=forward"),
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
    "policies.png": ["replay", TRACES / "a100-13b-async.ebb", "--machine", "a100-40gb-published", "--plot"],
    "sweep.png": [
        *("sweep", "--workload", SWEEP_JOB, "-o", TABLE),
        *(part for machine in SWEEP_MACHINES for part in ("--machine", machine)),
        *("--policy", "pipelined", "--policy", "adaptive", "--policy", "mlp-offload", "--policy", "superoffload"),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true"),
        *("--jobs", "1", "--plot"),
    ],
    "sweep-lines.png": [
        *("sweep", "--workload", SWEEP_JOB, "--scale-params", "0.5,0.75,1", "-o", TABLE),
        *("--machine", SWEEP_MACHINES[0]),
        *("--policy", "pipelined", "--policy", "mlp-offload", "--policy", "superoffload"),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true"),
        *("--jobs", "1", "--plot"),
    ],
    "systems-storage.png": [
        "replay",
        *("--params", "7e9", "--forward-ms", "2050", "--backward-ms", "4100"),
        *("--free-bytes", "5GB", "--host-free-bytes", "72GB"),
        *("--machine", ROOT / "examples" / "machine-desktop-nvme.json"),
        *("--policy", "pipelined", "--policy", "zero-infinity"),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true"),
        *("--policy", "zero-infinity:12,pipeline_read=true,pipeline_write=true,gradients=device"),
        *("--policy", "mlp-offload"),
        "--plot",
    ],
    "systems.png": [
        "replay",
        "--workload",
        TRACES.parent / "examples" / "workload-13b.json",
        "--machine",
        "a100-40gb-published",
        *(part for policy in ("zero-offload", "adaptive", "systems") for part in ("--policy", policy)),
        "--plot",
    ],
}
REPORT = "report.png"
REPORT_SIZE = "1180,1100"


def draw(folder: Path) -> list[Path]:
    """Draw all pictures into a folder, and return the paths of those that were drawn."""
    pictures = []
    for name in COMMANDS:
        path = folder / name
        status = run_command(name, path)
        if status:
            raise SystemExit(status)
        pictures.append(path)
    if screenshot(folder / REPORT):
        pictures.append(folder / REPORT)
    return pictures


def run_command(name: str, path: Path) -> int:
    """Draw a picture into a file, and return the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [str(Path(scratch) / "rows.parquet") if word is TABLE else str(word) for word in COMMANDS[name]]
        return run([*words, str(path), "--force"])


def screenshot(path: Path) -> bool:
    """Draw the top of the report of the H100 run. Return False if no Chromium is installed."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium is installed: the picture of the report is not drawn", file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        status = run(["report", str(BLOCKING), "--rank", "0", "-o", str(page)])
        if status:
            raise SystemExit(status)
        options = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={scratch}/user",
        ]
        options += ["--disable-background-networking", "--disable-sync", "--disable-component-update"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        # The timeline is drawn by a script after the page has loaded.
        output = [f"--screenshot={path}", f"--window-size={REPORT_SIZE}", "--virtual-time-budget=10000"]
        subprocess.run([browser, *options, *output, page.as_uri()], check=True, capture_output=True, timeout=120)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "pictures")
    for path in draw(parser.parse_args().output):
        print(path)


if __name__ == "__main__":
    main()
