"""Checks: functions of a host that say whether something would slow a job down; and their results as text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

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


def examine(host: JobHost) -> list[CheckResult]:
    """Run all checks on a host; return their results in the order of the checks."""
    return [CheckResult(name, *result) for name, finder in all_checks().items() for result in finder(host)]


def checks_of(checks: Iterable[CheckResult], state: State) -> list[CheckResult]:
    """Return the results of a state."""
    return [check for check in checks if check.state == state]


def diagnosis_view(results: Sequence[CheckResult], verbose: bool) -> View:
    """Yield what slows a job down on this host, with remedies; `verbose`: all checks with their figures."""
    fine, warnings, unknown = (checks_of(results, state) for state in get_args(State))
    counts = f"{len(fine)} checks are fine"
    if warnings:
        yield Misfit(f"this host would slow a job down: {counted(len(warnings), 'warning')}; {counts}")
    else:
        yield f"nothing here would slow a job down; {counts}"
    for number, check in enumerate(warnings, 1):
        yield f"{number}. {check.name}: {check.detail}"
        yield Gain(f"   DO  {check.remedy}")
    if verbose:
        for title, checks in (("not known:", unknown), ("fine:", fine)):
            if checks:
                yield title
                yield from map(_check_line, checks)
        return
    if unknown:
        yield f"not known: {', '.join(dict.fromkeys(check.name for check in unknown))}"
    yield "all checks with their figures: -v"


def _check_line(check: CheckResult) -> str:
    return f"   {check.name}: {check.detail}" + (f"; {check.remedy}" if check.remedy else "")
