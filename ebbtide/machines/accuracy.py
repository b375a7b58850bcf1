"""The known accuracy of predictions that use a machine: the source of its rates, and
how well they explained runs."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from ebbtide.json_files import section
from ebbtide.machines.evidence import (
    EvidenceRange,
    JobKind,
    Projects,
    card_of,
    evidence_range,
    mean_coverage,
    projects_of,
)
from ebbtide.machines.machine import Box, Machine
from ebbtide.units import counted

# Value of `source.kind` in machine files whose rates come from data sheets.
DATA_SHEETS = "data sheets"
# The rates of a machine, which a fit states in `rates`: its accuracy is the accuracy of
# these.
RATES = {
    item.name
    for item in fields(Machine)
    if item.name.endswith(("_per_s", "_s", "_share", "_ratio"))
}
Basis = Literal["fitted", "measured", "data sheets", "unknown"]


@dataclass(frozen=True)
class Accuracy:
    """The known accuracy of predictions from a machine."""

    basis: Basis  # The source of the rates.
    runs: int = 0  # Runs that the machine was fitted to.
    # Largest relative error of the update among these runs; None where nothing was
    # compared.
    largest_error: float | None = None
    undetermined: tuple[str, ...] = ()  # Rates that these runs do not determine.
    # Numbers of ranks on a host that these runs had, ascending.
    fitted_ranks_per_host: tuple[int, ...] = ()
    # Ranks on a host that the rates are for; None: not known.
    ranks_per_host: int | None = None
    # The factor within which each rate is known, as in `uncertainty_of`.
    uncertainty: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the object `accuracy` of `ebbtide replay --json`."""
        return asdict(self)

    def text(self) -> str:
        """Return the accuracy in a line for people."""
        if self.basis == "data sheets" and self.uncertainty:
            key, factor = max(self.uncertainty.items(), key=lambda item: item[1])
            return (
                "rates from data sheets and assumed shares of their peaks, the least "
                "certain within a factor of "
                f"{factor:.3g} ({key}): predictions from this machine are not validated"
            )
        if self.largest_error is None:
            return _NOT_VALIDATED[self.basis]
        error, runs = f"{100 * self.largest_error:.1f} %", counted(self.runs, "run")
        line = (
            f"updates predicted from this machine are within {error} on the {runs} it "
            "was fitted to"
        )
        ranks, fitted_ranks = self.ranks_per_host, self.fitted_ranks_per_host
        if ranks is not None and fitted_ranks and ranks not in fitted_ranks:
            numbers = " and ".join(map(str, fitted_ranks))
            line += f", which had {numbers} ranks on a host: not validated with {ranks}"
        return line

    def short_text(self) -> str:
        """Return in two words how far to trust predicted updates, for a table."""
        if self.largest_error is not None:
            return f"fit {100 * self.largest_error:.1f} %"
        factor = self.uncertainty.get("cpu_update_params_per_s")
        return _SHORT[self.basis] + (f" x{factor:.1f}" if factor else "")


_SHORT = {
    "fitted": "fit",
    "measured": "measured",
    "data sheets": "sheet",
    "unknown": "not known",
}
_NOT_VALIDATED: dict[Basis, str] = {
    "fitted": (
        "the machine was fitted, but its file does not say how well with these rates: "
        "predictions not validated"
    ),
    "measured": (
        "rates measured by `ebbtide calibrate`: predictions from this machine are not "
        "validated against a run"
    ),
    "data sheets": (
        "rates from data sheets: predictions from this machine are not validated"
    ),
    "unknown": (
        "the machine file does not say where its rates are from: predictions are not "
        "validated"
    ),
}


