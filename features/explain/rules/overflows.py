"""Rules about steps that overflow skipped."""

from collections.abc import Iterator

from ebbtide.features.explain.answer import Answer, Result, rule
from ebbtide.features.explain.readers.overflows import Overflows
from ebbtide.features.explain.record import Records
from ebbtide.units import counted

# A dynamic scale begins at 2^16 or 2^32, and is halved with each of them.
_MOST_AT_THE_START = 24


@rule(24)
def explain_overflows(records: Records) -> Iterator[Result]:
    for overflows in records.of(Overflows):
        scale = overflows.last_scale
        is_lowest = scale is not None and scale <= 1
        lines = [] if scale is None else [f"loss scale after the last: {scale:,.0f}"]
        lines.append("they have no update: their times are left out")
        advice = (
            "a few at the start are how a dynamic loss scale finds its size; if they "
            "go on: bf16, where the GPU has it, or a smaller learning rate"
        )
        if is_lowest or overflows.count > _MOST_AT_THE_START:
            advice = (
                "the scale cannot fall far enough: gradients are infinite or NaN "
                "(learning rate, data, weights that were trained in bf16); use bf16"
            )
        yield Answer(
            rule="skipped-steps",
            title=f"{counted(overflows.count, 'step')} were skipped: gradients "
            "overflowed in fp16",
            evidence=tuple(lines),
            advice=advice,
            places=(overflows.place,),
        )
