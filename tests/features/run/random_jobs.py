"""Random jobs, each from a seed, that train as unmodified jobs do."""

from __future__ import annotations

import copy
import io
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn

from tests.features.run.random_models import ROWS, WIDTH, RandomModel

Optimizer = torch.optim.Optimizer
SGD = torch.optim.SGD


@dataclass
class Outcome:
    """The results of a job.

    Attributes:
        events: The names of the random events, for a failure's message.
        error: The type of the exception that ended the job; None if there is none.
    """

    losses: list[float] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    error: type[BaseException] | None = None
    exception: BaseException | None = None


class RandomJob:
    """A job whose decisions depend on its seed alone, never on values.

    With `other_kernels` torch's fused kernel updates instead of its plain one.
    """

    def __init__(self, seed: int, other_kernels: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        torch.manual_seed(seed)
        self.model = RandomModel(self.random)
        self.outcome = Outcome()
        self._other_kernels = other_kernels
        self._options: dict[str, Any] = {}
        self.optimizers: list[Optimizer] = []
        self.schedules: list[Any] = []
        self.scaler: Any = None
        self.micro_steps = 1
        self.zeroes: bool | None = True
        self.clips = self.uses_closure = False

    def run(self) -> Outcome:
        """Train, and return what came out."""
        outcome = self.outcome
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._prepare()
                for number in range(self.random.randint(4, 9)):
                    torch.manual_seed(1000 * self.seed + number)
                    self._iterate(number)
                self._read_states()
        except Exception as error:
            outcome.error, outcome.exception = type(error), error
        outcome.params = [one.detach().clone() for one in self.model.parameters()]
        return outcome

    def _prepare(self) -> None:
        random = self.random
        for param in self.model.parameters():
            if random.random() < 0.08:
                param.requires_grad_(False)
        self._options = self._random_options()
        changes_late = random.random() < 0.1
        params = [one for one in self.model.parameters() if one is not self.model.spare]
        if random.random() < 0.2 and len(params) > 2:
            self.optimizers = [
                self._make(params[::2]),
                self._make(params if random.random() < 0.2 else params[1::2]),
            ]
        else:
            self.optimizers = [self._make(params)]
        if changes_late:
            self._event("moved")
            self.model.to(random.choice([torch.bfloat16, torch.float32]))
        self.micro_steps = random.choice([1, 1, 2, 3])
        self.zeroes = random.choice([True, True, True, False, None])
        self.clips = random.random() < 0.3
        self.uses_closure = random.random() < 0.15
        if random.random() < 0.2 and not self.uses_closure:
            self._event("scaler")
            self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        self._add_schedule()

    def _event(self, name: str) -> None:
        self.outcome.events.append(name)

    def _random_options(self) -> dict[str, Any]:
        random = self.random
        kinds = [torch.optim.AdamW, torch.optim.AdamW, torch.optim.Adam, SGD]
        kind = random.choice(kinds)
        options: dict[str, Any] = {"kind": kind, "lr": random.choice([1e-2, 1e-3])}
        options["weight_decay"] = random.choice([0.0, 0.01, 0.1])
        if kind is SGD:
            options["momentum"] = random.choice([0.0, 0.0, 0.9, 0.5])
            options["dampening"] = random.choice([0.0, 0.0, 0.3])
            if options["momentum"] and not options["dampening"]:
                options["nesterov"] = random.random() < 0.5
        else:
            options["betas"] = random.choice([(0.9, 0.999), (0.8, 0.9), (0.0, 0.99)])
            options["eps"] = random.choice([1e-8, 1e-6])
            options["amsgrad"] = random.random() < 0.04
            if random.random() < 0.1:
                options["lr"] = torch.tensor(options["lr"])
        options["maximize"] = random.random() < 0.04
        kernel = random.choice([None, None, "foreach", "fused"])
        if kernel == "foreach" and not isinstance(options["lr"], torch.Tensor):
            options["foreach"] = True
        if kernel == "fused":
            options["fused"] = True
        return options

    def _make(self, params: list[Any]) -> Optimizer:
        """Return an optimizer of the job's kind with one group or several."""
        options = dict(self._options)
        kind = options.pop("kind")
        if self._other_kernels:
            options.pop("foreach", None)
            options["fused"] = not options.get("fused")
            if not options["fused"]:
                options["foreach"] = not isinstance(options["lr"], torch.Tensor)
        count = self.random.choice([1, 1, 2])
        if count == 1 or len(params) < 2:
            return one_of(kind, params, options)
        groups: list[dict[str, Any]] = [
            {"params": params[:1], "weight_decay": 0.0},
            {"params": params[1:], "lr": 3e-3},
        ]
        return one_of(kind, groups, options)

    def _add_schedule(self) -> None:
        schedulers = torch.optim.lr_scheduler
        optimizer, name = self.optimizers[0], self.random.choice(SCHEDULES)
        if name == "step":
            self.schedules.append(schedulers.StepLR(optimizer, 2, 0.5))
        if name == "cosine":
            self.schedules.append(schedulers.CosineAnnealingLR(optimizer, 6))
        if name == "cycle":
            cycles = optimizer.param_groups[0].get("momentum") != 0
            self.schedules.append(
                schedulers.OneCycleLR(
                    optimizer, 2e-2, total_steps=20, cycle_momentum=cycles
                )
            )
        if name == "warmup":
            self.schedules.append(schedulers.LambdaLR(optimizer, lambda step: step / 4))

    def _loss(self) -> torch.Tensor:
        inputs = torch.randn(ROWS, WIDTH)
        if next(self.model.parameters()).dtype == torch.float64:
            inputs = inputs.double()
        outputs = self.model(inputs)
        return (outputs.float() - inputs.float()).square().mean()

    def _backward(self) -> torch.Tensor:
        loss = self._loss()
        kind = self.random.choice(["plain"] * 8 + ["retained", "penalty"])
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        if kind == "penalty":
            params = [one for one in self.model.parameters() if one.requires_grad]
            grads = torch.autograd.grad(
                loss, params, create_graph=True, allow_unused=True
            )
            used = [grad.square().sum() for grad in grads if grad is not None]
            scaled = scaled + 0.01 * sum(used)
        scaled.backward(retain_graph=kind == "retained")
        if kind == "retained":
            scaled.backward()
        self.outcome.losses.append(float(loss))
        return loss

    def _iterate(self, number: int) -> None:
        random = self.random
        optimizer = self.optimizers[number % len(self.optimizers)]
        if self.uses_closure:
            self._step_with_closure(optimizer)
        else:
            if self.zeroes is not None:
                optimizer.zero_grad(set_to_none=self.zeroes)
            if random.random() > 0.04:
                for _ in range(self.micro_steps):
                    self._backward()
            self._change_gradients(optimizer)
            self._step(optimizer)
        for schedule in self.schedules:
            schedule.step()
        if random.random() < 0.35:
            name = random.choice(list(EVENTS))
            self._event(f"{number} {name}")
            EVENTS[name](self, optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        if self.random.random() < 0.04:
            self._event("second step")
            optimizer.step()

    def _step_with_closure(self, optimizer: Optimizer) -> None:
        zeroes = bool(self.zeroes)

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=zeroes)
            return self._backward()

        loss: Any = optimizer.step(closure)
        self.outcome.losses.append(float(loss))

    def _change_gradients(self, optimizer: Optimizer) -> None:
        random = self.random
        grads = [one.grad for one in self.model.parameters() if one.grad is not None]
        has_scale = self.scaler is not None and bool(self.scaler._scale is not None)
        if has_scale and grads and random.random() < 0.3:
            self._event("overflow")
            random.choice(grads).mul_(float("inf"))
        if self.clips and grads and not grads[0].is_sparse:
            if has_scale:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=False)
        if random.random() < 0.12:
            name = random.choice(["zero", "none", "clone", "nan", "half", "strided"])
            self._event(f"gradient {name}")
            param = random.choice(list(self.model.parameters()))
            if param.grad is not None and not param.grad.is_sparse:
                _change_gradient(param, name)

    def _read_states(self) -> None:
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()
            self.outcome.layouts.append(layout(saved))
            self.outcome.states += [
                value.detach().to_dense().clone()
                for entry in saved["state"].values()
                for value in entry.values()
                if isinstance(value, torch.Tensor)
            ]


