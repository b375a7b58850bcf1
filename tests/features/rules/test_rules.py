"""Update rules: their formulas against torch and the papers, and their bits under every
policy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.interleave import InterleavedAdamW, InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import RULES, find_rule
from ebbtide.interleave.engine.rules.rule import UpdateRange, register
from tests.conftest import examples, slow
from tests.interleave.engine.states import DTYPES, any_bits, bits

GROUPS: dict[str, list[dict[str, Any]]] = {
    "adamw": [{"weight_decay": 0.1}, {"betas": (0.4, 0.5), "eps": 0.0}],
    "adamw-bf16": [{"weight_decay": 0.1}, {"stochastic_rounding": False}],
    "adam": [{"weight_decay": 0.1}, {"betas": (0.4, 0.5), "eps": 0.0}],
    "lion": [{"weight_decay": 0.1}, {"betas": (0.5, 0.4)}],
    "sgd": [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.2},
    ],
}
CASES = [
    (name, {**RULES[name].defaults, **group})
    for name, groups in GROUPS.items()
    for group in groups
]


@settings(max_examples=examples(25, by_default=3))
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**31),
    length=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    step=st.integers(1, 3),
    out_of_place=st.booleans(),
    position=st.integers(0, 2**32 - 1),
)
def test_kernel__gives_the_bits_of_the_reference(
    kernel: CpuKernel,
    case: tuple[str, dict[str, Any]],
    seed: int,
    length: int,
    dtype: torch.dtype,
    step: int,
    out_of_place: bool,
    position: int,
) -> None:
    rule, scalars = find_rule(case[0]), find_rule(case[0]).scalars(case[1], step, 0.7)
    generator = torch.Generator().manual_seed(seed)
    gradient = any_bits(length, dtype, generator)
    state = [any_bits(length, dtype, generator) for dtype in rule.dtypes]
    expected, out, other = (
        [row.clone() for row in state],
        *(torch.zeros(length, dtype=dtype) for _ in range(2)),
    )
    reference.update(gradient, expected, other, scalars, rule, position)
    if out_of_place:
        new = [torch.empty_like(row) for row in state]
        kernel.update_beside(
            gradient,
            state,
            new,
            out,
            [UpdateRange(0, length, scalars, position)],
            rule=rule,
        )
        state = new
    else:
        kernel.update(gradient, state, out, scalars, rule=rule, position=position)
    for row, expected_row in zip(state, expected, strict=True):
        assert torch.equal(bits(row), bits(expected_row))
    assert torch.equal(bits(out), bits(other))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] in ("adam", "adamw", "sgd")], ids=str
)
def test_reference__is_that_of_torch_within_four_ulp(
    case: tuple[str, dict[str, Any]],
) -> None:
    rule, group = find_rule(case[0]), case[1]
    generator = torch.Generator().manual_seed(7)
    state = torch.zeros(len(rule.dtypes), 20_000)
    state[0] = 0.02 * torch.randn(20_000, generator=generator)
    out = torch.empty(20_000)
    for step in range(1, 15):
        gradient = 1e-3 * torch.randn(20_000, generator=generator)
        other = torch.nn.Parameter(state[0].clone())
        other.grad = gradient.clone()
        optimizer = getattr(torch.optim, rule.title)([other], **group, foreach=False)
        if step > 1:
            rows = zip(rule.moments, state[1:], strict=True)
            optimizer.state[other] = {name: row.clone() for name, row in rows} | {
                "step": torch.tensor(step - 1.0)
            }
        optimizer.step()
        before = state[0].clone()
        largest = np.maximum(before.abs().numpy(), np.float32(group["lr"]))
        reference.update(gradient, state, out, rule.scalars(group, step), rule)
        unit = np.spacing(np.maximum(largest, state[0].abs().numpy()))
        # torch fuses the sum of gradient and decay, which differs where the two cancel.
        decay = group["weight_decay"] * before
        clear = (gradient + decay).abs() > 0.01 * (gradient.abs() + decay.abs())
        different = (
            state[0].double() - other.detach().double()
        ).abs().numpy() > 4 * unit
        assert not different[clear.numpy()].any(), step


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "lion"], ids=str)
def test_lion__is_that_of_the_paper_within_four_ulp(
    case: tuple[str, dict[str, Any]],
) -> None:
    """Algorithm 2 of arXiv:2302.06675, in float64 from the same fp32 state."""
    rule, group = find_rule("lion"), case[1]
    generator = torch.Generator().manual_seed(7)
    state, out = torch.zeros(2, 20_000), torch.empty(20_000)
    state[0] = 0.02 * torch.randn(20_000, generator=generator)
    (beta1, beta2), lr = group["betas"], group["lr"]
    for step in range(1, 15):
        gradient = 1e-3 * torch.randn(20_000, generator=generator)
        master, moment, wide = state[0].double(), state[1].double(), gradient.double()
        blend = beta1 * moment + (1 - beta1) * wide
        expected = master - lr * (blend.sign() + group["weight_decay"] * master)
        # Where the sum cancels, its sign is that of rounding.
        clear = blend.abs() > 1e-6 * (moment.abs() + wide.abs())
        reference.update(gradient, state, out, rule.scalars(group, step), rule)
        unit = np.spacing(np.maximum(master.abs().float().numpy(), np.float32(lr)))
        assert ((state[0].double() - expected).abs().numpy() <= 4 * unit)[
            clear.numpy()
        ].all(), step
        tolerance = 2**-22 * (moment.abs() + wide.abs())
        assert (
            (state[1].double() - beta2 * moment - (1 - beta2) * wide).abs() <= tolerance
        ).all()


def test_rules__are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/optimizers.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)`[^|]*\| [^|]*\| ([^|]*) \| ([\d.]+) \| ([^|]*) \|$",
        page,
        re.MULTILINE,
    )
    assert {
        name: (
            re.findall(r"`(\w+)`", state),
            float(size),
            re.findall(r"`(\w+)`", names),
        )
        for name, state, size, names in rows
    } == {
        rule.name: (
            list(rule.row_names[rule.has_masters :]),
            round(rule.state_bytes, 2),
            list(rule.defaults),
        )
        for rule in RULES.values()
    }


UNSUPPORTED = [
    (
        {"rule": "adagrad"},
        f"rule is 'adagrad': it must be one of {', '.join(sorted(RULES))}",
    ),
    (
        {"rule": "sgd", "betas": (0.9, 0.99)},
        "betas is no hyperparameter of sgd: these are lr, momentum",
    ),
    ({"rule": "sgd", "nesterov": True}, "nesterov needs a momentum, and no dampening"),
    ({"rule": "lion", "lr": -1.0}, "lr is -1.0: it must be at least 0"),
    ({"rule": "lion", "betas": 0.9}, "betas is 0.9: it must be 2 numbers"),
    (
        {"rule": "muon"},
        r"a parameter of shape \(3,\) is no matrix in the order of its memory",
    ),
    (
        {"rule": "muon", "adjust_lr_fn": "rms"},
        "adjust_lr_fn is 'rms': it must be one of",
    ),
    (
        {"rule": "muon", "ns_steps": 2.5},
        "ns_steps is 2.5: it must be a whole number from 1 to 99",
    ),
]


def test_optimizer__says_what_a_rule_does_not_support() -> None:
    for options, message in UNSUPPORTED:
        with pytest.raises(EngineError, match=message):
            InterleavedOptimizer([torch.nn.Parameter(torch.zeros(3))], **options)


def test_optimizer__has_the_rule_and_the_defaults_of_each_group() -> None:
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (3,), (2,))]
    groups = [
        {"params": [params[0]], "lr": 0.5},
        {"params": [params[1]], "rule": "lion", "betas": (0.8, 0.9)},
    ]
    optimizer = InterleavedOptimizer(
        groups, "muon", momentum=0.9, policy="zero-offload"
    )
    optimizer.add_param_group({"params": [params[2]], "rule": "sgd"})
    own = [
        {name: group[name] for name in group if name != "params"}
        for group in optimizer.param_groups
    ]
    assert own == [
        {**RULES["muon"].defaults, "momentum": 0.9, "lr": 0.5},
        {**RULES["lion"].defaults, "rule": "lion", "betas": (0.8, 0.9)},
        {**RULES["sgd"].defaults, "rule": "sgd"},
    ]
    with pytest.raises(EngineError, match="rule is 'adagrad'"):
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.zeros(2))], "rule": "adagrad"}
        )
    sum((param * 2).sum() for param in params).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert [sorted(saved["state"][index]) for index in range(3)] == [
        ["master", "momentum_buffer", "step"],
        ["exp_avg", "step"],
        ["momentum_buffer", "step"],
    ]
    assert optimizer.plan.counts()
    # fp32 parameters are their own masters, but for matrices.
    assert optimizer._runner.planner.workload.state_bytes == (12 * 8 + 5 * 4) / 17
    other = InterleavedOptimizer(
        [{"params": [param]} for param in params[1:]], "sgd", policy="zero-offload"
    )
    with pytest.raises(EngineError, match="another model"):
        other.load_state_dict(saved)
    saved["param_groups"] = saved["param_groups"][1:]
    with pytest.raises(
        EngineError,
        match="group 0 of the state dict has the rule lion, that of this optimizer sgd",
    ):
        other.load_state_dict(saved)
    optimizer.close()
    other.close()


def test_planner__has_the_mean_of_the_bytes_of_rules() -> None:
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (300, 100)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "rule": "lion"}]
    optimizer = InterleavedOptimizer(groups, policy="zero-offload", subgroup_params=128)
    optimizer.plan  # noqa: B018
    assert optimizer._runner.planner.workload.state_bytes == (300 * 8 + 100 * 4) / 400
    # Subgroups have one rule each.
    assert [own.params for own in optimizer._runner.engine.store.subgroups] == [
        128,
        128,
        44,
        100,
    ]
    optimizer.close()


def test_kernel__refuses_a_formula_that_computes_in_double_precision(
    kernel: CpuKernel,
) -> None:
    """A literal of Python is a double for numba, and fp32 for NumPy."""
    rule = replace(
        find_rule("sgd"),
        name="literal",
        formula=lambda g, p, m, a, b, c, d, e: (p - 0.1 * g, m),
    )
    state = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(Exception, match="literals in comparisons only"):
        kernel.update(
            torch.ones(3),
            state,
            torch.zeros(3),
            rule.scalars(rule.defaults, 1),
            rule=rule,
        )


@pytest.mark.parametrize("name", ["adam", "adamw-bf16", "muon", "sgd"])
def test_state_dict__is_that_of_torch_and_back(name: str) -> None:
    rule = find_rule(name)
    if not hasattr(torch.optim, rule.title):
        pytest.skip("needs torch 2.9")
    hyperparameters = {"momentum": 0.9} if name == "sgd" else {}
    param = torch.nn.Parameter(
        torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    )
    plain = getattr(torch.optim, rule.title)([param], lr=0.1, **hyperparameters)
    param.grad = torch.ones(5, 8)
    plain.step()
    own = InterleavedOptimizer(
        [param], name, lr=0.1, policy="zero-offload", **hyperparameters
    )
    own.load_state_dict(plain.state_dict())
    entry = own.state_dict()["state"][0]
    assert entry.keys() == {"step", *rule.without_masters.row_names}
    for moment in rule.moments:
        assert torch.equal(
            entry[moment], plain.state[param][moment].to(rule.moment_dtype)
        )
    own.close()


def test_interleaved_adamw__is_the_rule_adamw() -> None:
    optimizer = InterleavedAdamW(
        [torch.nn.Parameter(torch.zeros(3))], 1e-2, policy="zero-offload"
    )
    assert isinstance(optimizer, InterleavedOptimizer)
    assert optimizer.defaults == {
        "lr": 1e-2,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    optimizer.close()


@pytest.mark.parametrize("name", slow(sorted(RULES), but=("adamw-remainder", "lion")))
def test_adaptive__measures_the_rates_of_each_rule(name: str) -> None:
    """With all overlaps: updates beside the old state are then measured, too."""
    options: dict[str, Any] = {
        "gradients": "streamed",
        "overlap": "auto",
        "memory_budget": 1e4,
        "threads": 1,
    }
    results = []
    for policy in ("adaptive", "zero-offload"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        ).bfloat16()
        optimizer = InterleavedOptimizer(
            model.parameters(),
            name,
            policy=policy,
            model=model,
            subgroup_params=64,
            **options,
        )
        for _ in range(2):
            model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        results.append(
            torch.cat([param.detach().view(-1) for param in model.parameters()])
        )
        assert policy == "zero-offload" or optimizer.machine.cpu_update_params_per_s
        optimizer.close()
    assert torch.equal(*results)


def test_optimizer__takes_options_that_choose_kernels_of_torch() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain = InterleavedAdamW(params[:1], lr=0.5, policy="zero-offload")
    with_options = InterleavedAdamW(
        params[1:],
        lr=0.5,
        policy="zero-offload",
        fused=True,
        foreach=None,
        capturable=True,
        amsgrad=False,
    )
    for param, optimizer in zip(params, (plain, with_options), strict=True):
        param.sum().backward()
        optimizer.step()
    assert torch.equal(*params)
    assert (
        with_options.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    )
    with pytest.raises(EngineError, match="decoupled_weight_decay is not supported"):
        InterleavedOptimizer(
            [torch.nn.Parameter(torch.ones(3))], "adam", decoupled_weight_decay=True
        )


@pytest.mark.parametrize("streamed", [False, True], ids=["kept", "both"])
def test_step__refuses_another_rule_under_way(streamed: bool) -> None:
    """Adam and AdamW have as many factors, and as many moments."""
    param = torch.nn.Parameter(torch.ones(64))
    options = {"gradients": "streamed", "overlap": "backward"} if streamed else {}
    optimizer = InterleavedAdamW(
        [param],
        lr=0.1,
        weight_decay=0.5,
        policy="pipelined",
        subgroup_params=32,
        **options,
    )
    try:
        for rule in (None, "adam", "adamw"):
            if rule is not None:
                optimizer.param_groups[0]["rule"] = rule
            before = param.detach().clone()
            param.square().sum().backward()
            if rule == "adam":
                with pytest.raises(
                    EngineError,
                    match=r"the rule of a parameter was adamw .* and is adam now",
                ):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(before, param) == (rule == "adam")
    finally:
        optimizer.close()


def test_register__refuses_a_rule_without_moments() -> None:
    with pytest.raises(EngineError, match="has no moments"):
        register(replace(find_rule("lion"), name="none", moments=()))
    assert "none" not in RULES


def test_register__refuses_a_formula_that_does_not_return_master_and_moments() -> None:
    formulas = {
        1: lambda g, p, m, rate: p - rate * g,
        3: lambda g, p, m, rate: (p - rate * g, m, m),
    }
    for count, formula in formulas.items():
        with pytest.raises(EngineError) as raised:
            register(replace(find_rule("lion"), name="plain", formula=formula))
        assert str(raised.value) == (
            f"the formula of the rule plain returns {count} value{'s' * (count > 1)}: "
            "it must return a tuple, (master, exp_avg)"
        )
    assert "plain" not in RULES
