"""Random training loops, and their peaks of memory in dry runs and in eager runs on the
CPU.

    python -m tests.features.dryrun.random_jobs FIRST LAST

An eager run counts the storages that operations return, for as long as they live. What
differs between the devices by itself is left out of both: tensors of a few bytes, such
as counts of steps, which optimizers keep on the host; convolutions, dropout and fused
attention, whose kernels have other results on a GPU; RAdam, whose sixth step has more
temporaries than those before, which a dry run of two iterations does not see.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import dry_run

# Tensors that are counted have more bytes.
SMALL_BYTES = 16
_ROUNDS = 8
_FAMILIES = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam",
    "Adadelta", "Rprop", "ASGD", "Adafactor",
)  # fmt: skip


class CountedStorages(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of storages that operations have returned and that live.

    Attributes:
        bytes, peak_bytes: Now, and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._living: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                for part in _parts(leaf):
                    self._add(part.untyped_storage())
        return results

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._living or size <= SMALL_BYTES:
            return

        def release(_: Any) -> None:
            del self._living[key]
            self.bytes -= size

        self._living[key] = weakref.ref(storage, release)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that have the memory of a tensor: of a sparse one, indices and
    values."""
    is_sparse = tensor.layout is torch.sparse_coo
    return [tensor._indices(), tensor._values()] if is_sparse else [tensor]


class Attention(nn.Module):
    """Attention of one head by products of matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        output: torch.Tensor = self.output(scores.softmax(-1) @ v)
        return output


class Residual(nn.Module):
    """A module beside its input, which is computed again in the backward if it is
    `checkpointed`."""

    def __init__(self, module: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.module, self.checkpointed = module, checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        if self.checkpointed:
            return x + checkpoint(self.module, x, use_reentrant=False)
        return x + self.module(x)


class RandomJob:
    """A training loop that a seed decides; `run(device)` runs it.

    Attributes:
        kind: The name of the loop.
        iterations: Iterations of a dry run that see the whole job.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.kind = self._dice.choice(sorted(_LOOPS))
        self._seed = seed
        self.iterations = 99 if self.kind == "freezing" else 2

    def run(self, device: str) -> None:
        """Run the job."""
        self._dice.seed(self._seed + 1)
        torch.manual_seed(self._seed)
        _LOOPS[self.kind](Parts(self._dice, device))


