"""Run public examples of libraries, unmodified, in dry runs, and write what ran.

    python -m benchmarks.dry_run_examples SOURCES --python PYTHON [--only NAME...]
    python -m benchmarks.dry_run_examples SOURCES --page docs/dry-run-examples.md

`SOURCES/LIBRARY` has the repository of each library at the commit that
`example_runs/scripts.toml` names; the scripts run there. Models, data sets and files that
they read are random ones, made by `example_runs/stand_ins.py`. Results are written to
`example_runs/results.json`, beside those of scripts that are not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.tables import machine_line
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.profiler.trace import open_trace

OWN = Path(__file__).parent / "example_runs"
RESULTS = OWN / "results.json"
GIB = 2**30
_MARK = "<!-- results: python -m benchmarks.dry_run_examples -->"
RAN, NO_GPU, REFUSED, FAILED, TIME = "ran", "no GPU", "refused", "failed", "time"
# The last line of a traceback.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit)\b.*:")


@dataclass(frozen=True)
class Script:
    """An example.

    Attributes:
        path: Path in the repository of its library.
        arguments: Of its command line.
        needs: Stand-ins: `NAME` of a model or a data set, beside the script, or
            `NAME:PATH` of a file or folder, by its path from the folder it runs in.
        folder: Folder that it runs in; None: its own.
        launcher: Command before the script in place of `python`.
        ranks: Where the script starts them itself.
    """

    library: str
    path: str
    arguments: str = ""
    needs: tuple[str, ...] = ()
    folder: str | None = None
    launcher: str = "python"
    ranks: int | None = None
    gpu: str = "rtx4090"
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the name by which results are kept."""
        return f"{self.library}/{self.path}" + (
            f" {self.arguments}" if self.arguments else ""
        )


@dataclass(frozen=True)
class Result:
    """The end of a dry run; figures of one without a trace are None."""

    status: str
    seconds: float
    reserved_bytes: int | None = None
    iterations: int | None = None
    iteration_ms: float | None = None
    message: str = ""


def load_scripts() -> tuple[dict[str, Any], list[Script]]:
    """Return the libraries and the scripts of the list."""
    content = tomllib.loads((OWN / "scripts.toml").read_text(encoding="utf-8"))
    scripts = []
    for library, values in content["libraries"].items():
        for row in values["scripts"]:
            row["needs"] = tuple(row.get("needs", "").split())
            row["environment"] = tuple(row.get("environment", {}).items())
            scripts.append(Script(library, **row))
    return content["libraries"], scripts


