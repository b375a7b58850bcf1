"""Train BERT with Ray Train around the Trainer of transformers, as its guide does."""

from datasets import load_dataset
from ray.train import ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

NAME = "google-bert/bert-base-cased"


def train_func():
    dataset = load_dataset("Yelp/yelp_review_full")
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    tokenized = dataset.map(
        lambda rows: tokenizer(rows["text"], padding="max_length", truncation=True),
        batched=True,
    )
    model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=5)
    arguments = TrainingArguments(
        output_dir="test_trainer",
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
    )
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()


TorchTrainer(
    train_func, scaling_config=ScalingConfig(num_workers=2, use_gpu=True)
).fit()
