"""Rules: functions of a job's figures that find what slows it down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ebbtide import seams
from ebbtide.analysis.findings.finding import Finding, NotApplicable, Unknown
from ebbtide.analysis.metrics.advice import Advice
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.errors import MissingPackageError

# Returns a Finding, an Unknown where the trace cannot answer the rule's question, or
# None where it finds nothing.
Check = Callable[[JobMetrics], Finding | Unknown | None]
_RULES: dict[str, Rule] = {}


@dataclass(frozen=True)
class Need:
    """A condition of rules: a rule that does not apply has not looked at the job."""

    text: str  # Description of a trace that fulfils it.
    is_met: Callable[[JobMetrics], bool]  # Function that checks a trace.
    # Whether no job fulfils it that keeps its optimizer state on the device.
    ends_with_offload: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule that `@rule` has registered."""

    name: str  # Name of the rule and of its findings.
    check: Check  # Looks at a job that fulfils `needs`.
    needs: tuple[Need, ...]  # Conditions; none: it applies to every trace.

    def __call__(self, metrics: JobMetrics) -> Finding | Unknown | None:
        """Return what the rule finds; None where it does not apply, too."""
        if self.unmet(metrics) is not None:
            return None
        try:
            return self.check(metrics)
        except MissingPackageError as error:
            return self.unknown("its advice needs a search", str(error))

    def unmet(self, metrics: JobMetrics) -> NotApplicable | None:
        """Return the conditions that a trace does not fulfil.

        Return None where the rule applies.
        """
        texts = tuple(need.text for need in self.needs if not need.is_met(metrics))
        return NotApplicable(self.name, texts) if texts else None

    @property
    def ends_with_offload(self) -> bool:
        """Whether the rule finds nothing in a job without offload.

        Such a job keeps its optimizer state on the device.
        """
        return any(need.ends_with_offload for need in self.needs)

    def finding(
        self,
        title: str,
        potential_gain_ms: float | None,
        evidence: Iterable[str],
        advice: str,
        action: Advice | None = None,
    ) -> Finding:
        """Return a finding of this rule: see `Finding`."""
        return Finding(
            self.name, title, potential_gain_ms, tuple(evidence), advice, action=action
        )

    def unknown(self, question: str, record: str) -> Unknown:
        """Return a question of this rule that a trace cannot answer: see `Unknown`."""
        return Unknown(self.name, question, record)


def rule(name: str, *needs: Need) -> Callable[[Check], Rule]:
    """Decorate a function of `JobMetrics` as a rule.

    `ebbtide findings` applies it to traces that fulfil all `needs`.
    """

    def register(check: Check) -> Rule:
        assert name not in _RULES, f"two rules are named {name}"
        return _RULES.setdefault(name, Rule(name, check, needs))

    return register


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return the rules of the folder `rules` and of features, by theme and in the order
    of lines."""
    paths = (Path(__file__).parent / "rules").glob("[a-z]*.py")
    themes = {
        path.stem: seams.Plug("ebbtide.analysis.findings.rules", path.stem)
        for path in paths
    }
    themes.update(seams.plugs("findings"))
    for name in sorted(themes):
        themes[name].load()
    return tuple(_RULES.values())
