"""Train a small, randomly initialised GPT-2 with the Hugging Face Trainer, its
optimizer state offloaded by ebbtide.

    pip install 'ebbtide[transformers]'
    python examples/train_hf.py --steps 20

Only the argument `optimizers=` and the callback differ from a usual script; with
`--activations`, what layers save for their backward is offloaded, too. Under `ebbtide
profile -- python ...` the callback adds times of phases and memory to what the Trainer
logs.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ebbtide.interleave import InterleavedAdamW, offload_activations
from ebbtide.profiler.callbacks import HuggingFaceCallback


class Counting(Dataset):
    """Sequences that count up from a random token, which a small model learns
    quickly."""

    def __init__(self, sequences: int, length: int, vocabulary: int) -> None:
        first = torch.randint(
            vocabulary, (sequences, 1), generator=torch.Generator().manual_seed(0)
        )
        self.tokens = (first + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--layers", type=int, default=2)
    flags.add_argument("--width", type=int, default=128)
    flags.add_argument(
        "--policy",
        default="adaptive",
        help="policy, as for `ebbtide replay`; default adaptive",
    )
    flags.add_argument(
        "--activations",
        type=float,
        help="bytes of device memory for what layers save; default no limit",
    )
    flags.add_argument(
        "--output",
        default="hf-output",
        help="output folder of the Trainer; default hf-output",
    )
    args = flags.parse_args()

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=256, n_positions=64, n_layer=args.layers, n_embd=args.width, n_head=4
    )
    model = GPT2LMHeadModel(shape)
    activations = (
        offload_activations(model, memory_budget=args.activations)
        if args.activations
        else None
    )
    training = TrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=max(1, args.steps // 5),
        save_strategy="no",
        report_to="none",
    )
    optimizer = InterleavedAdamW(
        model.parameters(), lr=training.learning_rate, policy=args.policy
    )
    trainer = Trainer(
        model,
        training,
        train_dataset=Counting(512, 64, 256),
        optimizers=(optimizer, None),
    )
    HuggingFaceCallback.add_to(trainer)
    trainer.train()
    if activations is not None:
        print("activations:", ", ".join(map(" ".join, activations.choices.items())))


if __name__ == "__main__":
    main()
