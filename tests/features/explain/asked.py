"""Reads texts for the tests of readers and rules."""

from __future__ import annotations

from ebbtide.features.explain.answer import Answer, explain_records
from ebbtide.features.explain.pasted import PastedText, clean_lines
from ebbtide.features.explain.record import Record, Records, read_records


def text_of(content: str) -> PastedText:
    return PastedText("text", tuple(clean_lines(content)))


def records_of(*contents: str) -> tuple[Record, ...]:
    return tuple(
        record for content in contents for record in read_records(text_of(content))
    )


def answers_to(*contents: str) -> dict[str, Answer]:
    """Return the answers to texts, by the names of their rules."""
    explanation = explain_records(Records(records_of(*contents)))
    return {answer.rule: answer for answer in explanation.answers}
