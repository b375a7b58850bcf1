"""Checks of a host, functions that say whether something would slow a job down, and
their results as text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from ebbtide.analysis.tables.table import Gain, Misfit, View
from ebbtide.features.doctor.host import JobHost
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import count_text, counted, rate_text

State = Literal["ok", "warning", "unknown"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str  # Name of the check.
    state: State  # `warning`: it slows a job down; `unknown`: the host does not tell.
    detail: str  # The figures that were found, and with a warning why they matter.
    # Words to change it, as they are to be typed where possible; None where there is
    # nothing to do.
    remedy: str | None = None


# State, detail, and the remedy where there is one.
Answer = tuple[State, str] | tuple[State, str, str]
Finder = Callable[[JobHost], Iterator[Answer]]
_CHECKS: dict[str, Finder] = {}


def check(name: str) -> Callable[[Finder], Finder]:
    """Decorate a function of `JobHost`, in a file of the folder `checks`, so that
    `ebbtide doctor` calls it."""

    def register(finder: Finder) -> Finder:
        assert name not in _CHECKS, f"two checks are named {name}"
        return _CHECKS.setdefault(name, finder)

    return register


@cache
def all_checks() -> dict[str, Finder]:
    """Return the checks of all modules in the folder `checks` by name, in the order of
    modules and lines."""
    for path in sorted((Path(__file__).parent / "checks").glob("[a-z]*.py")):
        import_module(f"ebbtide.features.doctor.checks.{path.stem}")
    return dict(_CHECKS)


def examine(host: JobHost) -> list[CheckResult]:
    """Run all checks on a host; return their results in the order of the checks."""
    return [
        CheckResult(name, *result)
        for name, finder in all_checks().items()
        for result in finder(host)
    ]


def checks_of(checks: Iterable[CheckResult], state: State) -> list[CheckResult]:
    """Return the results of a state."""
    return [check for check in checks if check.state == state]


def diagnosis_view(results: Sequence[CheckResult], verbose: bool) -> View:
    """Yield what slows a job down on this host, with remedies.

    With `verbose`, yield all checks with their figures.
    """
    fine, warnings, unknown = (checks_of(results, state) for state in get_args(State))
    counts = f"{len(fine)} checks are fine"
    if warnings:
        yield Misfit(
            f"this host would slow a job down: {counted(len(warnings), 'warning')}; "
            f"{counts}"
        )
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
    return f"   {check.name}: {check.detail}" + (
        f"; {check.remedy}" if check.remedy else ""
    )


_SECONDS = 4.0
# Pinned copies reach 80 to 90 % of a link's peak on hosts without a fault.
_MIN_LINK_SHARE = 0.6


def measured_checks(host: JobHost) -> Iterator[CheckResult]:
    """Measure for a few seconds, on the first GPU if there is one.

    Other processes that use the host slow it down.
    """
    from ebbtide.features.calibrate.run import measure_quickly  # imports torch

    rates = measure_quickly(_SECONDS)
    memory, update = (
        rates.get("host_memory_bytes_per_s"),
        rates.get("cpu_update_params_per_s"),
    )
    if memory and update:
        text = (
            f"memory moves {rate_text(memory)}; AdamW updates {count_text(update)} "
            f"parameters/s ({STATE_BYTES} B each)"
        )
        yield CheckResult("measured-update", "ok", text)
    peak = host.cards[0].device["link"]["peak_bytes_per_s"] if host.cards else None
    for direction in ("h2d", "d2h"):
        pinned, pageable = (
            rates.get(f"{direction}{kind}_bytes_per_s") for kind in ("", "_pageable")
        )
        if pinned is None:
            continue
        text = f"{direction}: pinned copies run at {rate_text(pinned)}"
        if pageable:
            text += (
                f", pageable ones at {rate_text(pageable)} ({pinned / pageable:.1f} "
                "times slower)"
            )
        if peak and pinned < _MIN_LINK_SHARE * peak:
            text += f": {100 * pinned / peak:.0f} % of the link's {rate_text(peak)}"
            remedy = (
                "see the checks link and numa; other jobs may use the link; IOMMU may "
                "be on (iommu=pt)"
            )
            yield CheckResult("measured-copies", "warning", text, remedy)
        else:
            yield CheckResult("measured-copies", "ok", text)
