"""Quantized parameters, kernels of libraries, attention, and tensors made of others, in
a dry run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import (
    BATCH,
    LAYER_BYTES,
    WIDTH,
    dry_run,
    held_bytes,
    train,
)


class _Quantized(nn.Parameter):
    """A parameter that takes a byte an element once it is on the device, as those of
    bitsandbytes do."""

    def __new__(
        cls, data: Any = None, requires_grad: bool = False, scale: Any = None
    ) -> Any:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scale = scale
        made.data = data
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if self.data.dtype == torch.int8:
            return _Quantized(
                super().to(device=device, dtype=dtype), scale=self.scale.to(device)
            )
        values = self.data.contiguous().to(device)
        self.scale = values.abs().amax(dim=1)
        self.data = (127 * values / self.scale[:, None]).to(torch.int8)
        return self


class _QuantizedLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _Quantized(torch.randn(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Any) -> Any:
        return (
            x @ (self.weight.float() * self.weight.scale[:, None] / 127).t() + self.bias
        )


def test_parameter_subclass__keeps_its_class_attributes_and_size_on_the_device() -> (
    None
):
    def observe(width: int) -> Any:
        weights = []

        def job() -> None:
            model = _QuantizedLinear(width).to("cuda")
            weights.append(model.weight)
            optimizer = torch.optim.SGD([model.bias])
            while True:
                model(torch.randn(BATCH, width, device="cuda")).sum().backward()
                optimizer.step()

        run, _ = dry_run(job)
        weight = weights[0]
        kinds = (
            isinstance(weight, _Quantized),
            isinstance(weight, nn.Parameter),
            weight.scale.device.type,
        )
        return (*kinds, str(weight.dtype)), held_bytes(run, "parameter")

    # Weights of the host are real below 65,536 elements, and fake beyond.
    for width in (128, WIDTH):
        kinds, parameter_bytes = run_forked(lambda width=width: observe(width))
        assert kinds == (True, True, "cuda", "torch.int8")
        assert parameter_bytes == width * width + 4 * width


def test_product__with_another_type_of_its_result_has_the_flops_of_the_product() -> (
    None
):
    def job() -> None:
        a, b = (
            torch.ones(64, 128, device="cuda").half(),
            torch.ones(128, 32, device="cuda").half(),
        )
        torch.mm(a, b)
        torch.mm(a, b, out_dtype=torch.float32)
        torch.addmm(torch.ones(64, 32, device="cuda"), a, b, out_dtype=torch.float32)
        torch.bmm(a[None], b[None], out_dtype=torch.float32)

    def observe() -> Any:
        run, _ = dry_run(job)
        return [kernel.work.flops for kernel in run.clock.kernels if kernel.work.flops]

    assert run_forked(observe) == [2 * 64 * 128 * 32] * 4


def test_tensor__of_values_on_the_device_has_these() -> None:
    def job() -> Any:
        scale = torch.tensor([4.0, 2.0], device="cuda")
        return torch.tensor([scale[0], [*scale][1] * 3, 5.0]).tolist(), torch.as_tensor(
            [scale]
        ).tolist()

    assert run_forked(lambda: dry_run(job)[1]) == ([4.0, 6.0, 5.0], [[4.0, 2.0]])


def test_list__of_a_tensor_is_read_at_once() -> None:
    def job() -> Any:
        return torch.randn(200, 1_000, device="cuda").tolist(), torch.ones(
            (), device="cuda"
        ).tolist()

    def observe() -> Any:
        run, (values, value) = dry_run(job)
        return (
            [(copy.direction, copy.size) for copy in run.clock.copies],
            values == [[1.0] * 1_000] * 200,
            value,
        )

    assert run_forked(observe) == ([("d2h", 800_000), ("d2h", 4)], True, 1.0)


def test_meta__moves_parameters_away_as_torch_does() -> None:
    def job() -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        before = model[0].weight
        model.to("meta")
        return (
            model[0].weight is before,
            model[0].weight.device.type,
            isinstance(model[0].weight, nn.Parameter),
        )

    assert run_forked(lambda: dry_run(job)[1]) == (False, "meta", True)


def test_operation__whose_library_asks_for_a_size_has_the_least_one() -> None:
    def job() -> Any:
        @torch.library.custom_op("ebbtide_tests::outliers", mutates_args=())
        def outliers(x: torch.Tensor) -> torch.Tensor:
            return x[x > 6]

        @outliers.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            return x.new_empty(torch.library.get_ctx().new_dynamic_size())

        return tuple(outliers(torch.ones(8, device="cuda")).shape)

    def observe() -> Any:
        run, shape = dry_run(job)
        return shape, run.notes()

    shape, notes = run_forked(observe)
    assert shape == (0,)
    assert any(
        "ebbtide_tests.outliers" in note and "smallest size" in note for note in notes
    )


def test_triton_kernel__counts_with_the_bytes_of_its_arguments() -> None:
    def job() -> None:
        from tests.features.dryrun.triton_kernels import double

        model = nn.Linear(WIDTH, WIDTH).to("cuda")
        x = torch.ones(BATCH, WIDTH, device="cuda")
        double[(BATCH,)](x, torch.empty_like(x), WIDTH, BLOCK=1024)
        train(model, torch.optim.SGD(model.parameters()))

    def observe() -> Any:
        run, _ = dry_run(job)
        works = [
            kernel.work.bytes
            for kernel in run.clock.kernels
            if kernel.work.name == "double"
        ]
        return works, run.notes()

    works, notes = run_forked(observe)
    assert works == [2 * 4 * BATCH * WIDTH]
    assert any("Triton kernels" in note and "double (1)" in note for note in notes)


def test_functions_of_cuda__take_keywords() -> None:
    def job() -> Any:
        torch.cuda.synchronize(device="cuda")
        torch.cuda.reset_peak_memory_stats(device=0)
        return torch.cuda.memory_allocated(device="cuda"), len(
            torch.cuda.get_rng_state(device="cuda")
        )

    assert run_forked(lambda: dry_run(job)[1]) == (0, 16)


def test_flex_attention__holds_its_result_and_no_scores() -> None:
    def job() -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        tensors = [
            torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True)
            for _ in range(3)
        ]
        before = torch.cuda.memory_allocated()
        result = torch.compile(flex_attention)(*tensors)
        kept = torch.cuda.memory_allocated() - before
        result.sum().backward()
        return (
            kept,
            torch.cuda.max_memory_allocated() - before,
            [tuple(tensor.grad.shape) for tensor in tensors],
        )

    def observe() -> Any:
        run, result = dry_run(job)
        return result, [
            kernel.work.flops for kernel in run.clock.kernels if kernel.work.flops
        ]

    (kept, most, shapes), flops = run_forked(observe)
    tensor_bytes, scores_bytes, row_bytes = (
        4 * 2 * 4 * 256 * 64,
        4 * 2 * 4 * 256 * 256,
        4 * 2 * 4 * 256,
    )
    # Sums and maxima of rows, and an empty mask of blocks.
    assert tensor_bytes + 2 * row_bytes <= kept <= tensor_bytes + 3 * row_bytes
    assert most < 6 * tensor_bytes + scores_bytes
    assert shapes == [(2, 4, 256, 64)] * 3
    assert flops == [2 * 2 * 2 * 4 * 256 * 256 * 64, 5 * 2 * 2 * 4 * 256 * 256 * 64]


@pytest.mark.parametrize("calls", [pytest.param(False, marks=pytest.mark.slow), True])
def test_notes__name_torch_compile_where_compiled_code_ran(calls: bool) -> None:
    def job() -> None:
        torch.compile(nn.Linear(2, 2))  # a library that compiles when it is imported

        @torch.compile(dynamic=True)
        def double(x: Any) -> Any:
            return 2 * x

        model = torch.compile(nn.Linear(WIDTH, WIDTH).to("cuda"))
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.ones(2, WIDTH, device="cuda")
        while True:
            (double(model(x)) if calls else 2 * model._orig_mod(x)).sum().backward()
            optimizer.step()

    notes = run_forked(lambda: dry_run(job)[0].notes())
    assert any("torch.compile" in note for note in notes) is calls


@pytest.mark.parametrize(("backend", "temporaries"), [("inductor", 0), ("eager", 1)])
def test_compiled_update__keeps_temporaries_in_registers(
    backend: str, temporaries: int
) -> None:
    def job() -> Any:
        weight, table = (torch.ones(size, device="cuda") for size in (1 << 20, 256))
        codes = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
        before = torch.cuda.memory_allocated()

        @torch.compile(backend=backend)
        def update() -> Any:
            read = table[codes].mul(2) + 1
            weight.sub_(read)
            return read.exp()

        with torch.no_grad():
            result = update()
        peak = torch.cuda.max_memory_allocated() - before
        return (
            peak / weight.nbytes,
            torch.cuda.memory_allocated() - before,
            result.nbytes,
        )

    def run() -> Any:
        return dry_run(job)[1]

    peak, kept, result_bytes = run_forked(run)
    assert peak == 1 + temporaries
    assert kept == result_bytes


def test_torchvision__runs_without_its_operators(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "from . import extension, _meta_registrations\n"
    )
    (tmp_path / "torchvision" / "_meta_registrations.py").write_text(
        "import torch\n"
        "def kept(boxes, scores, limit):\n"
        "    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), "
        "dtype=torch.int64)\n"
        "torch.library.register_fake('torchvision::nms')(kept)\n"
        "def align(image, boxes, scale, height, width, ratio, aligned):\n"
        "    return image.new_empty(len(boxes), image.shape[1], height, width)\n"
        "torch.library.register_fake('torchvision::roi_align')(align)\n"
    )
    (tmp_path / "torchvision" / "extension.py").write_text(
        "def _has_ops():\n    return False\ndef _check_cuda_version():\n    return -1\n"
    )

    def job() -> Any:
        sys.path.insert(0, str(tmp_path))
        import torchvision  # type: ignore[import-not-found]

        assert torchvision.extension._has_ops()
        operators, boxes = torch.ops.torchvision, torch.ones(3, 4, device="cuda")
        features = operators.roi_align(
            torch.ones(1, 2, 8, 8, device="cuda"), boxes, 0.5, 7, 7, 2, False
        )
        return operators.nms(boxes, boxes[:, 0], 0.5).shape, features.shape

    assert run_forked(lambda: dry_run(job)[1]) == ((3,), (3, 2, 7, 7))


def test_replaced_functions__can_be_classified_by_dynamo() -> None:
    """Libraries that compile functions while a dry run lasts make dynamo read the
    functions of torch again."""

    def job() -> None:
        rules = torch._dynamo.trace_rules.get_torch_obj_rule_map
        rules.cache_clear()
        rules()

    run_forked(lambda: dry_run(job)[1])


def _add_one(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x + torch.tensor(1.0)


def test_scripted_function__may_make_tensors() -> None:
    def job() -> Any:
        return tuple(torch.jit.script(_add_one)(torch.ones(3, device="cuda")).shape)

    assert run_forked(lambda: dry_run(job)[1]) == (3,)


def test_unknown_values__compare_as_placeholders() -> None:
    def job() -> Any:
        unknown, one = torch.rand(3, device="cuda"), torch.ones(3, device="cuda")
        other_shape = torch.rand(2, device="cuda")
        return [
            torch.equal(unknown, one),
            torch.equal(unknown, 2 * one),
            torch.equal(unknown, other_shape),
        ]

    assert run_forked(lambda: dry_run(job)[1]) == [True, False, False]


def test_truncated_normal__ends_though_its_values_are_not_known() -> None:
    def job() -> Any:
        weight = torch.empty(WIDTH, WIDTH, device="cuda")
        torch.nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)
        return float(
            torch.nn.init.trunc_normal_(torch.empty(100), std=0.02, a=-0.04, b=0.04)
            .abs()
            .max()
        )

    assert 0 < run_forked(lambda: dry_run(job)[1]) <= 0.04


def test_generator__takes_a_state_that_was_on_the_device() -> None:
    def job() -> Any:
        generator = torch.Generator()
        state = generator.get_state()
        first = torch.rand(3, generator=generator)
        generator.set_state(state.to("cuda").cpu())
        torch.set_rng_state(torch.get_rng_state().to("cuda").cpu())
        return torch.equal(first, torch.rand(3, generator=generator))

    assert run_forked(lambda: dry_run(job)[1])


def test_optimizers__that_step_in_the_backward_end_iterations() -> None:
    def job() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(
            "cuda"
        )
        optimizers = {
            weight: torch.optim.AdamW([weight]) for weight in model.parameters()
        }

        def step(weight: Any) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(step)
        for _ in range(5):
            model(torch.ones(BATCH, WIDTH, device="cuda")).sum().backward()

    def observe() -> Any:
        run, _ = dry_run(job)
        return [
            (phase.phase, phase.iteration) for phase in run.tracker.phases
        ], held_bytes(run, "optimizer_state")

    phases, state_bytes = run_forked(observe)
    assert phases == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert state_bytes == 2 * 2 * LAYER_BYTES


def test_swap_tensors__gives_a_parameter_the_content_of_another_type() -> None:
    def job() -> Any:
        layer = nn.Linear(WIDTH, WIDTH)
        torch.relu(layer.weight)
        weight = layer.weight
        torch.utils.swap_tensors(
            layer.weight,
            nn.Parameter(torch.zeros(WIDTH, 4, device="cuda"), requires_grad=False),
        )
        return (
            layer.weight is weight,
            tuple(weight.shape),
            weight.device.type,
            isinstance(weight, nn.Parameter),
        )

    assert run_forked(lambda: dry_run(job)[1]) == (True, (WIDTH, 4), "cuda", True)


BITSANDBYTES = """
import ctypes

class BNBNativeLibrary:
    def __init__(self, lib):
        self._lib = lib

    def __getattr__(self, name):
        raise RuntimeError(f"Method '{name}' not available in CPU-only version of bitsandbytes.")

lib = BNBNativeLibrary(ctypes.CDLL(None))
"""


def test_kernels__that_bitsandbytes_lacks_do_nothing(tmp_path: Path) -> None:
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cextension.py").write_text(BITSANDBYTES)

    def job() -> Any:
        sys.path.insert(0, str(tmp_path))
        from bitsandbytes.cextension import lib

        kernel = lib.cdequantize_blockwise_fp32
        return kernel(None, 1), hasattr(kernel, "restype"), lib.labs(-3)

    assert run_forked(lambda: dry_run(job)[1]) == (None, True, 3)
