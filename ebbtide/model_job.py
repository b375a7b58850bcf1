"""The job that trains a model, as `ebbtide dry-run --model` and `ebbtide plan --model`
have it: its settings, their defaults, and their names."""

from dataclasses import dataclass
from typing import Literal

from ebbtide.errors import UserError

Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw-8bit", "paged-adamw-8bit", "adafactor", "sgd"]
Precision = Literal["bf16", "bf16-mixed", "fp32"]
Loss = Literal["plain", "chunked"]
Strategy = Literal["ddp", "fsdp", "zero1", "zero2", "zero3", "offload"]

# Tokens whose logits a chunked loss has at a time.
CHUNK = 1024
ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "offload": 3}


@dataclass(frozen=True)
class ModelJob:
    """A job that trains a language model. Raises UserError if the settings make no
    sense together."""

    model: str  # A folder, a configuration file, or a name on the hub
    method: Method = "full"
    optimizer: Optimizer = "adamw"
    batch: int = 1  # Samples of a step on one rank
    sequence: int = 2048  # Tokens of a sample
    checkpointing: bool = False  # Whether layers are recomputed in the backward
    precision: Precision = "bf16"
    # Sharing of the job among ranks; None: one rank has all of it
    strategy: Strategy | None = None
    ranks: int = 1
    micro_steps: int = 1  # Forwards and backwards of a step
    loss: Loss = "plain"  # Chunked: the logits of some tokens at a time
    offloads_activations: bool = False  # To pinned memory of the host
    offloads_optimizer: bool = False  # State and update are on the CPU

    def __post_init__(self) -> None:
        stage = ZERO_STAGES.get(self.strategy or "")
        self._check_offload()
        if self.strategy in ("ddp", "fsdp") and self.ranks < 2:
            raise UserError(
                f"--strategy {self.strategy} is for several ranks: state them, as in "
                "--ranks 8"
            )
        if self.method == "qlora" and (self.strategy == "fsdp" or stage == 3):
            raise UserError(
                f"--strategy {self.strategy} shards weights, which qlora keeps whole: "
                "take ddp or zero2"
            )
        if stage and self.optimizer != "adamw":
            raise UserError(
                f"--strategy {self.strategy} runs DeepSpeed's AdamW: leave out "
                "--optimizer"
            )
        if stage and self.precision == "bf16-mixed":
            raise UserError(
                "DeepSpeed keeps fp32 copies of bf16 weights by itself: take "
                "--precision bf16"
            )
        if self.strategy == "fsdp" and self.optimizer not in ("adamw", "sgd"):
            raise UserError(
                f"--optimizer {self.optimizer} does not update sharded parameters: "
                "take adamw, or ddp"
            )

    def _check_offload(self) -> None:
        if self.offloads_optimizer and self.optimizer != "adamw":
            raise UserError(
                "--offload-optimizer updates by AdamW on the CPU: leave out "
                f"--optimizer {self.optimizer}"
            )
        if self.offloads_optimizer and self.strategy is not None:
            raise UserError(
                "--offload-optimizer is for one rank: take --strategy offload"
            )
        is_cast = self.precision == "bf16-mixed" and self.method == "full"
        if self.offloads_activations and is_cast:
            raise UserError(
                "--offload-activations would copy weights that autocast casts, too: "
                "take --precision bf16"
            )

    @property
    def summary(self) -> str:
        """The settings in few words."""
        tokens = f"{self.batch} x {self.sequence:,} tokens"
        if self.micro_steps > 1:
            tokens += f" x {self.micro_steps} micro-steps"
        parts = [self.method, self.precision, self.optimizer, f"{tokens} a step"]
        named = (
            (self.checkpointing, "checkpointing"),
            (self.loss == "chunked", "chunked loss"),
            (self.offloads_activations, "activations offloaded"),
            (self.offloads_optimizer, "optimizer offloaded"),
        )
        parts += [name for is_set, name in named if is_set]
        return ", ".join([*parts, self.strategy] if self.strategy else parts)

    @property
    def bytes_text(self) -> str:
        """The bytes of a trained parameter with its gradient and state, in words."""
        size = 4 if self.precision == "fp32" else 2
        if self.precision == "bf16-mixed":
            size = 4
        state = {
            "adamw": 2 * size,
            "sgd": size,
            "adafactor": 0,
        }.get(self.optimizer, 2)
        if self.strategy in ZERO_STAGES:
            state += 8 if size == 2 else 0
        return (
            f"{size} + {size} + {state} B a trained parameter (weight, gradient, state)"
        )
