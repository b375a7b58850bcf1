"""Checks: functions of a host that say whether something would slow a job down; and their results as text."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ebbtide.analysis.tables.table import Gain, Misfit, View
from ebbtide.interleave.doctor.host import JobHost
from ebbtide.units import counted

State = Literal["ok", "warning", "unknown"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str  # Name of the check.
    state: State  # `warning`: it slows a job down; `unknown`: the host does not tell.
    detail: str  # The figures that were found, and with a warning why they matter.
    # Words to change it, as they are to be typed where possible; None where there is nothing to do.
    remedy: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks, in the order of the checks."""

    checks: tuple[CheckResult, ...]

    def of(self, state: State) -> list[CheckResult]:
        """Return the results of a state."""
        return [check for check in self.checks if check.state == state]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide doctor --json` prints."""
        return {"checks": [asdict(check) for check in self.checks]}


# State, detail, and the remedy where there is one.
Answer = tuple[State, str] | tuple[State, str, str]
Finder = Callable[[JobHost], Iterator[Answer]]
_CHECKS: dict[str, Finder] = {}


def check(name: str) -> Callable[[Finder], Finder]:
    """Decorate a function of `JobHost`, in a file of the folder `checks`, so that `ebbtide doctor` calls it."""

    def register(finder: Finder) -> Finder:
        assert name not in _CHECKS, f"two checks are named {name}"
        return _CHECKS.setdefault(name, finder)

    return register


@cache
def all_checks() -> dict[str, Finder]:
    """Return the checks of all modules in the folder `checks`, by name, in the order of modules and lines."""
    for path in sorted((Path(__file__).parent / "checks").glob("[a-z]*.py")):
        import_module(f"ebbtide.interleave.doctor.checks.{path.stem}")
    return dict(_CHECKS)


def examine(host: JobHost) -> Diagnosis:
    """Run all checks on a host."""
    return Diagnosis(
        tuple(CheckResult(name, *result) for name, finder in all_checks().items() for result in finder(host))
    )


def diagnosis_view(diagnosis: Diagnosis, verbose: bool) -> View:
    """Yield what slows a job down on this host, with remedies; `verbose`: all checks with their figures."""
    warnings, unknown = diagnosis.of("warning"), diagnosis.of("unknown")
    counts = f"{len(diagnosis.of('ok'))} checks are fine"
    if warnings:
        yield Misfit(f"this host would slow a job down: {counted(len(warnings), 'warning')}; {counts}")
    else:
        yield f"nothing here would slow a job down; {counts}"
    for number, check in enumerate(warnings, 1):
        yield f"{number}. {check.name}: {check.detail}"
        yield Gain(f"   DO  {check.remedy}")
    if verbose:
        for title, checks in (("not known:", unknown), ("fine:", diagnosis.of("ok"))):
            if checks:
                yield title
                yield from map(_check_line, checks)
        return
    if unknown:
        yield f"not known: {', '.join(dict.fromkeys(check.name for check in unknown))}"
    yield "all checks with their figures: -v"


def _check_line(check: CheckResult) -> str:
    return f"   {check.name}: {check.detail}" + (f"; {check.remedy}" if check.remedy else "")
