"""The training of a random job, with ebbtide or without."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.interleave.engine.rules import find_rule
from tests.interleave.engine.grid.devices import GridDevice
from tests.interleave.engine.grid.job import Job
from tests.interleave.engine.grid.models import VOCABULARY, Net, precision
from tests.interleave.engine.grid.reference import ReferenceOptimizer
from tests.interleave.engine.training import MACHINE

Results = list[tuple[str, torch.Tensor]]
# The rule of parameters that are no matrices, where the rule of the job is for
# matrices.
_RULE_OF_VECTORS = "adamw"
_HOST_BUDGET_BYTES = 2e5


class Training:
    """A job that is trained: plainly, or with ebbtide.

    Attributes:
        results: Names and values of what the job has read so far.
        spare: Parameters that are in no group yet.
        saved: State dicts of the model and of the optimizer; None before they are
            saved.
        decided: Numbers of updates after each interrupted step with ebbtide, which the
            plain job follows.
    """

    def __init__(self, job: Job, is_plain: bool, decided: list[int]) -> None:
        self.job, self.is_plain, self.decided = job, is_plain, decided
        self.results: Results = []
        torch.manual_seed(job.seed)
        random.seed(job.seed)
        np.random.seed(job.seed)
        self.net = Net(
            job.kinds,
            tied=job.tied,
            reads_head=job.reads_head,
            checkpoints=job.checkpoints,
            skips=job.skips,
            frozen=job.frozen,
            adapted=job.adapted,
        ).to(job.device, job.dtype)
        self.spare = list(self.net.layers[-1].parameters()) if job.spare else []
        self.rank = 0 if job.ranks is None else dist.get_rank()
        self.tokens = torch.Generator().manual_seed(job.seed + 1000 * self.rank)
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None
        # What the job keeps of its model: views, twins and averages.
        self.references: dict[str, Any] = {}
        self.device: GridDevice | None = None
        self.storage: str | None = None
        # Layers that were copied to the device, and copies that must not be.
        self.copied: set[int] = set()
        self.wrong_copies = 0
        has_scaler = job.clipping == "scaler"
        self.scaler = (
            torch.amp.GradScaler(job.device, init_scale=1024.0, growth_interval=3)
            if has_scaler
            else None
        )
        self.call: nn.Module = (
            self.net if job.ranks is None else parallel(self.net, job.ranks)
        )
        self.scheduler: Any = None

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def record(self, name: str, value: torch.Tensor | float) -> None:
        self.results.append(
            (name, local_shard(torch.as_tensor(value)).detach().cpu().clone())
        )

    def loss(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of the next batch, or of these tokens."""
        if tokens is None:
            lengths = self.job.lengths
            length = lengths[
                int(torch.randint(len(lengths), (), generator=self.tokens))
            ]
            tokens = torch.randint(VOCABULARY, (length,), generator=self.tokens)
        with precision(self.job.autocast, self.job.device):
            return self._called(tokens.to(self.job.device))

    def _called(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.job.call == "forward":
            return self.call.forward(tokens)
        if self.job.call == "functional":
            return torch.func.functional_call(
                self.call, dict(self.net.named_parameters()), tokens
            )
        loss = self.call(tokens)
        if self.job.call == "penalty":
            for param in self.params:
                loss = loss + 1e-3 * param.float().square().sum()
        return loss

    def backward(self, step: int = 0) -> None:
        """Compute the gradients of a step."""
        count = self.job.accumulation[step % len(self.job.accumulation)]
        for number in range(1, count + 1):
            if self.job.syncs_last:
                set_sync(self.call, number == count)
            self.backward_once()

    def backward_once(self) -> None:
        loss = self.loss()
        self.record("loss", loss)
        if self.job.evaluates:
            self.evaluate(self.call, "evaluation between forward and backward")
        scaled = (
            self.scaler.scale(loss)
            if self.scaler is not None
            else self.optimizer.scale(loss)
        )
        scaled.backward(retain_graph=self.job.twice)
        if self.job.twice:
            scaled.backward()

    def step(self) -> None:
        """Update the parameters."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.job.clipping is not None:
            nn.utils.clip_grad_norm_(self.params, 0.3)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()

    def evaluate(self, model: nn.Module, name: str) -> None:
        """Record the loss of a model that is evaluated."""
        model.eval()
        with torch.no_grad(), precision(self.job.autocast, self.job.device):
            self.record(name, model(torch.arange(6, device=self.job.device)))
        model.train()

    def record_state(self) -> None:
        """Record the state of the optimizer."""
        for number, row in enumerate(self.state_rows()):
            self.record(f"state row {number}", row)

    def state_rows(self) -> list[torch.Tensor]:
        """Return masters and moments of all parameters that have them, flat, in the
        order of memory."""
        if isinstance(self.optimizer, ReferenceOptimizer):
            return self.optimizer.rows()
        states = self.optimizer.state_dict()["state"]
        rules: dict[Any, Any] = {}
        params: list[Any] = []
        for group in self.optimizer.param_groups:
            rule = find_rule(group.get("rule", self.job.rule)).saved
            for param in group["params"]:
                rules[param] = (
                    rule.without_masters if param.dtype == torch.float32 else rule
                )
            params += group["params"]
        rows = []
        for number, param in enumerate(params):
            if number in states:
                rows += [states[number][name] for name in rules[param].row_names]
        return [_in_memory_order(row) for row in rows]

    def open_optimizer(self, groups: list[dict[str, Any]], policy: str) -> None:
        """Make an optimizer of some groups."""
        self.optimizer = self._optimizer(groups, policy)
        if self.job.schedules:
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def _optimizer(self, groups: list[dict[str, Any]], policy: str) -> Any:
        job = self.job
        options: dict[str, Any] = {
            "max_grad_norm": job.max_grad_norm,
            "loss_scale": job.loss_scale,
            **dict(job.hyperparameters),
        }
        # Streamed weights are on the host, others on the GPU: an optimizer of ebbtide
        # takes one of both.
        if self.is_plain or (job.device == "cuda" and job.weights is not None):
            return ReferenceOptimizer(groups, job.rule, **options)
        if job.memory_budget is not None:
            options["memory_budget"] = job.memory_budget
        if self.storage is not None:
            options |= {
                "storage": self.storage,
                "host_memory_budget": _HOST_BUDGET_BYTES,
            }
        if job.overlap in ("forward", "both", "auto"):
            options["model"] = self.net
        return InterleavedOptimizer(
            groups,
            job.rule,
            policy=policy,
            machine=MACHINE,
            subgroup_params=job.subgroup_params,
            gradients=job.gradients,
            overlap=job.overlap,
            device=self.device,
            threads=1,
            **options,
        )

    def groups(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        """Return the groups of some parameters by their rules."""
        groups: dict[str, dict[str, Any]] = {}
        for param in params:
            rule = self._rule(param)
            own = (
                {"params": []}
                if rule == self.job.rule
                else {"params": [], "rule": rule}
            )
            groups.setdefault(rule, own)["params"].append(param)
        return list(groups.values())

    def _rule(self, param: nn.Parameter) -> str:
        """Return the first rule that takes a parameter: that for matrices takes no
        others."""
        rules = [self.job.rule, _RULE_OF_VECTORS]
        is_last = any(param is one for one in self.net.layers[-1].parameters())
        if self.job.second_rule is not None and is_last:
            rules.insert(0, self.job.second_rule)
        return next(
            rule
            for rule in rules
            if param.dim() == 2 or find_rule(rule).whole_update is None
        )

    def open(self, stack: ExitStack) -> None:
        """Move layers and make the optimizer; the end of the stack closes them."""
        job = self.job
        if not self.is_plain:
            if job.device == "cpu":
                self.device = stack.enter_context(
                    GridDevice.opened(job.seed, job.rates, job.jitter)
                )
                self.device.watch = self._watch_copies
            self.storage = (
                stack.enter_context(tempfile.TemporaryDirectory())
                if job.storage
                else None
            )
            self._move_layers(stack)
        if any(edit.kind == "scripted twin" for edit in job.edits):
            self.references["script"] = torch.jit.script(nn.Sequential(self.net.head))
        spare = set(self.spare)
        params = [
            param for param in self.params if param not in spare and param.requires_grad
        ]
        self.open_optimizer(self.groups(params), job.policy)
        stack.callback(lambda: self.optimizer.close())
        if job.compiled is not None:
            self.call = torch.compile(self.net, backend=job.compiled)

    def _move_layers(self, stack: ExitStack) -> None:
        # Here, so that jobs run without the feature.
        from ebbtide.features.layers.engine import moving
        from ebbtide.interleave import move_layers, offload_activations, stream_weights
        from tests.features.layers.random_planner import RandomPlanner

        job, is_random = self.job, self.job.activations == "random"
        activations, budget = (
            ("auto", 1e9) if is_random else (job.activations, job.activations_budget)
        )
        weights = {"weights": job.weights, "memory_budget": job.weights_budget}
        calls: list[Any] = []
        if job.weights is not None:
            calls.append(partial(stream_weights, **weights))
        if job.activations is not None:
            calls.append(
                partial(
                    offload_activations, activations=activations, memory_budget=budget
                )
            )
        if job.moves == "one call" and len(calls) == 2:
            budgets = [one for one in (job.weights_budget, budget) if one is not None]
            weights["memory_budget"] = sum(budgets) if budgets else None
            calls = [partial(move_layers, activations=activations, **weights)]
        elif job.moves == "activations first":
            calls.reverse()
        elif job.moves == "twice":
            calls *= 2
        for call in calls:
            moved = stack.enter_context(call(self.net, device=self.device))
        if is_random:
            planner = RandomPlanner(
                random.Random(10 * job.seed + self.rank), is_limited=False
            )
            planner.moved = moved
            before = moving.plan_orders
            stack.callback(setattr, moving, "plan_orders", before)
            moving.plan_orders = planner.plan

    def _watch_copies(
        self, direction: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Count copies of adapters to the device, and those to frozen weights on the
        host."""
        # Looking at late parameters is no use of them.
        with torch._C.DisableTorchFunctionSubclass():
            self._count_copies(direction, pairs)

    def _count_copies(
        self, direction: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        ends = {
            (source if direction == "h2d" else target).data_ptr()
            for source, target in pairs
        }
        layers = {
            number: [*self.net.layers[number].parameters()]
            for number, _ in enumerate(self.net.layers)
        }
        if direction == "h2d":
            copied = [
                number
                for number, params in layers.items()
                if any(one.data_ptr() in ends for one in params)
            ]
            # A layer may occur twice.
            self.copied |= {id(self.net.layers[number]) for number in copied}
        if any(event.kind == "freeze" for event in self.job.edits):
            return
        is_trained = direction == "h2d"
        numbers = self.job.adapted if is_trained else self.job.frozen + self.job.adapted
        watched = [
            one
            for number in numbers
            for one in layers[number]
            if one.requires_grad == is_trained
        ]
        self.wrong_copies += any(one.data_ptr() in ends for one in watched)

    def record_copies(self) -> None:
        """Record what copies show of the layers that move."""
        _, _, count = (self.job.weights or "").partition(":")
        self.record("wrong copies", self.wrong_copies)
        self.record(
            "more layers than are to move",
            bool(count) and len(self.copied) > int(count),
        )


def set_sync(model: Any, is_synced: bool) -> None:
    """Let the next backward reduce gradients over ranks, or not, as the context
    `no_sync` of DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = is_synced
    else:
        model.set_requires_gradient_sync(is_synced)


def parallel(net: Net, kind: str) -> nn.Module:
    """Return a model that is replicated or sharded on all ranks."""
    if kind.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(
            net,
            gradient_as_bucket_view=kind == "ddp views",
            find_unused_parameters=kind == "ddp unused",
        )
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),))
    }
    if kind == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in net.layers:
        fully_shard(
            layer, reshard_after_forward=kind in ("resharded", "prefetched"), **options
        )
    if kind == "prefetched":
        for layer, following in pairwise(net.layers):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return fully_shard(net, **options)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_shard(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@contextmanager
def deterministic() -> Iterator[None]:
    """Let sums have one order: with one thread, scripted code that is not fused after
    some calls, and evaluations of torch's transformer layers without kernels of their
    own, which no layer with hooks has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.jit.optimized_execution(False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.set_num_threads(threads)
