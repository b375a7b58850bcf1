"""DeepSpeed's Muon: the case of DeepSpeed#8463, whose losses changed with the offload,
on two ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.deepspeed.engine.supported import rules_of
from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError

from .conftest import ResultsOfRanks
from .training import config, digest, engine

WIDTH, TOKENS = 24, 50


class Layer(nn.Module):  # type: ignore[misc]
    """A layer of a decoder: attention with fewer heads of keys, and a gated MLP, with
    odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 49, bias=False) for _ in range(2))
        self.down = nn.Linear(49, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query, key, value = (
            project(y).unflatten(-1, (-1, 6)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        key, value = (heads.repeat_interleave(2, 1) for heads in (key, value))
        heads = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):  # type: ignore[misc]
    """A small decoder as those of Qwen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.layers(self.embed_tokens(tokens))))


def settings(
    dtype: str = "bf16", clipping: float = 0.0, accumulate: int = 1
) -> dict[str, Any]:
    # With torch's, the factors of the other parameters are in double precision, as
    # without DeepSpeed.
    params = {"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}
    own = config(
        dtype,
        accumulate,
        gradient_clipping=clipping,
        optimizer={"type": "Muon", "params": params},
        zero={"reduce_scatter": False},
    )
    return {key: value for key, value in own.items() if key != "scheduler"}


def train(running: Any, steps: int, seed: int = 1) -> list[float]:
    generator, losses = (
        torch.Generator().manual_seed(seed + 100 * torch.distributed.get_rank()),
        [],
    )
    for _ in range(steps * running.gradient_accumulation_steps()):
        tokens = torch.randint(0, TOKENS, (2, 9), generator=generator)
        logits = running(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        running.backward(loss)
        running.step()
        losses.append(loss.item())
    return losses


def differences_from_one_process(running: Any) -> dict[str, float]:
    """Train, and return by parameter how far it is from that of an optimizer with the
    whole matrices and gradients."""
    from deepspeed import utils

    params, copies = dict(running.module.named_parameters()), {}
    for name, param in params.items():
        copies[name] = nn.Parameter(
            utils.safe_get_full_fp32_param(param).to(param.dtype)
        )
    muon, others = [], []
    for name, copy in copies.items():
        (muon if params[name].use_muon else others).append(copy)
    adam = {
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "weight_decay": 0.1,
        "lr": 3e-3,
        "rule": "adamw",
    }
    groups = [{"params": muon, "lr": 0.02}, {"params": others, **adam}]
    optimizer = InterleavedOptimizer(groups, "muon", policy="zero-offload")
    order = [*muon, *others]
    for step in range(5):
        tokens = torch.randint(
            0, TOKENS, (2, 9), generator=torch.Generator().manual_seed(step)
        )
        running.backward(running(tokens).float().logsumexp(-1).mean() * 10)
        for name, param in params.items():
            copies[name].grad = utils.safe_get_full_grad(param).to(copies[name].dtype)
        running.step()
        optimizer.step()
    states = optimizer.state_dict()["state"]
    differences = {}
    for name, param in params.items():
        (index,) = (number for number, copy in enumerate(order) if copy is copies[name])
        expected = states[index]["master"]
        difference = (
            utils.safe_get_full_fp32_param(param) - expected
        ).abs().max() / expected.abs().max()
        differences[name] = float(difference)
    optimizer.close()
    return differences


def job(folder: Path, steps: str) -> dict[str, Any]:
    """Run the job of a rank; `steps` of each policy."""
    results: dict[str, Any] = {"bits": {}, "clipped": {}, "further": {}}
    for policy in (
        "gpu-only",
        "zero-offload",
        "interleaved:2",
        "pipelined,overlap=forward",
    ):
        with engine(
            policy, settings(), make_model=Decoder, subgroup_params=700
        ) as running:
            results["bits"][policy] = train(running, int(steps)), digest(running)
            if policy == "gpu-only":
                running.save_checkpoint(folder, tag="muon")
    with engine(
        "interleaved:2", settings(), make_model=Decoder, subgroup_params=700
    ) as running:
        results["differences"] = differences_from_one_process(running)
    for policy in ("zero-offload", "interleaved:2"):
        with engine(policy, settings("fp32", 0.5, 2), make_model=Decoder) as running:
            results["clipped"][policy] = train(running, 3), digest(running)
        with engine(policy, settings(), seed=3, make_model=Decoder) as running:
            running.load_checkpoint(folder, tag="muon")
            results["further"][policy] = train(running, 2), digest(running)
    return results


# tests/interleave/engine has the rule on two ranks in `make test`.
@pytest.mark.slow
@pytest.mark.parametrize("steps", [100])
def test_muon__with_offload_is_that_without_on_two_ranks(
    steps: int, results_of_ranks: ResultsOfRanks
) -> None:
    for results in results_of_ranks(f"muon {steps}"):
        for name in ("bits", "clipped", "further"):
            assert (
                len(
                    {
                        hashlib.sha256(str(result).encode()).hexdigest()
                        for result in results[name].values()
                    }
                )
                == 1
            )
        losses, _ = results["bits"]["gpu-only"]
        assert len(set(losses)) == len(losses) == steps
        for name, difference in results["differences"].items():
            # The ratio of learning rates of matrices with more rows than columns
            # multiplies other factors.
            assert difference <= (1e-6 if "gate" in name or "up" in name else 0), name


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-6), ("bf16", 2e-3)])
def test_muon__has_the_losses_of_deepspeeds_own(
    deepspeed: Any, dtype: str, limit: float
) -> None:
    """On this device its products are in fp32; in a bf16 job it rounds the updates to
    bf16."""
    losses = {}
    # DeepSpeed compiles its products for minutes.
    with torch.compiler.set_stance("force_eager"):
        for policy in (None, "interleaved:2"):
            with engine(
                policy, settings(dtype), make_model=Decoder, subgroup_params=700
            ) as running:
                losses[policy] = torch.tensor(train(running, 60))
    theirs, ours = losses.values()
    assert ours[0] == theirs[0]
    assert theirs.std() > 0.05
    assert ((ours - theirs).abs() / theirs).max() < limit


def test_initialize__refuses_matrices_in_storage_and_other_shapes(
    deepspeed: Any, tmp_path: Path
) -> None:
    with (
        pytest.raises(EngineError, match="cannot be in storage"),
        engine("adaptive", settings(), make_model=Decoder, storage=tmp_path),
    ):
        pass
    kernel = nn.Parameter(torch.zeros(2, 2, 3))
    optimizer = deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam(
        [{"params": [kernel], "use_muon": True}]
    )
    with pytest.raises(EngineError, match=r"shape \(2, 2, 3\)"):
        rules_of(optimizer)