def accuracy_of(machine: Machine) -> Accuracy:
    """Return the accuracy that the keys `fit`, `measured` and `source` of a machine
    file state."""
    ranks = machine.box.ranks if machine.box is not None else None
    fit, source = section(machine.extra, "fit"), section(machine.extra, "source")
    errors = [
        abs(error)
        for error in section(fit, "residuals").values()
        if isinstance(error, (int, float))
    ]
    fitted_ranks = sorted(
        {number for number in section(fit, "ranks").values() if isinstance(number, int)}
    )
    # With another number of ranks on a host than the fit's, the rates that they share
    # are others.
    other_ranks = ranks is not None and fitted_ranks and ranks != fitted_ranks[-1]
    compared = RATES - {item.name for item in fields(Box) if other_ranks}
    rates = section(fit, "rates")
    if (
        errors
        and "rates" in fit
        and all(getattr(machine, key) == rates.get(key) for key in compared)
    ):
        undetermined = fit.get("unidentified")
        return Accuracy(
            "fitted",
            runs=len(errors),
            largest_error=max(errors),
            undetermined=tuple(map(str, undetermined))
            if isinstance(undetermined, list)
            else (),
            fitted_ranks_per_host=tuple(fitted_ranks),
            ranks_per_host=ranks,
            uncertainty=uncertainty_of(machine),
        )
    basis: Basis = "measured" if section(machine.extra, "measured") else "unknown"
    if fit or source.get("kind") == DATA_SHEETS:
        basis = "fitted" if fit else "data sheets"
    return Accuracy(basis, ranks_per_host=ranks, uncertainty=uncertainty_of(machine))


def uncertainty_of(machine: Machine) -> dict[str, float]:
    """Return the factors within which rates are known, by key.

    A factor is one standard error, normal in the logarithm, at least 1: of the fit, of
    the data sheets, or of a measured rate as its runs agree, no better than 5 %. Others
    are missing.
    """
    factors = {
        key: _measured_factor(entry)
        for key, entry in section(machine.extra, "measured").items()
    }
    for stated in (
        section(section(machine.extra, "fit"), "uncertainty"),
        section(machine.extra, "uncertainty"),
    ):
        factors |= {
            key: float(value)
            for key, value in stated.items()
            if isinstance(value, (int, float))
        }
    return {
        key: value
        for key, value in factors.items()
        if math.isfinite(value) and value >= 1
    }


_LEAST_MEASURED_FACTOR = 1.05
# Standard deviations from the 10th to the 90th percentile of a normal distribution.
_SPREAD_DEVIATIONS = 2 * NormalDist().inv_cdf(0.9)


def _measured_factor(entry: Any) -> float:
    spread = entry.get("spread", 0.0) if isinstance(entry, dict) else 0.0
    has_spread = isinstance(spread, (int, float))
    return (
        max(_LEAST_MEASURED_FACTOR, 1 + spread / _SPREAD_DEVIATIONS)
        if has_spread
        else _LEAST_MEASURED_FACTOR
    )


@cache
def track_record() -> dict[str, Any]:
    """Return the residuals of iterations by project, and errors of `updates`."""
    file = Path(__file__).with_name("track_record.json")
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


@cache
def _projects() -> Projects:
    return projects_of(track_record())


@cache
def evidence_for(kind: JobKind) -> EvidenceRange:
    """Return the range of iterations of jobs of a kind, and how far to trust it."""
    return evidence_range(kind, _projects())


def card_text(gpu_name: str | None) -> str:
    """Return in few words how far ranges of iterations on a GPU can be trusted."""
    card = card_of(gpu_name)
    coverages = [
        mean_coverage(own)
        for cases in _projects().values()
        if (own := [case for case in cases if case.kind.card == card])
    ]
    if not coverages:
        return "80 % range; no run of this card was compared"
    projects = counted(len(coverages), "project")
    return (
        f"80 % range; held for {sum(coverages):.0f} of {projects} on this card, each "
        "left out"
    )


def updates_text() -> str:
    """Return in few words how well updates of published runs were predicted by fits to
    the other runs."""
    record = track_record()["updates"]
    return (
        f"held-out runs: {100 * record['mean_error']:.1f} % mean, "
        f"{100 * record['largest_error']:.1f} % at most"
    )
