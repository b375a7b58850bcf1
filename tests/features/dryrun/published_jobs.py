"""Jobs whose memory others have recorded on a GPU and published, rebuilt from their
descriptions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.features.dryrun import published_medium_model as medium
from tests.features.dryrun.memory_lines import MemoryLine, profiler_line, snapshot_line
from tests.features.dryrun.published_model import (
    BATCH,
    VOCABULARY,
    PublishedModel,
    SimpleAdamW,
    published_loss,
)
from tests.features.dryrun.published_resnet import ResNet50

PUBLISHED = Path(__file__).parents[4] / "shared" / "published" / "snapshots"
LARGE_SOURCE = "kkaitlyn111/cs336-a2-systems at 46eae3f, memory_files/"
MEDIUM_SOURCE = "Wedsonlin/assignment2-systems at 8630bcf, results/"
LINEAR_SOURCE = "shreyansh26/MLSys-Experiments at 16debf2, model_memory_usage/"
RESNET_SOURCE = "pytorch/kineto at be239c0, tb_plugin/samples/resnet50_num_workers_0/"

# Whether an optimizer steps, and the context.
_LARGE_ORDER = [
    (full_step, context) for full_step in (False, True) for context in (128, 256, 512)
]


@dataclass(frozen=True)
class PublishedJob:
    """A published recording and the job that it is of.

    Attributes:
        name: Name of its file.
        source: The repository, commit and folder that it is from.
        gpu: The GPU in words.
        device_name: Name of the GPU for the dry run.
        run: The job, which yields the names of its phases.
        relative: Whether the recording starts at an unknown size.
    """

    name: str
    source: str
    gpu: str
    device_name: str
    run: Callable[[], Iterator[str]]
    relative: bool = False

    def path(self) -> Path | None:
        """Return its file, None where it is missing. `EBBTIDE_PUBLISHED` names one more
        folder to search."""
        folders = [PUBLISHED, Path(os.environ.get("EBBTIDE_PUBLISHED", PUBLISHED))]
        return next(
            (folder / self.name for folder in folders if (folder / self.name).exists()),
            None,
        )

    def measured(self, path: Path) -> MemoryLine:
        """Read its file."""
        return (
            profiler_line(path, "ProfilerStep#6")
            if path.suffix == ".gz"
            else snapshot_line(path)
        )


def _large_script(number: int, autocast: bool) -> Iterator[str]:
    """The script that recorded the large model: a job after another in one process; the
    first ones are not recorded."""
    for full_step, context in _LARGE_ORDER[:number]:
        for _ in _large(context, full_step, autocast):
            pass
    full_step, context = _LARGE_ORDER[number]
    yield from _large(context, full_step, autocast)


def _large(context: int, full_step: bool, autocast: bool) -> Iterator[str]:
    model = PublishedModel(context)
    tokens, targets = (
        torch.randint(0, VOCABULARY, (BATCH, context)).to("cuda") for _ in range(2)
    )
    optimizer = SimpleAdamW(model.parameters())
    with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
        torch.cuda.empty_cache()
        yield "forward"
        logits = model(tokens)
        if full_step:
            loss = published_loss(logits, targets)
            yield "backward"
            loss.backward()
            yield "update"
            optimizer.step()
        yield "end"


def _medium_data(steps: int, context: int) -> torch.Tensor:
    return torch.randint(
        0, medium.VOCABULARY, (steps, medium.BATCH, context), device="cuda"
    )


def _medium_inference(context: int, autocast: bool) -> Iterator[str]:
    model = medium.MediumModel(context)
    warm_up, inputs = _medium_data(5, context), _medium_data(1, context)
    with (
        torch.inference_mode(),
        torch.autocast("cuda", torch.bfloat16, enabled=autocast),
    ):
        for tokens in warm_up:
            model(tokens)
        yield "forward"
        model(inputs[0])
        yield "end"


def _medium_training(context: int, autocast: bool) -> Iterator[str]:
    model = medium.MediumModel(context)
    optimizer = medium.ReplacingAdamW(model.parameters())
    data = [_medium_data(steps, context) for steps in (5, 1, 5, 1)]
    for index in range(6):
        recorded = index == 5
        step = 0 if recorded else index
        tokens, targets = (data[1], data[3]) if recorded else (data[0], data[2])
        if recorded:
            yield "forward"
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = model(tokens[step])
            loss = medium.medium_loss(logits, targets[step])
        if recorded:
            yield "backward"
        loss.backward()
        if recorded:
            yield "update"
        optimizer.step()
        if not recorded:
            optimizer.zero_grad()
            del logits, loss
    yield "end"


def _linear(gradients: bool) -> Iterator[str]:
    yield "forward"
    layer = nn.Linear(10_000, 50_000, device="cuda")
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            inputs = torch.randn(5_000, 10_000, device="cuda")
            outputs = layer(inputs)
    yield "end"
    del inputs, outputs


def _resnet() -> Iterator[str]:
    model = ResNet50().cuda()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.001, momentum=0.9, foreach=False
    )
    for step in range(3):
        if step == 2:
            yield "forward"
        images, labels = (
            torch.randn(32, 3, 224, 224).cuda(),
            torch.randint(0, 10, (32,)).cuda(),
        )
        outputs = model(images)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad(set_to_none=False)
        if step == 2:
            yield "backward"
        loss.backward()
        if step == 2:
            yield "update"
        optimizer.step()
    yield "end"


def _jobs() -> Iterator[PublishedJob]:
    h100 = "H100 80 GB"
    for number, (full_step, context) in enumerate(_LARGE_ORDER):
        kind = "fullstep" if full_step else "forward"
        for autocast in (False, True) if not full_step else (False,):
            name = f"cs336-ctx{context}-{kind}{'-autocast' if autocast else ''}.pickle"
            yield PublishedJob(
                name,
                LARGE_SOURCE,
                h100,
                "h100-80gb",
                partial(_large_script, number, autocast),
            )
    for context in (128, 256, 512, 1024):
        for kind, run in (
            ("inference", partial(_medium_inference, context, context == 512)),
            ("training", partial(_medium_training, context, context >= 512)),
        ):
            name = f"cs336-medium-ctx{context}-{kind}.pickle"
            yield PublishedJob(
                name, MEDIUM_SOURCE, "not named, not Hopper", "a100-80gb-sxm", run
            )
    for name, gradients in (("linear-grad", True), ("linear-no-grad", False)):
        yield PublishedJob(
            f"{name}.pickle",
            LINEAR_SOURCE,
            "Hopper",
            "h100-80gb",
            partial(_linear, gradients),
        )
    yield PublishedJob(
        "resnet50-v100.json.gz",
        RESNET_SOURCE,
        "V100 32 GB",
        "v100",
        _resnet,
        relative=True,
    )


JOBS = {job.name.split(".")[0]: job for job in _jobs()}