def one_of(kind: Any, params: list[Any], options: dict[str, Any]) -> Optimizer:
    """Return an optimizer of a kind."""
    made: Optimizer = kind(params, **options)
    return made


def _change_gradient(param: torch.Tensor, name: str) -> None:
    assert param.grad is not None
    if name == "zero":
        param.grad.zero_()
    if name == "none":
        param.grad = None
    if name == "clone":
        param.grad = param.grad.clone().mul_(0.5)
    if name == "nan":
        param.grad.fill_(float("nan"))
    if name == "half":
        param.grad.data.mul_(0.5)
    if name == "strided" and param.grad is not None and param.grad.dim() == 2:
        param.grad = param.grad.t().contiguous().t()


def layout(saved: dict[str, Any]) -> Any:
    """Return a state dict with the type, shape and strides of each tensor of state."""
    state = {
        name: {key: _described(key, value) for key, value in entry.items()}
        for name, entry in saved["state"].items()
    }
    kernels = {"foreach", "fused"}
    groups = [
        {key: type(value) for key, value in group.items() if key not in kernels}
        for group in saved["param_groups"]
    ]
    counts = [group["params"] for group in saved["param_groups"]]
    return list(saved), state, groups, counts


def _described(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # The first momentum of SGD has the strides of the gradient.
    strides = None if name == "momentum_buffer" else value.stride()
    return value.dtype, tuple(value.shape), strides, str(value.device)


def _write_params(job: RandomJob, optimizer: Optimizer) -> None:
    kind = job.random.choice(["in place", "data", "new data", "load"])
    with torch.no_grad():
        for param in job.model.parameters():
            if kind == "in place":
                param.mul_(0.9)
            if kind == "data":
                param.data.add_(0.01)
            if kind == "new data":
                param.data = param.data * 0.9
    if kind == "load":
        saved = {key: 0.9 * value for key, value in job.model.state_dict().items()}
        job.model.load_state_dict(saved)


def _moments(optimizer: Optimizer) -> list[tuple[dict[str, Any], str]]:
    names = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    return [
        (entry, name)
        for entry in optimizer.state.values()
        for name in names
        if entry.get(name) is not None
    ]


def _write_state(job: RandomJob, optimizer: Optimizer) -> None:
    kind = job.random.choice(["zero", "data", "numpy", "new", "step", "read"])
    job._event(kind)
    for entry, name in _moments(optimizer):
        value = entry[name]
        if kind == "zero":
            value.zero_()
        if kind == "data":
            value.data.mul_(0.25)
        if kind == "numpy" and value.dtype == torch.float32:
            value.numpy()[...] = 0.125
        if kind == "new":
            entry[name] = value * 0.25
        if kind == "step" and "step" in entry:
            entry["step"] += 3


def _remove_state(job: RandomJob, optimizer: Optimizer) -> None:
    kind = job.random.choice(["clear", "one", "replace"])
    job._event(kind)
    if kind == "clear":
        optimizer.state.clear()
    if kind == "one":
        optimizer.state.pop(optimizer.param_groups[0]["params"][0], None)
    if kind == "replace":
        optimizer.state = defaultdict(dict)


def _reload(job: RandomJob, optimizer: Optimizer) -> None:
    """Load a state dict, into the same optimizer or another one."""
    random = job.random
    saved = optimizer.state_dict()
    kind = random.choice(["copy", "file"])
    if kind == "copy":
        saved = copy.deepcopy(saved)
    else:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=random.random() < 0.5)
    target = optimizer
    if random.random() < 0.6:
        job._event("new")
        options = dict(job._options)
        kernels = {
            key: optimizer.param_groups[0].get(key) for key in ("foreach", "fused")
        }
        groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
        kind_of = options.pop("kind")
        target = kind_of(groups, **{**options, **kernels})
        job.optimizers[job.optimizers.index(optimizer)] = target
        job.schedules.clear()
    target.load_state_dict(saved)


