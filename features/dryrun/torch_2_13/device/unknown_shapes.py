"""Operations whose result has a shape that depends on values."""

from collections import Counter
from typing import Any

import torch
from torch import _meta_registrations
from torch._library.fake_impl import FakeImplCtx

from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import (
    ShadowValues,
    tensors_in,
)
from ebbtide.profiler.agent.patches import Patches

_aten = torch.ops.aten
_DYNAMIC = frozenset(
    {
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.unique_consecutive.default,
        _aten.bincount.default,
        _aten.repeat_interleave.Tensor,
    }
)
_MASKS = (_aten.nonzero.default, _aten.masked_select.default)
_INDEX = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class UnknownShapes:
    """Gives such operations the shape of known values, or else the largest one that is
    possible.

    `bounds`: results of that size, by operation. `least`: results with the smallest
    size, of libraries that state no largest one: int8 products of bitsandbytes, which
    have few columns of outliers, `bincount`, and `repeat_interleave` with each element
    once."""

    def __init__(self, fake_mode: Any, values: ShadowValues) -> None:
        self.bounds: Counter[str] = Counter()
        self.least: Counter[str] = Counter()
        self._fake_mode, self._values = fake_mode, values

    def install(self, patches: Patches) -> None:
        """Answer the operations of libraries that ask for a size, until
        `patches.undo()`."""

        def size(context: Any, *, min: int = 0, max: int | None = None) -> int:
            name = str(context._op)
            (self.least if max is None else self.bounds)[name] += 1
            return min if max is None else max

        patches.set(FakeImplCtx, "new_dynamic_size", size)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the fake result of such an operation; None for any other operation."""
        if func is _aten._ctc_loss.default:
            with self._fake_mode:
                return ctc_loss_like(*args)
        if func not in _DYNAMIC:
            return None
        inputs = list(tensors_in(args))
        real = self._values.compute(func, args, kwargs, inputs)
        if real is None:
            return self._bound(func, args, kwargs)
        if isinstance(real, torch.Tensor):
            return self._fake_like(real, inputs[0])
        return tuple(self._fake_like(part, inputs[0]) for part in real)

    def without_boolean_index(self, func: Any, args: Any) -> Any:
        """Return arguments in which boolean indices are positions: of all elements
        where they are not known."""
        if func not in _INDEX or not any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        ):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            else:
                positions = self.run(_aten.nonzero.default, (index,), {})
                with self._fake_mode:
                    indices += positions.unbind(1)
        return (args[0], indices, *args[2:])

    def _bound(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[0]
        if func is _aten.repeat_interleave.Tensor:
            if not (stated := kwargs.get("output_size")):
                self.least["repeat_interleave"] += 1
            with self._fake_mode:
                return source.new_empty(stated or source.numel())
        if func is _aten.bincount.default:
            self.least["bincount"] += 1
            dtype = torch.int64 if args[1:2] in ((), (None,)) else torch.float64
            with self._fake_mode:
                return torch.empty(
                    max([1, *args[2:]]), dtype=dtype, device=source.device
                )
        mask = args[1] if func is _aten.masked_select.default else source
        count = self._values.counts.of(mask) if func in _MASKS else None
        if count is None:
            self.bounds[func._schema.name.removeprefix("aten::")] += 1
            count = mask.numel()
        with self._fake_mode:
            if func is _aten.nonzero.default:
                return torch.empty(
                    (count, source.dim()),
                    dtype=torch.int64,
                    device=source.device,
                )
            if func is _aten.masked_select.default:
                elements = torch.broadcast_shapes(source.shape, mask.shape).numel()
                shape = (count * (elements // max(mask.numel(), 1)),)
                return torch.empty(shape, dtype=source.dtype, device=source.device)
            shape = (
                source.shape if func is _aten.unique_dim.default else (source.numel(),)
            )
            numbers = torch.empty(
                (source.numel(),), dtype=torch.int64, device=source.device
            )
            return (
                torch.empty(shape, dtype=source.dtype, device=source.device),
                numbers,
                numbers.clone(),
            )

    def _fake_like(self, real: Any, source: Any) -> Any:
        with self._fake_mode:
            result = torch.empty(real.shape, dtype=real.dtype, device=source.device)
        self._values.set(result, real)
        return result


def register_missing_kernels(library: Any, patches: Patches) -> None:
    for name in (
        "_fused_sgd_",
        "_fused_sgd_.tensor_lr",
        "_fused_adagrad_",
        "_fused_adagrad_.tensor_lr",
    ):
        library.impl(name, lambda *_args, **_kwargs: None, "Meta")
    for owner in ("cudnn", "miopen"):
        library.impl(f"_use_{owner}_ctc_loss", lambda *_args: False, "Meta")
    library.impl("_ctc_loss_backward", _ctc_loss_backward, "Meta")
    for name, form in {
        "batch_norm_stats": lambda x, *_: _channels(x, 2),
        "batch_norm_gather_stats_with_counts": lambda x, *_: _channels(x, 2),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_backward_reduce": lambda _grad, x, *_: _channels(x, 4),
        "batch_norm_backward_elemt": lambda _grad, x, *_: torch.empty_like(x),
    }.items():
        library.impl(name, form, "Meta")
    grouped = _meta_registrations._meta_grouped_mm_common

    def multiply_groups(a: Any, b: Any, **kwargs: Any) -> Any:
        """Return the product of groups of matrices, which the form of torch allows in
        bfloat16 alone."""
        if kwargs["scale_a"] is not None or a.dtype == torch.bfloat16:
            return grouped(a, b, **kwargs)
        return _meta_registrations._create_grouped_mm_output_tensor(
            a, b, kwargs.get("offs"), kwargs.get("out_dtype")
        )

    patches.set(_meta_registrations, "_meta_grouped_mm_common", multiply_groups)
    check = _meta_registrations.rnn_cell_checkSizes

    def check_cell(x: Any, y: Any, bias: Any, *others: Any) -> None:
        if bias is not None:  # the check of torch takes a cell without one for broken
            check(x, y, bias, *others)

    patches.set(_meta_registrations, "rnn_cell_checkSizes", check_cell)
    ctc_loss = torch.ctc_loss

    def ctc_loss_of_numbers(
        scores: Any, targets: Any, lengths: Any, target_lengths: Any, *args: Any
    ) -> Any:
        """Compute the loss with lengths as numbers, which torch reads from tensors, but
        not from fake ones."""
        return ctc_loss(
            scores, targets, _numbers(lengths), _numbers(target_lengths), *args
        )

    patches.set(torch, "ctc_loss", ctc_loss_of_numbers)


def _channels(x: Any, number: int) -> tuple[Any, ...]:
    """Return statistics of SyncBatchNorm, which have at least 32 bits."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(x.new_empty(x.shape[1], dtype=dtype) for _ in range(number))


def _numbers(lengths: Any) -> Any:
    return (
        [int(length) for length in lengths.flatten()]
        if isinstance(lengths, torch.Tensor)
        else lengths
    )


def ctc_loss_like(
    log_probs: Any, targets: Any, _lengths: Any, target_lengths: Any, *_args: Any
) -> tuple[Any, Any]:
    """Return tensors like the losses and the table of `aten::_ctc_loss`, for targets of
    the largest length."""
    longest = targets.shape[1] if targets.dim() > 1 else max(target_lengths, default=0)
    batch = log_probs.shape[1]
    return log_probs.new_empty(batch), log_probs.new_empty(
        batch, log_probs.shape[0], 2 * longest + 1
    )


def _ctc_loss_backward(_grad: Any, log_probs: Any, *_args: Any) -> Any:
    return torch.empty_like(log_probs)