def run_script(script: Script, sources: Path, python: Path, limit_s: float) -> Result:
    """Run a script in its folder."""
    repository = sources / script.library
    path = repository / script.path
    folder = path.parent if script.folder is None else repository / script.folder
    make_stand_ins(script, folder, sources, python)
    number = crc32(script.name.encode())
    trace, log = sources / f"{number}.ebb", sources / f"{number}.log"
    shutil.rmtree(trace, ignore_errors=True)
    command = [str(python), "-m", "ebbtide", "dry-run", "--gpu", script.gpu]
    command += ["--ranks", str(script.ranks)] if script.ranks is not None else []
    command += ["-o", str(trace), "--", *script.launcher.split()]
    command += [os.path.relpath(path, folder)] if script.path.endswith(".py") else []
    start, home = time.monotonic(), sources / "home"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *shlex.split(script.arguments)],
            cwd=folder,
            env=_environment(python, home) | dict(script.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    seconds = round(time.monotonic() - start, 1)
    text = log.read_text(errors="replace")
    try:
        return _result(status, seconds, trace, text)
    finally:
        shutil.rmtree(trace, ignore_errors=True)
        keep = sources / "logs" / (script.name.replace("/", "_")[:150] + ".log")
        keep.parent.mkdir(exist_ok=True)
        log.rename(keep)


def make_stand_ins(script: Script, folder: Path, sources: Path, python: Path) -> None:
    """Make what a script needs that is not there."""
    for need in script.needs:
        name, _, place = need.partition(":")
        target = folder / (place or name)
        if place.startswith("~/"):
            target = sources / "home" / place.removeprefix("~/")
        if target.exists():
            continue
        subprocess.run(
            [python, "-m", "benchmarks.example_runs.stand_ins", name, str(target)],
            cwd=OWN.parents[1],
            check=True,
            env=_environment(python, sources / "home"),
        )


def _environment(python: Path, home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    return {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "TORCH_HOME": str(home / "torch"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def _result(status: int | None, seconds: float, trace: Path, text: str) -> Result:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else ""
    if status is None:
        return Result(TIME, seconds, message=last)
    if status or not trace.exists():
        errors = [line for line in lines if _ERROR.match(line)]
        if status != 2 and errors:
            last = errors[-1][:300]
        return Result(REFUSED if status == 2 else FAILED, seconds, message=last)
    metrics = JobMetrics(open_trace(trace))
    reserved = metrics.pool_peak("reserved")
    if not reserved:
        return Result(NO_GPU, seconds)
    summary = metrics.summary()
    return Result(RAN, seconds, reserved, summary.iterations, summary.iteration_ms)


def write_page(page: Path, libraries: dict[str, Any], scripts: list[Script]) -> None:
    """Replace the table at the end of a page by that of the results."""
    results = _load_results()
    lines = [
        "",
        "| library | commit | scripts | ran | peaks, GiB reserved | refused or failed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    total: Counter[str] = Counter()
    others = []
    for name, library in libraries.items():
        own = [script for script in scripts if script.library == name]
        rows = [
            (script, results[script.name]) for script in own if script.name in results
        ]
        counts = Counter(result.status for _, result in rows)
        total += counts
        peaks = sorted(
            result.reserved_bytes / GIB for _, result in rows if result.reserved_bytes
        )
        span = f"{peaks[0]:.2f} to {peaks[-1]:.2f}" if peaks else "-"
        cells = (
            f"[{name}](https://github.com/{library['repository']})",
            library["commit"][:8],
            str(len(rows)),
            str(counts[RAN]),
            span,
            str(len(rows) - counts[RAN]),
        )
        lines.append(f"| {' | '.join(cells)} |")
        others += [(script, result) for script, result in rows if result.status != RAN]
    print(f"{sum(total.values())} scripts: {dict(total)}")
    lines += ["", "| script that did not run | reason |", "| --- | --- |"]
    notes = tomllib.loads((OWN / "scripts.toml").read_text(encoding="utf-8"))["reasons"]
    for script, result in others:
        reason = notes.get(f"{script.library}/{script.path}", result.message)
        lines.append(
            f"| `{script.library}/{script.path}` | {result.status}: {reason} |"
        )
    head = page.read_text(encoding="utf-8").split(_MARK)[0]
    page.write_text(head + _MARK + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _load_results() -> dict[str, Result]:
    if not RESULTS.exists():
        return {}
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: Result(**row) for name, row in content["results"].items()}


def _save_results(results: dict[str, Result], scripts: list[Script]) -> None:
    rows = {
        script.name: asdict(results[script.name])
        for script in scripts
        if script.name in results
    }
    content = {"machine": machine_line(), "results": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("--python", type=Path, help="of the examples' environment")
    parser.add_argument("--only", nargs="*", help="parts of names of scripts")
    parser.add_argument("--new", action="store_true", help="those without a result")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a script")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    options = parser.parse_args()
    libraries, scripts = load_scripts()
    sources = options.sources.resolve()
    results = _load_results()
    chosen = [
        script
        for script in scripts
        if options.python is not None
        and (options.only is None or any(part in script.name for part in options.only))
        and not (options.new and script.name in results)
    ]

    def run(script: Script) -> None:
        python = options.python.absolute()
        try:
            result = run_script(script, sources, python, options.limit)
        except (OSError, subprocess.CalledProcessError) as error:
            result = Result(FAILED, 0.0, message=f"no stand-in: {error}")
        results[script.name] = result
        _save_results(results, scripts)
        size = f"{(result.reserved_bytes or 0) / GIB:.2f} GiB"
        print(result.status, size, f"{result.seconds:.0f} s", script.name, sep="  ")
        if result.status != RAN:
            print(f"    {result.message}", flush=True)

    def run_library(library: str) -> None:
        """Run the scripts of a library, which share files, after each other."""
        for script in chosen:
            if script.library == library:
                run(script)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run_library, libraries))
    if options.page is not None:
        write_page(options.page, libraries, scripts)


if __name__ == "__main__":
    main()
