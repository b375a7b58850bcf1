"""Run public examples of libraries, unmodified, in dry runs, and write what ran.

    python -m benchmarks.dry_run_examples SOURCES --python PYTHON [--only NAME...]
    python -m benchmarks.dry_run_examples SOURCES --page docs/dry-run-examples.md

`SOURCES/LIBRARY` has the repository of each library at the commit that
`example_runs/scripts.toml` names, and `SOURCES/packages/LIBRARY` the packages that it
names, where the others are too new for the scripts; the scripts run there. Models, data sets and files that
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
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from resource import RLIMIT_CPU, setrlimit
from threading import Lock
from typing import Any
from zlib import crc32

import pandas

from benchmarks.tables import machine_line
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.profiler.trace import Trace, open_trace

OWN = Path(__file__).parent / "example_runs"
RESULTS = OWN / "results.json"
GIB = 2**30
_BEGIN = "<!-- results: python -m benchmarks.dry_run_examples -->"
_END = "<!-- end of results -->"
RAN, NO_GPU, REFUSED, FAILED, TIME = "ran", "no GPU", "refused", "failed", "time"
_EAGER = re.compile(r"^([\d,]+) bytes in [1-9]\d* updates$", re.MULTILINE)
# The last line of a traceback.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit)\b.*:")

# Absolute paths, which name folders of this machine; not those of URLs.
_PATH = re.compile(r"(?<![\w:/.~])/(?:[^\s/'\"():,]+/)+([^\s/'\"():,]*)")
_LOCK = Lock()


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
    """The end of a dry run; figures of one without a trace are None.

    Attributes:
        seconds: Processor time.
        tensor_bytes: The largest sum of the bytes of tensors, without workspaces.
        eager_bytes: The same of an eager run on the CPU; None: not measured.
    """

    status: str
    seconds: float
    reserved_bytes: int | None = None
    requested_bytes: int | None = None
    iterations: int | None = None
    iteration_ms: float | None = None
    message: str = ""
    tensor_bytes: int | None = None
    eager_bytes: int | None = None


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


def run_script(script: Script, sources: Path, python: Path, limit_s: int) -> Result:
    """Run a script in its folder."""
    path = sources / script.library / script.path
    folder = _folder(script, sources)
    number = crc32(script.name.encode())
    trace, log = sources / f"{number}.ebb", sources / f"{number}.log"
    shutil.rmtree(trace, ignore_errors=True)
    command = [str(python), "-m", "ebbtide", "dry-run", "--gpu", script.gpu]
    command += ["--ranks", str(script.ranks)] if script.ranks is not None else []
    command += ["-o", str(trace), "--", *script.launcher.split()]
    command += [os.path.relpath(path, folder)] if script.path.endswith(".py") else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *shlex.split(script.arguments)],
            cwd=folder,
            env=_environment(python, sources / "home")
            | _own_packages(script, sources)
            | dict(script.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=partial(setrlimit, RLIMIT_CPU, (limit_s, limit_s + 1)),
        )
        _, ended, usage = os.wait4(process.pid, 0)
    seconds = round(usage.ru_utime + usage.ru_stime, 1)
    status = None if seconds >= limit_s else os.waitstatus_to_exitcode(ended)
    text = log.read_text(errors="replace")
    try:
        return _result(status, seconds, trace, text)
    finally:
        shutil.rmtree(trace, ignore_errors=True)
        keep = sources / "logs" / (script.name.replace("/", "_")[:150] + ".log")
        keep.parent.mkdir(exist_ok=True)
        log.rename(keep)


def make_stand_ins(scripts: list[Script], sources: Path, python: Path) -> None:
    """Make what scripts need that is not there."""
    missing: dict[Path, str] = {}
    for script in scripts:
        for need in script.needs:
            name, _, place = need.partition(":")
            target = _folder(script, sources) / (place or name)
            if place.startswith("~/"):
                target = sources / "home" / place.removeprefix("~/")
            if not target.exists():
                missing[target] = name
    command = [str(python), "-m", "benchmarks.example_runs.stand_ins"]
    command.append(str(sources / "hub"))
    for target, name in missing.items():
        command += [name, str(target)]
    subprocess.run(
        command,
        cwd=OWN.parents[1],
        check=True,
        env=_environment(python, sources / "home"),
    )


def _own_packages(script: Script, sources: Path) -> dict[str, str]:
    """Return the variable that lets a library have other versions of packages."""
    folder = sources / "packages" / script.library
    return {"PYTHONPATH": str(folder)} if folder.is_dir() else {}


def _folder(script: Script, sources: Path) -> Path:
    """Return the folder that a script runs in."""
    repository = sources / script.library
    if script.folder is None:
        return (repository / script.path).parent
    return repository / script.folder


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
    lines = [_without_paths(line) for line in text.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else ""
    if status is None:
        return Result(TIME, seconds, message=last)
    if status or not trace.exists():
        errors = [line for line in lines if _ERROR.match(line)]
        refusals = [line for line in lines if line.startswith("ebbtide: cannot")]
        reasons = refusals if status == 2 else errors
        last = reasons[-1][:300] if reasons else last
        return Result(REFUSED if status == 2 else FAILED, seconds, message=last)
    opened = open_trace(trace)
    metrics = JobMetrics(opened)
    reserved = metrics.pool_peak("reserved")
    if not reserved:
        return Result(NO_GPU, seconds)
    summary = metrics.summary()
    return Result(
        RAN,
        seconds,
        reserved,
        metrics.pool_peak("requested"),
        summary.iterations,
        summary.iteration_ms,
        tensor_bytes=_tensor_peak(opened),
    )


def _tensor_peak(trace: Trace) -> int:
    """Return the largest sum of the bytes of tensors, without workspaces."""
    rows = trace.table(trace.ranks[0], "allocations")
    rows = rows[rows["category"] != "temporary"]
    ended = rows[rows["end_ns"].notna()]
    sizes = pandas.concat(
        [
            pandas.Series(rows["bytes"].to_numpy(), rows["start_ns"]),
            pandas.Series(-ended["bytes"].to_numpy(), ended["end_ns"]),
        ]
    )
    return int(sizes.sort_index(kind="stable").cumsum().max())


def run_eager(script: Script, sources: Path, python: Path, limit_s: int) -> int | None:
    """Return the largest sum of the bytes of tensors in a run on the CPU; None: it
    failed."""
    path = sources / script.library / script.path
    words = [str(python), "-m", "benchmarks.example_runs.eager", str(path)]
    folders = [str(OWN.parents[1]), *_own_packages(script, sources).values()]
    process = subprocess.run(
        [*words, *shlex.split(script.arguments)],
        cwd=_folder(script, sources),
        env=_environment(python, sources / "home")
        | dict(script.environment)
        | {"PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=partial(setrlimit, RLIMIT_CPU, (limit_s, limit_s + 1)),
    )
    match = _EAGER.search(process.stderr)
    return int(match[1].replace(",", "")) if match else None


def _without_paths(line: str) -> str:
    """Return a line of a log with the last part of absolute paths alone."""
    return _PATH.sub(r"\1", line.strip())


def write_page(page: Path, libraries: dict[str, Any], scripts: list[Script]) -> None:
    """Replace the tables of a page by those of the results."""
    results = _load_results()
    scripts = [script for script in scripts if script.name in results]
    lines = ["| library | scripts | ran | GiB reserved |", "| --- | --- | --- | --- |"]
    for name, library in libraries.items():
        own = [results[script.name] for script in scripts if script.library == name]
        if not own:
            continue
        peaks = sorted(row.reserved_bytes / GIB for row in own if row.reserved_bytes)
        span = f"{peaks[0]:.2f} to {peaks[-1]:.2f}" if peaks else "-"
        link = f"[{name}](https://github.com/{library['repository']})"
        ran = sum(row.status == RAN for row in own)
        lines.append(f"| {link} | {len(own)} | {ran} | {span} |")
    ran = sum(results[script.name].status == RAN for script in scripts)
    lines.append(f"| all | {len(scripts)} | {ran} | |")
    lines += ["", "| did not run | why |", "| --- | --- |"]
    reasons = _reasons()
    by_reason: dict[str, list[str]] = {}
    for script in scripts:
        result = results[script.name]
        if result.status != RAN:
            reason = reasons.get(script.path, result.message)
            by_reason.setdefault(reason, []).append(f"`{script.path}`")
    lines += [
        f"| {', '.join(sorted(set(paths)))} | {reason} |"
        for reason, paths in by_reason.items()
    ]
    lines += _comparison(scripts, results)
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    tail = rest.partition(_END)[2]
    body = "\n".join(lines)
    page.write_text(f"{head}{_BEGIN}\n\n{body}\n\n{_END}{tail}", encoding="utf-8")
    print(f"{ran} of {len(scripts)} ran")


def _comparison(scripts: list[Script], results: dict[str, Result]) -> list[str]:
    """Return the table of peaks of dry runs beside peaks of eager runs."""
    lines = [
        "",
        "| compared with an eager run on the CPU | bytes of tensors | CPU | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for script in scripts:
        result = results[script.name]
        if result.tensor_bytes and result.eager_bytes:
            ratio = result.tensor_bytes / result.eager_bytes
            figures = f"{result.tensor_bytes:,} | {result.eager_bytes:,} | {ratio:.4f}"
            lines.append(f"| `{script.path}` | {figures} |")
    return lines


def _reasons() -> dict[str, str]:
    """Return why scripts cannot run, by their paths."""
    content = tomllib.loads((OWN / "scripts.toml").read_text(encoding="utf-8"))
    return {
        path: reason["text"]
        for reason in content["reasons"]
        for path in reason["scripts"]
    }


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
    parser.add_argument("--failed", action="store_true", help="those that did not run")
    parser.add_argument("--eager", action="store_true", help="compare with the CPU")
    parser.add_argument(
        "--limit", type=int, default=120, help="processor seconds of a script"
    )
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
        and not (
            options.failed and getattr(results.get(script.name), "status", "") == RAN
        )
    ]

    def run(script: Script) -> None:
        runs = sources, options.python.absolute(), options.limit
        result = run_script(script, *runs)
        if options.eager and result.status == RAN:
            result = replace(result, eager_bytes=run_eager(script, *runs))
        with _LOCK:
            results[script.name] = result
            _save_results(results, scripts)
        size = f"{(result.reserved_bytes or 0) / GIB:.2f} GiB"
        print(result.status, size, f"{result.seconds:.0f} s", script.name, sep="  ")
        if result.status != RAN:
            print(f"    {result.message}", flush=True)

    def run_all(group: list[Script]) -> None:
        for script in group:
            run(script)

    if chosen:
        make_stand_ins(chosen, sources, options.python.absolute())
    # Scripts that share files which they write run after each other.
    groups = [
        [script] for script in chosen if not libraries[script.library].get("serial")
    ]
    groups += [
        [script for script in chosen if script.library == name]
        for name, library in libraries.items()
        if library.get("serial")
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run_all, groups[::-1]))
    if options.page is not None:
        write_page(options.page, libraries, scripts)


if __name__ == "__main__":
    main()
