"""Run the programs in dry runs, and write what each needs as a page of the
documentation.

    python -m tests.recipes.run FOLDER [--only NAME...] [--environments FOLDER] [--page docs/dry-run-recipes.md]

Each environment is a folder `FOLDER/NAME`. Fails if a program fails, or takes more than
3 minutes or 4 GB of the host.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.tables import machine_line
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.tables.prediction import verdict
from ebbtide.profiler.trace import open_trace
from tests.recipes.programs import PROGRAMS, Program

_MOST_SECONDS, _MOST_HOST_BYTES = 180, 4 * 10**9
_OWN = Path(__file__).parent
_LAST_LINES = 12
_RESULTS = "<!-- results: python -m tests.recipes.run -->"


@dataclass(frozen=True)
class Result:
    """The end of a program. Figures of a program that failed are None.

    `seconds`: of processor time; `host_bytes`: the most that a process had resident.
    """

    name: str
    status: int
    seconds: float
    host_bytes: int
    version: str
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    verdict: str | None = None
    iteration_ms: float | None = None
    message: str = ""

    @property
    def problem(self) -> str | None:
        """Return what is wrong with the run; None: nothing."""
        if self.status:
            return f"status {self.status}: {self.message}"
        if self.verdict is None:
            return "no figures"
        if self.seconds > _MOST_SECONDS:
            return f"took {self.seconds:.0f} s"
        if self.host_bytes > _MOST_HOST_BYTES:
            return f"took {self.host_bytes / 1e9:.1f} GB of host memory"
        return None


def run_program(program: Program, folder: Path, python: Path) -> Result:
    """Run a program in the folder of the hub."""
    trace = folder / f"{program.name}.ebb"
    shutil.rmtree(trace, ignore_errors=True)
    ranks = ["--ranks", str(program.ranks)] if program.ranks else []
    command = [
        str(python),
        "-m",
        "ebbtide",
        "dry-run",
        "--gpu",
        program.gpu,
        "--steps",
        str(program.steps),
        *ranks,
        "-o",
        str(trace),
        "--",
    ]
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / ".cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = folder / f"{program.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *program.command.split()],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            raise
    version = _version(python, program.framework[1])
    seconds, host_bytes = usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss
    common = (
        program.name,
        os.waitstatus_to_exitcode(status),
        seconds,
        host_bytes,
        version,
    )
    if common[1] or not trace.exists():
        return Result(
            *common,
            message="\n".join(
                log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            ),
        )
    metrics = JobMetrics(open_trace(trace))
    summary = metrics.summary()
    return Result(
        *common,
        metrics.pool_peak("reserved"),
        metrics.capacity_bytes,
        verdict(metrics),
        summary.iteration_ms,
    )


def _version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = folder / "jobs"
    jobs.unlink(missing_ok=True)
    jobs.symlink_to(_OWN / "jobs")
    results = []
    for program in PROGRAMS:
        if options.only and not any(name in program.name for name in options.only):
            continue
        _make_hub(program, folder, _python(options.environments, "main"))
        result = run_program(
            program, folder, _python(options.environments, program.environment)
        )
        results.append(result)
        print(_line(result), flush=True)
        (folder / f"{program.name}.json").write_text(
            json.dumps(asdict(result), indent=1), encoding="utf-8"
        )
    if options.page is not None:
        write_page(options.page, folder)
    return 1 if any(result.problem for result in results) else 0


def write_page(page: Path, folder: Path) -> None:
    """Replace the results at the end of a page of the documentation by those of the
    last runs in a folder."""
    head = (
        "program",
        "framework",
        "job",
        "GPU",
        "GiB reserved",
        "verdict",
        "CPU s",
        "host GB",
    )
    lines = [
        f"{date.today():%Y-%m-%d}, {machine_line()}, torch "
        f"{_version(Path(sys.executable), 'torch')}:",
        "",
    ]
    lines += [_row(head), _row(["---"] * len(head))]
    for program in PROGRAMS:
        file = folder / f"{program.name}.json"
        if file.exists():
            lines.append(
                _row(
                    _cells(
                        program, Result(**json.loads(file.read_text(encoding="utf-8")))
                    )
                )
            )
    text = page.read_text(encoding="utf-8").split(_RESULTS)[0]
    page.write_text(f"{text}{_RESULTS}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(program: Program, result: Result) -> list[str]:
    reserved = (
        "-" if result.reserved_bytes is None else f"{result.reserved_bytes / 2**30:.2f}"
    )
    framework = f"[{program.framework[0]}]({program.source}) {result.version}"
    verdict_text = result.verdict or "failed"
    cost = (f"{result.seconds:.0f}", f"{result.host_bytes / 1e9:.1f}")
    return [
        program.name,
        framework,
        program.shape,
        program.gpu,
        reserved,
        verdict_text,
        *cost,
    ]


def _python(environments: Path, name: str) -> Path:
    return environments.absolute() / name / "bin" / "python"


def _make_hub(program: Program, folder: Path, python: Path) -> None:
    missing = [name for name in program.needs if not (folder / name).exists()]
    if missing:
        subprocess.run(
            [python, "-m", "tests.recipes.hub", folder, *missing],
            cwd=_OWN.parents[1],
            check=True,
        )


def _line(result: Result) -> str:
    cost = f"{result.seconds:5.0f} s  {result.host_bytes / 1e9:4.1f} GB"
    if result.problem:
        return f"{result.name:28} {cost}  FAILED: {result.problem}"
    return (
        f"{result.name:28} {cost}  {(result.reserved_bytes or 0) / 2**30:6.2f} GiB  "
        f"{result.verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
