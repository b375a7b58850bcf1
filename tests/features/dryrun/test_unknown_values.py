"""Jobs that depend on values: distributions, masks, groups and repetitions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import distributions as dist
from torch.nn import functional as F

from ebbtide.features.dryrun.session import DryRun
from tests.features.dryrun.forked import run_forked


def bounds_of(job: Any) -> tuple[Any, dict[str, int], dict[str, int]]:
    """Return what a job returns, and the operations with a largest and a smallest
    size."""

    def observe() -> Any:
        with DryRun() as run:
            result = job()
        return result, dict(run.mode.shapes.bounds), dict(run.mode.shapes.least)

    answer: tuple[Any, dict[str, int], dict[str, int]] = run_forked(observe)
    return answer


def test_distributions__accept_values_that_are_not_known() -> None:
    def job() -> Any:
        # torch.compile, in a test before, has turned it off.
        dist.Distribution.set_default_validate_args(True)
        scores = torch.randn(64, 6, device="cuda")
        normal = dist.TransformedDistribution(
            dist.Normal(scores, scores.exp()), [dist.TanhTransform(cache_size=1)]
        )
        normal.log_prob(normal.rsample())
        actions = dist.Categorical(logits=scores).sample()
        # 1 is not in the support of the second, nor of the third
        dist.Categorical(logits=scores[:, :1]).log_prob(actions * 1)
        dist.Beta(scores.exp(), 1.0).log_prob(torch.randn(64, 6, device="cuda"))
        try:
            dist.Normal(scores, 1.0).log_prob(actions)
        except ValueError as error:
            return str(error)[:23]

    assert bounds_of(job)[0] == "Value is not broadcasta"


def test_masks__have_as_many_elements_as_their_sampler_sets() -> None:
    def job() -> Any:
        mask = torch.zeros(1000, 1000, dtype=torch.uint8, device="cuda").flatten()
        chosen = torch.randperm(1_000_000, device="cuda")
        mask[chosen[:256]] = 1
        other = torch.zeros_like(mask)
        other[chosen[-10:]] = 1
        scores = torch.randn(1_000_000, device="cuda")
        written = mask.clone()
        written.copy_(chosen)
        return (
            len(torch.where(mask | other)[0]),
            len(torch.where(torch.cat([mask, other]) > 0)[0]),
            len(scores[(mask == 1) & (other == 1)]),
            len(scores.masked_select(other.bool())),
            len(written.nonzero()),
            len(torch.where(other == 0)[0]),
        )

    counts, bounds, _ = bounds_of(job)
    assert counts == (266, 266, 10, 10, 1_000_000, 1_000_000)
    assert bounds == {"nonzero": 2}


def test_masks__of_floating_point_numbers_are_scattered() -> None:
    def job() -> Any:
        weight = torch.randn(1000, 1000, device="cuda")
        chosen = torch.randperm(weight.numel())[:256].to("cuda")
        values = torch.ones_like(chosen.type(weight.dtype))
        mask = torch.zeros_like(weight.view(1, -1))
        mask = mask.scatter_(1, chosen.unsqueeze(0), values.unsqueeze(0)).view(1000, -1)
        changed = mask.clone().add_(weight)
        return len(torch.where(mask == 1.0)[0]), len(torch.where(changed == 1.0)[0])

    counts, bounds, _ = bounds_of(job)
    assert counts == (256, 1_000_000)
    assert bounds == {"nonzero": 1}


def test_experts__get_an_even_share_of_the_tokens() -> None:
    def job() -> Any:
        chosen = torch.randn(512, 128, device="cuda").topk(8).indices
        experts = F.one_hot(chosen, 128).permute(2, 1, 0)
        return [len(torch.where(experts[number])[1]) for number in range(3)]

    counts, bounds, _ = bounds_of(job)
    assert counts == [512 * 8 // 128] * 3
    assert bounds == {}


def test_repetitions__are_computed_where_they_are_known() -> None:
    def job() -> Any:
        rows = torch.randn(3, 4, device="cuda")
        repeats = torch.tensor([1, 2, 3], device="cuda")
        unknown = rows[:, 0].long()
        repeat = torch.repeat_interleave
        return (
            len(repeat(rows, repeats, dim=0)),
            len(repeat(rows, unknown, dim=0, output_size=7)),
            len(repeat(rows, unknown, dim=0)),
        )

    assert bounds_of(job) == ((6, 7, 3), {}, {"repeat_interleave": 1})


def test_products_of_groups__take_every_data_type() -> None:
    def job() -> Any:
        a, b = torch.randn(8, 16, device="cuda"), torch.randn(2, 16, 32, device="cuda")
        ends = torch.tensor([3, 8], dtype=torch.int32, device="cuda")
        products = [
            F.grouped_mm(a.to(dtype), b.to(dtype), offs=ends)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ]
        return [(tuple(each.shape), str(each.dtype)) for each in products]

    assert bounds_of(job)[0] == [
        ((8, 32), f"torch.{name}") for name in ("float32", "float16", "bfloat16")
    ]


def test_data_parallel__shares_a_batch_among_the_devices_of_the_process() -> None:
    def job() -> Any:
        model = torch.nn.DataParallel(torch.nn.Linear(8, 4).cuda())
        model(torch.ones(6, 8, device="cuda")).sum().backward()
        parts = torch.nn.parallel.scatter(torch.ones(6, 8), [0, 0])
        return [len(part) for part in parts]

    assert bounds_of(job)[0] == [3, 3]


def test_statistics__have_the_names_of_torch() -> None:
    def job() -> Any:
        kept = torch.ones(1000, device="cuda")
        values = torch.cuda.memory_stats()
        nested = torch.cuda.memory_stats_as_nested_dict()
        summary = torch.cuda.memory_summary(abbreviated=True)
        return (
            values["allocated_bytes.all.peak"] >= 4 * len(kept),
            values["inactive_split_bytes.all.current"],
            nested["allocated_bytes"]["all"]["peak"],
            "Allocated memory" in summary,
            torch.version.cuda,
        )

    at_least, inactive, nested, has_summary, version = bounds_of(job)[0]
    assert (at_least, inactive, nested, has_summary) == (True, 0, 4096, True)
    assert int(version.split(".")[0]) >= 12


def test_accelerator__is_the_device_of_torch_cuda() -> None:
    def job() -> Any:
        accelerator = torch.accelerator
        kept = torch.ones(1000, device=accelerator.current_accelerator())
        stream = torch.Stream("cuda")
        with stream:
            stream.record_event(torch.Event())
            inside = accelerator.current_stream() == stream
        accelerator.current_stream().wait_stream(stream)
        accelerator.synchronize()
        accelerator.empty_cache()
        return (
            inside,
            accelerator.current_stream().is_capturing() is False,
            accelerator.memory_allocated() >= 4 * len(kept),
            accelerator.memory_stats() == torch.cuda.memory_stats(),
            accelerator.get_memory_info() == torch.cuda.mem_get_info(),
            torch.bfloat16 in accelerator.get_device_capability()["supported_dtypes"],
        )

    assert bounds_of(job)[0] == (True,) * 6


def test_copies__keep_the_fake_mode() -> None:
    def job() -> Any:
        weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
        pickled = pickle.loads(pickle.dumps(weight))
        copied = copy.deepcopy(weight).share_memory_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            copied.mul_(weight)
        return (
            pickled.shape == weight.shape,
            torch.cuda.max_memory_allocated() - before,
        )

    assert bounds_of(job)[0] == (True, 0)


def test_backward_of_activations__is_one_kernel() -> None:
    def job() -> Any:
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        peaks = []
        for activation in (F.silu, F.mish):
            y = activation(x)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(y, x, torch.ones_like(y))
            peaks.append((torch.cuda.max_memory_allocated() - before) // y.nbytes)
        return peaks

    # the gradients that are given and made
    assert bounds_of(job)[0] == [2, 2]


def test_positions_that_are_not_known__pick_known_numbers_evenly() -> None:
    def job() -> Any:
        groups = torch.arange(6, device="cuda").repeat_interleave(10)
        best = torch.randn(60, device="cuda").topk(12).indices
        chosen, selected = groups[best], groups.index_select(0, best)
        flags = (groups > 4)[best]
        return (
            int(chosen.max()),
            chosen.bincount().tolist(),
            torch.equal(chosen, selected),
            len(flags.nonzero()),
        )

    # of which positions the flags are is not known: all may be true
    assert bounds_of(job)[0] == (5, [2] * 6, True, 12)


def test_cells__may_have_no_biases() -> None:
    def job() -> Any:
        cell = torch.nn.LSTM(8, 16, bias=False, device="cuda")
        cell.flatten_parameters()
        with torch.backends.cudnn.flags(enabled=False):
            output, (_, state) = cell(torch.randn(3, 5, 8, device="cuda"))
        output.sum().backward()
        return tuple(output.shape), tuple(state.shape)

    assert bounds_of(job)[0] == ((3, 5, 16), (1, 5, 16))


def test_parameters__are_made_by_the_type_of_others() -> None:
    def job() -> Any:
        linear = torch.nn.Linear(512, 512)
        kind = type(linear.weight)
        weights = [
            kind(torch.zeros(size, size, device=device), requires_grad=False)
            for size in (8, 512)
            for device in ("cpu", "cuda")
        ]
        linear.weight = kind(torch.zeros(512, 512, device="cuda"))
        parameters = [isinstance(each, torch.nn.Parameter) for each in weights]
        return kind.__name__, parameters, linear.weight.requires_grad

    assert bounds_of(job)[0] == ("FakeTensor", [True] * 4, True)
