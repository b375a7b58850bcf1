"""Draws random jobs over the grid of options."""

import random
from dataclasses import replace
from typing import Any

import torch

from ebbtide.interleave.engine.rules import RULES
from tests.interleave.engine.grid.edits import EDITS
from tests.interleave.engine.grid.faults import FAULTS
from tests.interleave.engine.grid.job import RANKS, Event, Job
from tests.interleave.engine.grid.models import ADAPTABLE, LAYERS, WRITERS

POLICIES = (
    "zero-offload",
    "pipelined",
    "twin-flow:0.4",
    "interleaved:2",
    "interleaved:3@0.6",
    "adaptive",
    "gpu-only",
)
OVERLAPPING = ("pipelined", "interleaved:2", "adaptive")
# Policies whose updates inside the backward are many.
SPECULATING = ("speculating", "speculating:3", "speculating:4,base=interleaved:2")
OVERLAPS = ("none", "forward", "backward", "both", "auto")
WEIGHTS = ("resident", "streamed", "auto")
MOVES = ("weights first", "activations first", "twice", "one call")
ACTIVATIONS = ("keep", "recompute", "offload", "recompute-offload", "auto", "random")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
# Layers of which torch.compile makes graphs.
COMPILED_LAYERS = {
    "residual",
    "norm",
    "outside of call",
    "experts",
    "nested",
    "read by linear, called never",
}
# Edits of gradients, which are between a backward and its step.
BEFORE_BACKWARD = ("resume", "batch without a step", "step without gradients")
AFTER_BACKWARD = (
    "more gradients",
    "failed backward",
    "drop gradient",
    "replace gradient",
)
# Bytes of layers that hold one of them at least, and a few.
BUDGETS = (None, 8e3, 2e4)
RATES = (None, None, 3e5, 2e6, 2e7)
# What all ranks do alike, on shards, too.
RANK_LAYERS = (
    "residual",
    "perceptron",
    "attention",
    "norm",
    "custom",
    "split",
    "batch norm",
    "twice",
)
RANK_EDITS = (
    *(
        "learning rate",
        "hyperparameters",
        "evaluate",
        "state",
        "all",
        "average",
        "more gradients",
    ),
    *("batch without a step", "step without gradients"),
)
HYPERPARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "adamw": {
        "betas": ((0.9, 0.999), (0.4, 0.5)),
        "weight_decay": (0.0, 0.1),
        "eps": (1e-8, 1e-6),
    },
    "adamw-bf16": {
        "betas": ((0.9, 0.999), (0.4, 0.5)),
        "weight_decay": (0.0, 0.1),
        "stochastic_rounding": (True, False),
    },
    "adamw-8bit": {"betas": ((0.9, 0.999), (0.4, 0.5)), "weight_decay": (0.0, 0.1)},
    "adamw-remainder": {
        "betas": ((0.9, 0.999), (0.4, 0.5)),
        "weight_decay": (0.0, 0.1),
        "eps": (1e-8, 1e-6),
    },
    "adamw-pure-bf16": {
        "betas": ((0.9, 0.999), (0.4, 0.5)),
        "weight_decay": (0.0, 0.1),
        "eps": (1e-8, 1e-6),
    },
    "adam": {
        "betas": ((0.9, 0.999), (0.4, 0.5)),
        "weight_decay": (0.0, 0.1),
        "eps": (1e-8, 1e-6),
    },
    "lion": {"betas": ((0.9, 0.99), (0.5, 0.4)), "weight_decay": (0.0, 0.1)},
    "muon": {
        "momentum": (0.0, 0.4, 0.95),
        "nesterov": (True, False),
        "weight_decay": (0.0, 0.1),
        "adjust_lr_fn": (None, "match_rms_adamw"),
    },
    "sgd": {
        "momentum": (0.0, 0.9),
        "weight_decay": (0.0, 0.1),
        "nesterov": (False, True),
        "dampening": (0.0, 0.3),
    },
}
HYPERPARAMETERS |= {
    f"{name}-pure-bf16": HYPERPARAMETERS[name] for name in ("adam", "sgd")
}


