"""Rules about traces that were imported: the rules of `ebbtide findings`."""

from collections.abc import Iterator

from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.imported import ImportedTrace
from ebbtide.features.explain.readers.update_times import UpdateTimes
from ebbtide.features.explain.record import Records
from ebbtide.units import seconds_text

_MAX_FINDINGS, _MAX_LINES, _MAX_QUESTIONS = 3, 2, 1


@rule(23)
def explain_imported(records: Records) -> Iterator[Result]:
    # Its timers say the same with the rate of the update.
    has_update_times = bool(records.of(UpdateTimes))
    for imported in records.of(ImportedTrace):
        for finding in imported.findings.findings[:_MAX_FINDINGS]:
            if has_update_times and finding.rule == "update-bound":
                continue
            yield Answer(
                rule=finding.rule,
                title=finding.title,
                evidence=finding.evidence[:_MAX_LINES],
                advice=finding.advice,
                places=(imported.place,),
            )
        times_s = {**imported.times_s}
        step_s = times_s.pop("iteration", 0.0)
        if step_s and not has_update_times:
            shares = [f"{phase} {time / step_s:.0%}" for phase, time in times_s.items()]
            yield Answer(
                rule="iteration-time",
                title=f"phases of an iteration take {seconds_text(step_s)} (median)",
                evidence=(", ".join(shares),),
                places=(imported.place,),
            )
        for unknown in imported.findings.unknown[:_MAX_QUESTIONS]:
            yield OpenQuestion(unknown.question, unknown.record)
