"""Judges random jobs: equal bits or an error of ebbtide that says what is wrong."""

from __future__ import annotations

import logging
import random
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ebbtide.errors import UserError
from tests.interleave.engine.grid.edits import EDITS
from tests.interleave.engine.grid.faults import attempt
from tests.interleave.engine.grid.job import Job
from tests.interleave.engine.grid.training import Results, Training, deterministic
from tests.interleave.engine.speculating import speculating
from tests.interleave.engine.states import bits
from tests.interleave.engine.time_limit import time_limit

# A job takes below one second, or some to compile kernels first; machines may be busy.
LIMIT_S = 300.0


@dataclass(frozen=True)
class Verdict:
    """The result of a job. `kind`: `equal`, `refused`, `differs`, `raised` or `hung`;
    `detail` says at what."""

    kind: str
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.kind in ("equal", "refused")

    @property
    def message(self) -> str:
        """The detail without names of layers and numbers."""
        return re.sub(r"[\d.]+", "#", self.detail)


def train(job: Job, is_plain: bool, decided: list[int] | None = None) -> Results:
    """Train, and return what the job has read, its parameters, buffers and state.

    `decided`: those of Training, which the job with ebbtide adds and the plain job
    takes.
    """
    training = Training(job, is_plain, [] if decided is None else decided)
    with ExitStack() as stack, deterministic(), speculating():
        training.open(stack)
        for step in range(job.steps):
            edit(training, step, follows_backward=False)
            for event in job.faults:
                if event.step == step:
                    attempt(training, event)
            training.backward(step)
            edit(training, step, follows_backward=True)
            training.step()
            training.optimizer.zero_grad()
        for name, value in training.net.state_dict().items():
            training.record(name, value)
        training.record_state()
        training.record_copies()
        training.evaluate(training.call, "last loss")
    return training.results


def edit(training: Training, step: int, follows_backward: bool) -> None:
    """Do the edits of a step, before or after its backward."""
    for event in training.job.edits:
        if (event.step, event.follows_backward) == (step, follows_backward):
            EDITS[event.kind](training, random.Random(f"{training.job.seed} {event}"))


def judge(job: Job, limit_s: float = LIMIT_S) -> Verdict:
    """Train a job with ebbtide and plainly, and compare what it reads, parameters and
    state."""
    decided: list[int] = []
    try:
        with time_limit(limit_s, "the job"):
            results = train(job, False, decided)
    except UserError as error:
        return Verdict("raised" if "\n" in str(error) else "refused", str(error))
    except TimeoutError:
        return Verdict("hung", traceback.format_exc())
    except Exception as error:
        verdict = Verdict(
            "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        )
        # A job that fails without ebbtide, too, is none.
        train(job, True, decided)
        return verdict
    expected = train(job, True, decided)
    difference = first_difference(expected, results)
    return Verdict("equal") if difference is None else Verdict("differs", difference)


def first_difference(expected: Results, results: Results) -> str | None:
    """Return the first result that differs; None if all are equal."""
    for number, ((name, one), (other_name, other)) in enumerate(
        zip(expected, results, strict=False)
    ):
        if name != other_name:
            return f"result {number} is {other_name}, and {name} in the plain job"
        if one.shape != other.shape or not torch.equal(bits(one), bits(other)):
            return f"result {number}, {name}"
    if len(expected) != len(results):
        return f"{len(results)} results, and {len(expected)} in the plain job"
    return None


def simpler(job: Job) -> Iterator[Job]:
    """Yield the job with one option less each."""
    for one in fields(job):
        value = getattr(job, one.name)
        if one.name == "seed" or value == one.default:
            continue
        yield replace(job, **{one.name: one.default})
        if isinstance(value, tuple) and len(value) > 1 and one.name != "rates":
            for number in range(len(value)):
                shorter: Any = value[:number] + value[number + 1 :]
                yield replace(job, **{one.name: shorter})


def shrink(job: Job, kind: str) -> Job:
    """Return a job with as few options as possible that still has a verdict of this
    kind."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(job):
            try:
                verdict = judge(candidate)
            except Exception:
                # The plain job does not take these options.
                continue
            if verdict.kind == kind:
                job, is_smaller = candidate, True
                break
    return job


@dataclass
class Tally:
    """Verdicts of many jobs.

    Attributes:
        verdicts: Number of jobs by kind.
        refusals: Number of jobs by message of their error.
        equal: Number of jobs with equal bits by option and value.
        failures: Reports of jobs that failed.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    equal: Counter[tuple[str, Any]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, job: Job, verdict: Verdict) -> None:
        self.verdicts[verdict.kind] += 1
        if verdict.kind == "refused":
            self.refusals[verdict.message] += 1
        elif verdict.kind == "equal":
            self.equal.update(values_of(job))
        else:
            self.failures.append(report(job, verdict))

    @property
    def refused_share(self) -> float:
        return self.verdicts["refused"] / max(1, self.verdicts.total())


def judge_all(jobs: Iterable[Job], prints_each: bool = False) -> Tally:
    """Judge jobs; print failures as they come, then counts of verdicts and refusals,
    and times."""
    tally, start_s, cpu_s = Tally(), time.perf_counter(), time.process_time()
    for job in jobs:
        verdict = judge(job)
        if prints_each:
            print(job, verdict.kind, verdict.detail, sep="\n")
        tally.add(job, verdict)
        if not verdict.is_right:
            print(tally.failures[-1], flush=True)
    wall_s, own_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    print(dict(tally.verdicts), f"{wall_s:.0f} s, CPU {own_s:.0f} s")
    for message, count in tally.refusals.most_common():
        print(count, message)
    return tally


def values_of(job: Job) -> Iterable[tuple[str, Any]]:
    """Return options and their values; those of events and layers are their kinds."""
    for name in (
        "rule",
        "policy",
        "overlap",
        "gradients",
        "storage",
        "weights",
        "activations",
        "moves",
        "autocast",
    ):
        yield name, getattr(job, name)
    yield from (("edit", event.kind) for event in job.edits)
    yield from (("fault", event.kind) for event in job.faults)
    yield from (("layer", kind) for kind in job.kinds if isinstance(kind, str))


def report(job: Job, verdict: Verdict) -> str:
    """Return what failed, the smallest job that still does, and the command that
    repeats it."""
    smallest = shrink(job, verdict.kind)
    detail = judge(smallest).detail or verdict.detail
    on_gpu = "tests.cuda_runtime -m tests.cuda_runtime.random_jobs"
    module = on_gpu if job.device == "cuda" else "tests.interleave.engine.grid"
    command = f"python -m {module} {job.seed}"
    return f"{verdict.kind}: {detail}\n  {smallest}\n  repeat with: {command}"


def quiet() -> None:
    """Let neither logs nor warnings of jobs show in this process, outside of pytest."""
    logging.getLogger("ebbtide").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