def draw_job(seed: int) -> Job:
    """Return the job of a seed."""
    draw = random.Random(seed)
    options = _model(draw)
    options |= _training(draw, options["dtype"])
    options |= _engine(draw, options) | _layers(draw)
    options |= _calls(draw, options)
    options |= _trained_layers(random.Random(f"layers {seed}"), options)
    return Job(seed=seed, **options)


def draw_rank_job(seed: int) -> Job:
    """Return the job of a seed for several ranks, which do the same collectives."""
    job, draw = draw_job(seed), random.Random(f"ranks {seed}")
    kind = draw.choice(RANKS)
    is_sharded = not kind.startswith("ddp")
    # Its statistics stay in fp32 where parameters are gathered in bfloat16, and torch
    # takes no mixed types.
    layers = [
        one for one in RANK_LAYERS if one != "batch norm" or kind != "mixed precision"
    ]
    kinds = [one if one in layers else draw.choice(layers) for one in job.kinds]
    # Replicas have no streamed gradients. Matrices of shards are updated as a whole,
    # and scales of 8 bits are padded.
    replica = {
        "gradients": draw.choice(("kept", "copied")),
        "overlap": "forward" if job.overlap != "none" else "none",
    }
    return replace(
        job,
        ranks=kind,
        kinds=tuple(kinds),
        rule="adamw" if is_sharded and job.rule == "adamw-8bit" else job.rule,
        second_rule=None,
        hyperparameters=(("lr", 0.01),),
        clipping=None,
        tied=False,
        frozen=(),
        adapted=(),
        reads_head=False,
        checkpoints=draw.choice((None, "plain")) if is_sharded else None,
        call="call",
        compiled=None,
        twice=False,
        spare=False,
        syncs_last=draw.random() < 0.4,
        lengths=(6,),
        edits=tuple(event for event in job.edits if event.kind in RANK_EDITS),
        faults=(),
        **({} if is_sharded else replica),
    )


def _model(draw: random.Random) -> dict[str, Any]:
    autocast = draw.random() < 0.15
    dtype = torch.float32 if autocast else draw.choice(DTYPES)
    # torch has no LSTM in half precision on the CPU.
    is_half = autocast or dtype != torch.float32
    choices = [kind for kind in LAYERS if kind != "lstm" or not is_half]
    kinds: list[str | int] = draw.choices(choices, k=draw.randint(2, 4))
    repeated = [number for number, kind in enumerate(kinds) if kind not in WRITERS]
    if repeated and draw.random() < 0.1:
        kinds.append(draw.choice(repeated))
    return {
        "kinds": tuple(kinds),
        "dtype": dtype,
        "autocast": autocast,
        "tied": draw.random() < 0.25,
        "reads_head": draw.random() < 0.25,
        "checkpoints": draw.choice((*[None] * 6, "plain", "reentrant")),
        "skips": draw.random() < 0.2,
        "twice": draw.random() < 0.1,
        "spare": draw.random() < 0.15,
        "lengths": draw.choice(((6,), (6,), (6, 9))),
        "accumulation": draw.choice(((1,), (1,), (2,), (1, 2, 2, 4, 1))),
        "steps": draw.randint(5, 8),
    }


