"""The answer of `ebbtide plan --model`: does it fit, under which levers, how large a
batch and how long a sequence, and the frontier of memory and time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide.analysis.tables.table import Misfit, Table, View, text
from ebbtide.cli.outputs import new_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_line, print_view
from ebbtide.errors import MachineError, UserError
from ebbtide.features.advise.job.decoder import TransformerShape
from ebbtide.features.dryrun.jobs.models import find_model
from ebbtide.features.fit.search import (
    ALLOCATOR_SHARE,
    FitPoint,
    FitSearch,
    LeverEffect,
    options_of,
)
from ebbtide.features.fit.shape import shape_of_config, shape_of_size
from ebbtide.machines.machine import Machine
from ebbtide.model_job import ModelJob
from ebbtide.units import count_text

# The file that stands for a model of a size.
_CONFIG = "config.json"
_MOST_POINTS = 12
# Parts of the peak that are smaller are not shown.
_SHOWN_BYTES = 0.05 * 2**30


@dataclass(frozen=True)
class FitRequest:
    """A request for the levers of a job."""

    job: ModelJob
    # The shape of a model of a size; None: the model is named.
    shape: TransformerShape | None
    machine: Machine
    capacity_bytes: float | None  # None: the machine's.
    has_frontier: bool  # Whether the combinations are listed.


@dataclass(frozen=True)
class FitAnswer:
    """The levers of a job on a machine."""

    name: str  # The model, or its size.
    search: FitSearch
    has_frontier: bool

    @cached_property
    def effects(self) -> list[LeverEffect]:
        """The job as it is, and each lever alone."""
        return self.search.effects()

    def as_json(self) -> dict[str, Any]:
        """Return the object of `ebbtide plan --model --json`."""
        search, own = self.search, self.search.own
        answer = search.answer
        device = search.device(search.job.ranks)
        return {
            "model": search.job.model,
            "config": search.shape.config(),
            "machine": search.machine.name,
            "job": search.job.summary,
            "state": search.job.bytes_text,
            "capacity_bytes": round(search.capacity_bytes),
            "limit_bytes": round(device.limit_bytes),
            "host_capacity_bytes": device.machine.host_memory_bytes,
            "fits": own.lacks is None,
            "own": own.as_json(),
            "answer": answer and answer.as_json(),
            "nearest": None if answer else search.nearest.as_json(),
            "levers": [effect.as_json() for effect in self.effects],
            "frontier": [one.as_json() for one in search.points]
            if self.has_frontier
            else None,
            "line": [one.as_json() for one in search.line]
            if self.has_frontier
            else None,
        }

    def view(self) -> View:
        """Yield the lines and tables of the answer."""
        search, own, answer = self.search, self.search.own, self.search.answer
        yield f"{self.name} on {search.machine.name}: {search.job.summary}"
        yield f"  {search.job.bytes_text}"
        yield _verdict(own)
        if own.lacks is not None:
            yield from self._remedy(answer)
        yield f"  {_parts_text(own)}"
        yield self._levers_table()
        if self.has_frontier:
            yield self._line_table()
        chosen = answer or search.nearest
        source, words = search.machine.name, options_of(chosen.job)
        if search.capacity_bytes != search.machine.gpu_memory_bytes:
            source += f" --capacity {round(search.capacity_bytes)}"
        yield f"next: ebbtide dry-run --machine {source} {words}"

    def _remedy(self, answer: FitPoint | None) -> Iterator[str]:
        if answer is not None:
            slower = answer.iteration_s / self.search.own.iteration_s
            yield (
                f"  fits with {answer.text}: {_gib(answer.needed_bytes)} GiB, "
                f"{_seconds(answer.iteration_s)} an iteration ({slower:.2f} x)"
            )
            return
        nearest, count = self.search.nearest, len(self.search.points)
        short = nearest.needed_bytes - nearest.device.limit_bytes
        lack = f"{_gib(short)} GiB of device memory"
        if short <= 0:
            host = nearest.device.machine.host_memory_bytes or 0.0
            lack = f"{_gib(nearest.host_bytes - host)} GiB of host memory"
        yield Misfit(
            f"  no change makes it fit: of {count} combinations, and on more GPUs, the "
            f"nearest is {nearest.text}, which lacks {lack}"
        )

    def _levers_table(self) -> Table:
        own_s = self.search.own.iteration_s
        columns = [
            text("lever", "lever"),
            text("GiB", lambda row: _gib(row.point.needed_bytes)),
            text("fits", lambda row: _fits_text(row.point)),
            text("time", lambda row: f"{row.point.iteration_s / own_s:.2f} x"),
            text("largest batch", lambda row: _size(row.largest_batch)),
            text("longest", lambda row: _size(row.longest_sequence)),
        ]
        title = "Each lever alone, the cheapest first"
        note = "largest batch and longest sequence (tokens) that fit under it"
        return Table("levers", title, columns, self.effects, note)

    def _line_table(self) -> Table:
        columns = [
            text("s/iteration", lambda point: f"{point.iteration_s:.3g}"),
            text("GiB", lambda point: _gib(point.needed_bytes)),
            text("fits", _fits_text),
            text("levers", "text"),
        ]
        count = len(self.search.points)
        title = f"Frontier: none of {count} combinations is smaller and faster"
        note = f"GiB: tensors and {ALLOCATOR_SHARE:.0%} for the allocator"
        rows = self.search.line
        return Table("frontier", title, columns, rows, note, "--json", _MOST_POINTS)


def _verdict(own: FitPoint) -> str:
    limit = _gib(own.device.limit_bytes)
    needed = f"{_gib(own.needed_bytes)} of {limit} GiB beside the CUDA context"
    if own.lacks is None:
        return f"fits: {needed}, {_seconds(own.iteration_s)} an iteration"
    if own.lacks == "host":
        host = own.device.machine.host_memory_bytes or 0.0
        return Misfit(
            f"does not fit the host: {_gib(own.host_bytes)} of {_gib(host)} GiB of a "
            "rank, while it loads or trains"
        )
    return Misfit(f"does not fit: {needed}")


def _parts_text(own: FitPoint) -> str:
    parts = own.memory.parts
    parts["other"] = parts.pop("working")
    texts = [
        f"{name} {_gib(size)}" for name, size in parts.items() if size >= _SHOWN_BYTES
    ]
    return f"peak in {own.memory.moment}: {', '.join(texts)} GiB"


def _fits_text(point: FitPoint) -> str:
    return "yes" if point.lacks is None else f"no ({point.lacks})"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def _size(number: int) -> str:
    return f"{number:,}" if number else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def answer_of(request: FitRequest) -> FitAnswer:
    """Return the levers of a job. Raises UserError for a model that is not counted, and
    MachineError where the memory of the GPU is not known."""
    job, machine = request.job, request.machine
    _check_counted(job)
    if request.shape is not None:
        shape = shape_of_size(request.shape)
        name = f"{count_text(shape.params)} parameters"
    else:
        name = job.model
        model = find_model(job.model)
        shape = shape_of_config(model.config, job.model)
    if shape.longest is not None and job.sequence > shape.longest:
        raise UserError(
            f"--sequence {job.sequence} is longer than the {shape.longest:,} positions "
            f"of {job.model} that are counted"
        )
    capacity = request.capacity_bytes or machine.gpu_memory_bytes
    if capacity is None:
        raise MachineError(
            f"machine {machine.name} has no gpu_memory_bytes: state --capacity"
        )
    search = FitSearch(job, shape, machine, capacity)
    return FitAnswer(name, search, request.has_frontier)


def _check_counted(job: ModelJob) -> None:
    """Raise UserError for a job whose memory is not counted."""
    reason = None
    if job.precision == "fp32":
        reason = "--precision fp32, whose attention keeps its scores"
    elif job.optimizer == "adafactor":
        reason = "--optimizer adafactor, whose temporary tensors vary"
    elif job.strategy is not None and job.strategy not in ("ddp", "fsdp"):
        reason = f"--strategy {job.strategy}, whose buffers are DeepSpeed's"
    elif job.strategy == "fsdp" and job.precision != "bf16":
        reason = f"--precision {job.precision} with --strategy fsdp"
    if reason is not None:
        raise UserError(
            f"levers are not counted for {reason}: predict the job with `ebbtide "
            "dry-run --model`, and plan the trace"
        )


def print_fit(
    request: FitRequest, plot: Path | None, *, force: bool, as_json: bool
) -> None:
    """Print the levers of a job, and draw their frontier into the file `plot`."""
    answer = answer_of(request)
    with new_outputs(plot, None, force) as (picture, _):
        if picture is not None:
            from ebbtide.features.fit.picture import draw_frontier

            save_picture(draw_frontier(answer.search), picture, plot)
    if as_json:
        echo(json.dumps(answer.as_json()))
    else:
        print_view(answer.view())
        if request.shape is not None:
            echo_line(f"where {_CONFIG} has the value of `config` of --json")
    print_outputs(plot)
