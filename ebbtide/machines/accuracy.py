"""The known accuracy of predictions that use a machine: what its rates come from, and how well they explained runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ebbtide.machines.machine import Machine

# Value of `source.kind` in machine files whose rates are those of data sheets.
DATA_SHEETS = "data sheets"
Basis = Literal["fitted", "measured", "data sheets", "unknown"]


@dataclass(frozen=True)
class Accuracy:
    """The known accuracy of predictions from a machine.

    Attributes:
        basis: The source of the rates.
        runs: Runs that the machine was fitted to.
        largest_error: Largest relative error of the update among these runs; None where nothing was compared.
        undetermined: Rates that these runs do not determine.
        fitted_ranks: Numbers of ranks on a host that these runs had, ascending.
        ranks: Ranks on a host that the rates are for; None: not known.
    """

    basis: Basis
    runs: int = 0
    largest_error: float | None = None
    undetermined: tuple[str, ...] = ()
    fitted_ranks: tuple[int, ...] = ()
    ranks: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object `accuracy` of `ebbtide replay --json`."""
        return {
            "basis": self.basis,
            "runs": self.runs,
            "largest_error": self.largest_error,
            "undetermined": list(self.undetermined),
            "fitted_ranks_per_host": list(self.fitted_ranks),
            "ranks_per_host": self.ranks,
        }

    def text(self) -> str:
        """Return the accuracy in a line for people."""
        if self.largest_error is None:
            return _NOT_VALIDATED[self.basis]
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        error = f"{100 * self.largest_error:.1f} %"
        line = f"updates predicted from this machine are within {error} on the {runs} it was fitted to"
        if self.ranks is not None and self.fitted_ranks and self.ranks not in self.fitted_ranks:
            numbers = " and ".join(map(str, self.fitted_ranks))
            line += f", which had {numbers} ranks on a host: not validated with {self.ranks}"
        if self.undetermined:
            line += f"; not determined by them: {', '.join(self.undetermined)}"
        return line


_NOT_VALIDATED: dict[Basis, str] = {
    "fitted": "the machine was fitted, but its file does not say how well: predictions are not validated",
    "measured": "rates measured by `ebbtide calibrate`: predictions from this machine are not validated against a run",
    "data sheets": "rates from data sheets: predictions from this machine are not validated",
    "unknown": "the machine file does not say where its rates are from: predictions are not validated",
}


def accuracy_of(machine: Machine) -> Accuracy:
    """Return the accuracy that the further keys of a machine file state (`fit`, `measured`, `source`)."""
    ranks = machine.box.ranks if machine.box is not None else None
    fit, source = _object(machine.extra, "fit"), _object(machine.extra, "source")
    errors = [abs(error) for error in _object(fit, "residuals").values() if isinstance(error, (int, float))]
    if errors:
        undetermined = fit.get("unidentified")
        return Accuracy(
            "fitted",
            runs=len(errors),
            largest_error=max(errors),
            undetermined=tuple(map(str, undetermined)) if isinstance(undetermined, list) else (),
            fitted_ranks=tuple(
                sorted({number for number in _object(fit, "ranks").values() if isinstance(number, int)})
            ),
            ranks=ranks,
        )
    if fit:
        return Accuracy("fitted", ranks=ranks)
    if source.get("kind") == DATA_SHEETS:
        return Accuracy("data sheets", ranks=ranks)
    return Accuracy("measured" if _object(machine.extra, "measured") else "unknown", ranks=ranks)


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}