def _training(draw: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    rules = sorted(
        RULES.keys() - ({"adamw-remainder"} if dtype != torch.bfloat16 else set())
    )
    rule = draw.choice(("adamw", "adamw", *rules))
    if dtype == torch.bfloat16 and draw.random() < 0.25:
        rule = "adamw-remainder"
    choices = HYPERPARAMETERS[rule]
    hyperparameters = {name: draw.choice(values) for name, values in choices.items()}
    hyperparameters["lr"] = draw.choice((1e-3, 1e-2, 0.1))
    loss_scale = draw.choice((None, None, 1024.0, "dynamic"))
    if hyperparameters.get("nesterov") and rule == "sgd":
        hyperparameters |= {"momentum": 0.9, "dampening": 0.0}
    return {
        "rule": rule,
        "second_rule": draw.choice((None, None, None, *rules)),
        "schedules": draw.random() < 0.15,
        "hyperparameters": tuple(hyperparameters.items()),
        "max_grad_norm": draw.choice((None, 0.5, 50.0)),
        "loss_scale": loss_scale,
        "edits": tuple(_edit(draw) for _ in range(draw.choice((0, 1, 1, 2, 3, 4)))),
        "faults": tuple(
            _fault(draw, loss_scale) for _ in range(draw.choice((0, 0, 1, 1, 2)))
        ),
    }


def _edit(draw: random.Random) -> Event:
    kind = draw.choice(list(EDITS))
    is_possible = kind not in BEFORE_BACKWARD
    follows = kind in AFTER_BACKWARD or (is_possible and draw.random() < 0.3)
    return Event(draw.randrange(1, 7), kind, draw.randrange(12), follows)


def _fault(draw: random.Random, loss_scale: float | str | None) -> Event:
    # Whether a step was done is not seen where infinite gradients skip it.
    excluded = "interrupted step" if loss_scale else "infinite"
    kind = draw.choice([kind for kind in FAULTS if kind != excluded])
    return Event(
        draw.randrange(1, 7),
        kind,
        draw.choice((draw.randrange(12), draw.randrange(600))),
    )


def _calls(draw: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Draw calls of the model that its layers and the engine take."""
    kinds, calls = set(options["kinds"]), {}
    if not kinds.intersection(WRITERS):
        calls = {"evaluates": draw.random() < 0.1}
    if not {"weights", "activations"}.intersection(options):
        calls["call"] = draw.choice(
            ("call", "call", "forward", "functional", "penalty")
        )
    if kinds <= COMPILED_LAYERS and draw.random() < 0.3:
        calls |= {
            "call": "call",
            "compiled": draw.choice(("eager", "aot_eager")),
            "checkpoints": None,
        }
    if (
        options["gradients"] != "streamed"
        and options["loss_scale"] is None
        and options["max_grad_norm"] is None
    ):
        # torch has no scaler of gradients in half precision.
        clipping = (
            (None, "norm")
            if options["dtype"] == torch.float16
            else (None, "norm", "scaler")
        )
        calls["clipping"] = draw.choice(clipping)
    return calls


def _engine(draw: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Draw options of the optimizer, of which few are refused."""
    gradients = draw.choice(("kept", "copied", "streamed"))
    policy = draw.choice(POLICIES if draw.random() < 0.5 else OVERLAPPING)
    speculates = gradients != "kept"
    overlaps = OVERLAPS if speculates else ("none", "forward", "auto")
    if speculates and draw.random() < 0.15:
        policy, overlaps = draw.choice(SPECULATING), ("backward", "both")
    return {
        "policy": policy,
        "gradients": gradients,
        "overlap": draw.choice(overlaps)
        if policy in OVERLAPPING + SPECULATING
        else "none",
        "storage": draw.random() < 0.1,
        "subgroup_params": draw.choice((40, 150, 400, 10**6)),
        "memory_budget": draw.choice((None, 4000.0, 1e9)),
        "rates": (draw.choice(RATES), draw.choice(RATES)),
        "jitter": draw.random() < 0.25,
    }


def _layers(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if draw.random() < 0.4:
        options |= {
            "weights": draw.choice(WEIGHTS),
            "weights_budget": draw.choice(BUDGETS),
        }
    if draw.random() < 0.55:
        options |= {
            "activations": draw.choice(ACTIVATIONS),
            "activations_budget": draw.choice(BUDGETS),
        }
    return options


def _trained_layers(draw: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Draw which layers are trained, which of them move, and the calls that move them.

    They have random numbers of their own, so that all else of a seed is as it was
    without them."""
    kinds = [kind for kind in options["kinds"] if isinstance(kind, str)]
    own: dict[str, Any] = {"moves": draw.choice(MOVES)}
    if options.get("weights") and draw.random() < 0.4:
        own["weights"] = f"streamed:{draw.randint(1, len(kinds))}"
    # The last layer may be in no group at first, or have another rule.
    numbers = range(len(kinds) - 1)
    if draw.random() < 0.35:
        is_prefix, count = draw.random() < 0.5, draw.randint(1, len(numbers))
        chosen = numbers[:count] if is_prefix else sorted(draw.sample(numbers, count))
        # These write to their weights, which go down then.
        own["frozen"] = tuple(
            number for number in chosen if kinds[number] not in WRITERS
        )
    if draw.random() < 0.35:
        frozen = own.get("frozen", ())
        own["adapted"] = tuple(
            one for one in numbers if kinds[one] in ADAPTABLE and one not in frozen
        )
    return own
