"""Rules about the time that updates take."""

from collections.abc import Iterator
from itertools import pairwise

from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.readers.configurations import Configuration, setting
from ebbtide.features.explain.readers.update_times import UpdateTimes
from ebbtide.features.explain.record import Records
from ebbtide.machines.catalog import find_machine
from ebbtide.units import count_text, seconds_text

_LARGE_SHARE, _MIN_RATIO = 0.4, 1.2


@rule(24)
def explain_updates(records: Records) -> Iterator[Result]:
    configurations = records.of(Configuration)
    facts = [fact for one in configurations for fact in one.facts.get("offload", [])]
    is_on_cpu = any("by the CPU" in fact for fact in facts)
    for times in records.of(UpdateTimes):
        share = times.update_s / times.step_s
        if share < _LARGE_SHARE:
            yield Answer(
                rule="step-parts",
                title=f"a step takes {seconds_text(times.step_s)}: the update is "
                f"{share:.0%} of it",
                evidence=(
                    f"forward {seconds_text(times.forward_s)}, backward "
                    f"{seconds_text(times.backward_s)}, update "
                    f"{seconds_text(times.update_s)}",
                ),
                places=(times.place,),
            )
            continue
        ranks = [setting(one.settings, "world_size") for one in configurations]
        count = next((int(text) for text in ranks if text.isdigit()), 1)
        place = "on the CPU " if is_on_cpu else ""
        yield Answer(
            rule="update-bound",
            title=f"the update {place}takes {seconds_text(times.update_s)} of "
            f"{seconds_text(times.step_s)} of a step ({share:.0%})",
            evidence=_rates(records, times.update_s, max(count, 1)),
            advice="ds_report: is cpu_adam built for this CPU? Cores of each rank "
            "(OMP_NUM_THREADS, --bind_cores_to_rank); keep part of the state on the "
            "GPU (offload_optimizer.ratio), or all of it where it fits",
            places=(times.place,),
        )
        if records.params is None:
            yield OpenQuestion(
                "how fast the update is for its parameters",
                f"ebbtide explain {times.place.text_name} --params N --gpu NAME",
            )


@rule(22)
def compare_updates(records: Records) -> Iterator[Result]:
    """Compare the parts of a step of two logs of DeepSpeed's timers."""
    logs = records.of(UpdateTimes)
    for first, second in pairwise(logs):
        ratio = second.step_s / first.step_s
        if 1 / _MIN_RATIO < ratio < _MIN_RATIO:
            continue
        parts = {
            part: (getattr(first, f"{part}_s"), getattr(second, f"{part}_s"))
            for part in ("forward", "backward", "update")
        }
        part = max(parts, key=lambda name: abs(parts[name][1] - parts[name][0]))
        before_s, after_s = parts[part]
        word = "slower" if ratio > 1 else "faster"
        yield Answer(
            rule="slower-run",
            title=f"the second run is {max(ratio, 1 / ratio):.2f} times {word} a step",
            evidence=(
                f"{seconds_text(first.step_s)} at {first.place}, "
                f"{seconds_text(second.step_s)} at {second.place}",
                f"most of it is the {part}: {seconds_text(before_s)} to "
                f"{seconds_text(after_s)}",
            ),
            places=(first.place, second.place),
        )


def _rates(records: Records, update_s: float, ranks: int) -> tuple[str, ...]:
    """Return a line on the parameters that are updated per second."""
    if records.params is None:
        return ()
    line = f"{count_text(records.params / ranks / update_s)} parameters/s of a rank"
    machine = None if records.gpu is None else find_machine(records.gpu)
    rate = None if machine is None else machine.cpu_update_params_per_s
    if rate is not None:
        slower = rate * update_s * ranks / records.params
        line += (
            f"; a host of {records.gpu} does {count_text(rate)}, {slower:.0f} times "
            "as many"
        )
    return (line,)
