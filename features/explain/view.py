"""The answer as lines for people."""

from itertools import groupby

from ebbtide.analysis.tables.table import Gain, Misfit, View
from ebbtide.features.explain.answer import Answer, Explanation

_MAX_READ, _MAX_ANSWERS = 4, 5


def explanation_view(explanation: Explanation, verbose: bool) -> View:
    """Yield what was read, what it shows, and what it does not tell."""
    records = explanation.records.records
    kinds = [
        (title, [record.place for record in group])
        for title, group in groupby(records, key=lambda record: record.title)
    ]
    yield "read:"
    shown = kinds if verbose else kinds[:_MAX_READ]
    for title, places in shown:
        times = f" ({len(places)} times)" if len(places) > 1 else ""
        yield f"   {title}{times}, {places[0]}"
    if len(kinds) > len(shown):
        yield f"   and {len(kinds) - len(shown)} more: -v"
    answers = explanation.answers
    if not answers:
        yield Misfit("no rule says that something is wrong with what was read")
    shown_answers = answers if verbose else answers[:_MAX_ANSWERS]
    for number, answer in enumerate(shown_answers, 1):
        yield from _answer_lines(number, answer, verbose)
    if len(answers) > len(shown_answers):
        yield f"{len(answers) - len(shown_answers)} more: -v"
    for question in explanation.questions:
        yield f"not told by it: {question.question}"
        yield f"next: {question.command}"


def _answer_lines(number: int, answer: Answer, verbose: bool) -> View:
    yield Misfit(f"{number}. {answer.title}")
    for line in answer.evidence:
        yield f"   {line}"
    if answer.advice is not None:
        yield Gain(f"   DO  {answer.advice}")
    if verbose:
        places = ", ".join(map(str, answer.places))
        yield f"   by {answer.rule}, {places}"
