"""Answers: what rules conclude from records."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from ebbtide.features.explain.record import Place, Records, import_folder


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A conclusion of a rule.

    Attributes:
        rule: Name of the rule.
        title: The conclusion in one line.
        evidence: The figures that it follows from, a line each.
        advice: What to do; None where nothing follows.
        places: Where the figures stand.
    """

    rule: str
    title: str
    evidence: tuple[str, ...] = ()
    advice: str | None = None
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class OpenQuestion:
    """A question that the text cannot answer, and the command that would."""

    question: str
    command: str


Result = Answer | OpenQuestion
Rule = Callable[[Records], Iterator[Result]]
_RULES: list[tuple[int, Rule]] = []


def rule(position: int) -> Callable[[Rule], Rule]:
    """Decorate a function, in a file of the folder `rules`, that concludes something
    from the records.

    `position`: rules with a smaller one answer first."""

    def register(function: Rule) -> Rule:
        _RULES.append((position, function))
        return function

    return register


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return the rules of all modules in the folder `rules`, first answers first."""
    import_folder("rules")
    ordered = sorted(_RULES, key=lambda entry: entry[0])
    return tuple(function for _, function in ordered)


@dataclass(frozen=True)
class Explanation:
    """The answer to texts."""

    records: Records
    answers: tuple[Answer, ...]
    questions: tuple[OpenQuestion, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide explain --json` prints."""
        records = [record.as_json() for record in self.records.records]
        return {
            "records": records,
            "answers": [asdict(answer) for answer in self.answers],
            "not_known": [asdict(question) for question in self.questions],
        }


def explain_records(records: Records) -> Explanation:
    """Ask all rules about the records of texts."""
    results = [result for function in all_rules() for result in function(records)]
    answers = [result for result in results if isinstance(result, Answer)]
    questions = [result for result in results if isinstance(result, OpenQuestion)]
    return Explanation(records, tuple(answers), tuple(dict.fromkeys(questions)))
