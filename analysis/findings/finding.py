"""What a rule says of a trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ebbtide.analysis.dataframes import to_frame


@dataclass(frozen=True)
class Finding:
    """Something that holds the job back.

    rule: the rule's name. title: one line. worth_ms: the most that an iteration would gain if it were gone, None where
    that cannot be put into a time. evidence: what was measured, a line each. advice: what to do.
    """

    rule: str
    title: str
    worth_ms: float | None
    evidence: tuple[str, ...]
    advice: str


@dataclass(frozen=True)
class Unknown:
    """A question that the trace cannot answer, and what to record so that it can."""

    rule: str
    question: str
    record: str


@dataclass(frozen=True)
class Findings:
    """All that the rules say: the findings, the dearest first, and what could not be told."""

    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide findings --json` prints."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """A row per finding, with the fields of `Finding` as columns."""
        return to_frame(self.findings, Finding)
