"""Rules about the time that updates take."""

from collections.abc import Iterator

from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.readers.configurations import Configuration, setting
from ebbtide.features.explain.readers.update_times import UpdateTimes
from ebbtide.features.explain.record import Records
from ebbtide.machines.catalog import find_machine
from ebbtide.units import count_text, seconds_text

_LARGE_SHARE = 0.4


@rule(24)
def explain_updates(records: Records) -> Iterator[Result]:
    configurations = records.of(Configuration)
    facts = [fact for one in configurations for fact in one.facts.get("offload", [])]
    is_on_cpu = any("by the CPU" in fact for fact in facts)
    for times in records.of(UpdateTimes):
        share = times.update_s / times.step_s
        if share < _LARGE_SHARE:
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
