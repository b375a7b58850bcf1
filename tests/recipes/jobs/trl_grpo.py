"""Train Qwen2.5 0.5B with GRPO, as the quick start of TRL does; the reward counts unique words."""

from datasets import load_dataset
from trl import GRPOTrainer


def reward_unique_words(completions, **kwargs):
    return [float(len(set(completion[-1]["content"].split()))) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_unique_words,
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()