def _copy(job: RandomJob, optimizer: Optimizer) -> None:
    """Go on with a copy of the model and its optimizers."""
    everything = job.model, job.optimizers, job.schedules
    if job.random.random() < 0.5:
        everything = copy.deepcopy(everything)
    else:
        job.schedules.clear()
        file = io.BytesIO()
        torch.save(everything, file)
        file.seek(0)
        everything = torch.load(file, weights_only=False)
    job.model, job.optimizers, job.schedules = everything


def _add_group(job: RandomJob, optimizer: Optimizer) -> None:
    spare = job.model.spare
    groups = [group for one in job.optimizers for group in one.param_groups]
    if not job.schedules and all(
        spare is not param for group in groups for param in group["params"]
    ):
        optimizer.add_param_group({"params": [spare], "lr": 0.05})


def _remove_params(job: RandomJob, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[-1]
    if len(group["params"]) > 1:
        optimizer.state.pop(group["params"][0], None)
        group["params"] = group["params"][1:]


def _freeze(job: RandomJob, optimizer: Optimizer) -> None:
    for param in job.model.parameters():
        if job.random.random() < 0.3:
            param.requires_grad_(not param.requires_grad)


def _change_options(job: RandomJob, optimizer: Optimizer) -> None:
    group = job.random.choice(optimizer.param_groups)
    kind = job.random.choice(["lr", "decay", "betas", "momentum", "rare"])
    job._event(kind)
    if kind == "lr":
        group["lr"] = job.random.choice([0.0, 0.02])
    if kind == "decay":
        group["weight_decay"] = job.random.choice([0.0, 0.2])
    if kind == "betas" and "betas" in group:
        group["betas"] = (0.7, 0.95)
    if kind == "momentum" and "momentum" in group:
        group["momentum"] = (
            job.random.choice([0.0, 0.7]) if not group["nesterov"] else 0.7
        )
    if kind == "rare":
        name = job.random.choice(["maximize", "eps", "amsgrad"])
        if name == "eps" and "eps" in group:
            group["eps"] = 1e-5
        if name == "maximize":
            group["maximize"] = not group["maximize"]
        if name == "amsgrad" and name in group and not group.get("fused"):
            group["amsgrad"] = True


def _change_type(job: RandomJob, optimizer: Optimizer) -> None:
    """Change the type of the model in the middle, as few jobs do."""
    if job.random.random() < 0.3:
        job.model.to(job.random.choice([torch.bfloat16, torch.float64, torch.float32]))


def _step_without_gradients(job: RandomJob, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


EVENTS = {
    "params": _write_params,
    "state": _write_state,
    "removed state": _remove_state,
    "reload": _reload,
    "copy": _copy,
    "group": _add_group,
    "removed": _remove_params,
    "freeze": _freeze,
    "options": _change_options,
    "type": _change_type,
    "empty step": _step_without_gradients,
}
SCHEDULES = ["none", "none", "step", "cosine", "cycle", "warmup"]
