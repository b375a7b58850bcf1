"""Moments in 8 bits: their data type, blocks and state dicts, which are those of
bitsandbytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.features.rules import compiled_blocks
from ebbtide.features.rules.blocks import quantize_moment, widen_moment
from ebbtide.features.rules.dynamic_type import MIDDLES, VALUES
from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.rule import BLOCK, UpdateRange
from ebbtide.interleave.engine.runtime.layout import divide
from tests.conftest import slow_case
from tests.interleave.engine.states import any_bits, bits
from tests.interleave.engine.training import MACHINE

RULE = find_rule("adamw-8bit")


def any_rows(length: int, generator: torch.Generator) -> list[torch.Tensor]:
    rows = list(RULE.zero_rows(length))
    for row in rows:
        row.copy_(any_bits(len(row), row.dtype, generator))
    for scales in rows[3:]:
        # Most moments are plausible.
        scales[1:].uniform_(0, 1e-3, generator=generator)
    return rows


@pytest.mark.parametrize("length", [0, 1, 256, 1000, 40_000])
# Loops convert each dtype as those of AdamW do, and take seconds to compile.
@pytest.mark.parametrize(
    "kind",
    [
        "bfloat16",
        slow_case("float16"),
        slow_case("float32"),
        "beside",
        slow_case("state"),
    ],
)
def test_kernel__gives_the_bits_of_the_reference(
    kernel: CpuKernel, length: int, kind: str
) -> None:
    generator = torch.Generator().manual_seed(length)
    dtype = {"float16": torch.float16, "float32": torch.float32}.get(
        kind, torch.bfloat16
    )
    state, gradient = any_rows(length, generator), any_bits(length, dtype, generator)
    out = any_bits(length, dtype, generator)
    scalars, expected, other = (
        RULE.scalars(RULE.defaults, 3, 0.7),
        [row.clone() for row in state],
        out.clone(),
    )
    reference.update(gradient, expected, other, scalars, RULE)
    if kind == "beside":
        old, state = state, [torch.empty_like(row) for row in state]
        kernel.update_beside(
            gradient, old, state, out, [UpdateRange(0, length, scalars)], rule=RULE
        )
    else:
        kernel.update(
            gradient, state, None if kind == "state" else out, scalars, rule=RULE
        )
    for row, expected_row in zip(state, expected, strict=True):
        assert torch.equal(bits(row), bits(expected_row))
    assert kind == "state" or torch.equal(bits(out), bits(other))


def test_codes__of_the_table_are_those_of_the_next_numbers() -> None:
    """At most one middle has the same upper bits, so that one comparison is enough."""
    for number, middles in enumerate(MIDDLES):
        magnitudes = (np.arange((127 << 7) + 2, dtype=np.uint32) << 16).view(np.float32)
        for sign in (1, -1) if number == 0 else (1,):
            counts, _ = np.histogram(
                sign * middles.astype(np.float64), magnitudes.astype(np.float64)
            )
            assert counts.max() == 1
        edges = np.concatenate(
            [
                middles,
                np.nextafter(middles, np.float32(2)),
                np.nextafter(middles, np.float32(-2)),
            ]
        )
        edges = np.concatenate(
            [edges, magnitudes[magnitudes <= 1], np.float32([0, 1])]
        ).astype(np.float32)
        edges = np.unique(
            np.concatenate([edges, -edges]) if number == 0 else np.abs(edges)
        )
        values = np.concatenate(
            [np.insert(part, 0, np.float32(1)) for part in np.array_split(edges, 300)]
        )
        moments = np.resize(values, (len(values) // BLOCK + 1) * BLOCK)
        moments[::BLOCK] = 1
        expected, scales = quantize_moment(moments, number)
        assert (scales == 1).all()
        codes, table = np.zeros(len(moments), np.uint8), compiled_blocks._CODES[number]
        from numba import njit

        quantize = njit(compiled_blocks._quantize)
        for block in range(len(scales)):
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            quantize(moments[own].copy(), codes[own], scales, block, table)
        assert np.array_equal(codes, expected)


def test_quantize__keeps_numbers_of_the_data_type_and_their_scale() -> None:
    for number, values in enumerate(VALUES):
        assert len(np.unique(values)) == 256
        assert values[-1] == 1
        codes, scales = quantize_moment(np.float32(0.5) * values, number)
        assert np.array_equal(codes, np.arange(256))
        assert np.array_equal(
            widen_moment(codes, scales, number), np.float32(0.5) * values
        )
    for value in (0.0, np.inf, np.nan):
        codes, scales = quantize_moment(
            np.float32([1e-9, value]) if value else np.zeros(2, np.float32), 0
        )
        assert not codes.any()
        assert np.array_equal(scales, np.float32([value]), equal_nan=True)


def test_reference__is_that_of_bitsandbytes_in_double_precision() -> None:
    """The formulas of `AdamW8bit` on the CPU, from the same codes and scales."""
    generator, params = torch.Generator().manual_seed(7), 5_000
    state = list(RULE.zero_rows(params))
    state[0].copy_(0.02 * torch.randn(params, generator=generator))
    group, out = {**RULE.defaults, "weight_decay": 0.1}, torch.empty(params)
    (beta1, beta2), lr = group["betas"], group["lr"]
    for step in range(1, 15):
        gradient = 1e-3 * torch.randn(params, generator=generator)
        master, wide = state[0].double(), gradient.double()
        m, v = (
            torch.from_numpy(VALUES[number]).double()[state[1 + number].long()]
            * state[3 + number].double().repeat_interleave(BLOCK)[:params]
            for number in range(2)
        )
        m, v = beta1 * m + (1 - beta1) * wide, beta2 * v + (1 - beta2) * wide.square()
        divisor = v.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
        expected = (
            master * (1 - lr * group["weight_decay"])
            - lr / (1 - beta1**step) * m / divisor
        )
        reference.update(gradient, state, out, RULE.scalars(group, step), RULE)
        unit = np.spacing(np.maximum(master.abs().float().numpy(), np.float32(lr)))
        assert ((state[0].double() - expected).abs().numpy() <= 4 * unit).all(), step
        for number, moment in enumerate((m, v)):
            blocks = torch.nn.functional.pad(moment, (0, -params % BLOCK)).reshape(
                -1, BLOCK
            )
            scales = blocks.abs().amax(dim=1)
            assert torch.allclose(state[3 + number].double(), scales, rtol=1e-6)
            # The nearest number of the data type, up to rounding.
            values = torch.from_numpy(VALUES[number]).double()
            wanted = (blocks / scales[:, None]).reshape(-1)[:params]
            nearest = (wanted[:, None] - values).abs().amin(dim=1)
            assert (
                (wanted - values[state[1 + number].long()]).abs() <= nearest + 1e-6
            ).all()


def test_divide__cuts_between_blocks_of_a_parameter() -> None:
    params = [torch.zeros(size) for size in (300, 1000, 20)]
    for size in (100, 700, 5000):
        subgroups = divide(params, size, rules=[RULE] * 3)
        for subgroup in subgroups:
            assert subgroup.params <= max(size, BLOCK)
            blocks = 0
            for part in subgroup.segments:
                assert part.begin % BLOCK == 0
                assert part.end % BLOCK == 0 or part.end == len(params[part.param])
                assert part.block == blocks
                blocks += -(-(part.end - part.begin) // BLOCK)
        assert sum(own.params for own in subgroups) == 1320


def train(
    param: torch.nn.Parameter, steps: range, state: Any = None, **options: Any
) -> dict[str, Any]:
    optimizer = InterleavedOptimizer(
        [param], "adamw-8bit", lr=0.01, machine=MACHINE, **options
    )
    if state is not None:
        optimizer.load_state_dict(state)
    for step in steps:
        param.grad = torch.randn(
            param.shape, generator=torch.Generator().manual_seed(step)
        ).to(param.dtype)
        optimizer.step()
    result: dict[str, Any] = optimizer.state_dict()
    optimizer.close()
    return result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"qmap1": torch.linspace(-1, 1, 256)},
            "qmap1 is not the data type of AdamW8bit, `dynamic`",
        ),
        (
            {"qmap2": torch.zeros(16)},
            "qmap2 is not the data type of AdamW8bit, `dynamic`",
        ),
        ({"absmax1": torch.zeros(3)}, r"absmax1 is \(3,\)"),
        ({"parts": 2}, "has 2 shards, the parameter 1: load it with as many ranks"),
        (
            {"state2": None},
            "has no state2 that is a tensor: this is not a state dict of AdamW8bit",
        ),
    ],
)
def test_load_state_dict__refuses_another_data_type(
    change: dict[str, Any], message: str
) -> None:
    param = torch.nn.Parameter(torch.ones(30, 37))
    state = train(param, range(2), policy="zero-offload")
    state["state"][0] |= change
    with pytest.raises(EngineError, match=message):
        train(param, range(0), state, policy="zero-offload")


def test_state_dict__is_that_of_bitsandbytes_and_back() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    own, other = (torch.nn.Parameter(torch.full((90, 70), 0.02)) for _ in range(2))
    theirs = bitsandbytes.optim.AdamW8bit([other], lr=1e-3)
    ours = InterleavedOptimizer(
        [own], "adamw-8bit", lr=1e-3, machine=MACHINE, policy="zero-offload"
    )
    for _ in range(3):
        own.grad = 1e-2 * torch.randn(90, 70, generator=generator)
        other.grad = own.grad.clone()
        theirs.step()
        ours.step()
    # bitsandbytes multiplies by the inverse scale: a few codes are those of the number
    # beside.
    assert ((own - other).abs() > 1e-5).float().mean() < 0.02
    assert (own - other).abs().max() < 1e-3
    assert all(
        np.array_equal(theirs.state[other][f"qmap{number + 1}"], VALUES[number])
        for number in range(2)
    )
    # Both go on from the state of the other one.
    ours_saved, theirs_saved = ours.state_dict(), theirs.state_dict()
    ours.load_state_dict(theirs_saved)
    theirs.load_state_dict(ours_saved)
    for name in ("state1", "state2", "absmax1", "absmax2"):
        nested = theirs_saved["state"][0].get(
            "__bnb_optimizer_quant_state__", theirs_saved["state"][0]
        )
        assert torch.equal(ours.state_dict()["state"][0][name], nested[name])
        assert torch.equal(theirs.state[other][name], ours_saved["state"][0][name])
    other.grad = own.grad.clone()
    theirs.step()
    assert theirs.state[other]["step"] == 4
    ours.close()


def test_kernel__refuses_rows_of_other_kinds(kernel: CpuKernel) -> None:
    rows, scalars = list(RULE.zero_rows(300)), RULE.scalars(RULE.defaults, 1)
    for number, row in (
        (1, rows[1].float()),
        (2, rows[2][:-1]),
        (3, rows[3].double()),
        (4, rows[4][:1]),
    ):
        state = [*rows[:number], row, *rows[number + 1 :]]
        with pytest.raises(ValueError, match="moments"):
            kernel.update(torch.zeros(300), state, torch.zeros(300), scalars, rule=RULE)
