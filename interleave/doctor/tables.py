"""The text of a diagnosis."""

from ebbtide.analysis.tables.table import Gain, Misfit, View
from ebbtide.interleave.doctor.check import CheckResult, Diagnosis
from ebbtide.units import counted


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
