"""Rules about the steps of a log."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from ebbtide.analysis.metrics.iteration_mean import mean_text, uneven
from ebbtide.analysis.timeseries.change_point import find_change
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.features.explain import formats
from ebbtide.features.explain.answer import Answer, OpenQuestion, Result, rule
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import Records
from ebbtide.features.explain.rules.allocator import retries_answer
from ebbtide.units import bytes_text, counted, seconds_text

# Steps in which a job warms up; they are left out where there are more than twice as
# many.
_WARM_UP = 3
_MIN_CHANGE = 0.2
_MIN_CACHED, _MIN_PART, _MAX_PART, _FULL_HOST = 0.1, 0.1, 1.05, 0.8
_POOLS = (
    ("allocated", formats.ALLOCATED),
    ("active", formats.ACTIVE),
    ("reserved", formats.RESERVED),
)


@rule(30)
def explain_step_time(records: Records) -> Iterator[Result]:
    logs = [log for log in records.of(StepLog) if len(step_times(log))]
    if not logs:
        return
    log = max(logs, key=_length_s)
    times_s = steady(step_times(log))
    median_s = float(np.median(times_s))
    lines = [f"{counted(len(times_s), 'value')}: {_spread(times_s)}"]
    tokens = log.values(formats.TOKENS)
    if len(tokens):
        lines.append(f"{np.median(tokens):,.0f} tokens/s printed")
    left = _steps_left(log)
    if left:
        hours = left * median_s / 3600
        lines.append(f"{left:,} steps are left: {hours:,.1f} h at this rate")
    times = uneven(1e3 * times_s, "steps")
    if times is not None:
        lines.append(times.line)
    yield Answer(
        rule="step-time",
        title=f"a step takes {seconds_text(median_s)}"
        + (mean_text(times) or " (median)"),
        evidence=tuple(lines),
        places=(log.place,),
    )
    yield OpenQuestion(
        "how a step divides into forward, backward, update and copies",
        "ebbtide profile -o run.ebb -- python train.py, then ebbtide findings run.ebb",
    )


def _length_s(log: StepLog) -> float:
    """Return how long the steps of a log take in all: other bars are of less work."""
    times_s = step_times(log)
    return float(np.median(times_s)) * max(len(times_s), log.total_steps or 0)


def step_times(log: StepLog) -> Floats:
    """Return the times of steps, else the mean of the run that a log ends with."""
    times_s = log.values(formats.STEP_S)
    return times_s if len(times_s) else log.values(formats.MEAN_STEP_S)


@rule(24)
def compare_runs(records: Records) -> Iterator[Result]:
    """Compare the steps of two runs of one program, part by part."""
    logs = [log for log in records.of(StepLog) if len(step_times(log))]
    for first, second in combinations(logs, 2):
        if _job_of(first) != _job_of(second):
            continue
        before_s, after_s = (
            float(np.median(steady(step_times(log)))) for log in (first, second)
        )
        ratio = after_s / before_s
        if 1 / (1 + _MIN_CHANGE) < ratio < 1 + _MIN_CHANGE:
            continue
        word = "slower" if ratio > 1 else "faster"
        factor = max(ratio, 1 / ratio)
        lines = [
            f"{seconds_text(before_s)} at {first.place}, {seconds_text(after_s)} at "
            f"{second.place}"
        ]
        yield Answer(
            rule="slower-run",
            title=f"the second run is {factor:.2f} times {word} a step",
            evidence=(*lines, *_changed_parts(first, second)),
            places=(first.place, second.place),
        )
        return


def _job_of(log: StepLog) -> tuple[int | None, str, int | None]:
    return log.rank, log.program, log.total_steps


def _changed_parts(first: StepLog, second: StepLog) -> Iterator[str]:
    """Yield the part whose time differs most between two runs."""
    before, after = first.parts(), second.parts()
    changes = {
        name: after[name] - before[name] for name in before.keys() & after.keys()
    }
    if changes:
        name = max(changes, key=lambda part: abs(changes[part]))
        times = f"{seconds_text(before[name])} to {seconds_text(after[name])}"
        yield f"most of it is {name}: {times}"


@rule(23)
def explain_wrong_figures(records: Records) -> Iterator[Result]:
    """Name figures that a program has printed and that cannot be."""
    for log in records.of(StepLog):
        shares = log.values(formats.MFU)
        if len(shares) and shares.max() > 1:
            yield Answer(
                rule="wrong-mfu",
                title=f"the MFU that is printed, {shares.max():.0%}, cannot be: more "
                "than the card's peak",
                advice="the program divides by another card's peak, or counts FLOPs "
                "of layers that do not run; compare tokens/s instead",
                places=(log.place,),
            )
        for pool, column in _POOLS:
            sizes = log.values(column)
            # Before training, a model that is loaded by the host has none.
            is_training = formats.STEP_S in log.steps or formats.TOKENS in log.steps
            if len(sizes) and sizes.max() == 0 and is_training:
                yield Answer(
                    rule="no-memory-counted",
                    title=f"0 B {pool} is printed: the program asked a device that it "
                    "does not use",
                    advice="a job on the CPU, or another allocator than torch's; "
                    "ebbtide profile reads the device itself",
                    places=(log.place,),
                )


def steady(values: Floats) -> Floats:
    """Return the values after the warm-up, where enough of them are left."""
    return values[_WARM_UP:] if len(values) > 3 * _WARM_UP else values


def _spread(times_s: Floats) -> str:
    low, high = float(times_s.min()), float(times_s.max())
    return f"{seconds_text(low)} to {seconds_text(high)}"


def _steps_left(log: StepLog) -> int:
    numbers = log.values(formats.STEP)
    if log.total_steps is None or not len(numbers):
        return 0
    return max(log.total_steps - int(numbers[-1]), 0)


@rule(25)
def explain_changes(records: Records) -> Iterator[Result]:
    for log in records.of(StepLog):
        times_s = log.values(formats.STEP_S)
        change = find_change(times_s, 1, _MIN_CHANGE)
        if change is not None:
            yield Answer(
                rule="slower-steps",
                title="steps become slower: "
                f"{seconds_text(change.before)} to {seconds_text(change.after)}",
                advice="compare memory at both times: a full GPU (retries, spilled "
                "memory), a host that swaps, or longer sequences",
                places=(log.place,),
            )


@rule(26)
def explain_parts(records: Records) -> Iterator[Result]:
    for log in records.of(StepLog):
        parts = log.parts()
        times_s = log.values(formats.STEP_S)
        if not parts or not len(times_s):
            continue
        step_s = float(np.median(times_s))
        name = max(parts, key=lambda part: parts[part])
        # What is longer than a step is of another program, or of several steps.
        if not _MIN_PART * step_s <= parts[name] <= _MAX_PART * step_s:
            continue
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        shares = [f"{part} {part_s / step_s:.0%}" for part, part_s in ordered[:5]]
        rest = step_s - sum(parts.values())
        if rest > 0:
            shares.append(f"in none of them {rest / step_s:.0%}")
        yield Answer(
            rule="parts",
            title=f"{name} is {parts[name] / step_s:.0%} of a step of "
            f"{seconds_text(step_s)}",
            evidence=(", ".join(shares),),
            places=(log.place,),
        )


@rule(27)
def explain_retries(records: Records) -> Iterator[Result]:
    for log in records.of(StepLog):
        retries = log.values(formats.RETRIES)
        if len(retries) and retries.max() > 0:
            yield retries_answer(int(retries.max()), _memory_lines(log), log.place)


@rule(28)
def explain_cached_memory(records: Records) -> Iterator[Result]:
    for log in records.of(StepLog):
        allocated = log.values(formats.ALLOCATED)
        reserved = log.values(formats.RESERVED)
        if not len(allocated) or not len(reserved):
            continue
        cached = float(reserved.max() - allocated.max())
        if reserved.max() > 0 and cached >= _MIN_CACHED * reserved.max():
            yield Answer(
                rule="cached-memory",
                title=f"torch keeps {bytes_text(cached)} that tensors never used at "
                "the same time",
                evidence=_memory_lines(log),
                advice="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps less in "
                "pieces; shapes that change from step to step make it grow",
                places=(log.place,),
            )


def _memory_lines(log: StepLog) -> tuple[str, ...]:
    peaks = [
        f"{name} {bytes_text(log.values(column).max())}"
        for name, column in _POOLS
        if len(log.values(column))
    ]
    return (f"peaks: {', '.join(peaks)}",) if peaks else ()


@rule(6)
def explain_full_host(records: Records) -> Iterator[Result]:
    for log in records.of(StepLog):
        shares = log.values(formats.HOST_SHARE)
        if len(shares) and shares.max() >= _FULL_HOST:
            used = log.values(formats.HOST).max()
            yield Answer(
                rule="host-nearly-full",
                title=f"the host's memory was {shares.max():.0%} full: "
                f"{bytes_text(used)} of {bytes_text(used / shares.max())}",
                advice="a process that ends without a message then was killed by the "
                "kernel (dmesg); offload less, or to storage, and load the model once",
                places=(log.place,),
            )


@rule(29)
def explain_host_growth(records: Records) -> Iterator[Result]:
    for log in records.of(StepLog):
        host = log.values(formats.HOST)
        change = find_change(host, 1, 0.02)
        if change is not None:
            steps = len(host)
            yield Answer(
                rule="host-growth",
                title=f"host memory grows: {bytes_text(change.before)} to "
                f"{bytes_text(change.after)} in {counted(steps, 'step')}",
                advice="a list that keeps tensors or losses, workers of a data loader, "
                "or pinned memory: ebbtide profile names the pool",
                places=(log.place,),
            )