class Parts:
    """Random parts of a training loop on a device."""

    def __init__(self, dice: random.Random, device: str) -> None:
        self.dice, self.device = dice, device
        self.width, self.batch = 8 * dice.randint(2, 12), dice.randint(2, 24)
        self.accumulated = dice.choice((1, 1, 2, 3))
        self.to_none = dice.random() < 0.8
        self.clips = dice.random() < 0.4

    def model(self, inputs: int = 0, outputs: int = 0) -> nn.Module:
        """Return a model from so many features to so many; 0: the width."""
        width, dice = self.width, self.dice
        layers: list[nn.Module] = [nn.Linear(inputs or width, width)]
        for _ in range(dice.randint(1, 4)):
            inner = width * dice.randint(1, 4)
            activation = dice.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU))
            block: nn.Module = nn.Sequential(
                nn.Linear(width, inner, bias=dice.random() < 0.7),
                activation(),
                nn.Linear(inner, width),
            )
            if dice.random() < 0.3:
                block = Attention(width)
            if dice.random() < 0.6:
                block = Residual(block, checkpointed=dice.random() < 0.3)
            layers.append(block)
            if dice.random() < 0.4:
                layers.append(nn.LayerNorm(width))
        return nn.Sequential(*layers, nn.Linear(width, outputs or width)).to(
            self.device
        )

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return an optimizer."""
        name = self.dice.choice(_FAMILIES)
        options: dict[str, Any] = {"foreach": self.dice.random() < 0.5, "lr": 1e-3}
        if name == "SGD":
            options |= {"momentum": self.dice.choice((0, 0.9))}
        if name == "Adam":
            options |= {"amsgrad": self.dice.random() < 0.3}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            list(parameters), **options
        )
        return optimizer

    def features(self, *shape: int) -> torch.Tensor:
        """Return random features, by default a batch of rows of the width."""
        return torch.randn(*(shape or (self.batch, self.width)), device=self.device)

    def update(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """Step once with the gradients of what `loss` returns, accumulated."""
        for _ in range(self.accumulated):
            (loss() / self.accumulated).backward()
        if self.clips:
            parameters = optimizer.param_groups[0]["params"]
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.to_none)


def _train(parts: Parts) -> None:
    """Supervised training, with an evaluation between the rounds in some jobs."""
    classes = parts.dice.randint(2, 40)
    model = parts.model(outputs=classes)
    optimizer = parts.optimizer(model.parameters())
    average = copy.deepcopy(model) if parts.dice.random() < 0.3 else None
    evaluates = parts.dice.random() < 0.3

    def loss() -> Any:
        targets = torch.randint(classes, (parts.batch,), device=parts.device)
        return F.cross_entropy(model(parts.features()), targets)

    for _ in range(_ROUNDS):
        parts.update(optimizer, loss)
        if average is not None:
            _follow(average, model)
        if evaluates:
            with torch.no_grad():
                model(parts.features(2 * parts.batch, parts.width)).argmax(-1)


def _train_parts(parts: Parts) -> None:
    """Several optimizers for parts of a model, which step one after another."""
    model = parts.model()
    children = [child for child in model.children() if list(child.parameters())]
    optimizers = [parts.optimizer(child.parameters()) for child in children]
    every = [parts.dice.choice((1, 1, 1, 2)) for _ in optimizers]
    for number in range(1, _ROUNDS + 1):
        for _ in range(parts.accumulated):
            model(parts.features()).square().mean().backward()
        for optimizer, period in zip(optimizers, every, strict=True):
            if number % period == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=parts.to_none)


def _train_adversaries(parts: Parts) -> None:
    """A generator and a critic, in any order, with several steps of the critic."""
    latent = parts.dice.randint(4, 64)
    generator, critic = parts.model(inputs=latent), parts.model(outputs=1)
    optimizers = [parts.optimizer(each.parameters()) for each in (generator, critic)]
    critic_steps = parts.dice.choice((1, 1, 2, 5))
    rare = critic_steps > 1 and parts.dice.random() < 0.5

    def criticize() -> Any:
        with torch.no_grad():
            made = generator(parts.features(parts.batch, latent))
        return critic(made).mean() - critic(parts.features()).mean()

    def generate() -> Any:
        return -critic(generator(parts.features(parts.batch, latent))).mean()

    if rare:
        for number in range(1, 4 * critic_steps + 1):
            parts.update(optimizers[1], criticize)
            if number % critic_steps == 0:
                parts.update(optimizers[0], generate)
        return
    generator_first = parts.dice.random() < 0.5
    for _ in range(_ROUNDS):
        if generator_first:
            parts.update(optimizers[0], generate)
        for _ in range(critic_steps):
            parts.update(optimizers[1], criticize)
        if not generator_first:
            parts.update(optimizers[0], generate)


def _train_policy(parts: Parts) -> None:
    """An actor and a critic: rollouts without gradients, then epochs of parts of them,
    with one optimizer or two."""
    actions = parts.dice.randint(2, 9)
    actor, critic = parts.model(outputs=actions), parts.model(outputs=1)
    shared = parts.dice.random() < 0.4
    modules = [nn.ModuleList([actor, critic])] if shared else [actor, critic]
    optimizers = [parts.optimizer(module.parameters()) for module in modules]
    steps, epochs = parts.dice.randint(2, 5), parts.dice.randint(1, 3)
    discrete = parts.dice.random() < 0.5

    def policy(states: torch.Tensor) -> Any:
        outputs = actor(states)
        return Categorical(logits=outputs) if discrete else Normal(outputs, 1.0)

    for _ in range(4):
        states, chosen, logs = [], [], []
        with torch.no_grad():
            for _ in range(steps):
                states.append(parts.features())
                distribution = policy(states[-1])
                chosen.append(distribution.sample())
                logs.append(distribution.log_prob(chosen[-1]))
        all_states, all_chosen = torch.cat(states), torch.cat(chosen)
        all_logs, returns = torch.cat(logs), parts.features(steps * parts.batch)
        for _ in range(epochs):
            ratio = (policy(all_states).log_prob(all_chosen) - all_logs).exp()
            advantages = returns - critic(all_states).flatten()
            weights = advantages.detach() if discrete else 1.0
            losses = [
                -(ratio.mean() * 1.0 + 0 * ratio.sum()),
                advantages.square().mean(),
            ]
            if discrete:
                losses[0] = -(ratio * weights).mean()
            sum(losses).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=parts.to_none)


def _train_with_target(parts: Parts) -> None:
    """A network whose target follows it, with a memory of what was seen."""
    model = parts.model()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = parts.optimizer(model.parameters())
    memory: list[torch.Tensor] = [parts.features() for _ in range(_ROUNDS)]

    def loss() -> Any:
        seen = parts.dice.choice(memory)
        return F.smooth_l1_loss(model(seen), target(seen))

    for _ in range(_ROUNDS):
        parts.update(optimizer, loss)
        _follow(target, model)


def _freeze_parts(parts: Parts) -> None:
    """Training in which layers are frozen, or begin to train, under way."""
    model = parts.model()
    children = [child for child in model.children() if list(child.parameters())]
    thaws = parts.dice.random() < 0.5
    if thaws:
        children[0].requires_grad_(False)
    optimizer = parts.optimizer(model.parameters())
    for number in range(_ROUNDS):
        if number == _ROUNDS // 2:
            children[0].requires_grad_(thaws)
        parts.update(optimizer, lambda: model(parts.features()).square().mean())


def _follow(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mean, parameter in zip(
            average.parameters(), model.parameters(), strict=True
        ):
            mean.lerp_(parameter, 0.1)


_LOOPS: dict[str, Callable[[Parts], None]] = {
    "supervised": _train,
    "parts": _train_parts,
    "adversaries": _train_adversaries,
    "policy": _train_policy,
    "target": _train_with_target,
    "freezing": _freeze_parts,
}


def eager_peak_bytes(job: RandomJob) -> int:
    """Return the peak of an eager run on the CPU."""
    with CountedStorages() as storages:
        job.run("cpu")
    return storages.peak_bytes


def dry_run_peak_bytes(job: RandomJob) -> int:
    """Return the peak of a dry run."""
    # no workspaces of cuBLAS, which a CPU does not have
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    run, _ = dry_run(lambda: job.run("cuda"), job.iterations)
    changes = []
    for block in run.memory.blocks:
        if block.size > SMALL_BYTES:
            changes.append((block.start_ns, block.size))
            if block.end_ns is not None:
                changes.append((block.end_ns, -block.size))
    total = peak = 0
    for _, change in sorted(changes):
        total += change
        peak = max(peak, total)
    return peak


def peaks(seed: int) -> tuple[str, int, int]:
    """Return the kind of a job, and its peaks in an eager run and in a dry run."""
    job = RandomJob(seed)
    eager, dry = (
        run_forked(lambda function=function: function(job))
        for function in (eager_peak_bytes, dry_run_peak_bytes)
    )
    return job.kind, eager, dry


def main(first: int, last: int) -> int:
    """Print the jobs whose peaks differ, and return their number."""
    different = 0
    for seed in range(first, last):
        kind, eager, dry = peaks(seed)
        if eager != dry:
            different += 1
            print(f"{seed} {kind}: eager {eager:,} B, dry run {dry:,} B")
    print(f"{different} of {last - first} differ")
    return different


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
