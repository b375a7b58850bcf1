"""The results of rules: findings, and questions that a trace cannot answer."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult, to_frame
from ebbtide.analysis.metrics.advice import Advice


@dataclass(frozen=True)
class Finding:
    """A cause that slows the job down.

    Attributes:
        rule: Name of the rule.
        title: The cause in one line.
        potential_gain_ms: The most that an iteration would gain without the cause; None
            if it cannot be expressed as a time. Also `worth_ms` in JSON.
        evidence: Measured figures, a line each.
        advice: What to do.
        removes: Names of the other findings that are gone when the advice is followed.
        action: The simulated advice; None where nothing was simulated.
    """

    rule: str
    title: str
    potential_gain_ms: float | None
    evidence: tuple[str, ...]
    advice: str
    removes: tuple[str, ...] = ()
    action: Advice | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether the gain is simulated, not an upper limit."""
        return self.action is not None and self.action.gain_ms is not None


@dataclass(frozen=True)
class Unknown:
    """A question that the trace cannot answer.

    Attributes:
        rule: Name of the rule.
        question: The question.
        record: What to record so that the rule can answer it.
    """

    rule: str
    question: str
    record: str


@dataclass(frozen=True)
class NotApplicable:
    """A rule that does not apply to a trace.

    Attributes:
        rule: Name of the rule.
        needs: Descriptions of the data or jobs that it needs, and that the trace is or
            has not.
    """

    rule: str
    needs: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Findings(TabularResult):
    """Results of all rules.

    Attributes:
        findings: The findings: those that remove others first, then the largest
            potential gain.
        unknown: The questions that the trace cannot answer.
        not_applicable: The rules that do not apply to the trace.
        nothing_found: Names of the rules that looked at the job and found nothing.
    """

    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]
    not_applicable: tuple[NotApplicable, ...] = ()
    nothing_found: tuple[str, ...] = ()

    def removed_numbers(self, finding: Finding) -> list[int]:
        """Return the numbers, from 1, of the findings that are gone if the advice of
        one is followed."""
        return [
            number
            for number, other in enumerate(self.findings, 1)
            if other.rule in finding.removes
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide findings --json` prints."""
        printed = asdict(self)
        for finding, entry in zip(self.findings, printed["findings"], strict=True):
            # The former name of the key.
            entry["worth_ms"] = entry["potential_gain_ms"]
            entry["action"] = (
                None if finding.action is None else finding.action.as_json()
            )
        return printed

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per finding, with the keys of the JSON objects as columns.

        `action` is left out.
        """
        frame = to_frame(self.findings, Finding).drop(columns="action", errors="ignore")
        return frame.assign(worth_ms=frame["potential_gain_ms"])


def clamp_gain(*milliseconds: float) -> float:
    """Return the smallest of some upper limits of a gain, and never less than 0 ms."""
    return float(max(0.0, np.min(milliseconds)))
